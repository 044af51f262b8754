"""ClusterTable: a stream of keys covered by clusters of bounded radius, with uniform samples of each (SubGen).

SubGen's UpdateSoftmaxNormalizer (Algorithm 1, lines 11 to 23; Lemma 2) opens clusters without bound. Here their number
is fixed: a full table widens delta and merges clusters (Charikar, Chekuri, Feder and Motwani 1997, the doubling
algorithm), with counts, sample laws and radii carried through.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.state import fault, kv_entries, state, static
from kvjax.structures.cover import (
    Ahead,
    greedy_cover,
    nearest_center,
    none_known,
    squared_distances,
    widen,
    widen_known,
)
from pallas_kernels.argmin import min_and_argmin

MOST_CLUSTERS = 2**14  # whose distances to each other take a GiB


@state
class ClusterTable:
    """Up to M clusters in the slots [0, size), in the order of their opening; empty slots have count 0.

    With a growth factor of 2, after j doublings (SubGen's Lemma 2 where j = 0):

    1. a centre is a key of its own cluster (unless centres move);
    2. `count` is the number of the cluster's keys, and all counts sum to the keys taken in;
    3. every key lies within `radius` of its centre, and `radius` within (2 - 2^-j) delta
       (for growth g: delta (1 - g^-(j + 1)) / (1 - 1 / g));
    4. centres are more than delta apart;
    5. every sample is uniform over its cluster's keys, independently of all other samples.

    Distances are l2, from |a|^2 + |b|^2 - 2 a.b in float32, which resolves no less than 1e-6 of |a|^2 + |b|^2: what
    lies below is distance zero, so that a duplicate never opens a cluster. 3 and 4 hold within that resolution.

    Bytes: M D itemsize for centres, M t (D + D_v) itemsize for samples (D_v = 0 without values), 4 M D_v for mean
    values, 4 M D for mean keys where kept, 8 M for counts and radii, and 24 for four scalars and the PRNG key. Moving
    centres take 4 M D. Nothing grows with the stream.
    """

    centers: Float[Array, "M D"] = kv_entries(running_mean=True)  # float32 where they move, else the cache's dtype
    count: Int[Array, "M"]  # int32
    radius: Float[Array, "M"]  # float32; `extend` bounds it more tightly than `step`
    samples: Float[Array, "M t D"] | None = kv_entries()  # keys
    sample_values: Float[Array, "M t D_v"] | None = kv_entries()  # those keys' values
    mean_key: Float[Array, "M D"] | None  # float32
    mean_value: Float[Array, "M D_v"] | None = kv_entries(running_mean=True)  # float32
    size: Int[Array, ""]  # int32, occupied slots
    delta: Float[Array, ""]  # float32; a key farther than this from all centres opens a cluster
    doublings: Int[Array, ""]  # int32, how often delta grew
    unsound: Int[Array, ""] = fault("keys that are not finite were left out")  # int32
    rng: Key[Array, ""]
    growth: float = static()  # the factor by which delta grows at least
    moving: bool = static()  # whether centres move to the mean of their cluster


def init_cluster_table(
    clusters: int,
    key_dim: int,
    dtype: jax.typing.DTypeLike,
    rng: Key[Array, ""],
    *,
    samples: int = 0,
    value_dim: int | None = None,
    mean_keys: bool = False,
    moving: bool = False,
    delta: float | None = None,
    growth: float = 2.0,
) -> ClusterTable:
    """An empty table.

    Args:
        clusters: M, the most clusters there can be.
        key_dim: D.
        dtype: of centres and samples.
        rng: the stream's own typed PRNG key.
        samples: t, sample slots per cluster.
        value_dim: D_v where keys come with values: then every cluster keeps its mean value, and values of its samples.
        mean_keys: whether every cluster keeps its mean key beside its centre.
        moving: whether centres move to their cluster's mean at the end of every update. Then the centre is the mean
            key, at no further bytes, and invariants 1 and 4 do not hold.
        delta: the start value. None: zero (every new key opens a cluster, duplicates join) until the table is full for
            the first time, then the least distance between its centres.
        growth: the least factor by which delta grows when the table is full; it grows further where nothing would
            merge. 2 is that of the guarantees; in high dimension it merges nearly all clusters at once.

    Raises:
        ValueError: for sizes or factors that cannot be.
    """
    if clusters < 1:
        raise ValueError(f"clusters={clusters}; a table needs at least 1")
    if clusters > MOST_CLUSTERS:
        raise ValueError(
            f"clusters={clusters}: a table that is full compares all of them with each other, which takes "
            f"{clusters**2 * 4 / 2**30:.1f} GiB for every head; at most {MOST_CLUSTERS} are taken"
        )
    if samples < 0:
        raise ValueError(f"samples={samples}; it must not be negative")
    if growth <= 1:
        raise ValueError(f"growth={growth}; delta must grow: give a factor above 1")
    if delta is not None and delta <= 0:
        raise ValueError(f"delta={delta}; it must be positive, or None to take it from the data")
    if moving and mean_keys:
        raise ValueError(f"mean_keys={mean_keys}: centres that move are the mean keys")
    zeros = lambda dim, of: None if dim is None else jnp.zeros((clusters, dim), of)  # noqa: E731
    sampled = lambda dim: jnp.zeros((clusters, samples, dim), dtype) if samples and dim else None  # noqa: E731
    return ClusterTable(
        centers=jnp.zeros((clusters, key_dim), jnp.float32 if moving else dtype),
        count=jnp.zeros(clusters, jnp.int32),
        radius=jnp.zeros(clusters, jnp.float32),
        samples=sampled(key_dim),
        sample_values=sampled(value_dim),
        mean_key=zeros(key_dim if mean_keys else None, jnp.float32),
        mean_value=zeros(value_dim, jnp.float32),
        size=jnp.zeros((), jnp.int32),
        delta=jnp.asarray(0.0 if delta is None else delta, jnp.float32),
        doublings=jnp.zeros((), jnp.int32),
        unsound=jnp.zeros((), jnp.int32),
        rng=rng,
        growth=growth,
        moving=moving,
    )


def extend(
    table: ClusterTable,
    keys: Float[Array, "T D"],
    values: Float[Array, "T D_v"] | None = None,
    valid: Bool[Array, "T"] | None = None,
    *,
    block: int = 128,
) -> ClusterTable:
    """Takes in T tokens at once: the clusters are those that T calls of `step` make (where nothing is tied within
    float32's resolution, and centres do not move), the samples have their law.

    Tokens that are not valid change nothing. Assignment goes through sub-blocks of `block` tokens; counts, radii, means
    and samples are brought up to date once, at the end.
    """
    valid = _check(table, keys, values, valid)
    capacity, tokens = table.centers.shape[0], keys.shape[0]
    block = min(block, tokens)
    padding = -tokens % block
    sound = jnp.all(jnp.isfinite(keys), axis=1)
    fresh = jnp.pad(valid & sound, (0, padding))
    # As they are stored; those left out may be not finite, and may not reach a product.
    kept = jnp.where((valid & sound)[:, None], keys.astype(table.centers.dtype).astype(jnp.float32), 0.0)
    items = jnp.pad(jnp.concatenate([table.centers.astype(jnp.float32), kept]), ((0, padding), (0, 0)))
    squared_norms = jnp.sum(items * items, axis=1)
    table = dataclasses.replace(table, unsound=table.unsound + jnp.sum(valid & ~sound, dtype=jnp.int32))

    frame = _Frame(
        source=jnp.arange(capacity, dtype=jnp.int32),
        place=jnp.pad(jnp.arange(capacity, dtype=jnp.int32), (0, fresh.shape[0])),
        size=table.size,
        delta=table.delta,
        doublings=table.doublings,
        ahead=none_known(jnp.arange(capacity) < table.size),
    )

    def assign(frame, start):
        return _assign_block(items, squared_norms, fresh, table.growth, block, frame, start)

    starts = jnp.arange(0, fresh.shape[0], block, dtype=jnp.int32)
    frame, opener = jax.lax.scan(assign, frame, starts)

    # Every old cluster and every token is an item that now lives in a slot, with a weight; slot M drops it.
    old_home = jnp.where(jnp.arange(capacity) < table.size, frame.place[:capacity], capacity)
    home = jnp.concatenate([old_home, jnp.where(fresh, frame.place[opener.reshape(-1)], capacity)])
    weight = jnp.concatenate([table.count, fresh.astype(jnp.int32)])
    count = jnp.zeros(capacity, jnp.int32).at[home].add(weight, mode="drop")
    rng, draws = jax.random.split(table.rng)
    return _rebuild(table, frame, items, home, weight, count, values, draws, rng)


def step(
    table: ClusterTable,
    key: Float[Array, "D"],
    value: Float[Array, "D_v"] | None = None,
    valid: Bool[Array, ""] | None = None,
) -> ClusterTable:
    """Takes in one token as the papers define it: it joins the nearest centre within delta (ties: the first), and takes
    each sample slot with probability 1 / count; or it opens a cluster; a full table is widened first, and each sample
    slot of two clusters that merge is taken from either by its own coin, in proportion to their counts."""
    valid = _check(table, key[None], None if value is None else value[None], None if valid is None else valid[None])[0]
    sound = jnp.all(jnp.isfinite(key))
    rng, *coins = jax.random.split(table.rng, 3)
    token = _singleton(table, jnp.where(sound, key.astype(jnp.float32), 0.0), value)

    def nearest(now):
        norms = jnp.where(now.count > 0, jnp.sum(jnp.square(now.centers.astype(jnp.float32)), axis=1), jnp.inf)
        point, point_norm = token.centers.astype(jnp.float32), jnp.sum(jnp.square(token.centers), axis=1)
        distance, slot = nearest_center(point, now.centers.astype(jnp.float32), point_norm, norms)
        return distance[0], slot[0]

    def homeless(carry):
        now, _ = carry
        return valid & sound & (now.size == now.centers.shape[0]) & (nearest(now)[0] > jnp.square(now.delta))

    def widen(carry):
        now, rng = carry
        rng, coins = jax.random.split(rng)
        return _merge_near(now, nearest(now)[0], coins), rng

    widened, _ = jax.lax.while_loop(homeless, widen, (table, coins[0]))
    distance, slot = nearest(widened)
    opens = distance > jnp.square(widened.delta)
    taken = _absorb(widened, jnp.where(opens, widened.size, slot), token, 0, coins[1])
    taken = dataclasses.replace(taken, size=widened.size + opens, rng=rng)
    table = dataclasses.replace(table, unsound=table.unsound + (valid & ~sound))
    taken = dataclasses.replace(taken, unsound=table.unsound)
    return jax.tree.map(lambda new, old: jnp.where(valid & sound, new, old), taken, table)


def scan_steps(
    table: ClusterTable,
    keys: Float[Array, "T D"],
    values: Float[Array, "T D_v"] | None = None,
    valid: Bool[Array, "T"] | None = None,
) -> ClusterTable:
    """Takes in T tokens by T calls of `step`: what `extend` is measured against."""
    valid = _check(table, keys, values, valid)
    return jax.lax.scan(lambda now, token: (step(now, *token), None), table, (keys, values, valid))[0]


def log_counts(table: ClusterTable) -> Float[Array, "M"]:
    """float32 log of every cluster's number of keys, -inf in empty slots: the weight of a mean or a centre."""
    return jnp.where(table.count > 0, jnp.log(jnp.maximum(table.count, 1).astype(jnp.float32)), -jnp.inf)


def log_sample_weights(table: ClusterTable) -> Float[Array, "M t"]:
    """float32 log(count / t) of every sample, -inf in empty slots: with these weights a sum over the samples estimates,
    without bias, the same sum over the stream (Algorithm 1, line 30).

    Raises:
        ValueError: for a table without samples.
    """
    if table.samples is None:
        raise ValueError("the table keeps no samples; make it with samples=1 or more")
    samples = table.samples.shape[1]
    return jnp.broadcast_to(log_counts(table)[:, None] - jnp.log(float(samples)), table.samples.shape[:2])


def _singleton(table: ClusterTable, key: Float[Array, "D"], value: Float[Array, "D_v"] | None) -> ClusterTable:
    """A table of one cluster, whose only key this is."""
    rows = lambda old, row: None if old is None else jnp.broadcast_to(row, (1, *old.shape[1:])).astype(old.dtype)  # noqa: E731
    return dataclasses.replace(
        table,
        centers=key[None].astype(table.centers.dtype),
        count=jnp.ones(1, jnp.int32),
        radius=jnp.zeros(1),
        samples=rows(table.samples, key),
        sample_values=rows(table.sample_values, value),
        mean_key=rows(table.mean_key, key),
        mean_value=rows(table.mean_value, value),
    )


def _absorb(table: ClusterTable, slot, other: ClusterTable, other_slot, coins: Key[Array, ""]) -> ClusterTable:
    """The table with a cluster of another joined to its own; joined to an empty slot it is copied."""
    own, added = table.count[slot], other.count[other_slot]
    count = own + added
    mean = lambda a, b: (a * own + b * added) / count  # noqa: E731
    center, other_center = table.centers[slot], other.centers[other_slot]
    new_center = mean(center, other_center) if table.moving else jnp.where(own == 0, other_center, center)
    away = lambda x: jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32) - new_center.astype(jnp.float32))))  # noqa: E731
    radius = jnp.maximum(
        jnp.where(own == 0, 0.0, table.radius[slot] + away(center)), other.radius[other_slot] + away(other_center)
    )

    def put(old, others, merge):
        return None if old is None else old.at[slot].set(merge(old[slot], others[other_slot]).astype(old.dtype))

    def sample(a, b):
        taken = jax.random.randint(coins, a.shape[:1], 0, count) < added
        return jnp.where(taken[:, None], b, a)

    return dataclasses.replace(
        table,
        centers=table.centers.at[slot].set(new_center),
        count=table.count.at[slot].set(count),
        radius=table.radius.at[slot].set(radius),
        samples=put(table.samples, other.samples, sample),
        sample_values=put(table.sample_values, other.sample_values, sample),
        mean_key=put(table.mean_key, other.mean_key, mean),
        mean_value=put(table.mean_value, other.mean_value, mean),
    )


