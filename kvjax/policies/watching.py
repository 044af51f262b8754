"""What policies have in common that learn from the attention which decoding pays to their cache."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.attention import attend, attend_watching
from kvjax.policies.windowed import Select, WindowedState, windowed_policy
from kvjax.policy import CachePolicy, Init
from kvjax.segment import segment_bytes
from kvjax.staging import Block, Window, appended, settle, settle_beside
from kvjax.state import BATCH, KV_HEADS, SLOTS, array, cache_bytes, state


@state
class Drawn:
    """Attention probability that the slots of a window and of its staging buffer drew, summed over the query heads of a
    group; 0 in empty slots. It moves along when their tokens do."""

    window: Float[Array, "B H_kv S"] = array(BATCH, KV_HEADS, SLOTS)  # float32
    staged: Float[Array, "B H_kv P"] = array(BATCH, KV_HEADS, SLOTS)  # float32


def init_drawn(window: Window) -> Drawn:
    return Drawn(jnp.zeros(window.keys.shape[:3], jnp.float32), jnp.zeros(window.staging.log_weight.shape, jnp.float32))


def watching_policy(
    name: str,
    *,
    init: Init,
    select: Select,
    absorb: Callable[[WindowedState, Block, Float[Array, "B H_kv P"]], WindowedState],
    segments: Callable[[WindowedState, int | None], tuple],
    period: int,
    adds_up: bool,
    query_tail: int = 0,
) -> CachePolicy:
    """A policy with a window whose selection has a field `drawn`.

    Args:
        absorb: takes in the block that left the window, with the attention that its tokens drew.
        segments: the window and its staging buffer, in that order.
        adds_up: whether every query's attention is added to that of those before, or the newest token's replaces it.
        init, select, period, query_tail: as in `windowed_policy`.
    """

    def attend_cache(state, query, causal=False):
        shown = segments(state, query.shape[1] if causal and query.shape[1] > 1 else None)
        if not causal:
            return attend(query, shown), state
        counted = appended(state.window.staging, query.shape[1])
        if not adds_up:
            counted &= jnp.cumsum(counted[:, ::-1], axis=1)[:, ::-1] == 1
        partials, (window, staged) = attend_watching(query, shown, counted)
        drawn = state.selection.drawn
        if adds_up:
            drawn = Drawn(drawn.window + window, drawn.staged + staged)
        else:
            came = counted.any(axis=1)[:, None, None]
            drawn = Drawn(jnp.where(came, window, drawn.window), jnp.where(came, staged, drawn.staged))
        return partials, _with_drawn(state, drawn)

    def compact(state):
        drawn = state.selection.drawn
        kept, left = settle_beside(state.window, drawn.window, drawn.staged)
        window, block = settle(state.window)
        settled = _with_drawn(dataclasses.replace(state, window=window), Drawn(kept, jnp.zeros_like(drawn.staged)))
        return absorb(settled, block, left)

    def read_bytes(state):
        summed = cache_bytes(state.selection.drawn).device if adds_up else 0
        return segment_bytes(*segments(state, None)) + summed

    policy = windowed_policy(
        name,
        init=init,
        select=select,
        absorb=lambda state, block: state,  # `compact` here does it
        segments=segments,
        period=period,
        query_tail=query_tail,
    )
    return policy._replace(attend=attend_cache, compact=compact, read_bytes=read_bytes, segments=None)


def _with_drawn(state: WindowedState, drawn: Drawn) -> WindowedState:
    return dataclasses.replace(state, selection=dataclasses.replace(state.selection, drawn=drawn))
