"""Frozen texts, which several rows continue with caches of their own."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.kvjax.support import (
    HEAD_DIM,
    POLICIES,
    ROOMY,
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
STEPS = (5, 1, 5)  # tokens of every block


def filled(policy, stream=None, **changes):
    """Returns the cache and the counters of the texts of a stream."""
    prompt = prompt_of(make_stream(batch=2) if stream is None else stream, LENGTHS)
    return begin(policy, make_spec(batch=2, **changes), row_keys(2), *prompt, LENGTHS)


def texts_of(policy, stream=None, **changes):
    """Returns the frozen texts of a policy."""
    return kvjax.freeze(*filled(policy, stream, **{"new": 0} | changes))


def run_blocks(cache, counters, stream, sizes, **options):
    """Returns the attention outputs of a stream's tokens, appended in blocks of these sizes."""
    step, outputs, start = jax.jit(kvjax.step), [], 0
    for count in sizes:
        block = [part[:, start : start + count] for part in (stream.queries, stream.keys, stream.values)]
        output, cache, counters = step(cache, counters, *block, **options)
        outputs.append(np.asarray(output))
        start += count
    kvjax.raise_faults((cache, counters))
    return np.concatenate(outputs, axis=1)


def continue_texts(text, rows, sink_logits=None, tail=None, **changes):
    """Appends tokens to tails of all rows of a text; returns their attention outputs and the tokens."""
    spec = make_spec(batch=len(rows), prompt=1, new=sum(STEPS), **changes)
    stream = make_stream(5, batch=2 * ROWS, tokens=sum(STEPS))
    stream = type(stream)(*(part[np.asarray(rows)] for part in stream))
    state = kvjax.init(tail or kvjax.Exact(compact_every=8), spec, row_keys(len(rows)))
    return run_blocks(*state, stream, STEPS, prefix=text, sink_logits=sink_logits), stream


# Every kind of store and of segments; the other policies are heavy.
QUICK = [("exact", "int8"), ("uniform", None), ("subgen_mean", "int8"), ("clusterkv", None), ("quest", "int8")]
QUICK += [("h2o", None), ("balancekv", None)]
every_policy = pytest.mark.parametrize("name, kv_dtype", each(itertools.product(POLICIES, (None, "int8")), QUICK))


