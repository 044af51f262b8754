"""A merge-and-reduce tree: a stream of tokens in few slots, halved again and again.

Tokens fill bins of t / 2 slots, the leaves of a binary tree. Two full sibling bins are halved together: t entries
become t / 2 in one bin of the next level. The random numbers of a halving depend only on its node in the tree, so that
the result does not depend on the division of the stream into blocks.

Reference:
    BalanceKV, Algorithm 4 (MergeAndReduce).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.spec import round_to_tiles
from kvjax.state import fault, kv_entries, state, static
from kvjax.structures.balance import Halve, Halved

# With fewer bins, a halving sees more tokens and finds nearer pairs; with more, weights differ less.
MIN_BINS = 16
_MAX_INT = np.iinfo(np.int32).max


@state
class MergeReduceTree:
    """N bins of u = t / 2 slots for one stream; bin b has slots [b u, (b + 1) u).

    A bin represents tokens [index 2^level u, (index + 1) 2^level u) of the stream. The size does not grow with the
    stream: N u (D + D_v) elements, 4 N u + 8 N + 12 bytes of weights and counters, and the PRNG key.
    """

    keys: Float[Array, "S D"] = kv_entries()
    values: Float[Array, "S D_v"] | None = kv_entries()  # None for a tree for the denominator
    log_weight: Float[Array, "S"]  # float32, -inf in empty slots
    level: Int[Array, "bins"]  # int32, number of halvings of the bin's entries; -1 in free bins
    index: Int[Array, "bins"]  # int32
    count: Int[Array, ""]  # int32, tokens so far
    clipped: Int[Array, ""]  # int32, decisions whose probability was clipped (the paper's FAIL)
    lost: Int[Array, ""] = fault("tokens came to a merge-and-reduce tree without a free bin and are lost")
    rng: Key[Array, ""]
    eager: bool = static()  # whether full siblings merge at once, or only when a bin is needed
    conserves_mass: bool = static()  # whether weights after a halving are scaled to the sum before


def bins_needed(tokens: int, bin_slots: int) -> int:
    """Returns the number of bins with which a stream never runs out of slots.

    m full leaves can always be merged into as many bins as m has binary digits of one.

    Args:
        tokens: length of the stream.
        bin_slots: slots of a bin.

    Returns:
        The number of bins.
    """
    return (-(-tokens // bin_slots)).bit_length()


def bin_sizes(slots: float, tokens: int, bins: int | None, min_bins: int = MIN_BINS) -> tuple[int, int]:
    """Divides slots into bins: the smallest number of bins that works, or slightly more if they use more slots.

    Args:
        slots: slots of the tree.
        tokens: length of the stream.
        bins: number of bins; None to choose it.
        min_bins: smallest number that is chosen.

    Returns:
        The number of bins, and the slots of each.

    Raises:
        ValueError: if there are too few slots for the stream.
    """
    counts = range(max(1, min(min_bins, int(slots))), int(slots) + 1) if bins is None else (bins,)
    sizes = [(count, int(slots // count)) for count in counts]
    sizes = [(count, size) for count, size in sizes if size and count >= bins_needed(tokens, size)]
    if not sizes:
        raise ValueError(
            f"{slots:g} slots for selected tokens, in {bins or 'any number of'} bins, cannot hold a stream of {tokens} "
            "tokens, which needs log2(tokens / bin slots) bins; pass a larger budget"
        )
    sizes = sizes[: max(1, min_bins // 2)]
    full_tiles = [pair for pair in sizes if round_to_tiles(math.prod(pair)) == math.prod(pair)]
    return max(full_tiles or sizes, key=math.prod)


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
    """Returns an empty tree.

    Args:
        rng: PRNG key of the stream.
        bins: number of bins, N.
        bin_slots: slots of a bin, u = t / 2.
        key_dim: dimensions of keys.
        value_dim: dimensions of values; None for a tree without values.
        tokens: maximum length of the stream.
        dtype: dtype of keys and values.
        eager: whether siblings merge as soon as both are full, as in the paper (O(t log n) occupied slots). Otherwise
            they merge only when no bin is free, the oldest of the lowest level first, so that most slots stay
            occupied.
        conserves_mass: whether the weights after a halving are scaled to the sum before.

    Returns:
        The tree.

    Raises:
        ValueError: if a size is below 1 or there are too few bins for the stream.
    """
    for name, size in {"bins": bins, "bin_slots": bin_slots}.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if bins < (needed := bins_needed(tokens, bin_slots)):
        raise ValueError(f"bins={bins} of {bin_slots} slots cannot hold {tokens} tokens; pass at least {needed}")
    zero = jnp.zeros((), jnp.int32)
    return MergeReduceTree(
        keys=jnp.zeros((bins * bin_slots, key_dim), dtype),
        values=None if value_dim is None else jnp.zeros((bins * bin_slots, value_dim), dtype),
        log_weight=jnp.full(bins * bin_slots, -jnp.inf),
        level=jnp.full(bins, -1, jnp.int32),
        index=jnp.zeros(bins, jnp.int32),
        count=zero,
        clipped=zero,
        lost=zero,
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
    """Takes the valid ones of T tokens in, in order.

    Args:
        tree: the tree.
        keys: keys of the tokens.
        values: values of the tokens, if the tree has values.
        valid: tokens that count; None for all.
        halve: how t entries become t / 2; the same function for every call with one tree.

    Returns:
        The tree.

    Raises:
        ValueError: if values are missing or superfluous.
    """
    if (values is None) != (tree.values is None):
        raise ValueError("values must be passed if and only if the tree was initialized with a value_dim")
    tokens, bin_slots = keys.shape[0], _bin_slots(tree)
    count, items = jnp.int32(tokens), (keys, values)
    if valid is not None:
        order = jnp.argsort(~valid, stable=True)  # valid tokens first
        items = jax.tree.map(lambda x: x[order], items)
        count = jnp.sum(valid, dtype=jnp.int32)
    # One leaf after the other: first the remaining slots of the open leaf, then full leaves.
    width = min(tokens, bin_slots)
    items = jax.tree.map(lambda x: jnp.pad(x, ((0, width), (0, 0))), items)
    bounds = jnp.arange((tokens + bin_slots - 2) // bin_slots + 2) * bin_slots - tree.count % bin_slots
    bounds = jnp.clip(bounds, 0, count)

    def insert_leaf(tree: MergeReduceTree, bounds: tuple[Array, Array]) -> tuple[MergeReduceTree, None]:
        """Inserts the tokens in [start, stop) = `bounds`, which fit into one leaf of the `tree`."""
        start, stop = bounds
        keys, values = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, width), items)
        return _insert_in_leaf(tree, keys, values, stop - start, halve), None

    return jax.lax.scan(insert_leaf, tree, (bounds[:-1], bounds[1:]))[0]


class _Nodes(NamedTuple):
    """The nodes of one level while a tree is filled."""

    token: Int[Array, "n u"]  # token of each entry
    weight: Float[Array, "n u"]  # 0 for an empty entry


def fill(
    tree: MergeReduceTree,
    keys: Float[Array, "T D"],
    values: Float[Array, "T D_v"] | None,
    count: Int[Array, ""],
    *,
    halve: Halve,
    block: int = 0,
    max_parallel: int = 16,
) -> MergeReduceTree:
    """Takes the first `count` of T tokens into an empty tree, level by level, with many halvings in parallel.

    Every level is halved before the next, the oldest nodes first, until the bins suffice. Levels therefore differ less
    than after a stream, and nodes of a level can be halved in larger groups. If a group is two siblings, every bin is
    the node that a stream would give.

    Args:
        tree: an empty tree.
        keys: keys of the tokens.
        values: values of the tokens, if the tree has values.
        count: number of tokens that count.
        halve: how t entries become t / 2.
        block: entries that are halved together, rounded to pairs of siblings (at least one pair). Entries of weight
            zero come last.
        max_parallel: halvings that run in parallel; more take more memory.

    Returns:
        The tree.
    """
    bin_slots, bins = _bin_slots(tree), tree.level.shape[0]
    leaves = -(-keys.shape[0] // bin_slots)
    pad = ((0, leaves * bin_slots - keys.shape[0]), (0, 0))
    keys = jnp.pad(keys, pad).astype(tree.keys.dtype)
    values = None if values is None or tree.values is None else jnp.pad(values, pad).astype(tree.values.dtype)
    num_nodes = _num_nodes(count, bin_slots, bins, leaves)
    # The most nodes of each level for any count; the first token of a leaf is the one that needs a bin.
    counts = np.arange(leaves)[:, None] * bin_slots + np.array([1, bin_slots])
    max_nodes = [int(np.max(number)) for number in _num_nodes(counts, bin_slots, bins, leaves)]

    token = jnp.arange(leaves * bin_slots, dtype=jnp.int32).reshape(leaves, bin_slots)
    levels = [_Nodes(token, (token < count).astype(jnp.float32))]
    clipped = jnp.int32(0)
    halve_group = functools.partial(_halve_group, tree, halve, keys, values)
    for level, number in enumerate(max_nodes[1:], 1):
        if not number:
            break
        pairs = min(max(1, round(block / (2 * bin_slots))), number)
        groups = jnp.arange(-(-number // pairs))
        token, weight = (_pad_rows(x, 2 * pairs * len(groups)).reshape(len(groups), -1) for x in levels[-1])
        # Only the first pairs of the level are merged.
        merges = jnp.arange(len(groups) * pairs).repeat(2 * bin_slots).reshape(weight.shape) < num_nodes[level]
        items = (jnp.full_like(groups, level), groups, token, jnp.where(merges, weight, 0.0))
        nodes, group_clipped = jax.lax.map(halve_group, items, batch_size=min(max_parallel, len(groups)))
        clipped += jnp.sum(group_clipped)
        levels.append(_Nodes(*(x.reshape(-1, bin_slots) for x in nodes)))
    return _gather_bins(dataclasses.replace(tree, clipped=clipped), keys, values, count, num_nodes, levels)


def _halve_group(
    tree: MergeReduceTree,
    halve: Halve,
    keys: Float[Array, "T D"],
    values: Float[Array, "T D_v"] | None,
    item: tuple[Array, Array, Array, Array],
) -> tuple[_Nodes, Int[Array, ""]]:
    """Halves a group of nodes, given its level, number, tokens and weights; counts clipped probabilities."""
    level, group, token, weight = item
    value = None if values is None else values[token]
    halved = _halve(tree, halve, level, group, keys[token], value, weight)
    # Occupied entries first, so that they fill the first bins of the group.
    order = jnp.argsort(halved.weight == 0, stable=True)
    nodes = _Nodes(token[halved.indices[order]], halved.weight[order])
    return nodes, jnp.where(jnp.any(weight > 0), halved.clipped, 0)


def _gather_bins(
    tree: MergeReduceTree,
    keys: Float[Array, "T D"],
    values: Float[Array, "T D_v"] | None,
    count: Int[Array, ""],
    num_nodes: list[Any],
    levels: list[_Nodes],
) -> MergeReduceTree:
    """Writes the nodes that were not merged into the bins, the highest level first."""
    # The nodes that remain on a level are those from twice the number of the next level on.
    merged = 2 * jnp.stack([*num_nodes[1:], jnp.zeros_like(count)])
    remaining = (jnp.stack(num_nodes) - merged).at[0].add(count % _bin_slots(tree) > 0)
    end = jnp.cumsum(remaining[::-1])[::-1]
    bins = jnp.arange(tree.level.shape[0])
    level = jnp.sum(bins[:, None] < end, axis=1, dtype=jnp.int32) - 1
    index = jnp.where(level < 0, 0, bins - (end - remaining)[level] + merged[level])
    first_row = np.cumsum([0, *(len(nodes.token) for nodes in levels)])
    row = jnp.where(level < 0, 0, jnp.asarray(first_row)[level] + index)
    token, weight = (jnp.concatenate(parts)[row] for parts in zip(*levels, strict=True))
    source = token.reshape(-1)
    return dataclasses.replace(
        tree,
        keys=keys[source],
        values=None if values is None else values[source],
        log_weight=jnp.log(jnp.where(level[:, None] < 0, 0.0, weight).reshape(-1)),
        level=level,
        index=index.astype(jnp.int32),
        count=count.astype(jnp.int32),
    )


def _num_nodes(count: Any, bin_slots: int, bins: int, leaves: int) -> list[Any]:
    """Returns the number of nodes of each level that `fill` makes of `count` tokens (of NumPy or JAX).

    At level 0 only full leaves count. Every merge makes one bin of two, so that a level is merged until no bin is
    superfluous or no pair is left.
    """
    numbers = [count // bin_slots]
    superfluous = -(-count // bin_slots) - bins
    for level in range(1, leaves.bit_length()):
        numbers.append(superfluous.clip(0, numbers[0] >> level))
        superfluous = superfluous - numbers[-1]
    return numbers


def _pad_rows(x: Array, count: int) -> Array:
    """Returns the first `count` rows, padded with zeros."""
    return jnp.pad(x[:count], ((0, max(count - x.shape[0], 0)), (0, 0)))


def _bin_slots(tree: MergeReduceTree) -> int:
    return tree.keys.shape[0] // tree.level.shape[0]


def _halve(
    tree: MergeReduceTree,
    halve: Halve,
    level: Int[Array, ""],
    index: Int[Array, ""],
    keys: Float[Array, "t D"],
    values: Float[Array, "t D_v"] | None,
    weights: Float[Array, "t"],
) -> Halved:
    """Makes node (level, index) from the entries of its children."""
    rng = jax.random.fold_in(jax.random.fold_in(tree.rng, level), index)
    halved = halve(rng, keys, values, weights)
    if not tree.conserves_mass:
        return halved
    total = jnp.sum(halved.weight)
    factor = jnp.where(total > 0, jnp.sum(weights) / jnp.where(total > 0, total, 1.0), 1.0)
    return halved._replace(weight=halved.weight * factor)


class _Pair(NamedTuple):
    """The bins that merge next: the oldest two full siblings of the lowest level that has any."""

    left: Int[Array, ""]
    right: Int[Array, ""]
    exists: Bool[Array, ""]


def _next_pair(tree: MergeReduceTree) -> _Pair:
    level, index = tree.level, tree.index
    full = (level >= 0) & ((index + 1) << jnp.maximum(level, 0) <= tree.count // _bin_slots(tree))
    is_left = full & (index % 2 == 0)
    siblings = (level[:, None] == level) & (index[:, None] + 1 == index) & is_left[:, None] & full
    has_sibling = jnp.any(siblings, axis=1)
    lowest = jnp.min(jnp.where(has_sibling, level, _MAX_INT))
    left = jnp.argmin(jnp.where(has_sibling & (level == lowest), index, _MAX_INT))
    return _Pair(left, jnp.argmax(siblings[left]), jnp.any(has_sibling))


def _merge_if(tree: MergeReduceTree, pair: _Pair, condition: Bool[Array, ""], halve: Halve) -> MergeReduceTree:
    """Merges a pair into its left bin if the condition is true."""
    bin_slots = _bin_slots(tree)
    offsets = jnp.arange(bin_slots, dtype=jnp.int32)
    left, right = pair.left * bin_slots + offsets, pair.right * bin_slots + offsets
    slots = jnp.concatenate([left, right])
    level, index = tree.level[pair.left] + 1, tree.index[pair.left] // 2

    # A loop of at most one iteration: under vmap, `cond` would always compute both branches.
    def merge(_: tuple[Array, Halved]) -> tuple[Array, Halved]:
        values = None if tree.values is None else tree.values[slots]
        weights = jnp.exp(tree.log_weight[slots])
        return jnp.bool_(False), _halve(tree, halve, level, index, tree.keys[slots], values, weights)

    empty = Halved(offsets, jnp.zeros(bin_slots), jnp.int32(0))
    _, halved = jax.lax.while_loop(lambda carry: carry[0], merge, (condition, empty))
    source = jnp.where(condition, slots[halved.indices], left)
    log_weight = jnp.where(condition, jnp.log(halved.weight), tree.log_weight[left])
    freed = jnp.where(condition, -jnp.inf, tree.log_weight[right])
    return dataclasses.replace(
        tree,
        keys=tree.keys.at[left].set(tree.keys[source]),
        values=None if tree.values is None else tree.values.at[left].set(tree.values[source]),
        log_weight=tree.log_weight.at[left].set(log_weight).at[right].set(freed),
        level=jnp.where(condition, tree.level.at[pair.left].set(level).at[pair.right].set(-1), tree.level),
        index=jnp.where(condition, tree.index.at[pair.left].set(index).at[pair.right].set(0), tree.index),
        clipped=tree.clipped + halved.clipped,
    )


def _insert_in_leaf(
    tree: MergeReduceTree,
    keys: Float[Array, "P D"],
    values: Float[Array, "P D_v"] | None,
    count: Int[Array, ""],
    halve: Halve,
) -> MergeReduceTree:
    """Takes the first `count` of P tokens into the open leaf, which must have slots for them, or into a new one."""
    bin_slots = _bin_slots(tree)
    leaf, occupied = tree.count // bin_slots, tree.count % bin_slots
    opens = (count > 0) & (occupied == 0)
    if not tree.eager:
        pair = _next_pair(tree)
        tree = _merge_if(tree, pair, opens & pair.exists & jnp.all(tree.level >= 0), halve)
    target = jnp.argmax(jnp.where(opens, tree.level < 0, (tree.level == 0) & (tree.index == leaf)))
    fits = ~opens | (tree.level[target] < 0)
    opens &= fits
    inserted = jnp.where(fits, count, 0)
    offsets = jnp.arange(keys.shape[0])
    slots = jnp.where(offsets < inserted, target * bin_slots + occupied + offsets, tree.keys.shape[0])

    def put(buffer: Float[Array, "S D"], x: Float[Array, "P D"]) -> Float[Array, "S D"]:
        return buffer.at[slots].set(x.astype(buffer.dtype), mode="drop")

    tree = dataclasses.replace(
        tree,
        keys=put(tree.keys, keys),
        values=None if tree.values is None or values is None else put(tree.values, values),
        log_weight=tree.log_weight.at[slots].set(0.0, mode="drop"),
        level=tree.level.at[target].set(jnp.where(opens, 0, tree.level[target])),
        index=tree.index.at[target].set(jnp.where(opens, leaf, tree.index[target])),
        count=tree.count + inserted,
        lost=tree.lost + count - inserted,
    )
    if not tree.eager:
        return tree

    def merge(carry: tuple[MergeReduceTree, _Pair]) -> tuple[MergeReduceTree, _Pair]:
        """Merges the pair in the `carry` and returns the next pair."""
        tree = _merge_if(*carry, carry[1].exists, halve)
        return tree, _next_pair(tree)

    return jax.lax.while_loop(lambda carry: carry[1].exists, merge, (tree, _next_pair(tree)))[0]
