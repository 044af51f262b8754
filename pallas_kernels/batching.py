"""Rules for `vmap` of kernels that have a batch axis."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


def fold_mapped_axes(function: Callable[..., T]) -> Callable[..., T]:
    """Makes every axis that `vmap` maps part of the batch axis.

    By default, `vmap` of a kernel becomes a serial loop, or a kernel that is divided as if there were one batch.

    Args:
        function: Takes pytrees of arrays [B, ...] and returns one.

    Returns:
        The same function with this rule for `vmap`. Arguments that are not mapped are repeated.
    """
    folded = jax.custom_batching.custom_vmap(function)

    @folded.def_vmap
    def rule(axis_size: int, mapped: Any, *arguments: Any) -> tuple[T, Any]:
        merged = jax.tree.map(functools.partial(_merge_axes, axis_size), arguments, tuple(mapped))
        results = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), folded(*merged))
        return results, jax.tree.map(lambda _: True, results)

    return folded


def run_batched(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a function of arrays with a batch axis on arrays without one.

    Args:
        function: Takes pytrees of arrays [B, ...] and returns one.
        *arguments: Pytrees of arrays without the axis B.

    Returns:
        The result without the axis B. Under `vmap`, the function is called once.
    """
    results = fold_mapped_axes(function)(*jax.tree.map(lambda x: x[None], arguments))
    return jax.tree.map(lambda x: x[0], results)


def _merge_axes(axis_size: int, x: jax.Array, is_mapped: bool) -> jax.Array:
    x = x if is_mapped else jnp.broadcast_to(x, (axis_size, *x.shape))
    return x.reshape(-1, *x.shape[2:])
