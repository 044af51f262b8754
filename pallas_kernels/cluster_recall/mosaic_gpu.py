"""`cluster_recall` as a Pallas kernel for Hopper GPUs (Mosaic GPU); see `pallas_kernels.hopper`."""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.cluster_recall.batching import fold_mapped_axes
from pallas_kernels.cluster_recall.blocks import Inputs
from pallas_kernels.cluster_recall.xla import gather_blocks
from pallas_kernels.hopper import GpuConfig
from pallas_kernels.partials import MASK_VALUE, Partials, merge_splits
from pallas_kernels.quantized_array import array_bytes
from pallas_kernels.weighted_decode.entries import check_kernel_support

SCALES = ("key_scale", "value_scale")


def check(inputs: Inputs, *, interpret: Any, **_options: Any) -> None:
    """Checks that the kernel supports the arguments of `cluster_recall`.

    Args:
        interpret: Whether the kernel is interpreted, on any device.

    Raises:
        NotImplementedError: If the kernel does not support them.
    """
    if not interpret:
        hopper.check_device()
    check_kernel_support(inputs.queries, inputs.blocks.logit_cap, inputs.blocks.value_dim)
    queries, blocks, *_ = inputs
    block_size, width = blocks.entries.shape[3], 2 * blocks.width
    if block_size not in (8, 16, 32, 64) or width not in (128, 256, 384, 512):
        raise NotImplementedError(
            f"blocks are {block_size} x {width}; the Hopper kernel supports 8, 16, 32 or 64 rows of 128, 256, 384 or "
            "512 columns"
        )
    is_packed = blocks.key_bits is not None
    if is_packed and queries.shape[3] != blocks.width:
        raise NotImplementedError(f"packed keys have {queries.shape[3]} dimensions in {blocks.width} columns")
    key_width, value_width = blocks.value_column, blocks.entries.shape[4] - blocks.value_column
    # Mosaic reads columns of rows that are not swizzled only if the rows are a multiple of these columns.
    if key_width != value_width and math.gcd(key_width, value_width) % 32:
        raise NotImplementedError(
            f"keys have {key_width} bytes and values {value_width}; different sizes must be multiples of 32"
        )
    hopper.check_dtypes(*["entries"] * is_packed, queries=queries, entries=blocks.entries)
    hopper.choose_stages(functools.partial(_scratch, inputs))


def cluster_recall(inputs: Inputs, *, config: GpuConfig, interpret: Any) -> Partials:
    """`xla.cluster_recall` that copies every block that is read on chip once, and no other.

    Every block has its own copy. The blocks of 64 tokens arrive together, while earlier ones are processed. The splits
    of a head share its blocks, up to the last one that is read, evenly.

    Args:
        config: How to divide the work.
        interpret: Passed to `plgpu.kernel`.

    Returns:
        Partials over the selected tokens.
    """
    run = functools.partial(_cluster_recall, config=config, interpret=interpret)
    return fold_mapped_axes(run)(inputs)


