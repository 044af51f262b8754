"""Quantization formats: packing, the rotation, and the laws of their errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax import quantization
from kvjax.quantization import FORMATS, dequantize, quantize
from pallas_kernels import packing
from tests.kvjax.support import make_spec, make_stream, row_keys

PACKED = {name: form.bits for name, form in FORMATS.items() if form.bits is not None}
# Squared errors of int8 and float8_e4m3fn on Gaussian coordinates, relative to their variance.
EIGHT_BIT_ERRORS = {"int8": 6e-5, "fp8": 8e-4}
SIZES = (1e-30, 1e-4, 1e4, 1e30)


@functools.partial(jax.jit, static_argnames=("name", "unbiased"))
def restore(x, name, unbiased=False):
    """Quantizes and dequantizes."""
    return dequantize(quantize(x, name, unbiased=unbiased))


def gaussian(vectors, columns, seed=0):
    return np.random.default_rng(seed).normal(size=(vectors, columns)).astype(np.float32)


@functools.cache
def lloyd_max_error(bits):
    """Returns the error of the best scalar quantizer for Gaussian numbers of variance 1, by Lloyd's iteration."""
    grid = np.linspace(-8, 8, 200_001)
    density = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi) * (grid[1] - grid[0])
    levels = np.linspace(-2, 2, 2**bits)
    for _ in range(500):
        cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, grid)
        levels = np.bincount(cell, density * grid) / np.bincount(cell, density)
    return float(np.sum(density * (grid - levels[cell]) ** 2))


# --- packing and rotation ---


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(packing.PLANES)), st.sampled_from([8, 24, 64, 80]), st.integers(0, 2**32 - 1))
def test_packing_is_lossless_and_products_are_sums_over_parts(bits, columns, seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (3, columns)).astype(np.uint8)
    packed = packing.pack(jnp.asarray(codes), bits)
    assert packed.shape == (3, packing.packed_width(columns, bits)) and packed.dtype == jnp.uint8
    np.testing.assert_array_equal(packing.unpack(packed, bits), codes)
    row, parts = rng.normal(size=columns), packing.parts(columns, bits)
    product = sum(np.asarray(part.codes(packed[..., part.bytes])) @ row[part.columns] * part.factor for part in parts)
    np.testing.assert_allclose(product, codes @ row)


@pytest.mark.parametrize("columns", [1, 24, 64, 80, 128])
def test_the_rotation_is_orthogonal_and_never_changes(columns):
    matrix, x = quantization.rotation(columns).astype(np.float64), gaussian(5, columns)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(columns), atol=1e-6)
    np.testing.assert_allclose(quantization.rotate_back(quantization.rotate(x)), x, atol=1e-5)
    if columns == 24:
        np.testing.assert_allclose(matrix[0, :3], [0.2637711, 0.1236045, -0.2218370], atol=1e-6)


# --- errors ---


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize(("name", "bits"), PACKED.items())
def test_the_distortion_is_within_the_bounds_of_theory(name, bits, columns):
    """The rate-distortion bound is 4^-b, TurboQuant's bound sqrt(3) pi / 2 times that (Theorem 1).

    The best scalar quantizer, which knows the variance and whose grid is not uniform, is at most 10% better.
    """
    x = gaussian(4000, columns)
    error = np.mean((np.asarray(restore(x, name)) - x) ** 2)
    assert 4.0**-bits < error < np.sqrt(3) * np.pi / 2 * 4.0**-bits
    assert error < 1.1 * lloyd_max_error(bits)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size, factor", [(1, 1.0), (1, 100.0), (1, 1000.0), *((size, 1.0) for size in SIZES)])
def test_the_relative_error_does_not_depend_on_the_norm_or_an_outlier_channel(name, size, factor):
    x = gaussian(500, 64)
    x[:, 7] *= factor
    size = np.float32(size)
    error = np.sum((np.asarray(restore(x * size, name)) / size - x) ** 2, axis=-1) / np.sum(x**2, axis=-1)
    assert np.mean(error) < (EIGHT_BIT_ERRORS.get(name) or 1.15 * lloyd_max_error(PACKED[name]))


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_the_nearest_of_the_grid_and_clipped_beyond_it(name):
    x, form = gaussian(500, 64), FORMATS[name]
    quantized = quantize(x, name)
    scale, rotated = np.float32(quantized.scale)[:, None], np.asarray(quantization.rotate(x))
    restored = np.asarray(quantization.rotate(dequantize(quantized)))
    inside = np.abs(rotated) <= scale * form.max_value
    # Half a step: of fp8, a step is 2^-3 of the number, at least 2^-9.
    half = {"int8": scale / 2, "fp8": np.maximum(np.abs(rotated) / 16, scale * 2**-10)}.get(name, scale)
    assert 0.6 < np.mean(inside) <= 1 and (np.abs(restored - rotated) <= 1.0001 * half + 1e-6)[inside].all()
    largest = np.broadcast_to(scale * form.max_value, x.shape)
    np.testing.assert_allclose(np.abs(restored)[~inside], largest[~inside], rtol=1e-5)


