"""Attention to recalled blocks as a Pallas kernel for Hopper GPUs (Mosaic GPU), in the way of
`pallas_kernels.hopper`."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper
from pallas_kernels.cluster_recall.batching import fold_mapped_axes
from pallas_kernels.cluster_recall.blocks import Blocks, check_kernel_support
from pallas_kernels.cluster_recall.reference import gather_blocks
from pallas_kernels.dispatch import PreferXla
from pallas_kernels.hopper import GpuConfig
from pallas_kernels.partials import MASK_VALUE, Partials, merge_splits
from pallas_kernels.weighted_decode.reference import COMPUTE_BOUND_QUERIES

SCALES = ("key_scale", "value_scale")


def check(
    queries: Float[Array, "B H R D"],
    blocks: Blocks,
    _block_indices: Int[Array, "B H K"],
    _block_lengths: Int[Array, "B H K"],
    *,
    interpret: Any,
    **_options: Any,
) -> None:
    """Checks that the kernel supports the arguments of `cluster_recall`.

    Args:
        queries: Queries that share a selection.
        blocks: The store.
        interpret: Whether the kernel is interpreted, on any device.

    Raises:
        NotImplementedError: If the kernel does not support them.
    """
    check_kernel_support(queries, blocks)
    if not interpret:
        hopper.check_device()
    if queries.shape[2] >= COMPUTE_BOUND_QUERIES:
        raise PreferXla(f"{queries.shape[2]} queries; XLA is as fast from {COMPUTE_BOUND_QUERIES} queries on")
    block_size, width = blocks.entries.shape[3], 2 * blocks.width
    if block_size not in (8, 16, 32, 64) or width not in (128, 256, 384, 512):
        raise NotImplementedError(
            f"blocks are {block_size} x {width}; the Hopper kernel supports 8, 16, 32 or 64 rows of 128, 256, 384 or "
            "512 columns"
        )
    is_packed = blocks.key_bits is not None
    if is_packed and queries.shape[3] != blocks.width:
        raise NotImplementedError(f"packed keys have {queries.shape[3]} dimensions in {blocks.width} columns")
    hopper.check_types(*["entries"] * is_packed, queries=queries, entries=blocks.entries)
    hopper.roomiest(functools.partial(_scratch, queries, blocks))


def cluster_recall(
    queries: Float[Array, "B H R D"],
    blocks: Blocks,
    block_indices: Int[Array, "B H K"],
    block_lengths: Int[Array, "B H K"],
    *,
    config: GpuConfig,
    interpret: Any,
) -> Partials:
    """`reference.cluster_recall` that copies every block that is read on chip once, and no other.

    Every block is copied on its own. The blocks of 64 tokens arrive together, while earlier ones are processed. The
    splits of a head share its blocks, up to the last one that is read, evenly.

    Args:
        queries: Queries that share a selection.
        blocks: The store.
        block_indices: The selected blocks.
        block_lengths: The tokens of each selected block that are attended to.
        config: How to divide the work.
        interpret: Passed to `plgpu.kernel`.

    Returns:
        Partials over the selected tokens.
    """
    run = functools.partial(_cluster_recall, config=config, interpret=interpret)
    return fold_mapped_axes(run)(queries, blocks, block_indices, block_lengths)


def _cluster_recall(rows, blocks: Blocks, number, count, *, config: GpuConfig, interpret: Any) -> Partials:
    batch, heads, queries, head_dim = rows.shape
    kv_heads, _, places, both = blocks.entries.shape[1:]
    width = blocks.width
    operands = hopper.Operands.of(rows.dtype, blocks.entries.dtype)
    scratch_of = functools.partial(_scratch, rows, blocks)
    stages, programs = hopper.roomiest(scratch_of, config.stages)
    per_step = hopper.SLOTS // places
    most_steps = pl.cdiv(number.shape[2], per_step)
    splits = min(config.splits or hopper.even_splits(batch * heads, [most_steps], programs)[0], most_steps)

    padding = ((0, 0), (0, 0), (0, most_steps * per_step - number.shape[2]))
    number, count = (jnp.pad(x.astype(jnp.int32), padding) for x in (number, jnp.clip(count, 0, places)))
    step_of = jnp.arange(most_steps * per_step, dtype=jnp.int32) // per_step
    arrays: dict[str, Any] = {
        "rows": hopper.row_parts(jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, width - head_dim))), operands),
        "number": number,
        "count": count,
        "steps": jnp.max(jnp.where(count > 0, step_of + 1, 0), axis=2),
        "entries": blocks.entries,
    }
    if blocks.scale is not None:
        found = gather_blocks(blocks.scale, number).reshape(*number.shape[:2], -1, 2)
        arrays |= {name: found[..., half] for half, name in enumerate(SCALES)}

    padded = arrays["rows"].shape[3]
    of_rows = jax.ShapeDtypeStruct((batch, heads, splits, hopper.ROWS), jnp.float32)
    results: dict[str, Any] = {
        "peak": of_rows,
        "num": jax.ShapeDtypeStruct((batch, heads, splits, padded, width), jnp.float32),
        "den": of_rows,
    }

    def cluster_recall(*refs, **scratch):
        named = dict(zip((*arrays, *results), refs, strict=True))
        _kernel(
            named, scratch, operands=operands, blocks=blocks, head_dim=head_dim, group=heads // kv_heads, splits=splits
        )

    tokens = batch * heads * number.shape[2] * places
    peak, num, den = plgpu.kernel(
        cluster_recall,
        out_type=list(results.values()),
        scratch_types=scratch_of(stages),
        grid=(splits, heads, batch),
        grid_names=("splits", "heads", "batch"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        **hopper.cost(
            flops=4 * tokens * queries * head_dim,
            bytes_accessed=tokens * both * blocks.entries.dtype.itemsize
            + sum(math.prod(x.shape) * x.dtype.itemsize for name, x in arrays.items() if name != "entries")
            + sum(math.prod(x.shape) * x.dtype.itemsize for x in results.values()),
            transcendentals=tokens * queries,
        ),
    )(*arrays.values())
    return merge_splits(Partials(peak[..., :queries], num[..., :queries, :head_dim], den[..., :queries]))


def _scratch(rows: Array, blocks: Blocks, stages: int) -> dict[str, Any]:
    """What a program keeps in shared memory, under the names of the arrays that it holds parts of."""
    operands = hopper.Operands.of(rows.dtype, blocks.entries.dtype)
    places, both = blocks.entries.shape[3:]
    width = blocks.width
    columns = hopper.operand_columns(width, blocks.key_bits, blocks.value_bits)
    scales = {} if blocks.scale is None else dict.fromkeys(SCALES, blocks.scale.dtype)
    of_rows = plgpu.SMEM((hopper.ROWS,), jnp.float32)
    scratch: dict[str, Any] = {
        **hopper.rows_scratch(rows.dtype, operands, width, columns),
        # The sums leave through the memory of the entries, of which none is read any more then.
        "entries": plgpu.RefUnion(
            # The key and the value, each on its own, in whole tiles.
            hopper.blocked(
                (stages, hopper.SLOTS, both),
                blocks.entries.dtype,
                swizzled_as=math.gcd(blocks.value_column, both - blocks.value_column),
            ),
            hopper.blocked((hopper.ROWS, width), jnp.float32),
        ),
        **{name: plgpu.SMEM((stages, hopper.SLOTS), dtype) for name, dtype in scales.items()},
        "weights": hopper.blocked((operands.row_parts, hopper.ROWS, hopper.SLOTS), operands.dtype, columns),
        "peak": of_rows,
        "den": of_rows,
        "rows_came": plgpu.Barrier(num_arrivals=operands.row_parts),
        "entries_came": plgpu.Barrier(num_arrivals=hopper.SLOTS // places + len(scales), num_barriers=stages),
    }
    if not operands.direct:
        scratch["operands"] = hopper.blocked((operands.stored_parts, hopper.SLOTS, width), operands.dtype, columns)
    return scratch


def _kernel(refs, scratch, *, operands, blocks, head_dim, group, splits):
    """One split of one head's blocks against all of its rows."""
    batch, head, split = (lax.axis_index(name) for name in ("batch", "heads", "splits"))
    ring, num_out = scratch["entries"]
    stages, _, both = ring.shape
    width, places, padded = blocks.width, refs["entries"].shape[3], refs["rows"].shape[3]
    halves = {"key": pl.ds(0, blocks.value_column), "value": pl.ds(blocks.value_column, both - blocks.value_column)}
    per_step = hopper.SLOTS // places
    scales = [name for name in SCALES if name in refs]
    in_two = (hopper.ROWS, hopper.SLOTS)

    # The splits share the steps evenly.
    there = refs["steps"][batch, head]
    per_split = lax.div(there + (splits - 1), splits)
    begin = split * per_split
    steps = jnp.clip(there - begin, 0, per_split)

    def plan(name, step):
        """The numbers or counts of a step's blocks, of the last step's behind it."""
        at = (begin + jnp.clip(step, 0, jnp.maximum(steps - 1, 0))) * per_step
        return [refs[name][batch, head, at + block] for block in range(per_step)]

    def fetch(step, numbers, counts):
        """Starts the copies of the blocks of a step that are read. The barrier hears of the others, too."""

        @pl.when(step < steps)
        def _():
            stage = lax.rem(step, stages)
            came = scratch["entries_came"].at[stage]
            for block, (number, count) in enumerate(zip(numbers, counts, strict=True)):

                @pl.when(count > 0)
                def _(block=block, number=number):
                    source = refs["entries"].at[batch, lax.div(head, group), number]
                    plgpu.copy_gmem_to_smem(source, ring.at[stage, pl.ds(block * places, places)], came)

                @pl.when(count == 0)
                def _():
                    plgpu.barrier_arrive(came)

            slots = pl.ds((begin + step) * hopper.SLOTS, hopper.SLOTS)
            for name in scales:
                plgpu.copy_gmem_to_smem(refs[name].at[batch, head, slots], scratch[name].at[stage], came)

    hopper.fetch_rows(refs["rows"].at[batch, head], scratch)
    # Places that no block was copied to are multiplied by weights of zero: what they hold must be finite.
    for stage in range(stages):
        ring[stage] = plgpu.layout_cast(jnp.zeros(ring.shape[1:], ring.dtype), hopper.LAYOUT)
    plgpu.commit_smem()
    for early in range(stages):
        fetch(jnp.int32(early), plan("number", jnp.int32(early)), plan("count", jnp.int32(early)))
    row_powers = hopper.await_rows(scratch)

    def step(number, before):
        stage = lax.rem(number, stages)
        # Read from main memory long before they are needed.
        counts = plan("count", number)
        numbers_ahead, counts_ahead = plan("number", number + stages), plan("count", number + stages)
        plgpu.barrier_wait(scratch["entries_came"].at[stage])
        keys = hopper.as_operands(ring.at[stage, :, halves["key"]], scratch.get("operands"), operands, blocks.key_bits)
        if not operands.direct:
            plgpu.commit_smem()
        scores = hopper.logits(scratch["rows"], keys, operands) * (head_dim**-0.5 * hopper.LOG2E)
        if row_powers is not None:
            scores = scores * hopper.of_rows(row_powers, in_two)
        factors = {name: hopper.load(scratch[name].at[stage], hopper.OF_SLOTS).astype(jnp.float32) for name in scales}
        if "key_scale" in factors:
            scores = scores * hopper.of_slots(factors["key_scale"], in_two)
        slot = plgpu.broadcasted_iota(jnp.int32, (hopper.SLOTS,), 0, layout=hopper.OF_SLOTS)
        end = jnp.zeros_like(slot)
        for block, count in enumerate(counts):
            end = jnp.where(slot >= block * places, block * places + count, end)
        # What no block was copied to may be anything: it is not added to.
        scores = jnp.where(
            hopper.of_slots(slot, in_two) < hopper.of_slots(end, in_two), scores, MASK_VALUE * hopper.LOG2E
        )
        peak, fade, den, weight = hopper.weigh(before, scores, scores)
        if "value_scale" in factors:
            weight = weight * hopper.of_slots(factors["value_scale"], in_two)
        powers = hopper.put_weights(scratch["weights"], weight, operands)
        values = hopper.as_operands(
            ring.at[stage, :, halves["value"]], scratch.get("operands"), operands, blocks.value_bits
        )
        plgpu.commit_smem()
        num = hopper.add_values(before.numerator, fade, scratch["weights"], values, operands, powers)
        fetch(number + stages, numbers_ahead, counts_ahead)
        return hopper.RunningPartials(peak, den, num)

    sums = lax.fori_loop(0, steps, step, hopper.RunningPartials.create(width))
    scratch["peak"][...] = sums.max * (1 / hopper.LOG2E)
    scratch["den"][...] = sums.denominator
    hopper.store_columns(num_out, sums.numerator)
    plgpu.commit_smem()
    for name in ("peak", "den"):
        plgpu.copy_smem_to_gmem(scratch[name], refs[name].at[batch, head, split])
    plgpu.copy_smem_to_gmem(num_out.at[pl.ds(0, padded)], refs["num"].at[batch, head, split])
    plgpu.wait_smem_to_gmem(0)
