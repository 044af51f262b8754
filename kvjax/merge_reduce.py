"""MergeReduceTree: a stream of tokens in few slots, halved again and again (BalanceKV, Algorithm 4, MergeAndReduce).

Tokens fill bins of t / 2 slots, the leaves of a binary tree. Two full sibling bins are halved together (t entries in,
t / 2 out) into one bin one level up. The randomness of a halving depends on its place in the tree alone, so the result
is that of the offline recursion, however the stream is cut.
"""

import bisect
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.balance import Halve, Halved
from kvjax.state import HEAD_DIM, SLOTS, array, state, static

BINS = "bins"


@state
class MergeReduceTree:
    """N bins of u = t / 2 slots for one stream. Bytes: N u (D + D_v) itemsize + 4 N u + 8 N + 12 + the random key's.

    Bin b holds slots [b u, (b + 1) u) and stands for tokens [index 2^level u, (index + 1) 2^level u) of the stream.
    """

    keys: Float[Array, "S D"] = array(SLOTS, HEAD_DIM)
    values: Float[Array, "S D_v"] | None = array(SLOTS, HEAD_DIM)  # None: a tree for denominators
    log_weight: Float[Array, "S"] = array(SLOTS)  # float32, -inf in empty slots
    level: Int[Array, "N"] = array(BINS)  # int32 halvings that the bin's entries went through, -1 in free bins
    index: Int[Array, "N"] = array(BINS)  # int32
    count: Int[Array, ""] = array()  # int32 tokens taken in
    clipped: Int[Array, ""] = array()  # int32 decisions whose probability was clipped (the paper's FAIL)
    lost: Int[Array, ""] = array(fault="tokens came to a merge-and-reduce tree without a free bin and are lost")
    rng: Key[Array, ""] = array()
    # Merges siblings as soon as both are full, as the paper does; otherwise only when a bin is needed.
    eager: bool = static()
    # Whether a halving's weights are multiplied by what brings their sum to that of its input.
    conserves_mass: bool = static()


