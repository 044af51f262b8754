"""The decisions of the balanced walk as a Pallas kernel for Hopper GPUs (Mosaic GPU).

Shared memory holds no kernel matrix of more than some 200 entries. XLA computes the matrices, which the L2 cache holds
as far as they fit, and a kernel makes all decisions. XLA would start several programs for each decision. One warpgroup
processes one block; its threads share the entries evenly, in registers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import hopper
from pallas_kernels.balanced_walk import xla
from pallas_kernels.balanced_walk.oracle import Block, Signs
from pallas_kernels.batching import run_batched

THREADS = 128  # of a warpgroup
MAX_ENTRIES = 2048  # that fit in registers


def check(block: Block, *_vectors: Array, interpret: Any) -> None:
    """Checks that the kernels support a block.

    Args:
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
        uniforms: One draw from [0, 1) per entry.
        interpret: Passed to `plgpu.kernel`.

    Returns:
        The signs and the number of clipped decisions.
    """

    def run(block: Block, uniforms: Array, gain: Array, weight: Array) -> Signs:
        matrices, scale = jax.vmap(xla.kernel_matrix)(block)
        blocks, entries, _ = matrices.shape
        padding = -entries % THREADS  # so that threads share the entries evenly
        size = entries + padding
        signs, clipped = hopper.launch(
            functools.partial(_signs_kernel, decisions=entries),
            (jnp.pad(matrices, ((0, 0), (0, padding), (0, padding))), uniforms, gain * scale, weight),
            [jax.ShapeDtypeStruct((blocks, size), jnp.float32)] * 2,
            {name: plgpu.SMEM((size,), jnp.float32) for name in ("signs", "clipped")},
            grid={"blocks": blocks}, interpret=interpret, flops=4 * blocks * entries * size,
        )  # fmt: skip
        return Signs(signs[:, :entries], jnp.sum(clipped[:, :entries], axis=1).astype(jnp.int32))

    return run_batched(run, block, uniforms, gain, weight)


def _signs_kernel(matrix_ref, uniforms_ref, gain_ref, weight_ref, signs_ref, clipped_ref, *, signs, clipped, decisions):
    block, size = lax.axis_index("blocks"), matrix_ref.shape[1]
    # Neighboring threads hold neighboring numbers.
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=1)
    # Indices are float32, which represents them exactly: Mosaic loses track of which integers are signed.
    entries = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout).astype(jnp.float32)

    def decide(i, carry):
        """Returns the sums, signs and clipped decisions, `carry`, after decision i."""
        sums, signs, clipped = carry
        is_here = entries == i.astype(jnp.float32)
        tilt = gain_ref[block, i] * jnp.sum(jnp.where(is_here, sums, 0.0))
        sign = jnp.where(uniforms_ref[block, i] < 0.5 - tilt, 1.0, -1.0)
        sums = sums + sign * weight_ref[block, i] * hopper.load(matrix_ref.at[block, i], layout, optimized=False)
        is_clipped = jnp.where(jnp.abs(tilt) > 0.5, 1.0, 0.0)
        return sums, jnp.where(is_here, sign, signs), jnp.where(is_here, is_clipped, clipped)

    zeros = plgpu.layout_cast(jnp.zeros((size,), jnp.float32), layout)
    _, signs[...], clipped[...] = lax.fori_loop(0, decisions, decide, (zeros, zeros, zeros))
    plgpu.commit_smem()
    for shared, result in ((signs, signs_ref), (clipped, clipped_ref)):
        plgpu.copy_smem_to_gmem(shared, result.at[block])
    plgpu.wait_smem_to_gmem(0)
