"""SnapKV (Li et al. 2024): the prompt's tokens that its last queries attended to, and every generated one."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.observed import attention_received
from kvjax.policies.growing import Growing, append, fill, growing_segments, init_growing
from kvjax.policies.windowed import check_queries, init_windowed, over_heads, windowed_policy
from kvjax.policy import CachePolicy, CacheSpec
from kvjax.staging import Block, check_budget, check_period, init_window
from kvjax.state import BATCH, array, state, static


@state
class Snapshot:
    """What a prompt was reduced to, and what came after it."""

    store: Growing
    dropped: Int[Array, "B"] = array(BATCH)  # int32, tokens of the prompt that have no slot
    slots: int = static()  # most tokens of a prompt that are kept


def snapkv(budget: int, *, window: int = 32, kernel: int = 5, period: int = 64) -> CachePolicy:
    """Keeps, of a prompt, its last `window` tokens and those before them that the window's queries attended to most;
    every token that comes later is kept too.

    A token's score is its attention probability summed over the window's queries, each of which sees the whole prompt
    causally; scores are average-pooled over neighbours and averaged over the query heads of a kv head's group (Li et
    al. 2024, section 4 and `SnapKVCluster` of the released code). Prompts of at most `budget` tokens are kept whole.

    The released code keeps key and value heads repeated and so chooses per query head; averaging over the group, as
    here, came with later ports (kvpress among them). kvpress's window is 64 by default, its budget a share of the
    prompt, so that short prompts lose tokens too.

    Args:
        budget: slots per head for the prompt, the window included. As published, generated tokens are kept beside it:
            the store has `budget + spec.max_new` slots (rounded up to blocks of attention), all counted as bytes.
        window: last tokens of the prompt, whose queries choose; all of them are kept.
        kernel: tokens that a score is averaged over, odd; tokens past either end count as 0.
        period: tokens between compactions, which move staged tokens into the store. It changes no result.

    Raises:
        ValueError: for a budget that leaves no slot beside the window, or a window or kernel that cannot be.
    """
    check_observation(budget, window, kernel)

    return snapshot_policy("snapkv", lambda spec: budget, window=window, kernel=kernel, period=period)


def snapshot_policy(
    name: str, prompt_slots: Callable[[CacheSpec], int], *, window: int, kernel: int, period: int
) -> CachePolicy:
    """A policy that reduces prompts as SnapKV does, to as many tokens as `prompt_slots` gives for its cache, the
    window's included."""
    check_period(period)

    def init(spec, row_keys):
        del row_keys
        slots = min(prompt_slots(spec), spec.max_prompt)
        window = init_window(spec, slots=0, sinks=0, recent=0, period=period)
        return init_windowed(spec, window, Snapshot(init_growing(spec, slots), 0 * window.total, slots))

    def select(state, keys, values, queries):
        queries = check_queries(name, queries, keys, window)
        lengths, own = state.window.total, state.selection
        received = attention_received(queries, keys, lengths)
        room = min(own.slots, keys.shape[1])

        def pick(received, length):
            return most_observed(received, length, room, window, kernel)

        picked = over_heads(pick, 0, None)(received, lengths)

        def chosen(tokens):
            return jnp.take_along_axis(tokens.swapaxes(1, 2), picked[..., None], axis=2)

        snapshot = dataclasses.replace(
            own, store=fill(own.store, chosen(keys), chosen(values)), dropped=jnp.maximum(lengths - own.slots, 0)
        )
        return dataclasses.replace(state, selection=snapshot)

    def absorb(state, block: Block):
        own = state.selection
        store, lost = append(own.store, block, stored=block.first - own.dropped)
        snapshot = dataclasses.replace(own, store=store)
        return dataclasses.replace(state, selection=snapshot, overflow=state.overflow + lost)

    def segments(state, queries):
        own = state.selection
        return growing_segments(own.store, state.window.total - own.dropped, state.window, queries)

    return windowed_policy(
        name,
        init=init,
        select=select,
        absorb=absorb,
        segments=segments,
        period=period,
        query_tail=window,
        streams=False,
    )


def most_observed(
    received: Float[Array, "T"], length: Int[Array, ""], room: int, window: int, kernel: int
) -> Int[Array, "room"]:
    """Which `room` tokens of a prompt of `length` one head keeps, in the order of the text: the last `window` and those
    before them that drew most attention, of equals the earlier. Behind a shorter prompt's stands any token."""
    position = jnp.arange(received.shape[0])
    before = jnp.where(position < length - window, received, 0.0)
    pooled = jax.lax.reduce_window(before, 0.0, jax.lax.add, (kernel,), (1,), "SAME")
    score = jnp.where(position < length - window, pooled, jnp.inf)
    score = jnp.where(position < length, score, -jnp.inf)
    # Places past the prompt, whose scores are least, are also its last: in order they stand behind.
    return jnp.sort(jax.lax.top_k(score, room)[1])


def check_observation(budget: int, window: int, kernel: int) -> None:
    """Raises a ValueError for sizes that cannot be, naming the argument."""
    if window < 1:
        raise ValueError(f"window={window}; it must be at least 1 token")
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel={kernel}; it must be odd and at least 1")
    check_budget(budget, sinks=0, recent=window)
    if budget == window:
        raise ValueError(f"budget={budget} leaves no slot beside the window of {window} tokens")
