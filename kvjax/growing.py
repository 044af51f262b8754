"""Stores that keep every token added to them, with room for all that will ever come."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import window as windows
from kvjax.collectives import own_slot, own_stop, own_tokens, slots_in_all
from kvjax.segment import Segment
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import fault, state, static
from kvjax.storage import Storage, mean_of_first
from kvjax.window import Window, init_window
from pallas_kernels.weighted_decode import SLOT_BLOCK


@state
class Growing:
    """Tokens of each row in its first slots, without gaps. Devices may share the slots. A token is stored once, in the
    form of the storage where there is one, and never touched again."""

    keys: Float[Array, "B H_kv N D"]
    values: Float[Array, "B H_kv N D_v"]
    key_scale: Float[Array, "B H_kv N"] | None
    value_scale: Float[Array, "B H_kv N"] | None
    center: Float[Array, "B H_kv D"] | None  # float32, what stored keys are without
    count: Int[Array, "B"]  # int32
    overflow: Int[Array, "B"] = fault("tokens came to a full cache that must hold all of them")
    sinks: Window | None = None  # the first tokens, where storage leaves them as they are: these are not in the store
    storage: Storage | None = static(default=None)


def init_growing(spec: CacheSpec, prompt: int, sinks: int = 0) -> Growing:
    """An empty store for `prompt` tokens of a prompt and all new ones, rounded up to blocks of attention, for every
    device that shares it, and with so many sinks, where storage leaves them as they are."""
    block = SLOT_BLOCK * spec.parts
    slots = -(-(prompt + spec.max_new) // block) * block
    shape = (spec.batch, spec.kv_heads, slots)
    none = lambda: jnp.zeros(spec.batch, jnp.int32)  # noqa: E731
    if spec.storage is None:
        empty = lambda width: jnp.zeros((*shape, width), spec.dtype)  # noqa: E731
        return Growing(empty(spec.head_dim), empty(spec.value_width), None, None, None, none(), none())
    keys, values = spec.storage.empty(shape, spec.head_dim, spec.value_width)
    return Growing(
        keys.numbers,
        values.numbers,
        keys.scale[..., 0],
        values.scale[..., 0],
        jnp.zeros((*shape[:2], spec.head_dim)),
        none(),
        none(),
        sinks=init_window(spec, sinks, 0) if spec.storage.whole_window else None,
        storage=spec.storage,
    )


def fill(store: Growing, prompt: Any) -> Growing:
    """Puts a prompt into the first slots of an empty store; it may be padded past the last one."""
    slots, keys, values, count = store.keys.shape[2], prompt.keys, prompt.values, prompt.lengths
    if store.sinks is not None:
        sinks = windows.fill(store.sinks, prompt)
        _, _, count = windows.occupancy(sinks)
        keys, values = (windows.after_sinks(x, sinks.sinks) for x in (keys, values))
        store = dataclasses.replace(store, sinks=sinks)

    def put(buffer, fresh):
        here = own_tokens(fresh, slots)
        return buffer if buffer is None else buffer.at[:, :, : here.shape[2]].set(here.astype(buffer.dtype))

    store, fresh = _as_stored(store, keys, values, jnp.arange(keys.shape[2]) < count[:, None])
    return dataclasses.replace(store, **{name: put(getattr(store, name), x) for name, x in fresh.items()}, count=count)


def add(store: Growing, new: Tokens) -> Growing:
    """Puts tokens behind those that the rows have."""
    if store.sinks is not None:
        sinks, new = windows.slide(store.sinks, new)
        store = dataclasses.replace(store, sinks=sinks)
    here = store.keys.shape[2]
    slots = slots_in_all(here)
    target = own_slot(store.count[:, None] + jnp.arange(new.keys.shape[2]), here)
    target = jnp.where(new.present, target, here)
    put = jax.vmap(lambda buffer, fresh, target: buffer.at[:, target].set(fresh.astype(buffer.dtype), mode="drop"))
    store, fresh = _as_stored(store, new.keys, new.values, new.present)
    lost = jnp.maximum(store.count + new.count - jnp.maximum(store.count, slots), 0)
    return dataclasses.replace(
        store,
        **{name: put(getattr(store, name), x, target) for name, x in fresh.items()},
        count=store.count + new.count - lost,
        overflow=store.overflow + lost,
    )


def shown(store: Growing) -> tuple[Segment, ...]:
    """The store as attention reads it."""
    here = store.keys.shape[2]
    stop = own_stop(store.count, here)[:, None]
    tokens = Segment(
        store.keys,
        store.values,
        stop=stop,
        in_parts=True,
        key_scale=store.key_scale,
        value_scale=store.value_scale,
        center=store.center,
        key_bits=None if store.storage is None else store.storage.key_bits,
        value_bits=None if store.storage is None else store.storage.value_bits,
    )
    return (tokens,) if store.sinks is None else (*windows.shown(store.sinks), tokens)


def _as_stored(
    store: Growing, keys: Array, values: Array, there: Bool[Array, "B T"]
) -> tuple[Growing, dict[str, Array]]:
    """The store, which knows by now what its keys have in common, and tokens in its form."""
    if store.storage is None or store.center is None:
        return store, {"keys": keys, "values": values}
    center = mean_of_first(store.center, keys, there[:, None])
    of_keys, of_values = store.storage.store(keys - center[:, :, None], values)
    scales = {"key_scale": of_keys.scale[..., 0], "value_scale": of_values.scale[..., 0]}
    store = dataclasses.replace(store, center=center)
    return store, {"keys": of_keys.numbers, "values": of_values.numbers, **scales}
