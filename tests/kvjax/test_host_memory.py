"""What is recalled from host memory is what would have been recalled from the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kvjax.policies.clusterkv_certified import ClusterKVCertified

import kvjax
from kvjax.segment import BlockStoreRead, parts_of
from tests.kvjax.support import LENGTHS, after, begin, make_spec, make_stream, prompt_of, row_keys

STAGED, STEPS = 8, 20
SIZES = {"sinks": 2, "recent": 4, "cluster_tokens": 4, "chunk_tokens": 8, "chunk_clusters": 2, "compact_every": STAGED}
PLAIN = {
    "clusterkv": kvjax.ClusterKV(20, **SIZES),
    "clusterkv_per_head": kvjax.ClusterKV(20, **SIZES, select="query_head", residual=False),
    "clusterkv_target": ClusterKVCertified(20, **SIZES, target=0.05),
    "infinigen": kvjax.InfiniGen(10, alpha=2.0, compact_every=STAGED),
    "quest": kvjax.Quest(20, compact_every=STAGED),
}
RECENT_STEPS = [
    ("clusterkv", 1),
    ("clusterkv_per_head", 2),
    ("clusterkv_target", 1),
    ("infinigen", 1),
    ("quest", 1),
    ("quest", 0),
]
HOSTED = {(name, steps): kvjax.HostMemory(PLAIN[name], steps) for name, steps in RECENT_STEPS}

step = jax.jit(kvjax.step, donate_argnums=0)


@jax.jit
def asked(cache, query):
    """The blocks that one query of every row recalls first, and how many tokens of each."""
    (part,) = (
        part
        for part in parts_of(cache.policy.segments(cache.state, cache.counters.count[:, None]))
        if isinstance(part, BlockStoreRead)
    )
    choice = part.choose(query, None if part.target is None else jnp.zeros(query.shape[0], jnp.int32))
    return choice.block, choice.tokens


def start(policy):
    return begin(policy, make_spec(), row_keys(), *prompt_of(make_stream(), LENGTHS), LENGTHS)


def tokens_at(tokens, at):
    return tokens.queries[:, at], tokens.keys[:, at], tokens.values[:, at]


@pytest.mark.parametrize(
    "name, steps", [case if case == ("quest", 1) else pytest.param(*case, marks=pytest.mark.heavy) for case in HOSTED]
)
def test_results_are_the_policy_s_own_and_hits_are_counted(name, steps):
    cache, plain = start(HOSTED[name, steps]), start(PLAIN[name])
    tokens = after(make_stream(), LENGTHS)
    past: list[list[set]] = [[] for _ in LENGTHS]  # of every row, the (head, block) pairs of each of its steps
    requested, hits = np.zeros((2, len(LENGTHS)), int)
    for number in range(STEPS):
        # The last row ends early, and its slots stay empty.
        lengths = jnp.array([1, 1, int(number < 5)], jnp.int32)
        now = tokens_at(tokens, slice(number, number + 1))
        output, cache = step(cache, *now, lengths)
        expected, plain = step(plain, *now, lengths)
        np.testing.assert_allclose(output, expected, atol=1e-6)
        block, count = (np.asarray(x) for x in asked(plain, now[0]))
        for row in np.flatnonzero(lengths):
            heads, slots = np.nonzero(count[row])
            wanted = set(zip(heads.tolist(), block[row, heads, slots].tolist(), strict=True))
            requested[row] += len(wanted)
            hits[row] += len(wanted & set().union(*past[row][max(len(past[row]) - steps, 0) :]))
            past[row].append(wanted)
    kvjax.raise_faults(cache)
    (recent,) = cache.state.recent
    np.testing.assert_array_equal(recent.requested, requested)
    np.testing.assert_array_equal(recent.hits, hits)
    assert (hits.sum() > 0) == (steps > 0) and hits.sum() < requested.sum()
    own = cache.state.cache
    if name == "clusterkv_target":
        for field in ("missing", "rounds", "steps"):
            np.testing.assert_allclose(
                getattr(own.certificate, field), getattr(plain.state.certificate, field), atol=1e-6
            )
        assert int(own.certificate.rounds.sum()) > int(own.certificate.steps.sum())
    assert own.store.entries.sharding.memory_kind == "pinned_host"
    bytes_held = kvjax.cache_bytes(cache)
    assert bytes_held.host == own.store.entries.nbytes
    reserve_decode_slots = recent.entries.nbytes + recent.block.nbytes + 3 * 4 * len(LENGTHS)
    assert bytes_held.device == sum(kvjax.cache_bytes(plain)) - bytes_held.host + reserve_decode_slots
    assert kvjax.read_bytes(cache) == kvjax.read_bytes(plain)


def test_queries_at_once_learn_as_one_by_one():
    tokens = after(make_stream(), LENGTHS)
    together, single = start(HOSTED["clusterkv", 1]), start(HOSTED["clusterkv", 1])
    output, together = step(together, *tokens_at(tokens, slice(6)))
    for number in range(6):
        alone, single = step(single, *tokens_at(tokens, slice(number, number + 1)))
        np.testing.assert_allclose(output[:, number : number + 1], alone, atol=1e-6)
    for leaf, other in zip(jax.tree.leaves(together.state.recent), jax.tree.leaves(single.state.recent), strict=True):
        np.testing.assert_allclose(leaf, other)


def test_nothing_is_learnt_without_an_appended_token():
    cache = start(HOSTED["quest", 1])
    query = make_stream().queries[:, :1]
    plain = kvjax.normalize(kvjax.attend(start(PLAIN["quest"]), query))
    np.testing.assert_allclose(kvjax.normalize(kvjax.attend(cache, query)), plain, atol=1e-6)
    nothing = (query, *(jnp.zeros((len(LENGTHS), 1, 2, query.shape[3])),) * 2, jnp.zeros(len(LENGTHS), jnp.int32))
    _, cache = step(cache, *nothing)
    (recent,) = cache.state.recent
    assert int(recent.requested.sum()) == 0 and int(recent.step.sum()) == 0


def test_rows_are_taken_and_inserted_where_they_lie():
    cache = start(HOSTED["quest", 1])
    taken = kvjax.take_rows(cache, jnp.array([2, 0]))
    back = kvjax.insert_rows(taken, kvjax.take_rows(cache, jnp.array([1])), jnp.array([0]))
    for other, rows in ((taken, [2, 0]), (back, [1, 0])):
        store, stored = other.state.cache.store, cache.state.cache.store
        assert store.entries.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(np.asarray(store.entries), np.asarray(stored.entries)[rows])
        np.testing.assert_array_equal(store.position, stored.position[np.array(rows)])


def test_a_layer_that_recalls_nothing_stays_on_the_device():
    policy = kvjax.HostMemory(kvjax.FirstLayers(1, PLAIN["quest"]))
    first, second = (kvjax.init(policy, make_spec(layer=layer, layers=2), row_keys()) for layer in (0, 1))
    assert first.policy == kvjax.Exact() and kvjax.cache_bytes(first).host == 0
    assert second.policy == HOSTED["quest", 1] and kvjax.cache_bytes(second).host > 0


def test_a_backend_without_host_memory_says_so_and_keeps_data_on_the_device(monkeypatch):
    class Device:
        def addressable_memories(self):
            return ()

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    with pytest.warns(UserWarning, match="backend 'cpu' has no host memory"):
        cache = kvjax.init(HOSTED["quest", 1], make_spec(), row_keys())
    assert cache.state.cache.store.entries.sharding.memory_kind == "device"


@pytest.mark.parametrize(
    "policy, steps, message",
    [
        (kvjax.Exact(), 1, "HostMemory: Exact.* recalls nothing"),
        (kvjax.ByHead((kvjax.Exact(), kvjax.Uniform(80))), 1, "HostMemory: ByHead.* recalls nothing"),
        (kvjax.Quest(40), -1, "steps=-1"),
    ],
)
def test_policies_that_cannot_be_hosted_are_refused(policy, steps, message):
    with pytest.raises(ValueError, match=message):
        kvjax.HostMemory(policy, steps)
