"""A cluster table: a stream of keys in clusters of bounded radius, with uniform samples of each cluster.

SubGen's Algorithm 1 opens clusters without a limit. Here the number of clusters is fixed. For every key, in order:

1. If a center is within delta, the key joins the nearest one.
2. Otherwise it opens a cluster, whose center it is, if the table has a free slot.
3. Otherwise delta grows by a factor, or to the smallest distance between centers or to the key if that is larger.
   Centers are visited in order: one remains if it is farther than delta from all that remained before it. The others
   merge into the nearest center that remains, and the key goes back to 1.

`extend` assigns many keys at once. `_assign_block` finds the nearest center of a block of keys by one product, and by
another which of its keys open clusters (`greedy_cover`). It repeats this after every growth of delta (`_grow_delta`).
When all keys are assigned, `_rebuild` updates counts, radii, means and samples, which stay exact through merges.

Reference:
    SubGen, Algorithm 1, lines 11 to 23 (UpdateSoftmaxNormalizer), and Lemma 2. Merging: the doubling algorithm of
    Charikar, Chekuri, Feder and Motwani (1997).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.methods.subgen.cover import greedy_cover, nearest_center, squared_distances
from kvjax.methods.subgen.padding import resize_slots
from kvjax.spec import allocated_slots
from kvjax.state import fault, kv_entries, state, static
from pallas_kernels.argmin import min_and_argmin

T = TypeVar("T")

MAX_CLUSTERS = 2**14  # a growth of delta compares all pairs of them


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
        ValueError: if there are more than `MAX_CLUSTERS` clusters.
    """
    if clusters > MAX_CLUSTERS:
        raise ValueError(
            f"clusters={clusters} must be at most {MAX_CLUSTERS}, because merging compares all pairs of clusters"
        )
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


class _Items(NamedTuple):
    """The centers of the table (items 0 to M - 1) and the tokens of an update (items from M on), float32."""

    vectors: Float[Array, "M+T D"]
    squared_norms: Float[Array, "M+T"]


class _Assignment(NamedTuple):
    """The clusters while tokens are assigned.

    A cluster is identified by the item that opened it, so that merging clusters moves integers only.
    """

    center_item: Int[Array, "M"]  # item that is the center of each slot
    slot_of_item: Int[Array, "M+T"]  # slot of the cluster that the item opened
    size: Int[Array, ""]
    delta: Float[Array, ""]
    doublings: Int[Array, ""]
    # The nearest center in a lower slot of every center, which saves most distances between centers when delta grows.
    earlier: Int[Array, "M"]
    gap: Float[Array, "M"]  # squared distance to it; inf if there is none, -1 if it is not known


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
        values: values of the tokens, if the table has values.
        valid: tokens that count; None for all.
        block: tokens that are assigned, and centers that are compared, at a time. Counts, radii, means and samples are
            updated once, at the end.

    Returns:
        The table.
    """
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
    gap = jnp.where(occupied, -1.0, jnp.inf)
    start = _Assignment(slots, slot_of_item, table.size, table.delta, table.doublings, jnp.zeros_like(slots), gap)
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

    Reference:
        SubGen, Algorithm 1, line 30.
    """
    assert table.samples is not None
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
    between = jnp.where(index[:, None] == index[None, :], 0.0, squared_distances(tokens, tokens, norms, norms))

    def assign(carry: tuple[_Assignment, Array, Array]) -> tuple[_Assignment, Array, Array]:
        """Runs one round on the `carry`: the assignment, each token's opener, and the number of tokens done."""
        now, opener, done = carry
        center_norms = jnp.where(jnp.arange(capacity) < now.size, items.squared_norms[now.center_item], jnp.inf)
        squared, nearest = nearest_center(tokens, items.vectors[now.center_item], norms, center_norms)
        waiting, reach = valid & (index >= done), now.delta * now.delta
        opens = greedy_cover(between <= reach, waiting & (squared > reach))
        has_no_slot = opens & (now.size + jnp.cumsum(opens) > capacity)
        stop = jnp.where(jnp.any(has_no_slot), jnp.argmax(has_no_slot).astype(jnp.int32), block)
        opens &= index < stop
        # A token may join a cluster that an earlier token of the block opens, or its own.
        to_new, new = min_and_argmin(jnp.where(opens & (index <= index[:, None]), between, jnp.inf))
        to_earlier, earlier = min_and_argmin(jnp.where(opens & (index < index[:, None]), between, jnp.inf))
        joins = jnp.where(to_new < squared, first + new, now.center_item[nearest])
        slot = jnp.where(opens, now.size + jnp.cumsum(opens, dtype=jnp.int32) - 1, capacity)
        opened = jnp.where(opens, first + index, now.slot_of_item.shape[0])
        now = now._replace(
            center_item=now.center_item.at[slot].set(opened, mode="drop"),
            slot_of_item=now.slot_of_item.at[opened].set(slot, mode="drop"),
            size=now.size + jnp.sum(opens, dtype=jnp.int32),
            earlier=now.earlier.at[slot].set(jnp.where(to_earlier < squared, slot[earlier], nearest), mode="drop"),
            gap=now.gap.at[slot].set(jnp.minimum(squared, to_earlier), mode="drop"),
        )
        distance = jnp.minimum(squared, to_new)[jnp.minimum(stop, block - 1)]
        now = _grow_delta(items, growth, rows, now, distance, stop < block)
        return now, jnp.where(waiting & (index < stop), joins, opener), stop

    start = (assignment, jnp.zeros(block, jnp.int32), jnp.where(jnp.any(valid), 0, block))
    assignment, opener, _ = jax.lax.while_loop(lambda carry: carry[2] < block, assign, start)
    return assignment, opener


