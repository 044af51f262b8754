"""Top-k policies: which tokens are kept, which slots later tokens take, and the scores of every policy."""

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
from kvjax.methods.top_k.kvgrad import KVgrad
from kvjax.methods.top_k.kvzip import KVzip
from kvjax.methods.top_k.leverage_scores import LeverageScores, leverage
from kvjax.methods.top_k.top_k_policy import TopKPolicy
from kvjax.methods.top_k.top_k_store import later_token_slots
from kvjax.policy import Prompt, RepeatedPrompt
from tests.kvjax.support import (
    BATCH,
    HEAD_DIM,
    LENGTHS,
    NEW,
    PROMPT,
    after,
    decoded,
    go,
    make_spec,
    make_stream,
    prefilled,
    read_weights,
    row_keys,
)


@dataclasses.dataclass(frozen=True)
class FirstKey(TopKPolicy):
    """Scores tokens by the first dimension of their key."""

    def score(self, prompt):
        return prompt.keys[..., 0].astype(jnp.float32)


def simulate(policy, scores, later):
    """Returns the tokens that a head keeps after a prompt of these scores and after each of `later` more tokens."""
    length = len(scores)

    def rank(token):
        recent = token >= length - policy.recent
        return token >= policy.sinks, not recent, -token if recent else -scores[token]

    ranked = sorted(range(length), key=rank)[: policy.budget]
    capacity = policy.budget + (NEW if policy.reserve_decode_slots else 0)
    kept, new = [set(ranked)], []
    for token in range(length, length + later):
        if len(ranked) + len(new) >= capacity and len(ranked) > policy.sinks:
            ranked.pop()
        elif len(ranked) + len(new) >= capacity:
            # The oldest later token after the sinks, which may be later tokens themselves.
            new.pop(max(policy.sinks - len(ranked), 0))
        new.append(token)
        kept.append({*ranked, *new})
    return kept


@pytest.mark.parametrize(
    "policy",
    [
        FirstKey(14, sinks=2, compact_every=4),
        FirstKey(14, sinks=2, recent=3, compact_every=1),
        FirstKey(8, sinks=0, compact_every=8),
        FirstKey(14, sinks=2, reserve_decode_slots=True, compact_every=4),
    ],
)
def test_the_best_tokens_stay_and_later_tokens_replace_the_lowest(policy):
    stream = make_stream()
    _, weights, *_ = decoded(policy, stream)
    for (row, length), head in itertools.product(enumerate(LENGTHS), range(2)):
        kept = simulate(policy, stream.keys[row, :length, head, 0], NEW)
        for step in range(NEW):
            compacted = step // policy.compact_every * policy.compact_every
            expected = kept[compacted] | set(range(length + compacted, length + step + 1))
            assert set(np.flatnonzero(weights[row, step, head] > 0.5).tolist()) == expected, (row, head, step)


@pytest.mark.parametrize("ada", [False, True])
def test_tokens_with_scores_of_nan_are_dropped_first(ada):
    @dataclasses.dataclass(frozen=True)
    class NoScore(FirstKey):
        def score(self, prompt):
            return jnp.where(jnp.arange(prompt.keys.shape[2]) % 2, super().score(prompt), jnp.nan)

    policy = NoScore(14, sinks=2, recent=3, compact_every=4)
    cache = prefilled(AdaKV(policy, 0.5) if ada else policy)
    kept = np.asarray(read_weights(*cache))[0, 0] > 0.5
    assert set(np.flatnonzero(kept)) >= {0, 1, 34, 35, 36}
    assert not kept[2:34:2].any()


later_slots = jax.jit(later_token_slots, static_argnums=3)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 6))
def test_later_tokens_cycle_through_all_slots_but_the_sinks(ranked, empty, sinks):
    size = ranked + empty
    if size <= sinks:
        return
    slots = np.asarray(later_slots(jnp.arange(72), jnp.array(ranked), jnp.array(empty), sinks))[: 3 * size]
    missing = max(sinks - ranked, 0)
    # The sinks that a short prompt left empty come first, once.
    np.testing.assert_array_equal(slots[:missing], ranked + np.arange(missing))
    cycles = slots[missing:]
    first = cycles[: size - sinks]
    assert set(first) == set(range(sinks, size))
    np.testing.assert_array_equal(cycles[size - sinks :], cycles[: len(cycles) - (size - sinks)])
    # Empty slots come before ranked ones, and those from the lowest rank on.
    overwritten = [slot for slot in first if slot < ranked]
    assert overwritten == sorted(overwritten, reverse=True)
    assert all(slot >= ranked for slot in first[: empty - missing])


