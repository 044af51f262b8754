"""Uniform sampling of the middle of the context, with weights: the baseline that every clever choice must beat."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.policies.windowed import compete, draws_by_position, init_windowed, over_heads, windowed_policy
from kvjax.policy import CachePolicy
from kvjax.staging import Block, between, check_budget, check_period, init_window, occupancy, window_segments
from kvjax.state import BATCH, KV_HEADS, SLOTS, array, state


@state
class Sample:
    """A uniform sample without replacement of the tokens that left the window: those of the smallest priorities.

    A token's priority is a uniform number that depends on the row's key, the head and the token's position alone, so
    a stream gives the same sample however it is cut into blocks.
    """

    priority: Float[Array, "B H_kv M"] = array(BATCH, KV_HEADS, SLOTS)  # float32, inf in empty slots
    log_weight: Float[Array, "B H_kv S"] = array(BATCH, KV_HEADS, SLOTS)  # float32, of the whole window
    row_keys: Key[Array, "B"] = array(BATCH)


def uniform(budget: int, *, sinks: int = 4, recent: int = 64, period: int = 64) -> CachePolicy:
    """Keeps sinks, recent tokens and, of the n tokens between them, a uniform sample of m, each with weight n / m.

    The sample is drawn per row and kv head, and stays uniform while decoding: tokens that leave the window compete for
    its slots. Between two compactions leaving tokens stay visible.

    Args:
        budget: slots per head, sinks and recent tokens included; the rest is the sample.
        sinks, recent: tokens always kept.
        period: tokens between compactions.

    Raises:
        ValueError: for a budget that leaves no slot for the sample.
    """
    check_budget(budget, sinks, recent)
    check_period(period)
    if budget == sinks + recent:
        raise ValueError(f"budget={budget} leaves no slot to sample into; sinks + recent already take {budget}")

    def init(spec, row_keys):
        shape = (spec.batch, spec.kv_heads)
        sample = Sample(
            priority=jnp.full((*shape, budget - sinks - recent), jnp.inf),
            log_weight=jnp.zeros((*shape, budget)),
            row_keys=row_keys,
        )
        return init_windowed(spec, init_window(spec, budget, sinks, recent, period), sample)

    def select(state, keys, values, queries):
        middle = between(state.window, keys.shape[1])
        priority, picked = jax.vmap(_smallest, in_axes=(0, 0, None, None))(
            state.selection.row_keys, middle, keys.shape[2], budget - sinks - recent
        )

        def place(buffer, tokens):
            chosen = jnp.take_along_axis(tokens.swapaxes(1, 2), picked[..., None], axis=2)
            return buffer.at[:, :, sinks + recent : sinks + recent + picked.shape[2]].set(chosen.astype(buffer.dtype))

        sample = dataclasses.replace(
            state.selection, priority=state.selection.priority.at[:, :, : picked.shape[2]].set(priority)
        )
        window = state.window
        window = dataclasses.replace(window, keys=place(window.keys, keys), values=place(window.values, values))
        return _weigh(dataclasses.replace(state, window=window, selection=sample))

    def absorb(state, block: Block):
        places = jnp.arange(block.keys.shape[2])
        positions = block.first[:, None] + places
        fresh = jax.vmap(draws_by_position, in_axes=(0, 0, None))(
            state.selection.row_keys, positions, block.keys.shape[1]
        )
        fresh = jnp.where(block.present[:, None, :], fresh, jnp.inf)
        window, sample = state.window, state.selection
        slot, source, priority = over_heads(compete)(sample.priority, fresh)

        def place(buffer, tokens):
            def place_head(buffer, tokens, slot, source):
                return buffer.at[sinks + recent + slot].set(tokens[source], mode="drop")

            return over_heads(place_head)(buffer, tokens, slot, source)

        window = dataclasses.replace(
            window, keys=place(window.keys, block.keys), values=place(window.values, block.values)
        )
        sample = dataclasses.replace(sample, priority=priority)
        return _weigh(dataclasses.replace(state, window=window, selection=sample))

    def segments(state, queries):
        weights = state.selection.log_weight
        return window_segments(state.window, selected=_kept(state), log_weight=weights, queries=queries)

    return windowed_policy("uniform", init=init, select=select, absorb=absorb, segments=segments, period=period)


def _smallest(
    row_key: Key[Array, ""], valid: Bool[Array, "T"], heads: int, size: int
) -> tuple[Float[Array, "H m"], Int[Array, "H m"]]:
    """The valid tokens of smallest priority, in the order of the text; empty places last, with priority inf."""
    tokens = valid.shape[0]
    priority = jnp.where(valid, draws_by_position(row_key, jnp.arange(tokens), heads), jnp.inf)
    smallest, index = jax.lax.top_k(-priority, min(size, tokens))
    index = jnp.sort(jnp.where(jnp.isneginf(smallest), tokens, index), axis=-1)
    found = index < tokens
    index = jnp.minimum(index, tokens - 1)
    return jnp.where(found, jnp.take_along_axis(priority, index, axis=-1), jnp.inf), index


def _kept(state) -> Int[Array, "B"]:
    _, _, middle = occupancy(state.window)
    return jnp.minimum(middle, state.selection.priority.shape[2])


def _weigh(state):
    """Gives every sampled token the weight n / m of n tokens represented by m."""
    window, sample = state.window, state.selection
    _, _, middle = occupancy(window)
    weight = jnp.log(jnp.maximum(middle, 1).astype(jnp.float32)) - jnp.log(jnp.maximum(_kept(state), 1))
    fixed = window.sinks + window.recent
    weights = sample.log_weight.at[:, :, fixed:].set(weight[:, None, None])
    return dataclasses.replace(state, selection=dataclasses.replace(sample, log_weight=weights))