def _merge_near(table: ClusterTable, waiting: Float[Array, ""], coins: Key[Array, ""]) -> ClusterTable:
    """A full table after one widening, merged cluster by cluster."""
    capacity = table.centers.shape[0]
    centers = table.centers.astype(jnp.float32)
    norms = jnp.sum(jnp.square(centers), axis=1)
    between = squared_distances(centers, centers, norms, norms)
    delta, stands, heir = widen(between, waiting, table.delta, table.growth)

    def merge(now, slot):
        merged = _absorb(now, heir[slot], table, slot, jax.random.fold_in(coins, slot))
        return jax.tree.map(lambda new, old: jnp.where(stands[slot], old, new), merged, now), None

    merged, _ = jax.lax.scan(merge, table, jnp.arange(capacity))
    size = jnp.sum(stands, dtype=jnp.int32)
    packed = jnp.argsort(~stands, stable=True)

    def pack(old):
        used = (jnp.arange(capacity) < size).reshape(-1, *[1] * (old.ndim - 1))
        return jnp.where(used, old[packed], 0)

    rows = {name: getattr(merged, name) for name in _ROWS}
    return dataclasses.replace(
        merged, **jax.tree.map(pack, rows), size=size, delta=delta, doublings=table.doublings + 1
    )


# The fields with a row per cluster.
_ROWS = ("centers", "count", "radius", "samples", "sample_values", "mean_key", "mean_value")


