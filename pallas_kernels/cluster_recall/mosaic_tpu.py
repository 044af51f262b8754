"""`cluster_recall` as a Pallas kernel for TPU (Mosaic)."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import packing
from pallas_kernels.cluster_recall.batching import fold_mapped_axes
from pallas_kernels.cluster_recall.blocks import Blocks, Inputs
from pallas_kernels.dispatch import check_config
from pallas_kernels.partials import MASK_VALUE, Partials
from pallas_kernels.quantized_array import array_bytes, product_dtype
from pallas_kernels.tpu import dot, dot_stored, launch
from pallas_kernels.weighted_decode.entries import check_kernel_support

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
LANES = 128  # of a register
# Scalar memory holds the indices of the blocks of two heads, each in two buffers.
MAX_BLOCKS = 16384


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """How the kernel divides its work.

    Attributes:
        step_blocks: Blocks that are fetched together, while the previous ones are processed; a multiple of 8.
        cores: Parts of sequences times heads, so that both cores of a TPU v4 or v5p work. Other TPUs lose the time of
            one fetch. One part is used if the number does not divide sequences times heads.
    """

    step_blocks: int = 64
    cores: int = 2

    def __post_init__(self) -> None:
        check_config(self, step_blocks=8, cores=1)


def check(inputs: Inputs, **_options: Any) -> None:
    """Checks that the kernel supports the arguments of `cluster_recall`.

    Raises:
        NotImplementedError: If the kernel does not support them.
    """
    check_kernel_support(inputs.queries, inputs.blocks.logit_cap, inputs.blocks.value_dim)
    entries, selected = inputs.blocks.entries, inputs.block_indices.shape[2]
    block_size, width = entries.shape[3:]
    for name, dtype in {"queries": inputs.queries.dtype, "entries": entries.dtype}.items():
        if dtype.name not in DTYPES and (name == "queries" or inputs.blocks.key_bits is None):
            raise NotImplementedError(f"{name} are {dtype.name}; the TPU kernel supports {', '.join(DTYPES)}")
    if width % LANES or block_size % 16:
        raise NotImplementedError(
            f"blocks are {block_size} x {width}; the TPU kernel fetches blocks of multiples of 16 x {LANES} in place"
        )
    if selected > MAX_BLOCKS:
        raise NotImplementedError(f"{selected} blocks per head; scalar memory has space for {MAX_BLOCKS}")


def cluster_recall(inputs: Inputs, *, config: TpuConfig, interpret: Any) -> Partials:
    """`xla.cluster_recall` in one kernel, also under `vmap`.

    Args:
        config: How to divide the work.
        interpret: Passed to `pallas_call`.

    Returns:
        Partials over the selected tokens.
    """
    run = functools.partial(recall_unmapped, config=config, interpret=interpret)
    return fold_mapped_axes(run)(inputs)


class _Piece(NamedTuple):
    """Neighboring columns of a key or value.

    Attributes:
        columns: The columns of the vector.
        lanes: The lanes of their half of a row that contain them.
        part: The part of a packed vector, None if it is not packed.
    """

    columns: slice
    lanes: slice
    part: packing.Part | None


class _Half(NamedTuple):
    """The lanes of a row that are multiplied with queries, or with weights."""

    lanes: slice
    pieces: tuple[_Piece, ...]

    @property
    def width(self) -> int:
        return self.lanes.stop - self.lanes.start


def _halves(blocks: Blocks, head_dim: int) -> tuple[_Half, _Half]:
    """Returns the lanes of keys and of values.

    They are separate if each fills entire registers. Otherwise both are the entire row: queries have zeros in the other
    lanes, and sums of the other lanes are ignored.
    """
    row_width, value_column = blocks.entries.shape[4], blocks.value_column
    is_separate = value_column % LANES == 0 and (row_width - value_column) % LANES == 0

    def half(start: int, stop: int, bits: int | None) -> _Half:
        """Returns the half in the columns from `start` to `stop`, with codes of `bits` bits."""
        lanes = slice(start, stop) if is_separate else slice(0, row_width)
        shift = start - lanes.start
        if bits is None:
            return _Half(lanes, (_Piece(slice(0, head_dim), slice(shift, head_dim + shift), None),))
        parts = packing.parts(head_dim, bits)
        pieces = ((x.columns, slice(x.bytes.start + shift, x.bytes.stop + shift), x) for x in parts)
        return _Half(lanes, tuple(_Piece(*piece) for piece in pieces))

    return half(0, value_column, blocks.key_bits), half(value_column, row_width, blocks.value_bits)


def recall_unmapped(inputs: Inputs, *, config: TpuConfig, interpret: Any) -> Partials:
    """Runs the kernel, without a rule for `vmap`. Every block that is read is copied on chip once, and no other.

    `step_blocks` blocks are fetched at a time, each by its own copy, while the previous ones are processed. The first
    blocks of a head are fetched during the last step of the previous head.

    Args:
        config: How to divide the work.
        interpret: Passed to `pallas_call`.

    Returns:
        Partials over the selected tokens.
    """
    queries, blocks, indices, lengths = inputs
    batch, heads, count, head_dim = queries.shape
    block_size, row_width = blocks.entries.shape[3:]
    streams = batch * heads
    cores = config.cores if streams % config.cores == 0 else 1
    per_core = streams // cores
    keys, values = halves = _halves(blocks, head_dim)

    step = min(config.step_blocks, -(-indices.shape[2] // 8) * 8)
    steps = pl.cdiv(indices.shape[2], step)
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, block_size)
    padding = ((0, 0), (0, 0), (0, steps * step - indices.shape[2]))
    indices, lengths = (jnp.pad(x.astype(jnp.int32), padding) for x in (indices, lengths))
    is_read = (lengths > 0).reshape(streams, steps * step)
    # The blocks that each step reads are counted by a product, because XLA would transpose them for a sum.
    is_in_step = jnp.arange(steps * step)[:, None] // step == jnp.arange(steps)
    products = is_read.astype(jnp.bfloat16), is_in_step.astype(jnp.bfloat16)
    blocks_read = jnp.matmul(*products, preferred_element_type=jnp.float32)
    # Steps after the last one that reads a block are skipped; every head has one step.
    used_steps = jnp.max(jnp.where(blocks_read > 0, jnp.arange(steps), 0), axis=1) + 1
    # A plan has the indices of the blocks, -1 if a block is not read, and then the number of blocks read per step.
    read_indices = jnp.where(is_read, indices.reshape(is_read.shape), -1)
    plan = jnp.concatenate([read_indices, blocks_read.astype(jnp.int32)], axis=1)

    def stream_index(core, place, *_):
        return core * per_core + place, 0, 0

    def next_stream_index(core, place, *_):
        return core * per_core + jnp.minimum(place + 1, per_core - 1), 0, 0

    def piece_spec(half: _Half) -> pl.BlockSpec:
        shape = (1, len(half.pieces), count, half.width)
        return pl.BlockSpec(shape, lambda *at: (*stream_index(*at), 0))

    plan_spec = functools.partial(pl.BlockSpec, (1, 1, plan.shape[1]), memory_space=pltpu.SMEM)
    stream_lengths = lengths.astype(jnp.float32).reshape(streams, steps, step)
    arrays: dict[str, tuple[Array, pl.BlockSpec]] = {
        "plan": (plan[:, None], plan_spec(stream_index)),
        "next_plan": (plan[:, None], plan_spec(next_stream_index)),
        "queries": (_split_queries(queries.reshape(streams, count, -1), keys), piece_spec(keys)),
        "lengths": (stream_lengths, pl.BlockSpec((1, steps, step), stream_index)),
        "entries": (blocks.entries, pl.BlockSpec(memory_space=pl.ANY)),
    }
    if blocks.scale is not None:
        for name, scale in zip(("key_scale", "value_scale"), _gather_scales(blocks.scale, indices), strict=True):
            shape = (streams, steps, step * block_size)
            arrays[name] = (scale.reshape(shape), pl.BlockSpec((1, *shape[1:]), stream_index))

    tokens = streams * steps * step * block_size
    entries_bytes = tokens * row_width * blocks.entries.dtype.itemsize
    per_query = ((streams, count, 1), jnp.float32, pl.BlockSpec((1, count, 1), stream_index))
    per_piece = ((streams, len(values.pieces), count, values.width), jnp.float32, piece_spec(values))
    maximum, numerator, denominator = launch(
        "cluster_recall",
        functools.partial(_kernel, names=tuple(arrays), halves=halves, blocks=blocks, heads=heads, head_dim=head_dim),
        arrays.values(), [per_query, per_piece, per_query],
        parallel=(cores,), sequential=(per_core,), scalars=[used_steps], interpret=interpret,
        scratch=[
            pltpu.VMEM((2, step * block_size, row_width), blocks.entries.dtype),
            pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((1,), jnp.int32),
        ],
        flops=4 * tokens * count * head_dim, transcendentals=tokens * count,
        bytes_accessed=entries_bytes + array_bytes([x for name, (x, _) in arrays.items() if name != "entries"]),
        # Checks would take a third of the time to start a copy. Interpreters, which tests use, check every copy.
        disable_bounds_checks=True, disable_semaphore_checks=True,
    )  # fmt: skip
    joined = jnp.zeros((streams, count, head_dim))
    for i, piece in enumerate(values.pieces):
        joined = joined.at[..., piece.columns].add(numerator[:, i, :, piece.lanes])
    results = maximum[..., 0], joined, denominator[..., 0]
    return Partials(*(x.reshape(batch, heads, count, *x.shape[2:]) for x in results))


def _split_queries(queries: Float[Array, "BH R D"], keys: _Half) -> Float[Array, "BH n R W"]:
    """Returns the queries for every piece of the keys, with zeros in all other lanes."""
    zeros = jnp.zeros((*queries.shape[:2], keys.width), queries.dtype)
    return jnp.stack([zeros.at[..., piece.lanes].set(queries[..., piece.columns]) for piece in keys.pieces], axis=1)


def _gather_scales(scale: Float[Array, "B H_kv N P 2"], indices: Int[Array, "B H K"]) -> Float[Array, "2 B H_kv g*K P"]:
    """Returns the scales of keys and values of the selected blocks, by a product with one-hot rows.

    XLA stores scales with blocks as the last axis, and a gather from that layout would copy all of them.
    """
    batch, kv_heads, count = scale.shape[:3]
    is_selected = indices.reshape(batch, kv_heads, -1, 1) == jnp.arange(count)
    # The kernel can load single rows of float32 only.
    exact: dict[str, Any] = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    return jnp.einsum("bhkn,bhnps->sbhkp", is_selected.astype(scale.dtype), scale, **exact)


def _kernel(used_steps, *refs, names, halves, blocks, heads, head_dim):
    """Attends to all selected blocks of one head.

    `buffer` holds the blocks of two steps: one step is processed and the next one is fetched. Integers are divided by
    `lax.div`, because `//` rounds towards minus infinity, which is lowered differently per chip.
    """
    inputs = dict(zip(names, refs, strict=False))
    group, block_size = heads // blocks.entries.shape[1], blocks.entries.shape[3]
    max_ref, num_ref, den_ref, buffer, semaphores, buffer_half = refs[len(names) :]
    core, place, last = pl.program_id(0), pl.program_id(1), pl.num_programs(1) - 1
    stream = core * (last + 1) + place
    step = buffer.shape[1] // block_size
    steps = used_steps[stream]
    first_count = inputs["lengths"].shape[1] * step  # in a plan

    def fetch(plan, stream, step_index, half):
        """Starts the copies of the blocks of step `step_index` of a stream."""
        row, head = jax.lax.div(stream, heads), jax.lax.div(jax.lax.rem(stream, heads), group)

        def fetch_block(i, carry):
            """Returns the unused `carry` after starting the copy of block i."""
            block = plan[0, 0, step_index * step + i]

            @pl.when(block >= 0)
            def _():
                target = buffer.at[half, pl.ds(pl.multiple_of(i * block_size, block_size), block_size)]
                pltpu.make_async_copy(inputs["entries"].at[row, head, block], target, semaphores.at[half]).start()

            return carry

        jax.lax.fori_loop(0, step, fetch_block, None, unroll=8)

    def wait(step_index, half):
        """Waits for the blocks of step `step_index`; a semaphore counts bytes, so one wait covers several blocks."""
        fetched = inputs["plan"][0, 0, first_count + step_index]
        for doubling in range(step.bit_length()):

            @pl.when(jax.lax.rem(jax.lax.shift_right_logical(fetched, doubling), 2) == 1)
            def _(doubling=doubling):
                same_bytes = buffer.at[half, pl.ds(0, block_size << doubling)]
                pltpu.make_async_copy(same_bytes, same_bytes, semaphores.at[half]).wait()

    @pl.when(place == 0)
    def _():
        # Rows without a block are multiplied by weights of zero, so they must be finite.
        buffer[...] = jnp.zeros_like(buffer)
        buffer_half[0] = 0
        fetch(inputs["plan"], stream, 0, 0)

    first_half = buffer_half[0]
    queries = inputs["queries"]
    dtype = product_dtype(queries.dtype, buffer.dtype)
    keys, values = halves
    slots = jax.lax.broadcasted_iota(jnp.int32, (1, step * block_size), 1)
    # A product with this matrix repeats the length of each block for all of its rows.
    block_row = jax.lax.broadcasted_iota(jnp.int32, (step, step * block_size), 0)
    repeat = (block_row == jax.lax.div(slots, block_size)).astype(jnp.float32)

    def process_step(step_index, partials):
        """Returns the partials with the blocks of step `step_index` added."""
        half = jax.lax.rem(first_half + step_index, 2)

        @pl.when(step_index + 1 < steps)
        def _():
            fetch(inputs["plan"], stream, step_index + 1, 1 - half)

        @pl.when((step_index + 1 == steps) & (place < last))
        def _():
            fetch(inputs["next_plan"], stream + 1, 0, 1 - half)

        wait(step_index, half)
        entries = buffer[half]
        old_max, numerators, denominator = partials
        logits = jnp.zeros((queries.shape[2], step * block_size))
        for i, piece in enumerate(keys.pieces):
            logits += _dot_piece(queries[0, i], entries[:, keys.lanes], piece.part, blocks.key_bits, axis=1)
        logits = logits * head_dim**-0.5
        if "key_scale" in inputs:
            logits = logits * inputs["key_scale"][0, pl.ds(step_index, 1)]
        lengths = dot(inputs["lengths"][0, pl.ds(step_index, 1)], repeat, axis=0)
        logits = jnp.where(jax.lax.rem(slots, block_size) < lengths.astype(jnp.int32), logits, MASK_VALUE)
        new_max = jnp.maximum(old_max, jnp.max(logits, axis=1, keepdims=True))
        rescale, weight = jnp.exp(old_max - new_max), jnp.exp(logits - new_max)
        denominator = denominator * rescale + jnp.sum(weight, axis=1, keepdims=True)
        if "value_scale" in inputs:
            weight = weight * inputs["value_scale"][0, pl.ds(step_index, 1)]
        weight, half_values = weight.astype(dtype), entries[:, values.lanes]
        numerators = tuple(
            old * rescale + _dot_piece(weight, half_values, piece.part, blocks.value_bits, axis=0)
            for old, piece in zip(numerators, values.pieces, strict=True)
        )
        return new_max, numerators, denominator

    count = queries.shape[2]
    zeros = jnp.zeros((count, values.width))
    empty = (jnp.full((count, 1), MASK_VALUE), (zeros,) * len(values.pieces), jnp.zeros((count, 1)))
    max_ref[0], numerators, den_ref[0] = jax.lax.fori_loop(0, steps, process_step, empty)
    for i, numerator in enumerate(numerators):
        num_ref[0, i] = numerator
    buffer_half[0] = jax.lax.rem(first_half + steps, 2)


def _dot_piece(
    left: Float[Array, "R K"], stored: Float[Array, "S W"], part: packing.Part | None, bits: int | None, *, axis: int
) -> Float[Array, "R N"]:
    """Returns a product over an axis of stored vectors, or the contribution of a part of packed vectors to it.

    Codes are multiplied; the difference to the numbers that they stand for is added to the product.
    """
    if part is None or bits is None:
        return dot_stored(left, stored, axis)
    product = 2 * part.factor * dot_stored(left, part.codes(stored.astype(jnp.int32)), axis)
    if part.factor > 1:
        return product
    return product - packing.largest(bits) * jnp.sum(left.astype(jnp.float32), axis=1, keepdims=True)
