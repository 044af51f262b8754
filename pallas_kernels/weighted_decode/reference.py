"""The meaning of `weighted_decode`, in plain jax.numpy, fast on CPU; every other form is tested against it."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import packing
from pallas_kernels.weighted_decode.base import EMPTY, Entries, Partials, compute_type, merge_sums, occupied

# Slots per block of the sum over values. Stores that can choose have a multiple of it.
SLOT_BLOCK = 64

# From so many query rows per kv head on, products are compute-bound and slots are the faster last axis.
MANY_ROWS = 64

# Quantised keys that are widened at a time, in numbers of all rows and heads: few enough to stay in a core's cache.
WIDENED = 2**18


def weighted_decode(rows: Float[Array, "B H R D"], *stores: Entries, logits: bool = False) -> Partials:
    """Both sums of attention over the entries of all stores, accumulated in float32: with l = rows . keys / sqrt(D),
    num = sum_s exp(l_s + log_num_s - max) value_s and den = sum_s exp(l_s + log_den_s - max); where there is a
    `logit_cap`, l is capped first.

    Args:
        logits: give l + log_den, too, of one store.
    """
    if len(stores) > 1:
        return merge_sums(*(weighted_decode(rows, entries) for entries in stores))
    (entries,) = stores
    if rows.shape[2] >= MANY_ROWS:
        return _by_row(rows, entries, logits)
    narrow = entries.keys.dtype.itemsize == 1
    return (_in_turns if narrow else _by_slot)(rows, entries, logits)


def _in_turns(rows: Float[Array, "B H R D"], entries: Entries, logits: bool) -> Partials:
    """For few rows and quantised entries, of which a block after the other is widened.

    XLA:CPU has no products of eight-bit numbers. All at once it would widen what it reads into memory, at every step or
    once before a loop over steps, for as long as that runs; blocks whose place depends on this loop it cannot.
    """
    batch, heads, count, head_dim = rows.shape
    slots = entries.keys.shape[2]
    block = max(WIDENED // (batch * heads * head_dim) // SLOT_BLOCK, 1) * SLOT_BLOCK
    if slots <= block:
        return _by_slot(rows, entries, logits)

    def part(first: int | Int[Array, ""], size: int) -> Entries:
        take = lambda x: None if x is None else jax.lax.dynamic_slice_in_dim(x, first, size, axis=2)  # noqa: E731
        shift = lambda x: None if x is None else x - first  # noqa: E731
        sliced: dict[str, Any] = {name: take(getattr(entries, name)) for name in _BY_SLOT}
        return dataclasses.replace(entries, **sliced, start=shift(entries.start), stop=shift(entries.stop))

    def add(number: Int[Array, ""], sums: Partials) -> Partials:
        return _with_block(sums, number * block, _by_slot(rows, part(number * block, block), logits))

    none = jnp.zeros((batch, heads, count))
    sums = Partials(
        none + EMPTY,
        _no_numerator(rows, entries),
        none,
        jnp.full((*none.shape, slots), EMPTY) if logits else None,
    )
    whole = slots // block
    _, _, lowest, highest = occupied(entries)
    first, last = jnp.min(lowest) // block, -(-jnp.max(highest) // block)
    sums = jax.lax.fori_loop(jnp.minimum(first, whole), jnp.minimum(last, whole), add, sums)
    if slots % block:
        sums = _with_block(sums, whole * block, _by_slot(rows, part(whole * block, slots % block), logits))
    return sums


# Arrays of `Entries` whose third axis is slots.
_BY_SLOT = ("keys", "values", "log_num", "log_den", "key_scale", "value_scale")


def _with_block(sums: Partials, first: int | Int[Array, ""], block: Partials) -> Partials:
    """Sums over one more block of slots."""
    logits = sums.logits
    if logits is not None and block.logits is not None:
        logits = jax.lax.dynamic_update_slice_in_dim(logits, block.logits, first, axis=3)
    return merge_sums(sums, block)._replace(logits=logits)


def _by_slot(rows: Float[Array, "B H R D"], entries: Entries, logits: bool) -> Partials:
    """For few rows, as in decoding, where reading keys and values takes all the time.

    The order of axes decides how XLA:CPU runs this. All queries of a kv head are one operand's rows, batch and heads
    lead (any other order copies the keys), and from the logits on slots come in blocks, which lets both cores share
    the sum over values.
    """
    scores = _products(rows.astype(jnp.float32), entries)
    lay = lambda x: _in_blocks(x.swapaxes(2, 3))  # noqa: E731
    weighed = _weigh(_in_blocks(scores / math.sqrt(rows.shape[3])), entries, lay, slot_axes=(2, 4))
    num = _no_numerator(rows, entries)
    if weighed.values is not None and entries.values is not None:
        num = _gathered(weighed.values, entries.values, entries.value_bits)
    given = weighed.logits.swapaxes(2, 3).reshape(*rows.shape[:3], -1) if logits else None
    return Partials(weighed.peak, num, weighed.den, given)


def _products(rows: Float[Array, "B H R D"], entries: Entries) -> Float[Array, "B H S R"]:
    """Rows times keys. Packed ones are never brought into one array: a product with them is a sum of products."""

    def with_rows(keys: Array, columns: slice) -> Array:
        return jnp.einsum("bhsd,bhrd->bhsr", keys, rows[..., columns], preferred_element_type=jnp.float32)

    if entries.key_bits is None:
        return with_rows(entries.keys, slice(None))
    codes = lambda part: part.codes(entries.keys[..., part.bytes]).astype(jnp.float32)  # noqa: E731
    parts = packing.parts(rows.shape[3], entries.key_bits)
    with_codes = sum(with_rows(codes(part), part.columns) * part.factor for part in parts)
    return 2 * with_codes - packing.largest(entries.key_bits) * jnp.sum(rows, axis=-1)[:, :, None]


def _gathered(
    weights: Float[Array, "B H n R t"], values: Float[Array, "B H S D_v"], bits: int | None
) -> Float[Array, "B H R D_v"]:
    """Values by their weights, alike."""

    def weighted(values: Array) -> Array:
        values = values.reshape(*weights.shape[:3], weights.shape[4], -1)
        return jnp.sum(jnp.einsum("bhnrt,bhntd->bhnrd", weights, values, preferred_element_type=jnp.float32), axis=2)

    if bits is None:
        return weighted(values)
    of_part = lambda part: weighted(part.codes(values[..., part.bytes]).astype(jnp.float32))  # noqa: E731
    parts = packing.parts(packing.unpacked_width(values.shape[3], bits), bits)
    codes = packing.joined((part.factor, of_part(part)) for part in parts)
    return 2 * codes - packing.largest(bits) * jnp.sum(weights, axis=(2, 4))[..., None]


def _by_row(rows: Float[Array, "B H R D"], entries: Entries, logits: bool) -> Partials:
    """For many rows, as in prefill. With slots last XLA:CPU runs it at two to five times the speed; products are taken
    in the type of rows and entries, which is what matrix units are made for."""
    keys = _widened(entries.keys, entries.key_bits).astype(compute_type(rows.dtype, entries.keys.dtype))
    # Rows are few beside scores; in a narrow type they would be rounded.
    root = math.sqrt(rows.shape[3])
    rows, divisor = (rows / root, 1) if keys.dtype == jnp.float32 else (rows, root)
    scores = jnp.einsum("bhrd,bhsd->bhrs", rows.astype(keys.dtype), keys, preferred_element_type=jnp.float32)
    weighed = _weigh(scores / divisor, entries, lambda x: x, slot_axes=(3,))
    num = _no_numerator(rows, entries)
    if weighed.values is not None and entries.values is not None:
        values = _widened(entries.values, entries.value_bits)
        values = values.astype(compute_type(rows.dtype, entries.values.dtype))
        weights = weighed.values.astype(values.dtype)
        num = jnp.einsum("bhrs,bhsd->bhrd", weights, values, preferred_element_type=jnp.float32)
    return Partials(weighed.peak, num, weighed.den, weighed.logits if logits else None)


def _widened(stored: Array, bits: int | None) -> Array:
    """Numbers apart from each other; packed ones are whole numbers below 16, which every type has."""
    return stored if bits is None else 2 * packing.unpack(stored, bits).astype(jnp.int8) - packing.largest(bits)


def _no_numerator(rows: Float[Array, "B H R D"], entries: Entries) -> Float[Array, "B H R D_v"]:
    width = rows.shape[3] if entries.value_dim is None else entries.value_dim
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
        logits: products by 1 / sqrt(D), in any layout of rows and slots.
        lay: brings what is added to logits, or multiplies them, into that layout.
        slot_axes: which axes of the layout slots are on.
    """
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
