"""What all forms of the fused cluster-attention loop take and give."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import packing

# Stands for -inf inside products and sums, where -inf would make NaN of differences; far below any logit.
EMPTY = -1e30

Feeds = Literal["both", "numerator", "denominator"]


class Partials(NamedTuple):
    """Both sums of attention over some entries, relative to exp(max). As kernels give them, where a row found no entry,
    max is at most `EMPTY` / 2 and the sums mean nothing."""

    max: Float[Array, "B H R"]  # float32
    num: Float[Array, "B H R D_v"]  # float32
    den: Float[Array, "B H R"]  # float32
    # float32, where they were asked for: what each entry adds to den is exp(logits - max). At most `EMPTY` / 2 where a
    # slot is not read.
    logits: Float[Array, "B H R S"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entries:
    """The entries that attention reads, S slots per kv head. Slots that no row reads must hold finite numbers."""

    # float32, bfloat16, float16, int8 or float8; or uint8, packed numbers (see `packing`), where there are bits.
    keys: Float[Array, "B H S D"]
    values: Float[Array, "B H S D_v"] | None  # None where only the denominator is fed
    log_num: Float[Array, "B H S"] | None = None  # float32, added to the numerator's logits; None: zero
    log_den: Float[Array, "B H S"] | None = None  # float32, added to the denominator's; None: as log_num
    key_scale: Float[Array, "B H S"] | None = None  # factors of quantised keys, of any float type; None: one
    value_scale: Float[Array, "B H S"] | None = None
    # int32: the slots [start, stop) are read, by all rows [B] or [B, 1], or [B, T] by the rows of each of T queries (of
    # one query they are neighbours); None: all slots.
    start: Int[Array, "B #T"] | Int[Array, "B"] | None = None
    stop: Int[Array, "B #T"] | Int[Array, "B"] | None = None
    # Which of the two sums the entries add to.
    feeds: Feeds = dataclasses.field(default="both", metadata={"static": True})
    # Logits l are capped softly, cap tanh(l / cap), before log-weights are added (Gemma 2); None: not at all.
    logit_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    # Of packed keys and values: 4, 3 or 2.
    key_bits: int | None = dataclasses.field(default=None, metadata={"static": True})
    value_bits: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def key_dim(self) -> int:
        """D."""
        return packing.unpacked_width(self.keys.shape[-1], self.key_bits)

    @property
    def value_dim(self) -> int | None:
        """D_v; None without values."""
        return None if self.values is None else packing.unpacked_width(self.values.shape[-1], self.value_bits)


def bounds_of_rows(entries: Entries, rows: int) -> Entries:
    """The entries with bounds [B] for all rows, or [B, R] for each, as kernels take them."""

    def of_rows(bound: Array | None) -> Array | None:
        if bound is None or bound.ndim == 1:
            return bound
        return bound[:, 0] if bound.shape[1] == 1 else jnp.repeat(bound, rows // bound.shape[1], axis=1)

    return dataclasses.replace(entries, start=of_rows(entries.start), stop=of_rows(entries.stop))


def refuse_unknown(entries: Entries) -> None:
    """Raises a NotImplementedError for what no kernel does yet."""
    if entries.logit_cap is not None:
        raise NotImplementedError(f"logit_cap={entries.logit_cap}: XLA caps logits")
    if entries.value_dim not in (None, entries.key_dim):
        raise NotImplementedError(f"values of {entries.value_dim} dimensions, keys of {entries.key_dim}")


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


def merge_sums(*sums: Partials) -> Partials:
    """From sums over the entries of several stores, one at least, to those over all of them, without logits; exact,
    associative and commutative up to rounding."""
    if len(sums) == 1:
        return sums[0]
    peak = functools.reduce(jnp.maximum, (one.max for one in sums))
    base = finite(peak)
    factors = [jnp.exp(one.max - base) for one in sums]
    num = sum(one.num * factor[..., None] for one, factor in zip(sums, factors, strict=True))
    den = sum(one.den * factor for one, factor in zip(sums, factors, strict=True))
    return Partials(peak, jnp.asarray(num), jnp.asarray(den))


def finite(peak: Float[Array, "..."]) -> Float[Array, "..."]:
    """A base that sums may stand relative to: exp(-inf - -inf) is NaN; where there is no entry any finite base gives
    the right sums, which are zero."""
    return jnp.where(jnp.isneginf(peak), 0.0, peak)


def merge_splits(sums: Partials) -> Partials:
    """From sums of every part of a head's slots [B, H, splits, ...] to one."""
    if sums.max.shape[2] == 1:
        return Partials(sums.max[:, :, 0], sums.num[:, :, 0], sums.den[:, :, 0])
    peak = jnp.max(sums.max, axis=2)
    factor = jnp.exp(sums.max - peak[:, :, None])
    return Partials(peak, jnp.sum(sums.num * factor[..., None], axis=2), jnp.sum(sums.den * factor, axis=2))
