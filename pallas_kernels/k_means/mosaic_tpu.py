"""`k_means` as a Pallas kernel for TPU (Mosaic)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.dispatch import check_config
from pallas_kernels.k_means.oracle import Inputs, LloydStep
from pallas_kernels.tpu import dot, launch


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """How the kernel divides its work.

    Attributes:
        block_points: Points per step of the pipeline, a multiple of 128.
        vmem_bytes: On-chip memory that the kernel may use.
    """

    block_points: int = 1024
    vmem_bytes: int = 32 * 2**20

    def __post_init__(self) -> None:
        check_config(self, block_points=128)


def check(inputs: Inputs, *, config: TpuConfig, **_options: Any) -> None:
    """Checks that the kernel supports the arguments of `k_means`.

    Args:
        config: How to divide the work.

    Raises:
        NotImplementedError: If the kernel does not support them.
    """
    inputs.check_dtypes()
    clusters, head_dim = inputs.centroids.shape
    # Products, row indices and membership of a block; centroids and sums, which stay on chip; points in two buffers.
    block = min(config.block_points, inputs.points.shape[0])
    needed = 4 * (4 * clusters * block + 4 * clusters * head_dim + 4 * head_dim * block)
    if needed > config.vmem_bytes:
        raise NotImplementedError(f"{clusters} clusters of {head_dim} dimensions do not fit on chip")


def k_means(inputs: Inputs, *, config: TpuConfig, interpret: Any) -> LloydStep:
    """`xla.k_means` in one pass over blocks of points. The sums stay on chip.

    Points whose dimension is not a multiple of 128 are read with points as the minor axis, so that all tiles are full.
    Inner products are computed in float32 (`Precision.HIGHEST`); sums are exact up to float32 additions.

    Args:
        config: How to divide the work.
        interpret: Passed to `pallas_call`.

    Returns:
        Labels, sums per cluster, and the total inner product.
    """
    points, centroids, is_valid, num_centroids, summands = inputs
    tokens, head_dim = points.shape
    clusters = centroids.shape[0]
    block = min(config.block_points, tokens)
    points_minor = head_dim % 128 != 0
    point_spec = pl.BlockSpec((block, head_dim), lambda i: (i, 0))
    if points_minor:
        point_spec = pl.BlockSpec((head_dim, block), lambda i: (0, i))
    row_spec = pl.BlockSpec((1, block), lambda i: (0, i))
    cluster_spec = pl.BlockSpec((clusters, head_dim), lambda i: (0, 0))
    arrays = [x.T if points_minor else x for x in (points, summands) if x is not None]
    scalar = num_centroids.astype(jnp.int32).reshape(1, 1)
    labels, sums, total_product = launch(
        "k_means", functools.partial(_kernel, tokens=tokens, block=block, axis=int(points_minor)),
        [
            (scalar, pl.BlockSpec((1, 1), lambda i: (0, 0), memory_space=pltpu.SMEM)), (centroids, cluster_spec),
            (is_valid.astype(jnp.int32)[None], row_spec), *((x, point_spec) for x in arrays),
        ],
        [
            ((1, tokens), jnp.int32, row_spec), ((clusters, head_dim), jnp.float32, cluster_spec),
            ((1, 1), jnp.float32, pl.BlockSpec((1, 1), lambda i: (0, 0))),
        ],
        sequential=(pl.cdiv(tokens, block),), interpret=interpret, vmem_limit_bytes=config.vmem_bytes + 16 * 2**20,
        flops=4 * tokens * clusters * head_dim,
    )  # fmt: skip
    return LloydStep(labels[0], sums, total_product[0, 0])


def _kernel(num_centroids_ref, centroids_ref, is_valid_ref, points_ref, *refs, tokens, block, axis):
    """Assigns one block of points and adds them to the sums.

    Clusters are the rows of the inner products and points the columns, so that the maximum is taken along sublanes and
    labels are a row. `axis` is the axis of the points in their block.
    """
    summands_ref, (labels_ref, sums_ref, total_ref) = refs[0] if len(refs) == 4 else points_ref, refs[-3:]
    step = pl.program_id(0)

    @pl.when(step == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)
        total_ref[...] = jnp.zeros_like(total_ref)

    clusters = centroids_ref.shape[0]
    product = dot(centroids_ref[...], points_ref[...], axis=1 - axis)
    row = jax.lax.broadcasted_iota(jnp.int32, product.shape, 0)
    product = jnp.where(row < num_centroids_ref[0, 0], product, -jnp.inf)
    best = jnp.max(product, axis=0, keepdims=True)
    nearest = jnp.min(jnp.where(product >= best, row, clusters - 1), axis=0, keepdims=True)
    column = step * block + jax.lax.broadcasted_iota(jnp.int32, best.shape, 1)
    is_valid = (column < tokens) & (is_valid_ref[...] != 0)
    labels = jnp.where(is_valid, nearest, clusters)
    labels_ref[...] = labels
    total_ref[...] += jnp.sum(jnp.where(is_valid, best, 0.0), axis=1, keepdims=True)
    is_member = (row == labels).astype(jnp.bfloat16)
    # Points beyond the last one are undefined and may be NaN.
    summands = summands_ref[...]
    point = step * block + jax.lax.broadcasted_iota(jnp.int32, summands.shape, axis)
    for part in _bfloat16_parts(jnp.where(point < tokens, summands, 0.0)):
        sums_ref[...] += dot(is_member, part, axis=axis)


def _bfloat16_parts(x: Float[Array, "..."]) -> list[Float[Array, "..."]]:
    """Returns three bfloat16 arrays whose sum is x.

    A product with zeros and ones then takes three passes of the matrix unit instead of six for float32 operands.
    """
    parts = []
    for _ in range(3):
        part = x.astype(jnp.bfloat16)
        parts.append(part)
        x = x - part.astype(jnp.float32)
    return parts
