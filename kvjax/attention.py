"""Attention over weighted segments: the semantics of every cache in kvjax.

    out(q) = sum_s exp(q.k_s / sqrt(D) + log_num_s) v_s / sum_s exp(q.k_s / sqrt(D) + log_den_s)

A segment gives float32 partials (a maximum and the two sums relative to it); partials of several segments merge by
rescaling. A model whose logits use another scale folds the difference into its queries.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.segment import Segment
from kvjax.shards import are_shared, largest_over_parts, summed_over_parts
from kvjax.state import BATCH, HEAD_DIM, array, state
from pallas_kernels.cluster_recall import Blocks, cluster_recall
from pallas_kernels.weighted_decode import EMPTY, Entries, Sums, weighted_decode

TOKENS, QUERY_HEADS = "tokens", "query_heads"


@state
class Partials:
    """Both sums of attention over some entries, relative to exp(max); `max` is -inf where there was no entry."""

    max: Float[Array, "B T H_q"] = array(BATCH, TOKENS, QUERY_HEADS)  # float32
    num: Float[Array, "B T H_q D"] = array(BATCH, TOKENS, QUERY_HEADS, HEAD_DIM)  # float32
    den: Float[Array, "B T H_q"] = array(BATCH, TOKENS, QUERY_HEADS)  # float32


def attend(query: Float[Array, "B T H_q D"], segments: tuple[Segment, ...]) -> Partials:
    """Partials of attention over all entries of the segments. Query head h reads kv head h // (H_q / H_kv)."""
    return merge(*(attend_segment(query, segment) for segment in segments))


def attend_segment(query: Float[Array, "B T H_q D"], segment: Segment) -> Partials:
    """Partials of attention over one segment, accumulated in float32.

    Raises:
        ValueError: where heads or head dimensions do not fit.
    """
    return _partials(query, segment, _sums(query, segment))


def attend_blocks(
    query: Float[Array, "B 1 H_q D"], blocks: Blocks, number: Int[Array, "B H K"], count: Int[Array, "B H K"]
) -> Partials:
    """Partials of one query's attention over the first `count` tokens of the blocks that it names, for every kv head or
    (H = H_q) for every query head of its own; devices may share the blocks, and name those that are here."""
    batch, heads, _ = number.shape
    sums = cluster_recall(_rows(query, (batch, heads, 0, query.shape[3])), blocks, number, count)
    return _over_parts(_by_token(_counted(sums), tokens=1))


def attend_watching(
    query: Float[Array, "B T H_q D"], segments: tuple[Segment, ...], counted: Bool[Array, "B T"]
) -> tuple[Partials, tuple[Float[Array, "B H_kv S"], ...]]:
    """As `attend`, with the probability that each slot of each segment draws, in one reading of the keys.

    Args:
        counted: which queries' probabilities count; of others nothing is used but the shape.

    Returns:
        Partials, and for every segment its slots' probabilities, float32, summed over the counted queries and the query
        heads of a group.
    """
    sums = [_sums(query, segment, logits=True) for segment in segments]
    partials = merge(*(_partials(query, segment, one) for segment, one in zip(segments, sums, strict=True)))
    base, den = _finite(partials.max), jnp.where(partials.den == 0, 1.0, partials.den)

    def mass(segment: Segment, logits: Float[Array, "B H_kv R S"]) -> Float[Array, "B H_kv S"]:
        peak, total = (_rows(x[..., None], (*segment.keys.shape[:3], 1)) for x in (base, den))
        group = query.shape[2] // segment.keys.shape[1]
        counted_rows = jnp.repeat(counted, group, axis=1)[:, None, :, None]
        return jnp.sum(jnp.where(counted_rows, jnp.exp(logits - peak) / total, 0.0), axis=2)

    masses = (mass(segment, one.logits) for segment, one in zip(segments, sums, strict=True) if one.logits is not None)
    return partials, tuple(masses)


def merge(*partials: Partials) -> Partials:
    """Partials of the union of the entries; exact, associative and commutative up to rounding."""
    if not partials:
        raise ValueError("merge needs at least one Partials")
    peak = partials[0].max
    for other in partials[1:]:
        peak = jnp.maximum(peak, other.max)
    base = _finite(peak)
    factors = [jnp.exp(one.max - base) for one in partials]
    num = sum(one.num * factor[..., None] for one, factor in zip(partials, factors, strict=True))
    den = sum(one.den * factor for one, factor in zip(partials, factors, strict=True))
    return Partials(peak, jnp.asarray(num), jnp.asarray(den))


