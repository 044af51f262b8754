"""Arrays in host memory: large arrays are processed in place, and only small ones move."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import compute_on as jax_compute_on
from jaxtyping import Array

# JAX 0.10 has the function of JAX 0.12 under another name.
_compute_on: Callable[..., Any] = getattr(jax_compute_on, "compute_on2", jax_compute_on.compute_on)


def is_on_host(x: Array) -> bool:
    """Whether an array is in host memory, according to its type."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def compute_where_stored(function: Callable[..., Array], large: Array, *small: Array, stays: bool = False) -> Array:
    """Computes `function(large, *small)` on the host if `large` is in host memory.

    Args:
        large: the array that does not move.
        *small: arrays that move to it.
        stays: whether the result stays where `large` is; otherwise it moves to the device.

    Returns:
        The result.
    """
    if not is_on_host(large):
        return function(large, *small)
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    moved = [jax.device_put(one, host) for one in small]
    result = _compute_on(jax.jit(function), compute_type="device_host", out_memory_spaces=host)(large, *moved)
    return result if stays else jax.device_put(result, device)
