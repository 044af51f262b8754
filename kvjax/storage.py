"""Eight-bit numbers with one float32 scale for each key and each value."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class EightBit(NamedTuple):
    """A number format, and the largest number that entries are scaled to."""

    dtype: Any
    largest: float


# By the name of a storage. float8_e4m3fn has 3 bits of mantissa.
EIGHT_BIT = {"int8": EightBit(jnp.int8, 127.0), "fp8": EightBit(jnp.float8_e4m3fn, 448.0)}
_LARGEST = {jnp.dtype(storage.dtype): storage.largest for storage in EIGHT_BIT.values()}


def eight_bit(storage: str | None) -> EightBit | None:
    """The format of a storage; None where numbers are stored as they are."""
    return None if storage is None else EIGHT_BIT[storage]


def is_eight_bit(dtype: Any) -> bool:
    return jnp.dtype(dtype) in _LARGEST


def scales_of(x: Float[Array, "*A S n*D"], count: int, dtype: Any) -> Float[Array, "*A S n"]:
    """The scales at which the largest numbers of a slot's n entries fit; of 16 significant bits, so that products with
    eight-bit numbers are exact in float32 and storing a number again finds the same scale."""
    parts = x.astype(jnp.float32).reshape(*x.shape[:-1], count, x.shape[-1] // count)
    peak = jnp.max(jnp.abs(parts), axis=-1)
    return jax.lax.reduce_precision(peak / _LARGEST[jnp.dtype(dtype)], exponent_bits=8, mantissa_bits=15)


def divided(x: Float[Array, "*A S n*D"], scale: Float[Array, "*A S n"], dtype: Any) -> Array:
    """The numbers that stand for x at these scales."""
    parts = x.astype(jnp.float32) / over_columns(jnp.where(scale == 0, 1.0, scale), x)
    return (jnp.round(parts) if dtype == jnp.int8 else parts).astype(dtype)


def over_columns(scale: Float[Array, "*A S n"], x: Float[Array, "*A S n*D"]) -> Float[Array, "*A S n*D"]:
    """Each entry's scale in all of its columns."""
    return jnp.repeat(scale, x.shape[-1] // scale.shape[-1], axis=-1)
