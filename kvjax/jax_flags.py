"""Independence of JAX's flags for dtypes and ranks, which the calling program may set."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")


def default_flags() -> contextlib.AbstractContextManager[Any]:
    """Returns a context with JAX's default dtypes and promotion rules.

    Counters, positions and weights have 32 bits by design, and states of one policy must not depend on
    `jax_enable_x64`, `jax_numpy_dtype_promotion` and `jax_numpy_rank_promotion`.
    """
    flags: Any = jax.config
    names = ("jax_enable_x64", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")
    if [getattr(flags, name) for name in names] == [False, "standard", "allow"]:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for context in (jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")):
        stack.enter_context(context)
    return stack


def with_default_flags(function: Callable[P, T]) -> Callable[P, T]:
    """Runs a function in the context of `default_flags`."""

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        with default_flags():
            return function(*arguments, **options)

    return call
