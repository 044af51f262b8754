"""Chelsea: the middle of the context as weighted centroids, made by chunked soft matching, online."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.policies.windowed import init_windowed, over_heads, windowed_policy
from kvjax.policy import CachePolicy
from kvjax.soft_matching import Centroids, Schedule, compress
from kvjax.staging import Block, between, check_budget, check_period, init_window, window_segments
from kvjax.state import BATCH, KV_HEADS, SLOTS, array, state


@state
class Merged:
    """What the centroids in the window's selection slots stand for. The same number in every head of a row."""

    degree: Int[Array, "B H_kv M"] = array(BATCH, KV_HEADS, SLOTS)  # int32 tokens, 0 in empty slots
    count: Int[Array, "B"] = array(BATCH)  # int32 centroids
    log_weight: Float[Array, "B H_kv S"] = array(BATCH, KV_HEADS, SLOTS)  # float32, of the whole window


def chelsea(
    budget: int,
    *,
    sinks: int = 16,
    recent: int = 64,
    chunk: int = 256,
    first: float = 0.35,
    decay: float = 0.1,
    steps: int = 2,
    floor: float = 0.05,
    period: int = 128,
) -> CachePolicy:
    """Keeps sinks, recent tokens and centroids of the others, each weighing as many tokens as it was merged from.

    Whenever more tokens have left the window than there are slots, similar neighbours are merged, step by step, until
    exactly the budget is filled (Chelsea, Algorithm 1). The paper compacts whenever the cache is g tokens over its
    budget: here g is the period.

    Args:
        budget: slots per head, sinks and recent tokens included; the rest are centroids.
        sinks, recent: tokens always kept; the paper's 16 and 64 by default.
        chunk: entries among which an entry looks for a partner; even.
        first, decay, steps, floor: the share of entries merged per step, see `soft_matching.Schedule`. The paper's are
            .45/.05/3 for Llama-2, .35/.1/2 (default) for Llama-3 and .2/.1/2 for Qwen.
        period: tokens between compactions.

    Raises:
        ValueError: for a budget that leaves no slot for centroids, or a chunk or schedule that cannot be.
    """
    check_budget(budget, sinks, recent)
    check_period(period)
    if budget == sinks + recent:
        raise ValueError(f"budget={budget} leaves no slot for centroids; sinks + recent already take {budget}")
    if chunk < 2 or chunk % 2:
        raise ValueError(f"chunk={chunk}; it must be even and at least 2")
    schedule = Schedule(first, decay, steps, floor)
    slots, fixed = budget - sinks - recent, sinks + recent

    def init(spec, row_keys):
        del row_keys
        merged = Merged(
            degree=jnp.zeros((spec.batch, spec.kv_heads, slots), jnp.int32),
            count=jnp.zeros(spec.batch, jnp.int32),
            log_weight=jnp.zeros((spec.batch, spec.kv_heads, budget)),
        )
        return init_windowed(spec, init_window(spec, budget, sinks, recent, period), merged)

    def merge(state, entries: Centroids):
        """Compresses every head's entries into the selection's slots."""
        entries = over_heads(lambda one: compress(one, slots, chunk, schedule))(entries)
        window, merged = state.window, state.selection
        taken = min(slots, entries.degree.shape[2])
        degree = merged.degree.at[:, :, :taken].set(entries.degree[:, :, :taken])

        def place(buffer, x):
            x = jnp.where(degree[:, :, :taken, None] > 0, x[:, :, :taken], 0)
            return buffer.at[:, :, fixed : fixed + taken].set(x.astype(buffer.dtype))

        log_weight = merged.log_weight.at[:, :, fixed:].set(jnp.log(jnp.maximum(degree, 1).astype(jnp.float32)))
        return dataclasses.replace(
            state,
            window=dataclasses.replace(
                window, keys=place(window.keys, entries.keys), values=place(window.values, entries.values)
            ),
            selection=Merged(degree, jnp.min(entries.count, axis=1), log_weight),
        )

    def select(state, keys, values, queries):
        # The tokens in between begin behind the sinks; what lies past them is cut off by the count.
        middle = jnp.sum(between(state.window, keys.shape[1]), axis=1, dtype=jnp.int32)
        keys, values = (x[:, sinks:].swapaxes(1, 2) for x in (keys, values))
        return merge(state, _entries(keys, values, middle))

    def absorb(state, block: Block):
        window, merged = state.window, state.selection
        old = (window.keys[:, :, fixed:], window.values[:, :, fixed:])
        room = block.keys.shape[2]
        pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, room), *((0, 0),) * (x.ndim - 3)))  # noqa: E731
        fresh = _entries(block.keys, block.values, block.count)

        def append(buffer, new, count):
            return jax.lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), count, axis=1)

        append_rows = jax.vmap(append)
        entries = Centroids(
            keys=append_rows(pad(old[0]), fresh.keys, merged.count),
            values=append_rows(pad(old[1]), fresh.values, merged.count),
            degree=append_rows(pad(merged.degree), fresh.degree, merged.count),
            count=merged.count[:, None] + fresh.count,
        )
        return merge(state, entries)

    def segments(state, queries):
        merged = state.selection
        return window_segments(state.window, selected=merged.count, log_weight=merged.log_weight, queries=queries)

    return windowed_policy("chelsea", init=init, select=select, absorb=absorb, segments=segments, period=period)


def _entries(keys: Float[Array, "B H_kv T D"], values: Float[Array, "B H_kv T D"], count: Int[Array, "B"]) -> Centroids:
    """The first `count` tokens of every row as entries of degree one."""
    degree = (jnp.arange(keys.shape[2]) < count[:, None]).astype(jnp.int32)
    return Centroids(
        keys=keys,
        values=values,
        degree=jnp.broadcast_to(degree[:, None], keys.shape[:3]),
        count=jnp.broadcast_to(count[:, None], keys.shape[:2]),
    )
