"""Attention to recalled blocks as a Pallas kernel for TPU (Mosaic)."""

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
from pallas_kernels.cluster_recall.blocks import Blocks, check_kernel_support
from pallas_kernels.dispatch import PreferXla
from pallas_kernels.partials import MASK_VALUE, Partials
from pallas_kernels.quantized_array import product_dtype
from pallas_kernels.weighted_decode.reference import COMPUTE_BOUND_QUERIES

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
LANES = 128
# Numbers and counts of two heads, each twice, stand in scalar memory.
MAX_BLOCKS = 16384


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """How the kernel cuts its work.

    Attributes:
        step_blocks: blocks that are fetched together and computed with while the next ones come; a multiple of 8.
        cores: parts that rows and heads are cut into, so that both cores of chips that have two (v4, v5p) work; others
            lose the time of one fetch. One part where they do not divide by it.
    """

    step_blocks: int = 64
    cores: int = 2

    def __post_init__(self) -> None:
        if self.step_blocks < 8 or self.step_blocks % 8:
            raise ValueError(f"step_blocks={self.step_blocks}; it must be a multiple of 8")
        if self.cores < 1:
            raise ValueError(f"cores={self.cores}; it must be at least 1")


def check(
    queries: Float[Array, "B H R D"],
    blocks: Blocks,
    block_indices: Int[Array, "B H K"],
    _block_lengths: Int[Array, "B H K"],
    **_options: Any,
) -> None:
    """Checks that the kernel supports the arguments of `cluster_recall`.

    Args:
        queries: Queries that share a selection.
        blocks: The store.
        block_indices: The selected blocks.

    Raises:
        NotImplementedError: If the kernel does not support them.
    """
    check_kernel_support(queries, blocks)
    block_size, width = blocks.entries.shape[3:]
    is_packed = blocks.key_bits is not None
    if queries.shape[2] >= COMPUTE_BOUND_QUERIES:
        raise PreferXla(f"{queries.shape[2]} queries; XLA is as fast from {COMPUTE_BOUND_QUERIES} queries on")
    for name, array in {"queries": queries, "entries": blocks.entries}.items():
        if array.dtype.name not in DTYPES and not (is_packed and name == "entries"):
            raise NotImplementedError(f"{name} are {array.dtype.name}; the TPU kernel supports {', '.join(DTYPES)}")
    if width % LANES or block_size % 16:
        raise NotImplementedError(
            f"blocks are {block_size} x {width}; the TPU kernel supports multiples of 16 x {LANES}, which it fetches "
            "in place"
        )
    if block_indices.shape[2] > MAX_BLOCKS:
        raise NotImplementedError(f"{block_indices.shape[2]} blocks per head; scalar memory has space for {MAX_BLOCKS}")


def cluster_recall(
    queries: Float[Array, "B H R D"],
    blocks: Blocks,
    block_indices: Int[Array, "B H K"],
    block_lengths: Int[Array, "B H K"],
    *,
    config: TpuConfig,
    interpret: Any,
) -> Partials:
    """`reference.cluster_recall` in one kernel, also under `vmap`.

    Args:
        queries: Queries that share a selection.
        blocks: The store.
        block_indices: The selected blocks.
        block_lengths: The tokens of each selected block that are attended to.
        config: How to divide the work.
        interpret: Passed to `pallas_call`.

    Returns:
        Partials over the selected tokens.
    """
    run = functools.partial(recall_unmapped, config=config, interpret=interpret)
    return fold_mapped_axes(run)(queries, blocks, block_indices, block_lengths)


class _Piece(NamedTuple):
    """Neighbouring columns of a key or value."""

    columns: slice
    lanes: slice  # where they lie among those of their half
    part: packing.Part | None  # of packed bytes


class _Half(NamedTuple):
    """What of every fetched row is multiplied with queries, or with weights."""

    lanes: slice
    pieces: tuple[_Piece, ...]

    @property
    def width(self) -> int:
        return self.lanes.stop - self.lanes.start


