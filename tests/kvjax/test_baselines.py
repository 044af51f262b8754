"""H2O, SnapKV, PyramidKV and CaM against plain simulations of what is published."""

import dataclasses
import itertools

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.attention import attend_segments, attend_with_stats
from kvjax.budget import row_bytes
from kvjax.policy import ALL_QUERIES, Prompt
from kvjax.prompt_attention import attention_received
from kvjax.quantization import rotation
from kvjax.segment import Segment
from kvjax.structures.per_head import draws_by_position
from tests.kvjax.support import (
    LENGTHS,
    NEW,
    POLICIES,
    Stream,
    after,
    begin,
    go,
    make_spec,
    make_stream,
    prompt_of,
    row_keys,
    softmax_attention,
)

KV_HEADS, GROUP = 2, 2


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def probabilities(stream, row, head, position, tokens):
    """float64 attention probabilities of the token at a position to others, summed over a kv head's query heads."""
    keys = stream.keys[row, tokens, head].astype(np.float64)
    queries = stream.queries[row, position, head * GROUP : (head + 1) * GROUP].astype(np.float64)
    return sum(softmax(keys @ query / np.sqrt(keys.shape[1])) for query in queries)


def decoded(policy, lengths=LENGTHS, stream=None, spec=None):
    """Which tokens [B, N, H_kv, D] each kv head of each row reads at every step after prompts of these lengths, once it
    is sure that attention reads nothing else."""
    stream = make_stream() if stream is None else stream
    cache = begin(policy, spec or make_spec(), row_keys(), *prompt_of(stream, lengths), lengths)
    _, outputs, weights = go(cache, after(stream, lengths))
    read = weights > 1e-6
    for row, step, head in itertools.product(range(len(lengths)), (0, NEW - 1), range(KV_HEADS)):
        tokens = np.flatnonzero(read[row, step, head])
        query = stream.queries[row, lengths[row] + step, head * GROUP]
        expected = softmax_attention(query, stream.keys[row, tokens, head], stream.values[row, tokens, head])
        np.testing.assert_allclose(outputs[row, step, head * GROUP], expected, atol=1e-5)
    return read


# --- observed attention ---


def received(count, keys, queries, lengths):
    """What prompts [B, T, H, D] tell a policy that asks for so many of their last queries."""
    policy = kvjax.SnapKV(64, window_size=count) if count != ALL_QUERIES else kvjax.H2O(64)
    first = jnp.asarray(keys).swapaxes(1, 2)
    return np.asarray(attention_received(policy, Prompt(first, first, jnp.array(lengths), jnp.asarray(queries))))


@pytest.mark.parametrize("count", [5, 40])
def test_attention_received_is_that_of_causal_attention(count):
    stream = make_stream(2)
    keys, _, queries = prompt_of(stream, LENGTHS)
    place = np.maximum(np.array(LENGTHS)[:, None] - count + np.arange(count), 0)
    tail = np.take_along_axis(queries, place[..., None, None], axis=1)
    # What stands before a row's first token, and behind its last, must not matter, whatever it is.
    early = np.array(LENGTHS)[:, None] - count + np.arange(count) < 0
    tail[early] = np.nan
    keys[np.arange(keys.shape[1]) >= np.array(LENGTHS)[:, None]] = np.nan
    found = received(count, keys, tail, LENGTHS)
    for row, head in itertools.product(range(3), range(KV_HEADS)):
        expected = np.zeros(keys.shape[1])
        for position in range(max(LENGTHS[row] - count, 0), LENGTHS[row]):
            seen = np.arange(position + 1)
            expected[seen] += probabilities(stream, row, head, position, seen)
        np.testing.assert_allclose(found[row, head], expected, atol=1e-5)


@pytest.mark.parametrize("count", [ALL_QUERIES, 10])
def test_attention_received_does_not_depend_on_its_blocks(monkeypatch, count):
    stream = make_stream(2)
    # Ten queries are no whole number of blocks.
    arguments = (count, stream.keys, stream.queries[:, -10:] if count == 10 else stream.queries, (64, 30, 7))
    whole = received(*arguments)
    monkeypatch.setattr("kvjax.prompt_attention.QUERY_BLOCK", 7)
    np.testing.assert_allclose(whole, received(*arguments), atol=1e-5)


