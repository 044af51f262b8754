"""Tests shapes, sizes and indices of quantized arrays."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_array import QuantizedArray, product_dtype


def make(bits=None, shape=(2, 3, 5, 16)):
    width = shape[-1] if bits is None else shape[-1] * bits // 8
    values = jnp.arange(np.prod(shape[:-1]) * width).reshape(*shape[:-1], width)
    scale, offset = jnp.arange(30.0).reshape(shape[:-1]), jnp.arange(96.0).reshape(*shape[:-2], shape[-1])
    return QuantizedArray(values.astype(jnp.int8 if bits is None else jnp.uint8), scale, offset, bits)


@pytest.mark.parametrize("bits, width", [(None, 16), (4, 8), (3, 6), (2, 4)])
def test_the_shape_equals_the_unpacked_array(bits, width):
    x = make(bits)
    assert (x.shape, x.ndim, x.width) == ((2, 3, 5, 16), 4, 16)
    assert x.nbytes == 2 * 3 * (5 * (width + 4) + 16 * 4)


@pytest.mark.parametrize(
    "index, slots, offset_index",
    [
        (1, (1,), 1),
        ((0, slice(1, 3)), (0, slice(1, 3)), (0, slice(1, 3))),
        ((..., slice(2)), (slice(None), slice(None), slice(2)), ...),
        ((1, ..., 3), (1, slice(None), 3), 1),
        ((slice(None), 2, jnp.array([4, 0])), (slice(None), 2, jnp.array([4, 0])), (slice(None), 2)),
    ],
)
def test_indices_select_vectors(index, slots, offset_index):
    x = make(4)
    actual = x[index]
    np.testing.assert_array_equal(actual.scale, x.scale[slots])
    np.testing.assert_array_equal(actual.values, x.values[slots])
    np.testing.assert_array_equal(actual.offset, x.offset[offset_index])
    assert actual.bits == 4


def test_the_last_axis_is_not_indexed():
    with pytest.raises(IndexError, match=r"4 indices for a QuantizedArray of shape \(2, 3, 5, 16\)"):
        make()[0, 0, 0, 0]


def test_products_of_quantized_arrays_use_the_dtype_of_queries():
    assert product_dtype(jnp.bfloat16, jnp.int8) == jnp.bfloat16
    assert product_dtype(jnp.bfloat16, jnp.float32) == jnp.float32
