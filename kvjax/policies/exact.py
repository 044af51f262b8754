"""Exact attention: every token is kept. The reference that all other policies are measured against."""

import dataclasses

from kvjax.policies.growing import append, fill, growing_segments, init_growing
from kvjax.policies.windowed import init_windowed, windowed_policy
from kvjax.policy import CachePolicy
from kvjax.staging import Block, check_period, init_window


def exact(*, period: int = 64) -> CachePolicy:
    """Keeps every key and value.

    The store has `spec.max_prompt + spec.max_new` slots, rounded up to blocks of attention (`SLOT_BLOCK`); each row's
    tokens lie in its first slots, without gaps. Devices may share it (`kvjax.sharded`).

    Args:
        period: tokens between compactions, which move staged tokens into the store. It changes no result.
    """
    check_period(period)

    def init(spec, row_keys):
        del row_keys
        window = init_window(spec, slots=0, sinks=0, recent=0, period=period)
        return init_windowed(spec, window, init_growing(spec, spec.max_prompt))

    def select(state, keys, values, queries):
        return dataclasses.replace(state, selection=fill(state.selection, keys.swapaxes(1, 2), values.swapaxes(1, 2)))

    def absorb(state, block: Block):
        store, lost = append(state.selection, block, stored=block.first)
        return dataclasses.replace(state, selection=store, overflow=state.overflow + lost)

    def segments(state, queries):
        return growing_segments(state.selection, state.window.total, state.window, queries)

    return windowed_policy("exact", init=init, select=select, absorb=absorb, segments=segments, period=period)
