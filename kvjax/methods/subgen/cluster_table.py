"""A cluster table: a stream of keys in clusters of bounded radius, with uniform samples of each cluster.

SubGen's Algorithm 1 opens clusters without a limit. Here the number of clusters is fixed. When the table is full,
delta grows and clusters merge; counts, sample distributions and radii stay exact.

Reference:
    SubGen, Algorithm 1, lines 11 to 23 (UpdateSoftmaxNormalizer), and Lemma 2. Merging: the doubling algorithm of
    Charikar, Chekuri, Feder and Motwani (1997).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.methods.subgen.cover import (
    EarlierNeighbors,
    greedy_cover,
    grow_delta,
    nearest_center,
    squared_distances,
    unknown_neighbors,
)
from kvjax.methods.subgen.padding import resize_slots
from kvjax.spec import allocated_slots
from kvjax.state import fault, kv_entries, state, static
from pallas_kernels.argmin import min_and_argmin

MAX_CLUSTERS = 2**14  # distances between all of them take 1 GiB per head


@state
class ClusterTable:
    """Clusters in slots [0, size) of M, in the order in which they were opened.

    With growth factor g, after j growths of delta:

    1. A center is a key of its cluster, unless centers move.
    2. `count` is the number of keys of a cluster; counts sum to the number of keys so far.
    3. Every key is within `radius` of its center, and `radius` is at most delta (1 - g^-(j + 1)) / (1 - 1 / g). For
       g = 2 this is (2 - 2^-j) delta; j = 0 is SubGen's Lemma 2.
    4. Centers are more than delta apart, unless they move.
    5. Every sample is uniform over the keys of its cluster, independently of all other samples.

    Distances are computed in float32 from |a|^2 + |b|^2 - 2 a.b. A distance whose square is below 1e-6 of
    |a|^2 + |b|^2 is zero, so that a duplicate never opens a cluster; 3 and 4 hold within this resolution.

    The size does not grow with the stream: M D elements of centers (float32 if they move), M t D elements of samples,
    4 M D_v bytes of mean values, 8 M bytes of counts and radii, and 24 bytes of scalars and the PRNG key. M is the
    maximum number of clusters, rounded up to a multiple of 8.
    """

    centers: Float[Array, "M D"] = kv_entries(running_mean=True)  # float32 if they move, else the cache's dtype
    count: Int[Array, "M"]  # int32; 0 in empty slots
    radius: Float[Array, "M"]  # float32
    samples: Float[Array, "M t D"] | None = kv_entries()  # keys
    mean_value: Float[Array, "M D_v"] | None = kv_entries(running_mean=True)  # float32
    size: Int[Array, ""]  # int32, clusters
    delta: Float[Array, ""]  # float32; a key farther than this from all centers opens a cluster
    doublings: Int[Array, ""]  # int32, number of times that delta grew
    unsound: Int[Array, ""] = fault("keys that are not finite were left out")  # int32
    rng: Key[Array, ""]
    clusters: int = static()  # maximum number of clusters
    growth: float = static()  # smallest factor by which delta grows
    moving: bool = static()  # whether centers are the means of their clusters


def init_cluster_table(
    clusters: int,
    key_dim: int,
    dtype: jax.typing.DTypeLike,
    rng: Key[Array, ""],
    *,
    samples: int = 0,
    value_dim: int | None = None,
    moving: bool = False,
    delta: float | None = None,
    growth: float = 2.0,
) -> ClusterTable:
    """Returns an empty table.

    Args:
        clusters: maximum number of clusters.
        key_dim: dimensions of keys.
        dtype: dtype of centers and samples.
        rng: PRNG key of the stream.
        samples: samples per cluster, t.
        value_dim: dimensions of values; None for a stream of keys alone. With values, every cluster has a mean value.
        moving: whether centers move to the mean of their cluster after every update.
        delta: first delta. None for 0 (every new key opens a cluster) until the table is full, then the smallest
            distance between centers.
        growth: smallest factor by which delta grows when the table is full. The guarantees use 2, which merges nearly
            all clusters at once in high dimensions.

    Returns:
        The table.

    Raises:
        ValueError: if a size or factor is out of range.
    """
    _check_settings(clusters, samples, delta, growth)
    zero, slots = jnp.zeros((), jnp.int32), allocated_slots(clusters)
    return ClusterTable(
        centers=jnp.zeros((slots, key_dim), jnp.float32 if moving else dtype),
        count=jnp.zeros(slots, jnp.int32),
        radius=jnp.zeros(slots, jnp.float32),
        samples=jnp.zeros((slots, samples, key_dim), dtype) if samples else None,
        mean_value=None if value_dim is None else jnp.zeros((slots, value_dim), jnp.float32),
        size=zero,
        delta=jnp.asarray(0.0 if delta is None else delta, jnp.float32),
        doublings=zero,
        unsound=zero,
        rng=rng,
        clusters=clusters,
        growth=growth,
        moving=moving,
    )


def _check_settings(clusters: int, samples: int, delta: float | None, growth: float) -> None:
    """Raises a ValueError that names a setting out of range."""
    if not 1 <= clusters <= MAX_CLUSTERS:
        raise ValueError(
            f"clusters={clusters} must be between 1 and {MAX_CLUSTERS}: merging compares all clusters of a head, which "
            f"takes {clusters**2 * 4 / 2**30:.1f} GiB"
        )
    if samples < 0:
        raise ValueError(f"samples={samples} must be at least 0")
    if growth <= 1:
        raise ValueError(f"growth={growth} must be above 1")
    if delta is not None and delta <= 0:
        raise ValueError(f"delta={delta} must be above 0, or None to take it from the data")


class _Items(NamedTuple):
    """The centers of the table (items 0 to M - 1) and the tokens of an update (items from M on), float32."""

    vectors: Float[Array, "M+T D"]
    squared_norms: Float[Array, "M+T"]


class _Assignment(NamedTuple):
    """The clusters while tokens are assigned.

    A cluster is identified by the item that opened it, so that merging clusters moves integers only.

    Attributes:
        center_item: item that is the center of each slot.
        slot_of_item: slot of the cluster that the item opened.
        size: number of clusters.
        delta: current delta.
        doublings: number of times that delta grew.
        neighbors: nearest earlier center of every center.
    """

    center_item: Int[Array, "M"]
    slot_of_item: Int[Array, "M+T"]
    size: Int[Array, ""]
    delta: Float[Array, ""]
    doublings: Int[Array, ""]
    neighbors: EarlierNeighbors


def extend(
    table: ClusterTable,
    keys: Float[Array, "T D"],
    values: Float[Array, "T D_v"] | None = None,
    valid: Bool[Array, "T"] | None = None,
    *,
    block: int = 128,
) -> ClusterTable:
    """Takes T tokens in.

    A token joins the nearest center within delta (the first one of a tie) or opens a cluster; delta grows when the
    table is full. The clusters do not depend on the division of the stream into updates, unless centers move
    or distances are tied within float32's resolution.

    Args:
        table: the table.
        keys: keys of the tokens.
        values: values of the tokens, if the table has values.
        valid: tokens that count; None for all.
        block: tokens that are assigned, and centers that are compared, at a time. Counts, radii, means and samples are
            updated once, at the end.

    Returns:
        The table.

    Raises:
        ValueError: if a shape does not fit the table.
    """
    _check_shapes(table, keys, values, valid)
    valid = jnp.ones(keys.shape[0], bool) if valid is None else valid
    allocated, table = table.centers.shape[0], resize_slots(table, "M", table.clusters)
    capacity, tokens = table.clusters, keys.shape[0]
    rows, block = block, min(block, tokens)
    padding = -tokens % block
    sound = jnp.all(jnp.isfinite(keys), axis=1)
    table = dataclasses.replace(table, unsound=table.unsound + jnp.sum(valid & ~sound, dtype=jnp.int32))
    # Keys in their stored precision; zeros for invalid tokens, since infinities would spoil products.
    stored = jnp.where((valid & sound)[:, None], keys.astype(table.centers.dtype).astype(jnp.float32), 0.0)
    vectors = jnp.pad(jnp.concatenate([table.centers.astype(jnp.float32), stored]), ((0, padding), (0, 0)))
    items = _Items(vectors, jnp.sum(vectors * vectors, axis=1))
    valid = jnp.pad(valid & sound, (0, padding))

    slots = jnp.arange(capacity, dtype=jnp.int32)
    occupied = slots < table.size
    slot_of_item = jnp.pad(slots, (0, valid.shape[0]))
    neighbors = unknown_neighbors(occupied)
    start = _Assignment(slots, slot_of_item, table.size, table.delta, table.doublings, neighbors)
    first = capacity + jnp.arange(0, valid.shape[0], block, dtype=jnp.int32)
    assign = functools.partial(_assign_block, items, table.growth, rows)
    assignment, opener = jax.lax.scan(assign, start, (first, valid.reshape(-1, block)))

    # The slot of every old cluster and every token; M drops an item.
    old_slot = jnp.where(occupied, assignment.slot_of_item[:capacity], capacity)
    token_slot = jnp.where(valid, assignment.slot_of_item[opener.reshape(-1)], capacity)
    slot = jnp.concatenate([old_slot, token_slot])
    weight = jnp.concatenate([table.count, valid.astype(jnp.int32)])
    if values is not None:
        values = jnp.pad(values.astype(jnp.float32), ((0, padding), (0, 0)))
    rebuilt = _rebuild(table, assignment, items.vectors, values, slot, weight)
    return resize_slots(rebuilt, "M", allocated)


def log_counts(table: ClusterTable) -> Float[Array, "M"]:
    """Returns the log of the number of keys of every cluster, float32; -inf in empty slots."""
    return jnp.where(table.count > 0, jnp.log(jnp.maximum(table.count, 1).astype(jnp.float32)), -jnp.inf)


def log_sample_weights(table: ClusterTable) -> Float[Array, "M t"]:
    """Returns log(count / t) of every sample, float32; -inf in empty slots.

    With these log-weights, a sum over the samples is an unbiased estimate of the sum over the stream.

    Args:
        table: a table with samples.

    Returns:
        The log-weights.

    Raises:
        ValueError: if the table has no samples.

    Reference:
        SubGen, Algorithm 1, line 30.
    """
    if table.samples is None:
        raise ValueError("the table has no samples; initialize it with samples=1 or more")
    samples = table.samples.shape[1]
    return jnp.broadcast_to(log_counts(table)[:, None] - jnp.log(float(samples)), table.samples.shape[:2])


def _assign_block(
    items: _Items,
    growth: float,
    rows: int,
    assignment: _Assignment,
    block_tokens: tuple[Int[Array, ""], Bool[Array, "b"]],
) -> tuple[_Assignment, Int[Array, "b"]]:
    """Assigns the valid tokens of a block, given the item of its first token, in order.

    A round assigns tokens up to the first one that finds the table full; then delta grows.

    Returns:
        The assignment, and the item that opened each token's cluster.
    """
    first, valid = block_tokens
    capacity, block = assignment.center_item.shape[0], valid.shape[0]
    index = jnp.arange(block, dtype=jnp.int32)
    tokens, norms = (jax.lax.dynamic_slice_in_dim(x, first, block) for x in items)

    def assign(carry: tuple[_Assignment, Array, Array]) -> tuple[_Assignment, Array, Array]:
        """Runs one round on the `carry`: the assignment, each token's opener, and the number of tokens done."""
        now, opener, done = carry
        center_norms = jnp.where(jnp.arange(capacity) < now.size, items.squared_norms[now.center_item], jnp.inf)
        squared, nearest = nearest_center(tokens, items.vectors[now.center_item], norms, center_norms)
        reach = now.delta * now.delta
        waiting = valid & (index >= done)
        candidate = waiting & (squared > reach)
        opens, stop, (to_new, new), (to_earlier, earlier) = jax.lax.cond(
            jnp.any(candidate), _open_clusters, _open_none, tokens, norms, candidate, reach, capacity - now.size
        )
        joins = jnp.where(to_new < squared, first + new, now.center_item[nearest])
        opener = jnp.where(waiting & (index < stop), joins, opener)
        slot = jnp.where(opens, now.size + jnp.cumsum(opens, dtype=jnp.int32) - 1, capacity)
        block_slots = jnp.where(opens, slot, jax.lax.dynamic_slice_in_dim(now.slot_of_item, first, block))
        neighbor = jnp.where(to_earlier < squared, slot[earlier], nearest)
        now = now._replace(
            center_item=now.center_item.at[slot].set(first + index, mode="drop"),
            slot_of_item=jax.lax.dynamic_update_slice_in_dim(now.slot_of_item, block_slots, first, axis=0),
            size=now.size + jnp.sum(opens, dtype=jnp.int32),
            neighbors=now.neighbors.insert(slot, jnp.minimum(squared, to_earlier), neighbor),
        )
        distance = jnp.minimum(squared, to_new)[jnp.minimum(stop, block - 1)]
        return _merge_clusters(items, now, distance, growth, stop < block, rows), opener, stop

    start = (assignment, jnp.zeros(block, jnp.int32), jnp.where(jnp.any(valid), 0, block))
    assignment, opener, _ = jax.lax.while_loop(lambda carry: carry[2] < block, assign, start)
    return assignment, opener


