"""What policies with a window have in common: filling, staging, settling and attending are the same for all of them.

Such a policy adds two functions of its own: `select` chooses among the prompt's tokens between sinks and recent ones,
`absorb` takes in the block of tokens that left the window since the last compaction.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.attention import Partials, attend
from kvjax.policy import ALL_QUERIES, CachePolicy, CacheSpec, Init, check_tokens
from kvjax.segment import Segment, segment_bytes
from kvjax.shards import heads_in_all, own_heads
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


def check_queries(
    policy: str, queries: Float[Array, "B w H_q D"] | None, keys: Float[Array, "B T H_kv D"], wanted: int
) -> Float[Array, "B w H_q D"]:
    """The prompt's queries that a policy's prefill was given, checked.

    Raises:
        ValueError: where there are none, or not as many as `query_tail` asks for (`wanted`, or `ALL_QUERIES`), or
            their shape does not fit the keys.
    """
    batch, tokens, kv_heads, head_dim = keys.shape
    count = tokens if wanted == ALL_QUERIES else min(wanted, tokens)
    if queries is None:
        raise ValueError(f"query_tail=None; {policy} needs the queries of the prompt's last {count} tokens")
    fits = queries.ndim == 4 and queries.shape[2] % kv_heads == 0
    if not fits or (queries.shape[0], queries.shape[1], queries.shape[3]) != (batch, count, head_dim):
        raise ValueError(
            f"query_tail has shape {queries.shape}; {policy} needs [B, w, H_q, D] with B, w, D = "
            f"{(batch, count, head_dim)} and H_q a multiple of {kv_heads}"
        )
    return queries


def stream_keys(row_keys: Key[Array, "B"], heads: int) -> Key[Array, "B H_kv"]:
    """A random key of its own for every row's every kv head."""
    return jax.vmap(lambda key: own_heads(jax.random.split(key, heads_in_all(heads)), heads))(row_keys)


def over_heads(function: Callable[..., Any], *in_axes: int | None) -> Callable[..., Any]:
    """Maps a function of one head's stream over rows and kv heads. In-axes are those over heads (0 where none are
    given); None is for an argument that all heads of a row share."""
    return jax.vmap(jax.vmap(function, in_axes=in_axes or 0))


def draws_by_position(row_key: Key[Array, ""], positions: Int[Array, "T"], heads: int) -> Float[Array, "H T"]:
    """A uniform number in [0, 1) for every head and token, which depends on the row's key, the head and the token's
    position alone, and so not on how a stream is cut into blocks."""
    draw = lambda position: jax.random.uniform(jax.random.fold_in(row_key, position), (heads_in_all(heads),))  # noqa: E731
    return own_heads(jax.vmap(draw, out_axes=1)(positions), heads)


def compete(
    stored: Float[Array, "M"], fresh: Float[Array, "P"]
) -> tuple[Int[Array, "p"], Int[Array, "p"], Float[Array, "M"]]:
    """Which slots are taken over by which newcomers so that the M smallest priorities of both stay.

    The largest stored priorities meet the smallest new ones, pair by pair: the newcomer stays where it is smaller.
    Empty slots, at inf, lose first, the lowest slot first. A slot of M means that the newcomer is dropped.

    Returns:
        Slots, newcomers, and the priorities that are then stored.
    """
    contested = min(stored.shape[0], fresh.shape[0])
    worst, slot = jax.lax.top_k(stored, contested)
    best, source = jax.lax.top_k(-fresh, contested)
    slot = jnp.where(-best < worst, slot, stored.shape[0])
    return slot, source, stored.at[slot].set(-best, mode="drop")


def init_windowed(spec: CacheSpec, window: Window, selection: Any = None) -> WindowedState:
    return WindowedState(window, selection, overflow=0 * window.total, max_prompt=spec.max_prompt)
