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
from kvjax import Partials, attend, attend_segment, merge, output, segment
from pallas_kernels.weighted_decode import MANY_ROWS

KV_HEADS = 2
SEGMENTS_ONLY = settings(max_examples=25, deadline=None)


def random_arrays(seed, batch=2, tokens=1, group=1, slots=12, head_dim=8):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    query = normal(batch, tokens, KV_HEADS * group, head_dim)
    return query, normal(batch, KV_HEADS, slots, head_dim), normal(batch, KV_HEADS, slots, head_dim)


def sums(query, seg):
    """Numerator and denominator of attention over a segment, and their logarithmic scale, in float64."""
    query, keys = np.asarray(query, np.float64), np.asarray(seg.keys, np.float64)
    batch, tokens, query_heads, head_dim = query.shape
    slots, group = keys.shape[2], query_heads // keys.shape[1]
    wide = lambda x: np.repeat(np.asarray(x, np.float64), group, axis=1)[:, None]  # [B, 1, H_q, S, ...]  # noqa: E731
    weight = lambda x: 0.0 if x is None else wide(x)  # noqa: E731
    logits = np.einsum("bthd,bthsd->bths", query, np.broadcast_to(wide(keys), (batch, tokens, *wide(keys).shape[2:])))
    logits = logits / np.sqrt(head_dim)
    if seg.key_scale is not None:
        logits = logits * wide(seg.key_scale)
    read = np.ones((batch, tokens, 1, slots), bool)
    for bound, inside in ((seg.start, np.greater_equal), (seg.stop, np.less)):
        if bound is not None:
            bound = np.asarray(bound).reshape(batch, -1)[:, :, None, None]
            read = read & inside(np.arange(slots), bound)
    log_num = np.where(read, logits + weight(seg.log_num), -np.inf)
    log_den = np.where(read, logits + weight(seg.log_num if seg.log_den is None else seg.log_den), -np.inf)
    log_num = np.full_like(log_num, -np.inf) if seg.feeds == "denominator" else log_num
    log_den = np.full_like(log_den, -np.inf) if seg.feeds == "numerator" else log_den
    scale = np.maximum(np.maximum(log_num, log_den).max(-1), -1e300)
    weights = np.exp(log_num - scale[..., None])
    if seg.value_scale is not None:
        weights = weights * wide(seg.value_scale)
    values = np.zeros_like(keys) if seg.values is None else np.asarray(seg.values, np.float64)
    wide_values = np.broadcast_to(wide(values), (batch, tokens, *wide(values).shape[2:]))
    return np.einsum("bths,bthsd->bthd", weights, wide_values), np.exp(log_den - scale[..., None]).sum(-1), scale


def reference(query, *segments):
    parts = [sums(query, one) for one in segments]
    scale = functools.reduce(np.maximum, [part[2] for part in parts])
    num = sum(part[0] * np.exp(part[2] - scale)[..., None] for part in parts)
    den = sum(part[1] * np.exp(part[2] - scale) for part in parts)
    return np.where(den[..., None] > 0, num / np.where(den > 0, den, 1)[..., None], 0.0)


@jax.jit
def _attended(query, segments):
    return output(attend(query, segments))


def attended(query, *segments):
    return _attended(query, segments)


