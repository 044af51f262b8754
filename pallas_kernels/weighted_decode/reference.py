"""The meaning of `weighted_decode`, in plain jax.numpy, fast on CPU; every other form is tested against it."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.weighted_decode.base import EMPTY, Entries, Partials, compute_type

# Slots per block of the sum over values. Stores that can choose have a multiple of it.
SLOT_BLOCK = 64

# From so many query rows per kv head on, products are compute-bound and slots are the faster last axis.
MANY_ROWS = 64


def weighted_decode(rows: Float[Array, "B H R D"], entries: Entries, *, logits: bool = False) -> Partials:
    """Both sums of attention over the entries, accumulated in float32: with l = rows . keys / sqrt(D),
    num = sum_s exp(l_s + log_num_s - max) value_s and den = sum_s exp(l_s + log_den_s - max); where there is a
    `logit_cap`, l is capped first.

    Args:
        logits: give l + log_den, too.
    """
    return (_by_slot if rows.shape[2] < MANY_ROWS else _by_row)(rows, entries, logits)


def _by_slot(rows: Float[Array, "B H R D"], entries: Entries, logits: bool) -> Partials:
    """For few rows, as in decoding, where reading keys and values takes all the time.

    The order of axes decides how XLA:CPU runs this. All queries of a kv head are one operand's rows, batch and heads
    lead (any other order copies the keys), and from the logits on slots come in blocks, which lets both cores share
    the sum over values.
    """
    scores = jnp.einsum("bhsd,bhrd->bhsr", entries.keys, rows.astype(jnp.float32), preferred_element_type=jnp.float32)
    lay = lambda x: _in_blocks(x.swapaxes(2, 3))  # noqa: E731
    weighed = _weigh(_in_blocks(scores), entries, lay, slot_axes=(2, 4))
    num = _no_numerator(rows, entries)
    if weighed.values is not None and entries.values is not None:
        weights = weighed.values
        values = entries.values.reshape(*weights.shape[:3], weights.shape[4], -1)
        num = jnp.sum(jnp.einsum("bhnrt,bhntd->bhnrd", weights, values, preferred_element_type=jnp.float32), axis=2)
    given = weighed.logits.swapaxes(2, 3).reshape(*rows.shape[:3], -1) if logits else None
    return Partials(weighed.peak, num, weighed.den, given)


def _by_row(rows: Float[Array, "B H R D"], entries: Entries, logits: bool) -> Partials:
    """For many rows, as in prefill. With slots last XLA:CPU runs it at two to five times the speed; products are taken
    in the type of rows and entries, which is what matrix units are made for."""
    keys = entries.keys.astype(compute_type(rows.dtype, entries.keys.dtype))
    scores = jnp.einsum("bhrd,bhsd->bhrs", rows.astype(keys.dtype), keys, preferred_element_type=jnp.float32)
    weighed = _weigh(scores, entries, lambda x: x, slot_axes=(3,))
    num = _no_numerator(rows, entries)
    if weighed.values is not None and entries.values is not None:
        values = entries.values.astype(compute_type(rows.dtype, entries.values.dtype))
        weights = weighed.values.astype(values.dtype)
        num = jnp.einsum("bhrs,bhsd->bhrd", weights, values, preferred_element_type=jnp.float32)
    return Partials(weighed.peak, num, weighed.den, weighed.logits if logits else None)


def _no_numerator(rows: Float[Array, "B H R D"], entries: Entries) -> Float[Array, "B H R D_v"]:
    width = rows.shape[3] if entries.values is None else entries.values.shape[3]
    return jnp.zeros((*rows.shape[:3], width), jnp.float32)


class _Weighed(NamedTuple):
    peak: Float[Array, "B H R"]
    values: Float[Array, "B H *L"] | None  # every value's weight; None where the numerator is not fed
    den: Float[Array, "B H R"]
    logits: Float[Array, "B H *L"]  # of the denominator


def _weigh(
    logits: Float[Array, "B H *L"],
    entries: Entries,
    lay: Callable[[Float[Array, "#B #H #R S"]], Float[Array, "#B #H *L"]],
    slot_axes: tuple[int, ...],
) -> _Weighed:
    """From products of queries and keys to weights.

    Args:
        logits: in any layout of rows and slots.
        lay: brings what is added to logits, or multiplies them, into that layout.
        slot_axes: which axes of the layout slots are on.
    """
    logits = logits / math.sqrt(entries.keys.shape[-1])
    if entries.key_scale is not None:
        logits = logits * lay(entries.key_scale[:, :, None])
    if entries.logit_cap is not None:
        logits = entries.logit_cap * jnp.tanh(logits / entries.logit_cap)
    num_logits = den_logits = logits + lay(_bias(entries, entries.log_num))
    if entries.log_den is not None:
        den_logits = logits + lay(_bias(entries, entries.log_den))
    fed = {"both": (num_logits, den_logits), "numerator": (num_logits,), "denominator": (den_logits,)}[entries.feeds]
    peak = functools.reduce(jnp.maximum, (jnp.max(one, axis=slot_axes) for one in fed))
    peak = jnp.maximum(peak, EMPTY)
    base = jnp.expand_dims(peak, slot_axes)
    den = jnp.zeros_like(peak)
    if entries.feeds != "numerator":
        den = jnp.sum(jnp.exp(den_logits - base), axis=slot_axes)
    if entries.feeds == "denominator":
        return _Weighed(peak, None, den, den_logits)
    weights = jnp.exp(num_logits - base)
    if entries.value_scale is not None:
        weights = weights * lay(entries.value_scale[:, :, None])
    return _Weighed(peak, weights, den, den_logits)


def _bias(entries: Entries, log_weight: Float[Array, "B H S"] | None) -> Float[Array, "#B #H #R S"]:
    """What is added to the logits: the log-weights, and `EMPTY` where there is no entry."""
    slots = jnp.arange(entries.keys.shape[2], dtype=jnp.int32)[None, None, None]
    bias = jnp.zeros(slots.shape) if log_weight is None else jnp.maximum(log_weight, EMPTY)[:, :, None]
    if entries.start is not None:
        bias = jnp.where(slots >= _of_rows(entries.start), bias, EMPTY)
    if entries.stop is not None:
        bias = jnp.where(slots < _of_rows(entries.stop), bias, EMPTY)
    return bias


def _of_rows(bound: Int[Array, "B"] | Int[Array, "B R"]) -> Int[Array, "B 1 #R 1"]:
    return (bound[:, None] if bound.ndim == 1 else bound)[:, None, :, None]


def _in_blocks(x: Float[Array, "#B #H S #R"]) -> Float[Array, "#B #H n #R t"]:
    """Slots in blocks of `SLOT_BLOCK` behind the rows; in one block where their number is not a multiple of that."""
    batch, heads, slots, rows = x.shape
    block = SLOT_BLOCK if slots % SLOT_BLOCK == 0 else slots
    return x.reshape(batch, heads, slots // block, block, rows).swapaxes(3, 4)
