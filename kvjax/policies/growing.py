"""Stores that keep every token appended to them, with room for all that will ever come."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.policies.windowed import WindowedState
from kvjax.policy import CacheSpec
from kvjax.segment import Segment
from kvjax.staging import Block, Window, init_window, window_segments
from pallas_kernels.weighted_decode import SLOT_BLOCK


def init_growing(spec: CacheSpec, prompt: int, period: int) -> Window:
    """An empty store for `prompt` tokens of a prompt and all new ones, rounded up to blocks of attention; each row's
    tokens lie in its first slots, without gaps."""
    slots = -(-(prompt + spec.max_new) // SLOT_BLOCK) * SLOT_BLOCK
    return init_window(spec, slots, sinks=0, recent=0, period=period)


def append(state: WindowedState, block: Block, stored: Int[Array, "B"]) -> WindowedState:
    """Puts a block's tokens behind the `stored[b]` that row b has; what finds no slot is counted as overflow."""
    window = state.window
    slots = window.keys.shape[2]
    target = jnp.where(block.present, stored[:, None] + jnp.arange(block.keys.shape[2]), slots)

    def put(buffer, fresh, target):
        return buffer.at[:, target].set(fresh, mode="drop")

    window = dataclasses.replace(
        window,
        keys=jax.vmap(put)(window.keys, block.keys, target),
        values=jax.vmap(put)(window.values, block.values, target),
    )
    lost = jnp.maximum(stored + block.count - jnp.maximum(stored, slots), 0)
    return dataclasses.replace(state, window=window, overflow=state.overflow + lost)


def growing_segments(window: Window, stored: Int[Array, "B"], queries: int | None) -> tuple[Segment, ...]:
    """The store and its staging buffer as attention reads them; for `queries` see `window_segments`."""
    return window_segments(window, selected=jnp.minimum(stored, window.keys.shape[2]), queries=queries)
