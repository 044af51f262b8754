"""Greedy k-center: farthest-first traversal of one head's keys (Gonzalez 1985), as ClusterGen and SubGen use it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.state import state
from pallas_kernels.argmin import min_and_argmin


@state
class Centers:
    """The chosen points, in the order chosen, and where every point belongs."""

    index: Int[Array, "k"]  # of the point; meaningless where separation is -inf
    # l2 distance to the nearest earlier centre: inf for the first, never rising, -inf once no point is left.
    separation: Float[Array, "k"]
    nearest: Int[Array, "T"]  # the centre (its place in `index`) nearest to each point, ties: earliest
    distance: Float[Array, "T"]  # l2 distance to it; -inf where the point is not valid


# Points among which a round chooses. More make fewer rounds and wider products, of which less is used.
CANDIDATES = 64
# Points that are compared with a round's centres at a time, so that a CPU's cache holds the distances.
BLOCK = 512


def greedy_k_center(keys: Float[Array, "T D"], valid: Bool[Array, "T"], k: int) -> Centers:
    """Chooses k centres: the first valid point, then again and again the point farthest from all centres.

    Ties go to the earliest point. With fewer than k valid points all of them become centres.

    Centres are found in rounds, and every round compares all points with all its centres by one product. Distances
    only fall, so that of the `CANDIDATES` farthest points the traversal may go on choosing for as long as the farthest
    left is no nearer than any other point was when the round began: what it chooses is what one pass over all points
    per centre would choose. Every distance is a direct sum of squares in float32; the product alone, which loses three
    digits where points are near, tells which of a round's centres is nearest, to 1e-6 of the squared norms.

    Source: SubGen, section 3.2, and ClusterGen, experiments: greedy k-center on l2 distances of keys. The papers leave
    the start open.
    """
    tokens = valid.shape[0]
    points = keys.astype(jnp.float32)
    # Relative to one of them: what all keys have in common would cost the product digits.
    points = jnp.where(valid[:, None], points - points[jnp.argmax(valid)], 0.0)
    candidates = min(CANDIDATES, tokens)

    def run_of_choices(carry):
        found, free, done = carry
        left = jnp.where(free, found.distance, -jnp.inf)
        far, number = jax.lax.top_k(left, min(candidates + 1, tokens))
        # The farthest of the others, of equally far ones the earliest.
        bound, other = (far[-1], number[-1]) if tokens > candidates else (-jnp.inf, tokens)
        number = jnp.sort(number[:candidates])
        near = points[number]
        among = jnp.sum(jnp.square(near[:, None] - near), axis=2)
        picked, separation = _choose(found.distance[number], among, free[number], candidates)
        index, turn = number[picked], jnp.arange(candidates, dtype=jnp.int32)
        # The first always is the farthest of all (and so is a key that is not a number, once).
        goes_on = (separation > bound) | ((separation == bound) & (index < other)) | (turn == 0)
        chosen = goes_on & (separation != -jnp.inf) & (done + turn < k)
        place = jnp.where(chosen, done + turn, k)

        to_picked, of_picked = min_and_argmin(jnp.where(chosen, among[:, picked], jnp.inf))
        distance, nearest = _to_nearest(points, points[index], chosen)
        distance, nearest = distance.at[number].set(to_picked), nearest.at[number].set(of_picked)
        closer = valid & (distance < found.distance)
        found = Centers(
            index=found.index.at[place].set(index, mode="drop"),
            separation=found.separation.at[place].set(separation, mode="drop"),
            nearest=jnp.where(closer, place[nearest], found.nearest),
            distance=jnp.where(closer, distance, found.distance),
        )
        free = free.at[jnp.where(chosen, index, tokens)].set(False, mode="drop")
        return found, free, done + jnp.sum(chosen, dtype=jnp.int32)

    none = Centers(
        index=jnp.zeros(k, jnp.int32),
        separation=jnp.full(k, -jnp.inf),
        nearest=jnp.zeros(tokens, jnp.int32),
        distance=jnp.where(valid, jnp.inf, -jnp.inf),
    )
    more = lambda carry: (carry[2] < k) & jnp.any(carry[1])  # noqa: E731
    found, _, _ = jax.lax.while_loop(more, run_of_choices, (none, valid, jnp.int32(0)))
    return Centers(found.index, _root(found.separation), found.nearest, _root(found.distance))


def _to_nearest(
    points: Float[Array, "T D"], centers: Float[Array, "C D"], present: Bool[Array, "C"]
) -> tuple[Float[Array, "T"], Int[Array, "T"]]:
    """Squared distance of every point to the nearest of a round's centres, and which that is."""
    block = min(BLOCK, points.shape[0])
    padding = -points.shape[0] % block

    def of_block(points):
        _, nearest = min_and_argmin(jnp.where(present[:, None], _pairwise(centers, points), jnp.inf), axis=0)
        return jnp.sum(jnp.square(points - centers[nearest]), axis=1), nearest

    blocks = jnp.pad(points, ((0, padding), (0, 0))).reshape(-1, block, points.shape[1])
    distance, nearest = jax.lax.map(of_block, blocks)
    return distance.reshape(-1)[: points.shape[0]], nearest.reshape(-1)[: points.shape[0]]


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

    index, separation = _choose(to_fixed, between, valid, k)
    return index, _root(separation)


def _choose(distance: Float[Array, "T"], between: Float[Array, "T T"], free: Bool[Array, "T"], k: int):
    """As `extend_k_center`, separations squared."""

    def choose(carry, _):
        distance, free = carry
        index = jnp.argmax(jnp.where(free, distance, -jnp.inf))
        separation = jnp.where(free[index], distance[index], -jnp.inf)
        distance = jnp.where(free[index], jnp.minimum(distance, between[index]), distance)
        return (distance, free.at[index].set(False)), (index.astype(jnp.int32), separation)

    return jax.lax.scan(choose, (distance, free), None, length=k)[1]


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
    return jnp.maximum(squared - 2 * jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST), 0.0)
