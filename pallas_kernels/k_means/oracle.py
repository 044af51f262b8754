"""The definition of `k_means`: one iteration of Lloyd's algorithm by inner product, in float32."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.quantized_array import widened


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


def k_means(inputs: Inputs) -> LloydStep:
    """Computes `k_means`, with all inner products in memory."""
    points, centroids, is_valid, num_centroids, summands = inputs
    clusters = len(centroids)
    products = jnp.matmul(widened(points), widened(centroids).T, precision="highest")
    products = jnp.where(jnp.arange(clusters) < num_centroids, products, -jnp.inf)
    labels = jnp.where(is_valid, jnp.argmax(products, axis=1), clusters)
    is_member = labels == jnp.arange(clusters)[:, None]
    sums = jnp.matmul(is_member * 1.0, widened(points if summands is None else summands), precision="highest")
    return LloydStep(labels, sums, jnp.sum(jnp.where(is_valid, jnp.max(products, axis=1), 0.0)))
