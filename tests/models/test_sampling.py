"""Sampling: distributions, ties, independence of rows, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax_models.generation.sampling import Sampling, is_finite, sample

PROBABILITIES = np.array([0.05, 0.4, 0.25, 0.2, 0.1])
LOGITS = jnp.log(jnp.asarray(PROBABILITIES, jnp.float32))
DRAWS = 20_000


def frequencies(options, logits=LOGITS):
    keys = jax.random.split(jax.random.key(0), DRAWS)
    tokens = jax.jit(sample, static_argnums=2)(jnp.tile(logits, (DRAWS, 1)), keys, options)
    return np.bincount(np.asarray(tokens), minlength=logits.size) / DRAWS


def restricted(tokens, temperature=1.0):
    weights = np.where(np.isin(np.arange(PROBABILITIES.size), tokens), PROBABILITIES ** (1 / temperature), 0)
    return weights / weights.sum()


@pytest.mark.parametrize(
    "options, expected",
    [
        (Sampling(1.0), restricted([0, 1, 2, 3, 4])),
        (Sampling(0.5), restricted([0, 1, 2, 3, 4], 0.5)),
        (Sampling(2.0, top_k=2), restricted([1, 2], 2.0)),
        (Sampling(1.0, top_k=99), restricted([0, 1, 2, 3, 4])),
        (Sampling(1.0, top_p=0.39), restricted([1])),
        (Sampling(1.0, top_p=0.41), restricted([1, 2])),  # the token that crosses p is kept
        (Sampling(1.0, top_p=0.84), restricted([1, 2, 3])),
        (Sampling(1.0, top_p=1.0), restricted([0, 1, 2, 3, 4])),
        (Sampling(1.0, top_p=1e-6), restricted([1])),
        # The largest of three tokens has .47 of their probability; without top-k, two tokens would be needed.
        (Sampling(1.0, top_k=3, top_p=0.45), restricted([1])),
        # A temperature of .5 increases the first token's probability to .58 before top-p applies.
        (Sampling(0.5, top_p=0.5), restricted([1], 0.5)),
    ],
)
def test_samples_follow_the_distribution(options, expected):
    observed = frequencies(options)
    assert (observed[expected == 0] == 0).all()
    deviation = np.sqrt(expected * (1 - expected) / DRAWS)
    assert (np.abs(observed - expected) <= 4 * deviation + 1e-9).all(), (observed, expected)


def test_greedy_needs_no_keys_and_selects_the_first_of_ties():
    logits = jnp.array([[0.0, 2.0, 2.0], [3.0, 1.0, 2.0]])
    np.testing.assert_array_equal(sample(logits, None, Sampling()), [1, 0])


def test_top_k_keeps_exactly_k_of_equal_logits():
    observed = frequencies(Sampling(1.0, top_k=2), jnp.zeros(4))
    np.testing.assert_allclose(observed, [0.5, 0.5, 0, 0], atol=0.02)


@pytest.mark.parametrize("options", [Sampling(), Sampling(0.8), Sampling(0.8, 10), Sampling(0.8, 10, 0.9)])
def test_rows_are_sampled_independently(options):
    logits = jax.random.normal(jax.random.key(1), (6, 50))
    keys = jax.random.split(jax.random.key(2), 6)
    together = sample(logits, keys, options)
    alone = [sample(logits[i : i + 1], keys[i : i + 1], options)[0] for i in range(6)]
    np.testing.assert_array_equal(together, alone)
    assert together.dtype == jnp.int32


def test_bfloat16_logits_are_sampled_in_float32():
    logits, keys = jnp.tile(LOGITS, (2, 1)).astype(jnp.bfloat16), jax.random.split(jax.random.key(0), 2)
    options = Sampling(0.7, top_p=0.9)
    np.testing.assert_array_equal(sample(logits, keys, options), sample(logits.astype(jnp.float32), keys, options))


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_is_finite_finds_invalid_rows(bad):
    logits = jnp.zeros((3, 4)).at[1, 2].set(bad)
    np.testing.assert_array_equal(is_finite(logits), [True, False, True])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": 1e-31}, "temperature=1e-31"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
    ],
)
def test_invalid_parameters_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)


KEYS = jax.random.split(jax.random.key(0), 3)


@pytest.mark.parametrize(
    "logits, keys, message",
    [
        (jnp.zeros(5), KEYS, "logits must be floats"),
        (jnp.zeros((3, 5), jnp.int32), KEYS, "logits must be floats"),
        (jnp.zeros((3, 5)), None, "keys must be 3 typed keys"),
        (jnp.zeros((2, 5)), KEYS, "keys must be 2 typed keys"),
        (jnp.zeros((3, 5)), jnp.zeros((3, 2), jnp.uint32), "keys must be 3 typed keys"),
    ],
)
def test_invalid_arrays_are_refused(logits, keys, message):
    with pytest.raises(ValueError, match=message):
        sample(logits, keys, Sampling(1.0))


@pytest.mark.parametrize("top_k, top_p", [(5, None), (None, 0.7), (None, 0.3), (7, 0.8)])
def test_distributions_equal_transformers(top_k, top_p):
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(0).normal(size=(1, 20)).astype(np.float32)
    scores = torch.from_numpy(logits) / 0.8
    if top_k is not None:
        scores = process.TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None:
        scores = process.TopPLogitsWarper(top_p)(None, scores)
    expected = torch.softmax(scores, -1).numpy()[0]
    observed = frequencies(Sampling(0.8, top_k, top_p), jnp.asarray(logits[0]))
    assert (observed[expected == 0] == 0).all()
    np.testing.assert_allclose(observed, expected, atol=0.015)