@every_policy
def test_rows_of_one_text_attend_as_rows_of_their_own_texts(name, kv_dtype):
    text = texts_of(POLICIES[name], kv_dtype=kv_dtype)
    together, _ = continue_texts(text, range(2 * ROWS))
    for row in range(2 * ROWS):
        alone, _ = continue_texts(kvjax.take_rows(text, np.array([row // ROWS])), [row])
        np.testing.assert_allclose(together[row], alone[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 9, 100])
def test_text_and_tail_are_attention_to_all_tokens(window):
    stream = make_stream(batch=2)
    text, sinks = texts_of(kvjax.Exact(), stream, window=window), jnp.asarray([0.5, -jnp.inf, 2.0, 0.0])
    outputs, tails = continue_texts(text, range(2 * ROWS), sinks, window=window)
    for row, token, head in np.ndindex(2 * ROWS, sum(STEPS), 4):
        length = LENGTHS[row // ROWS]
        end = length + token + 1
        inside = slice(0 if window is None else max(0, end - window), end)
        keys, values = (
            np.concatenate([whole[row // ROWS, :length, head // 2], tail[row, :, head // 2]])[inside]
            for whole, tail in ((stream.keys, tails.keys), (stream.values, tails.values))
        )
        expected = softmax_attention(tails.queries[row, token, head], keys, values, sink_logit=float(sinks[head]))
        np.testing.assert_allclose(outputs[row, token, head], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tail", ["h2o", "chelsea"])
def test_a_tail_may_be_compressed(tail):
    text, rows = texts_of(kvjax.Exact()), range(2 * ROWS)
    outputs, expected = (continue_texts(text, rows, tail=policy)[0] for policy in (ROOMY[tail], None))
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


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


def test_a_text_has_no_staging_buffer_and_is_read_once():
    text, slots = texts_of(kvjax.Uniform(16, sinks=2, recent=4)), 16
    entries = len(LENGTHS) * 2 * slots * 2 * HEAD_DIM * 4
    assert kvjax.read_bytes(text) <= kvjax.cache_bytes(text).device < 1.2 * entries
    assert entries <= kvjax.cache_bytes(text).device


def probabilities(text):
    """Returns the probabilities of a text after a token of each row."""
    new = [part[:, :1] for part in (make_stream(batch=2).queries, *make_stream(batch=2)[:2])]
    tail = kvjax.init(kvjax.Exact(compact_every=8), make_spec(batch=2, new=8), row_keys(2))
    _, *tail = kvjax.step(*tail, *new, prefix=text)
    return kvjax.prefix_probabilities(*tail, new[0], text)


def test_misuse_is_refused():
    stream, state = make_stream(batch=2), filled(kvjax.Exact(), new=8)
    text, empty = kvjax.freeze(*state), filled(kvjax.Exact(), new=0)
    for call, message in (
        (lambda: kvjax.freeze(*kvjax.append(*state, *(x[:, :2] for x in stream[:2]))), "holds tokens in 2 slots"),
        (lambda: jax.jit(lambda *state: kvjax.freeze(*state))(*state), "outside jit"),
        (lambda: continue_texts(text, range(3)), "3 rows cannot continue 2 prefixes"),
        (lambda: continue_texts(text, range(4), window=16), "window=None differs from the cache's window=16"),
        (lambda: kvjax.append(*empty, *(x[:, :1] for x in stream[:2])), "cannot append 1 tokens to 0 staging slots"),
        (lambda: probabilities(texts_of(SNAPKV)), "with KV heads that keep every token"),
        (lambda: kvjax.raise_faults(kvjax.resize(state[0], 8, 8)), "tokens were appended to a full store"),
        *(
            (
                lambda name=name: kvjax.resize(filled(POLICIES[name])[0], 64, 64),
                "cannot be resized: only full caches and sliding windows",
            )
            for name in ("snapkv", "uniform", "chelsea")
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# --- thaw and resize ---


def go_on(cache, counters):
    """Returns attention outputs of nine further tokens."""
    return run_blocks(cache, counters, make_stream(7, batch=2, tokens=9), (3, 3, 3))


@every_policy
def test_a_thawed_cache_goes_on_as_before(name, kv_dtype):
    state = filled(POLICIES[name], kv_dtype=kv_dtype)
    thawed = kvjax.thaw(kvjax.freeze(*state), state[1].num_tokens)
    assert jax.tree.structure(thawed) == jax.tree.structure(state)
    np.testing.assert_array_equal(go_on(*thawed), go_on(*state))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kv_dtype", [None, "int8", "int4"])
@pytest.mark.parametrize("window", [None, 9])
def test_a_resized_cache_has_the_same_tokens(window, kv_dtype, frozen):
    """Also through the smallest capacity of its tokens."""
    cache, counters = filled(kvjax.Exact(compact_every=8), kv_dtype=kv_dtype, window=window)
    expected, capacity = go_on(cache, counters), cache.spec.capacity
    if frozen:
        small = kvjax.resize(kvjax.freeze(cache, counters), max(LENGTHS), 0)
        assert window is not None or kvjax.cache_bytes(small).device < kvjax.cache_bytes(cache.state).device
        cache, _ = kvjax.thaw(kvjax.resize(small, 2 * capacity, 32), counters.num_tokens)
    else:
        cache = kvjax.resize(cache, 2 * capacity, 32)
    assert cache.spec.capacity == 2 * capacity + 32
    np.testing.assert_allclose(go_on(cache, counters), expected, rtol=2e-5, atol=2e-6)
