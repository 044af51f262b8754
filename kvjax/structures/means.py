"""Means that go on taking tokens in, kept in a cache's own narrow type without drifting.

Where a mean of n tokens takes in another, it moves by 1/n of what lies between them. Rounded to bfloat16 each time, a
heavy one does not move any more. Attention reads means as they are rounded, so that nothing more is read at a step;
what rounding left of them lies beside in eight bits, and the next token is taken in by both together.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.spec import CacheSpec
from kvjax.state import map_fields

T = TypeVar("T")


def init_rest(spec: CacheSpec, shape: tuple[int, ...]) -> Int[Array, "*A"] | None:
    """What is left of means that are zero; None where nothing ever is: in float32, and in stored forms, which keep
    rests of their own (`Quantized`)."""
    return jnp.zeros(shape, jnp.int8) if keeps_rests(spec) else None


def keeps_rests(spec: CacheSpec) -> bool:
    """Whether something is left of a cache's means."""
    return spec.storage is None and jnp.finfo(spec.dtype).bits < 32


def whole(rounded: Float[Array, "*A"], rest: Int[Array, "*A"] | None) -> Float[Array, "*A"]:
    """Means as they are, float32, to eight bits more than their type has."""
    return rounded.astype(jnp.float32) + (0 if rest is None else rest * _unit(rounded))


def rounded(
    mean: Float[Array, "*A"], dtype: jax.typing.DTypeLike, rest: bool
) -> tuple[Float[Array, "*A"], Int[Array, "*A"] | None]:
    """Means in this type, and what that leaves of them, where it is asked for. Those that are `whole` already come out
    as they were, bit by bit."""
    new = mean.astype(dtype)
    if not rest:
        return new, None
    left = (mean - new.astype(jnp.float32)) / _unit(new)
    return new, jnp.clip(jnp.round(left), -127, 127).astype(jnp.int8)


def narrowed(state: T, dtype: jax.typing.DTypeLike) -> tuple[T, T]:
    """A state whose means are float32 with them in this type, and a tree of what that leaves of them, and of nothing
    else."""
    both = lambda x: rounded(x, dtype, rest=True)  # noqa: E731
    narrow = map_fields(lambda field, x: both(x)[0] if field.means else x, state)
    return narrow, map_fields(lambda field, x: both(x)[1] if field.means else None, state)


def widened(state: T, rests: T) -> T:
    """The state that was `narrowed`, to eight bits more than its type has."""
    return map_fields(lambda field, x, rest: whole(x, rest) if field.means else x, state, rests)


def _unit(rounded: Float[Array, "*A"]) -> Float[Array, "*A"]:
    """A power of two, of which rounding leaves at most 128; none that devices would take for zero."""
    _, exponent = jnp.frexp(rounded.astype(jnp.float32))
    unit = jnp.ldexp(jnp.float32(jnp.finfo(rounded.dtype).eps / 512), exponent)
    return jnp.maximum(unit, jnp.finfo(jnp.float32).tiny)
