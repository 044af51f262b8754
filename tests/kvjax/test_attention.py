"""Attention over segments, options of a layer, and sliding windows, against float64 references."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.attention import attend_segments
from kvjax.cache import layer_policy, scale_queries
from kvjax.partials import merge, normalize
from kvjax.quantization import dequantize, quantize
from kvjax.segment import Segment
from kvjax.sliding_window import SlidingWindow
from pallas_kernels.weighted_decode import COMPUTE_BOUND_QUERIES, Partials
from tests.kvjax.support import (
    POLICIES,
    ROOMY,
    each,
    last_queries,
    make_spec,
    row_keys,
    softmax_attention,
)
from tests.pallas_kernels.helpers import equations

KV_HEADS = 2


def normal_numbers(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def random_arrays(seed, batch=2, tokens=1, group=1, slots=12, head_dim=8):
    rng = np.random.default_rng(seed)
    normal = functools.partial(normal_numbers, rng)
    query = normal(batch, tokens, KV_HEADS * group, head_dim)
    return query, normal(batch, KV_HEADS, slots, head_dim), normal(batch, KV_HEADS, slots, head_dim)


def reference(query, *segments, logit_cap=None, sink_logits=-np.inf):
    """Returns attention over segments with logits of moderate size, in float64."""
    numerator, denominator = 0.0, np.exp(sink_logits)
    for seg in segments:
        group, slots = query.shape[2] // seg.keys.shape[1], seg.keys.shape[2]

        def by_query_head(x, group=group):
            return np.repeat(np.asarray(x, np.float64), group, axis=1)

        keys = by_query_head(dequantize(seg.keys))
        logits = np.einsum("bthd,bhsd->bths", np.asarray(query, np.float64), keys) / np.sqrt(query.shape[3])
        logits = logits if logit_cap is None else logit_cap * np.tanh(logits / logit_cap)
        for bound, inside in ((seg.start, np.greater_equal), (seg.stop, np.less)):
            if bound is not None:
                bound = np.asarray(bound).reshape(len(query), -1)[:, :, None, None]
                logits = np.where(inside(np.arange(slots), bound), logits, -np.inf)
        log_num, log_den = seg.log_num, seg.log_num if seg.log_den is None else seg.log_den
        weights = [np.exp(logits + (0 if x is None else by_query_head(x)[:, None])) for x in (log_num, log_den)]
        if seg.values is not None:
            numerator += np.einsum("bths,bhsd->bthd", weights[0], by_query_head(dequantize(seg.values)))
        denominator = denominator + weights[1].sum(-1)
    return np.where(denominator[..., None] > 0, numerator / np.maximum(denominator, 1e-300)[..., None], 0.0)


@functools.partial(jax.jit, static_argnames="logit_cap")
def attended(query, *segments, **options):
    return normalize(attend_segments(query, segments, **options))


@pytest.mark.parametrize(
    "options", [{}, {"logit_cap": 1.5, "sink_logits": np.array([1.0, -0.5, 2.0, 0.3])}], ids=["plain", "cap and sinks"]
)
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("slots", [12, 128])  # full blocks of the sum over values, and a partial one
@pytest.mark.parametrize("sums_of", ["both", "numerator", "denominator"])
@pytest.mark.parametrize("quantized", [False, True])
def test_every_field_of_a_segment_has_its_documented_meaning(quantized, sums_of, slots, many, options):
    tokens = COMPUTE_BOUND_QUERIES // 2 if many else 3
    query, keys, _ = random_arrays(1, tokens=tokens, group=2, slots=slots)
    rng = np.random.default_rng(2)
    values = normal_numbers(rng, *keys.shape[:3], 24)
    log_num, log_den = rng.normal(size=(2, *keys.shape[:3])).astype(np.float32)
    log_num[:, :, 3], log_den[:, :, 5] = -np.inf, -np.inf
    if sums_of == "numerator":
        log_den[:] = -np.inf
    entries = keys, values
    if quantized:
        offset = rng.normal(size=(2, KV_HEADS, 8)).astype(np.float32)
        entries = quantize(jnp.asarray(keys), "int8", offset), quantize(jnp.asarray(values), "int8")
    rich = Segment(
        entries[0],
        None if sums_of == "denominator" else entries[1],
        log_num=log_num,
        log_den=log_den,
        start=np.array([[0], [4]]),
        stop=np.stack([5 + np.arange(tokens) % 7, 12 - np.arange(tokens) % 4]),
    )
    plain = Segment(keys[:, :, ::-1], values[:, :, ::-1])
    expected = reference(query, rich, plain, **options)
    assert np.abs(expected - reference(query, plain, **options)).max() > 1e-2  # the segment matters
    np.testing.assert_allclose(attended(query, rich, plain, **options), expected, rtol=2e-5, atol=2e-5)


def test_quantized_segments_of_some_heads_are_rotated_together():
    query, keys, values = random_arrays(5, group=2)
    offset = np.random.default_rng(6).normal(size=(2, 1, 8)).astype(np.float32)
    segments, expected = [Segment(keys[:, :, :4], values[:, :, :4])], []
    for head, slots in ((0, 5), (1, 12)):
        own = np.s_[:, head : head + 1, :slots]
        quantized = quantize(jnp.asarray(keys[own]), "int8", offset), quantize(jnp.asarray(values[own]), "int8")
        segments.insert(1, Segment(*quantized, kv_heads=jnp.array([head])))
        plain = Segment(keys[:, head : head + 1, :4], values[:, head : head + 1, :4])
        expected.append(reference(query[:, :, 2 * head : 2 * head + 2], Segment(*quantized), plain))
    attend = jax.jit(lambda *segments: normalize(attend_segments(jnp.asarray(query), segments, kv_heads=KV_HEADS)))
    traced = attend.trace(*segments)
    np.testing.assert_allclose(attend(*segments), np.concatenate(expected, axis=2), rtol=2e-5, atol=2e-5)
    products = [
        one.invars[1].aval.shape for one in equations(traced.jaxpr.jaxpr) if str(one.primitive) == "dot_general"
    ]
    assert products.count((8, 8)) == 2  # of all queries, and of all outputs


@pytest.mark.parametrize("how", ["range", "weights"])
def test_a_row_without_entries_is_zero_and_neutral_in_merges(how):
    query, keys, values = random_arrays(4)
    log_weights = np.zeros(keys.shape[:3])
    log_weights[0] = -np.inf
    in_range = {"start": np.array([[5], [0]]), "stop": np.array([[5], [12]])}
    segment = Segment(keys, values, **(in_range if how == "range" else {"log_num": log_weights}))
    partials, other = (attend_segments(jnp.asarray(query), (one,)) for one in (segment, Segment(keys, values)))
    assert np.isneginf(partials.max[0]).all()
    assert not np.any(partials.numerator[0]) and not np.any(partials.denominator[0])
    assert not np.any(normalize(partials)[0]) and np.any(normalize(partials)[1])
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[0]), merge(partials, other), other)
    chex.assert_tree_all_finite(normalize(merge(partials, partials)))


def test_unused_slots_may_hold_large_numbers():
    # The largest logit of all slots may be outside the range.
    query, keys, values = random_arrays(5)
    keys[:, :, 0], values[:, :, 0] = 1e4, 1e4
    output = attended(query, Segment(keys, values, start=np.array([[1], [1]])))
    np.testing.assert_allclose(output, attended(query, Segment(keys[:, :, 1:], values[:, :, 1:])), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype, tokens", [("float32", 1), ("bfloat16", 1), ("bfloat16", COMPUTE_BOUND_QUERIES)])
def test_partials_of_bfloat16_segments_are_float32(dtype, tokens):
    """Products of bfloat16 are exact in float32; only the weights of many queries are rounded, to 8 bits."""
    query, keys, values = random_arrays(7, tokens=tokens, group=2)
    query, keys, values = jnp.asarray(query, dtype), jnp.asarray(keys, "bfloat16"), jnp.asarray(values, "bfloat16")
    partials = attend_segments(query, (Segment(keys, values),))
    assert {leaf.dtype for leaf in jax.tree.leaves(partials)} == {jnp.dtype("float32")}
    assert normalize(partials, jnp.bfloat16).dtype == jnp.bfloat16
    query, keys, values = (np.asarray(x, np.float32) for x in (query, keys, values))
    error = 1e-5 if tokens == 1 else 2**-8 * np.abs(values).max()
    np.testing.assert_allclose(normalize(partials), reference(query, Segment(keys, values)), atol=error)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), order=st.permutations(range(4)), empty=st.integers(0, 4))
def test_merging_is_associative_and_commutative(seed, order, empty):
    rng = np.random.default_rng(seed)
    shapes = rng.normal(scale=20, size=(4, 1, 2, 3)), rng.normal(size=(4, 1, 2, 3, 4)), rng.uniform(1, 5, (4, 1, 2, 3))
    parts = [Partials(*map(jnp.float32, part)) for part in zip(*shapes, strict=True)]
    if empty < 4:
        none = jax.tree.map(jnp.zeros_like, parts[empty])
        parts[empty] = none._replace(max=none.max - jnp.inf)
    at_once = normalize(merge(*parts))
    a, b, c, d = (parts[i] for i in order)
    np.testing.assert_allclose(normalize(merge(merge(a, b), merge(c, d))), at_once, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(normalize(merge(a, merge(b, merge(c, d)))), at_once, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"values": np.zeros((2, 2, 11, 8))}, "values have shape"),
        ({"log_num": np.zeros((2, 2, 11))}, "log_num"),
        ({"log_den": np.zeros((2, 12))}, "log_den"),
        ({"start": np.zeros((3, 1), np.int32)}, "start"),
        ({"start": np.zeros(2, np.int32)}, "start"),
        ({"stop": np.zeros((2, 1, 1), np.int32)}, "stop"),
    ],
)
def test_segments_of_invalid_shapes_are_refused(change, message):
    _, keys, values = random_arrays(0)
    with pytest.raises(ValueError, match=message):
        Segment(keys, **({"values": values} | change))


# --- options of a layer: scale, cap, learned sinks, values of another dimension, a window ---

QUERY_HEADS, GROUP, KEY_DIM, VALUE_DIM, FIRST, LATER = 4, 2, 16, 24, (17, 6, 1), 13
SINKS = np.array([1.0, -0.5, 2.0, 0.3], np.float32)
SPECS = {
    "scale": {"scale": 0.6},
    "logit_cap": {"logit_cap": 1.5},
    "sinks": {},
    "value_dim": {"value_dim": VALUE_DIM},
    "all": {"scale": 0.6, "logit_cap": 1.5, "value_dim": VALUE_DIM},
}


def layer_spec(kind):
    frequencies = tuple((0.5 ** np.arange(KEY_DIM // 2)).tolist())
    return make_spec(prompt=20, new=LATER, head_dim=KEY_DIM, rope_frequencies=frequencies, **SPECS[kind])


def layer_sinks(kind):
    return jnp.asarray(SINKS) if kind in ("sinks", "all") else None


@functools.lru_cache
def layer_stream(value_dim, seed=3):
    """Returns correlated keys and values, and queries, all [B, N, H, ...]."""
    rng = np.random.default_rng(seed)
    normal = functools.partial(normal_numbers, rng)
    tokens = max(FIRST) + LATER
    keys = normal(3, tokens, KV_HEADS, 2) @ normal(2, KEY_DIM) + 0.3 * normal(3, tokens, KV_HEADS, KEY_DIM)
    values = keys @ normal(KEY_DIM, value_dim) / 2 + 0.3 * normal(3, tokens, KV_HEADS, value_dim)
    return keys, values, normal(3, tokens, QUERY_HEADS, KEY_DIM)


def expected_attention(query, head, keys, values, kind):
    """Returns float64 attention of a query head's query [D] to entries [N, ...]."""
    sink_logit = -np.inf if layer_sinks(kind) is None else SINKS[head]
    options = {name: SPECS[kind].get(name) for name in ("scale", "logit_cap")}
    return softmax_attention(query, keys, values, **options, sink_logit=sink_logit)


