"""The decisions of the balanced walk as a Pallas kernel for Hopper GPUs (Mosaic GPU).

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
from pallas_kernels.balanced_walk import xla
from pallas_kernels.balanced_walk.oracle import Block, Signs
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
    """`xla.assign_signs` with all decisions in one kernel.

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
        kernel = _pad(jax.vmap(xla.kernel_matrix)(block), axes=2)
        results = _walk(_signs_kernel, ("signs", "clipped"), vectors[0].shape[1], interpret, kernel, *vectors)
        return Signs(results[0], _count(results[1]))

    return run_batched(run, block, uniforms, gain, weight)


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