_Openings = tuple[Array, Array, tuple[Array, Array], tuple[Array, Array]]


def _open_clusters(
    tokens: Float[Array, "b D"],
    norms: Float[Array, "b"],
    candidate: Bool[Array, "b"],
    reach: Float[Array, ""],
    free: Int[Array, ""],
) -> _Openings:
    """Opens clusters in the free slots for tokens without a center within `reach`.

    Returns:
        The tokens that open a cluster; the first token without a free slot (b if all have one); and squared distance
        and index of the nearest token that opened a cluster, among tokens up to this one and among tokens before it.
    """
    block = norms.shape[0]
    index = jnp.arange(block, dtype=jnp.int32)
    between = jnp.where(index[:, None] == index[None, :], 0.0, squared_distances(tokens, tokens, norms, norms))
    opens = greedy_cover(between <= reach, candidate)
    has_no_slot = opens & (jnp.cumsum(opens) > free)
    stop = jnp.where(jnp.any(has_no_slot), jnp.argmax(has_no_slot).astype(jnp.int32), block)
    opens &= index < stop
    up_to, before = index[None, :] <= index[:, None], index[None, :] < index[:, None]
    nearest, earlier = (min_and_argmin(jnp.where(opens[None, :] & mask, between, jnp.inf)) for mask in (up_to, before))
    return opens, stop, nearest, earlier


