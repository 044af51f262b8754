"""Greedy k-center: farthest-first traversal of one head's keys, as ClusterGen and SubGen use it.

Reference:
    Gonzalez (1985). SubGen, section 3.2; ClusterGen, section 4.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.state import state
from pallas_kernels.argmin import min_and_argmin

CANDIDATES = 64  # points among which a round chooses; more give fewer rounds and larger, less used products
BLOCK = 512  # points that are compared with a round's centers at a time, so that distances fit a CPU's cache


@state
class Centers:
    """The chosen points in order, and the distance of every point to the nearest of them."""

    index: Int[Array, "k"]  # of the point; arbitrary where separation is -inf
    # l2 distance to the nearest earlier center: inf for the first, never increasing, -inf when no point is left.
    separation: Float[Array, "k"]
    distance: Float[Array, "T"]  # l2 distance of every point to the nearest center; -inf for an invalid point


def greedy_k_center(keys: Float[Array, "T D"], valid: Bool[Array, "T"], k: int) -> Centers:
    """Chooses k centers: the first valid point, then repeatedly the point farthest from all centers.

    Ties go to the earliest point. With fewer than k valid points all of them become centers.

    Centers are chosen in rounds; a round compares all points with its centers by one product. Distances only
    decrease. The traversal can therefore continue among the `CANDIDATES` farthest points as long as the farthest of
    them is at least as far as any other point was at the start of the round. Distances are direct sums of squares in
    float32. The product only determines which of a round's centers is nearest, to 1e-6 of the squared norms.

    Args:
        valid: keys that count.

    Returns:
        The centers.

    Reference:
        SubGen, section 3.2, and ClusterGen, experiments: greedy k-center on l2 distances of keys. The papers do not
        specify the first center.
    """
    points = keys.astype(jnp.float32)
    # Relative to one of them, because a common component would cost the product digits.
    points = jnp.where(valid[:, None], points - points[jnp.argmax(valid)], 0.0)
    empty = Centers(
        index=jnp.zeros(k, jnp.int32),
        separation=jnp.full(k, -jnp.inf),
        distance=jnp.where(valid, jnp.inf, -jnp.inf),
    )
    centers, _, _ = jax.lax.while_loop(
        lambda carry: (carry[2] < k) & jnp.any(carry[1]),
        functools.partial(_choose_round, points, valid, k),
        (empty, valid, jnp.int32(0)),
    )
    return Centers(centers.index, _sqrt(centers.separation), _sqrt(centers.distance))


def _choose_round(
    points: Float[Array, "T D"], valid: Bool[Array, "T"], k: int, carry: tuple[Centers, Array, Array]
) -> tuple[Centers, Array, Array]:
    """Chooses centers among the farthest points, given the centers, the free points and the number of centers."""
    tokens = valid.shape[0]
    candidates = min(CANDIDATES, tokens)
    centers, free, count = carry
    free_distance = jnp.where(free, centers.distance, -jnp.inf)
    far, point = jax.lax.top_k(free_distance, min(candidates + 1, tokens))
    # The farthest of the other points, the earliest of a tie.
    bound, other = (far[-1], point[-1]) if tokens > candidates else (-jnp.inf, tokens)
    point = jnp.sort(point[:candidates])
    between = jnp.sum(jnp.square(points[point][:, None] - points[point]), axis=2)
    choice, separation = _choose(centers.distance[point], between, free[point], candidates)
    index, turn = point[choice], jnp.arange(candidates, dtype=jnp.int32)
    # The first choice is always the farthest of all points, also if a key is NaN.
    continues = (separation > bound) | ((separation == bound) & (index < other)) | (turn == 0)
    accept = continues & (separation != -jnp.inf) & (count + turn < k)
    number = jnp.where(accept, count + turn, k)

    distance = _distance_to_round(points, points[index], accept)
    distance = distance.at[point].set(jnp.min(jnp.where(accept, between[:, choice], jnp.inf), axis=1))
    centers = Centers(
        index=centers.index.at[number].set(index, mode="drop"),
        separation=centers.separation.at[number].set(separation, mode="drop"),
        distance=jnp.where(valid & (distance < centers.distance), distance, centers.distance),
    )
    free = free.at[jnp.where(accept, index, tokens)].set(False, mode="drop")
    return centers, free, count + jnp.sum(accept, dtype=jnp.int32)


def _distance_to_round(
    points: Float[Array, "T D"], centers: Float[Array, "C D"], present: Bool[Array, "C"]
) -> Float[Array, "T"]:
    """Returns the squared distance of every point to the nearest present center."""
    block = min(BLOCK, points.shape[0])
    padding = -points.shape[0] % block

    def compare(points: Float[Array, "b D"]) -> Float[Array, "b"]:
        """Returns the squared distance to the nearest center for a block of `points`."""
        _, nearest = min_and_argmin(jnp.where(present[:, None], _squared_distances(centers, points), jnp.inf), axis=0)
        return jnp.sum(jnp.square(points - centers[nearest]), axis=1)

    blocks = jnp.pad(points, ((0, padding), (0, 0))).reshape(-1, block, points.shape[1])
    return jax.lax.map(compare, blocks).reshape(-1)[: points.shape[0]]


def _choose(
    distance: Float[Array, "T"], between: Float[Array, "T T"], free: Bool[Array, "T"], k: int
) -> tuple[Int[Array, "k"], Float[Array, "k"]]:
    """Continues the traversal: chooses k more points.

    Args:
        distance: squared distance of each point to the nearest center; inf without one.
        between: squared distances between the points.
        free: points that can be chosen.

    Returns:
        The chosen points in order, and their squared separations (-inf where no point was left).
    """

    def choose(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Chooses the free point farthest from the centers and updates the distances in the `carry`."""
        distance, free = carry
        index = jnp.argmax(jnp.where(free, distance, -jnp.inf))
        separation = jnp.where(free[index], distance[index], -jnp.inf)
        distance = jnp.where(free[index], jnp.minimum(distance, between[index]), distance)
        return (distance, free.at[index].set(False)), (index.astype(jnp.int32), separation)

    return jax.lax.scan(choose, (distance, free), None, length=k)[1]


def _sqrt(squared: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the square root; -inf stays."""
    return jnp.where(squared < 0, squared, jnp.sqrt(jnp.maximum(squared, 0.0)))


def _squared_distances(a: Float[Array, "N D"], b: Float[Array, "M D"]) -> Float[Array, "N M"]:
    """Computes squared distances by a product, to 1e-6 of the squared norms."""
    squared = jnp.sum(a * a, axis=1)[:, None] + jnp.sum(b * b, axis=1)[None, :]
    return jnp.maximum(squared - 2 * jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST), 0.0)
