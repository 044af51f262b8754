"""Stored vectors: what a format keeps of them, and the laws of its errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax import quantization as storage
from kvjax.quantization import FORMATS
from pallas_kernels import packing
from tests.kvjax.support import make_spec, make_stream, row_keys

FEW = {name: form.bits for name, form in FORMATS.items() if form.bits is not None}
# What float8_e4m3fn and int8 err on Gaussian coordinates, against the square of their size.
EIGHT = {"int8": 6e-5, "fp8": 8e-4}


@functools.partial(jax.jit, static_argnames=("name", "unbiased"))
def kept(x, name, unbiased=False):
    """What vectors are once they have been stored."""
    stored = storage.store(x, FORMATS[name], unbiased=unbiased)
    return storage.load(stored.numbers, stored.scale, FORMATS[name].bits)


def gaussian(vectors, columns, seed=0):
    return np.random.default_rng(seed).normal(size=(vectors, columns)).astype(np.float32)


def lloyd_max(bits):
    """The error of the best scalar quantiser of so many bits for Gaussian numbers of variance 1, by Lloyd's
    iteration."""
    grid = np.linspace(-8, 8, 200_001)
    density = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi) * (grid[1] - grid[0])
    levels = np.linspace(-2, 2, 2**bits)
    for _ in range(500):
        cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, grid)
        levels = np.bincount(cell, density * grid) / np.bincount(cell, density)
    return float(np.sum(density * (grid - levels[cell]) ** 2))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(packing.PLANES)), st.sampled_from([8, 24, 64, 80]), st.integers(0, 2**32 - 1))
def test_packing_loses_nothing_and_products_are_sums_over_parts(bits, columns, seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (3, columns)).astype(np.uint8)
    packed = packing.pack(jnp.asarray(codes), bits)
    assert packed.shape == (3, packing.packed_width(columns, bits)) and packed.dtype == jnp.uint8
    np.testing.assert_array_equal(packing.unpack(packed, bits), codes)
    row, parts = rng.normal(size=columns), packing.parts(columns, bits)
    product = sum(np.asarray(part.codes(packed[..., part.bytes])) @ row[part.columns] * part.factor for part in parts)
    np.testing.assert_allclose(product, codes @ row)


def test_columns_that_fill_no_byte_are_refused():
    with pytest.raises(ValueError, match="12 columns of 3 bits; they must be a multiple of 8"):
        packing.pack(jnp.zeros((2, 12), jnp.uint8), 3)


@pytest.mark.parametrize("columns", [1, 64, 80, 128])
def test_a_rotation_keeps_inner_products_and_is_the_same_everywhere(columns):
    matrix = storage.rotation(columns).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(columns), atol=1e-6)
    x = gaussian(5, columns)
    np.testing.assert_allclose(storage.turned_back(storage.turned(x)), x, atol=1e-5)


def test_the_rotation_is_that_of_saved_states():
    # Saved caches lie in this basis.
    np.testing.assert_array_equal(np.sign(storage.rotation(8)[:, 0]), [1, -1, -1, 1, -1, -1, 1, 1])
    np.testing.assert_allclose(storage.rotation(24)[0, :3], [0.2637711, 0.1236045, -0.2218370], atol=1e-6)


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize(("name", "bits"), FEW.items())
def test_distortion_lies_between_theory_s_bounds(name, bits, columns):
    """Above the rate-distortion bound 4^-b, under TurboQuant's sqrt(3) pi / 2 times as much (its Theorem 1), and near
    the best scalar quantiser's, which knows the variance and has a grid that is not uniform."""
    x = gaussian(4000, columns)
    error = np.mean((np.asarray(kept(x, name)) - x) ** 2)
    assert 4.0**-bits < error < np.sqrt(3) * np.pi / 2 * 4.0**-bits
    assert error < 1.1 * lloyd_max(bits)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("factor", [1.0, 100.0, 1000.0])
def test_a_channel_that_stands_out_spoils_nothing(name, factor):
    """A coordinate that is 1,000 times the others' size leaves the error of a vector what it is without."""
    x = gaussian(500, 64)
    x[:, 7] *= factor
    error = np.sum((np.asarray(kept(x, name)) - x) ** 2, axis=-1) / np.sum(x**2, axis=-1)
    bound = EIGHT.get(name) or 1.15 * lloyd_max(FEW[name])
    assert np.mean(error) < bound


