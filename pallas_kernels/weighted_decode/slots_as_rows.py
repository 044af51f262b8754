"""The products of `mosaic_gpu` for a few bfloat16 queries and entries of 8 or 4 bits: slots are the rows.

Converting narrow entries to 16 bits takes longer than reading them. Here the matrix unit multiplies bytes, with exact
sums in int32, and slots are the 64 rows of its products, so that few queries cause little other work: a thread has four
logits of eight queries in place of 32. For a block of 128 slots:

1. logits = keys x queries^T, [128, N]. A query is two bytes per dimension, a + b / 254, relative to its largest
   number: about 15 bits.
2. Values have a scale per slot. It is a factor of the weights: they are 2 ** (logit + log2 |scale| - m), where m is the
   maximum of the block, and two bytes again. The weights of the denominator are these divided by |scale|.
3. numerator^T += values^T x weights, [D, 2 N], where both operands have the slots of a column side by side: see
   `pallas_kernels.hopper_bytes`.

Four bits c stand for 2 c - 15. Low codes are multiplied as c and high ones as 16 (c - 8); the sum of each query, and
the sum of the weights, account for the difference.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import hopper, hopper_bytes
from pallas_kernels.hopper_bytes import BYTE, LOW_PART
from pallas_kernels.partials import MASK_VALUE, Partials
from pallas_kernels.weighted_decode.gpu_block import Block

MAX_QUERIES = 32  # of a KV head; more do not fit in registers
# The scale of vectors of zeros, whose logits count nevertheless.
_ZERO_SCALE = 2.0**-64
_MASKED = MASK_VALUE * hopper.LOG2E
_PER_SLOT, _PER_QUERY = hopper.ROW_LAYOUT, hopper.SLOT_LAYOUT  # of a number for each row, and each column


def is_supported(queries: Any, keys: Any, values: Any | None, bits: dict[str, int | None]) -> bool:
    """Returns whether queries [B, H, R, D] and stored keys and values have this form."""
    stored = {"keys": keys, "values": values}
    return (
        queries.dtype == jnp.bfloat16
        and queries.shape[2] <= MAX_QUERIES
        and all(
            x is None or (_is_bytes(x, bits[name]) and hopper_bytes.is_supported(x.shape[3]))
            for name, x in stored.items()
        )
    )


def _is_bytes(x: Any, bits: int | None) -> bool:
    return bits == 4 or (bits is None and x.dtype == jnp.int8)


class RunningPartials(NamedTuple):
    """Partials over the blocks so far; logits are in units of log2(e).

    Attributes:
        max: The largest logit plus log2 of its value's scale.
        numerator: sum_s weight_s code_s, relative to 2 ** max.
        total: sum_s weight_s in the numerator, of each row of a block; None if values are not packed.
        den_max: The maximum of the denominator; None if it is `max`.
        denominator: sum_s 2 ** (logit_s - den_max), of each row of a block.
    """

    max: Float[Array, "N"]
    numerator: Float[Array, "D N"] | None
    total: Float[Array, "128 N"] | None
    den_max: Float[Array, "N"] | None
    denominator: Float[Array, "128 N"]


@dataclasses.dataclass(frozen=True)
class SlotsAsRows:
    """The form of a launch; see `queries_as_rows.QueriesAsRows` for the methods.

    Attributes:
        count: R, the queries of a KV head.
        head_dim: D.
        key_bits: 4 for packed keys, None for int8.
        value_bits: Likewise.
        has_values: Whether any store has values.
        interpret: Whether the kernel is interpreted.
    """

    count: int
    head_dim: int
    key_bits: int | None
    value_bits: int | None
    has_values: bool
    interpret: Any

    slots = hopper_bytes.SLOTS

    @property
    def padded(self) -> int:
        """N, the queries of a product."""
        return -(-self.count // 8) * 8

    bounds_width = padded

    @property
    def max_programs(self) -> int:
        """The most programs that share a multiprocessor; more queries take more registers."""
        return 3 if self.padded == 8 else 2

    def query_input(self, queries: Float[Array, "B H R D"]) -> Array:
        """Returns the queries, which programs split into bytes."""
        return queries

    def stored_dtype(self, _dtype: Any) -> Any:
        """Returns int8, of which packed codes are bit patterns."""
        return jnp.int8

    def output_shapes(self, batch: int, programs: int) -> dict[str, Any]:
        """Returns the shapes of a launch's partials."""
        per_query = jax.ShapeDtypeStruct((batch, programs, self.padded), jnp.float32)
        shapes = {"max": per_query, "denominator": per_query}
        if self.has_values:
            shapes["numerator"] = jax.ShapeDtypeStruct((batch, programs, self.head_dim, self.padded), jnp.float32)
        return shapes

    def logits_shape(self, batch: int, heads: int, blocks: int) -> Any:
        """Returns the shape of the logits of a store."""
        return jax.ShapeDtypeStruct((batch, heads, blocks * self.slots, self.padded), jnp.float32)

    def partials(self, max: Array, denominator: Array, numerator: Array | None = None) -> Partials:
        """Returns `max` and `denominator`, [..., N], and `numerator`, [..., D, N], as partials [..., R, ...]."""
        shape = (*max.shape, self.head_dim)
        numerator = jnp.zeros(shape) if numerator is None else numerator.swapaxes(-1, -2)
        return Partials(max[..., : self.count], numerator[..., : self.count, :], denominator[..., : self.count])

    def logits(self, x: Array) -> Array:
        """Returns logits by query and slot."""
        return x.swapaxes(2, 3)[:, :, : self.count]

    def logits_of(self, ref: Any, first_slot: Any) -> Any:
        """Returns the logits of a block in global memory."""
        return ref.at[pl.ds(first_slot, self.slots)]

    def scratch(self, with_logits: bool) -> dict[str, Any]:
        """Returns the shared memory of a program, except for the blocks."""
        per_query = plgpu.SMEM((self.padded,), jnp.float32)
        halves = self.head_dim if self.key_bits is None else self.head_dim // 2
        scratch = {
            "max": per_query,
            "denominator": per_query,
            "queries": hopper.blocked((2, self.padded, self.head_dim), jnp.int8, halves),
            "query_scales": plgpu.SMEM((2, self.padded), jnp.float32),
            "unsplit_queries": plgpu.SMEM((self.padded, self.head_dim), jnp.bfloat16),
            "query_barrier": plgpu.Barrier(),
        }
        if self.has_values:
            scratch["weights"] = hopper.blocked((2 * self.padded, self.slots), jnp.int8)
            scratch["operands"] = hopper.blocked((self.head_dim, self.slots), jnp.int8)
        if with_logits:
            scratch["logits"] = plgpu.SMEM((self.slots, self.padded), jnp.float32)
        if self.interpret and self.key_bits is not None:
            scratch["registers"] = plgpu.SMEM((self.slots, self.head_dim // 2), jnp.int8)
        return scratch

    def numerator_memory(self) -> Any:
        """Returns the memory through which the numerator is written."""
        return plgpu.SMEM((self.head_dim, self.padded), jnp.float32)

    def fetch_queries(self, ref: Any, scratch: Any) -> None:
        """Starts the copy of a head's queries."""
        rows = scratch["unsplit_queries"].at[pl.ds(0, self.count)]
        plgpu.copy_gmem_to_smem(ref, rows, scratch["query_barrier"])

    def await_queries(self, scratch: Any) -> Any:
        """Splits the queries into bytes, and returns their scales and what packed keys add to each logit."""
        plgpu.barrier_wait(scratch["query_barrier"])
        hopper_bytes.quantize_queries(
            scratch["queries"], scratch["query_scales"], scratch["unsplit_queries"],
            self.head_dim**-0.5 * hopper.LOG2E, self.key_bits is not None, self.interpret,
        )  # fmt: skip
        plgpu.commit_smem()
        return [hopper.load(scratch["query_scales"].at[row], _PER_QUERY) for row in (0, 1)]

    def load_bounds(self, ref: Any) -> Any:
        """Returns one bound per query."""
        return hopper.load(ref, _PER_QUERY, optimized=False)

    def empty(self, names: list[str]) -> RunningPartials:
        """Returns partials of no entries."""
        has_values = "values" in names

        def zeros(rows: int) -> Array:
            return plgpu.layout_cast(jnp.zeros((rows, self.padded), jnp.float32), hopper.LAYOUT)

        def masked() -> Array:
            return plgpu.layout_cast(jnp.full((self.padded,), _MASKED, jnp.float32), _PER_QUERY)

        is_packed, is_separate = has_values and self.value_bits is not None, has_values and "log_den" in names
        return RunningPartials(
            masked(), zeros(self.head_dim) if has_values else None, zeros(self.slots) if is_packed else None,
            masked() if is_separate else None, zeros(self.slots),
        )  # fmt: skip

    def attend(self, before: RunningPartials, block: Block) -> RunningPartials:
        """Returns partials with a block added.

        Args:
            before: The partials of the blocks so far.
        """
        scratch, shape = block.scratch, (self.slots, self.padded)
        by_query, by_slot = _broadcast(shape, 1), _broadcast(shape, 0)
        plgpu.barrier_wait(block.key_barrier)
        loaded = {name: hopper.load(ref, _PER_SLOT).astype(jnp.float32) for name, ref in block.per_slot.items()}
        scores = self._products(block, by_query)
        if "key_scale" in loaded:
            scores = scores * by_slot(loaded["key_scale"])
        slot = block.first_slot + plgpu.broadcasted_iota(jnp.int32, (self.slots,), 0, layout=_PER_SLOT)
        is_read = (slot >= block.lowest) & (slot < block.highest)

        def add_log_weights(name: str) -> Array:
            """Returns masked scores plus the log-weights `name`."""
            bias = jnp.maximum(loaded[name], MASK_VALUE) * hopper.LOG2E if name in loaded else 0.0
            biased = jnp.where(by_slot(is_read), scores + by_slot(jnp.where(is_read, bias, 0.0)), _MASKED)
            if block.bounds is None:
                return biased
            slots = block.first_slot + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=hopper.LAYOUT)
            starts, stops = (by_query(bound) for bound in block.bounds)
            return jnp.where((slots >= starts) & (slots < stops), biased, _MASKED)

        den_scores = num_scores = add_log_weights("log_num")
        if "log_den" in loaded:
            den_scores = add_log_weights("log_den")
        if "logits" in scratch:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            scratch["logits"][...] = den_scores * (1 / hopper.LOG2E)
        if block.values is None:
            after, factors = self._add_denominator(before, den_scores), None
            plgpu.commit_smem()
        else:
            after, factors = self._add_weights(before, block, num_scores, den_scores, loaded.get("value_scale"))
        block.fetch_next()
        if "logits" in scratch:
            plgpu.copy_smem_to_gmem(scratch["logits"], block.logits)
        return after if factors is None else self._add_values(after, scratch, *factors)

    def _products(self, block: Block, by_query: Callable[[Array], Array]) -> Float[Array, "128 N"]:
        """Returns the products of a block's keys with the queries, scaled by the queries' scales."""
        scale, added = block.queries
        queries = block.scratch["queries"]

        def multiply(keys: Any, columns: Any) -> Array:
            if self.interpret and isinstance(keys, jax.Array):  # it takes no operand in registers
                block.scratch["registers"][...] = keys
                plgpu.commit_smem()
                keys = block.scratch["registers"]

            def accumulate(high: Any, low: Any) -> Array:
                for part, sums in enumerate((high, low)):
                    plgpu.wgmma(sums, keys, queries.at[part, :, columns].T)
                return high[...].astype(jnp.float32) + low[...].astype(jnp.float32) * (1 / LOW_PART)

            sums = plgpu.ACC((self.slots, self.padded), jnp.int32)
            return pl.run_scoped(accumulate, sums, sums)

        if self.key_bits is None:
            return multiply(block.keys, pl.ds(0, self.head_dim)) * by_query(scale)
        half = self.head_dim // 2
        low, high = hopper_bytes.unpack_nibbles(hopper.load(block.keys, plgpu.Layout.WGMMA_8BIT))
        products = multiply(low, pl.ds(0, half)) + multiply(high, pl.ds(half, half)) * (1 / 16)
        return products * by_query(2 * scale) + by_query(added)

    def _add_denominator(self, before: RunningPartials, scores: Float[Array, "128 N"]) -> RunningPartials:
        """Returns partials with the denominator's scores of a block added."""
        earlier = before.max if before.den_max is None else before.den_max
        by_query = _broadcast(scores.shape, 1)
        maximum = jnp.maximum(earlier, scores.max(axis=0))
        denominator = before.denominator * by_query(jnp.exp2(earlier - maximum))
        denominator = denominator + jnp.exp2(scores - by_query(maximum))
        name = "max" if before.den_max is None else "den_max"
        return before._replace(denominator=denominator, **{name: maximum})

    def _add_weights(
        self, before: RunningPartials, block: Block, num_scores: Array, den_scores: Array, scale: Array | None
    ) -> tuple[RunningPartials, tuple[Float[Array, "N"], Float[Array, "N"]]]:
        """Adds the weights of a block, and writes both operands of the product with its values.

        Args:
            before: The partials of the blocks so far.
            den_scores: The scores of the denominator, which may be the same array.
            scale: The scale of each slot's value, if values have scales.

        Returns:
            The partials, whose numerator is still the one before, and the factors of the numerators before and of the
            block.
        """
        scratch, shape = block.scratch, num_scores.shape
        by_query, by_slot = _broadcast(shape, 1), _broadcast(shape, 0)
        size = None if scale is None else jnp.where(scale == 0, _ZERO_SCALE, jnp.abs(scale))
        if size is not None:
            num_scores = num_scores + by_slot(jnp.log2(size))
        block_max = num_scores.max(axis=0)
        maximum = jnp.maximum(before.max, block_max)
        rescale, block_factor = jnp.exp2(before.max - maximum), jnp.exp2(block_max - maximum)
        weights = jnp.exp2(num_scores - by_query(block_max))
        after = before._replace(max=maximum)
        if "log_den" in block.per_slot:
            after = self._add_denominator(after, den_scores)
        else:
            added = weights if size is None else weights * by_slot(1 / size)
            after = after._replace(denominator=before.denominator * by_query(rescale) + added * by_query(block_factor))
        weights = weights * float(BYTE) if scale is None else weights * by_slot(jnp.sign(scale) * float(BYTE))
        if before.total is not None:
            total = weights * by_query(block_factor * (1 / BYTE))
            after = after._replace(total=before.total * by_query(rescale) + total)
        hopper_bytes.store_weights(scratch["weights"], weights, self.interpret)
        plgpu.barrier_wait(block.value_barrier)
        is_packed = self.value_bits is not None
        hopper_bytes.transpose_block(scratch["operands"], block.values, is_packed, self.interpret)
        plgpu.commit_smem()
        return after, (rescale, block_factor)

    def _add_values(
        self, before: RunningPartials, scratch: Any, rescale: Float[Array, "N"], block_factor: Float[Array, "N"]
    ) -> RunningPartials:
        """Returns partials with the product of the operands in `scratch`; see `_add_weights` for the factors."""

        def accumulate(sums: Any) -> Array:
            plgpu.wgmma(sums, scratch["operands"], scratch["weights"].T)
            high, low = sums[:, : self.padded], sums[:, self.padded :]
            return high.astype(jnp.float32) + low.astype(jnp.float32) * (1 / LOW_PART)

        products = pl.run_scoped(accumulate, plgpu.ACC((self.head_dim, 2 * self.padded), jnp.int32))
        by_query = _broadcast(products.shape, 1)
        earlier = jnp.asarray(before.numerator) * by_query(rescale)
        return before._replace(numerator=earlier + products * by_query(block_factor * (1 / BYTE)))

    def write(self, partials: RunningPartials, scratch: Any, refs: Any, index: Any, staging: Any | None) -> None:
        """Writes a program's partials to global memory; see `hopper.write_partials`."""
        maximum, denominator, numerator = partials.max, partials.denominator.sum(axis=0), partials.numerator
        if partials.den_max is not None:
            maximum = jnp.maximum(partials.max, partials.den_max)
            denominator = denominator * jnp.exp2(partials.den_max - maximum)
        scratch["max"][...] = maximum * (1 / hopper.LOG2E)
        scratch["denominator"][...] = denominator
        if staging is not None and numerator is not None:
            by_column = _broadcast(numerator.shape, 1)
            if partials.total is not None:
                total = by_column(partials.total.sum(axis=0))
                row = plgpu.broadcasted_iota(jnp.int32, numerator.shape, 0, layout=hopper.LAYOUT)
                is_low = row < self.head_dim // 2
                numerator = jnp.where(is_low, 2 * numerator - 15 * total, (2 / 16) * numerator + total)
            if partials.den_max is not None:
                numerator = numerator * by_column(jnp.exp2(partials.max - maximum))
            staging[...] = numerator
        plgpu.commit_smem()
        results = {name: scratch[name] for name in ("max", "denominator")}
        for name, source in (results if staging is None else results | {"numerator": staging}).items():
            plgpu.copy_smem_to_gmem(source, refs[name].at[index])
        plgpu.wait_smem_to_gmem(0)


def _broadcast(shape: tuple[int, ...], axis: int) -> Callable[[Array], Array]:
    """Returns a function that repeats a vector along the other axis of `shape`."""
    return lambda x: lax.broadcast_in_dim(x, shape, [axis])