class _Frame(NamedTuple):
    """What assignment changes. A cluster is known by the item that opened it: m < M for that in slot m when the update
    began, M + i for token i of the update. So merging moves whole numbers, never vectors or labels already given."""

    source: Int[Array, "M"]  # the item that is the slot's centre
    place: Int[Array, "M+T"]  # the slot of the cluster that the item opened
    size: Int[Array, ""]
    delta: Float[Array, ""]
    doublings: Int[Array, ""]
    ahead: Ahead


def _assign_block(items, squared_norms, fresh, growth, block, frame, start):
    """Assigns the tokens of one sub-block, in order; a full table is widened in between. Returns the frame and each
    token's cluster, by the item that opened it."""
    capacity = frame.source.shape[0]
    number = jnp.arange(block, dtype=jnp.int32)
    tokens, norms = (jax.lax.dynamic_slice_in_dim(of, capacity + start, block) for of in (items, squared_norms))
    fresh = jax.lax.dynamic_slice_in_dim(fresh, start, block)

    def open_clusters(orphan, reach, free):
        """Which orphans open a cluster, which one finds no room, and each token's nearest cluster of those opened: no
        later than it came, and before it came."""
        among = jnp.where(number[:, None] == number[None, :], 0.0, squared_distances(tokens, tokens, norms, norms))
        opens = greedy_cover(among <= reach, orphan)
        waits = opens & (jnp.cumsum(opens) > free)
        stop = jnp.where(jnp.any(waits), jnp.argmax(waits).astype(jnp.int32), block)
        opens &= number < stop
        # Causally: a token may join, or be, a cluster that was opened no later than it came.
        opened = lambda causal: min_and_argmin(jnp.where(opens[None, :] & causal, among, jnp.inf))  # noqa: E731
        return opens, stop, opened(number[None, :] <= number[:, None]), opened(number[None, :] < number[:, None])

    def open_none(orphan, reach, free):
        del reach, free
        none = (jnp.full(block, jnp.inf), number)
        return orphan, jnp.int32(block), none, none

    def assign(carry):
        frame, opener, done = carry
        center_norms = jnp.where(jnp.arange(capacity) < frame.size, squared_norms[frame.source], jnp.inf)
        to_nearest, nearest = nearest_center(tokens, items[frame.source], norms, center_norms)
        reach = frame.delta * frame.delta
        left = fresh & (number >= done)
        orphan = left & (to_nearest > reach)
        opens, stop, (to_new, new), (to_before, before) = jax.lax.cond(
            jnp.any(orphan), open_clusters, open_none, orphan, reach, capacity - frame.size
        )
        joined = jnp.where(to_new < to_nearest, capacity + start + new, frame.source[nearest])
        opener = jnp.where(left & (number < stop), joined, opener)

        at = capacity + start
        slot = jnp.where(opens, frame.size + jnp.cumsum(opens, dtype=jnp.int32) - 1, capacity)
        places = jnp.where(opens, slot, jax.lax.dynamic_slice_in_dim(frame.place, at, block))
        frame = frame._replace(
            source=frame.source.at[slot].set(at + number, mode="drop"),
            place=jax.lax.dynamic_update_slice_in_dim(frame.place, places, at, axis=0),
            size=frame.size + jnp.sum(opens, dtype=jnp.int32),
            ahead=frame.ahead.opened(
                slot, jnp.minimum(to_nearest, to_before), jnp.where(to_before < to_nearest, slot[before], nearest)
            ),
        )
        waiting = jnp.minimum(to_nearest, to_new)[jnp.minimum(stop, block - 1)]
        # A loop of at most one turn: under vmap it costs nothing where no stream's table is full, as `cond` would.
        frame, _ = jax.lax.while_loop(
            lambda c: c[1], lambda c: (make_room(c[0], waiting), False), (frame, stop < block)
        )
        return frame, opener, stop

    def make_room(frame, waiting):
        centers, norms = items[frame.source], squared_norms[frame.source]
        delta, stands, heir, ahead = widen_known(centers, norms, frame.ahead, waiting, frame.delta, growth)
        packed = jnp.cumsum(stands, dtype=jnp.int32) - 1
        place = jnp.where(stands, packed, capacity)
        return _Frame(
            source=jnp.zeros_like(frame.source).at[place].set(frame.source, mode="drop"),
            place=packed[heir][frame.place],
            size=jnp.sum(stands, dtype=jnp.int32),
            delta=delta,
            doublings=frame.doublings + 1,
            ahead=ahead.packed(stands, packed, place),
        )

    nothing = (frame, jnp.zeros(block, jnp.int32), jnp.where(jnp.any(fresh), 0, block))
    frame, opener, _ = jax.lax.while_loop(lambda carry: carry[2] < block, assign, nothing)
    return frame, opener