@pytest.mark.parametrize("tokens, group, head_dim", [(1, 1, 4), (3, 1, 8), (1, 4, 8), (2, 2, 16)])
@SEGMENTS_ONLY
@given(seed=st.integers(0, 2**16), cuts=st.lists(st.integers(0, 12), min_size=3, max_size=3))
def test_any_split_by_ranges_gives_the_same_attention(tokens, group, head_dim, seed, cuts):
    query, keys, values = random_arrays(seed, tokens=tokens, group=group, head_dim=head_dim)
    log_weight = np.random.default_rng(seed).normal(size=keys.shape[:3]).astype(np.float32)
    bounds = np.array([0, *sorted(cuts), 12], np.int32)
    parts = [
        segment(keys, values, log_num=log_weight, start=np.array([a, a]), stop=np.array([b, b]))
        for a, b in itertools.pairwise(bounds)
    ]
    whole = segment(keys, values, log_num=log_weight)
    np.testing.assert_allclose(attended(query, *parts), attended(query, whole), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(attended(query, whole), reference(query, whole), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cuts", [(0, 1, 12), (0, 5, 6, 12)])
def test_any_split_into_buffers_gives_the_same_attention(cuts):
    query, keys, values = random_arrays(9, tokens=2, group=2)
    parts = [segment(keys[:, :, a:b], values[:, :, a:b]) for a, b in itertools.pairwise(cuts)]
    whole = attended(query, segment(keys, values))
    np.testing.assert_allclose(attended(query, *parts), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("slots", [12, 128])  # whole blocks of the values' sum and a part of one
@pytest.mark.parametrize("feeds", ["both", "numerator", "denominator"])
def test_every_field_of_a_segment_means_what_it_says(feeds, slots, many):
    tokens = MANY_ROWS // 2 if many else 3
    query, keys, values = random_arrays(1, tokens=tokens, group=2, slots=slots)
    rng = np.random.default_rng(2)
    weights = lambda: rng.normal(size=keys.shape[:3]).astype(np.float32)  # noqa: E731
    log_num, log_den = weights(), weights()
    log_num[:, :, 3], log_den[:, :, 5] = -np.inf, -np.inf
    rich = segment(
        keys,
        None if feeds == "denominator" else values,
        log_num=log_num,
        log_den=log_den,
        key_scale=weights(),
        value_scale=weights(),
        start=np.array([0, 4]),
        stop=np.stack([5 + np.arange(tokens) % 7, 12 - np.arange(tokens) % 4]),
        feeds=feeds,
    )
    plain = segment(keys[:, :, ::-1], values[:, :, ::-1])
    expected = reference(query, rich, plain)
    assert np.abs(expected - reference(query, plain)).max() > 1e-2  # the segment matters
    np.testing.assert_allclose(attended(query, rich, plain), expected, rtol=2e-5, atol=2e-5)


def test_bounds_per_row_equal_bounds_per_query():
    query, keys, values = random_arrays(3, tokens=4, group=2)
    start, stop = np.array([2, 0]), np.array([9, 12])
    by_row = attended(query, segment(keys, values, start=start, stop=stop))
    spread = lambda bound: np.repeat(bound[:, None], 4, axis=1)  # noqa: E731
    by_query = attended(query, segment(keys, values, start=spread(start), stop=spread(stop)))
    np.testing.assert_array_equal(by_row, by_query)
    cut = np.stack([attended(query[:1], segment(keys[:1, :, 2:9], values[:1, :, 2:9]))[0]])
    np.testing.assert_allclose(by_row[:1], cut, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["range", "weights"])
def test_a_row_without_entries_gives_zero_and_merges_away(how):
    query, keys, values = random_arrays(4)
    if how == "range":
        empty = segment(keys, values, start=np.array([5, 0]), stop=np.array([5, 12]))
    else:
        empty = segment(
            keys, values, log_num=np.where(np.arange(2)[:, None, None] == 0, -np.inf, np.zeros(keys.shape[:3]))
        )
    partials = attend_segment(jnp.asarray(query), empty)
    assert np.isneginf(partials.max[0]).all() and not np.any(partials.num[0]) and not np.any(partials.den[0])
    assert not np.any(output(partials)[0]) and np.any(output(partials)[1])
    other = attend_segment(jnp.asarray(query), segment(keys, values))
    chex.assert_trees_all_equal(
        jax.tree.map(lambda x: x[0], merge(partials, other)), jax.tree.map(lambda x: x[0], other)
    )
    chex.assert_tree_all_finite(output(merge(partials, partials)))


def test_a_hidden_slot_may_hold_a_huge_number():
    # Unused capacity must be finite, not small: the largest logit may lie outside the range.
    query, keys, values = random_arrays(5)
    keys[:, :, 0], values[:, :, 0] = 1e4, 1e4
    shown = attended(query, segment(keys, values, start=np.array([1, 1])))
    np.testing.assert_allclose(shown, attended(query, segment(keys[:, :, 1:], values[:, :, 1:])), rtol=1e-5, atol=1e-6)


def test_keys_and_queries_of_norm_200_stay_finite_and_exact():
    query, keys, values = random_arrays(6, group=2)
    query, keys = (200 * x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, keys))
    seg = segment(keys, values)
    assert np.abs(reference(query, seg)).max() > 0.1
    both = attended(query, segment(keys[:, :, :6], values[:, :, :6]), segment(keys[:, :, 6:], values[:, :, 6:]))
    # Logits reach 14000, where a float32 step is 1e-3.
    np.testing.assert_allclose(attended(query, seg), reference(query, seg), atol=5e-3)
    np.testing.assert_allclose(both, reference(query, seg), atol=5e-3)


def test_bfloat16_storage_gives_float32_partials_of_what_is_stored():
    query, keys, values = random_arrays(7, group=2)
    stored = segment(jnp.asarray(keys, jnp.bfloat16), jnp.asarray(values, jnp.bfloat16))
    for q in (jnp.asarray(query), jnp.asarray(query, jnp.bfloat16)):
        partials = attend(q, (stored,))
        assert {leaf.dtype for leaf in jax.tree.leaves(partials)} == {jnp.dtype("float32")}
        read_back = segment(np.asarray(stored.keys, np.float32), np.asarray(stored.values, np.float32))
        np.testing.assert_allclose(output(partials), reference(np.asarray(q, np.float32), read_back), atol=1e-5)
        assert output(partials, jnp.bfloat16).dtype == jnp.bfloat16


def test_many_bfloat16_queries_are_multiplied_as_they_are():
    query, keys, values = random_arrays(7, tokens=MANY_ROWS, group=2)
    low = lambda x: jnp.asarray(x, jnp.bfloat16)  # noqa: E731
    partials = attend(low(query), (segment(low(keys), low(values)),))
    assert {leaf.dtype for leaf in jax.tree.leaves(partials)} == {jnp.dtype("float32")}
    read_back = segment(np.asarray(low(keys), np.float32), np.asarray(low(values), np.float32))
    # Products of bfloat16 are exact in float32; only the weights are rounded, to 8 bits, before they meet the values.
    np.testing.assert_allclose(
        output(partials), reference(np.asarray(low(query), np.float32), read_back), atol=2**-8 * np.abs(values).max()
    )


def test_weights_of_one_are_the_library_s_attention():
    query, keys, values = random_arrays(8, tokens=3, group=2)
    weighted = attended(
        query, segment(keys, values, log_num=np.zeros(keys.shape[:3]), log_den=np.zeros(keys.shape[:3]))
    )
    library = jax.nn.dot_product_attention(jnp.asarray(query), keys.swapaxes(1, 2), values.swapaxes(1, 2))
    np.testing.assert_allclose(weighted, library, rtol=1e-5, atol=1e-6)


@SEGMENTS_ONLY
@given(seed=st.integers(0, 2**16), counts=st.lists(st.integers(1, 5), min_size=12, max_size=12))
def test_duplicates_fold_into_one_slot_of_their_number(seed, counts):
    query, keys, values = random_arrays(seed, group=2)
    expanded = segment(np.repeat(keys, counts, axis=2), np.repeat(values, counts, axis=2))
    log_count = np.broadcast_to(np.log(np.array(counts, np.float32)), keys.shape[:3])
    folded = attended(query, segment(keys, values, log_num=np.array(log_count)))
    np.testing.assert_allclose(folded, reference(query, expanded), rtol=1e-5, atol=1e-5)


@SEGMENTS_ONLY
@given(seed=st.integers(0, 2**16), order=st.permutations(range(4)), empty=st.integers(0, 4))
def test_merging_is_associative_and_commutative(seed, order, empty):
    rng = np.random.default_rng(seed)
    part = lambda: Partials(  # noqa: E731
        jnp.asarray(rng.normal(scale=20, size=(1, 2, 3)), jnp.float32),
        jnp.asarray(rng.normal(size=(1, 2, 3, 4)), jnp.float32),
        jnp.asarray(rng.uniform(1, 5, size=(1, 2, 3)), jnp.float32),
    )
    parts = [part() for _ in range(4)]
    if empty < 4:
        parts[empty] = jax.tree.map(jnp.zeros_like, parts[empty])
        parts[empty] = Partials(jnp.full((1, 2, 3), -jnp.inf), parts[empty].num, parts[empty].den)
    at_once = output(merge(*parts))
    a, b, c, d = (parts[i] for i in order)
    np.testing.assert_allclose(output(merge(merge(a, b), merge(c, d))), at_once, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(output(merge(a, merge(b, merge(c, d)))), at_once, rtol=1e-4, atol=1e-6)


def test_merging_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        merge()


@pytest.mark.parametrize("query_shape", [(3, 1, 2, 8), (2, 1, 2, 16), (2, 1, 3, 8)], ids=["batch", "head_dim", "heads"])
def test_queries_that_do_not_fit_are_refused(query_shape):
    _, keys, values = random_arrays(0)
    with pytest.raises(ValueError, match="queries"):
        attend(jnp.zeros(query_shape), (segment(keys, values),))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"values": np.zeros((2, 2, 11, 8))}, "values have shape"),
        ({"values": None}, "needs values"),
        ({"log_num": np.zeros((2, 2, 11))}, "log_num"),
        ({"log_den": np.zeros((2, 12))}, "log_den"),
        ({"key_scale": np.zeros((2, 1, 12))}, "key_scale"),
        ({"value_scale": np.zeros((2, 2, 13))}, "value_scale"),
        ({"start": np.zeros(3, np.int32)}, "start"),
        ({"stop": np.zeros((2, 1, 1), np.int32)}, "stop"),
        ({"feeds": "nothing"}, "feeds='nothing'"),
    ],
)
def test_segments_that_do_not_fit_are_refused(change, message):
    _, keys, values = random_arrays(0)
    with pytest.raises(ValueError, match=message):
        segment(keys, **({"values": values} | change))


