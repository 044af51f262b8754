"""The exact tokens with small values of SubGen and BalanceKV, unbiased sums of the others, and the bound of outputs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.methods.balancekv.balancekv_theory import BalanceKVTheory
from kvjax.methods.subgen.reservoir import extend, init_reservoir, log_weights
from tests.kvjax.support import attend_after_prompt, make_spec, row_keys

DIM, LIGHT, PROMPT, NEW = 16, 5, 70, 30
LENGTHS = (70, 41, 3)
WINDOW = {"sinks": 2, "recent": 8, "compact_every": 6, "light_values": LIGHT}
POLICIES = {
    "subgen": kvjax.SubGen(40, **WINDOW),
    "balancekv_theory": BalanceKVTheory(100, **WINDOW),
}


def stream_of(tokens):
    """Returns random keys and values [B, T, H, D]; the norms of the values differ between heads."""
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, len(LENGTHS), tokens, 2, DIM)).astype(np.float32)
    return keys, values * rng.uniform(0.01, 1, size=(len(LENGTHS), tokens, 2, 1)).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("policy", "chunk"))
def run(policy, keys, values, lengths, chunk):
    """Returns the states after the prompt and after all tokens; compactions have `chunk` tokens."""
    spec = make_spec(prompt=PROMPT, new=NEW, head_dim=DIM, rope_frequencies=None, query_heads=2)
    empty = kvjax.init(policy, spec, row_keys())
    cache, counters, _ = kvjax.prefill(*empty, keys[:, :PROMPT], values[:, :PROMPT], lengths)
    rows = jnp.arange(len(lengths))[:, None]

    def step(state, start):
        place = lengths[:, None] + start + jnp.arange(chunk)
        return kvjax.compact(*kvjax.append(*state, keys[rows, place], values[rows, place])), None

    (later, _), _ = jax.lax.scan(step, (cache, counters), jnp.arange(0, NEW, chunk))
    return cache.state, later.state


def lightest(values, first, last, count):
    """Returns the sorted numbers of the tokens in [first, last) with the smallest norms."""
    norms = np.linalg.norm(values[first:last], axis=-1)
    return np.sort(first + np.argsort(norms, kind="stable")[:count])


@pytest.mark.parametrize("name, chunk", [("subgen", 6), ("subgen", 3), ("balancekv_theory", 6)])
def test_the_lightest_tokens_are_exact_and_every_other_token_is_in_the_structures_once(name, chunk):
    keys, values = stream_of(PROMPT + NEW)
    states = run(POLICIES[name], keys, values, jnp.array(LENGTHS), chunk)
    for tokens, state in zip((0, NEW), states, strict=True):
        for row, length in enumerate(LENGTHS):
            end = max(length + tokens - WINDOW["recent"], WINDOW["sinks"])
            for head in range(2):
                expected = lightest(values[row, :, head], WINDOW["sinks"], end, LIGHT)
                first = state.window.fixed
                held = np.asarray(state.window.values[row, head, first : first + len(expected)])
                order = np.argsort(np.linalg.norm(held, axis=1))
                by_norm = expected[np.argsort(np.linalg.norm(values[row, expected, head], axis=1))]
                np.testing.assert_array_equal(held[order], values[row, by_norm, head])
                held = np.asarray(state.window.keys[row, head, first : first + len(expected)])
                np.testing.assert_array_equal(held[order], keys[row, by_norm, head])
                others = np.setdiff1d(np.arange(WINDOW["sinks"], end), expected)
                if name == "subgen":
                    streams = state.streams
                    assert int(streams.table.count[row, head].sum()) == len(others)
                    mass = np.sum(values[row, others, head].astype(np.float64) ** 2)
                    np.testing.assert_allclose(streams.reservoir.total[row, head], mass, rtol=1e-5)
                else:
                    assert int(state.numerator.trees.count[row, head].sum()) == len(others)
                    assert int(state.denominator.count[row, head]) == len(others)


def test_light_tokens_are_at_most_a_quarter_of_the_free_slots():
    policy = kvjax.SubGen(30, sinks=2, recent=8)
    assert policy.sizes.light == 5 and policy.light_values == 32


def test_sums_of_self_normalized_subgen_are_unbiased():
    # Against float64 sums, without and with the samples in the denominator; light tokens are exact.
    rng = np.random.default_rng(3)
    keys, values = rng.normal(size=(2, 96, DIM)).astype(np.float32)
    values *= rng.uniform(0.1, 1, size=(96, 1)).astype(np.float32)
    queries = (2 * rng.normal(size=(4, DIM))).astype(np.float32)
    weights = np.exp(queries.astype(np.float64) @ keys.T.astype(np.float64) / math.sqrt(DIM))
    exact = np.concatenate([weights @ values, weights.sum(axis=1, keepdims=True)], axis=1)
    for share in (0.0, 0.75):
        policy = kvjax.SubGen(40, sinks=2, recent=4, light_values=8, self_normalization=share)
        estimates = sums_after_prompt(policy, keys, values, queries)
        deviation = estimates.std(axis=0) / math.sqrt(len(estimates))
        assert (np.abs(estimates.mean(axis=0) - exact) < 4.5 * deviation).all()


def sums_after_prompt(policy, keys, values, queries, batch=500):
    """Returns numerators and denominators [batch, Q, D + 1] of as many independent caches."""

    @jax.jit
    def sums(keys_of_rows):
        spec = kvjax.CacheSpec(batch, 1, 1, DIM, max_prompt_tokens=len(keys), max_new_tokens=8)
        repeated = [jnp.broadcast_to(x[:, None], (batch, len(x), 1, DIM)) for x in (keys, values, queries)]
        lengths = jnp.full(batch, len(keys), jnp.int32)
        cache, counters, _ = kvjax.prefill(*kvjax.init(policy, spec, keys_of_rows), *repeated[:2], lengths)
        read = kvjax.attend(cache, counters, repeated[2])
        both = jnp.concatenate([read.numerator, read.denominator[..., None]], axis=-1)
        return (both * jnp.exp(read.max)[..., None])[:, :, 0]

    return np.asarray(sums(row_keys(batch)), np.float64)


@pytest.mark.parametrize("name, share", [("subgen", 0.25), ("subgen", 0.9), ("balancekv_theory", 0.5)])
def test_an_output_is_at_most_the_largest_value_over_the_share_of_the_samples(name, share):
    # Large keys: every sum is dominated by one entry, which the other sum rarely has.
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, 128, DIM)).astype(np.float32)
    queries = (20 * rng.normal(size=(64, DIM))).astype(np.float32)
    options = {"sinks": 0, "recent": 0, "light_values": 4}
    make = functools.partial(kvjax.SubGen if name == "subgen" else BalanceKVTheory, 72, **options)
    limit = np.linalg.norm(values, axis=1).max()
    outputs, _ = attend_after_prompt(make(self_normalization=share), keys, values, queries, 4)
    norms = np.linalg.norm(np.asarray(outputs, np.float64), axis=-1)
    assert np.isfinite(norms).all() and norms.max() <= limit / share * (1 + 1e-5)
    outputs, _ = attend_after_prompt(make(self_normalization=0.0), keys, values, queries, 4)
    norms = np.linalg.norm(np.asarray(outputs, np.float64), axis=-1)
    assert not (norms <= limit / share).all()


def test_the_error_of_the_denominator_of_samples_is_within_kappa_times_the_bound_of_the_numerator():
    # For an output up to max |v|: max |v|^2 E |D_M - D|^2 <= kappa^2 mu / s sum e^2, kappa = max |v| / min |v|.
    rng = np.random.default_rng(1)
    values = rng.normal(size=(200, DIM))
    norms = rng.uniform(0.5, 2.0, size=200)
    values *= (norms / np.linalg.norm(values, axis=1))[:, None]
    weights, samples, mass = np.exp(0.5 * rng.normal(size=200)), 32, norms**2
    keys = np.repeat(weights[:, None], DIM, axis=1)

    def estimate(rng):
        reservoir = init_reservoir(samples, DIM, DIM, jnp.float32, rng)
        reservoir = extend(reservoir, jnp.asarray(keys), jnp.asarray(values), jnp.asarray(mass))
        return jnp.sum(jnp.exp(log_weights(reservoir)) * reservoir.keys[:, 0])

    estimates = np.asarray(jax.vmap(estimate)(jax.random.split(jax.random.key(0), 1000)), np.float64)
    squared = norms.max() ** 2 * (estimates - weights.sum()) ** 2
    kappa = norms.max() / norms.min()
    assert squared.mean() + 4 * squared.std() / math.sqrt(1000) <= kappa**2 * mass.sum() / samples * np.sum(weights**2)
