"""Stores that keep every token appended to them, with room for all that will ever come."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.policy import CacheSpec
from kvjax.segment import Segment, segment
from kvjax.shards import own_slot, own_stop, own_tokens, slots_in_all
from kvjax.staging import Block, Window, window_segments
from kvjax.state import BATCH, HEAD_DIM, KV_HEADS, SEQUENCE, array, state
from pallas_kernels.weighted_decode import SLOT_BLOCK


@state
class Growing:
    """Tokens of each row in its first slots, without gaps. Devices may share the slots."""

    keys: Float[Array, "B H_kv S D"] = array(BATCH, KV_HEADS, SEQUENCE, HEAD_DIM, entries=True)
    values: Float[Array, "B H_kv S D"] = array(BATCH, KV_HEADS, SEQUENCE, HEAD_DIM, entries=True)


def init_growing(spec: CacheSpec, prompt: int) -> Growing:
    """An empty store for `prompt` tokens of a prompt and all new ones, rounded up to blocks of attention, for every
    device that shares it."""
    block = SLOT_BLOCK * spec.parts
    slots = -(-(prompt + spec.max_new) // block) * block
    shape = (spec.batch, spec.kv_heads, slots, spec.head_dim)
    return Growing(jnp.zeros(shape, spec.dtype), jnp.zeros(shape, spec.dtype))


def fill(store: Growing, keys: Float[Array, "B H_kv T D"], values: Float[Array, "B H_kv T D"]) -> Growing:
    """Puts tokens into the first slots; a prompt may be padded past the last one."""

    def put(buffer, tokens):
        own = own_tokens(tokens, buffer.shape[2]).astype(buffer.dtype)
        return buffer.at[:, :, : own.shape[2]].set(own)

    return Growing(put(store.keys, keys), put(store.values, values))


def append(store: Growing, block: Block, stored: Int[Array, "B"]) -> tuple[Growing, Int[Array, "B"]]:
    """Puts a block's tokens behind the `stored[b]` that row b has: the store, and how many found no slot."""
    own = store.keys.shape[2]
    slots = slots_in_all(own)
    target = own_slot(stored[:, None] + jnp.arange(block.keys.shape[2]), own)
    target = jnp.where(block.present, target, own)

    def put(buffer, fresh, target):
        return buffer.at[:, target].set(fresh, mode="drop")

    put_rows = jax.vmap(put)
    store = Growing(put_rows(store.keys, block.keys, target), put_rows(store.values, block.values, target))
    return store, jnp.maximum(stored + block.count - jnp.maximum(stored, slots), 0)


def growing_segments(
    store: Growing, stored: Int[Array, "B"], window: Window, queries: int | None
) -> tuple[Segment, ...]:
    """The store and, behind it, a window as attention reads them; for `queries` see `window_segments`."""
    own = store.keys.shape[2]
    stop = own_stop(jnp.minimum(stored, slots_in_all(own)), own)
    kept = segment(store.keys, store.values, stop=stop, in_parts=True)
    return kept, *window_segments(window, queries=queries)
