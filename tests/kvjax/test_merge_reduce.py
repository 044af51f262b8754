"""The merge-and-reduce tree against the offline recursion that defines it."""

import functools

import chex
import jax
import numpy as np
import pytest

import kvjax
from kvjax.methods.balancekv import balance, merge_reduce

TOKENS, KEY_DIM, VALUE_DIM = 100, 8, 3
BINS, BIN_SLOTS = 6, 4

algorithm_2 = functools.partial(balance.softmax_balance, c=1.0, key_norm=3.0)
HALVE = functools.partial(algorithm_2, value_norm=2.0)


insert = jax.jit(merge_reduce.insert, static_argnames="halve")


def stream(seed=0, tokens=TOKENS):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(tokens, dim)).astype(np.float32) for dim in (KEY_DIM, VALUE_DIM)]


def empty_tree(bins=BINS, bin_slots=BIN_SLOTS, value_dim=VALUE_DIM):
    sizes = {"bins": bins, "bin_slots": bin_slots}
    return merge_reduce.init_merge_reduce(jax.random.key(7), key_dim=KEY_DIM, value_dim=value_dim, **sizes)


def occupied(tree):
    """Returns the entries of a tree in the order of slots, and the node of the offline tree that each bin holds."""
    there = np.asarray(tree.log_weight) > -np.inf
    entries = np.asarray(tree.keys)[there], np.asarray(tree.values)[there]
    return *entries, *map(np.asarray, (tree.log_weight, tree.level, tree.index, tree.count, tree.clipped, tree.lost))


def offline(keys, values, halve):
    """Returns a function that gives tokens and weights of the node (level, index) by recursion, and a list that gets
    the number of clipped decisions of every halving."""
    clipped = []

    def node(level, index):
        if not level:
            return np.arange(BIN_SLOTS) + index * BIN_SLOTS, np.ones(BIN_SLOTS, np.float32)
        children = [node(level - 1, 2 * index + side) for side in (0, 1)]
        tokens, weights = (np.concatenate(parts) for parts in zip(*children, strict=True))
        rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), level), index)
        kept, weight, count = halve(rng, keys[tokens], values[tokens], weights)
        clipped.append(int(count))
        return tokens[np.asarray(kept)], np.asarray(weight)

    return node, clipped


@pytest.mark.parametrize("cut", [(100,), (1, 3, 46, 50), (1,) * 100], ids=["one block", "blocks", "tokens"])
def test_every_bin_equals_its_node_of_the_offline_recursion(cut):
    keys, values = stream()
    tree, begin = empty_tree(), 0
    for size in cut:
        part = slice(begin, begin + size)
        tree, begin = insert(tree, keys[part], values[part], halve=HALVE), begin + size
    node, clipped = offline(keys, values, jax.jit(HALVE))
    covered = []
    for number, (level, index) in enumerate(zip(np.asarray(tree.level), np.asarray(tree.index), strict=True)):
        slots = slice(number * BIN_SLOTS, (number + 1) * BIN_SLOTS)
        if level < 0:
            assert np.all(np.isneginf(tree.log_weight[slots]))
            continue
        tokens, weight = node(int(level), int(index))
        there = weight > 0
        np.testing.assert_allclose(np.exp(tree.log_weight[slots]), weight, rtol=1e-5)
        np.testing.assert_array_equal(tree.keys[slots][there], keys[tokens][there])
        np.testing.assert_array_equal(tree.values[slots][there], values[tokens][there])
        covered += list(range(index << level, (index + 1) << level))
    assert sorted(covered) == list(range(TOKENS // BIN_SLOTS))
    assert int(tree.count) == TOKENS and int(tree.lost) == 0 and int(tree.clipped) == sum(clipped)
    # A binary counter.
    assert sorted(tree.level[tree.level >= 0].tolist()) == [place for place in range(9) if 25 >> place & 1]


def test_invalid_tokens_are_ignored():
    keys, values = stream()
    valid = np.random.default_rng(0).uniform(size=TOKENS) < 0.6
    some = insert(empty_tree(), keys, values, valid, halve=HALVE)
    only = insert(empty_tree(), keys[valid], values[valid], halve=HALVE)
    chex.assert_trees_all_equal(occupied(some), occupied(only))
    assert some.count == valid.sum()


def test_values_are_optional():
    keys, _ = stream()
    tree = insert(empty_tree(value_dim=None), keys, None, halve=algorithm_2)
    ones = insert(empty_tree(value_dim=1), keys, np.ones((TOKENS, 1), np.float32), halve=algorithm_2)
    assert tree.values is None
    np.testing.assert_array_equal(tree.log_weight, ones.log_weight)
    np.testing.assert_array_equal(tree.keys, ones.keys)


def test_the_required_bins_suffice_and_fewer_lose_tokens():
    keys, values = stream()
    needed = merge_reduce.bins_needed(TOKENS, BIN_SLOTS)
    enough = insert(empty_tree(bins=needed), keys, values, halve=HALVE)
    assert enough.lost == 0 and enough.count == TOKENS
    short = insert(empty_tree(bins=needed - 1), keys, values, halve=HALVE)
    assert short.lost > 0 and short.count + short.lost == TOKENS
    with pytest.raises(ValueError, match="without a free bin"):
        kvjax.raise_faults(short)
