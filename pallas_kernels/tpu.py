"""Matrix products of kernels for TPU (Mosaic)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.quantized_array import product_dtype


def dot(left: Float[Array, "M K"], right: Array, axis: int) -> Float[Array, "M N"]:
    """Multiplies matrices, accumulated in float32 and with full precision for float32 operands.

    Args:
        left: Contracted over its last axis.
        right: A matrix of the same dtype.
        axis: The axis of `right` that is contracted.

    Returns:
        The float32 product.
    """
    precision = jax.lax.Precision.HIGHEST if right.dtype == jnp.float32 else None
    dimensions = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def dot_stored(left: Float[Array, "M K"], stored: Array, axis: int) -> Float[Array, "M N"]:
    """Multiplies queries and stored keys, or weights and stored values, in their `product_dtype`.

    Args:
        left: Queries or weights.
        stored: Keys, values or unpacked codes.
        axis: The axis of `stored` that is contracted.

    Returns:
        The float32 product.
    """
    dtype = product_dtype(left.dtype, stored.dtype)
    if jnp.issubdtype(stored.dtype, jnp.integer):
        stored = stored.astype(jnp.float32)  # Mosaic converts float32 to every dtype
    return dot(left.astype(dtype), stored.astype(dtype), axis)
