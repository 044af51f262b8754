"""The products of `mosaic_gpu` in which queries are the rows: for entries of 16 bits and more, and for many queries."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import hopper
from pallas_kernels.partials import MASK_VALUE, Partials
from pallas_kernels.weighted_decode.gpu_block import Block


@dataclasses.dataclass(frozen=True)
class QueriesAsRows:
    """The form of a launch.

    Attributes:
        dtype: The dtype of the queries.
        count: R, the queries of a KV head.
        head_dim: D.
        operands: How queries and entries become operands.
        columns: From `hopper.operand_columns`.
        key_bits: The bit width of packed keys, None if they are not packed.
        value_bits: Likewise.
        has_values: Whether any store has values.
    """

    dtype: Any
    count: int
    head_dim: int
    operands: hopper.Operands
    columns: int
    key_bits: int | None
    value_bits: int | None
    has_values: bool

    slots = hopper.SLOTS
    max_programs = 2
    bounds_width = hopper.ROWS

    @property
    def padded(self) -> int:
        """The queries that are copied, a multiple of eight."""
        return -(-self.count // 8) * 8

    def query_input(self, queries: Float[Array, "B H R D"]) -> Array:
        """Returns the operands of the queries, as programs read them."""
        return hopper.query_operands(queries, self.operands)

    def stored_dtype(self, dtype: Any) -> Any:
        """Returns the dtype as which the kernel reads keys or values of a dtype."""
        return dtype

    def output_shapes(self, batch: int, programs: int) -> dict[str, Any]:
        """Returns the shapes of a launch's partials, by name."""
        return hopper.partials_shapes((batch, programs), self.padded, self.head_dim if self.has_values else None)

    def logits_shape(self, batch: int, heads: int, blocks: int) -> Any:
        """Returns the shape of the logits of a store of `blocks` blocks per head."""
        return jax.ShapeDtypeStruct((batch, heads, self.padded, blocks * self.slots), jnp.float32)

    def partials(self, max: Array, denominator: Array, numerator: Array | None = None) -> Partials:
        """Returns `max` and `denominator`, [..., 64], and `numerator`, [..., padded, D], as partials [..., R, ...]."""
        max, denominator = max[..., : self.count], denominator[..., : self.count]
        if numerator is None:
            return Partials(max, jnp.zeros((*max.shape, self.head_dim)), denominator)
        return Partials(max, numerator[..., : self.count, :], denominator)

    def logits(self, x: Array) -> Array:
        """Returns logits [B, H, R, slots]."""
        return x[:, :, : self.count]

    def logits_of(self, ref: Any, first_slot: Any) -> Any:
        """Returns the logits of a block in global memory."""
        return ref.at[:, pl.ds(first_slot, self.slots)]

    def scratch(self, with_logits: bool) -> dict[str, Any]:
        """Returns the shared memory of a program, except for the blocks."""
        scratch = hopper.attention_scratch(
            self.dtype, self.operands, self.head_dim, self.columns, has_values=self.has_values
        )
        if with_logits:
            scratch["logits"] = hopper.blocked((hopper.ROWS, self.slots), jnp.float32)
        return scratch

    def numerator_memory(self) -> Any:
        """Returns the memory through which the numerator is written."""
        return hopper.blocked((hopper.ROWS, self.head_dim), jnp.float32)

    def fetch_queries(self, ref: Any, scratch: Any) -> None:
        """Starts the copies of a head's queries."""
        hopper.fetch_queries(ref, scratch)

    def await_queries(self, scratch: Any) -> Any:
        """Returns what `attend` needs of the queries, after their arrival: their powers of two, if any."""
        return hopper.await_queries(scratch)

    def load_bounds(self, ref: Any) -> Any:
        """Returns one bound per query."""
        return hopper.load(ref, hopper.ROW_LAYOUT, optimized=False)

    def empty(self, names: list[str]) -> hopper.RunningPartials:
        """Returns partials of no entries, for a store with the arrays `names`."""
        return hopper.RunningPartials.create(self.head_dim if "values" in names else None)

    def attend(self, before: hopper.RunningPartials, block: Block) -> hopper.RunningPartials:
        """Returns partials with a block added.

        Args:
            before: The partials of the blocks so far.
        """
        scratch, operands, shape = block.scratch, self.operands, (hopper.ROWS, self.slots)
        plgpu.barrier_wait(block.key_barrier)
        keys = hopper.as_operands(block.keys, scratch.get("operands"), operands, self.key_bits)
        if not operands.is_direct:
            plgpu.commit_smem()
        scores = hopper.query_key_products(scratch["queries"], keys, operands) * (self.head_dim**-0.5 * hopper.LOG2E)
        # Blocks that the matrix unit reads directly are free for the next fetch after their product; blocks that are
        # converted or loaded are free once those reads are committed.
        if operands.is_direct:
            block.fetch_next(["keys"])
        if block.queries is not None:
            scores = scores * hopper.broadcast_rows(block.queries, shape)

        loaded = {name: hopper.load(x, hopper.SLOT_LAYOUT).astype(jnp.float32) for name, x in block.per_slot.items()}
        if "key_scale" in loaded:
            scores = scores * hopper.broadcast_slots(loaded["key_scale"], shape)
        slot = block.first_slot + plgpu.broadcasted_iota(jnp.int32, (self.slots,), 0, layout=hopper.SLOT_LAYOUT)
        is_read = (slot >= block.lowest) & (slot < block.highest)

        def add_log_weights(name):
            """Returns masked scores plus the log-weights `name`."""
            bias = jnp.maximum(loaded[name], MASK_VALUE) * hopper.LOG2E if name in loaded else 0.0
            biased = scores + hopper.broadcast_slots(jnp.where(is_read, bias, MASK_VALUE * hopper.LOG2E), shape)
            if block.bounds is None:
                return biased
            slots = block.first_slot + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=hopper.LAYOUT)
            starts, stops = (hopper.broadcast_rows(bound, shape) for bound in block.bounds)
            return jnp.where((slots >= starts) & (slots < stops), biased, MASK_VALUE * hopper.LOG2E)

        den_scores = num_scores = add_log_weights("log_num")
        if "log_den" in loaded:
            den_scores = add_log_weights("log_den")
        if block.values is None:
            num_scores = None
        maximum, rescale, denominator, weight = hopper.update_max(before, num_scores, den_scores)
        if "logits" in scratch:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            scratch["logits"][...] = den_scores * (1 / hopper.LOG2E)
        if block.values is not None:
            if "value_scale" in loaded:
                weight = weight * hopper.broadcast_slots(loaded["value_scale"], shape)
            powers = hopper.store_weights(scratch["weights"], weight, operands)
            plgpu.barrier_wait(block.value_barrier)
            values = hopper.as_operands(block.values, scratch.get("operands"), operands, self.value_bits)
        plgpu.commit_smem()
        stored = ["keys"] if block.values is None else ["keys", "values"]
        block.fetch_next([*([] if operands.is_direct else stored), *block.per_slot])
        if "logits" in scratch:
            plgpu.copy_smem_to_gmem(scratch["logits"].at[pl.ds(0, self.padded)], block.logits)
        numerator = before.numerator
        if block.values is not None:
            numerator = hopper.add_values(numerator, rescale, scratch["weights"], values, operands, powers)
            if operands.is_direct:
                block.fetch_next(["values"])
        return hopper.RunningPartials(maximum, denominator, numerator)

    def write(self, partials: Any, scratch: Any, refs: Any, index: Any, staging: Any | None) -> None:
        """Writes a program's partials to global memory."""
        hopper.write_partials(partials, scratch, refs, index, staging)
