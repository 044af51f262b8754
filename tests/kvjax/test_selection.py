"""Selections by scores: which tokens stay, whose slots later tokens take, and the scores themselves."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.combinators.ada_kv import AdaKV
from kvjax.policies.kvzip import KVzip
from kvjax.policies.leverage_scores import LeverageScores, leverage
from kvjax.policy import Repeated
from kvjax.selection import Selection, places
from tests.kvjax.support import (
    BATCH,
    HEAD_DIM,
    LENGTHS,
    NEW,
    PROMPT,
    after,
    begin,
    go,
    make_spec,
    make_stream,
    prompt_of,
    row_keys,
)


@dataclasses.dataclass(frozen=True)
class FirstKey(Selection):
    """Scores that a test can read off: the first dimension of the key."""

    def score(self, prompt):
        return prompt.keys[..., 0].astype(jnp.float32)


def reference(policy, scores, later):
    """Which tokens a head shows after a prompt of these scores and after each of `later` more, slot by slot in plain
    Python: the ranked prompt, then later tokens where `Selection` says."""
    length = len(scores)
    recent = lambda t: t >= length - policy.recent  # noqa: E731
    order = sorted(range(length), key=lambda t: (t >= policy.sinks, not recent(t), -t if recent(t) else -scores[t]))
    kept = order[: policy.budget]
    capacity = policy.budget + (NEW if policy.beside else 0)
    shown = [set(kept)]
    fresh = []
    for token in range(length, length + later):
        if len(kept) + len(fresh) < capacity:
            fresh.append(token)
        elif len(kept) > policy.sinks:
            kept.pop()
            fresh.append(token)
        else:
            firsts = max(policy.sinks - len(kept), 0)  # of a prompt shorter than the sinks
            fresh.pop(firsts)
            fresh.append(token)
        shown.append({*kept, *fresh})
    return shown


@pytest.mark.parametrize(
    "policy",
    [
        FirstKey(14, sinks=2, compact_every=4),
        FirstKey(14, sinks=2, recent=3, compact_every=1),
        FirstKey(8, sinks=0, compact_every=8),
        FirstKey(14, sinks=2, beside=True, compact_every=4),
    ],
)
def test_the_best_stay_and_later_tokens_take_the_least_ones_places(policy):
    stream = make_stream()
    cache = begin(policy, make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    _, _, weights = go(cache, after(stream, LENGTHS), 1)
    for row, length in enumerate(LENGTHS):
        for head in range(2):
            shown = reference(policy, stream.keys[row, :length, head, 0], NEW)
            for step in range(NEW):
                settled = step // policy.compact_every * policy.compact_every
                expected = shown[settled] | set(range(length + settled, length + step + 1))
                seen = set(np.flatnonzero(weights[row, step, head] > 0.5).tolist())
                assert seen == expected, (row, head, step)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 6))
def test_places_go_round_all_slots_but_the_sinks(ranked, empty, sinks):
    size = ranked + empty
    if size <= sinks:
        return
    slots = np.asarray(places(jnp.arange(3 * size), jnp.array(ranked), jnp.array(empty), sinks))
    missing = max(sinks - ranked, 0)
    # Sinks that a short prompt left come first, once.
    np.testing.assert_array_equal(slots[:missing], ranked + np.arange(missing))
    rounds = slots[missing:]
    assert set(rounds[: size - sinks]) == set(range(sinks, size))
    np.testing.assert_array_equal(rounds[size - sinks :], rounds[: len(rounds) - (size - sinks)])
    # Empty slots before ranked ones, and those from the least rank on.
    first = rounds[: size - sinks]
    taken = [slot for slot in first if slot < ranked]
    assert taken == sorted(taken, reverse=True)
    assert all(slot >= ranked for slot in first[: empty - missing])


@pytest.mark.parametrize("floor", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("beside", [False, True])
def test_heads_share_one_budget(floor, beside):
    # The second head's keys score higher: with no floor it takes what the first head's sinks and floor leave.
    policy = AdaKV(FirstKey(10, sinks=2, compact_every=4, beside=beside), floor)
    stream = make_stream()
    stream.keys[:, :, 1, 0] += 3
    cache = begin(policy, make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    none = np.zeros((BATCH, 1, 4, HEAD_DIM), np.float32)
    partials = kvjax.attend(cache, none)
    seen = np.asarray(partials.num * jnp.exp(partials.max)[..., None])[:, 0, ::2]
    for row, length in enumerate(LENGTHS):
        scores = stream.keys[row, :length, :, 0].T.copy()
        scores[:, :2] = np.inf
        safe = int(floor * 10) if beside else max(int(floor * 10), 6)
        for head in range(2):
            best = np.argsort(-scores[head], kind="stable")[:safe]
            scores[head, best] = np.maximum(scores[head, best], 1e9)
        order = np.argsort(-scores.reshape(-1), kind="stable")[: 2 * min(10, length)]
        expected = np.zeros((2, length))
        expected.reshape(-1)[order] = 1
        np.testing.assert_allclose(seen[row, :, :length], expected, atol=1e-6)
    # All of what is shown is held once.
    assert kvjax.cache_bytes(cache).device <= kvjax.cache_bytes(begin(policy.policy, make_spec(), row_keys(),
        *prompt_of(stream, LENGTHS), LENGTHS)).device + 4 * 3 * 2 * BATCH  # fmt: skip
    assert kvjax.read_bytes(cache) < 1.1 * kvjax.cache_bytes(cache).device


@pytest.mark.parametrize("beside", [False, True])
def test_equal_heads_are_a_floor_of_one(beside):
    plain = FirstKey(12, sinks=2, compact_every=4, beside=beside)
    stream = make_stream()
    runs = []
    for policy in (plain, AdaKV(plain, 1.0)):
        cache = begin(policy, make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
        runs.append(go(cache, after(stream, LENGTHS), 2)[1:])
    for one, other in zip(*runs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_leverage_is_the_hat_matrix_s_diagonal():
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(40, 8)) @ rng.normal(size=(8, 8))
    valid = np.arange(40) < 31
    centred = keys[valid] - keys[valid].mean(0)
    expected = np.diag(centred @ np.linalg.inv(centred.T @ centred + 1e-2 * np.eye(8)) @ centred.T)
    found = np.asarray(leverage(jnp.asarray(keys, jnp.float32), jnp.asarray(valid)))
    np.testing.assert_allclose(found[valid], expected, rtol=2e-4, atol=2e-5)
    np.testing.assert_array_equal(found[~valid], 0)
    # An outlier that nothing else is like has all the leverage there is.
    keys[3] = 100 * rng.normal(size=8)
    assert np.argmax(leverage(jnp.asarray(keys, jnp.float32), jnp.asarray(valid))) == 3


def test_leverage_before_rope_does_not_see_positions():
    # Tokens of one key, turned by their positions: alike before, apart behind.
    frequencies = tuple((0.1 ** np.arange(HEAD_DIM // 2)).tolist())
    spec = make_spec(rope_frequencies=frequencies)
    key = np.random.default_rng(1).normal(size=HEAD_DIM).astype(np.float32)
    cos, sin = kvjax.rope.rotation(jnp.arange(20)[None], jnp.asarray(frequencies))
    keys = np.broadcast_to(key, (BATCH, 20, 2, HEAD_DIM)).copy()
    keys[:, 11] *= -1
    keys = np.asarray(kvjax.rope.rotate(jnp.asarray(keys), cos, sin))
    values = make_stream().values[:, :20]
    cache = kvjax.init(LeverageScores(3, sinks=0, recent=0, compact_every=1), spec, row_keys())
    cache, _ = kvjax.prefill(cache, jnp.asarray(keys), jnp.asarray(values), jnp.full(BATCH, 20))
    assert (np.asarray(cache.state.values)[:, :, 0].argmax(-1) == 11).all()


def test_kvzip_scores_by_what_repeating_attends_to():
    rng = np.random.default_rng(2)
    stream = make_stream()
    spec, policy = make_spec(), KVzip(9, sinks=2, compact_every=4, chunk=8)
    tokens, chunks, width = 20, 3, 16
    lengths = np.array([20, 13, 9])[:BATCH]
    sizes = np.array([[8 + 3 * (c > 0) if n > 8 * c else 0 for c in range(chunks)] for n in lengths], np.int32)
    sizes = np.minimum(sizes, np.maximum(lengths[:, None] - 8 * np.arange(chunks), 0) + 3 * (np.arange(chunks) > 0))
    queries = 2 * rng.normal(size=(BATCH, chunks * width, 4, HEAD_DIM)).astype(np.float32)
    again = rng.normal(size=(BATCH, chunks * width, 2, HEAD_DIM)).astype(np.float32)
    cache = kvjax.init(policy, spec, row_keys())
    keys, values = stream.keys[:, :tokens], stream.values[:, :tokens]
    repeated = Repeated(jnp.asarray(queries), jnp.asarray(again), jnp.asarray(sizes))
    cache, _ = kvjax.prefill(cache, keys, values, jnp.asarray(lengths), repeated=repeated)
    kept = np.asarray(cache.state.values).argmax(-1)
    for row, length in enumerate(lengths):
        for head in range(2):
            score = np.zeros(length)
            for chunk in range(chunks):
                first, last = 8 * chunk, min(8 * chunk + 8, length)
                for place in range(sizes[row, chunk] if first < length else 0):
                    own = again[row, chunk * width : chunk * width + place + 1, head]
                    seen = np.concatenate([keys[row, : min(2, first), head], keys[row, first:last, head], own])
                    for query in queries[row, chunk * width + place, 2 * head : 2 * head + 2]:
                        weight = np.exp(seen.astype(np.float64) @ query / np.sqrt(HEAD_DIM))
                        weight = weight[min(2, first) :][: last - first] / weight.sum()
                        score[first:last] = np.maximum(score[first:last], weight)
            score[:2] = np.inf
            best = np.argsort(-score, kind="stable")[: min(9, length)]
            assert kept[row, head, : len(best)].tolist() == best.tolist()


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="budget=19 slots cannot hold sinks=4 and the compact_every=16"):
        KVzip(19)
    with pytest.raises(ValueError, match="no selection by scores"):
        AdaKV(kvjax.Uniform(100))
    with pytest.raises(ValueError, match="floor=1.5"):
        AdaKV(KVzip(64), 1.5)
    stream = make_stream()
    prompt = prompt_of(stream, LENGTHS)
    with pytest.raises(ValueError, match="KVzip needs repetitions"):
        begin(KVzip(24), make_spec(), row_keys(), *prompt, LENGTHS)
    with pytest.raises(ValueError, match="rope_frequencies"):
        begin(LeverageScores(24), make_spec(rope_frequencies=None), row_keys(), *prompt, LENGTHS)
    with pytest.raises(ValueError, match="different repetitions"):
        _ = kvjax.ByHead((KVzip(64), KVzip(64, chunk=5))).repeat


def test_layers_have_their_shares_of_the_budget():
    policy = kvjax.PolicyChoice.parse("leverage_scores:shares=(0.75,2.5),storage=int8@32").make()
    caches = [kvjax.init(policy, make_spec(layer=layer, layers=2), row_keys()) for layer in range(2)]
    # No more than tokens may come.
    assert [cache.state.numbers.keys.shape[2] for cache in caches] == [24, PROMPT + NEW]
    # Fitted to bytes, on the average of all layers.
    shared = kvjax.fit_bytes(lambda budget: LeverageScores(budget, shares=(0.5, 1.5)), make_spec(layers=2), 60_000)
    alike = kvjax.fit_bytes(LeverageScores, make_spec(layers=2), 60_000)
    assert abs(shared.budget - alike.budget) <= 1
    # The smallest layer must have room, too.
    assert kvjax.fit_bytes(lambda budget: LeverageScores(budget, shares=(1.8, 0.2)), make_spec(layers=2), 64_000)
    with pytest.raises(ValueError, match="are 3; the model has 2 layers"):
        kvjax.init(LeverageScores(64, shares=(1.0, 1.0, 1.0)), make_spec(layers=2), row_keys())
    with pytest.raises(ValueError, match="above 0"):
        LeverageScores(64, shares=(1.0, 0.0))
