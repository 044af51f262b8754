"""Distances and greedy covers, with which `cluster_table` opens and merges clusters."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.argmin import min_and_argmin


def squared_distances(
    a: Float[Array, "N D"], b: Float[Array, "K D"], a_norms: Float[Array, "N"], b_norms: Float[Array, "K"]
) -> Float[Array, "N K"]:
    """Computes all squared distances by one matrix product; zero below the resolution of float32.

    Returns:
        |a|^2 + |b|^2 - 2 a.b.
    """
    norms = a_norms[:, None] + b_norms[None, :]
    return _zero_unresolved(norms - 2 * _product(a, b), norms)


def nearest_center(
    points: Float[Array, "N D"],
    centers: Float[Array, "K D"],
    point_norms: Float[Array, "N"],
    center_norms: Float[Array, "K"],
    before: Int[Array, "N"] | None = None,
) -> tuple[Float[Array, "N"], Int[Array, "N"]]:
    """Finds the nearest center of every point.

    Args:
        center_norms: squared norms of the centers; inf for a center that does not count.
        before: for every point, the end of the centers that count; None for all.

    Returns:
        The squared distance to the nearest center, and its index.
    """
    # Reductions over the leading axis run at the speed of the product.
    relative = center_norms[:, None] - 2 * _product(centers, points)
    if before is not None:
        relative = jnp.where(jnp.arange(centers.shape[0])[:, None] < before, relative, jnp.inf)
    smallest, nearest = min_and_argmin(relative, axis=0)
    return _zero_unresolved(point_norms + smallest, point_norms + center_norms[nearest]), nearest


def _product(a: Float[Array, "N D"], b: Float[Array, "K D"]) -> Float[Array, "N K"]:
    # Accelerators would otherwise round the factors to fewer digits.
    return jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST)


def _zero_unresolved(squared: Float[Array, "..."], norms: Float[Array, "..."]) -> Float[Array, "..."]:
    """Replaces squared distances below the rounding error of their norms by zero."""
    return jnp.where((squared <= 2.0**-20 * norms) & jnp.isfinite(norms), 0.0, squared)


def greedy_cover(near: Bool[Array, "N N"], candidate: Bool[Array, "N"]) -> Bool[Array, "N"]:
    """Selects candidates in order, skipping each that is near one selected before it.

    A round decides all candidates that have no undecided candidate near and before them. A few rounds are enough
    unless decisions form a long chain.

    Args:
        near: which pairs are near each other, symmetric.

    Returns:
        The selected candidates.
    """
    index = jnp.arange(near.shape[0])
    before = near & (index[None, :] < index[:, None])

    def decide(carry: tuple[Bool[Array, "N"], Bool[Array, "N"]]) -> tuple[Bool[Array, "N"], Bool[Array, "N"]]:
        """Runs one round on the `carry` of selected and undecided candidates."""
        selected, undecided = carry
        now = undecided & ~jnp.any(before & undecided[None, :], axis=1)
        return selected | now, undecided & ~now & ~jnp.any(before & now[None, :], axis=1)

    # Two rounds are often enough, and a GPU waits for the host in every round of a loop.
    first = decide(decide((jnp.zeros_like(candidate), candidate)))
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), decide, first)[0]
