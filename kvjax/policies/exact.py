"""Exact attention: every token is kept. The reference that all other policies are measured against."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.attention import SLOT_BLOCK
from kvjax.policies.windowed import init_windowed, windowed_policy
from kvjax.policy import CachePolicy
from kvjax.staging import Block, check_period, init_window, occupancy, window_segments


def exact(*, period: int = 64) -> CachePolicy:
    """Keeps every key and value.

    The store has `spec.max_prompt + spec.max_new` slots, rounded up to blocks of attention (`SLOT_BLOCK`); each row's
    tokens lie in its first slots, without gaps.

    Args:
        period: tokens between compactions, which move staged tokens into the store. It changes no result.
    """
    check_period(period)

    def init(spec, row_keys):
        del row_keys
        slots = -(-(spec.max_prompt + spec.max_new) // SLOT_BLOCK) * SLOT_BLOCK
        return init_windowed(spec, init_window(spec, slots, sinks=0, recent=0, period=period))

    def select(state, keys, values, queries):
        window = state.window
        tokens = min(keys.shape[1], window.keys.shape[2])  # a prompt may be padded past the longest one

        def store(buffer, fresh):
            return buffer.at[:, :, :tokens].set(fresh.swapaxes(1, 2)[:, :, :tokens].astype(buffer.dtype))

        window = dataclasses.replace(window, keys=store(window.keys, keys), values=store(window.values, values))
        return dataclasses.replace(state, window=window)

    def absorb(state, block: Block):
        window = state.window
        slots = window.keys.shape[2]
        place = jnp.arange(block.keys.shape[2])
        target = jnp.where(block.present, block.first[:, None] + place, slots)

        def append(buffer, fresh, target):
            return buffer.at[:, target].set(fresh, mode="drop")

        window = dataclasses.replace(
            window,
            keys=jax.vmap(append)(window.keys, block.keys, target),
            values=jax.vmap(append)(window.values, block.values, target),
        )
        lost = jnp.maximum(block.first + block.count - jnp.maximum(block.first, slots), 0)
        return dataclasses.replace(state, window=window, overflow=state.overflow + lost)

    def segments(state, queries):
        _, _, stored = occupancy(state.window)
        return window_segments(state.window, selected=jnp.minimum(stored, state.window.keys.shape[2]), queries=queries)

    return windowed_policy("exact", init=init, select=select, absorb=absorb, segments=segments, period=period)
