"""Greedy k-center: farthest-first traversal of one head's keys (Gonzalez 1985), as ClusterGen and SubGen use it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.state import state


@state
class Centers:
    """The chosen points, in the order chosen, and where every point belongs."""

    index: Int[Array, "k"]  # of the point; meaningless where separation is -inf
    # l2 distance to the nearest earlier centre: inf for the first, never rising, -inf once no point is left.
    separation: Float[Array, "k"]
    nearest: Int[Array, "T"]  # the centre (its place in `index`) nearest to each point, ties: earliest
    distance: Float[Array, "T"]  # l2 distance to it; -inf where the point is not valid


def squared_distances(points: Float[Array, "D T"], center: Float[Array, "D"]) -> Float[Array, "T"]:
    # Summing over the leading axis lets the compiler vectorise over points.
    return jnp.sum(jnp.square(points - center[:, None]), axis=0)


def greedy_k_center(keys: Float[Array, "T D"], valid: Bool[Array, "T"], k: int) -> Centers:
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
    to_fixed: Float[Array, "T"], between: Float[Array, "T T"], valid: Bool[Array, "T"], k: int
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


def cluster_prompt(keys: Float[Array, "T D"], values: Float[Array, "T D_v"], valid: Bool[Array, "T"], size: int):
    """One head's prompt: centres' keys and values, clusters' counts, separations and mean values, empty ones last."""
    found = greedy_k_center(keys, valid, size)
    chosen = found.separation > -jnp.inf
    # A centre belongs to itself, even where an earlier one has the same key: no cluster may be without a token.
    own = jnp.where(chosen, found.index, valid.shape[0])
    home = found.nearest.at[own].set(jnp.arange(size, dtype=found.nearest.dtype), mode="drop")
    weight = valid.astype(jnp.float32)
    count = jnp.zeros(size).at[home].add(weight)
    total = jnp.zeros((size, values.shape[1])).at[home].add(values.astype(jnp.float32) * weight[:, None])
    count = jnp.where(chosen, count, 0)
    mean = total / jnp.maximum(count, 1)[:, None]
    return keys[found.index], values[found.index], count.astype(jnp.int32), found.separation, mean


def cluster_more(
    centers: Float[Array, "M D"],
    count: Int[Array, "M"],
    separation: Float[Array, "M"],
    mean_value: Float[Array, "M D_v"],
    keys: Float[Array, "P D"],
    values: Float[Array, "P D_v"],
    present: Bool[Array, "P"],
):
    """Takes a block of tokens into one head's clusters.

    The P newcomers and the P centres of least separation (empty slots before all) form a pool; the other centres
    stand. The traversal goes on from them through the pool until the slots are full again, and what it leaves over
    joins the nearest centre, count and value. Its whole cost is a product of [2P, D] with [D, M].
    """
    slots, newcomers = centers.shape[0], keys.shape[0]
    contested = min(slots, newcomers)
    _, pool_slots = jax.lax.top_k(-separation, contested)
    pool_slots = jnp.sort(pool_slots)  # the traversal's first choices go to the lowest slots, so empty ones stay last
    stands = (separation > -jnp.inf).at[pool_slots].set(False)

    pool_keys = jnp.concatenate([centers[pool_slots], keys]).astype(jnp.float32)
    mean_value = mean_value.astype(jnp.float32)
    pool_values = jnp.concatenate([mean_value[pool_slots], values.astype(jnp.float32)])
    pool_count = jnp.concatenate([count[pool_slots], present.astype(jnp.int32)])
    valid = pool_count > 0
    to_centers = jnp.where(stands, _pairwise(pool_keys, centers.astype(jnp.float32)), jnp.inf)
    among = _pairwise(pool_keys, pool_keys)
    to_standing = jnp.min(to_centers, axis=1)
    picked, picked_separation = extend_k_center(to_standing, among, valid, contested)
    chosen = picked_separation > -jnp.inf

    # Every pool token belongs to the nearest of the standing and the newly chosen centres; a chosen one to itself.
    to_picked = jnp.where(chosen, among[:, picked], jnp.inf)
    nearest_picked = jnp.argmin(to_picked, axis=1)
    joins_picked = jnp.min(to_picked, axis=1) <= to_standing
    home = jnp.where(joins_picked, pool_slots[nearest_picked], jnp.argmin(to_centers, axis=1))
    home = home.at[jnp.where(chosen, picked, home.shape[0])].set(pool_slots, mode="drop")

    old_count = jnp.where(stands, count, 0)
    old_total = mean_value * old_count[:, None]
    home = jnp.where(valid, home, slots)
    new_count = old_count.at[home].add(pool_count, mode="drop")
    new_total = old_total.at[home].add(pool_values * pool_count[:, None], mode="drop")
    mean = new_total / jnp.maximum(new_count, 1)[:, None]
    new_centers = centers.at[jnp.where(chosen, pool_slots, slots)].set(
        pool_keys[picked].astype(centers.dtype), mode="drop"
    )
    new_separation = separation.at[pool_slots].set(picked_separation)
    # A row that brings nothing stays as it is: it may not feel how often the others of its batch are compacted.
    brings = jnp.any(present)
    return (
        jnp.where(brings, new_centers, centers),
        jnp.where(brings, new_count, count),
        jnp.where(brings, new_separation, separation),
        jnp.where(brings, mean, mean_value),
    )


def _pairwise(a: Float[Array, "N D"], b: Float[Array, "M D"]) -> Float[Array, "N M"]:
    """Squared distances, by a product. Good to 1e-6 of the keys' squared norms, which only orders near ties."""
    squared = jnp.sum(a * a, axis=1)[:, None] + jnp.sum(b * b, axis=1)[None, :]
    return jnp.maximum(squared - 2 * a @ b.T, 0.0)
