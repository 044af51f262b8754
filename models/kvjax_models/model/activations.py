"""Activations of MLPs and experts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array


def _silu(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def _gelu(gate: Array, up: Array) -> Array:
    return jax.nn.gelu(gate, approximate=False) * up


def _gelu_tanh(gate: Array, up: Array) -> Array:
    return jax.nn.gelu(gate, approximate=True) * up


def _clipped_swiglu(gate: Array, up: Array) -> Array:
    """Returns the activation of gpt-oss, with the slope and limit of its model card."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def _squared_relu(up: Array) -> Array:
    """Returns the activation of MLPs without gates."""
    return jnp.square(jax.nn.relu(up))


ACTIVATIONS: dict[str, Callable[..., Array]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "clipped_swiglu": _clipped_swiglu,
    "squared_relu": _squared_relu,
}
UNGATED = ("squared_relu",)