def pooled_tokens(scores, policy, safe):
    """Returns which tokens [2, n] stay if heads share slots; every head keeps its `safe` tokens of highest score."""
    scores = scores.copy()
    scores[:, : policy.sinks] = np.inf
    for head in scores:
        best = np.argsort(-head, kind="stable")[:safe]
        head[best] = np.maximum(head[best], 1e9)
    kept = np.zeros(scores.size, bool)
    kept[np.argsort(-scores.reshape(-1), kind="stable")[: 2 * min(policy.budget, scores.shape[1])]] = True
    return kept.reshape(scores.shape)


@pytest.mark.parametrize("alpha_safeguard", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("reserve", [False, True])
def test_heads_share_one_budget(alpha_safeguard, reserve):
    # The second head's keys score higher, so it gets all slots but the first head's safeguarded ones.
    policy = FirstKey(10, sinks=2, compact_every=4, reserve_decode_slots=reserve)
    stream = make_stream()
    stream.keys[:, :, 1, 0] += 3
    (cache, counters), (plain, _) = (prefilled(one, stream) for one in (AdaKV(policy, alpha_safeguard), policy))
    weights = np.asarray(read_weights(cache, counters))
    safe = int(alpha_safeguard * 10) if reserve else max(int(alpha_safeguard * 10), 6)
    for row, length in enumerate(LENGTHS):
        expected = pooled_tokens(stream.keys[row, :length, :, 0].T, policy, safe)
        np.testing.assert_allclose(weights[row, :, :length], expected, atol=1e-6)
    # The pool has the size of equal heads, and a step reads it once.
    assert kvjax.cache_bytes(cache).device <= kvjax.cache_bytes(plain).device + 4 * 3 * 2 * BATCH
    assert kvjax.read_bytes(cache) < 1.1 * kvjax.cache_bytes(cache).device


@pytest.mark.parametrize("reserve", [False, True])
def test_a_safeguard_of_one_gives_equal_heads(reserve):
    plain, stream = FirstKey(12, sinks=2, compact_every=4, reserve_decode_slots=reserve), make_stream()
    runs = [go(*prefilled(policy, stream), after(stream, LENGTHS), 2)[:2] for policy in (plain, AdaKV(plain, 1.0))]
    for one, other in zip(*runs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy_class, options", [(KVzip, {}), (KVzip, {"plus": True}), (KVgrad, {})])
def test_kvzip_scores_by_the_attention_of_the_repetition(policy_class, options):
    rng, lengths, tokens, chunks, width = np.random.default_rng(2), np.array([20, 13, 9]), 20, 3, 16
    stream, policy = make_stream(), policy_class(9, sinks=2, compact_every=4, chunk_tokens=8, **options)
    # A repetition is its chunk, with three tokens in front from the second chunk on.
    in_chunk = np.clip(lengths[:, None] - 8 * np.arange(chunks), 0, 8)
    sizes = np.where(in_chunk > 0, in_chunk + 3 * (np.arange(chunks) > 0), 0).astype(np.int32)
    queries = 2 * rng.normal(size=(BATCH, chunks * width, 4, HEAD_DIM)).astype(np.float32)
    repeated_keys = rng.normal(size=(BATCH, chunks * width, 2, HEAD_DIM)).astype(np.float32)
    keys, values = stream.keys[:, :tokens], stream.values[:, :tokens]
    query_weights, value_norms, weights = np.ones(queries.shape[:2]), np.ones((BATCH, 4, tokens)), {}
    if policy_class is KVgrad or options:
        query_weights, value_norms = (rng.exponential(size=x.shape) for x in (query_weights, value_norms))
        weights = {"query_weights": jnp.float32(query_weights), "value_norms": jnp.float32(value_norms)}
    repeated = RepeatedPrompt(jnp.asarray(queries), jnp.asarray(repeated_keys), jnp.asarray(sizes), **weights)
    empty = kvjax.init(policy, make_spec(), row_keys())
    cache, *_ = kvjax.prefill(*empty, keys, values, jnp.asarray(lengths), repeated=repeated)
    kept = np.asarray(cache.state.values).argmax(-1)
    for (row, length), head in itertools.product(enumerate(lengths), range(2)):
        score = np.zeros(length)
        for chunk, first in enumerate(range(0, length, 8)):
            last, sinks = min(first + 8, length), min(2, first)
            for index in range(chunk * width, chunk * width + sizes[row, chunk]):
                earlier = repeated_keys[row, chunk * width : index + 1, head]
                read = np.concatenate([keys[row, :sinks, head], keys[row, first:last, head], earlier])
                for query_head in (2 * head, 2 * head + 1):
                    query = queries[row, index, query_head]
                    weight = np.exp(read.astype(np.float64) @ query / np.sqrt(HEAD_DIM))
                    weight = weight[sinks:][: last - first] / weight.sum()
                    weight *= query_weights[row, index] * value_norms[row, query_head, first:last]
                    score[first:last] = np.maximum(score[first:last], weight)
        score[:2] = np.inf
        best = np.argsort(-score, kind="stable")[: min(9, length)]
        assert kept[row, head, : len(best)].tolist() == best.tolist()


def predicted_scores():
    """Returns random log scores of a prompt's tokens, NaN past each row's length."""
    scores = np.random.default_rng(3).normal(size=(BATCH, 2, PROMPT)) - 5
    return np.where(np.arange(PROMPT) < np.array(LENGTHS)[:, None, None], scores, np.nan).astype(np.float32)


def prefill_with_scores(policy, scores):
    stream, spec = make_stream(), make_spec(layer=0, layers=1)
    inputs = stream.keys[:, :PROMPT], stream.values[:, :PROMPT], jnp.array(LENGTHS)
    return kvjax.prefill(*kvjax.init(policy, spec, row_keys()), *inputs, predicted_scores=scores)[:2]


@pytest.mark.parametrize(
    "recent, streaming, budgets",
    [(0, False, (14, 14)), (0, True, (14, 14)), (6, False, (14, 14)), (6, True, (8, 16))],
)
def test_kvzap_drops_tokens_of_low_score(recent, streaming, budgets):
    """Every compaction keeps sinks, the newest tokens and those of highest score; rows get tokens in turns."""
    policy = kvjax.KVzap(14, sinks=2, recent=recent, compact_every=4)
    stream, lengths = make_stream(), np.zeros(BATCH, int) if streaming else np.array(LENGTHS)
    random = np.random.default_rng(4)
    ranks = np.broadcast_to(np.arange(-64.0, 0), (BATCH, 2, 64))  # exact in bfloat16
    scores = random.permuted(ranks, axis=-1).astype(np.float32)
    by_head = policy if budgets == (14, 14) else kvjax.HeadBudgets(policy, ((0.8, 1.2),))
    cache, counters = kvjax.init(by_head, make_spec(), row_keys())
    assert cache.policy.requires == policy.requires
    kept = [[[] for _ in range(2)] for _ in range(BATCH)]

    def keep_best(row, head, tokens, newest):
        protected = {*range(2), *range(lengths[row] - newest, lengths[row])}
        rank = [1e3 if token in protected else scores[row, head, token] for token in tokens]
        kept[row][head] = [tokens[i] for i in np.argsort(-np.array(rank), kind="stable")[: budgets[head]]]
        weights = np.asarray(read_weights(cache, counters))[row, head]
        assert np.flatnonzero(weights > 0.5).tolist() == sorted(kept[row][head])

    if not streaming:
        prompt = stream.keys[:, :PROMPT], stream.values[:, :PROMPT], jnp.array(LENGTHS)
        prompt_scores = jnp.asarray(scores[:, :, :PROMPT])
        cache, counters, _ = kvjax.prefill(cache, counters, *prompt, predicted_scores=prompt_scores)
        for row, head in itertools.product(range(BATCH), range(2)):
            keep_best(row, head, [*range(lengths[row])], recent)
    for block in range(6):
        new = np.array([4, 4 * (block % 2), 3])[:BATCH]
        index = np.minimum(lengths[:, None] + np.arange(4), 63)
        keys, values = (np.take_along_axis(x, index[..., None, None], 1) for x in (stream.keys, stream.values))
        new_scores = jnp.asarray(np.take_along_axis(scores, index[:, None], 2))
        staged = kvjax.append(cache, counters, keys, values, jnp.asarray(new), predicted_scores=new_scores)
        cache, counters = kvjax.compact(*staged)
        lengths = lengths + new
        for row, head in itertools.product(range(BATCH), range(2)):
            keep_best(row, head, [*kept[row][head], *range(lengths[row] - new[row], lengths[row])], max(recent, 4))


def test_heads_share_one_budget_by_predicted_scores():
    policy, scores = kvjax.KVzap(12, compact_every=4, reserve_decode_slots=True), predicted_scores()
    scores[:, 0] += 1.5
    weights = np.asarray(read_weights(*prefill_with_scores(AdaKV(policy, 0.0), jnp.asarray(scores))))
    for row, length in enumerate(LENGTHS):
        expected = pooled_tokens(scores[row, :, :length], policy, 0)
        np.testing.assert_allclose(weights[row, :, :length], expected, atol=1e-6)


@pytest.mark.parametrize(
    "scores, message",
    [
        (None, r"KVzap\(.* requires predicted scores of new tokens; pass predicted_scores"),
        (np.zeros((3, 40, 2), np.float32), r"predicted_scores have shape \(3, 40, 2\), expected \[B, H_kv, T\] = "),
        (np.zeros((3, 2, 40), np.int32), "predicted_scores have dtype int32"),
    ],
)
def test_predicted_scores_are_checked(scores, message):
    empty = kvjax.init(kvjax.KVzap(60, compact_every=PROMPT), make_spec(new=PROMPT), row_keys())
    keys, values, queries = (part[:, :PROMPT] for part in make_stream())
    for call in (
        lambda: prefill_with_scores(kvjax.KVzap(24), scores),
        lambda: kvjax.step(*empty, queries, keys, values, predicted_scores=scores),
        lambda: kvjax.append(*empty, keys, values, predicted_scores=scores),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_other_policies_ignore_predicted_scores():
    caches = [prefill_with_scores(kvjax.KeyDiff(24), one) for one in (None, predicted_scores())]
    jax.tree.map(np.testing.assert_array_equal, *caches)


# --- scores of a prompt, against float64 formulas of each row alone ---


class Row(NamedTuple):
    """The tokens of one row of a prompt, and settings of the model's attention."""

    keys: np.ndarray  # [H_kv, n, D]
    values: np.ndarray  # [H_kv, n, D]
    queries: np.ndarray  # [n, H_q, D]
    cap: float | None
    sinks: np.ndarray | None  # [H_q]

    def probabilities(self, logits, head):
        """Returns the softmax of a query head's logits, with their cap and the head's attention sink."""
        logits = logits if self.cap is None else self.cap * np.tanh(logits / self.cap)
        weights = np.exp(logits)
        return weights / (weights.sum(-1, keepdims=True) + (0 if self.sinks is None else np.exp(self.sinks[head])))


ROPE_FREQUENCIES = np.array([1.0, 0.3, 0.1, 0.03])  # of 8 dimensions


def rope_matrix(position):
    angle = position * ROPE_FREQUENCIES
    cos, sin = np.diag(np.cos(angle)), np.diag(np.sin(angle))
    return np.block([[cos, -sin], [sin, cos]])


def unrotate(x):
    return np.einsum("nji,...nj->...ni", np.array([rope_matrix(n) for n in range(x.shape[-2])]), x)


def expected_knorm(row, policy):
    return -np.linalg.norm(row.keys, axis=-1)


def expected_keydiff(row, policy):
    unit = row.keys / np.linalg.norm(row.keys, axis=-1, keepdims=True)
    mean = unit.mean(1, keepdims=True)
    return -(unit * mean).sum(-1) / np.linalg.norm(mean, axis=-1)


def expected_lagkv(row, policy):
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


def expected_tova(row, policy):
    logits = np.einsum("qd,qnd->qn", row.queries[-1], np.repeat(row.keys, 2, axis=0)) / np.sqrt(8)
    weights = [row.probabilities(logits[head], head) for head in range(4)]
    return np.broadcast_to(np.mean(weights, axis=0), row.keys.shape[:2])


def expected_expected_attention(row, policy):
    length, first = row.keys.shape[1], policy.sinks
    score = np.zeros(row.keys.shape[:2])
    if length <= first:
        return score
    mean_rope = np.mean([rope_matrix(length + ahead) for ahead in range(policy.n_future_positions)], axis=0)
    for head in range(4):
        queries = unrotate(row.queries[:, head])[first:]
        mean, keys = mean_rope @ queries.mean(0), row.keys[head // 2, first:]
        logits = keys @ mean / np.sqrt(8)
        if policy.use_covariance:
            covariance = mean_rope @ np.cov(queries.T, bias=True) @ mean_rope.T
            logits += np.einsum("ni,ij,nj->n", keys, covariance, keys) / 16
        score[head // 2, first:] += row.probabilities(logits, head) / 2
    norm = np.linalg.norm(row.values, axis=-1)
    return (score + policy.epsilon) * norm if policy.use_vnorm else score


def expected_cur(row, policy):
    def shares(x):
        squares, size = (x**2).sum(-1), policy.local_window_size
        if size is None:
            return squares
        window = np.arange(x.shape[1]) // size
        return squares / np.array([[head[window == number].sum() for number in window] for head in squares])

    keys, values = shares(row.keys), shares(row.values)
    both = {"key": keys, "value": values, "kv_avg": (keys + values) / 2, "kv_product": keys * values}
    score = both[policy.leverage_type]
    return score / score.sum(-1, keepdims=True)


def hat_diagonal(keys):
    """Returns the diagonal of the hat matrix of centered keys [H, n, D], regularized as in kvpress."""
    keys = keys - keys.mean(1, keepdims=True)
    gram = np.einsum("hni,hnj->hij", keys, keys) + 1e-2 * np.eye(8)
    return np.einsum("hni,hij,hnj->hn", keys, np.linalg.inv(gram), keys)


def expected_leverage(row, policy):
    return hat_diagonal(row.keys if policy.rotated else unrotate(row.keys))


def expected_compactor(row, policy):
    length = row.keys.shape[1]
    first, last = policy.sinks, length - policy.recent
    result = np.zeros((2, length))
    if last <= first:
        return result
    leverages = hat_diagonal(unrotate(row.keys)[:, first:last])
    attention = np.zeros((2, last - first))
    scale = policy.scale or 8**-0.5
    for head, start in itertools.product(range(4), range(first, last, policy.chunk)):
        end = min(start + policy.chunk, last)
        logits = scale * row.queries[start:end, head] @ row.keys[head // 2, start:end].T
        attention[head // 2, start - first : end - first] += row.probabilities(logits, head).sum(0) / 2
    attention *= np.linalg.norm(row.values[:, first:last], axis=-1)
    pooled = np.array([np.convolve(head, np.ones(3) / 3)[1:-1] for head in attention])
    weight = max(1 - policy.budget / length, 0) if policy.blending is None else policy.blending
    leverages, pooled = ((x - x.mean()) / max(x.std(ddof=1), 1e-6) for x in (leverages, pooled))
    result[:, first:last] = weight * leverages + pooled
    return result


SCORES = {
    "knorm": (kvjax.Knorm(20), expected_knorm),
    "leverage_scores": (LeverageScores(20, sinks=2), expected_leverage),
    "leverage_scores_after_rope": (LeverageScores(20, sinks=0, rotated=True), expected_leverage),
    "keydiff": (kvjax.KeyDiff(20), expected_keydiff),
    "lagkv": (kvjax.LagKV(20, sinks=2, lag_size=5), expected_lagkv),
    "lagkv_across_partitions": (kvjax.LagKV(20, sinks=2, lag_size=5, cross_scoring=True), expected_lagkv),
    "lagkv_of_one_partition": (kvjax.LagKV(20, lag_size=30), expected_lagkv),
    "tova": (kvjax.TOVA(20), expected_tova),
    "expected_attention": (kvjax.ExpectedAttention(20, n_future_positions=30), expected_expected_attention),
    "expected_attention_of_means": (
        kvjax.ExpectedAttention(20, sinks=0, n_future_positions=30, use_covariance=False, epsilon=0.1),
        expected_expected_attention,
    ),
    "expected_attention_alone": (kvjax.ExpectedAttention(20, use_vnorm=False), expected_expected_attention),
    "cur": (kvjax.CUR(20, local_window_size=5), expected_cur),
    "cur_of_sums": (kvjax.CUR(20, leverage_type="kv_avg", local_window_size=None), expected_cur),
    "cur_of_keys": (kvjax.CUR(20, leverage_type="key"), expected_cur),
    "cur_of_values": (kvjax.CUR(20, leverage_type="value"), expected_cur),
    "compactor": (kvjax.Compactor(20, sinks=3, recent=2, chunk=7), expected_compactor),
    "compactor_of_one_chunk": (kvjax.Compactor(20, sinks=0, recent=0, blending=0.35, scale=None), expected_compactor),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("cap, sink_logits", [(None, None), (1.5, np.array([0.3, -0.2, 1.0, 0.5]))])
def test_scores_of_a_row_equal_those_of_its_tokens_alone(name, cap, sink_logits):
    policy, expected = SCORES[name]
    if cap is not None and not policy.requires.prompt_queries:
        return
    rng, lengths = np.random.default_rng(5), np.array(LENGTHS)
    keys, values = rng.normal(size=(2, BATCH, 2, PROMPT, 8))
    queries = rng.normal(size=(BATCH, PROMPT, 4, 8)) + 0.5  # left-aligned
    position = lengths[:, None] - PROMPT + np.arange(PROMPT)

    def with_nan(x, valid):
        return jnp.asarray(np.where(valid, x, np.nan), jnp.float32)

    present = (np.arange(PROMPT) < lengths[:, None])[:, None, :, None]
    aligned = np.take_along_axis(queries, np.maximum(position, 0)[..., None, None], axis=1)
    prompt = Prompt(
        with_nan(keys, present),
        with_nan(values, present),
        jnp.asarray(lengths),
        kvjax.prompt_queries(policy, with_nan(aligned, (position >= 0)[..., None, None])),
        sink_logits=None if sink_logits is None else jnp.asarray(sink_logits, jnp.float32),
        rope_frequencies=jnp.asarray(ROPE_FREQUENCIES, jnp.float32),
        logit_cap=cap,
    )
    scores = jax.jit(policy.score)(prompt)
    assert scores.shape == (BATCH, 2, PROMPT) and scores.dtype == jnp.float32
    for number, length in enumerate(LENGTHS):
        row = Row(keys[number][:, :length], values[number][:, :length], queries[number][:length], cap, sink_logits)
        # Sinks and recent tokens are kept whatever their scores.
        scored = slice(policy.sinks, max(length - policy.recent, policy.sinks))
        actual = scores[number, :, :length][:, scored]
        np.testing.assert_allclose(actual, expected(row, policy)[:, scored], rtol=2e-4, atol=2e-5)


def test_leverage_of_few_distinct_keys_is_finite():
    """Before RoPE, keys of a first layer depend on the token alone, and a Gram matrix in float32 is singular."""
    rng = np.random.default_rng(0)
    keys = 20 * rng.normal(size=(20, 64))[rng.integers(0, 20, 200)]
    keys[0] += 100 * rng.normal(size=64)
    actual = jax.jit(leverage)(jnp.asarray(keys, jnp.float32), jnp.ones(200, bool))
    assert np.isfinite(actual).all() and np.argmax(actual) == 0
    np.testing.assert_allclose(actual.sum(), 20, rtol=0.01)  # the rank of the centered keys


def test_prompts_without_what_a_policy_requires_are_refused():
    keys = jnp.ones((1, 2, 16, HEAD_DIM))
    repeated = RepeatedPrompt(jnp.ones((1, 16, 4, HEAD_DIM)), jnp.ones((1, 16, 2, HEAD_DIM)), jnp.array([[16]]))
    repeated_prompt = Prompt(keys, keys, jnp.array([16]), repeated=repeated)
    refused = [
        (lambda: prefilled(KVzip(24)), "KVzip needs a repetition of the prompt; pass prompt.repeated"),
        (lambda: KVgrad(24).score(repeated_prompt), "needs prompt.repeated with weights='gradient'"),
        (lambda: KVzip(24, plus=True).score(repeated_prompt), "needs prompt.repeated with weights='hidden_norm'"),
        (lambda: KVgrad(24, plus=True), "plus=True is not a setting of KVgrad"),
    ]
    for policy in (LeverageScores(24), kvjax.ExpectedAttention(24), kvjax.Compactor(24)):
        refused.append((lambda policy=policy: prefilled(policy, spec=make_spec(rope_frequencies=None)), "rope_freq"))
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_layer_has_the_slots_of_its_sinks_and_at_most_one_per_token():
    def cache(budget, *shares, **spec):
        policy = kvjax.HeadBudgets(LeverageScores(budget), tuple((share, share) for share in shares))
        return kvjax.init(policy, make_spec(layers=2, **spec), row_keys())[0]

    assert [cache(32, 0.75, 1.25, layer=layer, kv_dtype="int8").state.slots for layer in range(2)] == [24, 40]
    assert cache(64, 2.0, 0.0, layer=0).policy == kvjax.Exact(16)
    assert cache(16 + 8, 2.0, 0.0, layer=1).state.slots == 4 + 16
