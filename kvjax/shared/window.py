"""A store of recent tokens, sink tokens and slots that a policy fills by its own choice."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.segment import Segment
from kvjax.spec import CacheSpec, allocated_slots
from kvjax.staging import Tokens
from kvjax.state import kv_entries, state, static


@state
class Window:
    """S slots in one buffer, [recent | sinks | selected | empty], that attention reads as one segment.

    Recent tokens are right-aligned in their slots, oldest first, and the others left-aligned, so that the occupied
    slots are one range. The start of the range moves as old tokens leave. The empty slots make S a multiple of 8
    (`spec.allocated_slots`).
    """

    keys: Float[Array, "B H_kv S D"] = kv_entries()
    values: Float[Array, "B H_kv S D_v"] = kv_entries()
    total: Int[Array, "B"]  # int32, tokens received so far
    recent: int = static()  # slots of recent tokens
    sinks: int = static()  # slots of sink tokens
    selected: int = static()  # slots that a policy fills

    @property
    def fixed(self) -> int:
        """Slots before the selected ones."""
        return self.recent + self.sinks

    @property
    def slots(self) -> int:
        """Slots that may hold a token."""
        return self.fixed + self.selected


def init_window(spec: CacheSpec, sinks: int, recent: int, selected: int = 0) -> Window:
    """Returns an empty window.

    Args:
        selected: slots that the policy fills.

    Returns:
        The window.
    """
    shape = (spec.batch, spec.kv_heads, allocated_slots(sinks + recent + selected))
    return Window(
        keys=jnp.zeros((*shape, spec.head_dim), spec.dtype),
        values=jnp.zeros((*shape, spec.value_width), spec.dtype),
        total=jnp.zeros(spec.batch, jnp.int32),
        recent=recent,
        sinks=sinks,
        selected=selected,
    )


def occupancy(window: Window) -> tuple[Int[Array, "B"], Int[Array, "B"], Int[Array, "B"]]:
    """Returns how many tokens of each row are sinks, recent, and between them.

    Returns:
        Three int32 counts per row: sink tokens, recent tokens, and tokens that have left the recent slots.
    """
    sinks = jnp.minimum(window.total, window.sinks)
    recent = jnp.minimum(window.total - sinks, window.recent)
    return sinks, recent, window.total - sinks - recent


def fill(window: Window, prompt: Any) -> Window:
    """Takes a prompt's first and last tokens into an empty window; other slots do not change.

    Args:
        prompt: a `kvjax.policy.Prompt`.

    Returns:
        The window.
    """
    recent, sinks = window.recent, window.sinks

    def fill_row(buffer: Float[Array, "H S D"], tokens: Float[Array, "H T D"], length: Int[Array, ""]):
        """Writes the last and the first of one row's `tokens` into the slots of its `buffer`."""
        positions = jnp.concatenate([length - recent + jnp.arange(recent), jnp.arange(sinks)])
        is_recent = jnp.arange(recent + sinks) < recent
        is_used = jnp.where(is_recent, positions >= sinks, positions < length)
        picked = tokens[:, jnp.clip(positions, 0, tokens.shape[1] - 1)]
        # Copies in unused slots would be part of the mean key of a quantized cache.
        picked = jnp.where(is_used[:, None], picked, 0)
        return buffer.at[:, : recent + sinks].set(picked.astype(buffer.dtype))

    return dataclasses.replace(
        window,
        keys=jax.vmap(fill_row)(window.keys, prompt.keys, prompt.lengths),
        values=jax.vmap(fill_row)(window.values, prompt.values, prompt.lengths),
        total=prompt.lengths,
    )


def middle_mask(window: Window, tokens: int) -> Bool[Array, "B T"]:
    """Returns which positions of a prompt are between the sinks and the recent tokens.

    Args:
        window: a window just filled from the prompt.
        tokens: T, length of the padded prompt.

    Returns:
        A mask; False past a row's length.
    """
    positions = jnp.arange(tokens)
    _, _, middle = occupancy(window)
    return (positions >= window.sinks) & (positions < window.sinks + middle[:, None])


def after_sinks(tokens: Float[Array, "B H_kv T D"], sinks: int) -> Float[Array, "B H_kv M D"]:
    """Returns a prompt's tokens after the sinks.

    Args:
        tokens: keys or values of the prompt.

    Returns:
        M = T - sinks tokens, at least the last one, so that the shape is not empty.
    """
    return tokens[:, :, min(sinks, tokens.shape[2] - 1) :]


