"""The store that most policies share: the newest tokens, the first tokens (sinks), and slots of the policy's own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.segment import Segment
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import entries, state, static


@state
class Window:
    """Slots in one buffer [recent | sinks | selected], S in all, which attention reads as one segment.

    Recent tokens are right-aligned in their slots, oldest first, and the others left-aligned, so that what is occupied
    is one range of slots; the oldest recent tokens leave by moving the range's start.
    """

    keys: Float[Array, "B H_kv S D"] = entries(first="unselected")
    values: Float[Array, "B H_kv S D_v"] = entries(first="unselected")
    total: Int[Array, "B"]  # int32, tokens taken in so far
    recent: int = static()  # slots
    sinks: int = static()  # slots
    waiting: int = static(default=0)  # of the selected slots, which then hold recent tokens that wait to go elsewhere

    @property
    def fixed(self) -> int:
        """Slots before the selected ones."""
        return self.recent + self.sinks

    @property
    def unselected(self) -> int:
        """The first slots, of sinks and recent tokens; those that wait are recent, too."""
        return self.fixed + self.waiting


def init_window(spec: CacheSpec, sinks: int, recent: int, selected: int = 0, *, waiting: int = 0) -> Window:
    """An empty window of so many slots of each kind; those of waiting tokens stand where selected ones do."""
    shape = (spec.batch, spec.kv_heads, sinks + recent + selected + waiting)
    return Window(
        keys=jnp.zeros((*shape, spec.head_dim), spec.dtype),
        values=jnp.zeros((*shape, spec.value_width), spec.dtype),
        total=jnp.zeros(spec.batch, jnp.int32),
        recent=recent,
        sinks=sinks,
        waiting=waiting,
    )


def occupancy(window: Window) -> tuple[Int[Array, "B"], Int[Array, "B"], Int[Array, "B"]]:
    """How many sinks, recent tokens and tokens between them each row has had."""
    sinks = jnp.minimum(window.total, window.sinks)
    recent = jnp.minimum(window.total - sinks, window.recent)
    return sinks, recent, window.total - sinks - recent


def fill(window: Window, prompt: Any) -> Window:
    """Takes a prompt's first and last tokens into a fresh window; the selected slots stay as they are."""
    recent, sinks = window.recent, window.sinks

    def one(buffer: Float[Array, "H S D"], tokens: Float[Array, "H T D"], length: Int[Array, ""]):
        positions = jnp.concatenate([length - recent + jnp.arange(recent), jnp.arange(sinks)])
        picked = tokens[:, jnp.clip(positions, 0, tokens.shape[1] - 1)]
        return buffer.at[:, : recent + sinks].set(picked.astype(buffer.dtype))

    return dataclasses.replace(
        window,
        keys=jax.vmap(one)(window.keys, prompt.keys, prompt.lengths),
        values=jax.vmap(one)(window.values, prompt.values, prompt.lengths),
        total=prompt.lengths,
    )


def middle_mask(window: Window, tokens: int) -> Bool[Array, "B T"]:
    """Which positions of a prompt lie between the sinks and the recent tokens of a window just filled from it."""
    positions = jnp.arange(tokens)
    _, _, middle = occupancy(window)
    return (positions >= window.sinks) & (positions < window.sinks + middle[:, None])


def after_sinks(tokens: Float[Array, "B H_kv T D"], sinks: int) -> Float[Array, "B H_kv M D"]:
    """A prompt's tokens after the sinks, of which the first few, by row, are those between sinks and recent ones."""
    # At least one, so that shapes stay positive; none of it counts where a prompt is all sinks.
    return tokens[:, :, min(sinks, tokens.shape[2] - 1) :]


def slide(window: Window, new: Tokens) -> tuple[Window, Tokens]:
    """Takes new tokens in and gives those that leave for them, oldest first."""
    kept_keys, left_keys = slide_beside(window, new, window.keys, new.keys)
    kept_values, left_values = slide_beside(window, new, window.values, new.values)
    _, _, middle = occupancy(window)
    _, _, leaving = _arriving(window, new)
    slid = dataclasses.replace(window, keys=kept_keys, values=kept_values, total=window.total + new.count)
    return slid, Tokens(left_keys, left_values, leaving, window.sinks + middle, new.slot)