step, attend = jax.jit(kvjax.step), jax.jit(kvjax.attend)


def start(policy, spec, stream, sinks):
    """Returns the cache and the counters after the prompts."""
    keys, values, queries = (part[:, : spec.max_prompt_tokens] for part in stream)
    cache, counters = kvjax.init(policy, spec, row_keys())
    required = last_queries(cache.policy, queries, FIRST)
    return jax.jit(kvjax.prefill)(cache, counters, keys, values, jnp.array(FIRST), required, sink_logits=sinks)[:2]


def new_tokens(stream, first, count):
    place = np.array(FIRST)[:, None] + first + np.arange(count)
    keys, values, queries = (part[np.arange(3)[:, None], place] for part in stream)
    return queries, keys, values


EXACT_CASES = {
    **{f"exact-{kind}": (kvjax.Exact(compact_every=8), kind) for kind in SPECS},
    # Without eviction, positions in the reindexed cache equal positions in the text.
    **{name: (policy, "all") for name, policy in ROOMY.items()},
    # `ByHead` reorders heads, and the attention sinks with them.
    "by_head": (kvjax.ByHead((ROOMY["uniform"], ROOMY["h2o"])), "all"),
    "by_head_reversed": (kvjax.ByHead((ROOMY["h2o"], ROOMY["uniform"])), "all"),
}