def _halves(blocks: Blocks, head_dim: int) -> tuple[_Half, _Half]:
    """Keys and values. They are read apart where that cuts no register, and otherwise as one, with zeros in the queries
    and with sums that nothing is made of."""
    both, first = blocks.entries.shape[4], blocks.value_column
    apart = first % LANES == 0 and (both - first) % LANES == 0

    def half(start: int, stop: int, bits: int | None) -> _Half:
        lanes = slice(start, stop) if apart else slice(0, both)
        whole = packing.Part(slice(0, head_dim), slice(0, head_dim), 0, 8, 1)
        parts = (whole,) if bits is None else packing.parts(head_dim, bits)
        shift = start - lanes.start
        return _Half(
            lanes,
            tuple(
                _Piece(part.columns, slice(part.bytes.start + shift, part.bytes.stop + shift), part if bits else None)
                for part in parts
            ),
        )

    return half(0, first, blocks.key_bits), half(first, both, blocks.value_bits)


def recall_unmapped(
    rows: Float[Array, "B H R D"],
    blocks: Blocks,
    number: Int[Array, "B H K"],
    count: Int[Array, "B H K"],
    *,
    config: TpuConfig,
    interpret: Any,
) -> Partials:
    """The kernel, which knows nothing of `vmap`. Every block that is read is copied on chip once, and no other.

    Blocks are fetched `step_blocks` at a time, each by a copy of its own, while those before are computed with; the
    first ones of a head while the head before ends.
    """
    batch, heads, queries, head_dim = rows.shape
    kv_heads, _, places, both = blocks.entries.shape[1:]
    streams = batch * heads
    cores = config.cores if streams % config.cores == 0 else 1
    per_core = streams // cores
    keys, values = halves = _halves(blocks, head_dim)

    step = min(config.step_blocks, -(-number.shape[2] // 8) * 8)
    steps = pl.cdiv(number.shape[2], step)
    count = jnp.clip(count.astype(jnp.int32), 0, places)
    padding = ((0, 0), (0, 0), (0, steps * step - number.shape[2]))
    number, count = (jnp.pad(x.astype(jnp.int32), padding) for x in (number, count))
    is_read = (count > 0).reshape(streams, steps * step)
    # How many blocks each step reads, by a product: XLA would lay them out anew to sum over so few.
    of_step = jnp.arange(steps * step)[:, None] // step == jnp.arange(steps)
    there = jnp.matmul(is_read.astype(jnp.bfloat16), of_step.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    # What lies behind the last step that reads anything is left out; every head has one step.
    used = jnp.max(jnp.where(there > 0, jnp.arange(steps), 0), axis=1) + 1
    # The numbers of blocks that are read, -1 for others, and behind them how many each step has of the former.
    numbers = jnp.where(is_read, number.reshape(is_read.shape), -1)
    plan = jnp.concatenate([numbers, there.astype(jnp.int32)], axis=1)

    def of_stream(core, place, *_):
        return core * per_core + place, 0, 0

    def of_next(core, place, *_):
        return core * per_core + jnp.minimum(place + 1, per_core - 1), 0, 0

    def by_piece(half: _Half) -> pl.BlockSpec:
        shape = (1, len(half.pieces), queries, half.width)
        return pl.BlockSpec(shape, lambda *at: (*of_stream(*at), 0))

    scalars = functools.partial(pl.BlockSpec, (1, 1, plan.shape[1]), memory_space=pltpu.SMEM)
    arrays: dict[str, tuple[Array, pl.BlockSpec]] = {
        "now": (plan[:, None], scalars(of_stream)),
        "ahead": (plan[:, None], scalars(of_next)),
        "rows": (_by_piece(rows.reshape(streams, queries, -1), keys), by_piece(keys)),
        "count": (
            count.astype(jnp.float32).reshape(streams, steps, step),
            pl.BlockSpec((1, steps, step), of_stream),
        ),
        "entries": (blocks.entries, pl.BlockSpec(memory_space=pl.ANY)),
    }
    if blocks.scale is not None:
        for name, scale in zip(("key_scale", "value_scale"), _scales(blocks.scale, number), strict=True):
            shape = (streams, steps, step * places)
            arrays[name] = (scale.reshape(shape), pl.BlockSpec((1, *shape[1:]), of_stream))

    tokens = streams * steps * step * places
    of_rows = pl.BlockSpec((1, queries, 1), of_stream)
    peak, num, den = pl.pallas_call(
        functools.partial(
            _kernel,
            names=tuple(arrays),
            halves=halves,
            bits=(blocks.key_bits, blocks.value_bits),
            head_dim=head_dim,
            heads=heads,
            group=heads // kv_heads,
            places=places,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(cores, per_core),
            in_specs=[spec for _, spec in arrays.values()],
            out_specs=[of_rows, by_piece(values), of_rows],
            scratch_shapes=[
                pltpu.VMEM((2, step * places, both), blocks.entries.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((streams, queries, 1), jnp.float32),
            jax.ShapeDtypeStruct((streams, len(values.pieces), queries, values.width), jnp.float32),
            jax.ShapeDtypeStruct((streams, queries, 1), jnp.float32),
        ],
        # Checks of every copy would take a third of the time to start it; interpreters, which tests run, make them.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True, disable_semaphore_checks=True
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * tokens * queries * head_dim,
            bytes_accessed=tokens * both * blocks.entries.dtype.itemsize
            + sum(x.size * x.dtype.itemsize for name, (x, _) in arrays.items() if name != "entries"),
            transcendentals=tokens * queries,
        ),
        interpret=interpret,
        name="cluster_recall",
    )(used, *(x for x, _ in arrays.values()))
    gathered = jnp.zeros((streams, queries, head_dim))
    for at, piece in enumerate(values.pieces):
        gathered = gathered.at[..., piece.columns].add(num[:, at, :, piece.lanes])
    return Partials(*(x.reshape(batch, heads, queries, *x.shape[2:]) for x in (peak[..., 0], gathered, den[..., 0])))


def _by_piece(rows: Float[Array, "BH R D"], keys: _Half) -> Float[Array, "BH n R W"]:
    """The queries for every piece of the keys, zero where other things lie."""
    nothing = jnp.zeros((*rows.shape[:2], keys.width), rows.dtype)
    laid = [nothing.at[..., piece.lanes].set(rows[..., piece.columns]) for piece in keys.pieces]
    return jnp.stack(laid, axis=1)


def _scales(scale: Float[Array, "B H_kv N P 2"], number: Int[Array, "B H K"]) -> Float[Array, "2 B H_kv g*K P"]:
    """Scales of the keys and of the values in blocks of these numbers, by a product with rows that are one at the
    number: XLA lays scales out with blocks as the last axis, and a gather from there would copy them all."""
    batch, kv_heads, count = scale.shape[:3]
    is_taken = number.reshape(batch, kv_heads, -1, 1) == jnp.arange(count)
    # float32, of which the kernel can read any one row.
    exact: dict[str, Any] = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    return jnp.einsum("bhkn,bhnps->sbhkp", is_taken.astype(scale.dtype), scale, **exact)


def _kernel(used, *refs, names, halves, bits, head_dim, heads, group, places):
    """All that one head reads. `buffer` holds the blocks of two steps: those computed with and those that come.

    Numbers are divided by `lax.div`: `//` would round negative ones down, and lowering that has to know the chip.
    """
    given = dict(zip(names, refs, strict=False))
    peak_ref, num_ref, den_ref, buffer, arrived, turn = refs[len(names) :]
    core, place, last = pl.program_id(0), pl.program_id(1), pl.num_programs(1) - 1
    stream = core * (last + 1) + place
    step = buffer.shape[1] // places
    steps = used[stream]
    first_count = given["count"].shape[1] * step  # in a plan

    def fetch(plan, stream, number, half):
        """Starts the copies of the blocks of a step that are read."""
        row, head = jax.lax.div(stream, heads), jax.lax.div(jax.lax.rem(stream, heads), group)

        def one(slot, carry):
            block = plan[0, 0, number * step + slot]

            @pl.when(block >= 0)
            def _():
                target = buffer.at[half, pl.ds(pl.multiple_of(slot * places, places), places)]
                pltpu.make_async_copy(given["entries"].at[row, head, block], target, arrived.at[half]).start()

            return carry

        jax.lax.fori_loop(0, step, one, None, unroll=8)

    def wait(number, half):
        """For all of them: a semaphore counts bytes, so that one wait stands for as many blocks as it has bytes."""
        fetched = given["now"][0, 0, first_count + number]
        for doubling in range(step.bit_length()):

            @pl.when(jax.lax.rem(jax.lax.shift_right_logical(fetched, doubling), 2) == 1)
            def _(doubling=doubling):
                as_many = buffer.at[half, pl.ds(0, places << doubling)]
                pltpu.make_async_copy(as_many, as_many, arrived.at[half]).wait()

    @pl.when(place == 0)
    def _():
        # Places that no block was copied to are multiplied by weights of zero: what they hold must be finite.
        buffer[...] = jnp.zeros_like(buffer)
        turn[0] = 0
        fetch(given["now"], stream, 0, 0)

    first = turn[0]
    rows = given["rows"]
    kind = product_dtype(rows.dtype, buffer.dtype)
    keys, values = halves
    slots = jax.lax.broadcasted_iota(jnp.int32, (1, step * places), 1)
    # Row i is one over the places of block i: a product with it repeats a count for all places of its block.
    of_block = jax.lax.broadcasted_iota(jnp.int32, (step, step * places), 0)
    repeat = (of_block == jax.lax.div(slots, places)).astype(jnp.float32)

    def one_step(number, sums):
        half = jax.lax.rem(first + number, 2)

        @pl.when(number + 1 < steps)
        def _():
            fetch(given["now"], stream, number + 1, 1 - half)

        @pl.when((number + 1 == steps) & (place < last))
        def _():
            fetch(given["ahead"], stream + 1, 0, 1 - half)

        wait(number, half)
        entries = buffer[half]
        peak, num, den = sums
        logits = jnp.zeros((rows.shape[2], step * places))
        for at, piece in enumerate(keys.pieces):
            logits += _with_piece(rows[0, at], entries[:, keys.lanes], piece.part, bits[0], axis=1)
        logits = logits * head_dim**-0.5
        if "key_scale" in given:
            logits = logits * given["key_scale"][0, pl.ds(number, 1)]
        count = _product(given["count"][0, pl.ds(number, 1)], repeat, axis=0)
        logits = jnp.where(jax.lax.rem(slots, places) < count.astype(jnp.int32), logits, MASK_VALUE)
        higher = jnp.maximum(peak, jnp.max(logits, axis=1, keepdims=True))
        fade, weight = jnp.exp(peak - higher), jnp.exp(logits - higher)
        den = den * fade + jnp.sum(weight, axis=1, keepdims=True)
        if "value_scale" in given:
            weight = weight * given["value_scale"][0, pl.ds(number, 1)]
        added = [
            _with_piece(weight.astype(kind), entries[:, values.lanes], piece.part, bits[1], axis=0)
            for piece in values.pieces
        ]
        return higher, tuple(old * fade + new for old, new in zip(num, added, strict=True)), den

    queries = rows.shape[2]
    none = jnp.zeros((queries, values.width))
    nothing = (jnp.full((queries, 1), MASK_VALUE), (none,) * len(values.pieces), jnp.zeros((queries, 1)))
    peak_ref[0], num, den_ref[0] = jax.lax.fori_loop(0, steps, one_step, nothing)
    for at, sums in enumerate(num):
        num_ref[0, at] = sums
    turn[0] = jax.lax.rem(first + steps, 2)


def _with_piece(
    left: Float[Array, "R K"], stored: Float[Array, "S W"], part: packing.Part | None, bits: int | None, *, axis: int
) -> Float[Array, "R N"]:
    """A product over an axis of what is stored; of packed bytes, of that share of their numbers that a part holds.
    Codes are multiplied as they are, and what they are short of the numbers is added."""
    kind = product_dtype(left.dtype, stored.dtype)
    left = left.astype(kind)
    if part is not None:
        stored = part.codes(stored.astype(jnp.int32))
    if jnp.issubdtype(stored.dtype, jnp.integer):
        stored = stored.astype(jnp.float32)  # from where every type can be reached
    product = _product(left, stored.astype(kind), axis=axis)
    if part is None or bits is None:
        return product
    product = 2 * part.factor * product
    if part.factor > 1:
        return product
    return product - packing.largest(bits) * jnp.sum(left.astype(jnp.float32), axis=1, keepdims=True)


def _product(left: Float[Array, "R K"], right: Float[Array, "..."], *, axis: int) -> Float[Array, "R N"]:
    """A product over an axis of the right side, in its type, accumulated in float32."""
    precision = jax.lax.Precision.HIGHEST if right.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        left.astype(right.dtype),
        right,
        (((1,), (axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