def _rebuild(table, frame, items, home, weight, count, values, draws, rng):
    """The table after an update: what every slot now holds, from the items that live in it."""
    capacity, tokens = table.centers.shape[0], home.shape[0] - table.centers.shape[0]
    occupied = count > 0
    if values is not None:
        values = jnp.pad(values.astype(jnp.float32), ((0, tokens - values.shape[0]), (0, 0)))
    centers, mean_key, mean_value = _means(table, frame, items[capacity:], home, weight, count, values)
    if not table.moving:
        centers = jnp.where(occupied[:, None], items[frame.source], 0.0)
    gone = jnp.where(home < capacity, home, 0)
    reached = jnp.sqrt(jnp.sum(jnp.square(items - centers[gone]), axis=1)) + jnp.pad(table.radius, (0, tokens))
    # Slots that nothing came to and nothing moved into stay as they are, to the bit.
    same = (count == table.count) & (frame.source == jnp.arange(capacity))
    radius = jnp.where(same, table.radius, jnp.zeros(capacity).at[home].max(reached, mode="drop"))

    def sample(old, fresh, cluster, token):
        if old is None:
            return None
        kept = old[jnp.minimum(cluster, capacity - 1), jnp.arange(old.shape[1])]
        drawn = jnp.where((cluster < capacity)[..., None], kept, fresh[token].astype(old.dtype))
        return jnp.where(occupied[:, None, None], drawn, 0)

    samples = sample_values = None
    if table.samples is not None:
        # Key number u of the cluster, u uniform, is one of an old cluster, and then its own sample in the same slot
        # stands for it, or a token of the update. Each slot draws for itself, so samples are uniform and independent
        # whatever was merged.
        order = jnp.argsort(home, stable=True)
        first = jnp.cumsum(count) - count
        draw = jax.random.randint(draws, table.samples.shape[:2], 0, jnp.maximum(count, 1)[:, None])
        item = order[jnp.searchsorted(jnp.cumsum(weight[order]), first[:, None] + draw, side="right")]
        token = jnp.maximum(item - capacity, 0)
        samples = sample(table.samples, items[capacity:], item, token)
        sample_values = sample(table.sample_values, values, item, token)

    return dataclasses.replace(
        table,
        centers=centers.astype(table.centers.dtype),
        count=count,
        radius=radius,
        samples=samples,
        sample_values=sample_values,
        mean_key=mean_key,
        mean_value=mean_value,
        size=frame.size,
        delta=frame.delta,
        doublings=frame.doublings,
        rng=jnp.where(jnp.any(weight[capacity:] > 0), rng, table.rng),
    )