def _open_none(
    tokens: Float[Array, "b D"],
    norms: Float[Array, "b"],
    candidate: Bool[Array, "b"],
    reach: Float[Array, ""],
    free: Int[Array, ""],
) -> _Openings:
    """Returns the result of `_open_clusters` for no candidates."""
    block = norms.shape[0]
    nearest = jnp.full(block, jnp.inf), jnp.arange(block, dtype=jnp.int32)
    return candidate, jnp.int32(block), nearest, nearest


def _merge_clusters(
    items: _Items, now: _Assignment, waiting: Float[Array, ""], growth: float, grows: Bool[Array, ""], rows: int
) -> _Assignment:
    """Grows delta until clusters merge or the waiting key, at this squared distance, finds a center, if `grows`."""
    centers, norms = (x[now.center_item] for x in items)
    delta, remains, target, neighbors = grow_delta(
        centers, norms, now.neighbors, waiting, now.delta, growth, grows, rows
    )
    rank = jnp.cumsum(remains, dtype=jnp.int32) - 1
    new_slot = jnp.where(remains, rank, remains.shape[0])
    merged = _Assignment(
        center_item=jnp.zeros_like(now.center_item).at[new_slot].set(now.center_item, mode="drop"),
        slot_of_item=rank[target][now.slot_of_item],
        size=jnp.sum(remains, dtype=jnp.int32),
        delta=delta,
        doublings=now.doublings + 1,
        neighbors=neighbors.compact(remains),
    )
    # Under `vmap`, `cond` and a loop in place of these selections would wait for the host once more per round.
    return jax.tree.map(lambda new, old: jnp.where(grows, new, old), merged, now)


