"""Exact attention: every token is kept. The reference that all other policies are measured against."""

import dataclasses

from kvjax.policies.growing import append, growing_segments, init_growing
from kvjax.policies.windowed import init_windowed, windowed_policy
from kvjax.policy import CachePolicy
from kvjax.staging import Block, check_period, occupancy


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
        return init_windowed(spec, init_growing(spec, spec.max_prompt, period))

    def select(state, keys, values, queries):
        window = state.window
        tokens = min(keys.shape[1], window.keys.shape[2])  # a prompt may be padded past the longest one

        def store(buffer, fresh):
            return buffer.at[:, :, :tokens].set(fresh.swapaxes(1, 2)[:, :, :tokens].astype(buffer.dtype))

        window = dataclasses.replace(window, keys=store(window.keys, keys), values=store(window.values, values))
        return dataclasses.replace(state, window=window)

    def absorb(state, block: Block):
        return append(state, block, block.first)

    def segments(state, queries):
        _, _, stored = occupancy(state.window)
        return growing_segments(state.window, stored, queries)

    return windowed_policy("exact", init=init, select=select, absorb=absorb, segments=segments, period=period)
