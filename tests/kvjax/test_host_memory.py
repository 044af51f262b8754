"""What is recalled from host memory is what would have been recalled from the device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.kvjax.support import LENGTHS, QUICKLY, after, begin, make_spec, make_stream, prompt_of, row_keys

PERIOD, STEPS = 8, 20
SIZES = {"sinks": 2, "recent": 4, "cluster_tokens": 4, "every": 8, "chunk_clusters": 2, "period": PERIOD}
PLAIN = {
    "clusterkv": kvjax.clusterkv(20, **SIZES),
    "clusterkv_per_head": kvjax.clusterkv(20, **SIZES, select="query_head", residual=False),
    "quest": kvjax.quest(20, period=PERIOD),
}
HOSTED = {(name, steps): kvjax.host_memory(PLAIN[name], steps) for name, steps in
          [("clusterkv", 1), ("clusterkv_per_head", 2), ("quest", 1), ("quest", 0)]}  # fmt: skip


@functools.partial(jax.jit, static_argnames="policy", donate_argnames="state", compiler_options=QUICKLY)
def step(policy, state, keys, values, query, lengths):
    state = policy.extend(state, keys, values, lengths)
    partials, state = policy.attend(state, query, causal=True)
    return kvjax.output(partials), state


compact = jax.jit(lambda policy, state: policy.compact(state), static_argnums=0, donate_argnums=1)


def start(policy):
    return begin(policy, make_spec(), row_keys(), *prompt_of(make_stream(), LENGTHS), LENGTHS)


@pytest.mark.parametrize(
    "name, steps", [one if one == ("quest", 1) else pytest.param(*one, marks=pytest.mark.heavy) for one in HOSTED]
)
def test_results_are_the_policy_s_own_and_hits_are_counted(name, steps):
    plain, hosted = PLAIN[name], HOSTED[name, steps]
    state, own = start(hosted), start(plain)
    tokens = after(make_stream(), LENGTHS)
    asked: list[list[set]] = [[] for _ in LENGTHS]  # of every row, the (head, block) pairs of each of its steps
    requested, hits = np.zeros((2, len(LENGTHS)), int)
    for number in range(STEPS):
        # The last row ends early, and its slots stay empty.
        lengths = jnp.array([1, 1, int(number < 5)], jnp.int32)
        now = [x[:, number : number + 1] for x in tokens]
        out, state = step(hosted, state, *now, lengths)
        expected, own = step(plain, own, *now, lengths)
        np.testing.assert_allclose(out, expected, atol=1e-6)
        plan = plain.plan.plan(own, now[2])
        for row in np.flatnonzero(lengths):
            heads, slots = np.nonzero(np.asarray(plan.tokens)[row])
            wanted = set(zip(heads.tolist(), np.asarray(plan.block)[row, heads, slots].tolist(), strict=True))
            requested[row] += len(wanted)
            hits[row] += len(wanted & set().union(*asked[row][max(len(asked[row]) - steps, 0) :]))
            asked[row].append(wanted)
        if number % PERIOD == PERIOD - 1:
            state, own = compact(hosted, state), compact(plain, own)
    np.testing.assert_array_equal(state.recent.requested, requested)
    np.testing.assert_array_equal(state.recent.hits, hits)
    assert (hits.sum() > 0) == (steps > 0) and hits.sum() < requested.sum()
    store = state.cache.selection.store
    assert store.entries.sharding.memory_kind == "pinned_host"
    bytes_held = kvjax.cache_bytes(state)
    assert bytes_held.host == store.entries.nbytes
    cached = state.recent.entries.nbytes + state.recent.block.nbytes + 3 * 4 * len(LENGTHS)
    assert bytes_held.device == sum(kvjax.cache_bytes(own)) - bytes_held.host + cached
    assert hosted.read_bytes(state) == plain.read_bytes(own)


def test_queries_at_once_learn_as_one_by_one():
    hosted = HOSTED["clusterkv", 1]
    tokens = after(make_stream(), LENGTHS)
    together, single = start(hosted), start(hosted)
    out, together = step(hosted, together, *(x[:, :6] for x in tokens), None)
    for number in range(6):
        alone, single = step(hosted, single, *(x[:, number : number + 1] for x in tokens), None)
        np.testing.assert_allclose(out[:, number : number + 1], alone, atol=1e-6)
    for one, other in zip(jax.tree.leaves(together.recent), jax.tree.leaves(single.recent), strict=True):
        np.testing.assert_allclose(one, other)


def test_nothing_is_learnt_without_an_appended_token():
    hosted = HOSTED["quest", 1]
    state = start(hosted)
    _, after_it = hosted.attend(state, make_stream().queries[:, :2])
    assert int(after_it.recent.requested.sum()) == 0


def test_rows_are_taken_and_inserted_where_they_lie():
    state = start(HOSTED["quest", 1])
    taken = kvjax.take_rows(state, jnp.array([2, 0]))
    back = kvjax.insert_rows(taken, kvjax.take_rows(state, jnp.array([1])), jnp.array([0]))
    for made, rows in ((taken, [2, 0]), (back, [1, 0])):
        store = made.cache.selection.store
        assert store.entries.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(np.asarray(store.entries), np.asarray(state.cache.selection.store.entries)[rows])
        np.testing.assert_array_equal(store.position, state.cache.selection.store.position[np.array(rows)])


def test_a_backend_without_host_memory_says_so_and_keeps_data_on_the_device(monkeypatch):
    class Device:
        def addressable_memories(self):
            return ()

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    with pytest.warns(UserWarning, match="backend 'cpu' has no host memory"):
        state = kvjax.host_memory(PLAIN["quest"]).init(make_spec(), row_keys())
    assert state.cache.selection.store.entries.sharding.memory_kind == "device"


@pytest.mark.parametrize(
    "policy, steps, message",
    [
        (kvjax.exact(), 1, "exact does not say which blocks"),
        (kvjax.clusterkv(40, target=0.1), 1, "clusterkv does not say"),
        (kvjax.quest(40, full_layers=1), 1, "quest does not say"),
        (kvjax.quest(40), -1, "steps=-1"),
    ],
)
def test_policies_that_cannot_be_hosted_are_refused(policy, steps, message):
    with pytest.raises(ValueError, match=message):
        kvjax.host_memory(policy, steps)
