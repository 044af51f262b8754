"""StreamingLLM (Xiao et al. 2023): the first tokens, which soak up attention, and a sliding window of recent ones."""

import dataclasses

import jax.numpy as jnp

from kvjax import rope
from kvjax.attention import attend, merge
from kvjax.policies.windowed import init_windowed, windowed_policy
from kvjax.policy import CachePolicy
from kvjax.segment import segment
from kvjax.staging import check_budget, check_period, init_window, occupancy, visible_count, window_segments
from kvjax.state import SLOTS, array, state


@state
class Frequencies:
    """Angles per position, for re-indexing."""

    rope: jnp.ndarray = array(SLOTS)  # [D / 2] float32


def streaming_llm(budget: int, *, sinks: int = 4, reindex: bool = False, period: int | None = None) -> CachePolicy:
    """Keeps the first `sinks` tokens and, at every step, exactly the last `budget - sinks`, the newest included.

    Args:
        budget: slots per head, sinks included.
        sinks: first tokens that are never dropped; 0 gives plain sliding-window attention.
        reindex: positions count inside the cache, as in the paper, instead of in the text, as in most ports. Distances
            among recent tokens are the same in both; sinks move up to the window, which is done by turning the query
            that reads them (needs `spec.rope_frequencies`).
        period: tokens between compactions, at most the recent ones; 64 or as many as that allows by default. It
            changes no result: the window slides at every step.

    Raises:
        ValueError: for a budget that cannot hold the sinks and a recent token, or a period above the recent tokens.
    """
    recent = budget - sinks
    check_budget(budget, sinks, recent=1)
    period = min(64, recent) if period is None else period
    check_period(period)
    if period > recent:
        raise ValueError(f"period={period} must not exceed the recent tokens, budget - sinks = {recent}")

    def init(spec, row_keys):
        del row_keys
        window = init_window(spec, budget, sinks, recent, period)
        if not reindex:
            return init_windowed(spec, window)
        if spec.rope_frequencies is None:
            raise ValueError("reindex=True needs spec.rope_frequencies: without them positions cannot be changed")
        return init_windowed(spec, window, Frequencies(jnp.asarray(spec.rope_frequencies, jnp.float32)))

    def segments(state, queries):
        return window_segments(state.window, queries=queries, slide=True)

    policy = windowed_policy(
        "streaming_llm" + ("(reindex)" if reindex else ""),
        init=init,
        select=lambda state, keys, values, queries: state,
        absorb=lambda state, block: state,
        segments=segments,
        period=period,
    )
    return policy._replace(attend=_attend_reindexed, segments=None) if reindex else policy


def _attend_reindexed(state, query, causal=False):
    """Sinks stand right before the oldest recent token: nearer to the query by the number of tokens dropped."""
    window = state.window
    sinks, _, _ = occupancy(window)
    queries = query.shape[1] if causal else None
    kept, staged = window_segments(window, queries=queries, slide=True)
    count = visible_count(window.staging, queries)
    tokens = (window.total if count.ndim == 1 else window.total[:, None]) + count
    dropped = jnp.maximum(tokens - window.sinks - window.recent, 0)
    per_query = jnp.broadcast_to(dropped.reshape(dropped.shape[0], -1), query.shape[:2])
    cos, sin = rope.rotation(-per_query, state.selection.rope)
    turned = rope.rotate(query, cos, sin)
    recent_slots = window.recent
    recent_part = dataclasses.replace(kept, stop=jnp.full_like(sinks, recent_slots))
    sink_part = segment(window.keys[:, :, recent_slots:], window.values[:, :, recent_slots:], stop=sinks)
    return merge(attend(query, (recent_part, staged)), attend(turned, (sink_part,))), state
