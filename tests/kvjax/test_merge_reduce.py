"""The merge-and-reduce tree against the offline recursion that defines it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.structures import balance, merge_reduce

TOKENS, KEY_DIM, VALUE_DIM = 100, 8, 3
BINS, BIN_SLOTS = 6, 4

algorithm_2 = functools.partial(balance.softmax_balance, c=1.0, key_norm=3.0)
HALVES = {
    "pairs": balance.halve_by_pairs,
    "exactly": functools.partial(balance.halve_exactly, gamma=1.0, temperature=1.0),
    "softmax": functools.partial(algorithm_2, value_norm=2.0),
}


def insert_by_token(tree, keys, values, *, halve):
    """Inserts token by token, which defines the result for blocks."""

    def step(tree, token):
        key, value = token
        return merge_reduce._insert_in_leaf(tree, key[None], value[None], jnp.int32(1), halve), None

    return jax.lax.scan(step, tree, (keys, values))[0]


insert, scan_tokens, fill = (
    jax.jit(function, static_argnames="halve") for function in (merge_reduce.insert, insert_by_token, merge_reduce.fill)
)


def stream(seed=0, tokens=TOKENS):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(tokens, KEY_DIM)).astype(np.float32), rng.normal(size=(tokens, VALUE_DIM)).astype(
        np.float32
    )


def empty_tree(bins=BINS, bin_slots=BIN_SLOTS, tokens=TOKENS, value_dim=VALUE_DIM, **options):
    sizes = {"bins": bins, "bin_slots": bin_slots, "tokens": tokens}
    return merge_reduce.init_merge_reduce(jax.random.key(7), key_dim=KEY_DIM, value_dim=value_dim, **sizes, **options)


def occupied(tree):
    """Returns the entries of a tree in the order of slots, and the node of the offline tree that each bin holds."""
    there = np.asarray(tree.log_weight) > -np.inf
    values = None if tree.values is None else np.asarray(tree.values)[there]
    return {
        "keys": np.asarray(tree.keys)[there],
        "values": values,
        "log_weight": np.asarray(tree.log_weight),
        "level": np.asarray(tree.level),
        "index": np.asarray(tree.index),
        "counts": [int(tree.count), int(tree.clipped), int(tree.lost)],
    }


def offline(keys, values, halve, conserves_mass):
    """Returns a function that gives tokens and weights of the node (level, index) by recursion."""

    @functools.cache
    def node(level, index):
        if not level:
            return np.arange(BIN_SLOTS) + index * BIN_SLOTS, np.ones(BIN_SLOTS, np.float32)
        children = [node(level - 1, 2 * index + side) for side in (0, 1)]
        tokens, weights = (np.concatenate(parts) for parts in zip(*children, strict=True))
        rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), level), index)
        kept, weight, _ = (np.asarray(part) for part in halve(rng, keys[tokens], values[tokens], weights))
        if conserves_mass and weight.sum() > 0:
            weight = weight * weights.sum() / weight.sum()
        return tokens[kept], weight

    return node


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", HALVES)
def test_every_bin_equals_its_node_of_the_offline_recursion(name, eager):
    keys, values = stream()
    conserves_mass = name == "exactly"
    tree = insert(empty_tree(eager=eager, conserves_mass=conserves_mass), keys, values, halve=HALVES[name])
    node = offline(keys, values, jax.jit(HALVES[name]), conserves_mass)
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
    if eager:  # a binary counter
        assert sorted(tree.level[tree.level >= 0].tolist()) == [place for place in range(9) if 25 >> place & 1]
    else:
        assert np.all(np.asarray(tree.level) >= 0)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("cut", [(100,), (1, 3, 46, 50)])
def test_trees_do_not_depend_on_blocks(eager, cut):
    keys, values = stream()
    expected = occupied(scan_tokens(empty_tree(eager=eager), keys, values, halve=balance.halve_by_pairs))
    tree, begin = empty_tree(eager=eager), 0
    for size in cut:
        part = slice(begin, begin + size)
        tree, begin = insert(tree, keys[part], values[part], halve=balance.halve_by_pairs), begin + size
    chex.assert_trees_all_equal(occupied(tree), expected)


@pytest.mark.parametrize("count", [0, 3, 24, 25, 61, 100])
@pytest.mark.parametrize("name", ["pairs", "exactly"])
def test_filling_equals_the_offline_recursion(name, count):
    keys, values = stream()
    inside = np.arange(TOKENS)[:, None] < count
    noisy = np.where(inside, keys, 50.0), np.where(inside, values, -50.0)
    tree = fill(empty_tree(), *noisy, jnp.int32(count), halve=HALVES[name])
    node = offline(keys, values, jax.jit(HALVES[name]), conserves_mass=True)
    opened = -(-count // BIN_SLOTS)
    assert np.sum(tree.level >= 0) == min(opened, BINS) and tree.count == count and tree.lost == 0
    for number, (level, index) in enumerate(zip(np.asarray(tree.level), np.asarray(tree.index), strict=True)):
        slots = slice(number * BIN_SLOTS, (number + 1) * BIN_SLOTS)
        if level < 0:
            assert np.all(np.isneginf(tree.log_weight[slots]))
            continue
        tokens, weight = node(int(level), int(index))
        weight = np.where(tokens < count, weight, 0.0) if level == 0 else weight
        # Entries of weight zero come last.
        order = np.lexsort((np.arange(BIN_SLOTS), weight == 0))
        np.testing.assert_allclose(np.exp(tree.log_weight[slots]), weight[order], rtol=1e-5)
        there = weight[order] > 0
        np.testing.assert_array_equal(tree.keys[slots][there], keys[tokens[order]][there])
    # Every level below the highest was halved while it had pairs.
    levels = tree.level[tree.level >= 0].tolist()
    assert all(levels.count(level) <= 1 + (level == 0) for level in range(max(levels, default=0) - 1))
    more = stream(1, 20)
    later = insert(tree, *more, halve=HALVES[name])
    assert later.count == count + 20 and later.lost == 0
    np.testing.assert_allclose(np.exp(later.log_weight).sum(), count + 20, rtol=1e-5)


@pytest.mark.parametrize("name", ["pairs", "exactly"])
def test_filling_in_groups_depends_only_on_the_tokens(name):
    keys, values = stream()
    in_groups = jax.jit(merge_reduce.fill, static_argnames=("halve", "block", "max_parallel"))
    trees = []
    for tokens, noise in [(61, 0.0), (100, 50.0)]:
        inside = np.arange(tokens)[:, None] < 61
        padded = np.where(inside, keys[:tokens], noise), np.where(inside, values[:tokens], noise)
        tree = in_groups(
            empty_tree(), *padded, jnp.int32(61), halve=HALVES[name], block=32, max_parallel=1 + int(noise)
        )
        trees.append(occupied(tree))
        np.testing.assert_allclose(np.exp(tree.log_weight).sum(), 61, rtol=1e-5)
        assert np.isfinite(tree.log_weight).sum() == 5 * BIN_SLOTS + 61 % BIN_SLOTS
    chex.assert_trees_all_close(*trees, rtol=1e-6)
    without_groups = occupied(fill(empty_tree(), keys, values, jnp.int32(61), halve=HALVES[name]))
    assert not np.array_equal(without_groups["keys"], trees[0]["keys"])


def test_invalid_tokens_are_ignored():
    keys, values = stream()
    valid = np.random.default_rng(0).uniform(size=TOKENS) < 0.6
    some = insert(empty_tree(), keys, values, valid, halve=balance.halve_by_pairs)
    only = insert(empty_tree(), keys[valid], values[valid], halve=balance.halve_by_pairs)
    chex.assert_trees_all_equal(occupied(some), occupied(only))
    assert some.count == valid.sum()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.booleans())
def test_weights_sum_to_the_tokens_and_slots_are_used(sizes, eager):
    keys, values = stream()
    tree = empty_tree(eager=eager)
    for number, size in enumerate(sizes):
        part = slice(20 * number, 20 * number + 20)
        tree = insert(tree, keys[part], values[part], np.arange(20) < size, halve=balance.halve_by_pairs)
    total = sum(sizes)
    np.testing.assert_allclose(np.exp(tree.log_weight).sum(), total, rtol=1e-5)
    assert tree.count == total and tree.lost == 0
    if not eager:  # all tokens while they fit, later at most one partial bin
        used = np.isfinite(tree.log_weight).sum()
        assert used == total if total <= BINS * BIN_SLOTS else used > (BINS - 1) * BIN_SLOTS
    assert np.all(np.isfinite(tree.keys)) and np.all(np.isfinite(tree.values))


def test_mass_is_conserved_only_with_the_correction():
    tokens = 400
    keys, values = stream(tokens=tokens)

    def mass(conserves_mass):
        tree = empty_tree(bin_slots=16, tokens=tokens, conserves_mass=conserves_mass)
        return np.exp(insert(tree, keys, values, halve=HALVES["softmax"]).log_weight).sum()

    assert mass(conserves_mass=False) < 0.9 * tokens
    np.testing.assert_allclose(mass(conserves_mass=True), tokens, rtol=1e-5)


def test_values_are_optional():
    keys, _ = stream()
    tree = insert(empty_tree(value_dim=None), keys, None, halve=algorithm_2)
    ones = insert(empty_tree(value_dim=1), keys, np.ones((TOKENS, 1), np.float32), halve=algorithm_2)
    assert tree.values is None
    np.testing.assert_array_equal(tree.log_weight, ones.log_weight)
    np.testing.assert_array_equal(tree.keys, ones.keys)
    with pytest.raises(ValueError, match="values must be passed if and only if"):
        merge_reduce.insert(tree, keys, np.ones((TOKENS, 1)), halve=algorithm_2)


@pytest.mark.parametrize("eager", [False, True])
def test_the_required_bins_suffice_and_fewer_are_refused(eager):
    keys, values = stream()
    needed = merge_reduce.bins_needed(TOKENS, BIN_SLOTS)
    enough = insert(empty_tree(bins=needed, eager=eager), keys, values, halve=balance.halve_by_pairs)
    assert enough.lost == 0 and enough.count == TOKENS
    with pytest.raises(ValueError, match=f"bins={needed - 1} .*at least {needed}"):
        empty_tree(bins=needed - 1)
    short = insert(empty_tree(bins=needed - 1, tokens=1, eager=eager), keys, values, halve=balance.halve_by_pairs)
    assert short.lost > 0 and short.count + short.lost == TOKENS
    with pytest.raises(ValueError, match="without a free bin"):
        kvjax.raise_faults(short)


@pytest.mark.parametrize("sizes", [{"bins": 0}, {"bin_slots": 0}])
def test_invalid_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match=next(iter(sizes))):
        empty_tree(**sizes)
