"""MergeReduceTree: a stream of tokens in few slots, halved again and again (BalanceKV, Algorithm 4, MergeAndReduce).

Tokens fill bins of t / 2 slots, the leaves of a binary tree. Two full sibling bins are halved together (t entries in,
t / 2 out) into one bin one level up. The randomness of a halving depends on its place in the tree alone, so the result
is that of the offline recursion, however the stream is cut.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.spec import round_to_tiles
from kvjax.state import fault, kv_entries, state, static
from kvjax.structures.balance import Halve, Halved

# Of a tree that is kept full. A stream that comes bit by bit halves two bins at a time: the fewer they are, the more
# tokens find their like; the more, the less weights differ.
FEWEST_BINS = 16


@state
class MergeReduceTree:
    """N bins of u = t / 2 slots for one stream. Bytes: N u (D + D_v) itemsize + 4 N u + 8 N + 12 + the random key's.

    Bin b holds slots [b u, (b + 1) u) and stands for tokens [index 2^level u, (index + 1) 2^level u) of the stream.
    """

    keys: Float[Array, "S D"] = kv_entries()
    values: Float[Array, "S D_v"] | None = kv_entries()  # None: a tree for denominators
    log_weight: Float[Array, "S"]  # float32, -inf in empty slots
    level: Int[Array, "bins"]  # int32 halvings that the bin's entries went through, -1 in free bins
    index: Int[Array, "bins"]  # int32
    count: Int[Array, ""]  # int32 tokens taken in
    clipped: Int[Array, ""]  # int32 decisions whose probability was clipped (the paper's FAIL)
    lost: Int[Array, ""] = fault("tokens came to a merge-and-reduce tree without a free bin and are lost")
    rng: Key[Array, ""]
    # Merges siblings as soon as both are full, as the paper does; otherwise only when a bin is needed.
    eager: bool = static()
    # Whether a halving's weights are multiplied by what brings their sum to that of its input.
    conserves_mass: bool = static()


def bins_needed(tokens: int, bin_slots: int) -> int:
    """The least number of bins with which a stream of so many tokens never runs out of room.

    m full leaves can always be merged into as many bins as m has binary digits of one.
    """
    return (-(-tokens // bin_slots)).bit_length()


def bin_sizes(slots: float, tokens: int, bins: int | None, fewest: int = FEWEST_BINS) -> tuple[int, int]:
    """Number of bins and slots in each: the fewest that will do, or a few more that use more of the slots.

    Raises:
        ValueError: where the slots are too few for a stream of so many tokens.
    """
    tried = range(max(1, min(fewest, int(slots))), int(slots) + 1) if bins is None else (bins,)
    sizes = ((count, int(slots // count)) for count in tried)
    fit = [(count, size) for count, size in sizes if size and count >= bins_needed(tokens, size)]
    if not fit:
        raise ValueError(
            f"{slots:g} slots beside sinks and recent tokens, in {bins or 'any number of'} bins, cannot hold a stream "
            f"of {tokens} tokens: log2(tokens / bin slots) bins are needed; give a larger budget"
        )
    few = fit[: max(1, fewest // 2)]
    whole = [sizes for sizes in few if round_to_tiles(math.prod(sizes)) == math.prod(sizes)]
    return max(whole or few, key=lambda sizes: math.prod(sizes))


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
    block: int = 0,
    together: int = 16,
) -> MergeReduceTree:
    """The first `count` of T tokens into an empty tree, all at hand: level by level, many halvings side by side.

    Every level is halved before the next, oldest first, until the bins suffice. So the levels of what is stored differ
    less than those of a stream that had to make room as it went, and bins of a level can be halved in larger groups,
    which share their entries. Where a group is two siblings every bin is that node of the offline recursion.

    Args:
        block: entries halved together, rounded to whole pairs of siblings (one at least). Entries of weight zero,
            where a group is not full, come last.
        together: halvings that run side by side; more take more memory.
    """
    bin_slots, bins = _bin_slots(tree), tree.level.shape[0]
    leaves = -(-keys.shape[0] // bin_slots)
    pad = ((0, leaves * bin_slots - keys.shape[0]), (0, 0))
    keys = jnp.pad(keys, pad).astype(tree.keys.dtype)
    values = None if values is None or tree.values is None else jnp.pad(values, pad).astype(tree.values.dtype)
    # How many nodes are made at each level, and the most of any count (a leaf's first token is what asks for a bin).
    made = _nodes_made(count, bin_slots, bins, leaves)
    counts = np.arange(leaves)[:, None] * bin_slots + np.array([1, bin_slots])
    most = [int(np.max(nodes)) for nodes in _nodes_made(counts, bin_slots, bins, leaves)]

    token = jnp.arange(leaves * bin_slots, dtype=jnp.int32).reshape(leaves, bin_slots)
    nodes = [(token, (token < count).astype(jnp.float32))]
    clipped = jnp.int32(0)

    def halve_group(item):
        level, group, token, weight = item
        value = None if values is None else values[token]
        halved = _halve(tree, halve, level, group, keys[token], value, weight)
        # Entries to the front, so that they fill the group's first bins.
        order = jnp.argsort(halved.weight == 0, stable=True)
        return token[halved.kept[order]], halved.weight[order], jnp.where(jnp.any(weight > 0), halved.clipped, 0)

    for level in range(1, len(most)):
        if not most[level]:
            break
        pairs = min(max(1, round(block / (2 * bin_slots))), most[level])
        groups = -(-most[level] // pairs)
        token, weight = (_rows(x, 2 * pairs * groups).reshape(groups, -1) for x in nodes[-1])
        # Only the first pairs of the level are merged.
        wanted = jnp.arange(groups * pairs).repeat(2 * bin_slots).reshape(groups, -1) < made[level]
        number = jnp.arange(groups)
        items = (jnp.full_like(number, level), number, token, jnp.where(wanted, weight, 0.0))
        token, weight, new_clipped = jax.lax.map(halve_group, items, batch_size=min(together, groups))
        clipped += jnp.sum(new_clipped)
        nodes.append((token.reshape(-1, bin_slots), weight.reshape(-1, bin_slots)))

    # What is left of every level, the highest first: its nodes from twice the next level's number on.
    consumed = 2 * jnp.stack([*made[1:], jnp.zeros_like(count)])
    left = (jnp.stack(made) - consumed).at[0].add(count % bin_slots > 0)
    end = jnp.cumsum(left[::-1])[::-1]
    lane = jnp.arange(bins)
    of_level = jnp.sum(lane[:, None] < end, axis=1, dtype=jnp.int32) - 1
    of_index = jnp.where(of_level < 0, 0, lane - (end - left)[of_level] + consumed[of_level])
    offset = np.cumsum([0, *(len(token) for token, _ in nodes)])
    row = jnp.where(of_level < 0, 0, jnp.asarray(offset)[of_level] + of_index)
    token, weight = (jnp.concatenate(parts)[row] for parts in zip(*nodes, strict=True))
    chosen, weight = token.reshape(-1), jnp.where(of_level[:, None] < 0, 0.0, weight).reshape(-1)
    return dataclasses.replace(
        tree,
        keys=keys[chosen],
        values=None if values is None else values[chosen],
        log_weight=jnp.log(weight),
        level=of_level,
        index=of_index.astype(jnp.int32),
        count=count.astype(jnp.int32),
        clipped=clipped,
    )


def _nodes_made(count, bin_slots: int, bins: int, leaves: int) -> list:
    """How many nodes of each level `fill` makes of `count` tokens, in numpy or jax; at level 0 they are full leaves.

    Every merge makes one bin of two: a level is merged as far as there are bins too many, or pairs.
    """
    made = [count // bin_slots]
    excess = -(-count // bin_slots) - bins
    for level in range(1, leaves.bit_length()):
        made.append(excess.clip(0, made[0] >> level))
        excess = excess - made[-1]
    return made


def _rows(x: Array, count: int) -> Array:
    """The first `count` rows, followed by zeros where there are fewer."""
    return jnp.pad(x[:count], ((0, max(count - x.shape[0], 0)), (0, 0)))


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
