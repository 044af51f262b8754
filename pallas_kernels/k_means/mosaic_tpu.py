"""A pass of Lloyd's algorithm as a Pallas kernel for TPU (Mosaic)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.k_means.base import Pass


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel cuts its work.

    Attributes:
        block_points: points per step of the pipeline; a multiple of 128.
        vmem_bytes: on-chip memory that the kernel may take.
    """

    block_points: int = 1024
    vmem_bytes: int = 32 * 2**20

    def __post_init__(self) -> None:
        if self.block_points < 128 or self.block_points % 128:
            raise ValueError(f"block_points={self.block_points}; it must be a multiple of 128")


def check(
    points: Float[Array, "N D"],
    directions: Float[Array, "C D"],
    valid: Bool[Array, "N"],
    used: Int[Array, ""],
    summed: Float[Array, "N D"] | None = None,
    *,
    config: Config | None = None,
) -> None:
    """Raises a NotImplementedError for what the kernel cannot do, with the reason."""
    for name, array in {"points": points, "directions": directions, "summed": summed}.items():
        if array is not None and array.dtype != jnp.float32:
            raise NotImplementedError(f"{name} are {array.dtype.name}; the TPU kernel takes float32")
    config = config or Config()
    clusters, head_dim = directions.shape
    # Products, places and membership of a block's points; directions and sums, which stay; points in two buffers.
    block = min(config.block_points, points.shape[0])
    needed = 4 * (4 * clusters * block + 4 * clusters * head_dim + 4 * head_dim * block)
    if needed > config.vmem_bytes:
        raise NotImplementedError(f"{clusters} clusters of {head_dim} dimensions do not fit on chip")


def k_means(
    points: Float[Array, "N D"],
    directions: Float[Array, "C D"],
    valid: Bool[Array, "N"],
    used: Int[Array, ""],
    summed: Float[Array, "N D"] | None = None,
    *,
    config: Config | None = None,
    interpret: Any = False,
) -> Pass:
    """`reference.k_means` in one pass over blocks of points; sums stay on chip until the last.

    Head dimensions that are no multiple of 128 are read with points as the minor axis, so that all tiles are full.
    Products with directions are taken in float32 (`Precision.HIGHEST`); sums are exact up to float32's additions.
    """
    config = config or Config()
    tokens, head_dim = points.shape
    clusters = directions.shape[0]
    block = min(config.block_points, tokens)
    points_minor = head_dim % 128 != 0
    lay = (lambda x: x.T) if points_minor else (lambda x: x)
    if points_minor:
        of_points = pl.BlockSpec((head_dim, block), lambda i: (0, i))
    else:
        of_points = pl.BlockSpec((block, head_dim), lambda i: (i, 0))
    of_row = pl.BlockSpec((1, block), lambda i: (0, i))
    stays = pl.BlockSpec((clusters, head_dim), lambda i: (0, 0))
    arrays = [lay(x) for x in (points, summed) if x is not None]
    label, sums, gained = pl.pallas_call(
        functools.partial(_kernel, tokens=tokens, block=block, axis=int(points_minor)),
        grid=(pl.cdiv(tokens, block),),
        in_specs=[
            pl.BlockSpec((1, 1), lambda i: (0, 0), memory_space=pltpu.SMEM),
            stays,
            of_row,
            *(of_points for _ in arrays),
        ],
        out_specs=[of_row, stays, pl.BlockSpec((1, 1), lambda i: (0, 0))],
        out_shape=[
            jax.ShapeDtypeStruct((1, tokens), jnp.int32),
            jax.ShapeDtypeStruct((clusters, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((1, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=config.vmem_bytes + 16 * 2**20
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * tokens * clusters * head_dim,
            bytes_accessed=4 * (len(arrays) * tokens * head_dim + 2 * clusters * head_dim + 2 * tokens),
            transcendentals=0,
        ),
        interpret=interpret,
        name="k_means",
    )(used.astype(jnp.int32).reshape(1, 1), directions, valid.astype(jnp.int32)[None], *arrays)
    return Pass(label[0], sums, gained[0, 0])


def _kernel(used_ref, directions_ref, valid_ref, points_ref, *refs, tokens, block, axis):
    """One block of points, which are on the given axis. Clusters are rows of the products and points columns, so that
    the best is sought along sublanes and labels come out as a row."""
    summed_ref, (label_ref, sums_ref, gained_ref) = refs[0] if len(refs) == 4 else points_ref, refs[-3:]
    number = pl.program_id(0)

    @pl.when(number == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)
        gained_ref[...] = jnp.zeros_like(gained_ref)

    clusters = directions_ref.shape[0]
    product = jax.lax.dot_general(
        directions_ref[...],
        points_ref[...],
        (((1,), (1 - axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    row = jax.lax.broadcasted_iota(jnp.int32, product.shape, 0)
    product = jnp.where(row < used_ref[0, 0], product, -jnp.inf)
    best = jnp.max(product, axis=0, keepdims=True)
    nearest = jnp.min(jnp.where(product >= best, row, clusters - 1), axis=0, keepdims=True)
    column = number * block + jax.lax.broadcasted_iota(jnp.int32, best.shape, 1)
    there = (column < tokens) & (valid_ref[...] != 0)
    label = jnp.where(there, nearest, clusters)
    label_ref[...] = label
    gained_ref[...] += jnp.sum(jnp.where(there, best, 0.0), axis=1, keepdims=True)
    member = (row == label).astype(jnp.bfloat16)
    # What lies behind the last point is unspecified and may be NaN.
    summed = summed_ref[...]
    place = number * block + jax.lax.broadcasted_iota(jnp.int32, summed.shape, axis)
    for part in _parts(jnp.where(place < tokens, summed, 0.0)):
        sums_ref[...] += jax.lax.dot_general(
            member, part, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
        )


def _parts(x: Float[Array, "..."]) -> list[Float[Array, "..."]]:
    """Three bfloat16 numbers whose sum is x: a product with zeros and ones then takes three passes of the matrix unit
    instead of the six of two float32 numbers."""
    parts = []
    for _ in range(3):
        part = x.astype(jnp.bfloat16)
        parts.append(part)
        x = x - part.astype(jnp.float32)
    return parts
