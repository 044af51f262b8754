"""The entries that attention reads, as all implementations of `weighted_decode` take them."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import PreferXla
from pallas_kernels.quantized_array import QuantizedArray

# With this many queries per KV head or more, products are compute-bound: XLA is as fast as a kernel.
COMPUTE_BOUND_QUERIES = 64
# The arrays of `slot_arrays` that hold one number per slot.
PER_SLOT = ("log_num", "log_den", "key_scale", "value_scale")
SLOT_TILE = 8  # slots that a GPU copies together; stores of other sizes take XLA there


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entries:
    """S weighted entries per KV head.

    Entry s adds exp(logit_s + log_num_s) value_s to the numerator and exp(logit_s + log_den_s) to the denominator.

    Attributes:
        keys: [B, H, S, D], float32, bfloat16, float16 or quantized. Queries for quantized keys are given in the basis
            in which the keys were quantized. Slots outside the ranges must hold finite numbers.
        values: [B, H, S, D_v], likewise, or None for entries that contribute to the denominator only.
        log_num: Log-weights in the numerator, float32; None means 0.
        log_den: Log-weights in the denominator, float32; None means `log_num`. An entry with -inf contributes to the
            numerator only.
        start: First slot that is read, int32: [B] or [B, 1] for all queries, or [B, T] for T tokens, where each token's
            R / T queries are adjacent. None means 0.
        stop: Exclusive end of the slots that are read, int32, of the same shapes. None means S.
        logit_cap: Logits become cap * tanh(logit / cap) before log-weights are added (Gemma 2). None disables this.
    """

    keys: Float[Array, "B H S D"] | QuantizedArray
    values: Float[Array, "B H S D_v"] | QuantizedArray | None
    log_num: Float[Array, "B H S"] | None = None
    log_den: Float[Array, "B H S"] | None = None
    start: Int[Array, "B #T"] | Int[Array, "B"] | None = None
    stop: Int[Array, "B #T"] | Int[Array, "B"] | None = None
    logit_cap: float | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def slots(self) -> int:
        """S."""
        return self.keys.shape[2]

    @property
    def key_dim(self) -> int:
        """D."""
        return self.keys.shape[3]

    @property
    def value_dim(self) -> int | None:
        """D_v, or None without values."""
        return None if self.values is None else self.values.shape[3]

    @property
    def bits(self) -> dict[str, int | None]:
        """The bit widths of packed keys and values, None for one element per number."""
        stored = {"keys": self.keys, "values": self.values}
        return {name: x.bits if isinstance(x, QuantizedArray) else None for name, x in stored.items()}

    @property
    def slot_arrays(self) -> dict[str, Array]:
        """All arrays that have a slot axis, by name; scales are `key_scale` and `value_scale`."""
        arrays: dict[str, Array | None] = {"log_num": self.log_num, "log_den": self.log_den}
        for name, scale, x in (("keys", "key_scale", self.keys), ("values", "value_scale", self.values)):
            arrays |= {name: x.values, scale: x.scale} if isinstance(x, QuantizedArray) else {name: x}
        if self.values is None and self.log_den is not None:
            del arrays["log_num"]  # the numerator is not computed
        return {name: x for name, x in arrays.items() if x is not None}


def prepare(entries: Entries, queries: int) -> Entries:
    """Returns entries as kernels take them: with bounds [B] or [B, R], and without offsets.

    Args:
        entries: Entries with bounds of any allowed shape.

    Returns:
        The entries with bounds [B] where all queries share them, [B, R] otherwise.
    """

    def per_query(bound: Array | None) -> Array | None:
        """Returns `bound` with one number per sequence or per query."""
        if bound is None or bound.ndim == 1:
            return bound
        return bound[:, 0] if bound.shape[1] == 1 else jnp.repeat(bound, queries // bound.shape[1], axis=1)

    def without_offset(x: Any) -> Any:
        return dataclasses.replace(x, offset=None) if isinstance(x, QuantizedArray) else x

    keys, values = without_offset(entries.keys), without_offset(entries.values)
    start, stop = per_query(entries.start), per_query(entries.stop)
    return dataclasses.replace(entries, keys=keys, values=values, start=start, stop=stop)


def check_kernel_support(queries: Float[Array, "B H R D"], logit_cap: float | None, value_dim: int | None) -> None:
    """Checks for arguments that no kernel supports.

    Args:
        queries: The R queries of each head.
        value_dim: D_v; None means D.

    Raises:
        NotImplementedError: If logits are capped, or keys and values differ in their dimensions.
        PreferXla: If the queries are enough for XLA to be as fast.
    """
    _, _, count, head_dim = queries.shape
    if logit_cap is not None:
        raise NotImplementedError(f"logit_cap={logit_cap}; only XLA caps logits")
    if value_dim not in (None, head_dim):
        raise NotImplementedError(f"values have {value_dim} dimensions and keys {head_dim}")
    if count >= COMPUTE_BOUND_QUERIES:
        raise PreferXla(f"{count} queries; XLA is as fast from {COMPUTE_BOUND_QUERIES} queries on")


class Ranges(NamedTuple):
    """The slots that are read.

    Attributes:
        start: First slot per sequence, or per query, int32.
        stop: Exclusive end, int32, which may exceed S.
        lowest: First slot that any query of a sequence reads.
        highest: Exclusive end of the slots that any query of a sequence reads.
    """

    start: Int[Array, "B"] | Int[Array, "B R"]
    stop: Int[Array, "B"] | Int[Array, "B R"]
    lowest: Int[Array, "B"]
    highest: Int[Array, "B"]


def read_ranges(entries: Entries) -> Ranges:
    """Returns the ranges of slots of `entries` that queries read, not clipped to the existing slots."""
    batch, _, slots, _ = entries.keys.shape
    start = jnp.zeros(batch, jnp.int32) if entries.start is None else entries.start.astype(jnp.int32)
    stop = jnp.full(batch, slots, jnp.int32) if entries.stop is None else entries.stop.astype(jnp.int32)
    lowest = start if start.ndim == 1 else jnp.min(start, axis=1)
    return Ranges(start, stop, lowest, stop if stop.ndim == 1 else jnp.max(stop, axis=1))
