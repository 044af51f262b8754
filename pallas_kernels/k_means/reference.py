"""`k_means` in jax.numpy: the definition that the kernels are tested against."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.argmin import min_and_argmin


class Inputs(NamedTuple):
    """The arguments of `k_means`.

    Attributes:
        points: The points of one head, float32.
        centroids: float32.
        is_valid: Which points are assigned.
        num_centroids: The number of centroids that points are assigned to, int32.
        summands: The vectors that are summed per cluster, float32; None means the points.
    """

    points: Float[Array, "N D"]
    centroids: Float[Array, "C D"]
    is_valid: Bool[Array, "N"]
    num_centroids: Int[Array, ""]
    summands: Float[Array, "N D"] | None

    def check_dtypes(self) -> None:
        """Checks that all vectors are float32.

        Raises:
            NotImplementedError: If they are not.
        """
        for name, array in self._asdict().items():
            if name in ("points", "centroids", "summands") and array is not None and array.dtype != jnp.float32:
                raise NotImplementedError(f"{name} are {array.dtype.name}; the kernels support float32")


class LloydStep(NamedTuple):
    """The result of one iteration.

    Attributes:
        labels: The cluster of each point, int32; C for invalid points.
        sums: The sum of each cluster's points or summands, float32.
        total_product: The sum over valid points of the inner product with their centroid, float32.
    """

    labels: Int[Array, "N"]
    sums: Float[Array, "C D"]
    total_product: Float[Array, ""]


def k_means(inputs: Inputs, *, block_size: int) -> LloydStep:
    """Runs one iteration of Lloyd's algorithm, see `pallas_kernels.k_means.k_means`.

    Args:
        inputs: The arguments.
        block_size: Points whose inner products are in memory at a time.

    Returns:
        Labels, sums per cluster, and the total inner product.
    """
    points, centroids, is_valid, num_centroids, summands = inputs
    clusters, head_dim = centroids.shape
    tokens = points.shape[0]
    block_size = min(block_size, tokens)
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
        num_clusters: C.

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