def slide_beside(
    window: Window, new: Tokens, kept: Shaped[Array, "B H_kv S *N"], fresh: Shaped[Array, "B H_kv P *N"]
) -> tuple[Shaped[Array, "B H_kv S *N"], Shaped[Array, "B H_kv P *N"]]:
    """What `slide` does to keys, done to anything that lies beside the window's slots and the new tokens: what then
    lies beside the window, and beside the tokens that left it."""
    recent_slots, sink_slots = window.recent, window.sinks
    slots = fresh.shape[2]

    def one(buffer: Shaped[Array, "H S *N"], fresh: Shaped[Array, "H P *N"], sinks, recent, to_sinks, count):
        # The row's tokens after the sinks, contiguous: recent ones end at slot `recent_slots`, new ones follow.
        line = jnp.concatenate([buffer[:, :recent_slots], jnp.roll(fresh, -to_sinks, axis=1)], axis=1)
        left = jax.lax.dynamic_slice_in_dim(line, recent_slots - recent, slots, axis=1)
        buffer = buffer.at[:, :recent_slots].set(jax.lax.dynamic_slice_in_dim(line, count, recent_slots, axis=1))
        if sink_slots:
            number = jnp.arange(slots)
            target = jnp.where(number < to_sinks, recent_slots + sinks + number, buffer.shape[1])
            buffer = buffer.at[:, target].set(fresh, mode="drop")
        return buffer, left

    sinks, recent, _ = occupancy(window)
    to_sinks, count, _ = _arriving(window, new)
    return jax.vmap(one)(kept, fresh, sinks, recent, to_sinks, count)


def _arriving(window: Window, new: Tokens) -> tuple[Int[Array, "B"], Int[Array, "B"], Int[Array, "B"]]:
    """How many new tokens become sinks, how many come after them, and how many tokens leave for these."""
    sinks, recent, _ = occupancy(window)
    to_sinks = jnp.minimum(window.sinks - sinks, new.count)
    count = new.count - to_sinks
    return to_sinks, count, jnp.maximum(recent + count - window.recent, 0)


def shown(
    window: Window,
    selected: Int[Array, "B"] | int = 0,
    log_weight: Float[Array, "B H_kv S"] | None = None,
    *,
    newer: Int[Array, "B #T"] | None = None,
) -> tuple[Segment, ...]:
    """The window as attention reads it; nothing where it has no slots.

    Args:
        selected: occupied slots of the selection.
        log_weight: of all slots.
        newer: hides as many of the oldest recent tokens as a query sees newer ones: exactly `recent` are then visible
            at every step. Policies that take what leaves into their selection show it until `compact` does so.
    """
    if not window.keys.shape[2]:
        return ()
    sinks, recent, _ = occupancy(window)
    start = (window.recent - recent)[:, None]
    if newer is not None:
        start = jnp.maximum(start, jnp.minimum(newer, window.recent))
    stop = (window.recent + sinks + selected)[:, None]
    return (Segment(window.keys, window.values, log_num=log_weight, start=start, stop=stop),)


def put_selected(
    window: Window,
    slot: Int[Array, "B H_kv n"],
    keys: Float[Array, "B H_kv T D"],
    values: Float[Array, "B H_kv T D_v"],
    source: Int[Array, "B H_kv n"],
) -> Window:
    """Writes the tokens of these numbers into selected slots; slots past the end are dropped."""
    place = lambda buffer, tokens: put_beside(window, slot, buffer, tokens, source)  # noqa: E731
    return dataclasses.replace(window, keys=place(window.keys, keys), values=place(window.values, values))


def put_beside(
    window: Window, slot, buffer: Shaped[Array, "B H_kv S *N"], tokens: Shaped[Array, "B H_kv T *N"], source
):
    """The same for anything that lies beside the window's slots and the tokens."""

    def one(buffer, tokens, slot, source):
        return buffer.at[window.fixed + slot].set(tokens[source].astype(buffer.dtype), mode="drop")

    return jax.vmap(jax.vmap(one))(buffer, tokens, slot, source)