def output(partials: Partials, dtype: jax.typing.DTypeLike = jnp.float32) -> Float[Array, "B T H_q D"]:
    """num / den; zero where nothing was attended to."""
    empty = partials.den == 0
    return jnp.where(empty[..., None], 0.0, partials.num / jnp.where(empty, 1.0, partials.den)[..., None]).astype(dtype)


def _sums(query: Float[Array, "B T H_q D"], segment: Segment, *, logits: bool = False) -> Sums:
    rows = _rows(query, segment.keys.shape)
    return weighted_decode(rows, _entries(segment, query.shape[2] // segment.keys.shape[1]), logits=logits)


def _partials(query: Float[Array, "B T H_q D"], segment: Segment, sums: Sums) -> Partials:
    """What the sums of a segment's entries say about attention."""
    peak, num, den, _ = sums
    if segment.slope is not None and segment.slope_limit is not None:
        num = num + den[..., None] * _varying(_rows(query, segment.keys.shape), segment.slope, segment.slope_limit)
    partials = _by_token(_counted(Sums(peak, num, den)), tokens=query.shape[1])
    return _over_parts(partials) if segment.in_parts else partials


def _over_parts(own: Partials) -> Partials:
    """Partials of the entries of all devices that share a store: as `merge`, across devices."""
    if not are_shared():
        return own
    peak = largest_over_parts(own.max)
    factor = jnp.exp(own.max - _finite(peak))
    return Partials(peak, summed_over_parts(own.num * factor[..., None]), summed_over_parts(own.den * factor))


def _counted(sums: Sums) -> Partials:
    """The sums, which are zero where there was no entry: there every masked one stood at the peak with weight one."""
    peak, num, den, _ = sums
    empty = peak <= EMPTY / 2
    return Partials(jnp.where(empty, -jnp.inf, peak), jnp.where(empty[..., None], 0.0, num), jnp.where(empty, 0.0, den))


def _varying(
    rows: Float[Array, "B H_kv R D"], slope: Float[Array, "B H_kv D D"], limit: Float[Array, "B H_kv"]
) -> Float[Array, "B H_kv R D"]:
    """What each query adds to the values of a segment's entries: slope q / sqrt(D), softly bounded by the limit."""
    change = jnp.einsum("bhvd,bhrd->bhrv", slope, rows.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    change = change / math.sqrt(rows.shape[-1])
    limit = limit[:, :, None, None]
    size = jnp.sqrt(jnp.sum(change * change, axis=-1, keepdims=True) + limit * limit)
    return change * (limit / jnp.maximum(size, 1e-30))


def _rows(query: Float[Array, "B T H_q D"], keys_shape: tuple[int, ...]) -> Float[Array, "B H_kv R D"]:
    """The queries of each kv head as R = T * G rows."""
    batch, tokens, query_heads, head_dim = query.shape
    if keys_shape[0] != batch or keys_shape[3] != head_dim or query_heads % keys_shape[1]:
        raise ValueError(
            f"queries [B, T, H_q, D] = {query.shape} do not fit keys [B, H_kv, S, D] = {keys_shape}: B and D must be "
            "equal and H_q a multiple of H_kv"
        )
    kv_heads = keys_shape[1]
    grouped = query.reshape(batch, tokens, kv_heads, query_heads // kv_heads, head_dim)
    return grouped.swapaxes(1, 2).reshape(batch, kv_heads, -1, head_dim)


def _by_token(partials: Partials, tokens: int) -> Partials:
    """From [B, H_kv, R = T * G, ...] back to [B, T, H_q, ...]."""

    def back(x):
        batch, kv_heads, rows, *rest = x.shape
        grouped = x.reshape(batch, kv_heads, tokens, rows // tokens, *rest).swapaxes(1, 2)
        return grouped.reshape(batch, tokens, kv_heads * (rows // tokens), *rest)

    return Partials(back(partials.max), back(partials.num), back(partials.den))


def _entries(segment: Segment, group: int) -> Entries:
    """The segment as the hot loop takes it: bounds of tokens become bounds of rows, one per grouped head."""

    def of_rows(bound):
        return bound if bound is None or bound.ndim == 1 else jnp.repeat(bound, group, axis=1)

    return Entries(
        keys=segment.keys,
        values=segment.values,
        log_num=segment.log_num,
        log_den=segment.log_den,
        key_scale=segment.key_scale,
        value_scale=segment.value_scale,
        start=of_rows(segment.start),
        stop=of_rows(segment.stop),
        feeds=segment.feeds,
    )


def _finite(peak: Float[Array, "..."]) -> Float[Array, "..."]:
    # exp(-inf - -inf) is NaN; where there is no entry any finite base gives the right sums, which are zero.
    return jnp.where(jnp.isneginf(peak), 0.0, peak)
