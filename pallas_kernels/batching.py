"""What `vmap` does to kernels that have batch dimensions of their own."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


def fold_mapped_axes(function: Callable[..., T]) -> Callable[..., T]:
    """A function of arrays [B, ...] that gives such arrays; every axis that `vmap` maps becomes part of B.

    Left to themselves, kernels become a serial loop, or cut their work as if there were one batch. An argument that is
    not mapped is repeated.
    """
    folded = jax.custom_batching.custom_vmap(function)

    @folded.def_vmap
    def rule(axis_size: int, mapped: Any, *arguments: Any) -> tuple[T, Any]:
        spread = functools.partial(_spread, axis_size)
        merged = jax.tree.map(spread, arguments, tuple(mapped))
        results = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), folded(*merged))
        return results, jax.tree.map(lambda _: True, results)

    return folded


def _spread(axis_size: int, x: jax.Array, is_mapped: bool) -> jax.Array:
    x = x if is_mapped else jnp.broadcast_to(x, (axis_size, *x.shape))
    return x.reshape(-1, *x.shape[2:])
