"""H2O (Zhang et al. 2023): recent tokens, and those before them that have drawn most attention so far."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.observed import attention_received
from kvjax.policies.watching import Drawn, init_drawn, watching_policy
from kvjax.policies.windowed import check_queries, compete, init_windowed, over_heads
from kvjax.policy import ALL_QUERIES, CachePolicy
from kvjax.staging import Block, between, check_budget, check_period, init_window, occupancy, window_segments
from kvjax.state import BATCH, KV_HEADS, SLOTS, array, state


@state
class Heavy:
    """The heavy hitters, in the window's selection slots, and the attention that every slot's token has drawn."""

    drawn: Drawn
    # int32, where the token of each of the M selection slots stood; None where attention is not averaged.
    position: Int[Array, "B H_kv M"] | None = array(BATCH, KV_HEADS, SLOTS)


def h2o(budget: int, *, recent: int | None = None, average: bool = False, period: int = 64) -> CachePolicy:
    """Keeps recent tokens and, of those before them, the ones whose attention probabilities, summed over all queries
    that saw them, are largest (heavy hitters).

    Sums start with every query of the prompt (so prefill costs about what exact attention costs again) and go on while
    decoding: each token that leaves the recent ones competes with the heavy hitters, and the least goes for good (Zhang
    et al. 2023, Algorithm 1; `H2OKVCache_LayerWise` of the released code). With `period=1` this is that code's
    behaviour token by token: when attention has been paid, one token goes. Longer periods are ours: up to `period` more
    tokens stay visible until `compact`, and are compared by what they drew until then.

    A kv head's sums run over the query heads of its group; the released code knows no groups, kvpress takes their mean,
    which ranks alike. kvpress's ObservedAttentionPress divides by the number of queries that could see a token, has no
    recent window and prunes prompts only: `average=True, recent=0` keeps of a prompt what it keeps.

    Args:
        budget: slots per head, recent tokens included; the rest are heavy hitters.
        recent: newest tokens, always kept; half the budget by default, as in the paper.
        average: whether sums are divided by the number of tokens since, the token's own included.
        period: tokens between compactions.

    Raises:
        ValueError: for a budget that leaves no slot for heavy hitters; in prefill, without the prompt's queries.
    """
    recent = budget // 2 if recent is None else recent
    check_budget(budget, sinks=0, recent=recent)
    check_period(period)
    if budget == recent:
        raise ValueError(f"budget={budget} leaves no slot for heavy hitters; recent={recent} already takes it")
    heavy = budget - recent

    def init(spec, row_keys):
        del row_keys
        window = init_window(spec, budget, 0, recent, period)
        position = jnp.zeros((spec.batch, spec.kv_heads, heavy), jnp.int32) if average else None
        return init_windowed(spec, window, Heavy(init_drawn(window), position))

    def select(state, keys, values, queries):
        window = state.window
        queries = check_queries("h2o", queries, keys, ALL_QUERIES)
        received = attention_received(queries, keys, window.total)
        score = received
        if average:
            age = window.total[:, None] - jnp.arange(keys.shape[1])
            score = received / jnp.maximum(age, 1)[:, None]
        middle = between(window, keys.shape[1])
        room = min(heavy, keys.shape[1])
        picked = over_heads(lambda score, middle: _largest(score, middle, room), 0, None)(score, middle)

        def place(buffer, tokens):
            chosen = jnp.take_along_axis(tokens.swapaxes(1, 2), picked[..., None], axis=2)
            return buffer.at[:, :, recent : recent + room].set(chosen.astype(buffer.dtype))

        newest = window.total[:, None] - recent + jnp.arange(recent)
        drawn = jnp.take_along_axis(received, jnp.maximum(newest, 0)[:, None], axis=2)
        drawn = state.selection.drawn.window.at[:, :, :recent].set(jnp.where(newest[:, None] >= 0, drawn, 0.0))
        found = jnp.arange(room) < _kept(window)[:, None, None]
        drawn = drawn.at[:, :, recent : recent + room].set(
            jnp.where(found, jnp.take_along_axis(received, picked, axis=2), 0.0)
        )
        position = state.selection.position
        if average:
            position = position.at[:, :, :room].set(jnp.where(found, picked, 0))
        return dataclasses.replace(
            state,
            window=dataclasses.replace(window, keys=place(window.keys, keys), values=place(window.values, values)),
            selection=Heavy(Drawn(drawn, state.selection.drawn.staged), position),
        )

    def absorb(state, block: Block, left: Float[Array, "B H_kv P"]):
        window, selection = state.window, state.selection
        stored, fresh = selection.drawn.window[:, :, recent:], left
        arriving = block.first[:, None] + jnp.arange(left.shape[2])
        if average:
            now = window.total[:, None]
            stored = stored / jnp.maximum(now[..., None] - selection.position, 1)
            fresh = fresh / jnp.maximum(now - arriving, 1)[:, None]
        held = jnp.minimum(block.first, heavy)[:, None, None]  # before the block came
        priority = jnp.where(jnp.arange(heavy) < held, -stored, jnp.inf)
        slot, source, _ = over_heads(compete)(priority, jnp.where(block.present[:, None], -fresh, jnp.inf))

        def place(buffer, tokens):
            def place_head(buffer, tokens, slot, source):
                return buffer.at[recent + slot].set(tokens[source], mode="drop")

            return over_heads(place_head)(buffer, tokens, slot, source)

        position = selection.position
        if average:
            place_position = lambda buffer, slot, source, new: buffer.at[slot].set(new[source], mode="drop")  # noqa: E731
            position = over_heads(place_position, 0, 0, 0, None)(position, slot, source, arriving)
        drawn = Drawn(place(selection.drawn.window, left), selection.drawn.staged)
        return dataclasses.replace(
            state,
            window=dataclasses.replace(
                window, keys=place(window.keys, block.keys), values=place(window.values, block.values)
            ),
            selection=Heavy(drawn, position),
        )

    def _kept(window):
        _, _, middle = occupancy(window)
        return jnp.minimum(middle, heavy)

    def segments(state, queries):
        return window_segments(state.window, selected=_kept(state.window), queries=queries)

    return watching_policy(
        "h2o" + ("(average)" if average else ""),
        init=init,
        select=select,
        absorb=absorb,
        segments=segments,
        period=period,
        adds_up=True,
        query_tail=ALL_QUERIES,
    )


def _largest(score: Float[Array, "T"], valid: Array, room: int) -> Int[Array, "room"]:
    """The valid tokens of largest score, in the order of the text; what follows them is any token."""
    largest, index = jax.lax.top_k(jnp.where(valid, score, -jnp.inf), room)
    index = jnp.sort(jnp.where(jnp.isneginf(largest), score.shape[0], index))
    return jnp.minimum(index, score.shape[0] - 1)
