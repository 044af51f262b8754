"""Independence of JAX's flags for dtypes and ranks, which the calling program may set."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")


def with_default_flags(function: Callable[P, T]) -> Callable[P, T]:
    """Runs a function with JAX's default dtypes and promotion rules.

    Counters, positions and weights have 32 bits by design, and states of one policy must not depend on flags.

    Args:
        function: a function that computes with `jax.numpy`.

    Returns:
        The function, unaffected by `jax_enable_x64`, `jax_numpy_dtype_promotion` and `jax_numpy_rank_promotion`.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        flags: Any = jax.config
        if (flags.jax_enable_x64, flags.jax_numpy_dtype_promotion, flags.jax_numpy_rank_promotion) == (
            False,
            "standard",
            "allow",
        ):
            return function(*arguments, **options)
        with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*arguments, **options)

    return call