def _grow_delta(
    items: _Items, growth: float, rows: int, now: _Assignment, waiting: Float[Array, ""], grows: Bool[Array, ""]
) -> _Assignment:
    """Grows delta until clusters merge or the waiting key, at this squared distance, finds a center, if `grows`.

    Only centers whose nearest earlier center is unknown or within delta are compared with all others, so that M x M
    distances are never in memory.

    Returns:
        The assignment with the new delta.
    """
    centers, norms = (x[now.center_item] for x in items)
    capacity = norms.shape[0]

    def merge(carry: tuple[_Assignment, Array]) -> tuple[_Assignment, Array]:
        """Merges clusters at the delta in the `carry`; grows delta if there are none to merge."""
        now, _ = carry
        reach = now.delta * now.delta

        def decide(carry: tuple[Array, Array, Array], row: Int[Array, "R"]) -> tuple[Array, Array, Array]:
            """Decides which of the centers in `row` remain, after all earlier ones, and finds their earlier center."""
            remains, earlier, gap = carry
            some, some_norms, known, neighbor = centers[row], norms[row], gap[row] >= 0, earlier[row]
            squared, nearest = nearest_center(some, centers, some_norms, jnp.where(remains, norms, jnp.inf), row)
            between = squared_distances(some, some, some_norms, some_norms)
            # A known center is within delta, however its distance is rounded this time.
            near = (between <= reach) | (known[:, None] & (neighbor[:, None] == row))
            selected = greedy_cover(near, (row < capacity) & (squared > reach) & ~(known & remains[neighbor]))
            to_new, new = min_and_argmin(jnp.where(selected & (row < row[:, None]), between, jnp.inf))
            return (
                remains.at[row].set(selected, mode="drop"),
                earlier.at[row].set(jnp.where(to_new < squared, row[new], nearest), mode="drop"),
                gap.at[row].set(jnp.minimum(squared, to_new), mode="drop"),
            )

        def find_target(target: Int[Array, "M"], row: Int[Array, "R"]) -> Int[Array, "M"]:
            """Sets the `target` of the centers in `row` to their nearest center that remains."""
            _, nearest = nearest_center(centers[row], centers, norms[row], jnp.where(remains, norms, jnp.inf))
            return target.at[row].set(nearest, mode="drop")

        close = now.gap <= reach
        # A center whose known earlier center surely remains does not remain.
        merges = close & (now.gap >= 0) & ~close[now.earlier]
        remains, earlier, gap = _for_rows(close & ~merges, rows, decide, (~close, now.earlier, now.gap))
        target = _for_rows(~remains, rows, find_target, jnp.arange(capacity, dtype=jnp.int32))
        size, rank = jnp.sum(remains, dtype=jnp.int32), jnp.cumsum(remains, dtype=jnp.int32) - 1
        slot = jnp.where(remains, rank, capacity)
        done = (size < capacity) | (waiting <= reach)
        # Rounded up, so that the square of delta is at least the smallest distance.
        larger = jnp.sqrt(jnp.minimum(jnp.min(gap), waiting)) * (1 + 2.0**-22)
        is_lost = ~remains[earlier] & jnp.isfinite(gap)
        merged = now._replace(
            center_item=jnp.zeros_like(now.center_item).at[slot].set(now.center_item, mode="drop"),
            slot_of_item=rank[target][now.slot_of_item],
            size=size,
            delta=jnp.where(done, now.delta, jnp.maximum(now.delta, larger)),
            earlier=jnp.zeros_like(earlier).at[slot].set(rank[earlier], mode="drop"),
            gap=jnp.full(capacity, jnp.inf).at[slot].set(jnp.where(is_lost, -1.0, gap), mode="drop"),
        )
        return merged, done

    start = now._replace(delta=jnp.where(grows, growth * now.delta, now.delta), doublings=now.doublings + grows)
    return jax.lax.while_loop(lambda carry: ~carry[1], merge, (start, ~grows))[0]


