"""H2O, SnapKV, PyramidKV and CaM against plain simulations of the published algorithms."""

import functools
import itertools

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import kvjax
from kvjax.attention import attend_segments, attend_with_stats
from kvjax.policy import Prompt
from kvjax.prompt_attention import QUERY_BLOCK, attention_received
from kvjax.quantization import dequantize, quantize
from kvjax.segment import Segment
from kvjax.shared.per_head import draws_by_position
from tests.kvjax.support import (
    LENGTHS,
    NEW,
    POLICIES,
    after,
    decoded,
    go,
    make_spec,
    make_stream,
    prefilled,
    prompt_of,
    row_keys,
    softmax_attention,
)

KV_HEADS, GROUP = 2, 2


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def probabilities(stream, row, head, position, tokens):
    """Returns float64 attention probabilities of the query at a position, summed over the query heads of a group."""
    keys = stream.keys[row, tokens, head].astype(np.float64)
    queries = stream.queries[row, position, head * GROUP : (head + 1) * GROUP].astype(np.float64)
    return sum(softmax(keys @ query / np.sqrt(keys.shape[1])) for query in queries)


def run(policy, lengths=LENGTHS, stream=None, spec=None):
    """Prefills and decodes.

    Returns:
        Which tokens [B, N, H_kv, D] each KV head reads at every step, after a check that attention reads no others.
    """
    stream = make_stream() if stream is None else stream
    outputs, weights, *_ = decoded(policy, stream, spec, lengths)
    read = weights > 1e-6
    for row, step, head in itertools.product(range(len(lengths)), (0, NEW - 1), range(KV_HEADS)):
        tokens = np.flatnonzero(read[row, step, head])
        query = stream.queries[row, lengths[row] + step, head * GROUP]
        expected = softmax_attention(query, stream.keys[row, tokens, head], stream.values[row, tokens, head])
        np.testing.assert_allclose(outputs[row, step, head * GROUP], expected, atol=1e-5)
    return read


def check_read(read, simulate, lengths=LENGTHS, steps=NEW):
    """Compares the tokens that are read with those of a simulation of one row and head at every step."""
    for row, head in itertools.product(range(3), range(KV_HEADS)):
        expected = simulate(row, head, lengths[row])
        actual = [np.flatnonzero(read[row, step, head]).tolist() for step in range(steps)]
        assert actual == expected[:steps], f"{row=} {head=}"


# --- attention statistics ---


# 5, 40 and 10 are not multiples of the smaller block size, seven.
@pytest.mark.parametrize("block_size", [7, QUERY_BLOCK])
@pytest.mark.parametrize("count", [5, 10, 40])
def test_attention_received_equals_that_of_causal_attention(monkeypatch, count, block_size):
    monkeypatch.setattr("kvjax.prompt_attention.QUERY_BLOCK", block_size)
    stream = make_stream(2)
    keys, _, queries = prompt_of(stream, LENGTHS)
    position = np.array(LENGTHS)[:, None] - count + np.arange(count)
    last = np.take_along_axis(queries, np.maximum(position, 0)[..., None, None], axis=1)
    # NaN before a row's first token and after its last must have no effect.
    last[position < 0] = np.nan
    keys[np.arange(keys.shape[1]) >= np.array(LENGTHS)[:, None]] = np.nan
    keys = jnp.asarray(keys).swapaxes(1, 2)
    prompt = Prompt(keys, keys, jnp.array(LENGTHS), jnp.asarray(last))
    scores = attention_received(kvjax.SnapKV(64, window_size=count), prompt)
    for row, head in itertools.product(range(3), range(KV_HEADS)):
        expected = np.zeros(keys.shape[2])
        for position in range(max(LENGTHS[row] - count, 0), LENGTHS[row]):
            causal = np.arange(position + 1)
            expected[causal] += probabilities(stream, row, head, position, causal)
        np.testing.assert_allclose(scores[row, head], expected, atol=1e-5)