def test_bytes_of_a_segment_are_all_its_buffers():
    keys = jnp.zeros((2, 2, 12, 8), jnp.bfloat16)
    one = segment(keys, keys, log_num=jnp.zeros((2, 2, 12)), stop=jnp.zeros(2, jnp.int32))
    assert kvjax.segment_bytes(one, one) == 2 * (2 * 2 * 2 * 12 * 8 * 2 + 2 * 2 * 12 * 4 + 2 * 4)


@pytest.mark.parametrize("tokens, group", [(1, 1), (3, 2)])
def test_a_slope_adds_to_values_what_its_query_gives_up_to_its_limit(tokens, group):
    query, keys, values = random_arrays(4, tokens=tokens, group=group)
    batch, dim = 2, keys.shape[-1]
    rng = np.random.default_rng(5)
    slope = rng.normal(size=(batch, KV_HEADS, dim, dim)).astype(np.float32)
    limit = np.array([[0.0, 0.3], [2.0, 1e6]], np.float32)
    weights = rng.normal(size=keys.shape[:3]).astype(np.float32)
    sloped = segment(keys, values, log_num=weights, slope=jnp.asarray(slope), slope_limit=jnp.asarray(limit))
    plain = segment(keys[:, :, :5], values[:, :, :5])
    found = attended(query, sloped, plain)
    for row, token, head in np.ndindex(batch, tokens, query.shape[2]):
        kv, q = head // group, query[row, token, head].astype(np.float64)
        change = slope[row, kv] @ q / np.sqrt(dim)
        # Linear where it is small beside the limit, of the limit's size where it is large.
        change *= limit[row, kv] / np.sqrt(change @ change + limit[row, kv] ** 2)
        both_keys = np.concatenate([keys[row, kv], keys[row, kv, :5]])
        both_values = np.concatenate([values[row, kv] + change, values[row, kv, :5]])
        weight = np.exp(both_keys @ q / np.sqrt(dim) + np.concatenate([weights[row, kv], np.zeros(5)]))
        np.testing.assert_allclose(found[row, token, head], weight @ both_values / weight.sum(), atol=1e-5)


def test_a_slope_needs_its_limit_and_both_sums():
    _, keys, values = random_arrays(0)
    slope, limit = jnp.zeros((2, KV_HEADS, 8, 8)), jnp.zeros((2, KV_HEADS))
    for others in ({"slope": slope}, {"slope": slope, "slope_limit": limit, "feeds": "numerator"}):
        with pytest.raises(ValueError, match="a slope needs slope_limit"):
            segment(keys, values, **others)