def slide(window: Window, new: Tokens) -> tuple[Window, Tokens]:
    """Appends new tokens to a window: first to its empty sink slots, then to its recent tokens.

    Args:
        new: the tokens that follow the tokens of the window.

    Returns:
        The window, and the tokens that leave it, oldest first.
    """
    keys, left_keys = slide_aligned(window, new, window.keys, new.keys)
    values, left_values = slide_aligned(window, new, window.values, new.values)
    _, _, middle = occupancy(window)
    _, _, leaving = _arrivals(window, new)
    slid = dataclasses.replace(window, keys=keys, values=values, total=window.total + new.count)
    return slid, Tokens(left_keys, left_values, leaving, window.sinks + middle, new.slot)


def slide_aligned(
    window: Window, new: Tokens, slots: Shaped[Array, "B H_kv S *N"], tokens: Shaped[Array, "B H_kv P *N"]
) -> tuple[Shaped[Array, "B H_kv S *N"], Shaped[Array, "B H_kv P *N"]]:
    """Moves an array over the window's slots as `slide` moves the keys.

    Args:
        window: the window before the slide.
        new: the tokens that `slide` appends.
        slots: an array over the window's slots.
        tokens: an array over the new tokens.

    Returns:
        The array over the slots after the slide, and over the tokens that left.
    """
    recent_slots, count_slots = window.recent, tokens.shape[2]

    def slide_row(buffer: Shaped[Array, "H S *N"], tokens: Shaped[Array, "H P *N"], sinks, recent, to_sinks, count):
        """Slides one row's `buffer`: `to_sinks` new `tokens` become sinks, `count` become `recent`."""
        # The row's tokens after the sinks, contiguous: recent ones end at slot `recent_slots`, new ones follow.
        line = jnp.concatenate([buffer[:, :recent_slots], jnp.roll(tokens, -to_sinks, axis=1)], axis=1)
        left = jax.lax.dynamic_slice_in_dim(line, recent_slots - recent, count_slots, axis=1)
        buffer = buffer.at[:, :recent_slots].set(jax.lax.dynamic_slice_in_dim(line, count, recent_slots, axis=1))
        if window.sinks:
            number = jnp.arange(count_slots)
            target = jnp.where(number < to_sinks, recent_slots + sinks + number, buffer.shape[1])
            buffer = buffer.at[:, target].set(tokens, mode="drop")
        return buffer, left

    sinks, recent, _ = occupancy(window)
    to_sinks, count, _ = _arrivals(window, new)
    return jax.vmap(slide_row)(slots, tokens, sinks, recent, to_sinks, count)


def _arrivals(window: Window, new: Tokens) -> tuple[Int[Array, "B"], Int[Array, "B"], Int[Array, "B"]]:
    """Returns how many new tokens become sinks, how many become recent, and how many tokens leave."""
    sinks, recent, _ = occupancy(window)
    to_sinks = jnp.minimum(window.sinks - sinks, new.count)
    count = new.count - to_sinks
    return to_sinks, count, jnp.maximum(recent + count - window.recent, 0)


def window_segments(
    window: Window,
    selected: Int[Array, "B"] | int = 0,
    log_weight: Float[Array, "B H_kv S"] | None = None,
    *,
    num_visible_staged: Int[Array, "B #T"] | None = None,
) -> tuple[Segment, ...]:
    """Returns the window as attention reads it; nothing for a window without slots.

    Args:
        selected: occupied selected slots.
        num_visible_staged: hides as many of the oldest recent tokens as the query sees staged ones, so that exactly
            `recent` tokens are visible at every step. Without it, recent tokens stay visible until they are compacted.

    Returns:
        At most one segment.
    """
    if not window.keys.shape[2]:
        return ()
    sinks, recent, _ = occupancy(window)
    start = (window.recent - recent)[:, None]
    if num_visible_staged is not None:
        start = jnp.maximum(start, jnp.minimum(num_visible_staged, window.recent))
    stop = (window.recent + sinks + selected)[:, None]
    return (Segment(window.keys, window.values, log_num=log_weight, start=start, stop=stop),)


