"""The block store and the choice of its parts, against loops in plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import recall
from kvjax.attention import attend_reading
from kvjax.segment import Segment
from pallas_kernels.cluster_recall import as_entries, entry_width, taken
from tests.kvjax.support import make_spec

PLACES = 4


FORMS = (recall.parts_by_sorting, recall.parts_by_comparing)


@functools.partial(jax.jit, static_argnames=("form", "tokens", "blocks", "skipping"))
def best(score, size, first, tokens, blocks, form=recall.parts_by_sorting, skip=0, skipping=False):
    return form(score, size, first, skip, tokens=tokens, blocks=blocks, places=PLACES, skipping=skipping)


def laid_out(size):
    """Where each part begins when they follow one another in whole blocks."""
    needed = -(-np.asarray(size) // PLACES)
    return np.cumsum(needed) - needed


def by_loops(score, size, first, tokens, blocks):
    """Blocks with the tokens read of each, part by part; tokens taken of each part."""
    read, taken = [], [0] * len(size)
    for part in sorted(range(len(size)), key=lambda part: (-score[part], part)):
        for place in range(-(-size[part] // PLACES)):
            count = min(PLACES, size[part] - place * PLACES, tokens - sum(taken))
            if count > 0 and len(read) < blocks:
                read.append((first[part] + place, count))
                taken[part] += count
    return read, taken


def compare(score, size, tokens, blocks):
    first = laid_out(size)
    read, taken = by_loops(np.float32(score), size, first, tokens, blocks)
    for form in FORMS:
        found = best(np.float32(score), np.int32(size), np.int32(first), tokens, blocks, form)
        used = np.asarray(found.tokens) > 0
        assert list(zip(np.asarray(found.block)[used], np.asarray(found.tokens)[used], strict=True)) == read
        np.testing.assert_array_equal(found.taken, taken)
        # Unused slots come last and name some block that exists.
        assert not used[len(read) :].any()
    return taken


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    tokens=st.sampled_from([0, 1, 3, 4, 10, 40, 200]),
    blocks=st.sampled_from([0, 1, 3, 12, 60]),
    largest=st.sampled_from([1, 6, 30]),
    kinds=st.sampled_from([1, 2, 1000]),
)
def test_the_best_parts_are_those_of_brute_force(seed, tokens, blocks, largest, kinds):
    rng = np.random.default_rng(seed)
    size = rng.integers(0, largest + 1, 12)
    compare(rng.integers(0, kinds, 12), size, tokens, blocks)


@pytest.mark.parametrize(
    "score, size, tokens, expected",
    [
        ([1, 1, 1], [4, 4, 4], 8, [4, 4, 0]),  # ties: the first ones
        ([3, 2, 1], [0, 5, 0], 40, [0, 5, 0]),  # empty clusters
        ([9, 1, 1], [97, 1, 1], 10, [10, 0, 0]),  # one huge cluster
        ([9, 1, 1], [97, 1, 1], 98, [97, 1, 0]),
        ([1, 2], [7, 9], 3, [0, 3]),  # a budget smaller than a cluster
        ([1, 2], [7, 9], 0, [0, 0]),
        ([-np.inf, -np.inf], [3, 2], 4, [3, 1]),
    ],
)
def test_adversarial_parts(score, size, tokens, expected):
    assert compare(score, size, tokens, blocks=40) == expected


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), tokens=st.sampled_from([4, 30, 200]), skip=st.integers(0, 20))
def test_later_rounds_are_the_same_however_parts_are_ranked(seed, tokens, skip):
    rng = np.random.default_rng(seed)
    size = np.int32(rng.integers(0, 9, 12))
    given = np.float32(rng.integers(0, 5, 12)), size, np.int32(laid_out(size))
    one, other = (best(*given, tokens, 6, form, skip, True) for form in FORMS)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_devices_compare_parts_where_a_cpu_sorts_them():
    given = jnp.zeros(8), jnp.ones(8, jnp.int32), jnp.arange(8)
    of_budget = functools.partial(recall.best_parts, tokens=4, blocks=4, places=PLACES)
    for platform, sorts in (("cpu", True), ("tpu", False), ("cuda", False)):
        text = jax.jit(of_budget).trace(*given).lower(lowering_platforms=(platform,)).as_text()
        assert ("top_k" in text) == sorts


def test_blocks_may_run_out_before_tokens():
    assert compare([3, 2, 1, 0], [1, 1, 5, 9], 16, blocks=3) == [1, 1, 4, 0]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), parts=st.integers(1, 9), tokens=st.integers(0, 90))
def test_any_tokens_fit_the_blocks_that_are_made_for_them(seed, parts, tokens):
    size = np.random.default_rng(seed).multinomial(tokens, np.ones(parts) / parts)
    assert (-(-size // PLACES)).sum() <= recall.blocks_of(tokens, parts, PLACES)


def stores(seed=0, rows=2, kv_heads=3, blocks=5, dim=2, value_dim=None):
    rng = np.random.default_rng(seed)
    entries = jnp.asarray(
        rng.normal(size=(rows, kv_heads, blocks, PLACES, 2 * entry_width(max(dim, value_dim or dim)))), jnp.float32
    )
    position = jnp.zeros((rows, kv_heads, blocks, PLACES), jnp.int32)
    return recall.BlockStore(entries, None, position, head_dim=dim, value_dim=value_dim or dim)


@pytest.mark.parametrize("dim, value_dim", [(2, 2), (80, 80), (2, 7), (80, 16)])
@pytest.mark.parametrize("group", [1, 2])
def test_recall_reads_the_blocks_that_are_named(group, dim, value_dim):
    store, rng = stores(dim=dim, value_dim=value_dim), np.random.default_rng(1)
    block = rng.integers(0, 5, (2, 3 * group, 4))
    count = rng.integers(0, PLACES + 1, block.shape)
    found = taken(store.entries, jnp.asarray(block))
    read = as_entries(recall.as_blocks(store), found, None, jnp.asarray(count), dim)
    keys, values, there = read.keys, read.values, np.asarray(read.log_num) == 0
    for row, head in np.ndindex(2, 3 * group):
        own_keys = np.asarray(store.keys)[row, head // group, block[row, head]]
        own_values = np.asarray(store.values)[row, head // group, block[row, head]]
        np.testing.assert_array_equal(keys[row, head], own_keys.reshape(-1, dim))
        np.testing.assert_array_equal(values[row, head], own_values.reshape(-1, value_dim))
        np.testing.assert_array_equal(there[row, head], (np.arange(PLACES) < count[row, head][:, None]).reshape(-1))
    # Attention reads them where they lie, or fetched.
    query = jnp.asarray(rng.normal(size=(2, 1, 6, dim)), jnp.float32)
    block, count = jnp.asarray(block), jnp.asarray(count)
    gathered = Segment(keys, values, log_num=jnp.where(there, 0.0, -jnp.inf))
    for logit_cap in (None, 0.5):
        expected = jax.tree.leaves(attend_reading(query, gathered, logit_cap=logit_cap))
        for fetched in (None, taken(store.entries, block)):
            mine = jax.tree.leaves(recall.attend_blocks(query, store, block, count, logit_cap, fetched))
            for one, other in zip(mine, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value_dim", [3, 5])
def test_arranging_and_putting(value_dim):
    rng = np.random.default_rng(0)
    keys, values = (rng.normal(size=(6, dim)).astype(np.float32) for dim in (3, value_dim))
    source = np.array([[5, 0, 6, 6], [3, 6, 6, -1]])
    made = recall.arrange(source, keys, values, 10 + np.arange(6))
    np.testing.assert_array_equal(made.position, [[15, 10, -1, -1], [13, -1, -1, -1]])
    np.testing.assert_array_equal(made.keys[0, :2], keys[[5, 0]])
    np.testing.assert_array_equal(made.values[1, 0], values[3])
    assert not np.asarray(made.keys)[np.asarray(made.position) < 0].any()
    empty = recall.init_store(make_spec(head_dim=3, value_dim=value_dim, dtype=jnp.bfloat16), 3, 4)
    store = recall.put_blocks(empty, np.array([2, 3]), made)
    assert store.keys.dtype == jnp.bfloat16
    np.testing.assert_array_equal(store.position, [[-1] * 4, [-1] * 4, [15, 10, -1, -1]])
