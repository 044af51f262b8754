"""Retrieval from host memory: the results of retrieval from the device, and the counts of cached blocks."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.segment import BlockStoreRead
from tests.kvjax.support import LENGTHS, POLICIES, after, each, make_spec, make_stream, prefilled, row_keys

STAGED, STEPS = 8, 20
PLAIN = {name: policy for name, policy in POLICIES.items() if policy.is_retrieval}
CASES = [("clusterkv", 1), ("clusterkv_residual", 2), ("infinigen", 1), ("quest", 1), ("quest", 0)]
HOSTED = {(name, steps): kvjax.HostMemory(PLAIN[name], steps) for name, steps in CASES}

step = jax.jit(kvjax.step, donate_argnums=(0, 1))


@jax.jit
def select(cache, counters, query):
    """Returns the blocks that one query of every row selects, and how many tokens of each."""
    segments = cache.policy.segments(cache.state, counters.count[:, None])
    (read,) = (one for one in segments if isinstance(one, BlockStoreRead))
    return read.select(query)[:2]


def tokens_at(tokens, at):
    return tokens.queries[:, at], tokens.keys[:, at], tokens.values[:, at]


@pytest.mark.parametrize("name, steps", each(CASES, quick=[("quest", 1), ("clusterkv", 1)]))
def test_results_equal_those_of_the_policy_and_hits_are_counted(name, steps):
    (cache, counters), plain = prefilled(HOSTED[name, steps]), prefilled(PLAIN[name])
    tokens = after(make_stream(), LENGTHS)
    past: list[list[set]] = [[] for _ in LENGTHS]  # of every row, the (head, block) pairs of each of its steps
    requested, hits = np.zeros((2, len(LENGTHS)), int)
    for number in range(STEPS):
        # The last row ends early.
        lengths = jnp.array([1, 1, int(number < 5)], jnp.int32)
        new = tokens_at(tokens, slice(number, number + 1))
        output, cache, counters = step(cache, counters, *new, lengths)
        expected, *plain = step(*plain, *new, lengths)
        np.testing.assert_allclose(output, expected, atol=1e-6)
        block, count = (np.asarray(x) for x in select(*plain, new[0]))
        for row in np.flatnonzero(lengths):
            heads, slots = np.nonzero(count[row])
            selected = set(zip(heads.tolist(), block[row, heads, slots].tolist(), strict=True))
            requested[row] += len(selected)
            hits[row] += len(selected & set().union(*past[row][max(len(past[row]) - steps, 0) :]))
            past[row].append(selected)
    kvjax.raise_faults((cache, counters))
    (block_cache,), store = cache.state.block_caches, cache.state.inner.store
    np.testing.assert_array_equal(block_cache.requested, requested)
    np.testing.assert_array_equal(block_cache.hits, hits)
    assert (hits.sum() > 0) == (steps > 0) and hits.sum() < requested.sum()
    assert store.entries.sharding.memory_kind == "pinned_host"
    device, host = kvjax.cache_bytes(cache)
    assert host == store.entries.nbytes
    extra = block_cache.entries.nbytes + block_cache.block.nbytes + 3 * 4 * len(LENGTHS)
    assert device == sum(kvjax.cache_bytes(plain[0])) - host + extra
    # Fetched blocks are read as a store of a multiple of 8 slots.
    empty_blocks = np.prod(block_cache.block.shape[:2]) * (block_cache.block.shape[3] - block.shape[2])
    empty_bytes = empty_blocks * store.entries.shape[3] * (4 * store.entries.shape[4] + 4) * (steps > 0)
    assert kvjax.read_bytes(cache) == kvjax.read_bytes(plain[0]) + empty_bytes


def test_several_queries_update_the_block_cache_like_single_ones():
    tokens = after(make_stream(), LENGTHS)
    single = prefilled(HOSTED["clusterkv", 1])
    output, *together = step(*prefilled(HOSTED["clusterkv", 1]), *tokens_at(tokens, slice(6)))
    for number in range(6):
        alone, *single = step(*single, *tokens_at(tokens, slice(number, number + 1)))
        np.testing.assert_allclose(output[:, number : number + 1], alone, atol=1e-6)
    jax.tree.map(np.testing.assert_allclose, together[0].state.block_caches, single[0].state.block_caches)


def test_queries_without_an_appended_token_do_not_change_the_block_cache():
    state, query = prefilled(HOSTED["quest", 1]), make_stream().queries[:, :1]
    hosted, plain = (kvjax.normalize(kvjax.attend(*one, query)) for one in (state, prefilled(PLAIN["quest"])))
    np.testing.assert_allclose(hosted, plain, atol=1e-6)
    zeros = jnp.zeros((len(LENGTHS), 1, 2, query.shape[3]))
    _, cache, _ = step(*state, query, zeros, zeros, jnp.zeros(len(LENGTHS), jnp.int32))
    (block_cache,) = cache.state.block_caches
    assert int(block_cache.requested.sum()) == 0 and int(block_cache.step.sum()) == 0


def test_rows_are_taken_and_inserted_in_host_memory():
    cache, _ = prefilled(HOSTED["quest", 1])
    rows = kvjax.take_rows(cache, jnp.array([2, 0]))
    inserted = kvjax.insert_rows(rows, kvjax.take_rows(cache, jnp.array([1])), jnp.array([0]))
    original = cache.state.inner.store
    for other, numbers in ((rows, [2, 0]), (inserted, [1, 0])):
        entries = other.state.inner.store.entries
        assert entries.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(np.asarray(entries), np.asarray(original.entries)[numbers])


def test_a_layer_that_retrieves_nothing_stays_on_the_device():
    policy = kvjax.HostMemory(kvjax.FirstLayers(1, PLAIN["quest"], kvjax.Exact()))
    first, second = (kvjax.init(policy, make_spec(layer=layer, layers=2), row_keys())[0] for layer in (0, 1))
    assert first.policy == kvjax.Exact() and kvjax.cache_bytes(first).host == 0
    assert second.policy == HOSTED["quest", 1] and kvjax.cache_bytes(second).host > 0


def test_a_backend_without_host_memory_gives_a_warning_and_uses_the_device(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(addressable_memories=lambda: ())])
    with pytest.warns(UserWarning, match="backend 'cpu' has no host memory"):
        cache, _ = kvjax.init(HOSTED["quest", 1], make_spec(), row_keys())
    assert cache.state.inner.store.entries.sharding.memory_kind == "device"