def write_selected(
    window: Window,
    slot: Int[Array, "B H_kv n"],
    keys: Float[Array, "B H_kv T D"],
    values: Float[Array, "B H_kv T D_v"],
    source: Int[Array, "B H_kv n"],
) -> Window:
    """Writes tokens into selected slots.

    Args:
        slot: selected slots to write to; slots past the end are dropped.
        keys: keys to choose from.
        values: values to choose from.
        source: index of the token for each slot.

    Returns:
        The window.
    """
    return dataclasses.replace(
        window,
        keys=put_aligned(window, slot, window.keys, keys, source),
        values=put_aligned(window, slot, window.values, values, source),
    )


def put_aligned(
    window: Window,
    slot: Int[Array, "B H_kv n"],
    buffer: Shaped[Array, "B H_kv S *N"],
    tokens: Shaped[Array, "B H_kv T *N"],
    source: Int[Array, "B H_kv n"],
) -> Shaped[Array, "B H_kv S *N"]:
    """Writes into an array over the window's slots as `write_selected` writes the keys.

    Args:
        slot: selected slots to write to; slots past the end are dropped.
        buffer: the array over the window's slots.
        tokens: an array over T tokens.
        source: index of the token for each slot.

    Returns:
        The updated array.
    """

    def put_head(buffer: Shaped[Array, "S *N"], tokens: Shaped[Array, "T *N"], slot, source):
        target = jnp.where(slot < window.selected, window.fixed + slot, buffer.shape[0])
        return buffer.at[target].set(tokens[source].astype(buffer.dtype), mode="drop")

    return jax.vmap(jax.vmap(put_head))(buffer, tokens, slot, source)


def insert_full_chunks(
    window: Window,
    pending: Int[Array, "B"],
    left: Tokens,
    chunk_tokens: int,
    insert_chunk: Callable[..., Any],
) -> tuple[Window, Int[Array, "B"], Int[Array, "B"], Any, Int[Array, "B"]]:
    """Collects tokens that left the recent window in the selected slots, and inserts every chunk that is full.

    Attention reads the collected tokens as part of the window.

    Args:
        pending: int32, collected tokens per row.
        left: tokens that leave the recent window.
        insert_chunk: maps (keys [B, H_kv, R, chunk_tokens, D], values, positions [B, R, chunk_tokens], full [B, R]) to
            the updated store.

    Returns:
        The window, the collected tokens, the chunks inserted, the result of `insert_chunk` (None if no chunk can be
        full), and the tokens that found no free slot.
    """
    fixed, slots, arriving = window.fixed, window.selected, left.keys.shape[2]
    fits = jnp.minimum(left.count, slots - pending)
    index = jnp.arange(arriving)
    target = jnp.where(index < fits[:, None], fixed + pending[:, None] + index, window.keys.shape[2])
    add = jax.vmap(lambda buffer, new, target: buffer.at[:, target].set(new, mode="drop"))
    keys, values = add(window.keys, left.keys, target), add(window.values, left.values, target)
    oldest = left.first - pending  # position of the first collected token
    pending, lost, full, inserted = pending + fits, left.count - fits, jnp.zeros_like(pending), None
    if rounds := min(slots, chunk_tokens - 1 + arriving) // chunk_tokens:

        def chunks(x: Float[Array, "B H S D"]) -> Float[Array, "B H R C D"]:
            """Returns the first chunks of the selected slots of `x`."""
            ready = x[:, :, fixed : fixed + rounds * chunk_tokens]
            return ready.reshape(*x.shape[:2], rounds, chunk_tokens, -1)

        full = pending // chunk_tokens
        position = (oldest[:, None] + jnp.arange(rounds * chunk_tokens)).reshape(-1, rounds, chunk_tokens)
        inserted = insert_chunk(chunks(keys), chunks(values), position, jnp.arange(rounds) < full[:, None])
        source = jnp.minimum(jnp.arange(slots) + (full * chunk_tokens)[:, None], slots - 1)

        def move_up(buffer: Float[Array, "H S D"], source: Int[Array, "n"], full: Int[Array, ""]):
            selected = buffer[:, fixed : fixed + slots]
            return buffer.at[:, fixed : fixed + slots].set(jnp.where(full > 0, selected[:, source], selected))

        keys, values = jax.vmap(move_up)(keys, source, full), jax.vmap(move_up)(values, source, full)
        pending = pending - full * chunk_tokens
    return dataclasses.replace(window, keys=keys, values=values), pending, full, inserted, lost
