"""The exact tokens with small values of SubGen and BalanceKV, unbiased sums of the others, and the bound of outputs."""

import dataclasses
import functools
import itertools
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
    *prompted, _ = kvjax.prefill(*kvjax.init(policy, spec, row_keys()), keys[:, :PROMPT], values[:, :PROMPT], lengths)
    rows = jnp.arange(len(lengths))[:, None]

    def step(state, start):
        place = lengths[:, None] + start + jnp.arange(chunk)
        return kvjax.compact(*kvjax.append(*state, keys[rows, place], values[rows, place])), None

    (later, _), _ = jax.lax.scan(step, tuple(prompted), jnp.arange(0, NEW, chunk))
    return prompted[0].state, later.state


@pytest.mark.parametrize("name, chunk", [("subgen", 6), ("subgen", 3), ("balancekv_theory", 6)])
def test_the_lightest_tokens_are_exact_and_every_other_token_is_in_the_structures_once(name, chunk):
    keys, values = stream_of(PROMPT + NEW)
    states = run(POLICIES[name], keys, values, jnp.array(LENGTHS), chunk)
    for (tokens, state), row, head in itertools.product(zip((0, NEW), states, strict=True), range(3), range(2)):
        middle = np.arange(WINDOW["sinks"], max(LENGTHS[row] + tokens - WINDOW["recent"], WINDOW["sinks"]))
        norms = np.linalg.norm(values[row, middle, head], axis=-1)
        lightest, others = np.split(middle[np.argsort(norms, kind="stable")], [LIGHT])
        slots = slice(state.window.fixed, state.window.fixed + len(lightest))
        held_keys, held_values = (np.asarray(x)[row, head, slots] for x in (state.window.keys, state.window.values))
        order = np.argsort(np.linalg.norm(held_values, axis=1))
        np.testing.assert_array_equal(held_values[order], values[row, lightest, head])
        np.testing.assert_array_equal(held_keys[order], keys[row, lightest, head])
        if name == "subgen":
            assert int(state.streams.table.count[row, head].sum()) == len(others)
            mass = np.sum(values[row, others, head].astype(np.float64) ** 2)
            np.testing.assert_allclose(state.streams.reservoir.total[row, head], mass, rtol=1e-5)
        else:
            assert int(state.numerator.trees.count[row, head].sum()) == len(others)
            assert int(state.denominator.count[row, head]) == len(others)


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
    limit = np.linalg.norm(values, axis=1).max() / share
    for own_share in (share, 0.0):
        options = {"budget": 72, "sinks": 0, "recent": 0, "light_values": 4, "self_normalization": own_share}
        policy = dataclasses.replace(POLICIES[name], **options)
        outputs, _ = attend_after_prompt(policy, keys, values, queries, 4)
        norms = np.linalg.norm(np.asarray(outputs, np.float64), axis=-1)
        assert np.isfinite(norms).all() or own_share == 0
        assert (norms.max() <= limit * (1 + 1e-5)) == (own_share > 0)


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
