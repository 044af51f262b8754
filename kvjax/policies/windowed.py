"""What policies with a window have in common: filling, staging, settling and attending are the same for all of them.

Such a policy adds two functions of its own: `select` chooses among the prompt's tokens between sinks and recent ones,
`absorb` takes in the block of tokens that left the window since the last compaction.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jaxtyping import Array, Float, Int, Key

from kvjax.attention import Partials, attend
from kvjax.policy import CachePolicy, CacheSpec, Init, check_tokens
from kvjax.segment import Segment, segment_bytes
from kvjax.staging import Block, Window, fill_window, settle, stage
from kvjax.state import BATCH, array, state, static


@state
class WindowedState:
    """A window and what the policy keeps beside it."""

    window: Window
    selection: Any  # the policy's own pytree; None where it keeps no more than the window
    overflow: Int[Array, "B"] = array(BATCH, fault="tokens came to a full cache that must hold all of them")
    max_prompt: int = static()


class Select(Protocol):
    def __call__(
        self,
        state: WindowedState,
        keys: Float[Array, "B T H D"],
        values: Float[Array, "B T H D"],
        queries: Float[Array, "B w H_q D"] | None,
    ) -> WindowedState: ...


def windowed_policy(
    name: str,
    *,
    init: Init,
    select: Select,
    absorb: Callable[[WindowedState, Block], WindowedState],
    segments: Callable[[WindowedState, int | None], tuple[Segment, ...]],
    period: int,
    query_tail: int = 0,
    streams: bool = True,
) -> CachePolicy:
    """The policy made of a window and the functions above. `segments(state, queries)` shows attention the whole
    cache, staging too; for `queries` see `window_segments`."""

    def shown(state, query, causal=False) -> tuple[Segment, ...]:
        # A single token, appended last, sees all there is.
        return segments(state, query.shape[1] if causal and query.shape[1] > 1 else None)

    def prefill(state, keys, values, lengths, query_tail=None, shared=None):
        check_tokens(state.window.keys, keys, values, lengths, longest=state.max_prompt)
        window = fill_window(state.window, keys, values, lengths)
        return select(dataclasses.replace(state, window=window), keys, values, query_tail), shared

    def attend_cache(state, query, causal=False) -> tuple[Partials, WindowedState]:
        return attend(query, shown(state, query, causal)), state

    def extend(state, keys, values, lengths=None):
        staging = stage(state.window.staging, keys, values, lengths)
        return dataclasses.replace(state, window=dataclasses.replace(state.window, staging=staging))

    def compact(state):
        window, block = settle(state.window)
        return absorb(dataclasses.replace(state, window=window), block)

    def read_bytes(state):
        return segment_bytes(*segments(state, None))

    return CachePolicy(
        name, init, prefill, attend_cache, extend, compact, read_bytes, period, query_tail, streams, segments=shown
    )


def stream_keys(row_keys: Key[Array, "B"], heads: int) -> Key[Array, "B H_kv"]:
    """A random key of its own for every row's every kv head."""
    return jax.vmap(lambda key: jax.random.split(key, heads))(row_keys)


def over_heads(function: Callable[..., Any], *in_axes: int | None) -> Callable[..., Any]:
    """Maps a function of one head's stream over rows and kv heads. In-axes are those over heads (0 where none are
    given); None is for an argument that all heads of a row share."""
    return jax.vmap(jax.vmap(function, in_axes=in_axes or 0))


def init_windowed(spec: CacheSpec, window: Window, selection: Any = None) -> WindowedState:
    return WindowedState(window, selection, overflow=0 * window.total, max_prompt=spec.max_prompt)