def _means(table, frame, keys, home, weight, count, values):
    """Moving centres, mean keys and mean values after an update, None for those that the table does not keep."""
    capacity = table.centers.shape[0]
    kept = {"centers": keys if table.moving else None, "mean_key": keys, "mean_value": values}
    kept = {name: fresh for name, fresh in kept.items() if fresh is not None and getattr(table, name) is not None}

    def fold(carry):
        means, _ = carry
        at = lambda rows: jnp.zeros_like(rows).at[home[:capacity]].add(rows, mode="drop")  # noqa: E731
        total = jnp.maximum(at(table.count), 1)[:, None]
        return {name: at(mean * table.count[:, None]) / total for name, mean in means.items()}, False

    # As in `_assign_block`, a loop instead of `cond`: most updates merge nothing.
    means, _ = jax.lax.while_loop(
        lambda carry: carry[1],
        fold,
        ({name: getattr(table, name) for name in kept}, frame.doublings > table.doublings),
    )
    home, fresh_weight = home[capacity:], weight[capacity:, None]
    slot = jnp.minimum(home, capacity - 1)
    for name, fresh in kept.items():
        # (n mean + sum of x) / n' as mean + sum of (x - mean) / n', which leaves other slots as they are.
        change = jnp.where(fresh_weight > 0, (fresh - means[name][slot]) / jnp.maximum(count[slot], 1)[:, None], 0.0)
        means[name] = means[name].at[home].add(change, mode="drop")
    return tuple(means.get(name) for name in ("centers", "mean_key", "mean_value"))


def _check(table, keys, values, valid) -> Bool[Array, "T"]:
    """The validity of every token; raises a ValueError for what does not fit the table."""
    tokens = keys.shape[0]
    if keys.shape != (tokens, table.centers.shape[1]):
        raise ValueError(f"keys have shape {keys.shape}; it must be [T, D] with D = {table.centers.shape[1]}")
    if (values is None) != (table.mean_value is None):
        raise ValueError(f"values={values}: give values exactly where the table was made with a value_dim")
    if values is not None and values.shape != (tokens, table.mean_value.shape[1]):
        raise ValueError(f"values have shape {values.shape}; it must be {(tokens, table.mean_value.shape[1])}")
    if valid is not None and valid.shape != (tokens,):
        raise ValueError(f"valid has shape {valid.shape}; it must be [T] = {(tokens,)}")
    return jnp.ones(tokens, bool) if valid is None else valid
