"""Partial softmaxes: the sums of attention over some entries, relative to their maximum logit.

By token they are float32 max [B, T, H_q] (-inf without entries), numerator [B, T, H_q, D_v] and denominator
[B, T, H_q]; attention is numerator / denominator. Partial softmaxes of disjoint entries merge by rescaling.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.distributed.collectives import is_sequence_sharded, max_over_sequence, sum_over_sequence
from kvjax.jax_flags import with_default_flags
from pallas_kernels.weighted_decode import MASK_VALUE, merge_partials
from pallas_kernels.weighted_decode import Partials as Partials
from pallas_kernels.weighted_decode import finite_max as finite_max


@with_default_flags
def merge(*partials: Partials) -> Partials:
    """Merges partial softmaxes; exact, associative and commutative up to rounding.

    Args:
        *partials: partial softmaxes of disjoint entries, at least one.

    Returns:
        The partial softmax of all entries.
    """
    return merge_partials(*partials)


def normalize(partials: Partials, dtype: jax.typing.DTypeLike = jnp.float32) -> Float[Array, "B T H_q D_v"]:
    """Divides the numerator by the denominator.

    Args:
        partials: a partial softmax, by token.

    Returns:
        The attention output; zero for rows without entries.

    Example:
        >>> import jax.numpy as jnp, kvjax
        >>> from kvjax.partials import Partials
        >>> kvjax.normalize(Partials(jnp.zeros((1, 1, 1)), 6 * jnp.ones((1, 1, 1, 2)), 3 * jnp.ones((1, 1, 1))))
        Array([[[[2., 2.]]]], dtype=float32)
    """
    empty = partials.denominator == 0
    output = partials.numerator / jnp.where(empty, 1.0, partials.denominator)[..., None]
    return jnp.where(empty[..., None], 0.0, output).astype(dtype)


def merge_over_sequence(partials: Partials) -> Partials:
    """Merges the partial softmaxes of all devices that share a store.

    Args:
        partials: this device's partial softmax, by token.

    Returns:
        The merged partial softmax, equal on these devices; unchanged without a mesh that shares stores.
    """
    if not is_sequence_sharded():
        return partials
    peak = max_over_sequence(partials.max)
    factor = jnp.exp(partials.max - finite_max(peak))
    numerator = sum_over_sequence(partials.numerator * factor[..., None])
    return Partials(peak, numerator, sum_over_sequence(partials.denominator * factor))


def group_queries(queries: Float[Array, "B T H_q D"], kv_heads: int) -> Float[Array, "B H_kv R D"]:
    """Groups queries by the KV head that they read.

    Args:
        queries: queries of all query heads; H_q is a multiple of `kv_heads`.

    Returns:
        R = T * G queries per KV head, for G = H_q / H_kv query heads; the queries of one token are adjacent.
    """
    batch, tokens, query_heads, head_dim = queries.shape
    grouped = queries.reshape(batch, tokens, kv_heads, query_heads // kv_heads, head_dim)
    return grouped.swapaxes(1, 2).reshape(batch, kv_heads, -1, head_dim)


def shift_of_logits(rows: Float[Array, "B H R D"], offset: Float[Array, "B H D"]) -> Float[Array, "B H R"]:
    """Returns the change of each query's logits if a vector is added to all keys.

    Args:
        offset: one vector per KV head, such as the mean key.

    Returns:
        Products over sqrt(D), float32.
    """
    shift = jnp.einsum("bhrd,bhd->bhr", rows.astype(jnp.float32), offset, precision=jax.lax.Precision.HIGHEST)
    return shift / math.sqrt(rows.shape[-1])


def shift_logits(partials: Partials, shift: Float[Array, "B H R"]) -> Partials:
    """Adds a number to all logits of each query.

    Args:
        partials: a partial softmax by KV head, [B, H, R, ...].

    Returns:
        The partial softmax with these logits.
    """
    logits = None if partials.logits is None else partials.logits + shift[..., None]
    return partials._replace(max=partials.max + shift, logits=logits)


def by_token(partials: Partials, tokens: int) -> Partials:
    """Rearranges the kernels' [B, H_kv, R = T * G, ...] to [B, T, H_q, ...].

    Args:
        partials: a partial softmax as kernels return it.

    Returns:
        The partial softmax by token, with empty sums for rows that read no entry.
    """

    def rearrange(x: Array) -> Array:
        """Moves the tokens of `x` from [B, H_kv, T * G, ...] to [B, T, H_q, ...]."""
        batch, kv_heads, rows, *rest = x.shape
        grouped = x.reshape(batch, kv_heads, tokens, rows // tokens, *rest).swapaxes(1, 2)
        return grouped.reshape(batch, tokens, kv_heads * (rows // tokens), *rest)

    # A kernel gives a row without entries the mask value as maximum, and sums of masked entries.
    empty = partials.max <= MASK_VALUE / 2
    return Partials(
        max=rearrange(jnp.where(empty, -jnp.inf, partials.max)),
        numerator=rearrange(jnp.where(empty[..., None], 0.0, partials.numerator)),
        denominator=rearrange(jnp.where(empty, 0.0, partials.denominator)),
    )