def _cluster_recall(inputs: Inputs, *, config: GpuConfig, interpret: Any) -> Partials:
    queries, blocks, indices, lengths = inputs
    batch, heads, count, head_dim = queries.shape
    kv_heads, _, block_size, row_width = blocks.entries.shape[1:]
    width = blocks.width
    operands = hopper.Operands.create(queries.dtype, blocks.entries.dtype)
    scratch_of = functools.partial(_scratch, inputs)
    stages, programs = hopper.choose_stages(scratch_of, config.stages)
    per_step = hopper.SLOTS // block_size
    max_steps = pl.cdiv(indices.shape[2], per_step)
    splits = min(config.splits or hopper.balance_splits([batch * heads], [max_steps], programs)[0], max_steps)

    padding = ((0, 0), (0, 0), (0, max_steps * per_step - indices.shape[2]))
    indices, lengths = (jnp.pad(x.astype(jnp.int32), padding) for x in (indices, jnp.clip(lengths, 0, block_size)))
    step = jnp.arange(max_steps * per_step, dtype=jnp.int32) // per_step
    arrays: dict[str, Any] = {
        "queries": hopper.query_operands(jnp.pad(queries, ((0, 0), (0, 0), (0, 0), (0, width - head_dim))), operands),
        "indices": indices,
        "lengths": lengths,
        "steps": jnp.max(jnp.where(lengths > 0, step + 1, 0), axis=2),
        "entries": blocks.entries,
    }
    if blocks.scale is not None:
        scale = gather_blocks(blocks.scale, indices).reshape(*indices.shape[:2], -1, 2)
        arrays |= {name: scale[..., half] for half, name in enumerate(SCALES)}
    outputs = hopper.partials_shapes((batch, heads, splits), arrays["queries"].shape[3], width)

    def cluster_recall(*refs, **scratch):
        named = dict(zip((*arrays, *outputs), refs, strict=True))
        _kernel(named, scratch, operands, blocks, head_dim=head_dim, group=heads // kv_heads, splits=splits)

    tokens = batch * heads * indices.shape[2] * block_size
    entries_bytes = tokens * row_width * blocks.entries.dtype.itemsize
    maximum, denominator, numerator = hopper.launch(
        cluster_recall, list(arrays.values()), list(outputs.values()), scratch_of(stages),
        grid={"splits": splits, "heads": heads, "batch": batch}, interpret=interpret, approx_math=True,
        flops=4 * tokens * count * head_dim, transcendentals=tokens * count,
        bytes_accessed=entries_bytes + array_bytes({**arrays, "entries": None}, outputs),
    )  # fmt: skip
    partials = Partials(maximum[..., :count], numerator[..., :count, :head_dim], denominator[..., :count])
    return merge_splits(partials)


def _scratch(inputs: Inputs, stages: int) -> dict[str, Any]:
    """Returns the shared memory of a program, named after the arrays whose blocks it holds."""
    blocks, width = inputs.blocks, inputs.blocks.width
    operands = hopper.Operands.create(inputs.queries.dtype, blocks.entries.dtype)
    block_size, row_width = blocks.entries.shape[3:]
    columns = hopper.operand_columns(width, blocks.key_bits, blocks.value_bits)
    scales = {} if blocks.scale is None else dict.fromkeys(SCALES, blocks.scale.dtype)
    # Keys and values are swizzled separately, in entire tiles.
    half_columns = math.gcd(blocks.value_column, row_width - blocks.value_column)
    ring = hopper.blocked((stages, hopper.SLOTS, row_width), blocks.entries.dtype, swizzled_as=half_columns)
    return {
        **hopper.attention_scratch(inputs.queries.dtype, operands, width, columns),
        # The numerator is written through the memory of the entries, whose reads are complete by then.
        "entries": plgpu.RefUnion(ring, hopper.blocked((hopper.ROWS, width), jnp.float32)),
        **{name: plgpu.SMEM((stages, hopper.SLOTS), dtype) for name, dtype in scales.items()},
        "entry_barrier": plgpu.Barrier(num_arrivals=hopper.SLOTS // block_size + len(scales), num_barriers=stages),
    }


def _kernel(refs, scratch, operands, blocks, *, head_dim, group, splits):
    """Attends with all queries of a head to one split of its selected blocks."""
    batch, head, split = (lax.axis_index(name) for name in ("batch", "heads", "splits"))
    ring, numerator_out = scratch["entries"]
    stages, _, row_width = ring.shape
    block_size = refs["entries"].shape[3]
    key_columns, value_columns = (
        pl.ds(0, blocks.value_column),
        pl.ds(blocks.value_column, row_width - blocks.value_column),
    )
    per_step = hopper.SLOTS // block_size
    scales = [name for name in SCALES if name in refs]
    block_shape = (hopper.ROWS, hopper.SLOTS)

    # The splits share the steps evenly.
    all_steps = refs["steps"][batch, head]
    per_split = lax.div(all_steps + (splits - 1), splits)
    begin = split * per_split
    steps = jnp.clip(all_steps - begin, 0, per_split)

    def load_plan(name, step):
        """Returns the "indices" or "lengths" (`name`) of the blocks of `step`, clipped to the last step."""
        first = (begin + jnp.clip(step, 0, jnp.maximum(steps - 1, 0))) * per_step
        return [refs[name][batch, head, first + block] for block in range(per_step)]

    def fetch(step, indices, lengths):
        """Starts the copies of the blocks of `step` that are read. Others arrive at the barrier without a copy."""

        @pl.when(step < steps)
        def _():
            stage = lax.rem(step, stages)
            barrier = scratch["entry_barrier"].at[stage]
            for block, (index, length) in enumerate(zip(indices, lengths, strict=True)):

                @pl.when(length > 0)
                def _(block=block, index=index):
                    source = refs["entries"].at[batch, lax.div(head, group), index]
                    plgpu.copy_gmem_to_smem(source, ring.at[stage, pl.ds(block * block_size, block_size)], barrier)

                @pl.when(length == 0)
                def _():
                    plgpu.barrier_arrive(barrier)

            slots = pl.ds((begin + step) * hopper.SLOTS, hopper.SLOTS)
            for name in scales:
                plgpu.copy_gmem_to_smem(refs[name].at[batch, head, slots], scratch[name].at[stage], barrier)

    hopper.fetch_queries(refs["queries"].at[batch, head], scratch)
    # Rows without a block are multiplied by weights of zero, so they must be finite.
    for stage in range(stages):
        ring[stage] = plgpu.layout_cast(jnp.zeros(ring.shape[1:], ring.dtype), hopper.LAYOUT)
    plgpu.commit_smem()
    for early in range(stages):
        fetch(jnp.int32(early), load_plan("indices", jnp.int32(early)), load_plan("lengths", jnp.int32(early)))
    query_powers = hopper.await_queries(scratch)

    def process_step(step, before):
        """Returns the partials `before` with the blocks of `step` added."""
        stage = lax.rem(step, stages)
        # The plan is read from global memory long before it is used.
        lengths = load_plan("lengths", step)
        next_indices, next_lengths = load_plan("indices", step + stages), load_plan("lengths", step + stages)
        plgpu.barrier_wait(scratch["entry_barrier"].at[stage])
        buffer = scratch.get("operands")
        keys = hopper.as_operands(ring.at[stage, :, key_columns], buffer, operands, blocks.key_bits)
        if not operands.is_direct:
            plgpu.commit_smem()
        scores = hopper.query_key_products(scratch["queries"], keys, operands) * (head_dim**-0.5 * hopper.LOG2E)
        if query_powers is not None:
            scores = scores * hopper.broadcast_rows(query_powers, block_shape)
        loaded = {name: hopper.load(scratch[name].at[stage], hopper.SLOT_LAYOUT).astype(jnp.float32) for name in scales}
        if "key_scale" in loaded:
            scores = scores * hopper.broadcast_slots(loaded["key_scale"], block_shape)
        slot = plgpu.broadcasted_iota(jnp.int32, (hopper.SLOTS,), 0, layout=hopper.SLOT_LAYOUT)
        end = jnp.zeros_like(slot)
        for block, length in enumerate(lengths):
            end = jnp.where(slot >= block * block_size, block * block_size + length, end)
        # Scores of rows without a block are arbitrary.
        is_read = hopper.broadcast_slots(slot, block_shape) < hopper.broadcast_slots(end, block_shape)
        scores = jnp.where(is_read, scores, MASK_VALUE * hopper.LOG2E)
        maximum, rescale, denominator, weight = hopper.update_max(before, scores, scores)
        if "value_scale" in loaded:
            weight = weight * hopper.broadcast_slots(loaded["value_scale"], block_shape)
        powers = hopper.store_weights(scratch["weights"], weight, operands)
        values = hopper.as_operands(ring.at[stage, :, value_columns], buffer, operands, blocks.value_bits)
        plgpu.commit_smem()
        numerator = hopper.add_values(before.numerator, rescale, scratch["weights"], values, operands, powers)
        fetch(step + stages, next_indices, next_lengths)
        return hopper.RunningPartials(maximum, denominator, numerator)

    partials = lax.fori_loop(0, steps, process_step, hopper.RunningPartials.create(blocks.width))
    hopper.write_partials(partials, scratch, refs, (batch, head, split), numerator_out)