def _rebuild(
    table: ClusterTable,
    assignment: _Assignment,
    items: Float[Array, "M+T D"],
    values: Float[Array, "T D_v"] | None,
    slot: Int[Array, "M+T"],
    weight: Int[Array, "M+T"],
) -> ClusterTable:
    """Returns the table after an update, from the slot and the number of keys of every item."""
    capacity = table.centers.shape[0]
    count = jnp.zeros(capacity, jnp.int32).at[slot].add(weight, mode="drop")
    occupied = count > 0
    centers, mean_value = _update_means(table, assignment, items[capacity:], values, slot, weight, count)
    if centers is None:
        centers = jnp.where(occupied[:, None], items[assignment.center_item], 0.0)
    item_center = centers[jnp.where(slot < capacity, slot, 0)]
    item_radius = jnp.pad(table.radius, (0, slot.shape[0] - capacity))
    reach = jnp.sqrt(jnp.sum(jnp.square(items - item_center), axis=1)) + item_radius
    # Slots that no item joined must not change by a rounding error.
    unchanged = (count == table.count) & (assignment.center_item == jnp.arange(capacity))
    radius = jnp.where(unchanged, table.radius, jnp.zeros(capacity).at[slot].max(reach, mode="drop"))

    rng, draws = jax.random.split(table.rng)
    samples = table.samples
    if samples is not None:
        item = _draw_items(draws, slot, weight, count, samples.shape[1])
        samples = _take_samples(samples, items[capacity:], item, occupied)

    return dataclasses.replace(
        table,
        centers=centers.astype(table.centers.dtype),
        count=count,
        radius=radius,
        samples=samples,
        mean_value=mean_value,
        size=assignment.size,
        delta=assignment.delta,
        doublings=assignment.doublings,
        # Padding must not change the random numbers of a row.
        rng=jnp.where(jnp.any(weight[capacity:] > 0), rng, table.rng),
    )


