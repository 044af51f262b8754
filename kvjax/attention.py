"""Attention over weighted segments: the semantics of every cache in kvjax, in plain jax.numpy.

    out(q) = sum_s exp(q.k_s / sqrt(D) + log_num_s) v_s / sum_s exp(q.k_s / sqrt(D) + log_den_s)

A segment gives float32 partials (a maximum and the two sums relative to it); partials of several segments merge by
rescaling. A model whose logits use another scale folds the difference into its queries.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.segment import Segment
from kvjax.state import BATCH, HEAD_DIM, array, state

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
    rows = _rows(query, segment.keys.shape)
    sums = _sums_by_slot if rows.shape[2] < MANY_ROWS else _sums_by_row
    peak, num, den = sums(rows, segment, group=query.shape[2] // segment.keys.shape[1])
    if segment.slope is not None and segment.slope_limit is not None:
        num = num + den[..., None] * _varying(rows, segment.slope, segment.slope_limit)
    # Where there was no entry, every masked one stood at the peak with weight one.
    empty = peak <= _EMPTY / 2
    return _by_token(
        Partials(jnp.where(empty, -jnp.inf, peak), jnp.where(empty[..., None], 0.0, num), jnp.where(empty, 0.0, den)),
        tokens=query.shape[1],
    )


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


def slot_mass(
    query: Float[Array, "B T H_q D"], segment: Segment, partials: Partials, counted: Bool[Array, "B T"]
) -> Float[Array, "B H_kv S"]:
    """The probability that each slot of a segment draws, summed over the counted queries and the query heads of a
    group; float32.

    Args:
        partials: of the same queries' attention to all entries, this segment's among them.
        counted: which queries count; of others nothing is used but the shape.
    """
    rows = _rows(query, segment.keys.shape)
    group = query.shape[2] // segment.keys.shape[1]
    # The product is written as in `_sums_by_slot`, so that a compiler takes it once for both.
    logits = jnp.einsum("bhsd,bhrd->bhsr", segment.keys, rows.astype(jnp.float32), preferred_element_type=jnp.float32)
    logits = logits / math.sqrt(segment.keys.shape[-1])
    if segment.key_scale is not None:
        logits = logits * segment.key_scale[..., None]
    logits = logits + _bias(segment, segment.log_num if segment.log_den is None else segment.log_den, group).swapaxes(
        2, 3
    )
    peak, den = (_rows(x[..., None], (*segment.keys.shape[:3], 1))[..., 0] for x in (partials.max, partials.den))
    share = jnp.exp(logits - _finite(peak)[:, :, None]) / jnp.where(den == 0, 1.0, den)[:, :, None]
    taken = jnp.repeat(counted, group, axis=1)[:, None, None]
    return jnp.sum(jnp.where(taken, share, 0.0), axis=-1)


# Stands for -inf inside products and sums, where -inf would make NaN of differences; far below any logit.
_EMPTY = -1e30

# Slots per block of the sum over values. Stores that can choose have a multiple of it.
SLOT_BLOCK = 64

# From so many query rows per kv head on, products are compute-bound and slots are the faster last axis.
MANY_ROWS = 64

Sums = tuple[Float[Array, "B H_kv R"], Float[Array, "B H_kv R D"], Float[Array, "B H_kv R"]]


def _sums_by_slot(rows: Float[Array, "B H_kv R D"], segment: Segment, group: int) -> Sums:
    """Maximum and both sums for few rows, as in decoding, where reading keys and values takes all the time.

    The order of axes decides how XLA:CPU runs this. All queries of a kv head are one operand's rows, batch and heads
    lead (any other order copies the keys), and from the logits on slots come in blocks, which lets both cores share
    the sum over values.
    """
    logits = jnp.einsum("bhsd,bhrd->bhsr", segment.keys, rows.astype(jnp.float32), preferred_element_type=jnp.float32)
    lay = lambda x: _by_block(x.swapaxes(2, 3))  # noqa: E731
    peak, weights, den = _weigh(_by_block(logits), segment, group, lay, slot_axes=(2, 4))
    if segment.values is None or weights is None:
        return peak, jnp.zeros(rows.shape, jnp.float32), den
    values = segment.values.reshape(*weights.shape[:3], weights.shape[4], -1)
    num = jnp.einsum("bhnrt,bhntd->bhnrd", weights, values, preferred_element_type=jnp.float32)
    return peak, jnp.sum(num, axis=2), den


def _sums_by_row(rows: Float[Array, "B H_kv R D"], segment: Segment, group: int) -> Sums:
    """The same for many rows, as in prefill. With slots last XLA:CPU runs it at two to five times the speed; products
    are taken in the type of queries and entries, which is what matrix units are made for."""
    keys = segment.keys.astype(jnp.promote_types(rows.dtype, segment.keys.dtype))
    logits = jnp.einsum("bhrd,bhsd->bhrs", rows.astype(keys.dtype), keys, preferred_element_type=jnp.float32)
    peak, weights, den = _weigh(logits, segment, group, lambda x: x, slot_axes=(3,))
    if segment.values is None or weights is None:
        return peak, jnp.zeros(rows.shape, jnp.float32), den
    values = segment.values.astype(jnp.promote_types(rows.dtype, segment.values.dtype))
    num = jnp.einsum("bhrs,bhsd->bhrd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return peak, num, den


def _weigh(
    logits: Float[Array, "B H_kv *L"],
    segment: Segment,
    group: int,
    lay: Callable[[Float[Array, "#B #H_kv #R S"]], Float[Array, "#B #H_kv *L"]],
    slot_axes: tuple[int, ...],
) -> tuple[Float[Array, "B H_kv R"], Float[Array, "B H_kv *L"] | None, Float[Array, "B H_kv R"]]:
    """From logits to the maximum, every value's weight (None where the numerator is not fed) and the denominator.

    Args:
        logits: in any layout of rows and slots.
        lay: brings what is added to logits, or multiplies them, into that layout.
        slot_axes: which axes of the layout slots are on.
    """
    logits = logits / math.sqrt(segment.keys.shape[-1])
    if segment.key_scale is not None:
        logits = logits * lay(segment.key_scale[:, :, None])
    num_logits = den_logits = logits + lay(_bias(segment, segment.log_num, group))
    if segment.log_den is not None:
        den_logits = logits + lay(_bias(segment, segment.log_den, group))
    fed = {"both": (num_logits, den_logits), "numerator": (num_logits,), "denominator": (den_logits,)}[segment.feeds]
    peak = functools.reduce(jnp.maximum, (jnp.max(one, axis=slot_axes) for one in fed))
    peak = jnp.maximum(peak, _EMPTY)
    base = jnp.expand_dims(peak, slot_axes)
    den = jnp.zeros_like(peak)
    if segment.feeds != "numerator":
        den = jnp.sum(jnp.exp(den_logits - base), axis=slot_axes)
    if segment.feeds == "denominator":
        return peak, None, den
    weights = jnp.exp(num_logits - base)
    return peak, weights if segment.value_scale is None else weights * lay(segment.value_scale[:, :, None]), den


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


def _bias(segment: Segment, log_weight: Float[Array, "B H_kv S"] | None, group: int) -> Float[Array, "#B #H #R S"]:
    """What is added to the logits: the log-weights, and `_EMPTY` where there is no entry."""
    slots = jnp.arange(segment.keys.shape[2], dtype=jnp.int32)[None, None, None]
    bias = jnp.zeros(slots.shape) if log_weight is None else jnp.maximum(log_weight, _EMPTY)[:, :, None]
    if segment.start is not None:
        bias = jnp.where(slots >= _by_row(segment.start, group), bias, _EMPTY)
    if segment.stop is not None:
        bias = jnp.where(slots < _by_row(segment.stop, group), bias, _EMPTY)
    return bias


def _by_row(bound: Int[Array, "B"] | Int[Array, "B T"], group: int) -> Int[Array, "B 1 #R 1"]:
    rows = bound[:, None] if bound.ndim == 1 else jnp.repeat(bound, group, axis=1)
    return rows[:, None, :, None]


def _by_block(x: Float[Array, "#B #H S #R"]) -> Float[Array, "#B #H n #R t"]:
    """Slots in blocks of `SLOT_BLOCK` behind the rows; in one block where their number is not a multiple of that."""
    batch, heads, slots, rows = x.shape
    block = SLOT_BLOCK if slots % SLOT_BLOCK == 0 else slots
    return x.reshape(batch, heads, slots // block, block, rows).swapaxes(3, 4)


def _finite(peak: Float[Array, "..."]) -> Float[Array, "..."]:
    # exp(-inf - -inf) is NaN; where there is no entry any finite base gives the right sums, which are zero.
    return jnp.where(jnp.isneginf(peak), 0.0, peak)
