"""Frozen texts, which several rows continue with caches of their own."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.kvjax.support import (
    HEAD_DIM,
    POLICIES,
    begin,
    each,
    make_spec,
    make_stream,
    prompt_of,
    row_keys,
    softmax_attention,
)

LENGTHS = (37, 12)
ROWS = 3  # of every text
STEPS = (5, 1, 1, 4)  # tokens of every block


def filled(policy, spec, stream):
    return begin(policy, spec, row_keys(len(LENGTHS)), *prompt_of(stream, LENGTHS), LENGTHS)


def texts_of(policy, stream, **changes):
    """Returns the frozen texts of a policy."""
    spec = make_spec(batch=len(LENGTHS), new=0, **changes)
    return kvjax.freeze(*filled(policy, spec, stream))


def continue_texts(text, rows, *, tail=None, seed=5, sink_logits=None, **changes):
    """Appends tokens to tails of all rows of a text; returns their attention outputs and the tokens."""
    batch = len(rows)
    tail_spec = make_spec(batch=batch, prompt=1, new=sum(STEPS), **changes)
    cache, counters = kvjax.init(tail or kvjax.Exact(compact_every=8), tail_spec, row_keys(batch))
    stream = make_stream(seed, batch=2 * ROWS, tokens=sum(STEPS))
    stream = type(stream)(*(part[np.asarray(rows)] for part in stream))
    step = jax.jit(kvjax.step)
    outputs, start = [], 0
    for count in STEPS:
        block = [part[:, start : start + count] for part in (stream.queries, stream.keys, stream.values)]
        output, cache, counters = step(cache, counters, *block, prefix=text, sink_logits=sink_logits)
        outputs.append(np.asarray(output))
        start += count
    kvjax.raise_faults((cache, counters))
    return np.concatenate(outputs, axis=1), stream


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("name", each(POLICIES))
def test_rows_of_one_text_attend_as_rows_of_their_own_texts(name, kv_dtype):
    text = texts_of(POLICIES[name], make_stream(batch=len(LENGTHS)), kv_dtype=kv_dtype)
    rows = range(2 * ROWS)
    together, _ = continue_texts(text, rows)
    for row in rows:
        own = kvjax.take_rows(text, np.array([row // ROWS]))
        alone, _ = continue_texts(own, [row])
        np.testing.assert_allclose(together[row], alone[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 9, 100])
def test_text_and_tail_are_attention_to_all_tokens(window):
    stream = make_stream(batch=len(LENGTHS))
    text = texts_of(kvjax.Exact(), stream, window=window)
    sink_logits = jnp.asarray([0.5, -jnp.inf, 2.0, 0.0])
    outputs, tails = continue_texts(text, range(2 * ROWS), window=window, sink_logits=sink_logits)
    for row in range(2 * ROWS):
        length = LENGTHS[row // ROWS]
        keys = np.concatenate([stream.keys[row // ROWS, :length], tails.keys[row]])
        values = np.concatenate([stream.values[row // ROWS, :length], tails.values[row]])
        for token in range(sum(STEPS)):
            end = length + token + 1
            start = 0 if window is None else max(0, end - window)
            for head in range(4):
                tokens = keys[start:end, head // 2], values[start:end, head // 2]
                sink = float(sink_logits[head])
                expected = softmax_attention(tails.queries[row, token, head], *tokens, sink_logit=sink)
                np.testing.assert_allclose(outputs[row, token, head], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tail", ["h2o", "chelsea", "streaming_llm"])
def test_a_tail_may_be_compressed(tail):
    text = texts_of(kvjax.Exact(), make_stream(batch=len(LENGTHS)))
    outputs, _ = continue_texts(text, range(2 * ROWS), tail=POLICIES[tail])
    assert np.isfinite(outputs).all()


SNAPKV = kvjax.SnapKV(16, window_size=6, compact_every=8)
PROBABILITIES = {
    "full": (kvjax.Exact(), {}),
    "one head": (kvjax.ByHead((SNAPKV, kvjax.Exact())), {}),
    "int8": (kvjax.ByHead((kvjax.Exact(), SNAPKV)), {"kv_dtype": "int8"}),
    "cap": (kvjax.Exact(), {"logit_cap": 2.0, "scale": 0.2}),
}


@pytest.mark.parametrize("name", PROBABILITIES)
def test_probabilities_of_a_prefix_are_those_of_attention_to_all_tokens(name):
    policy, changes = PROBABILITIES[name]
    stream, rows = make_stream(batch=len(LENGTHS)), range(2 * ROWS)
    text, sinks = texts_of(policy, stream, **changes), jnp.asarray([0.5, -jnp.inf, 2.0, 0.0])
    spec = make_spec(batch=len(rows), prompt=1, new=16, **changes)
    cache, counters = kvjax.init(kvjax.Exact(compact_every=8), spec, row_keys(len(rows)))
    suffixes, options = make_stream(5, batch=len(rows), tokens=13), {"prefix": text, "sink_logits": sinks}
    for start, width in ((0, 8), (8, 5)):
        queries, *new = (part[:, start : start + width] for part in (suffixes.queries, *suffixes[:2]))
        lengths = jnp.asarray([width, width - 2] * ROWS)
        cache, counters = kvjax.compact(cache, counters)
        _, cache, counters = kvjax.step(cache, counters, queries, *new, lengths, **options)
        actual = np.asarray(kvjax.prefix_probabilities(cache, counters, queries, text, sink_logits=sinks))
        for row, token in itertools.product(rows, range(width)):
            length, expected = LENGTHS[row // ROWS], np.zeros((2, actual.shape[3]))
            own = [*range(start + token + 1)] if start == 0 or row % 2 == 0 else [*range(6), *range(8, 9 + token)]
            for head in range(4 * (token < lengths[row])):
                by_head = policy.policies[head // 2] if isinstance(policy, kvjax.ByHead) else policy
                if isinstance(by_head, kvjax.Exact):
                    keys = [stream.keys[row // ROWS, :length, head // 2], suffixes.keys[row, own, head // 2]]
                    keys, limits = np.concatenate(keys), {"scale": spec.scale, "logit_cap": spec.logit_cap}
                    weights = softmax_attention(
                        queries[row, token, head], keys, np.eye(len(keys)), sink_logit=float(sinks[head]), **limits
                    )
                    expected[head // 2, :length] += weights[:length]
            tolerance = 2e-2 if "kv_dtype" in changes else 1e-5
            np.testing.assert_allclose(actual[row, :, token], expected, atol=tolerance)


def test_probabilities_need_a_head_with_every_token():
    stream = make_stream(batch=len(LENGTHS))
    text, spec = texts_of(SNAPKV, stream), make_spec(batch=2, new=8)
    cache, counters = kvjax.init(kvjax.Exact(compact_every=8), spec, row_keys(2))
    new = [part[:, :1] for part in (stream.queries, stream.keys, stream.values)]
    _, cache, counters = kvjax.step(cache, counters, *new, prefix=text)
    with pytest.raises(ValueError, match="with KV heads that keep every token"):
        kvjax.prefix_probabilities(cache, counters, new[0], text)


def test_a_text_has_no_staging_buffer_and_is_read_once():
    stream = make_stream(batch=len(LENGTHS))
    text = texts_of(kvjax.Uniform(16, sinks=2, recent=4), stream)
    slots = 16
    assert kvjax.read_bytes(text) <= kvjax.cache_bytes(text).device
    entries = len(LENGTHS) * 2 * slots * 2 * HEAD_DIM * 4
    assert entries <= kvjax.cache_bytes(text).device < 1.2 * entries


def test_a_text_is_not_changed():
    stream = make_stream(batch=len(LENGTHS))
    text = texts_of(POLICIES["h2o"], stream)
    before = jax.tree.map(np.asarray, text)
    continue_texts(text, range(2 * ROWS))
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, text))


def test_texts_are_inserted_and_selected():
    stream = make_stream(batch=len(LENGTHS))
    text = texts_of(POLICIES["uniform"], stream)
    swapped = kvjax.insert_rows(text, kvjax.take_rows(text, np.array([1, 0])), np.array([0, 1]))
    outputs, _ = continue_texts(text, range(2 * ROWS))
    others, _ = continue_texts(swapped, [3, 4, 5, 0, 1, 2])
    np.testing.assert_allclose(outputs[:ROWS], others[ROWS:], rtol=2e-5, atol=2e-6)


def test_misuse_is_refused():
    stream = make_stream(batch=len(LENGTHS))
    spec = make_spec(batch=len(LENGTHS), new=8)
    cache, counters = filled(kvjax.Exact(), spec, stream)
    staged = kvjax.append(cache, counters, stream.keys[:, :2], stream.values[:, :2])
    with pytest.raises(ValueError, match="staging buffer holds tokens in 2 slots"):
        kvjax.freeze(*staged)
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda *state: kvjax.freeze(*state))(cache, counters)
    text = kvjax.freeze(cache, counters)
    with pytest.raises(ValueError, match="3 rows cannot continue 2 prefixes"):
        continue_texts(text, range(3))
    with pytest.raises(ValueError, match="window=None differs from the cache's window=16"):
        continue_texts(text, range(4), window=16)
    empty = filled(kvjax.Exact(), dataclasses.replace(spec, max_new_tokens=0), stream)
    with pytest.raises(ValueError, match="cannot append 1 tokens to 0 staging slots"):
        kvjax.append(*empty, stream.keys[:, :1], stream.values[:, :1])


# --- thaw and resize ---


def go_on(cache, counters, tokens=9):
    """Returns attention outputs of further tokens."""
    stream = make_stream(7, batch=len(LENGTHS), tokens=tokens)
    outputs = []
    for start in range(0, tokens, 3):
        block = [part[:, start : start + 3] for part in (stream.queries, stream.keys, stream.values)]
        output, cache, counters = kvjax.step(cache, counters, *block)
        outputs.append(np.asarray(output))
    kvjax.raise_faults((cache, counters))
    return np.concatenate(outputs, axis=1)


@pytest.mark.parametrize("kv_dtype", [None, "int4"])
@pytest.mark.parametrize("name", each(POLICIES))
def test_a_thawed_cache_goes_on_as_before(name, kv_dtype):
    cache, counters = filled(POLICIES[name], make_spec(batch=len(LENGTHS), kv_dtype=kv_dtype), make_stream(batch=2))
    thawed = kvjax.thaw(kvjax.freeze(cache, counters), counters.num_tokens)
    assert jax.tree.structure(thawed) == jax.tree.structure((cache, counters))
    np.testing.assert_array_equal(go_on(*thawed), go_on(cache, counters))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kv_dtype", [None, "int8", "int4"])
@pytest.mark.parametrize("window", [None, 9])
def test_a_resized_cache_has_the_same_tokens(window, kv_dtype, frozen):
    """Also through the smallest capacity of its tokens."""
    cache, counters = filled(
        kvjax.Exact(compact_every=8), make_spec(batch=2, kv_dtype=kv_dtype, window=window), make_stream(batch=2)
    )
    expected, capacity = go_on(cache, counters), cache.spec.capacity
    if frozen:
        small = kvjax.resize(kvjax.freeze(cache, counters), max(LENGTHS), 0)
        assert window is not None or kvjax.cache_bytes(small).device < kvjax.cache_bytes(cache.state).device
        cache, _ = kvjax.thaw(kvjax.resize(small, 2 * capacity, 32), counters.num_tokens)
    else:
        cache = kvjax.resize(cache, 2 * capacity, 32)
    assert cache.spec.capacity == 2 * capacity + 32
    np.testing.assert_allclose(go_on(cache, counters), expected, rtol=2e-5, atol=2e-6)


def test_tokens_without_a_slot_are_a_fault():
    cache, counters = filled(kvjax.Exact(), make_spec(batch=2), make_stream(batch=2))
    small = kvjax.resize(cache, 8, 8)
    with pytest.raises(ValueError, match="tokens were appended to a full store"):
        kvjax.raise_faults((small, counters))


@pytest.mark.parametrize("name", ["snapkv", "uniform", "chelsea"])
def test_caches_of_a_budget_are_not_resized(name):
    cache, _ = filled(POLICIES[name], make_spec(batch=2), make_stream(batch=2))
    with pytest.raises(ValueError, match="cannot be resized: only full caches and sliding windows"):
        kvjax.resize(cache, 64, 64)
