"""A merge-and-reduce tree: a stream of tokens in few slots, halved again and again.

Tokens fill bins of t / 2 slots, the leaves of a binary tree. As soon as two sibling bins are full, they are halved
together: t entries become t / 2 in one bin of the next level, so that O(t log n) slots are enough. The random numbers
of a halving depend only on its node in the tree, so that the result does not depend on the division of the stream into
blocks.

Reference:
    BalanceKV, Algorithm 4 (MergeAndReduce).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.methods.balancekv.balance import Halve
from kvjax.spec import allocated_slots
from kvjax.state import fault, kv_entries, state, static

_MAX_INT = np.iinfo(np.int32).max


@state
class MergeReduceTree:
    """N bins of u = t / 2 slots for one stream; bin b has slots [b u, (b + 1) u).

    S is N u, rounded up to a multiple of 8. A bin represents tokens [index 2^level u, (index + 1) 2^level u) of the
    stream. The size does not grow with the stream: S (D + D_v) elements, 4 S + 8 N + 12 bytes of weights and counters,
    and the PRNG key.
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
    bin_slots: int = static()


def bins_needed(tokens: int, bin_slots: int) -> int:
    """Returns the number of bins with which a stream never runs out of slots.

    m full leaves can always be merged into as many bins as m has binary digits of one.

    Returns:
        The number of bins.
    """
    return (-(-tokens // bin_slots)).bit_length()


def min_tree_slots(tokens: int, bins: int | None) -> int:
    """Returns the smallest number of slots with which a tree holds a stream, the inverse of `bins_needed`.

    Args:
        bins: number of bins; None for any.

    Returns:
        The number of slots.
    """
    counts = range(1, tokens.bit_length() + 1) if bins is None else (bins,)
    return min(count * -(-tokens // (2**count - 1)) for count in counts)


def bin_sizes(slots: float, tokens: int, bins: int | None) -> tuple[int, int]:
    """Divides slots into bins.

    Args:
        bins: number of bins; None for the smallest number that the stream allows.

    Returns:
        The number of bins, and the slots of each.

    Raises:
        ValueError: if there are too few slots for the stream.
    """
    for count in range(1, int(slots) + 1) if bins is None else (bins,):
        size = int(slots // count)
        if size and count >= bins_needed(tokens, size):
            return count, size
    raise ValueError(
        f"{slots:g} slots for selected tokens, in {bins or 'any number of'} bins, cannot hold a stream of {tokens} "
        "tokens, which needs log2(tokens / bin slots) bins; pass a larger budget"
    )


def init_merge_reduce(
    rng: Key[Array, ""],
    *,
    bins: int,
    bin_slots: int,
    key_dim: int,
    value_dim: int | None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> MergeReduceTree:
    """Returns an empty tree.

    Args:
        rng: PRNG key of the stream.
        bins: number of bins, N.
        bin_slots: slots of a bin, u = t / 2.
        value_dim: dimensions of values; None for a tree without values.

    Returns:
        The tree.
    """
    zero = jnp.zeros((), jnp.int32)
    slots = allocated_slots(bins * bin_slots)
    return MergeReduceTree(
        keys=jnp.zeros((slots, key_dim), dtype),
        values=None if value_dim is None else jnp.zeros((slots, value_dim), dtype),
        log_weight=jnp.full(slots, -jnp.inf),
        level=jnp.full(bins, -1, jnp.int32),
        index=jnp.zeros(bins, jnp.int32),
        count=zero,
        clipped=zero,
        lost=zero,
        rng=rng,
        bin_slots=bin_slots,
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
        values: values of the tokens, if the tree has values.
        valid: tokens that count; None for all.
        halve: how t entries become t / 2; the same function for every call with one tree.

    Returns:
        The tree.
    """
    tokens, bin_slots = keys.shape[0], tree.bin_slots
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


class _Pair(NamedTuple):
    """The bins that merge next: the oldest two full siblings of the lowest level that has any."""

    left: Int[Array, ""]
    right: Int[Array, ""]
    exists: Bool[Array, ""]


def _next_pair(tree: MergeReduceTree) -> _Pair:
    level, index = tree.level, tree.index
    full = (level >= 0) & ((index + 1) << jnp.maximum(level, 0) <= tree.count // tree.bin_slots)
    is_left = full & (index % 2 == 0)
    siblings = (level[:, None] == level) & (index[:, None] + 1 == index) & is_left[:, None] & full
    has_sibling = jnp.any(siblings, axis=1)
    lowest = jnp.min(jnp.where(has_sibling, level, _MAX_INT))
    left = jnp.argmin(jnp.where(has_sibling & (level == lowest), index, _MAX_INT))
    return _Pair(left, jnp.argmax(siblings[left]), jnp.any(has_sibling))


def _merge(tree: MergeReduceTree, pair: _Pair, halve: Halve) -> MergeReduceTree:
    """Makes the node above a pair from its entries, in the left bin, and frees the right one."""
    offsets = jnp.arange(tree.bin_slots, dtype=jnp.int32)
    left, right = pair.left * tree.bin_slots + offsets, pair.right * tree.bin_slots + offsets
    slots = jnp.concatenate([left, right])
    level, index = tree.level[pair.left] + 1, tree.index[pair.left] // 2
    rng = jax.random.fold_in(jax.random.fold_in(tree.rng, level), index)
    values = None if tree.values is None else tree.values[slots]
    halved = halve(rng, tree.keys[slots], values, jnp.exp(tree.log_weight[slots]))
    source = slots[halved.indices]
    return dataclasses.replace(
        tree,
        keys=tree.keys.at[left].set(tree.keys[source]),
        values=None if tree.values is None else tree.values.at[left].set(tree.values[source]),
        log_weight=tree.log_weight.at[left].set(jnp.log(halved.weight)).at[right].set(-jnp.inf),
        level=tree.level.at[pair.left].set(level).at[pair.right].set(-1),
        index=tree.index.at[pair.left].set(index).at[pair.right].set(0),
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
    bin_slots = tree.bin_slots
    leaf, occupied = tree.count // bin_slots, tree.count % bin_slots
    opens = (count > 0) & (occupied == 0)
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

    def merge(carry: tuple[MergeReduceTree, _Pair]) -> tuple[MergeReduceTree, _Pair]:
        """Merges the pair in the `carry` and returns the next pair."""
        tree = _merge(*carry, halve)
        return tree, _next_pair(tree)

    return jax.lax.while_loop(lambda carry: carry[1].exists, merge, (tree, _next_pair(tree)))[0]
