"""BalanceKV: the weights of the released code and of Algorithm 1, rates, and the settings of the theorem."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.budget import abstract_cache
from kvjax.methods.balancekv import balance, merge_reduce, value_buckets
from kvjax.methods.balancekv.balancekv_theory import BalanceKVTheory
from kvjax.methods.balancekv.needles import needle_marks
from kvjax.theory import balancekv_settings
from tests.kvjax.support import (
    HEAD_DIM,
    LENGTHS,
    POLICIES,
    PROMPT,
    WINDOW,
    after,
    go,
    make_spec,
    make_stream,
    prefilled,
    prompt_of,
    read_weights,
    row_keys,
)

# --- the released code ---


def reference(**options):
    return kvjax.BalanceKV(20, **WINDOW, block_size=8, **options)


def test_reference_weights_equal_those_of_the_halvings_and_later_tokens_stay():
    stream, start = make_stream(), prefilled(POLICIES["balancekv"])
    assert start[0].state.halvings == 2 and start[0].policy.requires.entire_prompt
    weights = np.asarray(read_weights(*start))
    rngs = jax.vmap(lambda key: jax.random.split(key, 2))(row_keys())
    for row, head in np.ndindex(2, 2):
        end = LENGTHS[row]
        count = max(end - 10, 0)
        keys, values = stream.keys[row, 2 : 2 + count, head], stream.values[row, 2 : 2 + count, head]
        index, weight = np.arange(count), np.ones(count, np.float32)
        for halving, tokens in enumerate((38, 19)):
            draws = jax.random.uniform(jax.random.fold_in(rngs[row, head], halving), (-(-tokens // 8), 8))
            left = len(index)
            entries = (jnp.array(x) for x in (keys[index], values[index], weight))
            kept, weight = balance.reference_halving(
                draws[: -(-max(left, 1) // 8)], *entries, jnp.int32(left), gamma=4.0, temperature=1.0
            )
            index, weight = index[np.asarray(kept)], np.asarray(weight)
        expected = np.zeros(HEAD_DIM)
        expected[:2] = expected[max(end - 8, 2) : end] = 1
        expected[2 + index] = weight
        np.testing.assert_allclose(weights[row, head], expected, rtol=1e-5, atol=1e-6)
    _, later_weights, *_ = go(*start, after(stream, LENGTHS))
    for row, length in enumerate(LENGTHS):
        later = (np.arange(HEAD_DIM) >= length) & (np.arange(HEAD_DIM) < length + 24)
        np.testing.assert_allclose(later_weights[row, -1], np.where(later, 1.0, weights[row]), atol=1e-5)


def test_scaled_decoding_weighs_the_denominator_evenly():
    state, plain = prefilled(reference(decode="scaled")), prefilled(POLICIES["balancekv"])
    read = kvjax.attend(*state, jnp.zeros((3, 1, 4, HEAD_DIM)))
    kept = np.isfinite(plain[0].state.log_num[:, :, 10:]).sum(-1)
    window = np.minimum(LENGTHS, 10)[:, None]
    np.testing.assert_allclose((read.denominator * jnp.exp(read.max))[:, 0, ::2], window + 4 * kept, rtol=1e-5)
    np.testing.assert_allclose(read_weights(*state), read_weights(*plain), rtol=1e-5)


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


def test_needles_have_weight_one_from_layer_1_on():
    policy, stream = reference(needles=6), make_stream()
    keys, values, _ = prompt_of(stream, LENGTHS)
    lengths = jnp.array(LENGTHS)
    marks = np.zeros((3, 2, PROMPT - 2), bool)
    marks[0, 0, [3, 9, 20]] = marks[0, 1, :12] = True

    def prefill(layer, layer_carry):
        cache, counters = kvjax.init(policy, make_spec(layer=layer, layers=3), row_keys())
        return jax.jit(kvjax.prefill)(cache, counters, keys, values, lengths, None, layer_carry)

    cache, counters, carry = prefill(2, jnp.array(marks))
    np.testing.assert_array_equal(carry, marks)
    weights = np.asarray(read_weights(cache, counters))
    np.testing.assert_array_equal(weights[0, 0, [5, 11, 22]], [1, 1, 1])
    np.testing.assert_allclose(weights[0, 1, 2:8], np.ones(6), rtol=1e-6)
    np.testing.assert_array_equal(cache.state.unkept, [[0, 6], [0, 0], [0, 0]])
    # Six needles and 7 halved tokens.
    assert cache.state.window.selected == 6 + 7 + 24
    first, _, carry = prefill(0, None)
    assert carry is None and np.all(first.state.unkept == 0)
    *_, carry = prefill(1, None)
    middle = jnp.arange(PROMPT - 2) < jnp.maximum(lengths - 10, 0)[:, None]
    expected = needle_marks(jnp.array(keys[0, 2:, 1]), middle[0], 8)
    np.testing.assert_array_equal(carry[0, 1], expected)


# --- Algorithm 1 ---


def bucket_tree(rng):
    return merge_reduce.init_merge_reduce(rng, bins=4, bin_slots=8, key_dim=4, value_dim=3)


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
    # The first bucket is open below, the last one above; a norm of zero is in none.
    for bucket, members in enumerate([[1, 2, 6], [3, 4], [5, 7, 8]]):
        occupied = np.isfinite(filled.trees.log_weight[bucket])
        np.testing.assert_array_equal(filled.trees.keys[bucket][occupied], keys[members])
    assert filled.largest == pytest.approx(5.0)
    # At a largest norm of 5, a bucket up to .5 holds a tenth at most and is erased.
    erased = insert(empty, keys, values, valid, negligible=0.1)
    assert np.all(np.isneginf(erased.trees.log_weight[0])) and erased.trees.count.tolist() == [0, 2, 3]
    again = insert(erased, keys, values, valid, negligible=0.1)
    assert again.trees.count.tolist() == [0, 4, 6]


@pytest.mark.parametrize("scale", [1e-4, 30.0, 1e15])
def test_values_of_any_norm_are_balanced(scale):
    """The highest bucket takes the largest norm of a block as its bound, so that no probability is clipped."""
    stream = make_stream()
    state = prefilled(BalanceKVTheory(60, **WINDOW, light_values=0), stream._replace(values=scale * stream.values))
    kvjax.raise_faults(state)
    trees = state[0].state.numerator.trees
    assert trees.level.max() > 0 and not trees.clipped.any()
    bucket = np.isfinite(trees.log_weight).any(axis=(0, 1, 3))
    np.testing.assert_array_equal(bucket, [scale < 1, False, False, scale > 1])
    chex.assert_tree_all_finite(read_weights(*state))


@pytest.mark.heavy
def test_paper_reads_numerator_and_denominator_from_separate_trees():
    # The budget holds all tokens, so both sums are exact; values of zero are in the denominator alone.
    paper = {"light_values": 0, "self_normalization": 0.0, "value_exponents": (0, 0)}
    stream = make_stream()
    values = stream.values.copy()
    values[:, 5:9] = 0
    state = prefilled(BalanceKVTheory(200, **WINDOW, **paper), stream._replace(values=values))
    read = kvjax.attend(*state, jnp.zeros((3, 1, 4, HEAD_DIM)))
    np.testing.assert_allclose((read.denominator * jnp.exp(read.max))[:, 0, 0], LENGTHS, rtol=1e-5)
    expected = (np.arange(HEAD_DIM) < np.array(LENGTHS)[:, None]) & ~np.isin(np.arange(HEAD_DIM), range(5, 9))
    np.testing.assert_allclose(read_weights(*state)[:, 1], expected, atol=1e-6)


# --- laws and settings ---


def test_slots_of_a_rate_halve_the_prompt_and_keep_later_tokens_beside():
    spec = make_spec(batch=1, prompt=840, new=8)
    for halvings in (1, 2, 3):
        slots = 64 + (840 - 64) // 2**halvings
        for budget, expected in ((slots, halvings), (slots - 1, halvings + 1)):
            state = abstract_cache(kvjax.BalanceKV(budget), spec)[0].state
            assert state.halvings == expected
            assert state.window.selected == (840 - 64) // 2**expected + 8


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


def test_rows_of_the_papers_form_do_not_depend_on_their_batch():
    random = np.random.default_rng(0)
    scale = np.array([1e-14, 1e-3, 8, 1e14])[:, None, None, None]
    keys, values = (random.normal(size=(4, 75, 2, 24)) for _ in range(2))
    keys, values = jnp.asarray(np.minimum(scale, 8) * keys, jnp.float32), jnp.asarray(scale * values, jnp.float32)
    policy = BalanceKVTheory(40, sinks=1, recent=2, light_values=0, compact_every=8)

    def fill(rows):
        spec = kvjax.CacheSpec(len(rows), 2, 2, 24, max_prompt_tokens=75, max_new_tokens=8)
        cache, counters = kvjax.init(policy, spec, jax.random.split(jax.random.key(0), 4)[rows])
        return kvjax.prefill(cache, counters, keys[rows], values[rows], jnp.full(len(rows), 75))[0].state

    together = fill(np.arange(4))
    for row in (0, 2):
        chex.assert_trees_all_equal(kvjax.take_rows(together, np.array([row])), fill(np.array([row])))
