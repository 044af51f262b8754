"""Partial softmax: the maximum, numerator and denominator of attention over some of the entries."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

# The logit of masked slots. Finite, because differences of -inf are NaN, and far below any real logit.
MASK_VALUE = -1e30


class Partials(NamedTuple):
    """Partial softmax of R queries per head; numerator and denominator are relative to exp(max).

    Where a query attends to no entry, kernels return a `max` of at most `MASK_VALUE` / 2, and arbitrary finite sums.

    Attributes:
        max: The largest logit, float32.
        numerator: sum_s exp(logit_s + log_num_s - max) value_s, float32.
        denominator: sum_s exp(logit_s + log_den_s - max), float32.
        logits: logit_s + log_den_s of each slot, float32, at most `MASK_VALUE` / 2 where a slot is masked. None unless
            requested.
    """

    max: Float[Array, "B H R"]
    numerator: Float[Array, "B H R D_v"]
    denominator: Float[Array, "B H R"]
    logits: Float[Array, "B H R S"] | None = None


def finite_max(maximum: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns maxima with -inf replaced by 0, a base with which queries without entries get weights of 0, not NaN."""
    return jnp.where(jnp.isneginf(maximum), 0.0, maximum)


def merge_partials(*partials: Partials) -> Partials:
    """Merges partials over disjoint sets of entries into partials over their union.

    Exact, associative and commutative up to rounding.

    Args:
        *partials: At least one.

    Returns:
        The merged partials. Their `logits` are None, unless there was one argument, which is returned unchanged.
    """
    if len(partials) == 1:
        return partials[0]
    maximum = functools.reduce(jnp.maximum, (one.max for one in partials))
    base = finite_max(maximum)
    factors = [jnp.exp(one.max - base) for one in partials]
    numerator = sum(one.numerator * factor[..., None] for one, factor in zip(partials, factors, strict=True))
    denominator = sum(one.denominator * factor for one, factor in zip(partials, factors, strict=True))
    return Partials(maximum, jnp.asarray(numerator), jnp.asarray(denominator))


def merge_splits(partials: Partials) -> Partials:
    """Returns the merged partials of the splits, [B, H, splits, ...], of a kernel; every `max` is finite."""
    if partials.max.shape[2] == 1:
        return Partials(partials.max[:, :, 0], partials.numerator[:, :, 0], partials.denominator[:, :, 0])
    maximum = jnp.max(partials.max, axis=2)
    factor = jnp.exp(partials.max - maximum[:, :, None])
    numerator = jnp.sum(partials.numerator * factor[..., None], axis=2)
    return Partials(maximum, numerator, jnp.sum(partials.denominator * factor, axis=2))
