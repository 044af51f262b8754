"""The definition of `weighted_decode`: partial softmax over the weighted entries of all stores, in float32."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.partials import MASK_VALUE, Partials, finite_max
from pallas_kernels.quantized_array import numbers, widened
from pallas_kernels.weighted_decode.entries import Entries


def weighted_decode(queries: Float[Array, "B H R D"], *stores: Entries, logits: bool = False) -> Partials:
    """Computes the partials of `weighted_decode`, with all logits in memory."""
    nums, dens, values = [], [], []
    for entries in stores:
        keys = numbers(entries.keys)
        products = jnp.einsum("bhrd,bhsd->bhrs", widened(queries), keys, precision="highest")
        logit = products / math.sqrt(queries.shape[3])
        if entries.logit_cap is not None:
            logit = entries.logit_cap * jnp.tanh(logit / entries.logit_cap)
        slots, is_read = jnp.arange(entries.slots), jnp.bool(True)
        if entries.start is not None:
            is_read &= slots >= entries.start.reshape(len(queries), 1, -1, 1)
        if entries.stop is not None:
            is_read &= slots < entries.stop.reshape(len(queries), 1, -1, 1)
        log_num = jnp.zeros(keys.shape[:3]) if entries.log_num is None else entries.log_num
        log_den = log_num if entries.log_den is None else entries.log_den
        if entries.values is None:  # the entries contribute to the denominator only
            log_num = jnp.full_like(log_num, -jnp.inf)
        nums.append(jnp.where(is_read, logit + log_num[:, :, None], -jnp.inf))
        dens.append(jnp.where(is_read, logit + log_den[:, :, None], -jnp.inf))
        values.append(jnp.zeros_like(keys) if entries.values is None else numbers(entries.values))
    num, den = jnp.concatenate(nums, axis=3), jnp.concatenate(dens, axis=3)
    maximum = jnp.max(jnp.maximum(num, den), axis=3)
    base = finite_max(maximum)[..., None]
    weights, all_values = jnp.exp(num - base), jnp.concatenate(values, axis=2)
    numerator = jnp.einsum("bhrs,bhsd->bhrd", weights, all_values, precision="highest")
    denominator = jnp.sum(jnp.exp(den - base), axis=3)
    # A finite maximum where a query attends to nothing, as kernels return it.
    slot_logits = jnp.maximum(den, MASK_VALUE) if logits else None
    return Partials(jnp.maximum(maximum, MASK_VALUE), numerator, denominator, slot_logits)
