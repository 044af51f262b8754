"""`k_means` in XLA, one block of points after the other."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.argmin import min_and_argmin
from pallas_kernels.k_means.oracle import Inputs, LloydStep


@dataclasses.dataclass(frozen=True)
class XlaConfig:
    """How to divide the work.

    Attributes:
        block_points: Points whose inner products are in memory at a time.
    """

    block_points: int = 2048


def k_means(inputs: Inputs, *, config: XlaConfig) -> LloydStep:
    """Runs one iteration of Lloyd's algorithm, see `pallas_kernels.k_means.k_means`.

    Args:
        config: How to divide the work.

    Returns:
        Labels, sums per cluster, and the total inner product.
    """
    points, centroids, is_valid, num_centroids, summands = inputs
    clusters, head_dim = centroids.shape
    tokens = points.shape[0]
    block_size = min(config.block_points, tokens)
    padding = -tokens % block_size

    def split(x: Float[Array, "N D"]) -> Float[Array, "n b D"]:
        return jnp.pad(x, ((0, padding), (0, 0))).reshape(-1, block_size, head_dim)

    point_blocks = split(points)
    summand_blocks = point_blocks if summands is None else split(summands)
    blocks = point_blocks, summand_blocks, jnp.pad(is_valid, (0, padding)).reshape(-1, block_size)
    penalty = jnp.where(jnp.arange(clusters) < num_centroids, 0.0, jnp.inf)

    def assign(sums, block):
        """Returns `sums` with the points of `block` added, and their labels and total inner product."""
        points, summands, is_valid = block
        # With clusters first, XLA:CPU vectorizes the reduction over clusters along the points.
        product = jnp.matmul(centroids, points.T, precision=jax.lax.Precision.HIGHEST)
        minimum, nearest = min_and_argmin(penalty[:, None] - product, axis=0)
        labels = jnp.where(is_valid, nearest, clusters)
        sums = sums + cluster_sums(labels, summands, clusters)
        return sums, (labels, jnp.sum(jnp.where(is_valid, -minimum, 0.0)))

    sums, (labels, products) = jax.lax.scan(assign, jnp.zeros((clusters, head_dim)), blocks)
    return LloydStep(labels.reshape(-1)[:tokens], sums, jnp.sum(products))


def cluster_sums(labels: Int[Array, "N"], x: Float[Array, "N D"], num_clusters: int) -> Float[Array, "C D"]:
    """Sums the rows of each cluster.

    Args:
        labels: The cluster of each row; `num_clusters` for rows that belong to none.
        x: float32.

    Returns:
        The sums.
    """

    def scatter(labels, x):
        return jnp.zeros((num_clusters, x.shape[1])).at[labels].add(x, mode="drop")

    def multiply(labels, x):
        is_member = (labels == jnp.arange(num_clusters)[:, None]).astype(jnp.float32)
        return jnp.matmul(is_member, x, precision=jax.lax.Precision.HIGHEST)

    # Scatter-add is fast on CPU and slow on accelerators.
    return jax.lax.platform_dependent(labels, x, cpu=scatter, default=multiply)
