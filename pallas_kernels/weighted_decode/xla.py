"""`weighted_decode` in XLA, tuned for CPUs: few or many queries, one block of slots after the other."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import packing
from pallas_kernels.dispatch import target
from pallas_kernels.partials import MASK_VALUE, Partials, merge_partials
from pallas_kernels.quantized_array import product_dtype
from pallas_kernels.weighted_decode.entries import COMPUTE_BOUND_QUERIES, Entries, read_ranges

# Slots per block of the weighted sum over values. Stores that choose their number of slots use a multiple of it.
SLOT_BLOCK = 64

# Quantized numbers of all heads that are converted to float32 at a time, so that they stay in a core's cache.
DEQUANTIZED_BLOCK = 2**18

# Slots that many queries attend to at a time, so that the logits of a head stay in a core's cache. Other devices take
# more slots, up to this number of logits.
MANY_QUERIES_BLOCK, MAX_LOGITS = 1024, 2**25


def weighted_decode(queries: Float[Array, "B H R D"], *stores: Entries, logits: bool = False) -> Partials:
    """Computes partials of attention to the entries of all stores, accumulated in float32.

    With l_s = queries . keys_s / sqrt(D), capped by `logit_cap` if set, the numerator is
    sum_s exp(l_s + log_num_s - max) value_s and the denominator sum_s exp(l_s + log_den_s - max).

    Args:
        queries: The R queries of each KV head.
        *stores: One or more sets of entries.
        logits: Whether to return l_s + log_den_s; for one store only.

    Returns:
        Partials over the union of the entries.
    """
    if len(stores) > 1:
        return merge_partials(*(weighted_decode(queries, entries) for entries in stores))
    (entries,) = stores
    batch, heads, count, head_dim = queries.shape
    if count >= COMPUTE_BOUND_QUERIES:
        max_slots = 0 if target().platform == "cpu" else MAX_LOGITS // (batch * heads * count)
        block = max(max_slots // SLOT_BLOCK * SLOT_BLOCK, MANY_QUERIES_BLOCK)
        return _attend_in_blocks(_attend_many_queries, block, queries, entries, logits)
    stored = {entries.slot_arrays[name].dtype for name in ("keys", "values") if name in entries.slot_arrays}
    if target().platform == "cpu" and stored == {jnp.dtype(jnp.bfloat16)} == {queries.dtype}:
        # XLA:CPU multiplies bfloat16 numbers as they are in the order of axes of many queries, of at least two.
        several = jnp.pad(queries, ((0, 0), (0, 0), (0, int(count == 1)), (0, 0)))
        partials = _attend_many_queries(several, entries, logits, exact_weights=True)
        return jax.tree.map(lambda x: x[:, :, :count], partials)
    if entries.slot_arrays["keys"].dtype.itemsize > 1:
        return _attend_few_queries(queries, entries, logits)
    # XLA:CPU has no eight-bit products. It would convert all entries to float32 in memory, or hoist the conversion out
    # of a loop over decode steps; blocks whose position depends on this loop cannot be hoisted.
    block = max(DEQUANTIZED_BLOCK // (batch * heads * head_dim) // SLOT_BLOCK, 1) * SLOT_BLOCK
    return _attend_in_blocks(_attend_few_queries, block, queries, entries, logits)


def _attend_in_blocks(
    attend: Callable[[Float[Array, "B H R D"], Entries, bool], Partials],
    block: int,
    queries: Float[Array, "B H R D"],
    entries: Entries,
    logits: bool,
) -> Partials:
    """Returns partials by `attend` to one block of slots after the other; blocks that no query reads are skipped."""
    batch, heads, count, _ = queries.shape
    slots = entries.slots
    if slots <= block:
        return attend(queries, entries, logits)

    def slice_slots(first: int | Int[Array, ""], size: int) -> Entries:
        """Returns `size` entries from slot `first` on."""
        slot_axes = {name: getattr(entries, name) for name in ("keys", "values", "log_num", "log_den")}
        sliced = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, size, axis=2), slot_axes)
        bounds = jax.tree.map(lambda bound: bound - first, {"start": entries.start, "stop": entries.stop})
        return dataclasses.replace(entries, **sliced, **bounds)

    def add_block(index: Int[Array, ""], partials: Partials) -> Partials:
        """Returns `partials` with block `index` added."""
        first = index * block
        return _merge_block(partials, first, attend(queries, slice_slots(first, block), logits))

    zeros = jnp.zeros((batch, heads, count))
    masked_logits = jnp.full((*zeros.shape, slots), MASK_VALUE) if logits else None
    partials = Partials(zeros + MASK_VALUE, _zero_numerator(queries, entries), zeros, masked_logits)
    full_blocks = slots // block
    ranges = read_ranges(entries)
    first, last = jnp.min(ranges.lowest) // block, -(-jnp.max(ranges.highest) // block)
    first, last = jnp.minimum(first, full_blocks), jnp.minimum(last, full_blocks)
    partials = jax.lax.fori_loop(first, last, add_block, partials)
    if slots % block:
        last_block = attend(queries, slice_slots(full_blocks * block, slots % block), logits)
        partials = _merge_block(partials, full_blocks * block, last_block)
    return partials


def _merge_block(partials: Partials, first: int | Int[Array, ""], block: Partials) -> Partials:
    """Returns partials merged with the partials of a block of slots that begins at `first`."""
    logits = partials.logits
    if logits is not None and block.logits is not None:
        logits = jax.lax.dynamic_update_slice_in_dim(logits, block.logits, first, axis=3)
    return merge_partials(partials, block)._replace(logits=logits)


def _attend_few_queries(queries: Float[Array, "B H R D"], entries: Entries, logits: bool) -> Partials:
    """Returns partials of few queries, as in decoding, where reading keys and values takes all the time.

    The order of axes decides the speed on XLA:CPU. The queries of a KV head are the rows of one operand, batch and head
    axes lead (any other order copies the keys), and the logits have slots in blocks, which lets all cores share the
    sum over values.
    """
    products = _query_key_products(queries.astype(jnp.float32), entries)

    def lay_out(x: Float[Array, "#B #H #R S"]) -> Float[Array, "#B #H n #R t"]:
        return _split_slots(x.swapaxes(2, 3))

    products = _split_slots(products / math.sqrt(queries.shape[3]))
    maximum, weights, denominator, den_logits = _compute_weights(products, entries, lay_out, slot_axes=(2, 4))
    numerator = _zero_numerator(queries, entries)
    if weights is not None:
        numerator = _weighted_values(weights, entries.slot_arrays["values"], entries.bits["values"])
    slot_logits = den_logits.swapaxes(2, 3).reshape(*queries.shape[:3], -1) if logits else None
    return Partials(maximum, numerator, denominator, slot_logits)


def _query_key_products(queries: Float[Array, "B H R D"], entries: Entries) -> Float[Array, "B H S R"]:
    """Returns products of queries and keys. Packed keys are not unpacked; the products of their parts are summed."""
    keys, bits = entries.slot_arrays["keys"], entries.bits["keys"]

    def multiply(keys: Array, columns: slice) -> Array:
        return jnp.einsum("bhsd,bhrd->bhsr", keys, queries[..., columns], preferred_element_type=jnp.float32)

    if bits is None:
        return multiply(keys, slice(None))
    parts = packing.parts(queries.shape[3], bits)
    codes = ((part, part.codes(keys[..., part.bytes]).astype(jnp.float32)) for part in parts)
    products = sum(multiply(keys, part.columns) * part.factor for part, keys in codes)
    return 2 * products - packing.largest(bits) * jnp.sum(queries, axis=-1)[:, :, None]


def _weighted_values(
    weights: Float[Array, "B H n R t"], values: Float[Array, "B H S D_v"], bits: int | None
) -> Float[Array, "B H R D_v"]:
    """Returns weighted sums of values, with packed values as in `_query_key_products`."""

    def weigh(values: Array) -> Array:
        values = values.reshape(*weights.shape[:3], weights.shape[4], -1)
        return jnp.sum(jnp.einsum("bhnrt,bhntd->bhnrd", weights, values, preferred_element_type=jnp.float32), axis=2)

    if bits is None:
        return weigh(values)
    codes = packing.join_parts(
        (part.factor, weigh(part.codes(values[..., part.bytes]).astype(jnp.float32)))
        for part in packing.parts(packing.unpacked_width(values.shape[3], bits), bits)
    )
    return 2 * codes - packing.largest(bits) * jnp.sum(weights, axis=(2, 4))[..., None]


def _attend_many_queries(
    queries: Float[Array, "B H R D"], entries: Entries, logits: bool, *, exact_weights: bool = False
) -> Partials:
    """Returns partials of many queries, as in prefill.

    XLA:CPU is two to five times as fast with slots as the last axis. Products use the dtype of queries and entries,
    which is the fast one of matrix units; weights are rounded to it, unless `exact_weights`.
    """
    arrays = entries.slot_arrays
    keys = _unpacked(arrays["keys"], entries.bits["keys"]).astype(product_dtype(queries.dtype, arrays["keys"].dtype))
    # Dividing queries is cheaper than dividing logits, but would round queries of a narrow dtype.
    root = math.sqrt(queries.shape[3])
    queries, divisor = (queries / root, 1) if keys.dtype == jnp.float32 else (queries, root)
    products = jnp.einsum("bhrd,bhsd->bhrs", queries.astype(keys.dtype), keys, preferred_element_type=jnp.float32)
    products = products / divisor
    maximum, weights, denominator, den_logits = _compute_weights(products, entries, lambda x: x, slot_axes=(3,))
    numerator = _zero_numerator(queries, entries)
    if weights is not None:
        dtype = product_dtype(queries.dtype, arrays["values"].dtype)
        values = _unpacked(arrays["values"], entries.bits["values"]).astype(dtype)
        largest_scale: Any = 1.0
        if dtype == jnp.float16 and "value_scale" in arrays:
            # Weights times scales of small values would underflow.
            largest_scale = jnp.max(jnp.abs(arrays["value_scale"]), axis=2)[:, :, None, None]
            largest_scale = jnp.where(largest_scale > 0, largest_scale, 1.0)
            weights = weights / largest_scale
        parts = [weights]
        if exact_weights:  # rows of rounded weights, and rows of what rounding leaves
            rounded = jax.lax.reduce_precision(weights, exponent_bits=8, mantissa_bits=7)
            parts = [rounded, weights - rounded]
        rows = jnp.concatenate(parts, axis=2).astype(dtype)
        numerator = jnp.einsum("bhrs,bhsd->bhrd", rows, values, preferred_element_type=jnp.float32)
        numerator = functools.reduce(jnp.add, jnp.split(numerator, len(parts), axis=2)) * largest_scale
    return Partials(maximum, numerator, denominator, den_logits if logits else None)


def _unpacked(stored: Array, bits: int | None) -> Array:
    """Returns the odd numbers that codes stand for, which every float dtype represents exactly."""
    return stored if bits is None else 2 * packing.unpack(stored, bits).astype(jnp.int8) - packing.largest(bits)


def _zero_numerator(queries: Float[Array, "B H R D"], entries: Entries) -> Float[Array, "B H R D_v"]:
    width = queries.shape[3] if entries.value_dim is None else entries.value_dim
    return jnp.zeros((*queries.shape[:3], width), jnp.float32)


def _compute_weights(
    logits: Float[Array, "B H *L"],
    entries: Entries,
    lay_out: Callable[[Float[Array, "#B #H #R S"]], Float[Array, "#B #H *L"]],
    slot_axes: tuple[int, ...],
) -> tuple[Array, Array | None, Array, Array]:
    """Computes attention weights from the products of queries and keys.

    Args:
        logits: Products divided by sqrt(D), in a layout L of queries and slots.
        lay_out: Brings per-slot arrays into that layout.

    Returns:
        The maximum, the weights of values relative to exp(maximum) in that layout (None without values), the
        denominator, and its logits in that layout.
    """
    arrays = entries.slot_arrays
    if "key_scale" in arrays:
        logits = logits * lay_out(arrays["key_scale"][:, :, None])
    if entries.logit_cap is not None:
        logits = entries.logit_cap * jnp.tanh(logits / entries.logit_cap)
    num_logits = den_logits = logits + lay_out(_bias(entries, arrays.get("log_num")))
    if "log_den" in arrays:
        den_logits = logits + lay_out(_bias(entries, arrays["log_den"]))
    contributions = (den_logits,) if entries.values is None else (num_logits, den_logits)
    maximum = functools.reduce(jnp.maximum, (jnp.max(one, axis=slot_axes) for one in contributions))
    maximum = jnp.maximum(maximum, MASK_VALUE)
    base = jnp.expand_dims(maximum, slot_axes)
    denominator = jnp.sum(jnp.exp(den_logits - base), axis=slot_axes)
    if entries.values is None:
        return maximum, None, denominator, den_logits
    weights = jnp.exp(num_logits - base)
    if "value_scale" in arrays:
        weights = weights * lay_out(arrays["value_scale"][:, :, None])
    return maximum, weights, denominator, den_logits


def _bias(entries: Entries, log_weight: Float[Array, "B H S"] | None) -> Float[Array, "#B #H #R S"]:
    """Returns log-weights, and `MASK_VALUE` for slots outside the ranges."""
    slots = jnp.arange(entries.slots, dtype=jnp.int32)[None, None, None]
    bias = jnp.zeros(slots.shape) if log_weight is None else jnp.maximum(log_weight, MASK_VALUE)[:, :, None]
    if entries.start is not None:
        bias = jnp.where(slots >= _per_query(entries.start), bias, MASK_VALUE)
    if entries.stop is not None:
        bias = jnp.where(slots < _per_query(entries.stop), bias, MASK_VALUE)
    return bias


def _per_query(bound: Int[Array, "B"] | Int[Array, "B R"]) -> Int[Array, "B 1 #R 1"]:
    return (bound[:, None] if bound.ndim == 1 else bound)[:, None, :, None]


def _split_slots(x: Float[Array, "#B #H S #R"]) -> Float[Array, "#B #H n #R t"]:
    """Returns slots in blocks of `SLOT_BLOCK`, or in one block if S is not a multiple of it."""
    batch, heads, slots, queries = x.shape
    block = SLOT_BLOCK if slots % SLOT_BLOCK == 0 else slots
    return x.reshape(batch, heads, slots // block, block, queries).swapaxes(3, 4)
