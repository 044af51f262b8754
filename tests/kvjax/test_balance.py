"""Walks and halvings of BalanceKV against definitions and golden runs of the released code."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.methods.balancekv import balance

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"

signs_of = jax.jit(balance.softmax_signs, static_argnames="block")
softmax_balance = jax.jit(balance.softmax_balance)
exact_halving = jax.jit(balance.exact_halving)


def tokens(seed=0, count=32, key_norm=1.0, value_norm=1.0, head_dim=16, value_dim=8):
    rng = np.random.default_rng(seed)

    def vectors(dim, norm):
        x = rng.normal(size=(count, dim))
        return (norm * x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)

    return vectors(head_dim, key_norm), vectors(value_dim, value_norm)


# --- Algorithm 2 ---


def plain_signs(uniforms, keys, values, weights, c, key_norm, value_norm):
    keys, values = keys.astype(np.float64), values.astype(np.float64)
    scale = weights / weights.max()
    kernel = np.exp(keys @ keys.T / np.sqrt(keys.shape[1])) * (values @ values.T) * scale[:, None] * scale
    radius = np.exp(key_norm**2 / (2 * np.sqrt(keys.shape[1]))) * value_norm
    signs, tilts = np.zeros(len(keys)), np.zeros(len(keys))
    for j in range(len(keys)):
        tilts[j] = kernel[j] @ signs / (c * radius**2)
        signs[j] = 1 if uniforms[j] < np.clip(0.5 - tilts[j] / 2, 0, 1) else -1
    return signs, np.sum(np.abs(tilts) > 1)


@pytest.mark.parametrize("c, clips", [(0.6, True), (30.0, False)])
def test_signs_equal_a_reference_of_algorithm_2(c, clips):
    keys, values = tokens(count=150, key_norm=2.0, value_norm=0.5)
    uniforms = np.random.default_rng(1).uniform(size=150).astype(np.float32)
    weights = np.where(np.arange(150) % 3 == 0, 2.0, 4.0).astype(np.float32)
    arguments, norms = (uniforms, keys, values, weights), {"c": c, "key_norm": 2.0, "value_norm": 0.5}
    expected, clipped = plain_signs(*arguments, **norms)
    assert (clipped > 0) == clips
    for block in (16, 64, 256):
        signs, count = signs_of(*arguments, **norms, block=block)
        np.testing.assert_array_equal(signs, expected)
        assert count == clipped


@pytest.mark.parametrize("seed", range(5))
def test_softmax_balance_keeps_the_smaller_class_with_doubled_weights(seed):
    keys, values = tokens(seed)
    weights = np.where(np.arange(32) < 27, 4.0, 0.0).astype(np.float32)
    rng, settings = jax.random.key(seed), {"c": 1.0, "key_norm": 1.0, "value_norm": 1.0}
    index, weight, _ = softmax_balance(rng, keys, values, weights, **settings)
    signs, _ = balance.softmax_signs(jax.random.uniform(rng, (32,)), keys, values, weights, **settings)
    classes = [np.flatnonzero((np.asarray(signs) == sign) & (weights > 0)) for sign in (-1, 1)]
    kept = np.asarray(index)[np.asarray(weight) > 0]
    np.testing.assert_array_equal(kept, min(classes, key=len))
    np.testing.assert_array_equal(weight, np.where(np.arange(16) < len(kept), 8.0, 0.0))
    same = softmax_balance(rng, np.where(weights[:, None] > 0, keys, 7.0), values, weights, **settings)
    np.testing.assert_array_equal(same.indices, index)


def test_signs_ignore_long_keys_of_weight_zero():
    """Empty slots of a tree hold copies of a key that may be longer than all keys with a weight."""
    rng = np.random.default_rng(0)
    keys = 10 * (rng.normal(size=128) + 0.1 * rng.normal(size=(64, 128))).astype(np.float32)
    weights = np.where((np.arange(64) >= 20) & (np.arange(64) < 32), 0.0, 1.0).astype(np.float32)
    key_norm = np.linalg.norm(keys[weights > 0], axis=1).max()
    longer = np.where(weights[:, None] > 0, keys, 1.2 * keys[0])
    (expected, *_), (actual, *_) = (
        softmax_balance(jax.random.key(0), x, None, weights, c=30.0, key_norm=key_norm) for x in (keys, longer)
    )
    np.testing.assert_array_equal(actual, expected)
    assert np.count_nonzero(actual) > 15


# --- the released code ---


@pytest.mark.parametrize("name", "abcd")
def test_golden_runs_of_the_released_code_are_reproduced_exactly(name):
    """The runs are on synthetic clustered keys."""
    golden = np.load(GOLDEN / f"balancekv_walk_{name}.npz")
    halvings, count = int(golden["itrs"]), golden["keys"].shape[2]
    constants = {"gamma": float(golden["gamma"]), "temperature": float(golden["temp"])}

    def compress(keys, values, uniforms):
        index, weight = jnp.arange(count), jnp.ones(count)
        for halving, draws in enumerate(uniforms):
            left = jnp.int32(count >> halving)
            kept, weight = balance.reference_halving(draws, keys[index], values[index], weight, left, **constants)
            index = index[kept]
        return index, weight

    uniforms = tuple(golden[f"uniforms_{halving}"] for halving in range(halvings))
    index, weight = jax.jit(jax.vmap(jax.vmap(compress)))(golden["keys"], golden["values"], uniforms)
    np.testing.assert_array_equal(index, golden["indices"])
    np.testing.assert_array_equal(weight, golden["weights"])


def plain_exact_halving(signs):
    half = len(signs) // 2

    def reached(sign):
        counts = np.cumsum(signs == sign)
        return int(np.flatnonzero(counts >= half)[0]) if np.any(counts >= half) else 0

    last = max(reached(-1), reached(1))
    weight = [1 if i > last else 2 if signs[i] != signs[last] else 0 for i in range(len(signs))]
    order = sorted(range(len(signs)), key=lambda i: -weight[i])[:half]
    return order, [weight[i] for i in order], last


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([-1.0, 1.0]), min_size=2, max_size=24))
def test_exact_halving_equals_a_reference(signs):
    padded = np.concatenate([signs, np.random.default_rng(len(signs)).choice([-1.0, 1.0], 24 - len(signs))])
    index, weight = (np.asarray(part) for part in exact_halving(padded.astype(np.float32), jnp.int32(len(signs))))
    order, expected, last = plain_exact_halving(np.array(signs))
    np.testing.assert_array_equal(index[: len(order)], order)
    np.testing.assert_array_equal(weight, expected + [0] * (12 - len(order)))
    if len(signs) % 2 == 0:
        assert weight.sum() == last + 1


def test_halving_ignores_tokens_past_the_count():
    keys, values = tokens(count=64)
    draws, constants = jax.random.uniform(jax.random.key(0), (4, 16)), {"gamma": 4.0, "temperature": 1.0}
    present, halve = np.arange(64)[:, None] < 37, jax.jit(balance.reference_halving)
    (index, weight), (other_index, other_weight) = (
        halve(draws, *arrays, jnp.ones(64), jnp.int32(37), **constants)
        for arrays in ((keys, values), (np.where(present, keys, 9.0), np.where(present, values, -3.0)))
    )
    np.testing.assert_array_equal(index[:18], other_index[:18])
    np.testing.assert_array_equal(weight, other_weight)
    assert np.all(index[:18] < 37) and np.count_nonzero(weight) == 18
