"""Greedy k-center: farthest-first traversal of one head's keys (Gonzalez 1985), as ClusterGen and SubGen use it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.state import SLOTS, array, state

POINTS = "points"


@state
class Centers:
    """The chosen points, in the order chosen, and where every point belongs."""

    index: Int[Array, "k"] = array(SLOTS)  # of the point; meaningless where separation is -inf
    # l2 distance to the nearest earlier centre: inf for the first, never rising, -inf once no point is left.
    separation: Float[Array, "k"] = array(SLOTS)
    nearest: Int[Array, "N"] = array(POINTS)  # the centre (its place in `index`) nearest to each point, ties: earliest
    distance: Float[Array, "N"] = array(POINTS)  # l2 distance to it; -inf where the point is not valid


def squared_distances(points: Float[Array, "D N"], center: Float[Array, "D"]) -> Float[Array, "N"]:
    # Summing over the leading axis lets the compiler vectorise over points.
    return jnp.sum(jnp.square(points - center[:, None]), axis=0)


def greedy_k_center(keys: Float[Array, "N D"], valid: Bool[Array, "N"], k: int) -> Centers:
    """Chooses k centres: the first valid point, then again and again the point farthest from all centres.

    Ties go to the earliest point. Distances are the direct sum of squares in float32 (the expanded form loses three
    digits where points are near). With fewer than k valid points all of them become centres.

    Source: SubGen, section 3.2, and ClusterGen, experiments: greedy k-center on l2 distances of keys. The papers leave
    the start open.
    """
    points = keys.astype(jnp.float32).T
    never = jnp.full(valid.shape, -jnp.inf)
    # A point that was chosen stands at distance 0, so duplicates of it come before invalid points, at -inf, do; a
    # chosen point itself must not come again, hence the mask of those still free.
    first = jnp.where(valid, jnp.inf, never)

    def choose(carry, place):
        distance, nearest, free = carry
        index = jnp.argmax(jnp.where(free, distance, -jnp.inf))
        separation = jnp.where(free[index], distance[index], -jnp.inf)
        to_new = jnp.where(free[index], squared_distances(points, points[:, index]), jnp.inf)
        closer = valid & (to_new < distance)
        carry = (jnp.where(closer, to_new, distance), jnp.where(closer, place, nearest), free.at[index].set(False))
        return carry, (index.astype(jnp.int32), separation)

    start = (first, jnp.zeros(valid.shape, jnp.int32), valid)
    (distance, nearest, _), (index, separation) = jax.lax.scan(choose, start, jnp.arange(k, dtype=jnp.int32))
    return Centers(index, _root(separation), nearest, _root(distance))


def extend_k_center(
    to_fixed: Float[Array, "N"], between: Float[Array, "N N"], valid: Bool[Array, "N"], k: int
) -> tuple[Int[Array, "k"], Float[Array, "k"]]:
    """Continues the traversal: chooses k more of N points, given their squared distances to the centres that stand.

    Args:
        to_fixed: squared distance of each point to the nearest standing centre, inf where none stands.
        between: squared distances among the points.
        valid: which points there are.

    Returns:
        The points chosen, in order, and their separations (l2; -inf where no point was left).
    """

    def choose(carry, _):
        distance, free = carry
        index = jnp.argmax(jnp.where(free, distance, -jnp.inf))
        separation = jnp.where(free[index], distance[index], -jnp.inf)
        distance = jnp.where(free[index], jnp.minimum(distance, between[index]), distance)
        return (distance, free.at[index].set(False)), (index.astype(jnp.int32), separation)

    _, (index, separation) = jax.lax.scan(choose, (to_fixed, valid), None, length=k)
    return index, _root(separation)


def _root(squared: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.where(squared < 0, squared, jnp.sqrt(jnp.maximum(squared, 0.0)))
