"""The inequalities of SubGen's and BalanceKV's theorems where they are not vacuous, and measured norms."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.methods.balancekv import balance
from kvjax.methods.balancekv.balancekv_theory import BalanceKVTheory
from kvjax.theory import balancekv_settings, measured_norms, subgen_settings
from tests.kvjax.support import attend_after_prompt

DIM, TOKENS, QUERIES = 16, 4096, 50
EXACT = {"sinks": 0, "recent": 0, "light_values": 0, "self_normalization": 0.0}  # Algorithms 1 of the papers


def clustered(seed, norm, tokens=TOKENS, centers=16):
    """Keys and queries of one norm around centers, and values of norms up to 1 with a common mean."""
    rng = np.random.default_rng(seed)
    center, mean = rng.normal(size=(2, centers, DIM))
    label = rng.integers(0, centers, tokens + QUERIES)
    keys = center[label] + 0.1 * rng.normal(size=(len(label), DIM))
    values = 0.5 * mean[label] + 0.3 * rng.normal(size=(len(label), DIM)) + 0.7
    keys *= norm / np.linalg.norm(keys, axis=1, keepdims=True)
    values /= np.linalg.norm(values, axis=1).max()
    return [x.astype(np.float32) for x in (keys[:tokens], values[:tokens], keys[tokens:])]


def relative_errors(outputs, keys, values, queries, value_norm):
    """Returns |z - Attn| / (|softmax|_2 value_norm) of every row and query, in float64."""
    keys, values, queries = (np.asarray(x, np.float64) for x in (keys, values, queries))
    weights = np.exp(queries @ keys.T / math.sqrt(DIM))
    softmax = weights / weights.sum(axis=1, keepdims=True)
    bound = np.linalg.norm(softmax, axis=1) * value_norm
    return np.linalg.norm(np.asarray(outputs, np.float64) - softmax @ values, axis=-1) / bound


@pytest.mark.parametrize(
    "norm, delta, epsilon, tokens",
    [
        (1.0, 0.3, 0.3, TOKENS),
        (2.0, 0.6, 0.3, TOKENS),
        pytest.param(4.0, 1.3, 0.4, 2 * TOKENS, marks=pytest.mark.heavy),
    ],
)
def test_subgen_meets_the_inequality_of_its_theorem(norm, delta, epsilon, tokens):
    """|z - Attn| <= epsilon |softmax|_2 |V|_op in 99% of all draws, with constants of 1."""
    keys, values, queries = clustered(0, norm, tokens)
    sizes = {"tokens": tokens, "head_dim": DIM, "query_norm": norm, "delta": delta}
    settings = subgen_settings(epsilon, **sizes, clusters=16, growth=None)
    assert not settings.vacuous, settings.message
    # A fortieth of the samples is too few.
    few = kvjax.SubGen(None, samples=settings.samples // 40, clusters=16, per_cluster=1, delta=delta, **EXACT)
    shares = []
    for policy in (settings.policy(clusters=16, **EXACT), few):
        outputs, state = attend_after_prompt(policy, keys, values, queries, 20)
        assert policy is few or not state.streams.table.doublings.any()  # so that every cluster has radius delta
        errors = relative_errors(outputs, keys, values, queries, np.linalg.norm(values.astype(np.float64), 2))
        shares.append(np.mean(errors <= epsilon))
    assert shares[0] >= 0.99 and shares[1] < 0.9


def walk_discrepancy(seed, c, tokens):
    """Returns the largest discrepancy of a coordinate over exp(r^2 / sqrt(D)) |v|, and the clipped decisions."""
    keys, values, queries = clustered(seed, 1.0, tokens)
    value_norm = np.linalg.norm(values, axis=1).max()
    uniforms = jax.random.uniform(jax.random.key(seed), (tokens,))
    settings = {"c": c, "key_norm": 1.0, "value_norm": value_norm}
    signs, clipped = balance.softmax_signs(uniforms, keys, values, np.ones(tokens, np.float32), **settings)
    sums = np.einsum("n,qn,nd->qd", signs, np.exp(queries @ keys.T / math.sqrt(DIM)), values)
    return np.abs(sums).max() / (math.exp(1 / math.sqrt(DIM)) * value_norm), int(clipped)


def test_balancekv_meets_the_inequality_of_its_theorem():
    """|z - Attn| <= epsilon |softmax|_2 |V|_F with the walk's measured constant, which is below the theorem's."""
    epsilon, c = 0.5, 6.0
    sizes = {"tokens": TOKENS, "head_dim": DIM, "key_norm": 1.0, "query_norm": 1.0}
    settings = balancekv_settings(epsilon, **sizes, c=c)
    assert not settings.vacuous and balancekv_settings(epsilon, **sizes).vacuous
    measured = [walk_discrepancy(seed, c, settings.batch_size) for seed in range(10)]
    assert all(discrepancy <= c and not clipped for discrepancy, clipped in measured)
    policy = BalanceKVTheory(
        3 * settings.slots // 2, bins=settings.bins, c=c, key_norm=1.0, value_exponents=(0, 0), **EXACT
    )
    for seed in range(100, 103):
        keys, values, queries = clustered(seed, 1.0)
        outputs, state = attend_after_prompt(policy, keys, values, queries, 4)
        assert state.denominator.level.max() >= 2
        errors = relative_errors(outputs, keys, values, queries, np.linalg.norm(values))
        assert errors.max() <= epsilon


def test_measured_norms_are_maxima_and_refuse_vectors_that_are_not_finite():
    vectors = np.zeros((2, 3, 1, 4), np.float32)
    vectors[1, 2, 0] = [1, 2, 2, 4]
    assert measured_norms(2 * vectors, vectors, 0.5 * vectors.astype(jnp.bfloat16)) == (5.0, 10.0, 2.5)
    nan, infinite = np.full_like(vectors, np.nan), np.full_like(vectors, np.inf)
    for name, arrays in (("key", (vectors, nan, vectors)), ("value", (vectors, vectors, infinite))):
        with pytest.raises(ValueError, match=f"{name} vectors are not all finite"):
            measured_norms(*arrays)
