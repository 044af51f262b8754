"""Segment: weighted entries that attention reads, the one form in which every policy shows its cache."""

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from kvjax.state import BATCH, HEAD_DIM, KV_HEADS, SLOTS, array, state, static


@state
class Segment:
    """Entries s that add exp(q.k_s / sqrt(D) + log_num_s) v_s to the numerator of attention and
    exp(q.k_s / sqrt(D) + log_den_s) to its denominator.

    A log-weight of -inf marks an empty slot. Slots outside the row's range [start, stop) are not read; they must hold
    finite numbers all the same, because backends may multiply them by zero.
    """

    keys: Float[Array, "B H_kv S D"] = array(BATCH, KV_HEADS, SLOTS, HEAD_DIM)
    # None only where the segment feeds the denominator alone.
    values: Float[Array, "B H_kv S D"] | None = array(BATCH, KV_HEADS, SLOTS, HEAD_DIM)
    # float32; None: every weight in the numerator is one.
    log_num: Float[Array, "B H_kv S"] | None = array(BATCH, KV_HEADS, SLOTS)
    # float32; None: the same as log_num.
    log_den: Float[Array, "B H_kv S"] | None = array(BATCH, KV_HEADS, SLOTS)
    # float32 factors of quantised storage; None: one.
    key_scale: Float[Array, "B H_kv S"] | None = array(BATCH, KV_HEADS, SLOTS)
    value_scale: Float[Array, "B H_kv S"] | None = array(BATCH, KV_HEADS, SLOTS)
    # int32; None: the range begins at 0 or ends at S. [B, T] where each of T queries sees a range of its own.
    start: Int[Array, "B"] | Int[Array, "B T"] | None = array(BATCH)
    stop: Int[Array, "B"] | Int[Array, "B T"] | None = array(BATCH)
    # float32. An entry that stands for several tokens has a value that varies with the query, because the query weighs
    # its tokens differently: to first order by slope q / sqrt(D), softly bounded by a norm of `slope_limit`, which is
    # about what so few tokens can give. The same for all entries of a head; None: values are what they are.
    slope: Float[Array, "B H_kv D D"] | None = array(BATCH, KV_HEADS, "value_dim", HEAD_DIM)
    slope_limit: Float[Array, "B H_kv"] | None = array(BATCH, KV_HEADS)
    # Which of the two sums the segment adds to.
    feeds: Literal["both", "numerator", "denominator"] = static()
    # Whether devices share the entries (`kvjax.sharding`): what they find of them is merged.
    in_parts: bool = static()


def segment(
    keys: Float[Array, "B H_kv S D"],
    values: Float[Array, "B H_kv S D"] | None,
    *,
    log_num: Float[Array, "B H_kv S"] | None = None,
    log_den: Float[Array, "B H_kv S"] | None = None,
    key_scale: Float[Array, "B H_kv S"] | None = None,
    value_scale: Float[Array, "B H_kv S"] | None = None,
    start: Int[Array, "B"] | Int[Array, "B T"] | None = None,
    stop: Int[Array, "B"] | Int[Array, "B T"] | None = None,
    slope: Float[Array, "B H_kv D D"] | None = None,
    slope_limit: Float[Array, "B H_kv"] | None = None,
    feeds: Literal["both", "numerator", "denominator"] = "both",
    in_parts: bool = False,
) -> Segment:
    """A checked `Segment`; what is left out is neutral.

    Raises:
        ValueError: for shapes that do not agree, values missing where the numerator is fed, a slope without its limit
            or where not both sums are fed.
    """
    batch, kv_heads, slots, _ = keys.shape
    if feeds not in ("both", "numerator", "denominator"):
        raise ValueError(f"feeds={feeds!r}; it must be 'both', 'numerator' or 'denominator'")
    if values is None and feeds != "denominator":
        raise ValueError(f"a segment that feeds {feeds!r} needs values")
    if values is not None and values.shape[:3] != keys.shape[:3]:
        raise ValueError(f"values have shape {values.shape}; [B, H_kv, S] must be that of the keys, {keys.shape[:3]}")
    weights = {"log_num": log_num, "log_den": log_den, "key_scale": key_scale, "value_scale": value_scale}
    for name, weight in weights.items():
        if weight is not None and weight.shape != (batch, kv_heads, slots):
            raise ValueError(f"{name} has shape {weight.shape}; it must be [B, H_kv, S] = {(batch, kv_heads, slots)}")
    for name, bound in {"start": start, "stop": stop}.items():
        if bound is not None and (bound.ndim > 2 or bound.shape[:1] != (batch,)):
            raise ValueError(f"{name} has shape {bound.shape}; it must be [B] or [B, T] with B = {batch}")
    if (slope is None) != (slope_limit is None) or (slope is not None and feeds != "both"):
        raise ValueError("a slope needs slope_limit, and a segment that feeds both sums")
    return Segment(
        keys, values, log_num, log_den, key_scale, value_scale, start, stop, slope, slope_limit, feeds, in_parts
    )


def segment_bytes(*segments: Segment) -> int:
    """Bytes that one pass of attention over the segments' buffers reads: all slots, whatever their occupancy."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(segments))