@pytest.mark.parametrize("name", PACKED)
def test_unbiased_inner_products_are_right_on_average(name):
    """The regression slope on true products is 1 within four standard errors; the nearest numbers shrink it."""
    keys, query = gaussian(40_000, 64), gaussian(1, 64, seed=1)[0]
    exact = keys @ query
    products = [np.asarray(restore(keys, name, unbiased=unbiased)) @ query for unbiased in (True, False)]
    deviation = np.std(products[0] - exact) / np.sqrt(len(keys)) / np.std(exact)
    slopes = [(exact @ one) / (exact @ exact) for one in products]
    assert abs(slopes[0] - 1) < 4 * deviation
    assert name == "int4" or slopes[1] < 1 - 4 * deviation


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("unbiased", [False, True])
def test_quantizing_again_changes_nothing(name, unbiased):
    x = np.concatenate([gaussian(500, 64), np.zeros((1, 64)), np.eye(64)]).astype(np.float32)
    once = restore(x, name, unbiased)
    np.testing.assert_allclose(restore(once, name, unbiased), once, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(*(quantize(one, name, unbiased=unbiased).scale for one in (x, once)))


# --- errors of attention ---


def test_a_cache_may_be_bfloat16_beside_a_float32_model():
    keys, values = np.random.default_rng(0).normal(size=(2, 1, 24, 2, 64)).astype(np.float32)
    (plain, *_), (narrow, cache, _) = (
        attend(kv_dtype, keys, values, make_stream().queries[:1, :4]) for kv_dtype in (None, "bfloat16")
    )
    assert {cache.state.keys.dtype, cache.state.values.dtype, cache.staging.keys.dtype} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(plain, narrow, atol=0.03)
    assert not np.array_equal(plain, narrow)


def attend(kv_dtype, keys, values, queries, new=8):
    """Returns the attention output of queries after a prompt in a full cache, the cache and its counters."""
    spec = make_spec(batch=1, prompt=keys.shape[1], new=new, kv_dtype=kv_dtype)
    cache, counters = kvjax.init(kvjax.Exact(), spec, row_keys(1))
    cache, counters, _ = kvjax.prefill(cache, counters, keys, values, jnp.array([keys.shape[1]]))
    return np.asarray(kvjax.normalize(kvjax.attend(cache, counters, queries))), cache, counters


def test_the_mean_of_keys_costs_no_bits_and_is_computed_once():
    stream = make_stream()
    values, queries = stream.values[:1, :40], 0.3 * stream.queries[:1, 40:44]
    mean, errors = 10 * np.random.default_rng(0).normal(size=(1, 1, 2, 64)).astype(np.float32), []
    for shift in (0.0, 1.0):
        keys = stream.keys[:1, :40] + shift * mean
        (quantized, *state), (exact, *_) = (attend(name, keys, values, queries) for name in ("int3", None))
        errors.append(np.mean(np.abs(quantized - exact)))
    assert errors[1] < 1.5 * errors[0] + 1e-6
    offset = state[0].state.keys.offset
    np.testing.assert_allclose(offset, np.mean(keys, axis=1), rtol=1e-5, atol=1e-5)
    later, _ = kvjax.compact(*kvjax.append(*state, stream.keys[:1, 40:44], stream.values[:1, 40:44]))
    np.testing.assert_array_equal(later.state.keys.offset, offset)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_vector_that_equals_the_offset_has_no_noise_beside_others(name):
    offset, other = gaussian(2, 64)
    vectors = jnp.stack([np.nextafter(offset, np.inf), other])
    first, second = dequantize(quantize(vectors, name, jnp.asarray(offset)))
    np.testing.assert_array_equal(first, offset)
    assert np.linalg.norm(second - other) < 0.15 * np.linalg.norm(other - offset)
