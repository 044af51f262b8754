"""Arrays in host memory: what is large is worked on where it lies, and only what is small moves."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import compute_on as jax_compute_on
from jaxtyping import Array

# JAX 0.10 calls by another name what is `compute_on` from 0.12 on.
_compute_on: Callable[..., Any] = getattr(jax_compute_on, "compute_on2", jax_compute_on.compute_on)


def on_host(x: Array) -> bool:
    """Whether an array lies in host memory, as far as its type says."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def where_it_lies(function: Callable[..., Array], large: Array, *small: Array, stays: bool = False) -> Array:
    """`function(large, *small)`, computed on the host where `large` lies in host memory, so that only the small arrays
    and the result move. The result comes to the device, unless it `stays` where `large` is."""
    if not on_host(large):
        return function(large, *small)
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    there = [jax.device_put(one, host) for one in small]
    out = _compute_on(jax.jit(function), compute_type="device_host", out_memory_spaces=host)(large, *there)
    return out if stays else jax.device_put(out, device)