@pytest.mark.parametrize("name", FEW)
def test_numbers_are_the_nearest_at_their_scale_and_the_largest_beyond(name):
    x, form = gaussian(500, 64), FORMATS[name]
    stored = storage.store(x, form)
    scale, turned = np.float32(stored.scale), np.asarray(storage.turned(x))
    found = np.asarray(storage.turned(storage.load(stored.numbers, stored.scale, form.bits)))
    inside = np.abs(turned) <= scale * form.largest
    assert 0.6 < np.mean(inside) < 1 and (np.abs(found - turned) <= 1.0001 * scale + 1e-6)[inside].all()
    largest = np.broadcast_to(scale * form.largest, x.shape)
    np.testing.assert_allclose(np.abs(found)[~inside], largest[~inside], rtol=1e-5)


@pytest.mark.parametrize("name", FEW)
def test_inner_products_are_right_on_average_where_that_is_asked_for(name):
    """Over random directions, which is over rotations, the slope of what is found against what is true is one within
    four standard errors; the nearest numbers alone err towards zero."""
    keys, query = gaussian(40_000, 64), gaussian(1, 64, seed=1)[0]
    true = keys @ query
    found, short = np.asarray(kept(keys, name, unbiased=True)) @ query, np.asarray(kept(keys, name)) @ query
    slope = lambda y: (true @ y) / (true @ true)  # noqa: E731
    spread = np.std(found - true) / np.sqrt(len(keys)) / np.std(true)
    assert abs(slope(found) - 1) < 4 * spread
    if name != "int4":
        assert slope(short) < 1 - 4 * spread


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("unbiased", [False, True])
def test_storing_again_changes_nothing(name, unbiased):
    once = kept(np.concatenate([gaussian(500, 64), np.zeros((1, 64)), np.eye(64)]).astype(np.float32), name, unbiased)
    np.testing.assert_allclose(kept(once, name, unbiased), once, rtol=1e-6, atol=1e-6)
    first, second = (storage.store(x, FORMATS[name], unbiased=unbiased) for x in (once, kept(once, name, unbiased)))
    np.testing.assert_array_equal(first.scale, second.scale)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e4, 1e30])
def test_sizes_that_models_never_have_are_kept_too(name, size):
    x = gaussian(200, 64)
    error = lambda size: np.linalg.norm(np.asarray(kept(x * size, name)) / size - x)  # noqa: E731
    assert error(np.float32(size)) < 1.05 * error(np.float32(1))


def test_what_keys_have_in_common_costs_no_bits():
    """Keys about a mean ten times their spread: attention over them errs as over keys about zero, and the mean is that
    of the first tokens, whatever comes later."""
    stream, spec = make_stream(), make_spec(batch=1, prompt=40, new=8)
    mean = 10 * np.random.default_rng(0).normal(size=(1, 1, 2, 64)).astype(np.float32)
    outputs = {}
    for shift in (0.0, 1.0):
        keys = stream.keys[:1, :40] + shift * mean
        for policy in (kvjax.Exact(), kvjax.Quantized(kvjax.Exact(), "int3")):
            cache, _ = kvjax.prefill(
                kvjax.init(policy, spec, row_keys(1)), keys, stream.values[:1, :40], jnp.array([40])
            )
            outputs[shift, policy] = kvjax.normalize(kvjax.attend(cache, 0.3 * stream.queries[:1, 40:44]))
    apart = [
        np.mean(np.abs(outputs[shift, kvjax.Quantized(kvjax.Exact(), "int3")] - outputs[shift, kvjax.Exact()]))
        for shift in (0.0, 1.0)
    ]
    assert apart[1] < 1.5 * apart[0] + 1e-6
    center = cache.state.numbers.center
    np.testing.assert_allclose(center, np.mean(keys, axis=1), rtol=1e-5, atol=1e-5)
    after = kvjax.compact(kvjax.append(cache, stream.keys[:1, 40:44], stream.values[:1, 40:44]))
    np.testing.assert_array_equal(after.state.numbers.center, center)


@pytest.mark.parametrize("name", ["int8", *FEW])
def test_the_error_of_attention_follows_the_width(name):
    """Gaussian values of 64 tokens under queries of size one: the error of the output against its size."""
    stream, spec = make_stream(), make_spec(batch=1, prompt=64, new=8)
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, 1, 64, 2, 64)).astype(np.float32)
    outputs = []
    for policy in (kvjax.Exact(), kvjax.Quantized(kvjax.Exact(), name)):
        cache, _ = kvjax.prefill(kvjax.init(policy, spec, row_keys(1)), keys, values, jnp.array([64]))
        outputs.append(np.asarray(kvjax.normalize(kvjax.attend(cache, stream.queries[:1, :4]))))
    error = np.linalg.norm(outputs[1] - outputs[0]) / np.linalg.norm(outputs[0])
    low, high = {"int8": (0.001, 0.02), "int4": (0.03, 0.25), "int3": (0.08, 0.45), "int2": (0.15, 0.8)}[name]
    assert low < error < high
