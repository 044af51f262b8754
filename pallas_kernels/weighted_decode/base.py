"""What all forms of the fused cluster-attention loop take and give."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Stands for -inf inside products and sums, where -inf would make NaN of differences; far below any logit.
EMPTY = -1e30

Feeds = Literal["both", "numerator", "denominator"]


class Sums(NamedTuple):
    """Both sums of attention, relative to exp(max). Where a row found no entry, max is at most `EMPTY` / 2 and the sums
    mean nothing."""

    max: Float[Array, "B H R"]  # float32
    num: Float[Array, "B H R D"]  # float32
    den: Float[Array, "B H R"]  # float32
    # float32, where they were asked for: what each entry adds to den is exp(logits - max). At most `EMPTY` / 2 where a
    # slot is not read.
    logits: Float[Array, "B H R S"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entries:
    """The entries that attention reads, S slots per kv head. Slots that no row reads must hold finite numbers."""

    keys: Float[Array, "B H S D"]  # float32, bfloat16, float16, int8 or float8
    values: Float[Array, "B H S D"] | None  # None where only the denominator is fed
    log_num: Float[Array, "B H S"] | None = None  # float32, added to the numerator's logits; None: zero
    log_den: Float[Array, "B H S"] | None = None  # float32, added to the denominator's; None: as log_num
    key_scale: Float[Array, "B H S"] | None = None  # float32 factors of quantised keys; None: one
    value_scale: Float[Array, "B H S"] | None = None
    # int32: the slots [start, stop) are read, by all rows [B] or by each row [B, R]; None: all slots.
    start: Int[Array, "B"] | Int[Array, "B R"] | None = None
    stop: Int[Array, "B"] | Int[Array, "B R"] | None = None
    feeds: Feeds = dataclasses.field(default="both", metadata={"static": True})


def compute_type(rows: Any, stored: Any) -> Any:
    """The type in which products of query rows with stored keys or values are taken: that of the rows for quantised
    entries, the wider of the two otherwise."""
    narrow = jnp.dtype(stored).itemsize == 1
    return jnp.dtype(rows) if narrow else jnp.promote_types(rows, stored)


class Occupied(NamedTuple):
    """Which slots are read: [start, stop), as `Entries` gives them, and [lowest, highest) by any row."""

    start: Int[Array, "B"] | Int[Array, "B R"]
    stop: Int[Array, "B"] | Int[Array, "B R"]
    lowest: Int[Array, "B"]
    highest: Int[Array, "B"]


def occupied(entries: Entries) -> Occupied:
    """The ranges of all rows, within the slots that there are; int32."""
    batch, _, slots, _ = entries.keys.shape
    whole = lambda bound, otherwise: jnp.full(batch, otherwise, jnp.int32) if bound is None else bound  # noqa: E731
    start = whole(entries.start, 0).astype(jnp.int32)
    stop = jnp.minimum(whole(entries.stop, slots).astype(jnp.int32), slots)
    lowest = start if start.ndim == 1 else jnp.min(start, axis=1)
    return Occupied(start, stop, lowest, stop if stop.ndim == 1 else jnp.max(stop, axis=1))


def merge_splits(sums: Sums) -> Sums:
    """From sums of every part of a head's slots [B, H, splits, ...] to one."""
    peak = jnp.max(sums.max, axis=2)
    factor = jnp.exp(sums.max - peak[:, :, None])
    return Sums(peak, jnp.sum(sums.num * factor[..., None], axis=2), jnp.sum(sums.den * factor, axis=2))