def bins_needed(tokens: int, bin_slots: int) -> int:
    """The least number of bins with which a stream of so many tokens never runs out of room.

    m full leaves can always be merged into as many bins as m has binary digits of one.
    """
    return (-(-tokens // bin_slots)).bit_length()


def init_merge_reduce(
    rng: Key[Array, ""],
    *,
    bins: int,
    bin_slots: int,
    key_dim: int,
    value_dim: int | None,
    tokens: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
    eager: bool = False,
    conserves_mass: bool = True,
) -> MergeReduceTree:
    """An empty tree.

    Args:
        rng: the stream's own key.
        bins, bin_slots: N and u = t / 2.
        value_dim: any width; None for a tree without values.
        tokens: most tokens that will ever come.
        eager: merge siblings as soon as both are full (the paper: O(t log n) slots are ever occupied). Otherwise only
            when a new bin is needed and none is free, the lowest level first and the oldest of it: the tree stays as
            full as its slots allow.
        conserves_mass: multiply the weights of every halving so that they sum to what went in.

    Raises:
        ValueError: for sizes below 1, or bins too few for so many tokens.
    """
    for name, size in {"bins": bins, "bin_slots": bin_slots}.items():
        if size < 1:
            raise ValueError(f"{name}={size}; it must be at least 1")
    if bins < (needed := bins_needed(tokens, bin_slots)):
        raise ValueError(f"bins={bins} of {bin_slots} slots cannot hold {tokens} tokens; at least {needed} are needed")
    return MergeReduceTree(
        keys=jnp.zeros((bins * bin_slots, key_dim), dtype),
        values=None if value_dim is None else jnp.zeros((bins * bin_slots, value_dim), dtype),
        log_weight=jnp.full(bins * bin_slots, -jnp.inf),
        level=jnp.full(bins, -1, jnp.int32),
        index=jnp.zeros(bins, jnp.int32),
        count=jnp.zeros((), jnp.int32),
        clipped=jnp.zeros((), jnp.int32),
        lost=jnp.zeros((), jnp.int32),
        rng=rng,
        eager=eager,
        conserves_mass=conserves_mass,
    )


def insert(
    tree: MergeReduceTree,
    keys: Float[Array, "T D"],
    values: Float[Array, "T D_v"] | None,
    valid: Bool[Array, "T"] | None = None,
    *,
    halve: Halve,
) -> MergeReduceTree:
    """Takes in those of T tokens that are valid (all, when None), in order; the same however a stream is cut.

    Args:
        halve: how t entries become t / 2; always the same for one tree.
    """
    if (values is None) != (tree.values is None):
        raise ValueError("a tree with values must be given values, and one without must not")
    tokens, bin_slots = keys.shape[0], _bin_slots(tree)
    count = jnp.int32(tokens)
    if valid is not None:
        # Valid tokens to the front, in order.
        order = jnp.argsort(~valid, stable=True)
        keys, values = keys[order], None if values is None else values[order]
        count = jnp.sum(valid, dtype=jnp.int32)
    # One leaf after the other: the rest of the one that is open, then whole ones.
    width = min(tokens, bin_slots)
    pad = lambda x: jnp.pad(x, ((0, width), (0, 0)))  # noqa: E731
    keys, values = pad(keys), None if values is None else pad(values)
    bounds = jnp.arange((tokens + bin_slots - 2) // bin_slots + 2) * bin_slots - tree.count % bin_slots
    bounds = jnp.clip(bounds, 0, count)

    def step(tree, bounds):
        start, stop = bounds
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, width)  # noqa: E731
        return _insert_in_leaf(tree, cut(keys), None if values is None else cut(values), stop - start, halve), None

    return jax.lax.scan(step, tree, (bounds[:-1], bounds[1:]))[0]


def scan_tokens(
    tree: MergeReduceTree, keys: Float[Array, "T D"], values: Float[Array, "T D_v"] | None, *, halve: Halve
) -> MergeReduceTree:
    """The definition, token by token, that `insert` and `fill` must equal."""

    def step(tree, item):
        key, value = item
        return _insert_in_leaf(tree, key[None], None if value is None else value[None], jnp.int32(1), halve), None

    return jax.lax.scan(step, tree, (keys, values))[0]


def fill(
    tree: MergeReduceTree,
    keys: Float[Array, "T D"],
    values: Float[Array, "T D_v"] | None,
    count: Int[Array, ""],
    *,
    halve: Halve,
    together: int = 16,
) -> MergeReduceTree:
    """The first `count` of T tokens into an empty tree that is not eager: what `insert` gives, many halvings at once.

    Args:
        together: halvings that run side by side; more take more memory.

    Raises:
        ValueError: for an eager tree.
    """
    if tree.eager:
        raise ValueError("eager=True: fill knows only when a tree that is not eager merges; use insert")
    bin_slots, tokens = _bin_slots(tree), keys.shape[0]
    leaves = -(-tokens // bin_slots)
    plan = _plan(leaves, tree.level.shape[0])
    pad = ((0, leaves * bin_slots - tokens), (0, 0))
    keys = jnp.pad(keys, pad).astype(tree.keys.dtype)
    values = None if values is None or tree.values is None else jnp.pad(values, pad).astype(tree.values.dtype)

    # Every node that some prompt of up to T tokens needs, level by level: its tokens and their weights.
    place = jnp.arange(leaves * bin_slots, dtype=jnp.int32).reshape(leaves, bin_slots)
    token, weight = place, (place < count).astype(jnp.float32)
    clipped = jnp.zeros(0, jnp.int32)

    def merge(item):
        level, index, token, weight = item
        value = None if values is None else values[token]
        halved = _halve(tree, halve, level, index, keys[token], value, weight)
        return token[halved.kept], halved.weight, halved.clipped

    for first, last in plan.levels:
        children = plan.children[first:last]
        pairs = token[children].reshape(last - first, -1), weight[children].reshape(last - first, -1)
        own = (plan.node_level[leaves + first : leaves + last], plan.node_index[leaves + first : leaves + last])
        items = jax.tree.map(jnp.asarray, (*own, *pairs))
        new_token, new_weight, new_clipped = jax.lax.map(merge, items, batch_size=min(together, last - first))
        token = jnp.concatenate([token, new_token])
        weight = jnp.concatenate([weight, new_weight])
        clipped = jnp.concatenate([clipped, new_clipped])

    opened = -(-count // bin_slots)
    node = jnp.asarray(plan.stored)[opened]
    chosen = token[node].reshape(-1)
    weights = jnp.where(node[:, None] >= 0, weight[node], 0.0).reshape(-1)
    return dataclasses.replace(
        tree,
        keys=keys[chosen],
        values=None if values is None else values[chosen],
        log_weight=jnp.log(weights),
        level=jnp.where(node >= 0, jnp.asarray(plan.node_level)[node], -1),
        index=jnp.where(node >= 0, jnp.asarray(plan.node_index)[node], 0),
        count=count.astype(jnp.int32),
        clipped=jnp.sum(jnp.where(jnp.asarray(plan.opened) <= opened, clipped, 0), dtype=jnp.int32),
    )


def _bin_slots(tree: MergeReduceTree) -> int:
    return tree.keys.shape[0] // tree.level.shape[0]


def _halve(tree: MergeReduceTree, halve: Halve, level, index, keys, values, weights) -> Halved:
    """Makes node (level, index) of its children's entries."""
    rng = jax.random.fold_in(jax.random.fold_in(tree.rng, level), index)
    halved = halve(rng, keys, values, weights)
    if not tree.conserves_mass:
        return halved
    kept = jnp.sum(halved.weight)
    factor = jnp.where(kept > 0, jnp.sum(weights) / jnp.where(kept > 0, kept, 1.0), 1.0)
    return halved._replace(weight=halved.weight * factor)


class _Pair(NamedTuple):
    """The bins that are merged next: of the lowest level that has two full siblings, the oldest."""

    left: Int[Array, ""]
    right: Int[Array, ""]
    exists: Bool[Array, ""]


def _next_pair(tree: MergeReduceTree) -> _Pair:
    level, index = tree.level, tree.index
    full = (level >= 0) & ((index + 1) << jnp.maximum(level, 0) <= tree.count // _bin_slots(tree))
    is_left = full & (index % 2 == 0)
    siblings = (level[:, None] == level) & (index[:, None] + 1 == index) & is_left[:, None] & full
    found = jnp.any(siblings, axis=1)
    lowest = jnp.min(jnp.where(found, level, _NEVER))
    left = jnp.argmin(jnp.where(found & (level == lowest), index, _NEVER))
    return _Pair(left, jnp.argmax(siblings[left]), jnp.any(found))


_NEVER = np.iinfo(np.int32).max


def _merge_where(tree: MergeReduceTree, pair: _Pair, wanted: Bool[Array, ""], halve: Halve) -> MergeReduceTree:
    """Merges the pair into its left bin where that is wanted."""
    bin_slots = _bin_slots(tree)
    lanes = jnp.arange(bin_slots, dtype=jnp.int32)
    left, right = pair.left * bin_slots + lanes, pair.right * bin_slots + lanes
    slots = jnp.concatenate([left, right])
    level, index = tree.level[pair.left] + 1, tree.index[pair.left] // 2

    # A loop of at most one pass: mapped over streams it runs when any of them wants it, where a conditional would run
    # always, and what it carries is small.
    def merge(_):
        values = None if tree.values is None else tree.values[slots]
        weights = jnp.exp(tree.log_weight[slots])
        return jnp.bool_(False), _halve(tree, halve, level, index, tree.keys[slots], values, weights)

    nothing = Halved(lanes, jnp.zeros(bin_slots), jnp.int32(0))
    _, halved = jax.lax.while_loop(lambda carry: carry[0], merge, (wanted, nothing))
    kept = slots[halved.kept]
    put = lambda buffer: buffer.at[left].set(buffer[jnp.where(wanted, kept, left)])  # noqa: E731
    log_weight = jnp.where(wanted, jnp.log(halved.weight), tree.log_weight[left])
    freed = jnp.where(wanted, -jnp.inf, tree.log_weight[right])
    return dataclasses.replace(
        tree,
        keys=put(tree.keys),
        values=None if tree.values is None else put(tree.values),
        log_weight=tree.log_weight.at[left].set(log_weight).at[right].set(freed),
        level=jnp.where(wanted, tree.level.at[pair.left].set(level).at[pair.right].set(-1), tree.level),
        index=jnp.where(wanted, tree.index.at[pair.left].set(index).at[pair.right].set(0), tree.index),
        clipped=tree.clipped + halved.clipped,
    )


def _insert_in_leaf(
    tree: MergeReduceTree,
    keys: Float[Array, "P D"],
    values: Float[Array, "P D_v"] | None,
    fresh: Int[Array, ""],
    halve: Halve,
) -> MergeReduceTree:
    """Takes in the first `fresh` of P tokens, no more than the leaf has room for that the next token belongs to."""
    bin_slots = _bin_slots(tree)
    leaf, filled = tree.count // bin_slots, tree.count % bin_slots
    opens = (fresh > 0) & (filled == 0)
    if not tree.eager:
        pair = _next_pair(tree)
        tree = _merge_where(tree, pair, opens & pair.exists & jnp.all(tree.level >= 0), halve)
    target = jnp.argmax(jnp.where(opens, tree.level < 0, (tree.level == 0) & (tree.index == leaf)))
    has_room = ~opens | (tree.level[target] < 0)
    opens &= has_room
    taken = jnp.where(has_room, fresh, 0)
    lanes = jnp.arange(keys.shape[0])
    slots = jnp.where(lanes < taken, target * bin_slots + filled + lanes, tree.keys.shape[0])
    put = lambda buffer, x: buffer.at[slots].set(x.astype(buffer.dtype), mode="drop")  # noqa: E731
    tree = dataclasses.replace(
        tree,
        keys=put(tree.keys, keys),
        values=None if tree.values is None else put(tree.values, values),
        log_weight=tree.log_weight.at[slots].set(0.0, mode="drop"),
        level=tree.level.at[target].set(jnp.where(opens, 0, tree.level[target])),
        index=tree.index.at[target].set(jnp.where(opens, leaf, tree.index[target])),
        count=tree.count + taken,
        lost=tree.lost + fresh - taken,
    )
    if not tree.eager:
        return tree

    def merge(carry):
        tree, pair = carry
        tree = _merge_where(tree, pair, pair.exists, halve)
        return tree, _next_pair(tree)

    return jax.lax.while_loop(lambda carry: carry[1].exists, merge, (tree, _next_pair(tree)))[0]


class _Plan(NamedTuple):
    """What a tree that is not eager does with leaves 0, 1, ...: nodes 0 .. leaves - 1 are the leaves, then the merged.

    Merged nodes are sorted by level; `levels` are their ranges [first, last), counted from the first merged one.
    """

    node_level: np.ndarray  # [nodes] int32
    node_index: np.ndarray  # [nodes] int32
    children: np.ndarray  # [merges, 2] int32 nodes
    opened: np.ndarray  # [merges] int32: merged when so many leaves have been opened, and always after
    stored: np.ndarray  # [leaves + 1, N] int32 node in each bin once so many leaves have been opened, -1 in free bins
    levels: tuple[tuple[int, int], ...]


@functools.cache
def _plan(leaves: int, bins: int) -> _Plan:
    stored: list[tuple[int, int] | None] = [None] * bins
    merged: dict[tuple[int, int], int] = {}
    history = [tuple(stored)]
    for leaf in range(leaves):
        if None not in stored:
            present = set(filter(None, stored))
            lowest = min(node for node in present if node[1] % 2 == 0 and (node[0], node[1] + 1) in present)
            level, index = lowest
            stored[stored.index(lowest)] = (level + 1, index // 2)
            stored[stored.index((level, index + 1))] = None
            merged[level + 1, index // 2] = leaf + 1
        stored[stored.index(None)] = (0, leaf)
        history.append(tuple(stored))
    nodes = [(0, leaf) for leaf in range(leaves)] + sorted(merged)
    place = {node: number for number, node in enumerate(nodes)}
    heights = [level for level, _ in sorted(merged)]
    array = functools.partial(np.array, dtype=np.int32)
    children = [(place[level - 1, 2 * index], place[level - 1, 2 * index + 1]) for level, index in sorted(merged)]
    return _Plan(
        node_level=array([level for level, _ in nodes]),
        node_index=array([index for _, index in nodes]),
        children=array(children).reshape(-1, 2),
        opened=array([merged[node] for node in sorted(merged)]),
        stored=array([[-1 if node is None else place[node] for node in row] for row in history]),
        levels=tuple((bisect.bisect_left(heights, h), bisect.bisect_right(heights, h)) for h in sorted(set(heights))),
    )