def test_statistics_are_the_attention_probabilities_of_slots():
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    query, stop = random(2, 3, 4, 8), jnp.array([[6], [2]])
    quantized = Segment(quantize(random(2, 2, 5, 8), "int8"), random(2, 2, 5, 8), log_num=random(2, 2, 5))
    split = Segment(random(2, 2, 6, 8), random(2, 2, 6, 8), log_num=random(2, 2, 6), log_den=random(2, 2, 6), stop=stop)
    segments, appended = (quantized, split), np.array([[True, False, True], [True, True, False]])
    partials, stats = attend_with_stats(query, segments, jnp.asarray(appended), probabilities=True)
    chex.assert_trees_all_close(partials, attend_segments(query, segments), rtol=1e-6)
    actual = np.concatenate([np.asarray(mass) for mass in stats], axis=3)
    keys = np.concatenate([dequantize(quantized.keys), split.keys], axis=2).astype(np.float64)
    log_den = np.concatenate([quantized.log_num, split.log_den], axis=2).astype(np.float64)
    for row, head, token in itertools.product(range(2), range(2), range(3)):
        expected = np.zeros(11)
        for grouped in range(2 * appended[row, token]):
            logits = keys[row, head] @ np.asarray(query[row, token, head * 2 + grouped], np.float64) / np.sqrt(8)
            logits += log_den[row, head]
            logits[5 + int(stop[row, 0]) :] = -np.inf
            expected += softmax(logits)
        np.testing.assert_allclose(actual[row, head, token], expected, atol=1e-5)
    # No statistics without a policy that asks for them, or without appended tokens.
    assert attend_with_stats(query, segments, jnp.asarray(appended))[1] == (None, None)
    assert attend_with_stats(query, segments, None, probabilities=True)[1] == (None, None)


# --- h2o ---

H2O = {
    "published": {"recent": 6, "compact_every": 1},
    "long_period": {"recent": 6, "compact_every": 8},
    "no_recent": {"recent": 0, "compact_every": 1},
    "average": {"recent": 4, "average": True, "compact_every": 3},
}


def simulate_h2o(stream, row, head, length, recent, compact_every, average=False, budget=12):
    """Returns the tokens visible at every step of Algorithm 1."""
    total = np.zeros(stream.keys.shape[1])

    def evict(cache, tokens):
        age = np.maximum(tokens - np.arange(len(total)), 1)
        score = total / age if average else total
        old = sorted((token for token in cache if token < tokens - recent), key=lambda token: -score[token])
        return sorted(old[: budget - recent]) + [token for token in cache if token >= tokens - recent]

    for position in range(length):
        causal = np.arange(position + 1)
        total[causal] += probabilities(stream, row, head, position, causal)
    cache, visible = evict(range(length), length), []
    for position in range(length, length + NEW):
        cache = [*cache, position]
        total[cache] += probabilities(stream, row, head, position, cache)
        visible.append(cache)
        if (position - length + 1) % compact_every == 0:
            cache = evict(cache, position + 1)
    return visible


@pytest.mark.parametrize("setting", H2O)
def test_h2o_reads_the_tokens_of_the_published_algorithm(setting):
    stream = make_stream(4)
    read = run(kvjax.H2O(12, **H2O[setting]), stream=stream)
    check_read(read, functools.partial(simulate_h2o, stream, **H2O[setting]))


def test_h2o_accumulates_the_attention_of_appended_tokens_only():
    stream = make_stream()
    cache, counters = prefilled(POLICIES["h2o"], stream)
    new, before = after(stream, LENGTHS, 4), cache.state.scores
    _, cache, counters = kvjax.step(cache, counters, new.queries, new.keys, new.values, jnp.array([4, 0, 2]))
    scores = cache.state.scores
    added = jnp.sum(scores.window - before.window, axis=2) + jnp.sum(scores.staged - before.staged, axis=2)
    # The probabilities of each query of each head of the group sum to one.
    np.testing.assert_allclose(added, GROUP * np.array([4, 0, 2])[:, None] * np.ones(KV_HEADS), rtol=1e-5)
    # The scores of a finished sequence do not change.
    np.testing.assert_array_equal(scores.window[1], before.window[1])


# --- snapkv ---


