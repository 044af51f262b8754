"""CaM, cache merging (Zhang et al. 2024): what leaves a sliding window may live on in the values of the next tokens."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from kvjax.policies.watching import Drawn, init_drawn, watching_policy
from kvjax.policies.windowed import draws_by_position, init_windowed
from kvjax.policy import CachePolicy
from kvjax.staging import Block, check_budget, check_period, init_window, window_segments
from kvjax.state import BATCH, array, state


@state
class Watch:
    """The attention of the newest query, and the randomness of merges."""

    drawn: Drawn
    row_keys: Key[Array, "B"] = array(BATCH)


def cam(budget: int, *, sinks: int = 4, merged: int = 32, period: int = 64) -> CachePolicy:
    """Keeps the first tokens and a window of recent ones, as StreamingLLM does; the value of a token that leaves the
    window is added, as a share 1 / merged, to the values of the next `merged` tokens, or to none of them.

    It is added with probability min(1, A / mean): A is the attention probability that the newest query paid to the
    token, mean that of the window's other tokens, over the query heads of a kv head's group (Zhang et al. 2024, section
    4; `local_cam_mask` of the released code for Llama). Where it pays the token no more than the others, the sum of
    attention times value is kept in expectation. Keys stay as they are. Each row, head and token has a coin of its own.

    With `period=1` a token leaves at every step, as published. Longer periods are ours: until `compact` up to `period`
    more tokens stay visible, and those that then leave together are all weighed by the newest query and merged into the
    first `merged` tokens that stay (as kvpress's CAMPress does). A prompt that is read exactly is reduced without
    merging, as in the released code for generation; one that is streamed merges as it goes.

    The released code for Llama merges the token that leaves one step later; its other variants, for OPT and GPT-NeoX,
    have no coin (they merge where A exceeds the mean) and count sinks into the mean; kvpress sums attention over steps,
    and takes the mean over the `merged` tokens.

    Args:
        budget: slots per head, sinks included; the rest is the window.
        sinks: first tokens that are never dropped.
        merged: tokens that a value is spread over; as many of them as the window has.
        period: tokens between compactions.

    Raises:
        ValueError: for a budget that cannot hold the sinks and a recent token, or sizes that cannot be.
    """
    recent = budget - sinks
    check_budget(budget, sinks, recent=1)
    check_period(period)
    if merged < 1:
        raise ValueError(f"merged={merged}; it must be at least 1 token")

    def init(spec, row_keys):
        window = init_window(spec, budget, sinks, recent, period)
        return init_windowed(spec, window, Watch(init_drawn(window), row_keys))

    def absorb(state, block: Block, left: Float[Array, "B H_kv P"]):
        window, watch = state.window, state.selection
        # Where tokens leave, the window is full.
        mean = jnp.mean(watch.drawn.window[:, :, :recent], axis=2, keepdims=True)
        positions = block.first[:, None] + jnp.arange(left.shape[2])
        coins = jax.vmap(draws_by_position, in_axes=(0, 0, None))(watch.row_keys, positions, left.shape[1])
        # Not A / mean, which may be 0 / 0. A coin is under 1.
        merges = (coins * mean < left) & block.present[:, None]
        shares = jnp.where(merges[..., None], block.values.astype(jnp.float32) / merged, 0.0)
        heirs = window.values[:, :, : min(merged, recent)]
        added = heirs.astype(jnp.float32) + jnp.sum(shares, axis=2, keepdims=True)
        values = window.values.at[:, :, : heirs.shape[2]].set(added.astype(heirs.dtype))
        return dataclasses.replace(state, window=dataclasses.replace(window, values=values))

    def segments(state, queries):
        return window_segments(state.window, queries=queries)

    return watching_policy(
        "cam",
        init=init,
        select=lambda state, keys, values, queries: state,
        absorb=absorb,
        segments=segments,
        period=period,
        adds_up=False,
    )
