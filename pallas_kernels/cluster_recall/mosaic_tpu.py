"""Attention to recalled blocks as a Pallas kernel for TPU (Mosaic)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.cluster_recall.base import Blocks, refuse_unknown
from pallas_kernels.cluster_recall.batching import fold_mapped_axes
from pallas_kernels.weighted_decode import EMPTY, MANY_ROWS, Partials
from pallas_kernels.weighted_decode.base import compute_type

TYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
REGISTER_LANES = 128
# Numbers and counts of two heads, each twice, stand in scalar memory.
MOST_BLOCKS = 16384


@dataclasses.dataclass(frozen=True)
class Config:
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
    rows: Float[Array, "B H R D"], blocks: Blocks, number: Int[Array, "B H K"], count: Int[Array, "B H K"]
) -> None:
    """Raises a NotImplementedError for what the kernel cannot do, with the reason."""
    refuse_unknown(rows, blocks)
    places, width = blocks.entries.shape[3:]
    if rows.shape[2] >= MANY_ROWS:
        raise NotImplementedError(f"{rows.shape[2]} rows: from {MANY_ROWS} on products, not reading, take the time")
    for name, array in {"rows": rows, "entries": blocks.entries}.items():
        if array.dtype.name not in TYPES:
            raise NotImplementedError(f"{name} are {array.dtype.name}; a TPU kernel takes {', '.join(TYPES)}")
    if width % REGISTER_LANES or places % 16:
        raise NotImplementedError(
            f"blocks are {places} x {width}; a TPU fetches them where they lie if those are multiples of 16 and "
            f"{REGISTER_LANES}"
        )
    if number.shape[2] > MOST_BLOCKS:
        raise NotImplementedError(f"{number.shape[2]} blocks per head; scalar memory holds {MOST_BLOCKS} of them")


def cluster_recall(
    rows: Float[Array, "B H R D"],
    blocks: Blocks,
    number: Int[Array, "B H K"],
    count: Int[Array, "B H K"],
    config: Config | None = None,
    interpret: Any = False,
) -> Partials:
    """`reference.cluster_recall` in one kernel, under `vmap`, too."""
    run = functools.partial(recall_unmapped, config=config or Config(), interpret=interpret)
    return fold_mapped_axes(run)(rows, blocks, number, count)


def recall_unmapped(
    rows: Float[Array, "B H R D"],
    blocks: Blocks,
    number: Int[Array, "B H K"],
    count: Int[Array, "B H K"],
    *,
    config: Config,
    interpret: Any,
) -> Partials:
    """The kernel, which knows nothing of `vmap`. Every block that is read is copied on chip once, and no other.

    Blocks are fetched `step_blocks` at a time, each by a copy of its own, while those before are computed with; the
    first ones of a head while the head before ends.
    """
    batch, heads, queries, head_dim = rows.shape
    kv_heads, _, places, both = blocks.entries.shape[1:]
    width = both // 2
    streams = batch * heads
    cores = config.cores if streams % config.cores == 0 else 1
    per_core = streams // cores
    # Keys and values are read apart where that cuts no register, and as one with zeros in the queries otherwise.
    apart = width % REGISTER_LANES == 0
    read = width if apart else both

    step = min(config.step_blocks, -(-number.shape[2] // 8) * 8)
    steps = pl.cdiv(number.shape[2], step)
    count = jnp.clip(count.astype(jnp.int32), 0, places)
    padding = ((0, 0), (0, 0), (0, steps * step - number.shape[2]))
    number, count = (jnp.pad(x.astype(jnp.int32), padding) for x in (number, count))
    # What lies behind the last step that reads anything is left out; every head has one step.
    used = jnp.max(jnp.where(count > 0, jnp.arange(steps * step) // step, 0), axis=2).reshape(streams) + 1
    plan = jnp.stack([number, count], axis=2).reshape(streams, 2, steps * step)

    def of_stream(core, place, *_):
        return core * per_core + place, 0, 0

    def of_next(core, place, *_):
        return core * per_core + jnp.minimum(place + 1, per_core - 1), 0, 0

    scalars = functools.partial(pl.BlockSpec, (1, 2, steps * step), memory_space=pltpu.SMEM)
    arrays: dict[str, tuple[Array, pl.BlockSpec]] = {
        "now": (plan, scalars(of_stream)),
        "ahead": (plan, scalars(of_next)),
        "rows": (
            jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, read - head_dim))).reshape(streams, queries, read),
            pl.BlockSpec((1, queries, read), of_stream),
        ),
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
    sums = pl.pallas_call(
        functools.partial(
            _kernel, names=tuple(arrays), head_dim=head_dim, heads=heads, group=heads // kv_heads, places=places
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(cores, per_core),
            in_specs=[spec for _, spec in arrays.values()],
            out_specs=[pl.BlockSpec((1, queries, size), of_stream) for size in (1, read, 1)],
            scratch_shapes=[
                pltpu.VMEM((2, step * places, both), blocks.entries.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((streams, queries, size), jnp.float32) for size in (1, read, 1)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * tokens * queries * head_dim,
            bytes_accessed=tokens * both * blocks.entries.dtype.itemsize
            + sum(x.size * x.dtype.itemsize for name, (x, _) in arrays.items() if name != "entries"),
            transcendentals=tokens * queries,
        ),
        interpret=interpret,
        name="cluster_recall",
    )(used, *(x for x, _ in arrays.values()))
    peak, num, den = (x.reshape(batch, heads, queries, -1) for x in sums)
    return Partials(peak[..., 0], num[..., read - width : read - width + head_dim], den[..., 0])


def _scales(scale: Float[Array, "B H_kv N P 2"], number: Int[Array, "B H K"]) -> Float[Array, "2 B H_kv g*K P"]:
    """Scales of the keys and of the values in blocks of these numbers, by a product with rows that are one at the
    number: XLA lays scales out with blocks as the last axis, and a gather from there would copy them all."""
    batch, kv_heads, count = scale.shape[:3]
    is_taken = number.reshape(batch, kv_heads, -1, 1) == jnp.arange(count)
    precision = jax.lax.Precision.HIGHEST
    return jnp.einsum("bhkn,bhnps->sbhkp", is_taken.astype(jnp.float32), scale, precision=precision)


def _kernel(used, *refs, names, head_dim, heads, group, places):
    """All that one head reads. `buffer` holds the blocks of two steps: those computed with and those that come.

    Numbers are divided by `lax.div`: `//` would round negative ones down, and lowering that has to know the chip.
    """
    given = dict(zip(names, refs, strict=False))
    peak_ref, num_ref, den_ref, buffer, arrived, turn = refs[len(names) :]
    core, place, last = pl.program_id(0), pl.program_id(1), pl.num_programs(1) - 1
    stream = core * (last + 1) + place
    step = buffer.shape[1] // places
    steps = used[stream]

    def each(plan, number: Int[Array, ""], act: Callable) -> None:
        """`act` for every block that is read in a step: where it is in the plan's head, and in the step."""

        def one(slot, carry):
            at = number * step + slot

            @pl.when(plan[0, 1, at] > 0)
            def _():
                act(plan[0, 0, at], slot)

            return carry

        jax.lax.fori_loop(0, step, one, None)

    def copy(stream, block, slot, half):
        head = jax.lax.rem(stream, heads)
        source = given["entries"].at[jax.lax.div(stream, heads), jax.lax.div(head, group), block]
        target = buffer.at[half, pl.ds(pl.multiple_of(slot * places, places), places)]
        return pltpu.make_async_copy(source, target, arrived.at[half])

    def fetch(plan, stream, number, half):
        each(plan, number, lambda block, slot: copy(stream, block, slot, half).start())

    @pl.when(place == 0)
    def _():
        # Places that no block was copied to are multiplied by weights of zero: what they hold must be finite.
        buffer[...] = jnp.zeros_like(buffer)
        turn[0] = 0
        fetch(given["now"], stream, 0, 0)

    first = turn[0]
    rows = given["rows"][0]
    read = rows.shape[1]
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

        each(given["now"], number, lambda block, slot: copy(stream, block, slot, half).wait())
        entries = buffer[half]
        if jnp.issubdtype(entries.dtype, jnp.integer):
            entries = entries.astype(jnp.float32)  # from where every type can be reached
        entries = entries.astype(compute_type(rows.dtype, buffer.dtype))
        peak, num, den = sums
        logits = _product(rows, entries[:, :read], axis=1) * head_dim**-0.5
        if "key_scale" in given:
            logits = logits * given["key_scale"][0, pl.ds(number, 1)]
        count = _product(given["count"][0, pl.ds(number, 1)], repeat, axis=0)
        logits = jnp.where(jax.lax.rem(slots, places) < count.astype(jnp.int32), logits, EMPTY)
        higher = jnp.maximum(peak, jnp.max(logits, axis=1, keepdims=True))
        fade, weight = jnp.exp(peak - higher), jnp.exp(logits - higher)
        den = den * fade + jnp.sum(weight, axis=1, keepdims=True)
        if "value_scale" in given:
            weight = weight * given["value_scale"][0, pl.ds(number, 1)]
        return higher, num * fade + _product(weight, entries[:, -read:], axis=0), den

    queries = rows.shape[0]
    nothing = (jnp.full((queries, 1), EMPTY), jnp.zeros((queries, read)), jnp.zeros((queries, 1)))
    peak_ref[0], num_ref[0], den_ref[0] = jax.lax.fori_loop(0, steps, one_step, nothing)
    turn[0] = jax.lax.rem(first + steps, 2)


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