def test_seen_attention_tells_the_probability_that_slots_draw():
    rng = np.random.default_rng(0)
    part = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    query = part(2, 3, 4, 8)
    full = Segment(part(2, 2, 5, 8), part(2, 2, 5, 8), log_num=part(2, 2, 5), key_scale=part(2, 2, 5))
    stop = jnp.array([[6], [2]])
    split = Segment(part(2, 2, 6, 8), part(2, 2, 6, 8), log_num=part(2, 2, 6), log_den=part(2, 2, 6), stop=stop)
    real = np.array([[True, False, True], [True, True, False]])
    partials, masses = attend_with_stats(query, (full, split), jnp.asarray(real), observes_attention=True)
    chex.assert_trees_all_close(partials, attend_segments(query, (full, split)), rtol=1e-6)
    found = np.concatenate([np.asarray(mass) for mass in masses], axis=3)
    for row, head, token in itertools.product(range(2), range(2), range(3)):
        expected = np.zeros(11)
        for grouped in range(2 * real[row, token]):  # queries that are of no appended token pay nothing
            asked = np.asarray(query[row, token, head * 2 + grouped], np.float64)
            dot = lambda segment: np.asarray(segment.keys[row, head]) @ asked / np.sqrt(8)  # noqa: B023, E731
            first = np.asarray(full.keys[row, head]) @ (asked @ np.float64(rotation(8))) / np.sqrt(8)
            first = first * np.asarray(full.key_scale[row, head]) + np.asarray(full.log_num[row, head])
            second = dot(split) + np.asarray(split.log_den[row, head])
            second[int(stop[row, 0]) :] = -np.inf
            expected += softmax(np.concatenate([first, second]))
        np.testing.assert_allclose(found[row, head, token], expected, atol=1e-5)
    # Nothing is seen where nobody asks, or where no token came.
    assert attend_with_stats(query, (full, split), jnp.asarray(real))[1] == (None, None)
    assert attend_with_stats(query, (full, split), None, observes_attention=True)[1] == (None, None)


# --- h2o ---

H2O = {
    "published": {"recent": 6, "compact_every": 1},
    "long_period": {"recent": 6, "compact_every": 8},
    "no_recent": {"recent": 0, "compact_every": 1},
    "average": {"recent": 4, "average": True, "compact_every": 3},
}


def simulate_h2o(stream, row, head, length, recent, compact_every, average=False, budget=12):
    """The tokens visible at every step, one after another as in Algorithm 1."""
    drawn = np.zeros(stream.keys.shape[1])

    def evicted(cache, tokens):
        age = np.maximum(tokens - np.arange(len(drawn)), 1)
        score = drawn / age if average else drawn
        old = [token for token in cache if token < tokens - recent]
        old = sorted(old, key=lambda token: -score[token])[: budget - recent]
        return sorted(old) + [token for token in cache if token >= tokens - recent]

    for position in range(length):
        seen = np.arange(position + 1)
        drawn[seen] += probabilities(stream, row, head, position, seen)
    cache, visible = evicted(range(length), length), []
    for position in range(length, length + NEW):
        cache = [*cache, position]
        drawn[cache] += probabilities(stream, row, head, position, cache)
        visible.append(cache)
        if (position - length + 1) % compact_every == 0:
            cache = evicted(cache, position + 1)
    return visible


@pytest.mark.parametrize("setting", H2O)
def test_h2o_reads_what_the_published_algorithm_keeps(setting):
    stream = make_stream(4)
    read = decoded(kvjax.H2O(12, **H2O[setting]), stream=stream)
    for row, head in itertools.product(range(3), range(KV_HEADS)):
        expected = simulate_h2o(stream, row, head, LENGTHS[row], **H2O[setting])
        for step in range(NEW):
            assert np.flatnonzero(read[row, step, head]).tolist() == expected[step], f"{row=} {head=} {step=}"


