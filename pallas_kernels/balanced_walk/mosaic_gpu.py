"""The walk's decisions as Pallas kernels for Hopper GPUs (Mosaic GPU).

A multiprocessor's memory holds no matrix of more than some 200 entries. XLA makes the matrices, in the GPU's
second-level cache as far as they fit there, and a kernel takes all decisions, where XLA would start several programs
for each. One warpgroup walks one block; its threads share what is known of every entry evenly, in registers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper
from pallas_kernels.balanced_walk import reference
from pallas_kernels.balanced_walk.reference import Block, Signs, ThinnedPairs
from pallas_kernels.batching import fold_mapped_axes

THREADS = 128  # of a warpgroup
MAX_ENTRIES = 2048  # more do not fit in registers


def check(block: Block, *vectors: Array, interpret: Any) -> None:
    """Raises a NotImplementedError for what the kernels cannot do, with the reason."""
    if not interpret:
        hopper.check_device()
    if block.keys.shape[-2] > MAX_ENTRIES:
        raise NotImplementedError(f"{block.keys.shape[-2]} entries; the Hopper kernel takes {MAX_ENTRIES} at most")


def assign_signs(
    block: Block,
    uniforms: Float[Array, "t"],
    gain: Float[Array, "t"],
    weight: Float[Array, "t"],
    *,
    interpret: Any,
) -> Signs:
    """`reference.signs` with all decisions in one kernel."""

    def of_blocks(*given: Any) -> Signs:
        block, *vectors = given
        kernel = _whole(jax.vmap(reference.kernel_matrix)(block), axes=2)
        sign, clipped = _walk(_signs_kernel, ("sign", "clipped"), vectors[0].shape[1], interpret, kernel, *vectors)
        return Signs(sign, _count(clipped))

    return _alone(of_blocks, block, uniforms, gain, weight)


def thin_pairs(
    block: Block,
    uniforms: Float[Array, "h"],
    weights: Float[Array, "t"],
    gamma: Float[Array, ""],
    *,
    interpret: Any,
) -> ThinnedPairs:
    """`reference.pairs` with all decisions in one kernel."""

    def of_blocks(*given: Any) -> ThinnedPairs:
        block, uniforms, weights, gamma = given
        kernel = jax.vmap(reference.kernel_matrix)(block)
        own = jnp.diagonal(kernel, axis1=1, axis2=2)
        padded = _whole(kernel, axes=2)
        places = jnp.arange(own.shape[1], dtype=jnp.float32)
        turn = _whole(jnp.where(weights > 0, places, places + padded.shape[1]), fill=2 * padded.shape[1])
        numbers = jnp.stack([gamma, reference.min_squared_distance(own)], axis=1)
        kept, weight, clipped = _walk(
            _pairs_kernel, ("kept", "weight", "clipped"), uniforms.shape[1], interpret,
            padded, _whole(own), turn, weights, reference.relative_weights(weights), uniforms, numbers,
        )  # fmt: skip
        return ThinnedPairs(kept.astype(jnp.int32), weight, _count(clipped))

    return _alone(of_blocks, block, uniforms, weights, gamma)


def _alone(of_blocks: Callable[..., Any], *arguments: Any) -> Any:
    """One block by itself; under `jax.vmap` all of them side by side."""
    found = fold_mapped_axes(of_blocks)(*jax.tree.map(lambda x: x[None], arguments))
    return jax.tree.map(lambda x: x[0], found)


def _whole(x: Array, fill: int = 0, axes: int = 1) -> Array:
    """Padded so that threads share the last axes evenly."""
    pad = [(0, 0)] * (x.ndim - axes) + [(0, -size % THREADS) for size in x.shape[x.ndim - axes :]]
    return jnp.pad(x, pad, constant_values=fill)


def _count(clipped: Float[Array, "B n"]) -> Int[Array, "B"]:
    return jnp.sum(clipped, axis=1).astype(jnp.int32)


def _walk(
    kernel: Callable[..., None],
    names: Sequence[str],
    decisions: int,
    interpret: Any,
    matrices: Float[Array, "B T T"],
    *arrays: Float[Array, "B n"],
) -> list[Float[Array, "B n"]]:
    """Runs a kernel with a program for every block. Each of its results is a number for every decision."""
    blocks, entries, _ = matrices.shape
    size = pl.cdiv(decisions, THREADS) * THREADS
    results = plgpu.kernel(
        functools.partial(kernel, decisions=decisions),
        out_type=[jax.ShapeDtypeStruct((blocks, size), jnp.float32) for _ in names],
        scratch_types={name: plgpu.SMEM((size,), jnp.float32) for name in names},
        grid=(blocks,),
        grid_names=("blocks",),
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
        **hopper.cost(flops=4 * blocks * decisions * entries, bytes_accessed=4 * matrices.size, transcendentals=0),
    )(matrices, *arrays)
    return [x[:, :decisions] for x in results]


# Places are float32, which holds them exactly: Mosaic loses track of which integers are signed.


def _signs_kernel(matrix_ref, uniforms_ref, gain_ref, weight_ref, sign_ref, clipped_ref, *, sign, clipped, decisions):
    block = lax.axis_index("blocks")
    entries = _places(matrix_ref.shape[1])

    def decide(place, carry):
        sums, signs, outside = carry
        here = entries == place.astype(jnp.float32)
        tilt = gain_ref[block, place] * jnp.sum(jnp.where(here, sums, 0.0))
        side = jnp.where(uniforms_ref[block, place] < 0.5 - tilt, 1.0, -1.0)
        sums = sums + side * weight_ref[block, place] * _row(matrix_ref, block, place)
        return sums, jnp.where(here, side, signs), jnp.where(here, _one_if(jnp.abs(tilt) > 0.5), outside)

    nothing = _zeros(entries.shape[0])
    _, sign[...], clipped[...] = lax.fori_loop(0, decisions, decide, (nothing, nothing, nothing))
    _give(block, [(sign, sign_ref), (clipped, clipped_ref)])


def _pairs_kernel(
    matrix_ref, own_ref, turn_ref, weights_ref, scale_ref, uniforms_ref, numbers_ref,
    kept_ref, weight_ref, clipped_ref, *, kept, weight, clipped, decisions,
):  # fmt: skip
    block = lax.axis_index("blocks")
    padded, size = matrix_ref.shape[1], kept.shape[0]
    taken = 2.0 * padded
    entries, results = _places(padded), _places(size)
    own, turn = (hopper.load(ref.at[block], _layout(padded), optimized=False) for ref in (own_ref, turn_ref))
    gamma, least = numbers_ref[block, 0], numbers_ref[block, 1]

    def decide(step, carry):
        turn, sums, kept, weight, outside = carry
        first = jnp.min(turn)
        first = jnp.where(first >= padded, first - padded, first)
        at_first = entries == first
        turn = jnp.where(at_first, taken, turn)
        i = first.astype(jnp.int32)
        row = _row(matrix_ref, block, i)
        away = jnp.where(turn < padded, own - 2 * row, jnp.where(turn < taken, reference.EMPTY_DISTANCE, jnp.inf))
        second = jnp.min(jnp.where(away == jnp.min(away), entries, padded - 1.0))
        at_second = entries == second
        j = second.astype(jnp.int32)
        total = weights_ref[block, i] + weights_ref[block, j]
        share = jnp.where(total > 0, weights_ref[block, i] / jnp.maximum(total, 1e-30), 0.5)
        apart = own_ref[block, i] + own_ref[block, j] - 2 * matrix_ref[block, i, j]
        turned = jnp.sum(jnp.where(at_first, sums, 0.0) - jnp.where(at_second, sums, 0.0))
        tilt = 4 * share * (1 - share) * gamma * turned / jnp.maximum(apart, least)
        stays_first = uniforms_ref[block, step] < share - tilt
        change = jnp.where(stays_first, scale_ref[block, j], -scale_ref[block, i])
        here = results == step.astype(jnp.float32)
        return (
            jnp.where(at_second, taken, turn),
            sums + change * (row - _row(matrix_ref, block, j)),
            jnp.where(here, jnp.where(stays_first, first, second), kept),
            jnp.where(here, total, weight),
            jnp.where(here, _one_if(jnp.abs(share - tilt - 0.5) > 0.5), outside),
        )

    start = (turn, _zeros(padded), _zeros(size), _zeros(size), _zeros(size))
    _, _, kept[...], weight[...], clipped[...] = lax.fori_loop(0, decisions, decide, start)
    _give(block, [(kept, kept_ref), (weight, weight_ref), (clipped, clipped_ref)])


def _layout(size: int) -> Any:
    """Neighbouring threads hold neighbouring numbers, one at a time."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=1)


def _places(size: int) -> Float[Array, "n"]:
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=_layout(size)).astype(jnp.float32)


def _zeros(size: int) -> Float[Array, "n"]:
    return plgpu.layout_cast(jnp.zeros((size,), jnp.float32), _layout(size))


def _row(matrix_ref: Any, block: Any, place: Any) -> Float[Array, "T"]:
    return hopper.load(matrix_ref.at[block, place], _layout(matrix_ref.shape[1]), optimized=False)


def _one_if(condition: Any) -> Any:
    return jnp.where(condition, 1.0, 0.0)


def _give(block: Any, results: Sequence[tuple[Any, Any]]) -> None:
    """Copies results of a block out of shared memory."""
    plgpu.commit_smem()
    for shared, result in results:
        plgpu.copy_smem_to_gmem(shared, result.at[block])
    plgpu.wait_smem_to_gmem(0)
