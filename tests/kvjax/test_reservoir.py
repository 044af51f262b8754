"""The weighted reservoir of SubGen: the law of its samples, and its float32 arithmetic."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import kvjax
from kvjax.methods.subgen.reservoir import _uniform, extend, init_reservoir, log_weights
from tests.kvjax.support import check_estimates, with_integer_keys

SLOTS, DIM, VALUE_DIM, STREAMS = 3, 4, 2, 3000
MASS = np.array([2.0, 0.0, 1.0, 4.0, 0.5, 0.0, 3.0, 1.5], np.float32)


def tokens(count, seed=0):
    """Returns keys, whose first dimension is the number of the token, and values."""
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(count, DIM)).astype(np.float32)
    keys[:, 0] = np.arange(count)
    return jnp.asarray(keys), jnp.asarray(rng.normal(size=(count, VALUE_DIM)), jnp.float32)


def empty_reservoir(seed=0, slots=SLOTS, dtype=jnp.float32):
    return init_reservoir(slots, DIM, VALUE_DIM, dtype, jax.random.key(seed))


def fed(cuts):
    """Returns the token in every slot of many streams of the same tokens, split into blocks at `cuts`."""
    keys, values = tokens(len(MASS))

    def one(rng):
        reservoir = init_reservoir(SLOTS, DIM, VALUE_DIM, jnp.float32, rng)
        for start, stop in itertools.pairwise((0, *cuts, len(MASS))):
            reservoir = extend(reservoir, keys[start:stop], values[start:stop], jnp.asarray(MASS[start:stop]))
        return reservoir.keys[:, 0].astype(jnp.int32)

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(7), STREAMS)))


@pytest.mark.parametrize("cuts", [(), (3, 6), (1, 2, 5), range(1, 8)], ids=str)
def test_samples_follow_the_masses_independently_over_slots(cuts):
    # Lemma 1, by a chi-square test of the joint outcomes of two slots.
    sampled = fed(cuts)
    possible = np.flatnonzero(MASS)
    assert np.isin(sampled[:, :SLOTS], possible).all()
    law = MASS[possible] / MASS.sum()
    for one, other in [(0, 1), (1, 2)]:
        together = np.zeros((len(MASS), len(MASS)))
        np.add.at(together, (sampled[:, one], sampled[:, other]), 1)
        observed, expected = together[np.ix_(possible, possible)], STREAMS * np.outer(law, law)
        assert stats.chisquare(observed.ravel(), expected.ravel()).pvalue > 1e-3


@settings(max_examples=20, deadline=None)
@given(mass=st.lists(st.sampled_from([0.0, 1e-3, 1.0, 50.0]), min_size=6, max_size=6), seed=st.integers(0, 2**16))
def test_slots_hold_tokens_of_the_stream_with_their_masses(mass, seed):
    keys, values = tokens(6)
    mass = np.array(mass, np.float32)
    reservoir = _extend(empty_reservoir(seed), keys, values, mass)
    # Tokens of mass zero change nothing.
    again = _extend(reservoir, keys, values, jnp.zeros(6))
    chex.assert_trees_all_equal(with_integer_keys(reservoir), with_integer_keys(again))
    np.testing.assert_allclose(reservoir.total, mass.sum(), rtol=1e-6)
    weights = np.asarray(log_weights(reservoir))
    # Slots after the samples make their number a multiple of 8 and stay empty.
    empty = slice(SLOTS if mass.any() else 0, None)
    assert len(weights) % 8 == 0 and np.isneginf(weights[empty]).all()
    if mass.any():
        source = np.asarray(reservoir.keys[:SLOTS, 0]).astype(int)
        for stored, given_tokens in ((reservoir.keys, keys), (reservoir.values, values), (reservoir.mass, mass)):
            np.testing.assert_array_equal(stored[:SLOTS], given_tokens[source])
        assert (mass[source] > 0).all()
        expected = np.log(mass.sum() / (SLOTS * mass[source].astype(np.float64)))
        np.testing.assert_allclose(weights[:SLOTS], expected, rtol=1e-5, atol=1e-5)


_extend = jax.jit(extend)


def test_the_total_includes_small_masses_after_a_large_one():
    # Each of them is below the float32 resolution of the total.
    (keys, values), mass = tokens(1000), jnp.full(1000, 1e-3)
    reservoir = _extend(empty_reservoir(), keys[:1], values[:1], np.array([1e5], np.float32))
    by_token = jax.tree.map(lambda x: x[:, None], (keys, values, mass))
    reservoir, _ = jax.lax.scan(lambda now, token: (extend(now, *token), None), reservoir, by_token)
    exact = 1e5 + np.asarray(mass, np.float64).sum()
    assert abs(float(reservoir.total) - exact) > 0.1  # the uncompensated sum
    assert abs(float(reservoir.total) + float(reservoir.remainder) - exact) < 1e-4


def test_small_uniform_numbers_have_full_precision():
    # With steps of 2^-23, probabilities of one in a million would be off by a tenth.
    drawn = np.asarray(_uniform(jax.random.key(0), (2**16,)))
    assert stats.kstest(drawn, "uniform").pvalue > 1e-3
    assert drawn.min() >= 0 and drawn.max() < 1
    assert np.mean(drawn[drawn < 2**-8] * 2**23 % 1 > 0) > 0.9


def test_invalid_masses_are_counted_and_never_sampled():
    keys, values = tokens(4)
    reservoir = _extend(empty_reservoir(), keys, values, np.array([np.nan, -1.0, np.inf, 2.0], np.float32))
    np.testing.assert_array_equal(reservoir.keys[:SLOTS], np.repeat(keys[3:], SLOTS, axis=0))
    with pytest.raises(ValueError, match="unsound=3: masses that are negative or not finite"):
        kvjax.raise_faults(reservoir)


def test_estimates_of_the_numerator_are_unbiased_with_errors_of_order_inverse_square_root():
    # Line 29 of Algorithm 1 against the exact sum.
    rng = np.random.default_rng(0)
    keys, values = (jnp.asarray(rng.normal(size=(256, dim)), jnp.float32) for dim in (DIM, VALUE_DIM))
    query = 0.5 * rng.normal(size=DIM).astype(np.float32)
    exact = np.exp(keys @ query) @ np.asarray(values, np.float64)

    def estimate(slots, rng):
        reservoir = init_reservoir(slots, DIM, VALUE_DIM, jnp.float32, rng)
        reservoir = extend(reservoir, keys, values, jnp.sum(values**2, axis=1))
        return jnp.exp(reservoir.keys @ query + log_weights(reservoir)) @ reservoir.values

    check_estimates([16, 64, 256, 1024], estimate, exact, 0.06)
