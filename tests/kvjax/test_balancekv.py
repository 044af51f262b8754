"""BalanceKV: its error, the weights of its variants, and the settings of its theorem."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import kvjax
from kvjax.policies.balancekv_paper import BalanceKVPaper
from kvjax.policies.balancekv_reference import BalanceKVReference
from kvjax.structures import balance, merge_reduce, value_buckets
from kvjax.structures.needles import needle_marks
from kvjax.theory import balancekv_settings
from tests.kvjax.support import (
    HEAD_DIM,
    LENGTHS,
    POLICIES,
    PROMPT,
    after,
    begin,
    decoded,
    go,
    make_spec,
    make_stream,
    prefilled,
    prompt_of,
    read_weights,
    row_keys,
    softmax_attention,
)

SMALL = {"sinks": 2, "recent": 8, "compact_every": 8}


# --- error at equal bytes ---


def make_clusters(seed, tokens, head_dim, norm):
    """Keys and values in tight clusters, with norms as in the experiments."""
    rng = np.random.default_rng(seed)
    centers, means = rng.normal(size=(2, 64, head_dim))
    cluster = rng.integers(0, 64, tokens)
    keys = centers[cluster] + 0.1 * rng.normal(size=(tokens, head_dim))
    values = means[cluster] + 0.3 * rng.normal(size=(tokens, head_dim))
    return [
        (norm * x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
        for x, norm in ((keys, norm), (values, norm / 5))
    ]


@pytest.mark.parametrize("walk, min_gain", [("pairs", 0.5), pytest.param("streaming", 0.3, marks=pytest.mark.heavy)])
def test_the_error_is_below_that_of_uniform_sampling_at_equal_bytes(walk, min_gain):
    seeds, tokens, head_dim = 6, 1024, 32
    spec = kvjax.CacheSpec(seeds, 1, 1, head_dim, max_prompt_tokens=tokens, max_new_tokens=1)
    data = [make_clusters(seed, tokens + 32, head_dim, 2.0) for seed in range(seeds)]
    keys, values = (np.stack(part)[:, :, None] for part in zip(*data, strict=True))
    limit = spec.full_cache_bytes(tokens) // 4
    sizes = {"sinks": 0, "recent": 0, "compact_every": 1}

    @functools.partial(jax.jit, static_argnames="policy")
    def attend(policy, keys, values, queries):
        lengths = jnp.full(seeds, tokens, jnp.int32)
        cache, _ = kvjax.prefill(kvjax.init(policy, spec, row_keys(seeds)), keys, values, lengths)
        return kvjax.normalize(kvjax.attend(cache, queries)), cache

    def errors(make):
        outputs, cache = attend(
            kvjax.fit_bytes(make, spec, limit), keys[:, :tokens], values[:, :tokens], keys[:, tokens:]
        )
        kvjax.raise_faults(cache)
        assert kvjax.cache_bytes(cache).device <= seeds * limit
        total = np.zeros(seeds)
        for seed, number in np.ndindex(seeds, 32):
            query = keys[seed, tokens + number, 0]
            exact = softmax_attention(query, keys[seed, :tokens, 0], values[seed, :tokens, 0])
            total[seed] += np.linalg.norm(outputs[seed, number, 0] - exact) / np.linalg.norm(exact) / 32
        return total

    uniform, balanced = (
        functools.partial(kvjax.Uniform, **sizes),
        functools.partial(kvjax.BalanceKV, walk=walk, **sizes),
    )
    gains = np.log(errors(uniform) / errors(balanced))
    low, _ = stats.t.interval(0.95, seeds - 1, gains.mean(), stats.sem(gains))
    assert low > min_gain


# --- the released code ---


def reference(**options):
    return BalanceKVReference(20, **SMALL, block_size=8, **options)


def test_reference_weights_equal_those_of_the_halvings():
    stream, cache = make_stream(), prefilled(POLICIES["balancekv_reference"])
    assert cache.state.halvings == 2
    weights = np.asarray(read_weights(cache))
    rngs = jax.vmap(lambda key: jax.random.split(key, 2))(row_keys())
    for row, head in np.ndindex(2, 2):
        end = LENGTHS[row]
        count = max(end - 10, 0)
        keys, values = stream.keys[row, 2 : 2 + count, head], stream.values[row, 2 : 2 + count, head]
        index, weight = np.arange(count), np.ones(count, np.float32)
        for halving, tokens in enumerate((38, 19)):
            draws = jax.random.uniform(jax.random.fold_in(rngs[row, head], halving), (-(-tokens // 8), 8))
            settings = {"gamma": 4.0, "temperature": 1.0}
            kept, weight = balance.reference_halving(
                draws[: -(-max(len(index), 1) // 8)], jnp.array(keys[index]), jnp.array(values[index]),
                jnp.array(weight), jnp.int32(len(index)), **settings,
            )  # fmt: skip
            index, weight = index[np.asarray(kept)], np.asarray(weight)
        expected = np.zeros(HEAD_DIM)
        expected[:2] = expected[max(end - 8, 2) : end] = 1
        expected[2 + index] = weight
        np.testing.assert_allclose(weights[row, head], expected, rtol=1e-5, atol=1e-6)


def test_reference_keeps_all_later_tokens():
    policy = POLICIES["balancekv_reference"]
    start = prefilled(policy)
    before = np.asarray(read_weights(start))
    _, _, weights = go(start, after(make_stream(), LENGTHS))
    for row, length in enumerate(LENGTHS):
        later = (np.arange(HEAD_DIM) >= length) & (np.arange(HEAD_DIM) < length + 24)
        np.testing.assert_allclose(weights[row, -1], np.where(later, 1.0, before[row]), atol=1e-5)
    assert policy.requires.entire_prompt


def test_scaled_decoding_weighs_the_denominator_evenly():
    cache, plain = prefilled(reference(decode="scaled")), prefilled(POLICIES["balancekv_reference"])
    read = kvjax.attend(cache, jnp.zeros((3, 1, 4, HEAD_DIM)))
    kept = np.isfinite(plain.state.log_num[:, :, 10:]).sum(-1)
    window = np.minimum(LENGTHS, 10)[:, None]
    np.testing.assert_allclose((read.denominator * jnp.exp(read.max))[:, 0, ::2], window + 4 * kept, rtol=1e-5)
    np.testing.assert_allclose(read_weights(cache), read_weights(plain), rtol=1e-5)


def expected_marks(keys, block, distance):
    marked = np.zeros(len(keys), bool)
    for begin_at in range(0, len(keys), block):
        part = keys[begin_at : begin_at + block].astype(np.float64)
        marked[begin_at : begin_at + block] = part @ part.sum(0) / len(part) + 1e-8 <= 0
    near = np.abs(np.arange(len(keys))[:, None] - np.flatnonzero(marked)) <= distance
    return near.any(1)


@pytest.mark.parametrize("count", [1, 40, 300])
def test_needle_marks_equal_those_of_the_definition(count):
    rng = np.random.default_rng(count)
    keys = rng.normal(size=(300, 16)) + 1.5
    keys[rng.integers(0, 300, 2)] *= -1
    keys[150] = 0
    marks = jax.jit(needle_marks, static_argnums=2)(jnp.array(keys, jnp.float32), jnp.arange(300) < count, 64)
    np.testing.assert_array_equal(marks[:count], expected_marks(keys[:count], 64, 25))
    assert not np.any(marks[count:])


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_needles_have_weight_one_from_layer_1_on(inside):
    policy, stream = reference(needles=6, needles_inside=inside), make_stream()
    keys, values, _ = prompt_of(stream, LENGTHS)
    lengths = jnp.array(LENGTHS)
    marks = np.zeros((3, 2, PROMPT - 2), bool)
    marks[0, 0, [3, 9, 20]] = marks[0, 1, :12] = True

    def prefill(layer, layer_carry):
        cache = kvjax.init(policy, make_spec(layer=layer, layers=3), row_keys())
        return jax.jit(kvjax.prefill)(cache, keys, values, lengths, None, layer_carry)

    cache, carry = prefill(2, jnp.array(marks))
    np.testing.assert_array_equal(carry, marks)
    weights = np.asarray(read_weights(cache))
    np.testing.assert_array_equal(weights[0, 0, [5, 11, 22]], [1, 1, 1])
    np.testing.assert_allclose(weights[0, 1, 2:8], np.ones(6), rtol=1e-6)
    np.testing.assert_array_equal(cache.state.unkept, [[0, 6], [0, 0], [0, 0]])
    # Six needles and 7 halved tokens, or 3 where needles take slots of the budget.
    assert cache.state.window.keys.shape[2] == 10 + 6 + (3 if inside else 7) + 24
    first, carry = prefill(0, None)
    assert carry is None and np.all(first.state.unkept == 0)
    _, carry = prefill(1, None)
    middle = jnp.arange(PROMPT - 2) < jnp.maximum(lengths - 10, 0)[:, None]
    expected = needle_marks(jnp.array(keys[0, 2:, 1]), middle[0], 8)
    np.testing.assert_array_equal(carry[0, 1], expected)


# --- Algorithm 1 ---


def bucket_tree(rng):
    return merge_reduce.init_merge_reduce(
        rng, bins=4, bin_slots=8, key_dim=4, value_dim=3, tokens=64, eager=True, conserves_mass=False
    )


@functools.partial(jax.jit, static_argnames="negligible")
def insert(buckets, keys, values, valid, negligible=0.0):
    def halve(limit):
        return functools.partial(balance.softmax_balance, c=1.0, key_norm=3.0, value_norm=limit)

    return value_buckets.insert(buckets, keys, values, valid, halve=halve, negligible=negligible)


def test_values_go_to_the_bucket_of_their_norm():
    rng = np.random.default_rng(0)
    norms = np.array([0, 0.3, 0.5, 0.6, 1.0, 1.7, 0.2, 3.0, 5.0, 0.9], np.float32)
    direction = rng.normal(size=(10, 3))
    values = (norms[:, None] * direction / np.linalg.norm(direction, axis=1, keepdims=True)).astype(np.float32)
    keys = rng.normal(size=(10, 4)).astype(np.float32)
    valid = np.arange(10) != 9
    empty = value_buckets.init_value_buckets(jax.random.key(0), lowest=-1, buckets=3, init_tree=bucket_tree)
    filled = insert(empty, keys, values, valid)
    for bucket, members in enumerate([[1, 2], [3, 4], [5]]):
        occupied = np.isfinite(filled.trees.log_weight[bucket])
        np.testing.assert_array_equal(filled.trees.keys[bucket][occupied], keys[members])
    assert filled.outside == 3 and filled.largest == pytest.approx(5.0)
    with pytest.raises(ValueError, match="outside the buckets"):
        kvjax.raise_faults(filled)
    # At a largest norm of 5, a bucket up to .5 holds a tenth at most and is erased; smaller norms cause no fault.
    erased = insert(empty, keys, values, valid, negligible=0.1)
    assert np.all(np.isneginf(erased.trees.log_weight[0])) and erased.trees.count.tolist() == [0, 2, 1]
    assert erased.outside == 2
    again = insert(erased, keys, values, valid, negligible=0.1)
    assert again.trees.count.tolist() == [0, 4, 2]


@pytest.mark.heavy
def test_paper_reads_numerator_and_denominator_from_separate_trees():
    # The budget holds all tokens, so both sums are exact; values of zero are in the denominator alone.
    stream, policy = make_stream(), BalanceKVPaper(200, **SMALL, value_exponents=(0, 0))
    values = stream.values.copy()
    values[:, 5:9] = 0
    keys, padded, _ = prompt_of(stream._replace(values=values), LENGTHS)
    cache = begin(policy, make_spec(), row_keys(), keys, padded, stream.queries, LENGTHS)
    read = kvjax.attend(cache, jnp.zeros((3, 1, 4, HEAD_DIM)))
    np.testing.assert_allclose((read.denominator * jnp.exp(read.max))[:, 0, 0], LENGTHS, rtol=1e-5)
    expected = (np.arange(HEAD_DIM) < np.array(LENGTHS)[:, None]) & ~np.isin(np.arange(HEAD_DIM), range(5, 9))
    np.testing.assert_allclose(read_weights(cache)[:, 1], expected, atol=1e-6)


@pytest.mark.heavy
def test_paper_weights_are_powers_of_two():
    trees = decoded(POLICIES["balancekv_paper"])[0].state
    for tree in (trees.numerator.trees, trees.denominator):
        log_weight = np.asarray(tree.log_weight).reshape(-1, 3, 11)
        level = np.asarray(tree.level).reshape(-1, 3)
        occupied = np.isfinite(log_weight)
        assert occupied.any() and level.max() > 0
        expected = np.broadcast_to(np.log(2) * level[..., None], occupied.shape)
        np.testing.assert_allclose(log_weight[occupied], expected[occupied], rtol=1e-6)


# --- laws and settings ---


@pytest.mark.parametrize("walk", ["pairs", "streaming"])
def test_weights_sum_to_the_tokens(walk):
    _, _, weights = decoded(kvjax.BalanceKV(30, **SMALL, walk=walk))
    for row, length in enumerate(LENGTHS):
        total = length + 1 + np.arange(24)
        np.testing.assert_allclose(weights[row].sum(-1), total[:, None] + np.zeros(2), rtol=1e-3)


def test_rows_and_heads_draw_different_tokens():
    stream, policy = make_stream(), POLICIES["balancekv_pairs"]
    one = stream.row(0)
    same = stream._replace(
        keys=np.broadcast_to(one.keys[:, :, :1], stream.keys.shape), values=np.repeat(one.values, 3, axis=0)
    )
    cache = prefilled(policy, same, lengths=(37,) * 3)
    kept = np.asarray(read_weights(cache)).reshape(-1, HEAD_DIM) > 0
    assert len(np.unique(kept, axis=0)) == 6


def test_one_trace_compacts_a_long_stream():
    policy = kvjax.BalanceKV(96, sinks=0, recent=0, compact_every=16)
    spec = kvjax.CacheSpec(1, query_heads=1, kv_heads=1, head_dim=8, max_prompt_tokens=1, max_new_tokens=400)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(cache, keys, values):
        return kvjax.compact(kvjax.append(cache, keys, values))

    cache = kvjax.init(policy, spec, row_keys(1))
    for number in range(25):
        keys, values = jax.random.normal(jax.random.key(number), (2, 1, 16, 1, 8))
        cache = step(cache, keys, values)
    kvjax.raise_faults(cache)
    log_weight = np.asarray(cache.state.tree.log_weight)
    np.testing.assert_allclose(np.exp(log_weight).sum(), 400, rtol=1e-5)
    assert np.isfinite(log_weight).mean() > 0.9


def test_settings_of_the_theorem_report_whether_they_are_vacuous():
    settings = functools.partial(balancekv_settings, head_dim=128, query_norm=1.0)
    useful = settings(0.5, tokens=2**40, key_norm=1.0)
    c = 30 * np.log(2**40 * 128 * 40 / 0.1)
    assert not useful.vacuous and useful.c == pytest.approx(c)
    assert useful.batch_size == pytest.approx(40 * np.sqrt(128) * c * np.exp(2 / np.sqrt(128)) / 0.5, rel=1e-6)
    assert useful.slots == useful.bins * useful.batch_size // 2
    halved = settings(0.25, tokens=2**40, key_norm=1.0)
    assert halved.batch_size == pytest.approx(2 * useful.batch_size, rel=1e-6)
    vacuous = settings(0.5, tokens=2**17, key_norm=15.0)
    assert vacuous.vacuous and "vacuous" in vacuous.message and "vacuous" not in useful.message
    assert settings(0.5, tokens=2**17, key_norm=1e4).vacuous
    for numbers, message in (({"epsilon": 0.0}, "epsilon=0"), ({"epsilon": 0.1, "delta": 2.0}, "delta=2")):
        with pytest.raises(ValueError, match=message):
            settings(**numbers, tokens=10, key_norm=1.0)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kvjax.BalanceKV(20, walk="best", **SMALL), r"walk='best'.*'pairs'"),
        (lambda: kvjax.BalanceKV(10, **SMALL), "budget=10"),
        (lambda: kvjax.BalanceKV(20, block_size=1, **SMALL), "block_size=1"),
        (lambda: BalanceKVReference(20, block_size=1, **SMALL), "block_size=1"),
        (lambda: BalanceKVReference(20, decode="log", **SMALL), "decode='log'"),
        (lambda: BalanceKVReference(20, needles=10, needles_inside=True, **SMALL), "needles=10"),
        (lambda: BalanceKVPaper(20, epsilon=0.1, **SMALL), "epsilon=0.1 needs a bound .*; pass key_norm"),
        (lambda: BalanceKVPaper(20, value_exponents=(1, 0), **SMALL), r"value_exponents=\(1, 0\)"),
        (lambda: kvjax.BalanceKV(15, **SMALL).init(make_spec(), row_keys()), "54 tokens"),
        (lambda: kvjax.BalanceKV(20, bins=4, **SMALL).init(make_spec(), row_keys()), "in 4 bins"),
    ],
)
def test_invalid_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