def _draw_items(
    rng: Key[Array, ""], slot: Int[Array, "M+T"], weight: Int[Array, "M+T"], count: Int[Array, "M"], samples: int
) -> Int[Array, "M t"]:
    """Draws an item of every cluster for every sample, in proportion to the items' numbers of keys.

    An old cluster contributes its sample of the same slot, which is uniform over its keys. All draws are independent,
    so that samples stay uniform and independent after merges.

    Returns:
        Items.
    """
    order = jnp.argsort(slot, stable=True)
    first = jnp.cumsum(count) - count
    draw = jax.random.randint(rng, (count.shape[0], samples), 0, jnp.maximum(count, 1)[:, None])
    return order[jnp.searchsorted(jnp.cumsum(weight[order]), first[:, None] + draw, side="right")]


def _take_samples(
    old: Float[Array, "M t D"], tokens: Float[Array, "T D"], item: Int[Array, "M t"], occupied: Bool[Array, "M"]
) -> Float[Array, "M t D"]:
    """Gathers samples from the old samples and the tokens of the update."""
    capacity = old.shape[0]
    from_old = old[jnp.minimum(item, capacity - 1), jnp.arange(old.shape[1])]
    from_tokens = tokens[jnp.maximum(item - capacity, 0)].astype(old.dtype)
    return jnp.where(occupied[:, None, None], jnp.where((item < capacity)[..., None], from_old, from_tokens), 0)


def _update_means(
    table: ClusterTable,
    assignment: _Assignment,
    keys: Float[Array, "T D"],
    values: Float[Array, "T D_v"] | None,
    slot: Int[Array, "M+T"],
    weight: Int[Array, "M+T"],
    count: Int[Array, "M"],
) -> tuple[Float[Array, "M D"] | None, Float[Array, "M D_v"] | None]:
    """Returns moving centers and mean values after an update; None if the table has no such means."""
    capacity = table.centers.shape[0]
    old_slot, token_slot, is_token = slot[:capacity], slot[capacity:], weight[capacity:, None] > 0

    def merge(carry: tuple[list[Array | None], Array]) -> tuple[list[Array | None], Array]:
        """Merges the means in the `carry` as the table merged its clusters."""

        def add(rows: Array) -> Array:
            return jnp.zeros_like(rows).at[old_slot].add(rows, mode="drop")

        total = jnp.maximum(add(table.count), 1)[:, None]
        return jax.tree.map(lambda mean: add(mean * table.count[:, None]) / total, carry[0]), jnp.bool_(False)

    means = [table.centers if table.moving else None, table.mean_value]
    # A loop of at most one iteration, because `vmap` of `cond` computes both branches: most updates merge no clusters.
    means, _ = jax.lax.while_loop(lambda carry: carry[1], merge, (means, assignment.doublings > table.doublings))
    nearest_slot = jnp.minimum(token_slot, capacity - 1)

    def update(mean: Float[Array, "M D"], rows: Float[Array, "T D"]) -> Float[Array, "M D"]:
        """Moves each `mean` towards the new tokens' `rows` of its cluster."""
        # mean + sum of (x - mean) / n leaves slots without new tokens unchanged.
        change = (rows - mean[nearest_slot]) / jnp.maximum(count[nearest_slot], 1)[:, None]
        return mean.at[token_slot].add(jnp.where(is_token, change, 0.0), mode="drop")

    centers, mean_value = (
        mean if mean is None or rows is None else update(mean, rows)
        for mean, rows in zip(means, (keys, values), strict=True)
    )
    return centers, mean_value


def _check_shapes(
    table: ClusterTable, keys: Float[Array, "T D"], values: Float[Array, "T D_v"] | None, valid: Bool[Array, "T"] | None
) -> None:
    """Raises a ValueError for arrays that do not fit the table."""
    tokens = keys.shape[0]
    if keys.shape != (tokens, table.centers.shape[1]):
        raise ValueError(f"keys have shape {keys.shape}, expected [T, D] with D = {table.centers.shape[1]}")
    if values is None or table.mean_value is None:
        if values is not None or table.mean_value is not None:
            raise ValueError(f"values={values}: pass values if and only if the table has a value_dim")
    elif values.shape != (tokens, table.mean_value.shape[1]):
        raise ValueError(f"values have shape {values.shape}, expected {(tokens, table.mean_value.shape[1])}")
    if valid is not None and valid.shape != (tokens,):
        raise ValueError(f"valid has shape {valid.shape}, expected [T] = {(tokens,)}")
