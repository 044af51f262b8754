"""A store that keeps every token, with capacity for all tokens that will come."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.distributed.collectives import global_slots, local_slot, local_stop, local_tokens
from kvjax.quantization import QuantizedArray, empty_quantized, write_entries
from kvjax.segment import Segment
from kvjax.spec import TILE, CacheSpec
from kvjax.staging import Tokens
from kvjax.state import ArrayField, fault, map_fields, state
from pallas_kernels.weighted_decode import SLOT_BLOCK


@state
class AppendOnlyStore:
    """The tokens of each row in its first slots, without gaps. Devices may share the slots.

    A token is quantized once, when it is written, and never touched again.
    """

    keys: Float[Array, "B H_kv N D"] | QuantizedArray
    values: Float[Array, "B H_kv N D_v"] | QuantizedArray
    count: Int[Array, "B"]  # int32
    overflow: Int[Array, "B"] = fault("tokens were appended to a full store that must keep all of them")


def init_append_only_store(spec: CacheSpec, max_prompt_tokens: int) -> AppendOnlyStore:
    """Returns an empty store.

    Returns:
        A store for such a prompt and `spec.max_new_tokens`, rounded up to blocks of attention on every device, or to
        tiles if a tile is less than a block.
    """
    slots = num_slots(spec, max_prompt_tokens + spec.max_new_tokens)
    shape, formats = (spec.batch, spec.kv_heads, slots), spec.kv_formats
    count, overflow = jnp.zeros(spec.batch, jnp.int32), jnp.zeros(spec.batch, jnp.int32)
    if formats is None:
        keys, values = jnp.zeros((*shape, spec.head_dim), spec.dtype), jnp.zeros((*shape, spec.value_width), spec.dtype)
        return AppendOnlyStore(keys, values, count, overflow)
    return AppendOnlyStore(
        empty_quantized(formats.keys, (*shape, spec.head_dim), offset_shape=(*shape[:2], spec.head_dim)),
        empty_quantized(formats.values, (*shape, spec.value_width)),
        count,
        overflow,
    )


def num_slots(spec: CacheSpec, tokens: int) -> int:
    """Returns the slots of a store for a number of tokens."""
    block = (SLOT_BLOCK if tokens > SLOT_BLOCK else TILE) * spec.sequence_shards
    return -(-tokens // block) * block


def resize(store: AppendOnlyStore, slots: int) -> AppendOnlyStore:
    """Returns a store with another number of slots, which devices must not share.

    Args:
        slots: the new number of slots.

    Returns:
        The store. Tokens beyond the last slot are dropped and counted in `overflow`.
    """

    def fit(field: ArrayField, buffer: Array) -> Array:
        """Returns a `buffer` with further empty slots, or without the last ones."""
        if "N" not in field.axes:
            return buffer
        axis = field.axes.index("N")
        kept = jax.lax.slice_in_dim(buffer, 0, min(slots, buffer.shape[axis]), axis=axis)
        widths = [(0, slots - kept.shape[axis] if number == axis else 0) for number in range(buffer.ndim)]
        return jnp.pad(kept, widths)

    lost = jnp.maximum(store.count - slots, 0)
    resized = map_fields(fit, store)
    return dataclasses.replace(resized, count=store.count - lost, overflow=store.overflow + lost)


def fill(store: AppendOnlyStore, prompt: Any) -> AppendOnlyStore:
    """Writes a prompt into an empty store.

    Args:
        prompt: a `kvjax.policy.Prompt`; it may be padded past the last slot.

    Returns:
        The store.
    """
    slots, valid = store.keys.shape[2], jnp.arange(prompt.keys.shape[2]) < prompt.lengths[:, None]

    def write(buffer: Array, new: Array) -> Array:
        """Writes `new` into the first slots of a `buffer`, on the device that holds them."""
        local = local_tokens(new, slots)
        return buffer.at[:, :, : local.shape[2]].set(local.astype(buffer.dtype))

    return _write(store, prompt.keys, prompt.values, valid, write, prompt.lengths)


def append(store: AppendOnlyStore, new: Tokens) -> AppendOnlyStore:
    """Appends tokens after the occupied slots of every row.

    Returns:
        The store. Tokens beyond the last slot are dropped and counted in `overflow`.
    """
    slots = store.keys.shape[2]
    target = local_slot(store.count[:, None] + jnp.arange(new.keys.shape[2]), slots)
    target = jnp.where(new.present, target, slots)

    def write(buffer: Array, new: Array) -> Array:
        """Writes `new` into the free slots of a `buffer`; tokens of other devices and empty slots are dropped."""
        put = jax.vmap(lambda buffer, new, target: buffer.at[:, target].set(new.astype(buffer.dtype), mode="drop"))
        return put(buffer, new, target)

    lost = jnp.maximum(store.count + new.count - jnp.maximum(store.count, global_slots(slots)), 0)
    written = _write(store, new.keys, new.values, new.present, write, store.count + new.count - lost)
    return dataclasses.replace(written, overflow=store.overflow + lost)


def store_segment(store: AppendOnlyStore) -> Segment:
    """Returns the store as attention reads it."""
    stop = local_stop(store.count, store.keys.shape[2])[:, None]
    return Segment(store.keys, store.values, stop=stop, sequence_sharded=True)


def _write(
    store: AppendOnlyStore, keys: Array, values: Array, valid: Bool[Array, "B T"], write: Any, count: Int[Array, "B"]
) -> AppendOnlyStore:
    """Writes tokens with `write(buffer, new)`, quantized where the store is."""
    return dataclasses.replace(
        store,
        keys=write_entries(store.keys, keys, write, valid=valid[:, None]),
        values=write_entries(store.values, values, write),
        count=count,
    )
