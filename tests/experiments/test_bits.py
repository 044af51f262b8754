"""Formats of few bits that `experiments.bits` compares."""

import numpy as np
import pytest

from experiments import bits

DIM, TOKENS = 64, 200


@pytest.fixture(scope="module")
def vectors():
    """Returns keys and queries with very different variances of their coordinates, in bases of their own."""
    random = np.random.default_rng(0)
    scales = 2.0 ** (-np.arange(DIM) / 16)
    bases = [np.linalg.qr(random.normal(size=(DIM, DIM)))[0] for _ in range(2)]
    return [random.normal(size=(TOKENS, DIM)) * scales @ basis for basis in bases]


def test_formats_have_errors_of_their_width(vectors):
    keys, queries = vectors
    moments = queries.T @ queries / TOKENS
    of_keys, of_values = bits.codecs(moments, keys, keys)
    exact, errors = keys @ queries.T, {}
    for (name, _), codec in of_keys.items():
        errors[name] = np.linalg.norm(codec(keys) @ queries.T - exact) / np.linalg.norm(exact)
    for kind in ("int{}", "int{}, moments^1/4", "int{}, zero point", "transform coding, {} bits"):
        assert errors[kind.format(4)] < 0.65 * errors[kind.format(3)] < 0.65**2 * errors[kind.format(2)]
    for width in (2, 3, 4):
        best = errors[f"transform coding, {width} bits"]
        assert best < errors[f"int{width}, moments^1/4"] < errors[f"int{width}"]
    assert all(np.linalg.norm(codec(keys) - keys) < np.linalg.norm(keys) for codec in of_values.values())


def test_bases_are_invertible(vectors):
    keys, queries = vectors
    moments = queries.T @ queries / TOKENS
    for basis in (bits.key_basis(moments, keys), bits.moment_power(moments, 0.25)):
        np.testing.assert_allclose(keys @ basis.forward @ basis.inverse, keys, atol=1e-6)
    weighted = keys @ bits.key_basis(moments, keys).forward
    np.testing.assert_allclose(np.cov(weighted.T), np.diag(np.diag(np.cov(weighted.T))), atol=1e-6)


def test_bits_go_where_variances_are_large():
    assert bits.water_filling(np.array([64.0, 16.0, 4.0, 1.0]), 1.5).tolist() == [3, 2, 1, 0]
    assert bits.water_filling(np.ones(4), 2).tolist() == [2, 2, 2, 2]


def test_attention_of_exact_vectors(vectors):
    keys, queries = vectors
    attended = bits.attend(queries[:3, None], keys, keys)
    weights = np.exp(queries[:3] @ keys.T / 8)
    np.testing.assert_allclose(attended[:, 0], weights / weights.sum(1, keepdims=True) @ keys, rtol=1e-9)
