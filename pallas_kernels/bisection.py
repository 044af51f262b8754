"""Bisection over the order of float32 numbers, where a sort takes longer: on CPUs, and to compile for TPUs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt


def float_ranks(x: Float[Array, "*N"]) -> UInt[Array, "*N"]:
    """Returns unsigned integers in the order of float32 numbers; -0 equals 0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(2**31))


def bisect(is_enough: Callable[[UInt[Array, ""]], Bool[Array, ""]]) -> UInt[Array, ""]:
    """Returns the largest integer of 32 bits for which `is_enough`, which is true up to it; 0 if there is none."""

    def set_bit(step: UInt[Array, ""], number: UInt[Array, ""]) -> UInt[Array, ""]:
        larger = number | jnp.uint32(2**31) >> step.astype(jnp.uint32)
        return jnp.where(is_enough(larger), larger, number)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.uint32(0))