def _for_rows(mask: Bool[Array, "M"], rows: int, step: Callable[[T, Int[Array, "R"]], T], carry: T) -> T:
    """Calls `step(carry, row)` with the indices of a mask in order, at most `rows` at a time; padding is M."""
    capacity, count = mask.shape[0], jnp.sum(mask)
    rows = min(rows, capacity)
    order = jnp.where(jnp.arange(capacity) < count, jnp.argsort(~mask, stable=True), capacity).astype(jnp.int32)
    order = jnp.pad(order, (0, -capacity % rows), constant_values=capacity)

    def call(number: Int[Array, ""], carry: T) -> T:
        return step(carry, jax.lax.dynamic_slice_in_dim(order, number * rows, rows))

    return jax.lax.fori_loop(0, -(-count // rows), call, carry)


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
    has_merged = assignment.doublings > table.doublings
    old_slot, token_slot, is_token = slot[:capacity], slot[capacity:], weight[capacity:, None] > 0

    def update_mean(mean: Float[Array, "M D"], rows: Float[Array, "T D"]) -> Float[Array, "M D"]:
        """Merges each `mean` as the table merged its clusters, and moves it towards the new `rows` of its cluster."""
        old_count = jnp.zeros(capacity, jnp.int32).at[old_slot].add(table.count, mode="drop")
        sums = jnp.zeros_like(mean).at[old_slot].add(mean * table.count[:, None], mode="drop")
        mean = jnp.where(has_merged, sums / jnp.maximum(old_count, 1)[:, None], mean)
        # mean + sum of (x - mean) / n leaves slots without new tokens unchanged.
        nearest = jnp.minimum(token_slot, capacity - 1)
        change = (rows - mean[nearest]) / jnp.maximum(count[nearest], 1)[:, None]
        return mean.at[token_slot].add(jnp.where(is_token, change, 0.0), mode="drop")

    if table.moving:
        centers = update_mean(table.centers, items[capacity:])
    else:
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
        samples = _draw_samples(draws, samples, items[capacity:].astype(samples.dtype), slot, weight, count)
    mean_value = table.mean_value
    if mean_value is not None and values is not None:
        mean_value = update_mean(mean_value, values)
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
        rng=jnp.where(jnp.any(is_token), rng, table.rng),
    )


def _draw_samples(
    rng: Key[Array, ""],
    old: Float[Array, "M t D"],
    tokens: Float[Array, "T D"],
    slot: Int[Array, "M+T"],
    weight: Int[Array, "M+T"],
    count: Int[Array, "M"],
) -> Float[Array, "M t D"]:
    """Draws an item of every cluster for every sample, in proportion to the items' numbers of keys.

    An old cluster contributes its sample of the same slot, which is uniform over its keys. All draws are independent,
    so that samples stay uniform and independent after merges.

    Returns:
        The samples; 0 in empty slots.
    """
    capacity, samples, _ = old.shape
    order = jnp.argsort(slot, stable=True)
    first = jnp.cumsum(count) - count
    draw = jax.random.randint(rng, (capacity, samples), 0, jnp.maximum(count, 1)[:, None])
    item = order[jnp.searchsorted(jnp.cumsum(weight[order]), first[:, None] + draw, side="right")]
    from_old = old[jnp.minimum(item, capacity - 1), jnp.arange(samples)]
    from_tokens = tokens[jnp.maximum(item - capacity, 0)]
    return jnp.where((count > 0)[:, None, None], jnp.where((item < capacity)[..., None], from_old, from_tokens), 0)