def test_h2o_learns_from_the_queries_of_appended_tokens_only():
    stream = make_stream()
    cache = begin(POLICIES["h2o"], make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    more, before = after(stream, LENGTHS, 4), cache.state.scores
    _, learnt = kvjax.step(cache, more.queries, more.keys, more.values, jnp.array([4, 0, 2]))
    added = jnp.sum(learnt.state.scores.window - before.window, axis=2)
    added += jnp.sum(learnt.state.scores.staged - before.staged, axis=2)
    # Every query of every head of the group adds one.
    np.testing.assert_allclose(added, GROUP * np.array([4, 0, 2])[:, None] * np.ones(KV_HEADS), rtol=1e-5)
    # A row that has ended learns nothing at all.
    np.testing.assert_array_equal(learnt.state.scores.window[1], before.window[1])


# --- snapkv ---


def simulate_snapkv(stream, row, head, length, kept, window, kernel):
    if length <= kept:
        return list(range(length))
    score = np.zeros(length - window)
    for position in range(length - window, length):
        score += probabilities(stream, row, head, position, np.arange(position + 1))[: length - window]
    padded = np.pad(score, kernel // 2)
    pooled = np.array([padded[i : i + kernel].sum() for i in range(len(score))])
    chosen = np.argsort(-pooled, kind="stable")[: kept - window]
    return sorted(chosen.tolist()) + list(range(length - window, length))


@pytest.mark.parametrize("budget, window, kernel", [(20, 6, 5), (12, 1, 1), (15, 14, 3), (6, 6, 5)])
def test_snapkv_keeps_what_its_window_attended_to_and_all_that_comes(budget, window, kernel):
    stream, lengths = make_stream(4), (40, 21, 9)
    read = decoded(kvjax.SnapKV(budget, window_size=window, kernel=kernel, compact_every=8), lengths, stream)
    for row, head in itertools.product(range(3), range(KV_HEADS)):
        expected = simulate_snapkv(stream, row, head, lengths[row], budget, window, kernel)
        for step in range(NEW):
            appended = list(range(lengths[row], lengths[row] + step + 1))
            assert np.flatnonzero(read[row, step, head]).tolist() == expected + appended


def test_a_prompt_under_the_window_is_kept_whole():
    read = decoded(kvjax.SnapKV(39, window_size=38, compact_every=8), (40, 5, 1))
    assert [np.flatnonzero(read[row, 0, 0]).tolist() for row in (1, 2)] == [list(range(6)), list(range(2))]


# --- pyramidkv ---


def published_pyramid(tokens, layer, layers, budget, window, beta):
    """The numbers of the released code, step by step."""
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
    """Those of kvpress 0.5.5's press, whose cap is the window and a share of the prompt."""
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
    reserve_decode_slots=st.integers(1, 80),
    beta=st.integers(1, 20),
    variant=st.sampled_from(["paper", "kvpress"]),
)
def test_pyramidkv_gives_every_layer_its_published_number(tokens, layers, window, reserve_decode_slots, beta, variant):
    sizes = {"budget": window + reserve_decode_slots, "beta": beta}
    published = {"paper": published_pyramid, "kvpress": kvpress_pyramid}[variant]
    numbers = [published(tokens, layer, layers, window=window, **sizes) for layer in range(layers)]
    policy = kvjax.PyramidKV(**sizes, window_size=window, variant=variant)
    assert [policy.layer_slots(tokens, layer, layers) for layer in range(layers)] == numbers
    assert all(min(tokens, window) <= number <= tokens for number in numbers)
    if tokens > sizes["budget"]:
        assert -0.5 <= np.mean(numbers) - sizes["budget"] <= layers / 2


@pytest.mark.parametrize("variant", ["paper", "kvpress"])
def test_pyramidkv_keeps_its_layers_numbers(variant):
    stream, lengths, layers = make_stream(4), (40, 21, 9), 3
    policy = kvjax.PyramidKV(13, window_size=5, kernel_size=3, beta=2, variant=variant, compact_every=8)
    numbers = [policy.layer_slots(40, layer, layers) for layer in range(layers)]
    assert numbers == {"paper": [17, 13, 9], "kvpress": [20, 13, 6]}[variant]
    for layer, number in enumerate(numbers):
        read = decoded(policy, lengths, stream, make_spec(layer=layer, layers=layers))
        for row, head in itertools.product(range(3), range(KV_HEADS)):
            expected = simulate_snapkv(stream, row, head, lengths[row], number, 5, 3)
            assert np.flatnonzero(read[row, 0, head]).tolist() == [*expected, lengths[row]]


def test_a_pyramid_is_fitted_by_the_average_of_its_layers():
    spec = make_spec(prompt=400, layers=3)
    limit = spec.full_cache_bytes(200)
    policy = kvjax.fit_bytes(lambda budget: kvjax.PyramidKV(budget, window_size=5, compact_every=8), spec, limit)
    sizes = [row_bytes(policy, dataclasses.replace(spec, layer=layer)) for layer in range(3)]
    assert sizes[0] > sizes[1] > sizes[2]
    assert 0.9 * limit < np.mean(sizes) <= limit


# --- cam ---


def simulate_cam(stream, row, head, key, sinks=2, recent=7, merged=4):
    """Attention outputs [N, G, D] of every step, one token leaving after each, and which tokens were merged."""
    values = stream.values[row, :, head].astype(np.float64)
    keys = stream.keys[row, :, head].astype(np.float64)
    coins = np.asarray(draws_by_position(key[None], jnp.arange(len(values))[None], KV_HEADS))[0, head]
    outputs, went = [], []
    for position in range(LENGTHS[row], LENGTHS[row] + NEW):
        first = max(position - recent, sinks)  # the oldest of the recent tokens, which leaves after this step
        tokens = [*range(min(sinks, position + 1)), *range(first, position + 1)]
        queries = stream.queries[row, position, head * GROUP : (head + 1) * GROUP].astype(np.float64)
        weights = np.stack([softmax(keys[tokens] @ query / np.sqrt(len(query))) for query in queries])
        outputs.append(weights @ values[tokens])
        if position - first >= recent:
            attention = weights.sum(axis=0)[tokens.index(first) :]
            if coins[first] < attention[0] / attention[1:].mean():
                values[first + 1 : first + 1 + merged] += values[first] / merged
                went.append(first)
    return np.array(outputs), went


def test_cam_merges_what_leaves_as_published():
    stream, policy = make_stream(6), kvjax.CaM(9, sinks=2, merged=4, compact_every=1)
    cache = begin(policy, make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    _, outputs, _ = go(cache, after(stream, LENGTHS))
    merged = left = 0
    for row, head in itertools.product(range(3), range(KV_HEADS)):
        expected, went = simulate_cam(stream, row, head, row_keys()[row])
        np.testing.assert_allclose(outputs[row, :, head * GROUP : (head + 1) * GROUP], expected, atol=1e-5)
        merged += len(went)
        left += max(LENGTHS[row] + NEW - 9, 0) - max(LENGTHS[row] - 9, 0)
    assert 0.2 < merged / left < 0.95  # coins fell on both sides


def test_cam_merges_with_the_probability_of_its_attention():
    # Many rows of one stream differ in their coins only.
    batch, stream = 2000, make_stream(batch=1, tokens=12, query_heads=2, kv_heads=1)
    rng = np.random.default_rng(11)
    stream = stream._replace(queries=rng.normal(size=stream.queries.shape).astype(np.float32))
    stream = Stream(*(np.repeat(part, batch, axis=0) for part in stream))
    policy = kvjax.CaM(6, sinks=1, merged=3, compact_every=1)
    spec = make_spec(batch=batch, prompt=8, new=8, kv_heads=1, query_heads=2)
    lengths = np.full(batch, 6)
    cache = begin(policy, spec, row_keys(batch), *prompt_of(stream, lengths, 8), lengths)
    # After the seventh token, token 1 leaves: it was seen beside 0 and 2 ... 6.
    cache, _, _ = go(cache, after(stream, lengths, 1))
    keys, queries = stream.keys[0, :7, 0].astype(np.float64), stream.queries[0, 6].astype(np.float64)
    attention = sum(softmax(keys @ query / np.sqrt(len(query))) for query in queries)
    probability = min(1.0, attention[1] / attention[2:].mean())
    assert 0.1 < probability < 0.9
    values = np.asarray(cache.state.window.values)[:, 0, :5]  # of tokens 2 ... 6
    merged = values[:, :, 1] > 0
    assert set(map(tuple, merged)) == {(True, True, True, False, False), (False,) * 5}
    np.testing.assert_allclose(values[merged[:, 0], :3, 1], 1 / 3, rtol=1e-6)
    spread = np.sqrt(probability * (1 - probability) / batch)
    assert abs(merged[:, 0].mean() - probability) < 4 * spread


def test_tokens_that_leave_together_are_merged_into_those_that_stay():
    policy, stream = kvjax.CaM(6, sinks=1, merged=3, compact_every=8), make_stream()
    # All queries are zeros: every token draws the same attention, and all that leave are merged.
    stream = stream._replace(queries=0 * stream.queries)
    cache = begin(policy, make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    cache, _, _ = go(cache, after(stream, LENGTHS, 8))
    for row, end in enumerate(np.array(LENGTHS) + 8):
        left = np.arange(max(end - 13, 1), end - 5)  # those that were recent, or came, and are no longer
        values = np.asarray(cache.state.window.values)[row, 0, :5]
        np.testing.assert_allclose(values[:3][:, left], 1 / 3, rtol=1e-6)
        np.testing.assert_array_equal(values[3:][:, left], 0)


# --- errors ---


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kvjax.H2O(8, recent=8), "budget=8 leaves no slot for heavy hitters; sinks \\+ recent already take 8"),
        (lambda: kvjax.H2O(8, recent=-1), "recent=-1"),
        (lambda: kvjax.H2O(0), "budget=0"),
        (lambda: kvjax.H2O(8, compact_every=0), "compact_every=0"),
        (lambda: kvjax.CaM(4), "budget=4 .*sinks=4 and recent=1"),
        (lambda: kvjax.CaM(8, merged=0), "merged=0"),
        (lambda: kvjax.CaM(8, compact_every=0), "compact_every=0"),
        (lambda: kvjax.SnapKV(31), "budget=31 .*window_size=32"),
        (lambda: kvjax.SnapKV(64, recent=0), "window_size=0"),
        (lambda: kvjax.SnapKV(64, kernel_size=4), "kernel_size=4; it must be odd"),
        (lambda: kvjax.SnapKV(64, compact_every=0), "compact_every=0"),
        (lambda: kvjax.PyramidKV(64, beta=0), "beta=0"),
        (lambda: kvjax.PyramidKV(64, variant="cap"), "variant='cap'; it must be 'paper' or 'kvpress'"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name, kind, count", [("h2o", "H2O", 40), ("snapkv", "SnapKV", 6), ("pyramidkv", "SnapKV", 6)])
def test_prompts_need_their_queries(name, kind, count):
    keys, values, queries = prompt_of(make_stream(), LENGTHS)
    cache = kvjax.init(POLICIES[name], make_spec(), row_keys())
    prefill = lambda shown: kvjax.prefill(cache, keys, values, jnp.array(LENGTHS), shown)  # noqa: E731
    with pytest.raises(ValueError, match=rf"queries=None; {kind} needs .* last {count} tokens"):
        prefill(None)
    for wrong in (queries[:, : count - 1], queries[:2, :count], queries[:, :count, :3], queries[:, :count, :, :8]):
        with pytest.raises(ValueError, match=rf"queries have shape .*{kind} needs"):
            prefill(wrong)
