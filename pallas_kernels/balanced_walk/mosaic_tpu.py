"""The balanced walk as a Pallas kernel for TPU (Mosaic)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.balanced_walk.oracle import Block, Signs, row_scale
from pallas_kernels.batching import run_batched
from pallas_kernels.dispatch import check_config
from pallas_kernels.tpu import dot, launch

ROWS = 128  # of a matrix that are computed at a time


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """How the kernels divide their work.

    Attributes:
        blocks_per_step: Blocks that are processed together, fewer if their matrices do not fit on chip. The decisions
            of one walk depend on each other; several walks hide the latency.
        vmem_bytes: On-chip memory that a kernel may use.
    """

    blocks_per_step: int = 16
    vmem_bytes: int = 48 * 2**20

    def __post_init__(self) -> None:
        check_config(self, blocks_per_step=1)


def check(block: Block, *_vectors: Array, config: TpuConfig, **_options: Any) -> None:
    """Checks that the kernels support a block.

    Args:
        config: How to divide the work.

    Raises:
        NotImplementedError: If the kernels do not support it.
    """
    for name, array in {"keys": block.keys, "values": block.values}.items():
        if array is not None and array.dtype != jnp.float32:
            raise NotImplementedError(f"{name} are {array.dtype.name}; the TPU kernel supports float32")
    if not _fitting_blocks(block, config):
        raise NotImplementedError(f"the matrix of {block.keys.shape[-2]} entries does not fit on chip")


def assign_signs(block: Block, *vectors: Float[Array, "t"], config: TpuConfig, interpret: Any) -> Signs:
    """`xla.assign_signs` with the matrix on chip.

    Args:
        *vectors: The draw, the gain and the weight of each entry.
        config: How to divide the work.
        interpret: Passed to `pallas_call`.

    Returns:
        The signs and the number of clipped decisions.
    """
    entries = block.keys.shape[0]
    scalars = jnp.stack([block.factor, block.offset]).astype(jnp.float32)
    stores = [x for x in (block.keys, block.values) if x is not None]

    def run_blocks(*arrays: Array) -> list[Array]:
        """Returns the signs and clipped decisions of several blocks, whose arrays are `arrays`."""
        blocks = arrays[0].shape[0]
        per_step = min(_fitting_blocks(block, config), pl.next_power_of_2(blocks))
        steps = pl.cdiv(blocks, per_step)

        def split_steps(x: Array) -> Array:
            """Returns x with blocks split into steps; the last step is padded with zeros."""
            x = jnp.pad(x, ((0, steps * per_step - blocks), *((0, 0),) * (x.ndim - 1)))
            return x.reshape(steps, per_step, *x.shape[1:])

        def spec(*shape: int) -> pl.BlockSpec:
            return pl.BlockSpec((None, per_step, *shape), lambda i: (i, 0, *(0 for _ in shape)))

        outputs = launch(
            "signs_kernel", functools.partial(_signs_kernel, stores=len(stores)),
            [(split_steps(x), spec(*x.shape[1:])) for x in arrays],
            [((steps, per_step, size), dtype, spec(size)) for size, dtype in ((entries, jnp.float32), (1, jnp.int32))],
            # Row i of all matrices is contiguous, so that one load reads it with blocks as sublanes.
            parallel=(steps,),
            scratch=[pltpu.VMEM(shape, jnp.float32) for shape in ((entries, per_step, entries), (per_step, entries))],
            interpret=interpret, vmem_limit_bytes=config.vmem_bytes + 16 * 2**20,
            # Products of keys are computed twice: for the largest exponents, and for the matrices.
            flops=2 * blocks * entries**2 * sum(x.shape[-1] for x in (stores[0], *stores)),
            transcendentals=blocks * entries**2,
        )  # fmt: skip
        return [x.reshape(-1, x.shape[2])[:blocks] for x in outputs]

    arrays = [scalars, *(vector.astype(jnp.float32) for vector in vectors), *stores]
    signs, clipped = run_batched(run_blocks, *arrays)
    return Signs(signs, clipped[0])


def _fitting_blocks(block: Block, config: TpuConfig) -> int:
    """Returns how many blocks fit on chip; a power of two, because tiles of few sublanes are."""

    def padded(size: int) -> int:
        return -(-size // 128) * 128

    entries = block.keys.shape[-2]
    dims = sum(padded(x.shape[-1]) for x in (block.keys, block.values) if x is not None)
    # A matrix, its entries in two buffers, and the rows that are being computed.
    available = config.vmem_bytes - 12 * ROWS * padded(entries)
    blocks = min(config.blocks_per_step, available // (4 * entries * (padded(entries) + 2 * dims)))
    return 1 << blocks.bit_length() - 1 if blocks > 0 else 0


def _compute_matrices(matrix_ref, scale_ref, scalars_ref, stores) -> None:
    """Writes `xla.kernel_matrix` of all blocks, some rows at a time."""
    entries, blocks, _ = matrix_ref.shape
    rows = min(ROWS, entries)

    def product(store_ref, index, start):
        return dot(store_ref[index, pl.ds(start, rows), :], store_ref[index], axis=1)

    def exponents(index, step):
        """Returns the first of the rows of `step` and their exponents. The last rows may be computed twice."""
        start = jnp.minimum(step * rows, entries - rows)
        return start, scalars_ref[index : index + 1, :1] * product(stores[0], index, start)

    def update_largest(step, largest):
        """Returns the largest exponents of every block after the rows of `step`."""

        def update(index, largest):
            start, exponent = exponents(index, step)
            row, column = (jax.lax.broadcasted_iota(jnp.int32, exponent.shape, axis) for axis in range(2))
            return jnp.maximum(largest, jnp.max(jnp.where(row + start < column, exponent, 0.0), axis=0, keepdims=True))

        return [update(index, largest) for index, largest in enumerate(largest)]

    def compute_rows(step, largest):
        """Returns the unchanged `largest` exponents after writing the rows of `step`."""
        for index in range(blocks):
            start, exponent = exponents(index, step)
            kernel = jnp.exp(jnp.minimum(exponent - largest[index], 0.0))
            if len(stores) == 2:
                kernel = kernel * (product(stores[1], index, start) + scalars_ref[index : index + 1, 1:])
            matrix_ref[pl.ds(start, rows), index, :] = kernel
        return largest

    largest = [jnp.zeros((1, entries), jnp.float32)] * blocks
    for update in (update_largest, compute_rows):
        largest = jax.lax.fori_loop(0, pl.cdiv(entries, rows), update, largest)
    for index in range(blocks):
        scale_ref[index : index + 1, :] = row_scale(largest[index])


def _signs_kernel(scalars_ref, uniforms_ref, gain_ref, weight_ref, *refs, stores):
    store_refs, (signs_ref, clipped_ref, matrix_ref, scale_ref) = refs[:stores], refs[stores:]
    _compute_matrices(matrix_ref, scale_ref, scalars_ref, store_refs)
    uniforms, gain, weight = uniforms_ref[...], gain_ref[...] * scale_ref[...], weight_ref[...]
    entries = jax.lax.broadcasted_iota(jnp.int32, uniforms.shape, 1)

    def decide(i, carry):
        """Returns the sums, signs and clipped decisions, `carry`, after decision i of every block."""
        sums, signs, clipped = carry
        is_here = entries == i
        tilt = _pick(gain * sums, is_here)
        sign = jnp.where(_pick(uniforms, is_here) < 0.5 - tilt, 1.0, -1.0)
        sums = sums + sign * _pick(weight, is_here) * matrix_ref[i]
        return sums, jnp.where(is_here, sign, signs), clipped + (jnp.abs(tilt) > 0.5).astype(jnp.int32)

    zeros = jnp.zeros_like(uniforms)
    start = zeros, zeros, jnp.zeros(clipped_ref.shape, jnp.int32)
    _, signs_ref[...], clipped_ref[...] = jax.lax.fori_loop(0, uniforms.shape[1], decide, start)


def _pick(x: Float[Array, "b t"], is_here: Any) -> Float[Array, "b 1"]:
    """Returns the number at the one marked position of each row."""
    return jnp.sum(jnp.where(is_here, x, 0.0), axis=1, keepdims=True)
