"""The decisions of the balanced walk as Pallas kernels for Hopper GPUs (Mosaic GPU).

Shared memory holds no kernel matrix of more than some 200 entries. XLA computes the matrices, which the L2 cache holds
as far as they fit, and a kernel makes all decisions. XLA would start several programs for each decision. One warpgroup
processes one block; its threads share the entries evenly, in registers.
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
from pallas_kernels.batching import run_batched

THREADS = 128  # of a warpgroup
MAX_ENTRIES = 2048  # that fit in registers


def check(block: Block, *_vectors: Array, interpret: Any) -> None:
    """Checks that the kernels support a block.

    Args:
        block: The entries.
        interpret: Whether the kernels are interpreted, on any device.

    Raises:
        NotImplementedError: If the kernels do not support it.
    """
    if not interpret:
        hopper.check_device()
    if block.keys.shape[-2] > MAX_ENTRIES:
        raise NotImplementedError(f"{block.keys.shape[-2]} entries; the Hopper kernel supports at most {MAX_ENTRIES}")


def assign_signs(
    block: Block, uniforms: Float[Array, "t"], gain: Float[Array, "t"], weight: Float[Array, "t"], *, interpret: Any
) -> Signs:
    """`reference.assign_signs` with all decisions in one kernel.

    Args:
        block: The entries.
        uniforms: One draw from [0, 1) per entry.
        gain: The gain of each entry.
        weight: The weight of each entry.
        interpret: Passed to `plgpu.kernel`.

    Returns:
        The signs and the number of clipped decisions.
    """

    def run(block: Block, *vectors: Array) -> Signs:
        kernel = _pad(jax.vmap(reference.kernel_matrix)(block), axes=2)
        results = _walk(_signs_kernel, ("signs", "clipped"), vectors[0].shape[1], interpret, kernel, *vectors)
        return Signs(results[0], _count(results[1]))

    return run_batched(run, block, uniforms, gain, weight)


def thin_pairs(
    block: Block, uniforms: Float[Array, "h"], weights: Float[Array, "t"], gamma: Float[Array, ""], *, interpret: Any
) -> ThinnedPairs:
    """`reference.thin_pairs` with all decisions in one kernel.

    Args:
        block: The entries.
        uniforms: One draw from [0, 1) per pair.
        weights: The weights of the entries.
        gamma: The strength of the tilt.
        interpret: Passed to `plgpu.kernel`.

    Returns:
        The kept entries.
    """

    def run(block: Block, uniforms: Array, weights: Array, gamma: Array) -> ThinnedPairs:
        kernel = jax.vmap(reference.kernel_matrix)(block)
        diagonal = jnp.diagonal(kernel, axis1=1, axis2=2)
        padded = _pad(kernel, axes=2)
        index, size = jnp.arange(diagonal.shape[1], dtype=jnp.float32), padded.shape[1]
        order = _pad(jnp.where(weights > 0, index, index + size), fill=2 * size)
        scalars = jnp.stack([gamma, reference.min_squared_distance(jnp.max(diagonal, axis=1))], axis=1)
        indices, pair_weights, clipped = _walk(
            _pairs_kernel, ("indices", "pair_weights", "clipped"), uniforms.shape[1], interpret,
            padded, _pad(diagonal), order, weights, reference.relative_weights(weights), uniforms, scalars,
        )  # fmt: skip
        return ThinnedPairs(indices.astype(jnp.int32), pair_weights, _count(clipped))

    return run_batched(run, block, uniforms, weights, gamma)


def _pad(x: Array, fill: int = 0, axes: int = 1) -> Array:
    """Returns x with its last axes padded such that threads share them evenly."""
    padding = [(0, 0)] * (x.ndim - axes) + [(0, -size % THREADS) for size in x.shape[x.ndim - axes :]]
    return jnp.pad(x, padding, constant_values=fill)


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
    """Returns the results of a kernel with one program per block, each with one number per decision."""
    blocks, entries, _ = matrices.shape
    size = pl.cdiv(decisions, THREADS) * THREADS
    results = hopper.launch(
        functools.partial(kernel, decisions=decisions), (matrices, *arrays),
        [jax.ShapeDtypeStruct((blocks, size), jnp.float32) for _ in names],
        {name: plgpu.SMEM((size,), jnp.float32) for name in names},
        grid={"blocks": blocks}, interpret=interpret, flops=4 * blocks * decisions * entries,
    )  # fmt: skip
    return [x[:, :decisions] for x in results]


# Indices are float32, which represents them exactly: Mosaic loses track of which integers are signed.


def _signs_kernel(matrix_ref, uniforms_ref, gain_ref, weight_ref, signs_ref, clipped_ref, *, signs, clipped, decisions):
    block = lax.axis_index("blocks")
    entries = _indices(matrix_ref.shape[1])

    def decide(i, carry):
        """Returns the sums, signs and clipped decisions, `carry`, after decision i."""
        sums, signs, clipped = carry
        is_here = entries == i.astype(jnp.float32)
        tilt = gain_ref[block, i] * jnp.sum(jnp.where(is_here, sums, 0.0))
        sign = jnp.where(uniforms_ref[block, i] < 0.5 - tilt, 1.0, -1.0)
        sums = sums + sign * weight_ref[block, i] * _row(matrix_ref, block, i)
        return sums, jnp.where(is_here, sign, signs), jnp.where(is_here, _to_float(jnp.abs(tilt) > 0.5), clipped)

    zeros = _zeros(entries.shape[0])
    _, signs[...], clipped[...] = lax.fori_loop(0, decisions, decide, (zeros, zeros, zeros))
    _write(block, [(signs, signs_ref), (clipped, clipped_ref)])


def _pairs_kernel(
    matrix_ref, diagonal_ref, order_ref, weights_ref, scale_ref, uniforms_ref, scalars_ref,
    indices_ref, pair_weights_ref, clipped_ref, *, indices, pair_weights, clipped, decisions,
):  # fmt: skip
    block = lax.axis_index("blocks")
    padded, size = matrix_ref.shape[1], indices.shape[0]
    paired = 2.0 * padded  # in the order, instead of entries that are paired
    entries, pairs = _indices(padded), _indices(size)
    diagonal, order = (
        hopper.load(ref.at[block], _layout(padded), optimized=False) for ref in (diagonal_ref, order_ref)
    )
    gamma, min_distance = scalars_ref[block, 0], scalars_ref[block, 1]

    def decide(step, carry):
        """Returns the order, sums and results, `carry`, after the pair of `step`."""
        order, sums, indices, pair_weights, clipped = carry
        first = jnp.min(order)
        first = jnp.where(first >= padded, first - padded, first)
        at_first = entries == first
        order = jnp.where(at_first, paired, order)
        i = first.astype(jnp.int32)
        row = _row(matrix_ref, block, i)
        empty_distance = jnp.where(order < paired, reference.EMPTY_DISTANCE, jnp.inf)
        distance = jnp.where(order < padded, diagonal - 2 * row, empty_distance)
        second = jnp.min(jnp.where(distance == jnp.min(distance), entries, padded - 1.0))
        at_second = entries == second
        j = second.astype(jnp.int32)
        total = weights_ref[block, i] + weights_ref[block, j]
        share = jnp.where(total > 0, weights_ref[block, i] / jnp.maximum(total, 1e-30), 0.5)
        squared_distance = diagonal_ref[block, i] + diagonal_ref[block, j] - 2 * matrix_ref[block, i, j]
        difference = jnp.sum(jnp.where(at_first, sums, 0.0) - jnp.where(at_second, sums, 0.0))
        tilt = reference.pair_tilt(share, gamma, difference, squared_distance, min_distance)
        keeps_first = uniforms_ref[block, step] < share - tilt
        change = jnp.where(keeps_first, scale_ref[block, j], -scale_ref[block, i])
        is_here = pairs == step.astype(jnp.float32)
        return (
            jnp.where(at_second, paired, order),
            sums + change * (row - _row(matrix_ref, block, j)),
            jnp.where(is_here, jnp.where(keeps_first, first, second), indices),
            jnp.where(is_here, total, pair_weights),
            jnp.where(is_here, _to_float(jnp.abs(share - tilt - 0.5) > 0.5), clipped),
        )

    start = (order, _zeros(padded), _zeros(size), _zeros(size), _zeros(size))
    _, _, indices[...], pair_weights[...], clipped[...] = lax.fori_loop(0, decisions, decide, start)
    _write(block, [(indices, indices_ref), (pair_weights, pair_weights_ref), (clipped, clipped_ref)])


def _layout(size: int) -> Any:
    """Returns the layout in which neighboring threads hold neighboring numbers."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=1)


def _indices(size: int) -> Float[Array, "n"]:
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=_layout(size)).astype(jnp.float32)


def _zeros(size: int) -> Float[Array, "n"]:
    return plgpu.layout_cast(jnp.zeros((size,), jnp.float32), _layout(size))


def _row(matrix_ref: Any, block: Any, index: Any) -> Float[Array, "T"]:
    return hopper.load(matrix_ref.at[block, index], _layout(matrix_ref.shape[1]), optimized=False)


def _to_float(condition: Any) -> Any:
    return jnp.where(condition, 1.0, 0.0)


def _write(block: Any, results: Sequence[tuple[Any, Any]]) -> None:
    """Copies results of a block from shared to global memory."""
    plgpu.commit_smem()
    for shared, result in results:
        plgpu.copy_smem_to_gmem(shared, result.at[block])
    plgpu.wait_smem_to_gmem(0)