def simulate_snapkv(stream, budget, window, kernel, row, head, length):
    kept = list(range(length))
    if length > budget:
        score = np.zeros(length - window)
        for position in range(length - window, length):
            score += probabilities(stream, row, head, position, np.arange(position + 1))[: length - window]
        padded = np.pad(score, kernel // 2)
        pooled = np.array([padded[i : i + kernel].sum() for i in range(len(score))])
        best = np.argsort(-pooled, kind="stable")[: budget - window]
        kept = sorted(best.tolist()) + list(range(length - window, length))
    return [kept + list(range(length, length + step + 1)) for step in range(NEW)]


@pytest.mark.parametrize("budget, window, kernel", [(20, 6, 5), (12, 1, 1), (15, 14, 3), (6, 6, 5)])
def test_snapkv_keeps_the_best_tokens_of_its_window_and_all_later_ones(budget, window, kernel):
    stream, lengths = make_stream(4), (40, 21, 9)
    read = run(kvjax.SnapKV(budget, window_size=window, kernel_size=kernel, compact_every=8), lengths, stream)
    check_read(read, functools.partial(simulate_snapkv, stream, budget, window, kernel), lengths)


# --- pyramidkv ---


def published_pyramid(tokens, layer, layers, budget, window, beta):
    """Returns the slots of a layer in the released code."""
    if tokens <= budget:
        return tokens
    if tokens < 2 * (budget - window):
        return budget
    least = (budget - window) // beta
    most = 2 * (budget - window) - least
    if most >= tokens - window:
        most = tokens - window
        least = 2 * (budget - window) - most
    return window + most - layer * ((most - least) // (layers - 1))


def kvpress_pyramid(tokens, layer, layers, budget, window, beta):
    """Returns the slots of a layer in kvpress 0.5.5, whose cap is the window plus a share of the prompt."""
    if tokens <= budget:
        return tokens
    cap = window + budget
    least = (cap - window) / beta
    most = (cap - window) * 2 - least
    if most >= tokens - window:
        most = tokens - window
        least = (cap - window) * 2 - most
    if not tokens >= most >= least >= window:
        return budget
    return round(most - layer * ((most - least) / (layers - 1)))


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.integers(1, 400),
    layers=st.integers(2, 8),
    window=st.integers(1, 30),
    middle=st.integers(1, 80),
    beta=st.integers(1, 20),
    variant=st.sampled_from(["paper", "kvpress"]),
)
def test_pyramidkv_gives_every_layer_its_published_slots(tokens, layers, window, middle, beta, variant):
    sizes = {"budget": window + middle, "beta": beta}
    published = {"paper": published_pyramid, "kvpress": kvpress_pyramid}[variant]
    slots = [published(tokens, layer, layers, window=window, **sizes) for layer in range(layers)]
    policy = kvjax.PyramidKV(**sizes, window_size=window, variant=variant)
    assert [policy.layer_slots(tokens, layer, layers) for layer in range(layers)] == slots
    assert all(min(tokens, window) <= number <= tokens for number in slots)
    if tokens > sizes["budget"]:
        assert -0.5 <= np.mean(slots) - sizes["budget"] <= layers / 2


@pytest.mark.parametrize("variant", ["paper", "kvpress"])
def test_pyramidkv_keeps_the_slots_of_each_layer(variant):
    stream, lengths, layers = make_stream(4), (40, 21, 9), 3
    policy = kvjax.PyramidKV(13, window_size=5, kernel_size=3, beta=2, variant=variant, compact_every=8)
    slots = [policy.layer_slots(40, layer, layers) for layer in range(layers)]
    assert slots == {"paper": [17, 13, 9], "kvpress": [20, 13, 6]}[variant]
    for layer, number in enumerate(slots):
        read = run(policy, lengths, stream, make_spec(layer=layer, layers=layers))
        check_read(read, functools.partial(simulate_snapkv, stream, number, 5, 3), lengths, steps=1)


# --- cam ---


def simulate_cam(stream, row, head, key, sinks=2, recent=7, merged=4):
    """Simulates the published algorithm with one token leaving per step.

    Returns:
        Attention outputs [N, G, D], and the tokens that were merged.
    """
    values = stream.values[row, :, head].astype(np.float64)
    keys = stream.keys[row, :, head].astype(np.float64)
    draws = np.asarray(draws_by_position(key[None], jnp.arange(len(values))[None], KV_HEADS))[0, head]
    outputs, merged_tokens = [], []
    for position in range(LENGTHS[row], LENGTHS[row] + NEW):
        first = max(position - recent, sinks)  # the oldest recent token, which leaves after this step
        tokens = [*range(min(sinks, position + 1)), *range(first, position + 1)]
        queries = stream.queries[row, position, head * GROUP : (head + 1) * GROUP].astype(np.float64)
        weights = np.stack([softmax(keys[tokens] @ query / np.sqrt(len(query))) for query in queries])
        outputs.append(weights @ values[tokens])
        if position - first >= recent:
            attention = weights.sum(axis=0)[tokens.index(first) :]
            if draws[first] < attention[0] / attention[1:].mean():
                values[first + 1 : first + 1 + merged] += values[first] / merged
                merged_tokens.append(first)
    return np.array(outputs), merged_tokens


def test_cam_merges_as_published():
    stream, policy = make_stream(6), kvjax.CaM(9, sinks=2, merged=4, compact_every=1)
    outputs, *_ = decoded(policy, stream)
    merged = left = 0
    for row, head in itertools.product(range(3), range(KV_HEADS)):
        expected, merged_tokens = simulate_cam(stream, row, head, row_keys()[row])
        np.testing.assert_allclose(outputs[row, :, head * GROUP : (head + 1) * GROUP], expected, atol=1e-5)
        merged += len(merged_tokens)
        left += max(LENGTHS[row] + NEW - 9, 0) - max(LENGTHS[row] - 9, 0)
    assert 0.2 < merged / left < 0.95  # both outcomes occurred


def test_draws_are_uniform_and_independent_of_blocks():
    positions = jnp.broadcast_to(jnp.arange(1000), (3, 1000))
    draws = draws_by_position(row_keys(), positions, KV_HEADS)
    assert stats.kstest(np.ravel(draws), "uniform").pvalue > 1e-3
    assert len(np.unique(draws)) > 5990  # rows, heads and positions differ
    np.testing.assert_array_equal(draws_by_position(row_keys(), positions[:, 300:320], KV_HEADS), draws[:, :, 300:320])


def test_tokens_that_leave_together_are_merged_into_tokens_that_stay():
    policy, stream = kvjax.CaM(6, sinks=1, merged=3, compact_every=8), make_stream()
    # With queries of zeros all tokens get equal attention, so every token that leaves is merged.
    stream = stream._replace(queries=0 * stream.queries)
    *_, cache, _ = go(*prefilled(policy, stream), after(stream, LENGTHS, 8))
    for row, end in enumerate(np.array(LENGTHS) + 8):
        left = np.arange(max(end - 13, 1), end - 5)  # recent or new before, no longer in the window
        values = np.asarray(cache.state.window.values)[row, 0, :5]
        np.testing.assert_allclose(values[:3][:, left], 1 / 3, rtol=1e-6)
        np.testing.assert_array_equal(values[3:][:, left], 0)


# --- errors ---


@pytest.mark.parametrize(
    "name, kind, count",
    [("h2o", "H2O", 40), ("infinigen", "InfiniGen", 40), ("snapkv", "SnapKV", 6), ("pyramidkv", "SnapKV", 6)],
)
def test_prefill_with_missing_or_wrong_queries_is_refused(name, kind, count):
    keys, values, queries = prompt_of(make_stream(), LENGTHS)
    state = kvjax.init(POLICIES[name], make_spec(), row_keys())
    wrong = (queries[:, : count - 1], queries[:2, :count], queries[:, :count, :3], queries[:, :count, :, :8])
    for one in (None, *wrong):
        message = f"queries=None, but {kind} needs .* last {count} tokens" if one is None else f"shape .*{kind} needs"
        with pytest.raises(ValueError, match=message):
            kvjax.prefill(*state, keys, values, jnp.array(LENGTHS), one)
