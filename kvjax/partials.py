"""Partials: both sums of attention over some entries, relative to their maximum; those of several merge by rescaling.

    out(q) = num / den

By token they are float32 max [B, T, H_q] (-inf where there was no entry), num [B, T, H_q, D_v] and den [B, T, H_q].
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.collectives import are_shared, largest_over_parts, summed_over_parts
from pallas_kernels.weighted_decode import EMPTY, Partials
from pallas_kernels.weighted_decode.base import finite as finite
from pallas_kernels.weighted_decode.base import merge_sums


def merge(*partials: Partials) -> Partials:
    """Partials of the union of the entries; exact, associative and commutative up to rounding."""
    if not partials:
        raise ValueError("merge needs at least one Partials")
    return merge_sums(*partials)


def output(partials: Partials, dtype: jax.typing.DTypeLike = jnp.float32) -> Float[Array, "B T H_q D_v"]:
    """num / den; zero where nothing was attended to."""
    empty = partials.den == 0
    return jnp.where(empty[..., None], 0.0, partials.num / jnp.where(empty, 1.0, partials.den)[..., None]).astype(dtype)


def merge_over_parts(partials: Partials) -> Partials:
    """Partials of the entries of all devices that share a store: as `merge`, across devices."""
    if not are_shared():
        return partials
    peak = largest_over_parts(partials.max)
    factor = jnp.exp(partials.max - finite(peak))
    num, den = summed_over_parts(partials.num * factor[..., None]), summed_over_parts(partials.den * factor)
    return Partials(peak, num, den)


def rows_of_heads(query: Float[Array, "B T H_q D"], kv_heads: int) -> Float[Array, "B H_kv R D"]:
    """The queries of each kv head as R = T * G rows, those of one token side by side."""
    batch, tokens, query_heads, head_dim = query.shape
    grouped = query.reshape(batch, tokens, kv_heads, query_heads // kv_heads, head_dim)
    return grouped.swapaxes(1, 2).reshape(batch, kv_heads, -1, head_dim)


def around(sums: Partials, rows: Float[Array, "B H R D"], center: Float[Array, "B H D"]) -> Partials:
    """Of sums over keys without what all have in common, those over the keys."""
    shift = jnp.einsum("bhrd,bhd->bhr", rows.astype(jnp.float32), center, precision=jax.lax.Precision.HIGHEST)
    shift = shift / math.sqrt(rows.shape[-1])
    logits = None if sums.logits is None else sums.logits + shift[..., None]
    return sums._replace(max=sums.max + shift, logits=logits)


def by_token(partials: Partials, tokens: int) -> Partials:
    """Partials as kernels give them, [B, H_kv, R = T * G, ...], as [B, T, H_q, ...], with nothing summed where there
    was
    no entry: there every masked one stood at the peak with weight one."""

    def lay(x):
        batch, kv_heads, rows, *rest = x.shape
        grouped = x.reshape(batch, kv_heads, tokens, rows // tokens, *rest).swapaxes(1, 2)
        return grouped.reshape(batch, tokens, kv_heads * (rows // tokens), *rest)

    empty = partials.max <= EMPTY / 2
    return Partials(
        max=lay(jnp.where(empty, -jnp.inf, partials.max)),
        num=lay(jnp.where(empty[..., None], 0.0, partials.num)),
        den=lay(jnp.where(empty, 0.0, partials.den)),
    )
