"""Selections by scores: which tokens stay, whose slots later tokens take, and the scores themselves."""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.combinators.ada_kv import AdaKV
from kvjax.policies.kvzip import KVzip
from kvjax.policies.leverage_scores import LeverageScores, leverage
from kvjax.policy import Prompt, RepeatedPrompt
from kvjax.top_k_policy import TopKPolicy, block_size
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
class FirstKey(TopKPolicy):
    """Scores that a test can read off: the first dimension of the key."""

    def score(self, prompt):
        return prompt.keys[..., 0].astype(jnp.float32)


def reference(policy, scores, later):
    """Which tokens a head shows after a prompt of these scores and after each of `later` more, slot by slot in plain
    Python: the ranked prompt, then later tokens where `TopKPolicy` says."""
    length = len(scores)
    recent = lambda t: t >= length - policy.recent  # noqa: E731
    order = sorted(range(length), key=lambda t: (t >= policy.sinks, not recent(t), -t if recent(t) else -scores[t]))
    kept = order[: policy.budget]
    capacity = policy.budget + (NEW if policy.reserve_decode_slots else 0)
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
        FirstKey(14, sinks=2, reserve_decode_slots=True, compact_every=4),
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
    slots = np.asarray(block_size(jnp.arange(3 * size), jnp.array(ranked), jnp.array(empty), sinks))
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