@pytest.mark.parametrize(
    "case", each(EXACT_CASES, quick=EXACT_CASES.keys() - ROOMY.keys() | {"clusterkv", "streaming_llm_reindexed"})
)
def test_budgets_of_all_tokens_with_options_of_a_layer(case):
    """Attention is exact, in blocks and after compactions."""
    policy, kind = EXACT_CASES[case]
    spec, sinks = layer_spec(kind), layer_sinks(kind)
    stream = layer_stream(spec.value_width)
    cache, counters = start(policy, spec, stream, sinks)
    for first, count in ((0, 1), (1, 6), (7, 6)):
        new = new_tokens(stream, first, count)
        attended, cache, counters = step(cache, counters, *new, sink_logits=sinks)
        output = kvjax.normalize(attend(cache, counters, new[0], sink_logits=sinks))
        assert attended.shape == output.shape == (3, count, QUERY_HEADS, spec.value_width)
        for row, token, head in np.ndindex(3, count, QUERY_HEADS):
            end, query = FIRST[row] + first + token + 1, stream[2][row, FIRST[row] + first + token, head]
            for actual, last in ((attended, end), (output, FIRST[row] + first + count)):
                keys, values = (part[row, :last, head // GROUP] for part in stream[:2])
                expected = expected_attention(query, head, keys, values, kind)
                np.testing.assert_allclose(actual[row, token, head], expected, rtol=2e-5, atol=2e-5)
    kvjax.raise_faults((cache, counters))


@pytest.mark.parametrize("kind", SPECS)
def test_accumulated_attention_with_options_of_a_layer(kind):
    # Of H2O, over the prompt and decoding; attention sinks are in the denominator only.
    spec, sinks = layer_spec(kind), layer_sinks(kind)
    stream = keys, _, queries = layer_stream(spec.value_width)
    cache, counters = start(ROOMY["h2o"], spec, stream, sinks)
    for first, count in ((0, 1), (1, 4)):
        _, cache, counters = step(cache, counters, *new_tokens(stream, first, count), sink_logits=sinks)
    stored_keys = np.concatenate([cache.state.window.keys, cache.staging.keys], axis=2)
    accumulated = np.concatenate([cache.state.scores.window, cache.state.scores.staged], axis=2)
    for row, kv in np.ndindex(3, KV_HEADS):
        end = FIRST[row] + 5
        expected = np.zeros(end)
        for position, head in itertools.product(range(end), range(kv * GROUP, (kv + 1) * GROUP)):
            tokens, one_hot = keys[row, : position + 1, kv], np.eye(position + 1)
            expected[: position + 1] += expected_attention(queries[row, position, head], head, tokens, one_hot, kind)
        # Empty slots may hold copies of any token; they receive no attention.
        own = (keys[row, :end, kv][:, None] == stored_keys[row, kv]).all(axis=2)
        np.testing.assert_allclose(own @ accumulated[row, kv], expected, rtol=2e-5, atol=2e-5)
        if sinks is not None:
            assert accumulated[row, kv].sum() < 0.98 * GROUP * end  # the sinks received the remainder


COMBINED = {
    "by_head": kvjax.ByHead((POLICIES["exact"], POLICIES["uniform"])),
    "first_layers": kvjax.FirstLayers(1, POLICIES["quest"], POLICIES["exact"]),
    "by_layer": kvjax.ByLayer((POLICIES["exact"], POLICIES["uniform"])),
}


def test_the_scale_of_bfloat16_queries_is_not_rounded():
    """Gemma 2 and 3 27B have scales that bfloat16 does not represent."""
    query = jax.random.normal(jax.random.key(0), (1, 1, 8, 128), jnp.bfloat16)
    scaled = scale_queries(make_spec(head_dim=128, scale=168**-0.5, rope_frequencies=None), query)
    assert scaled.dtype == jnp.bfloat16
    wide = query.astype(jnp.float32)
    ratio = jnp.sum(scaled.astype(jnp.float32) * wide) / jnp.sum(wide * wide)
    np.testing.assert_allclose(ratio, np.sqrt(128 / 168), rtol=5e-4)


def test_layers_with_a_window_use_a_sliding_window():
    layer = {"layer": 1, "layers": 2}
    for policy in (POLICIES | COMBINED).values():
        assert layer_policy(policy, make_spec(window=5, **layer)) == SlidingWindow(5, compact_every=5)
        assert layer_policy(policy, make_spec(window=500, **layer)) == SlidingWindow(500, compact_every=8)
