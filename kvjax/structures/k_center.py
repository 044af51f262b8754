"""Greedy k-center: farthest-first traversal of one head's keys, as ClusterGen and SubGen use it.

Reference:
    Gonzalez (1985). SubGen, section 3.2; ClusterGen, section 4.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.state import state
from pallas_kernels.argmin import min_and_argmin

CANDIDATES = 64  # points among which a round chooses; more give fewer rounds and larger, less used products
BLOCK = 512  # points that are compared with a round's centers at a time, so that distances fit a CPU's cache


@state
class Centers:
    """The chosen points in order, and the nearest center of every point."""

    index: Int[Array, "k"]  # of the point; arbitrary where separation is -inf
    # l2 distance to the nearest earlier center: inf for the first, never increasing, -inf when no point is left.
    separation: Float[Array, "k"]
    nearest: Int[Array, "T"]  # number of the center nearest to each point, the earliest of a tie
    distance: Float[Array, "T"]  # l2 distance to it; -inf for an invalid point


class CenterClusters(NamedTuple):
    """One head's clusters around centers.

    Attributes:
        keys: keys of the centers.
        size: int32 tokens of each cluster, 0 in empty slots.
        separation: float32, l2 distance at which the center was chosen; -inf in empty slots. Centers with the smallest
            separation are replaced first.
        mean_value: float32, mean value of each cluster.
    """

    keys: Float[Array, "M D"]
    size: Int[Array, "M"]
    separation: Float[Array, "M"]
    mean_value: Float[Array, "M D_v"]


def greedy_k_center(keys: Float[Array, "T D"], valid: Bool[Array, "T"], k: int) -> Centers:
    """Chooses k centers: the first valid point, then repeatedly the point farthest from all centers.

    Ties go to the earliest point. With fewer than k valid points all of them become centers.

    Centers are chosen in rounds; a round compares all points with its centers by one product. Distances only
    decrease. The traversal can therefore continue among the `CANDIDATES` farthest points as long as the farthest of
    them is at least as far as any other point was at the start of the round. Distances are direct sums of squares in
    float32. The product only determines which of a round's centers is nearest, to 1e-6 of the squared norms.

    Args:
        keys: keys of one head.
        valid: keys that count.
        k: number of centers.

    Returns:
        The centers.

    Reference:
        SubGen, section 3.2, and ClusterGen, experiments: greedy k-center on l2 distances of keys. The papers do not
        specify the first center.
    """
    tokens = valid.shape[0]
    points = keys.astype(jnp.float32)
    # Relative to one of them, because a common component would cost the product digits.
    points = jnp.where(valid[:, None], points - points[jnp.argmax(valid)], 0.0)
    empty = Centers(
        index=jnp.zeros(k, jnp.int32),
        separation=jnp.full(k, -jnp.inf),
        nearest=jnp.zeros(tokens, jnp.int32),
        distance=jnp.where(valid, jnp.inf, -jnp.inf),
    )
    centers, _, _ = jax.lax.while_loop(
        lambda carry: (carry[2] < k) & jnp.any(carry[1]),
        functools.partial(_choose_round, points, valid, k),
        (empty, valid, jnp.int32(0)),
    )
    return Centers(centers.index, _sqrt(centers.separation), centers.nearest, _sqrt(centers.distance))


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

    candidate_distance, candidate_nearest = min_and_argmin(jnp.where(accept, between[:, choice], jnp.inf))
    distance, nearest = _nearest_of_round(points, points[index], accept)
    distance, nearest = distance.at[point].set(candidate_distance), nearest.at[point].set(candidate_nearest)
    closer = valid & (distance < centers.distance)
    centers = Centers(
        index=centers.index.at[number].set(index, mode="drop"),
        separation=centers.separation.at[number].set(separation, mode="drop"),
        nearest=jnp.where(closer, number[nearest], centers.nearest),
        distance=jnp.where(closer, distance, centers.distance),
    )
    free = free.at[jnp.where(accept, index, tokens)].set(False, mode="drop")
    return centers, free, count + jnp.sum(accept, dtype=jnp.int32)


def _nearest_of_round(
    points: Float[Array, "T D"], centers: Float[Array, "C D"], present: Bool[Array, "C"]
) -> tuple[Float[Array, "T"], Int[Array, "T"]]:
    """Returns the squared distance of every point to the nearest present center, and the index of that center."""
    block = min(BLOCK, points.shape[0])
    padding = -points.shape[0] % block

    def compare(points: Float[Array, "b D"]) -> tuple[Float[Array, "b"], Int[Array, "b"]]:
        """Returns the squared distance and the index of the nearest center for a block of `points`."""
        _, nearest = min_and_argmin(jnp.where(present[:, None], _squared_distances(centers, points), jnp.inf), axis=0)
        return jnp.sum(jnp.square(points - centers[nearest]), axis=1), nearest

    blocks = jnp.pad(points, ((0, padding), (0, 0))).reshape(-1, block, points.shape[1])
    distance, nearest = jax.lax.map(compare, blocks)
    return distance.reshape(-1)[: points.shape[0]], nearest.reshape(-1)[: points.shape[0]]


def extend_k_center(
    to_centers: Float[Array, "T"], between: Float[Array, "T T"], valid: Bool[Array, "T"], k: int
) -> tuple[Int[Array, "k"], Float[Array, "k"]]:
    """Continues the traversal: chooses k more points.

    Args:
        to_centers: squared distance of each point to the nearest existing center; inf without one.
        between: squared distances between the points.
        valid: points that can be chosen.
        k: number of points.

    Returns:
        The chosen points in order, and their separations (l2; -inf where no point was left).
    """
    index, separation = _choose(to_centers, between, valid, k)
    return index, _sqrt(separation)


def _choose(
    distance: Float[Array, "T"], between: Float[Array, "T T"], free: Bool[Array, "T"], k: int
) -> tuple[Int[Array, "k"], Float[Array, "k"]]:
    """Chooses k free points as `extend_k_center` does; separations are squared."""

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


def cluster_prompt(
    keys: Float[Array, "T D"], values: Float[Array, "T D_v"], valid: Bool[Array, "T"], size: int
) -> tuple[CenterClusters, Float[Array, "M D_v"]]:
    """Clusters one head's prompt around greedy k-center's centers.

    Args:
        keys: keys of the prompt.
        values: values of the prompt.
        valid: tokens that count.
        size: number of clusters, M; empty ones come last.

    Returns:
        The clusters, and the values of their centers.
    """
    centers = greedy_k_center(keys, valid, size)
    present = centers.separation > -jnp.inf
    # A center belongs to its own cluster even if an earlier center has the same key, so that no cluster is empty.
    index = jnp.where(present, centers.index, valid.shape[0])
    cluster = centers.nearest.at[index].set(jnp.arange(size, dtype=centers.nearest.dtype), mode="drop")
    weight = valid.astype(jnp.float32)
    count = jnp.where(present, jnp.zeros(size).at[cluster].add(weight), 0)
    total = jnp.zeros((size, values.shape[1])).at[cluster].add(values.astype(jnp.float32) * weight[:, None])
    mean_value = total / jnp.maximum(count, 1)[:, None]
    clusters = CenterClusters(keys[centers.index], count.astype(jnp.int32), centers.separation, mean_value)
    return clusters, values[centers.index]


def extend_clusters(
    clusters: CenterClusters, keys: Float[Array, "P D"], values: Float[Array, "P D_v"], present: Bool[Array, "P"]
) -> CenterClusters:
    """Takes a block of tokens into one head's clusters.

    The P new tokens and the P centers with the smallest separation (empty slots first) are candidates; the other
    centers stay. The traversal continues from them through the candidates until all slots are occupied. Every other
    candidate joins its nearest center with its count and value. The cost is a product of [2P, D] with [D, M].

    Args:
        clusters: the clusters.
        keys: keys of the tokens.
        values: values of the tokens.
        present: tokens that count.

    Returns:
        The clusters.
    """
    centers, size, separation, mean_value = clusters
    slots = centers.shape[0]
    open_slots = min(slots, keys.shape[0])
    _, pool_slots = jax.lax.top_k(-separation, open_slots)
    pool_slots = jnp.sort(pool_slots)  # first choices go to the lowest slots, so that empty ones stay last
    stays = (separation > -jnp.inf).at[pool_slots].set(False)

    pool_keys = jnp.concatenate([centers[pool_slots], keys]).astype(jnp.float32)
    mean_value = mean_value.astype(jnp.float32)
    pool_values = jnp.concatenate([mean_value[pool_slots], values.astype(jnp.float32)])
    pool_count = jnp.concatenate([size[pool_slots], present.astype(jnp.int32)])
    valid = pool_count > 0
    to_centers = jnp.where(stays, _squared_distances(pool_keys, centers.astype(jnp.float32)), jnp.inf)
    between = _squared_distances(pool_keys, pool_keys)
    nearest_stay = jnp.min(to_centers, axis=1)
    choice, new_separation = extend_k_center(nearest_stay, between, valid, open_slots)
    is_new = new_separation > -jnp.inf

    # Every candidate belongs to the nearest center; a new center to itself.
    to_new = jnp.where(is_new, between[:, choice], jnp.inf)
    joins_new = jnp.min(to_new, axis=1) <= nearest_stay
    slot = jnp.where(joins_new, pool_slots[jnp.argmin(to_new, axis=1)], jnp.argmin(to_centers, axis=1))
    slot = slot.at[jnp.where(is_new, choice, slot.shape[0])].set(pool_slots, mode="drop")
    slot = jnp.where(valid, slot, slots)

    old_size = jnp.where(stays, size, 0)
    new_size = old_size.at[slot].add(pool_count, mode="drop")
    total = (mean_value * old_size[:, None]).at[slot].add(pool_values * pool_count[:, None], mode="drop")
    new_slot = jnp.where(is_new, pool_slots, slots)
    new = CenterClusters(
        keys=centers.at[new_slot].set(pool_keys[choice].astype(centers.dtype), mode="drop"),
        size=new_size,
        separation=separation.at[pool_slots].set(new_separation),
        mean_value=total / jnp.maximum(new_size, 1)[:, None],
    )
    # A row without new tokens must not change when other rows of the batch are compacted.
    changes, old = jnp.any(present), clusters._replace(mean_value=mean_value)
    return jax.tree.map(lambda new, old: jnp.where(changes, new, old), new, old)


def _squared_distances(a: Float[Array, "N D"], b: Float[Array, "M D"]) -> Float[Array, "N M"]:
    """Computes squared distances by a product, to 1e-6 of the squared norms."""
    squared = jnp.sum(a * a, axis=1)[:, None] + jnp.sum(b * b, axis=1)[None, :]
    return jnp.maximum(squared - 2 * jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST), 0.0)
