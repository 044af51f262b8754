"""A pass of Lloyd's algorithm in XLA: its meaning, on every platform."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.first_least import first_least
from pallas_kernels.k_means.base import Pass


def k_means(
    points: Float[Array, "N D"],
    directions: Float[Array, "C D"],
    valid: Bool[Array, "N"],
    used: Int[Array, ""],
    summed: Float[Array, "N D"] | None = None,
    *,
    block: int = 2048,
) -> Pass:
    """Assigns every valid point to the direction with which its product is largest, the first of equal ones.

    Args:
        points, directions: float32; unit vectors, where the product is to be a cosine.
        used: only the first so many directions are open.
        summed: what is summed over every cluster's points; None: the points.
        block: points whose products are held at a time.

    Source: Lloyd 1982; ClusterKV, section 3.2.
    """
    clusters, head_dim = directions.shape
    tokens = points.shape[0]
    block = min(block, tokens)
    padding = -tokens % block
    split = lambda x: jnp.pad(x, ((0, padding), (0, 0))).reshape(-1, block, head_dim)  # noqa: E731
    blocked = split(points)
    blocks = blocked, blocked if summed is None else split(summed), jnp.pad(valid, (0, padding)).reshape(-1, block)
    closed = jnp.where(jnp.arange(clusters) < used, 0.0, jnp.inf)

    def one(sums, item):
        points, summed, there = item
        # Clusters lead, so that what runs over them is vectorised along the points.
        product = jnp.matmul(directions, points.T, precision=jax.lax.Precision.HIGHEST)
        least, nearest = first_least(closed[:, None] - product, axis=0)
        label = jnp.where(there, nearest, clusters)
        sums = sums + cluster_sums(label, summed, clusters)
        return sums, (label, jnp.sum(jnp.where(there, -least, 0.0)))

    sums, (label, gained) = jax.lax.scan(one, jnp.zeros((clusters, head_dim)), blocks)
    return Pass(label.reshape(-1)[:tokens], sums, jnp.sum(gained))


def cluster_sums(label: Int[Array, "N"], x: Float[Array, "N D"], clusters: int) -> Float[Array, "C D"]:
    """The sum of every cluster's rows; rows of no cluster have a label past the last."""

    def scattered(label, x):
        return jnp.zeros((clusters, x.shape[1])).at[label].add(x, mode="drop")

    def multiplied(label, x):
        member = (label == jnp.arange(clusters)[:, None]).astype(jnp.float32)
        return jnp.matmul(member, x, precision=jax.lax.Precision.HIGHEST)

    # Adding row by row is what a CPU is good at, and accelerators are not.
    return jax.lax.platform_dependent(label, x, cpu=scattered, default=multiplied)