@pytest.mark.parametrize("alpha_safeguard", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("beside", [False, True])
def test_heads_share_one_budget(alpha_safeguard, reserve_decode_slots):
    # The second head's keys score higher: with no floor it takes what the first head's sinks and floor leave.
    policy = AdaKV(FirstKey(10, sinks=2, compact_every=4, reserve_decode_slots=reserve_decode_slots), alpha_safeguard)
    stream = make_stream()
    stream.keys[:, :, 1, 0] += 3
    cache = begin(policy, make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    none = np.zeros((BATCH, 1, 4, HEAD_DIM), np.float32)
    partials = kvjax.attend(cache, none)
    seen = np.asarray(partials.numerator * jnp.exp(partials.max)[..., None])[:, 0, ::2]
    for row, length in enumerate(LENGTHS):
        scores = stream.keys[row, :length, :, 0].T.copy()
        scores[:, :2] = np.inf
        safe = int(alpha_safeguard * 10) if reserve_decode_slots else max(int(alpha_safeguard * 10), 6)
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
def test_equal_heads_are_a_floor_of_one(reserve_decode_slots):
    plain = FirstKey(12, sinks=2, compact_every=4, reserve_decode_slots=reserve_decode_slots)
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
    np.testing.assert_allclose(found[valid], expected, rtol=2e-3)
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
    spec, policy = make_spec(), KVzip(9, sinks=2, compact_every=4, chunk_tokens=8)
    tokens, chunks, width = 20, 3, 16
    lengths = np.array([20, 13, 9])[:BATCH]
    sizes = np.array([[8 + 3 * (c > 0) if n > 8 * c else 0 for c in range(chunks)] for n in lengths], np.int32)
    sizes = np.minimum(sizes, np.maximum(lengths[:, None] - 8 * np.arange(chunks), 0) + 3 * (np.arange(chunks) > 0))
    queries = 2 * rng.normal(size=(BATCH, chunks * width, 4, HEAD_DIM)).astype(np.float32)
    again = rng.normal(size=(BATCH, chunks * width, 2, HEAD_DIM)).astype(np.float32)
    cache = kvjax.init(policy, spec, row_keys())
    keys, values = stream.keys[:, :tokens], stream.values[:, :tokens]
    repeated = RepeatedPrompt(jnp.asarray(queries), jnp.asarray(again), jnp.asarray(sizes))
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


# --- scores of a prompt, against plain float64 of each row alone ---


class Row(NamedTuple):
    """What is real of one row of a prompt, and how its model attends."""

    keys: np.ndarray  # [H_kv, n, D]
    values: np.ndarray  # [H_kv, n, D]
    queries: np.ndarray  # [n, H_q, D]
    cap: float | None
    sinks: np.ndarray | None  # [H_q]

    def probabilities(self, logits, head):
        """Softmax over logits of a query head, capped and beside the head's sink."""
        logits = logits if self.cap is None else self.cap * np.tanh(logits / self.cap)
        weights = np.exp(logits)
        return weights / (weights.sum(-1, keepdims=True) + (0 if self.sinks is None else np.exp(self.sinks[head])))


TURNS = np.array([1.0, 0.3, 0.1, 0.03])  # of 8 dimensions


def turn(position):
    """What rotary embedding does at a position, as a matrix."""
    angle = position * TURNS
    cos, sin = np.diag(np.cos(angle)), np.diag(np.sin(angle))
    return np.block([[cos, -sin], [sin, cos]])


def turned_back(x):
    return np.einsum("nji,...nj->...ni", np.array([turn(n) for n in range(x.shape[-2])]), x)


def plain_knorm(row, policy):
    return -np.linalg.norm(row.keys, axis=-1)


def plain_keydiff(row, policy):
    unit = row.keys / np.linalg.norm(row.keys, axis=-1, keepdims=True)
    mean = unit.mean(1, keepdims=True)
    return -(unit * mean).sum(-1) / np.linalg.norm(mean, axis=-1)


def plain_lagkv(row, policy):
    length, lag, first = row.keys.shape[1], policy.lag_size, policy.sinks
    score = np.broadcast_to(1 + np.arange(length) / PROMPT, row.keys.shape[:2]).copy()
    starts = [start for start in range(first, length, lag) if start + 2 * lag <= length]
    for head, start in itertools.product(range(2), starts):
        parts = []
        for x in (row.keys[head], row.values[head]):
            following = x[start + lag : start + 2 * lag]
            low, high = following.min(0), following.max(0)
            spread = ((x[start : start + lag] - low) / (high - low)).std(-1, ddof=1)
            parts.append(np.exp(spread) / np.exp(spread).sum())
        both = np.mean(parts, axis=0)
        score[head, start : start + lag] = both if policy.cross_scoring else both.argsort().argsort() / lag
    return score


def plain_tova(row, policy):
    logits = np.einsum("qd,qnd->qn", row.queries[-1], np.repeat(row.keys, 2, axis=0)) / np.sqrt(8)
    drawn = [row.probabilities(logits[head], head) for head in range(4)]
    return np.broadcast_to(np.mean(drawn, axis=0), row.keys.shape[:2])


def plain_expected_attention(row, policy):
    length, first = row.keys.shape[1], policy.sinks
    score = np.zeros(row.keys.shape[:2])
    if length <= first:
        return score
    mean_turn = np.mean([turn(length + ahead) for ahead in range(policy.n_future_positions)], axis=0)
    for head in range(4):
        queries = turned_back(row.queries[:, head])[first:]
        mean, keys = mean_turn @ queries.mean(0), row.keys[head // 2, first:]
        logits = keys @ mean / np.sqrt(8)
        if policy.use_covariance:
            covariance = mean_turn @ np.cov(queries.T, bias=True) @ mean_turn.T
            logits += np.einsum("ni,ij,nj->n", keys, covariance, keys) / 16
        score[head // 2, first:] += row.probabilities(logits, head) / 2
    norm = np.linalg.norm(row.values, axis=-1)
    return (score + policy.epsilon) * norm if policy.use_vnorm else score


def plain_cur(row, policy):
    def layer_budget_scale(x):
        squares, size = (x**2).sum(-1), policy.local_window_size
        if size is None:
            return squares
        window = np.arange(x.shape[1]) // size
        return squares / np.array([[of_head[window == own].sum() for own in window] for of_head in squares])

    keys, values = layer_budget_scale(row.keys), layer_budget_scale(row.values)
    both = {"key": keys, "value": values, "kv_avg": (keys + values) / 2, "kv_product": keys * values}
    score = both[policy.leverage_type]
    return score / score.sum(-1, keepdims=True)


def plain_compactor(row, policy):
    length = row.keys.shape[1]
    first, last = policy.sinks, length - policy.recent
    result = np.zeros((2, length))
    if last <= first:
        return result
    keys = turned_back(row.keys)[:, first:last]
    keys = keys - keys.mean(1, keepdims=True)
    gram = np.einsum("hni,hnj->hij", keys, keys) + 1e-2 * np.eye(8)
    leverages = np.einsum("hni,hij,hnj->hn", keys, np.linalg.inv(gram), keys)
    drawn = np.zeros((2, last - first))
    scale = policy.scale or 8**-0.5
    for head, start in itertools.product(range(4), range(first, last, policy.chunk)):
        end = min(start + policy.chunk, last)
        logits = scale * row.queries[start:end, head] @ row.keys[head // 2, start:end].T
        drawn[head // 2, start - first : end - first] += row.probabilities(logits, head).sum(0) / 2
    drawn *= np.linalg.norm(row.values[:, first:last], axis=-1)
    pooled = np.array([np.convolve(of_head, np.ones(3) / 3)[1:-1] for of_head in drawn])
    weight = max(1 - policy.budget / length, 0) if policy.blending is None else policy.blending
    standard = lambda x: (x - x.mean()) / max(x.std(ddof=1), 1e-6)  # noqa: E731
    result[:, first:last] = weight * standard(leverages) + standard(pooled)
    return result


SCORES = {
    "knorm": (kvjax.Knorm(20), plain_knorm),
    "keydiff": (kvjax.KeyDiff(20), plain_keydiff),
    "lagkv": (kvjax.LagKV(20, sinks=2, lag_size=5), plain_lagkv),
    "lagkv_across_partitions": (kvjax.LagKV(20, sinks=2, lag_size=5, cross_scoring=True), plain_lagkv),
    "lagkv_of_one_partition": (kvjax.LagKV(20, lag_size=30), plain_lagkv),
    "tova": (kvjax.TOVA(20), plain_tova),
    "expected_attention": (kvjax.ExpectedAttention(20, n_future_positions=30), plain_expected_attention),
    "expected_attention_of_means": (
        kvjax.ExpectedAttention(20, sinks=0, n_future_positions=30, use_covariance=False, epsilon=0.1),
        plain_expected_attention,
    ),
    "expected_attention_alone": (kvjax.ExpectedAttention(20, use_vnorm=False), plain_expected_attention),
    "cur": (kvjax.CUR(20, local_window_size=5), plain_cur),
    "cur_of_sums": (kvjax.CUR(20, leverage_type="kv_avg", local_window_size=None), plain_cur),
    "cur_of_keys": (kvjax.CUR(20, leverage_type="key"), plain_cur),
    "cur_of_values": (kvjax.CUR(20, leverage_type="value"), plain_cur),
    "compactor": (kvjax.Compactor(20, sinks=3, recent=2, chunk=7), plain_compactor),
    "compactor_of_one_chunk": (kvjax.Compactor(20, sinks=0, recent=0, blending=0.35, scale=None), plain_compactor),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("cap, sink_logits", [(None, None), (1.5, np.array([0.3, -0.2, 1.0, 0.5]))])
def test_a_row_s_scores_are_those_of_its_own_tokens(name, cap, sink_logits):
    policy, plain = SCORES[name]
    if cap is not None and not policy.prompt_queries:
        return
    rng = np.random.default_rng(5)
    keys, values = rng.normal(size=(2, BATCH, 2, PROMPT, 8))
    queries = rng.normal(size=(BATCH, PROMPT, 4, 8)) + 0.5  # by position
    real = np.arange(PROMPT) < np.array(LENGTHS)[:, None]
    place = np.array(LENGTHS)[:, None] - PROMPT + np.arange(PROMPT)
    noise = lambda x, real: jnp.asarray(np.where(real, x, np.nan), jnp.float32)  # noqa: E731
    shown = np.take_along_axis(queries, np.maximum(place, 0)[..., None, None], axis=1)
    shown = noise(shown, (place >= 0)[..., None, None])
    prompt = Prompt(
        noise(keys, real[:, None, :, None]),
        noise(values, real[:, None, :, None]),
        jnp.array(LENGTHS),
        shown[:, -1:] if policy.prompt_queries == 1 else shown,
        sink_logits=None if sink_logits is None else jnp.asarray(sink_logits, jnp.float32),
        frequencies=jnp.asarray(TURNS, jnp.float32),
        logit_cap=cap,
    )
    found = jax.jit(policy.score)(prompt)
    assert found.shape == (BATCH, 2, PROMPT) and found.dtype == jnp.float32
    for number, length in enumerate(LENGTHS):
        row = Row(keys[number][:, :length], values[number][:, :length], queries[number][:length], cap, sink_logits)
        # Sinks and recent tokens stay, whatever their scores.
        scored = slice(policy.sinks, max(length - policy.recent, policy.sinks))
        np.testing.assert_allclose(
            found[number, :, :length][:, scored], plain(row, policy)[:, scored], rtol=2e-4, atol=2e-5
        )


def test_compactor_s_parts_are_scores_of_their_own():
    # Leverage alone, and Compactor with nothing but leverage, rank alike.
    stream = make_stream()
    keys, values, queries = (jnp.asarray(part).swapaxes(1, 2) for part in prompt_of(stream, (37, 30, 21)))
    frequencies = jnp.asarray(make_spec().rope_frequencies)
    prompt = Prompt(keys[..., :8], values, jnp.array([37, 30, 21]), queries.swapaxes(1, 2)[..., :8])
    prompt = dataclasses.replace(prompt, frequencies=frequencies[:4])
    policy = kvjax.Compactor(10, sinks=0, recent=0, blending=1e6, reserve_decode_slots=True)
    alone = LeverageScores(10, sinks=0, reserve_decode_slots=True).rank(prompt)
    best = lambda rank: np.sort(np.argsort(-np.asarray(rank), axis=-1)[..., :10])  # noqa: E731
    np.testing.assert_array_equal(best(policy.rank(prompt)), best(alone))


def test_tova_s_heads_keep_the_same_and_the_last_token():
    stream = make_stream()
    cache = begin(kvjax.TOVA(9, compact_every=4), make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    kept = np.asarray(cache.state.values).argmax(-1)
    for row, length in enumerate(LENGTHS):
        real = kept[row, :, : min(length, 9)]
        np.testing.assert_array_equal(real[0], real[1])
        assert length - 1 in real[0]


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="budget=19 slots cannot hold sinks=4 and the compact_every=16"):
        KVzip(19)
    with pytest.raises(ValueError, match="it must be Selection"):
        AdaKV(kvjax.Uniform(100))
    with pytest.raises(ValueError, match="alpha_safeguard=1.5"):
        AdaKV(KVzip(64), 1.5)
    stream = make_stream()
    prompt = prompt_of(stream, LENGTHS)
    with pytest.raises(ValueError, match="KVzip needs the prompt read again"):
        begin(KVzip(24), make_spec(), row_keys(), *prompt, LENGTHS)
    with pytest.raises(ValueError, match="rope_frequencies"):
        begin(LeverageScores(24), make_spec(rope_frequencies=None), row_keys(), *prompt, LENGTHS)
    for policy in (kvjax.ExpectedAttention(24), kvjax.Compactor(24)):
        with pytest.raises(ValueError, match="rope_frequencies"):
            begin(policy, make_spec(rope_frequencies=None), row_keys(), *prompt, LENGTHS)
        with pytest.raises(ValueError, match=rf"queries=None; {type(policy).__name__} needs the queries"):
            kvjax.prefill(kvjax.init(policy, make_spec(), row_keys()), prompt[0], prompt[1], jnp.array(LENGTHS))
    for policy, setting in [
        (kvjax.LagKV, {"lag_size": 0}),
        (kvjax.CUR, {"local_window_size": 0}),
        (kvjax.CUR, {"leverage_type": "both"}),
        (kvjax.ExpectedAttention, {"n_future_positions": 0}),
        (kvjax.ExpectedAttention, {"epsilon": -1.0}),
        (kvjax.Compactor, {"chunk": 0}),
        (kvjax.Compactor, {"scale": 0.0}),
        (kvjax.Compactor, {"sketch": 0}),
    ]:
        ((name, value),) = setting.items()
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            policy(64, **setting)
    with pytest.raises(ValueError, match="different repetitions"):
        _ = kvjax.ByHead((KVzip(64), KVzip(64, chunk_tokens=5))).repeat


def test_layers_have_their_shares_of_the_budget():
    policy = kvjax.PolicyChoice.parse("leverage_scores:shares=(0.75,2.5),storage=int8@32").make()
    caches = [kvjax.init(policy, make_spec(layer=layer, layers=2), row_keys()) for layer in range(2)]
    # No more than tokens may come.
    assert [cache.state.numbers.keys.shape[2] for cache in caches] == [24, PROMPT + NEW]
    # Fitted to bytes, on the average of all layers.
    shared = kvjax.fit_bytes(
        lambda budget: LeverageScores(budget, layer_budget_scale=(0.5, 1.5)), make_spec(layers=2), 60_000
    )
    alike = kvjax.fit_bytes(LeverageScores, make_spec(layers=2), 60_000)
    assert abs(shared.budget - alike.budget) <= 8  # whole tiles of slots
    # The smallest layer must have room, too.
    assert kvjax.fit_bytes(
        lambda budget: LeverageScores(budget, layer_budget_scale=(1.8, 0.2)), make_spec(layers=2), 64_000
    )
    with pytest.raises(ValueError, match="are 3; the model has 2 layers"):
        kvjax.init(LeverageScores(64, layer_budget_scale=(1.0, 1.0, 1.0)), make_spec(layers=2), row_keys())
    # None has less than what is never dropped and a compaction.
    least = kvjax.init(LeverageScores(64, layer_budget_scale=(2.0, 0.0)), make_spec(layer=1, layers=2), row_keys())
    assert least.state.keys.shape[2] == 4 + 16
    with pytest.raises(ValueError, match="none may be below 0, nor all 0"):
        LeverageScores(64, layer_budget_scale=(1.0, -0.1))
