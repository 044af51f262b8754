"""Where decoding writes: a small staging buffer in front of stores that decoding leaves untouched.

Appending a token to a large buffer inside a compiled loop can cost a pass over the whole buffer, so new tokens go to
`Staging`, at one offset for the whole batch, and `compact` moves them on once in a while. `Window` is the store that
most policies share: the newest tokens, the first tokens (sinks) and, behind them, the slots of the policy's own
selection, in one buffer that attention reads as one segment.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.policy import CacheSpec, check_tokens
from kvjax.segment import Segment, segment
from kvjax.state import BATCH, HEAD_DIM, KV_HEADS, SLOTS, array, state, static


@state
class Block:
    """Consecutive tokens on their way from one store to the next, the first `count[b]` of P in row b."""

    keys: Float[Array, "B H_kv P D"] = array(BATCH, KV_HEADS, SLOTS, HEAD_DIM)
    values: Float[Array, "B H_kv P D"] = array(BATCH, KV_HEADS, SLOTS, HEAD_DIM)
    first: Int[Array, "B"] = array(BATCH)  # int32, position of the block's first token
    count: Int[Array, "B"] = array(BATCH)  # int32

    @property
    def present(self) -> Bool[Array, "B P"]:
        """Which places hold a token."""
        return jnp.arange(self.keys.shape[2]) < self.count[:, None]


@state
class Staging:
    """Tokens appended since the last compaction, in slots [0, offset) of P."""

    keys: Float[Array, "B H_kv P D"] = array(BATCH, KV_HEADS, SLOTS, HEAD_DIM)
    values: Float[Array, "B H_kv P D"] = array(BATCH, KV_HEADS, SLOTS, HEAD_DIM)
    # float32: 0 where the row has a token, -inf where it had ended or nothing was written yet.
    log_weight: Float[Array, "B H_kv P"] = array(BATCH, KV_HEADS, SLOTS)
    offset: Int[Array, ""] = array()  # int32
    count: Int[Array, "B"] = array(BATCH)  # int32, tokens of the row among the slots
    overflow: Int[Array, "B"] = array(BATCH, fault="tokens were appended to a full staging buffer and are lost")


def staging_slots(period: int, spec: CacheSpec) -> int:
    """Slots of a staging buffer: never more than will ever be appended."""
    return min(period, spec.max_new)


def init_staging(spec: CacheSpec, slots: int) -> Staging:
    shape = (spec.batch, spec.kv_heads, slots)
    return Staging(
        keys=jnp.zeros((*shape, spec.head_dim), spec.dtype),
        values=jnp.zeros((*shape, spec.head_dim), spec.dtype),
        log_weight=jnp.full(shape, -jnp.inf, jnp.float32),
        offset=jnp.zeros((), jnp.int32),
        # One buffer per field: a state must be fit to be donated.
        count=jnp.zeros(spec.batch, jnp.int32),
        overflow=jnp.zeros(spec.batch, jnp.int32),
    )


def stage(
    staging: Staging,
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D"],
    lengths: Int[Array, "B"] | None = None,
) -> Staging:
    """Appends T tokens, `lengths[b]` of them real in row b (all, when None).

    Raises:
        ValueError: for shapes or lengths that do not fit, or more tokens than the buffer has slots. More than it has
            slots left is known at run time only: those tokens are not written, and `overflow` counts them.
    """
    check_tokens(staging.keys, keys, values, lengths)
    batch, tokens = keys.shape[:2]
    slots = staging.keys.shape[2]
    if tokens > slots:
        raise ValueError(f"{tokens} tokens cannot be staged in {slots} slots: extend in blocks and compact in between")
    lengths = jnp.full(batch, tokens, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    fits = staging.offset + tokens <= slots
    real = (jnp.arange(tokens) < lengths[:, None]) & fits
    # A slice that does not fit would be moved, silently, over older tokens: then write back what is there instead.
    at = (0, 0, jnp.where(fits, staging.offset, 0), 0)
    kept_keys, kept_values, kept_weights = (
        jax.lax.dynamic_slice_in_dim(buffer, at[2], tokens, axis=2)
        for buffer in (staging.keys, staging.values, staging.log_weight)
    )
    new_keys = jnp.where(fits, keys.swapaxes(1, 2).astype(staging.keys.dtype), kept_keys)
    new_values = jnp.where(fits, values.swapaxes(1, 2).astype(staging.values.dtype), kept_values)
    weights = jnp.broadcast_to(jnp.where(real, 0.0, -jnp.inf)[:, None, :], kept_weights.shape)
    return Staging(
        keys=jax.lax.dynamic_update_slice(staging.keys, new_keys, at),
        values=jax.lax.dynamic_update_slice(staging.values, new_values, at),
        log_weight=jax.lax.dynamic_update_slice(staging.log_weight, jnp.where(fits, weights, kept_weights), at[:3]),
        offset=staging.offset + jnp.where(fits, tokens, 0),
        count=staging.count + jnp.where(fits, lengths, 0),
        overflow=staging.overflow + jnp.where(fits, 0, lengths),
    )


def appended(staging: Staging, queries: int) -> Bool[Array, "B T"]:
    """Which of the last T staged slots hold a token: rows that have ended append none."""
    weight = jax.lax.dynamic_slice_in_dim(staging.log_weight[:, 0], staging.offset - queries, queries, axis=1)
    return weight == 0


def visible_slots(staging: Staging, queries: int | None) -> Int[Array, "B"] | Int[Array, "B T"]:
    """Where the staged slots end that may be seen: by anyone (None), or by the queries of the last T staged tokens."""
    if queries is None:
        return jnp.broadcast_to(staging.offset, staging.count.shape)
    own = staging.offset - queries + 1 + jnp.arange(queries, dtype=jnp.int32)
    return jnp.broadcast_to(own, (staging.count.shape[0], queries))


def visible_count(staging: Staging, queries: int | None) -> Int[Array, "B"] | Int[Array, "B T"]:
    """How many staged tokens of the row those slots hold."""
    if queries is None:
        return staging.count
    real = staging.log_weight[:, 0, :] == 0
    slots = jnp.arange(real.shape[1])
    return jnp.sum(real[:, None, :] & (slots < visible_slots(staging, queries)[..., None]), axis=-1, dtype=jnp.int32)


def emptied(staging: Staging) -> Staging:
    """The staging buffer once its tokens have gone elsewhere."""
    return Staging(
        keys=staging.keys,
        values=staging.values,
        log_weight=jnp.full_like(staging.log_weight, -jnp.inf),
        offset=jnp.zeros_like(staging.offset),
        count=jnp.zeros_like(staging.count),
        overflow=staging.overflow,
    )


def to_front(staging: Staging, x: Shaped[Array, "B H_kv P *N"]) -> Shaped[Array, "B H_kv P *N"]:
    """What lies in, or beside, the staging slots, with each row's tokens moved to the front, in order."""

    def front(real: Bool[Array, "P"], x: Shaped[Array, "H P *N"]):
        slots = real.shape[0]
        # Slot i's token goes to the number of tokens before it; slots without one are dropped.
        target = jnp.where(real, jnp.cumsum(real) - 1, slots)
        source = jnp.zeros(slots, jnp.int32).at[target].set(jnp.arange(slots, dtype=jnp.int32), mode="drop")
        return x[:, source]

    return jax.vmap(front)(staging.log_weight[:, 0] == 0, x)


@state
class Window:
    """A cache's slots in one buffer: [recent | sinks | selection], S in all, and the staging buffer in front of it.

    The recent tokens are right-aligned in their slots, oldest first, and the others left-aligned, so that what is
    occupied is one range of slots; the oldest recent tokens leave by moving the range's start.
    """

    keys: Float[Array, "B H_kv S D"] = array(BATCH, KV_HEADS, SLOTS, HEAD_DIM, entries=True)
    values: Float[Array, "B H_kv S D"] = array(BATCH, KV_HEADS, SLOTS, HEAD_DIM, entries=True)
    staging: Staging
    total: Int[Array, "B"] = array(BATCH)  # int32, tokens taken in so far, staged ones not
    recent: int = static()  # slots
    sinks: int = static()  # slots


def check_budget(budget: int, sinks: int, recent: int) -> None:
    """Raises a ValueError for sizes that cannot be, naming the argument."""
    for name, size in {"sinks": sinks, "recent": recent}.items():
        if size < 0:
            raise ValueError(f"{name}={size}; it must not be negative")
    if budget < 1:
        raise ValueError(f"budget={budget}; it must be at least 1 slot")
    if budget < sinks + recent:
        raise ValueError(
            f"budget={budget} slots cannot hold sinks={sinks} and recent={recent}; it must be at least "
            f"{sinks + recent}, or those smaller"
        )


def check_period(period: int) -> None:
    if period < 1:
        raise ValueError(f"period={period}; it must be at least 1 token")


def init_window(spec: CacheSpec, slots: int, sinks: int, recent: int, period: int) -> Window:
    shape = (spec.batch, spec.kv_heads, slots, spec.head_dim)
    return Window(
        keys=jnp.zeros(shape, spec.dtype),
        values=jnp.zeros(shape, spec.dtype),
        staging=init_staging(spec, staging_slots(period, spec)),
        total=jnp.zeros(spec.batch, jnp.int32),
        recent=recent,
        sinks=sinks,
    )


def occupancy(window: Window) -> tuple[Int[Array, "B"], Int[Array, "B"], Int[Array, "B"]]:
    """How many sinks, recent tokens and tokens in between (the selection's candidates so far) each row has had."""
    sinks = jnp.minimum(window.total, window.sinks)
    recent = jnp.minimum(window.total - sinks, window.recent)
    return sinks, recent, window.total - sinks - recent


def fill_window(
    window: Window, keys: Float[Array, "B T H_kv D"], values: Float[Array, "B T H_kv D"], lengths: Int[Array, "B"]
) -> Window:
    """Takes a prompt's first and last tokens into a fresh window; the selection's slots stay as they are."""
    recent, sinks = window.recent, window.sinks

    def fill(buffer: Float[Array, "H S D"], tokens: Float[Array, "T H D"], length: Int[Array, ""]):
        positions = jnp.concatenate([length - recent + jnp.arange(recent), jnp.arange(sinks)])
        picked = tokens.swapaxes(0, 1)[:, jnp.clip(positions, 0, tokens.shape[0] - 1)]
        return buffer.at[:, : recent + sinks].set(picked.astype(buffer.dtype))

    lengths = lengths.astype(jnp.int32)
    return Window(
        keys=jax.vmap(fill)(window.keys, keys, lengths),
        values=jax.vmap(fill)(window.values, values, lengths),
        staging=window.staging,
        total=lengths,
        recent=recent,
        sinks=sinks,
    )


def between(window: Window, tokens: int) -> Bool[Array, "B T"]:
    """Which positions of a prompt lie between the sinks and the recent tokens of a window just filled from it."""
    positions = jnp.arange(tokens)
    _, _, middle = occupancy(window)
    return (positions >= window.sinks) & (positions < window.sinks + middle[:, None])


def window_segments(
    window: Window,
    selected: Int[Array, "B"] | int = 0,
    log_weight: Float[Array, "B H_kv S"] | None = None,
    *,
    queries: int | None,
    slide: bool = False,
) -> tuple[Segment, ...]:
    """The window (where it has slots) and its staging buffer as attention reads them.

    Args:
        selected: occupied slots of the selection.
        log_weight: of the window's slots.
        queries: None for queries that see all that is cached; T for the queries of the last T staged tokens, each of
            which sees what was cached when it came.
        slide: whether the oldest recent tokens are hidden while newer ones are still staged, so that exactly `recent`
            tokens are visible at every step. Policies that take leaving tokens over into their selection show them
            until `compact` does so.
    """
    sinks, recent, _ = occupancy(window)
    staging = window.staging
    staged_segment = segment(
        staging.keys, staging.values, log_num=staging.log_weight, stop=visible_slots(staging, queries)
    )
    if not window.keys.shape[2]:
        return (staged_segment,)
    start = window.recent - recent
    if slide:
        staged = jnp.minimum(visible_count(staging, queries), window.recent)
        start = jnp.maximum(start[:, None] if staged.ndim == 2 else start, staged)
    stop = window.recent + sinks + selected
    return segment(window.keys, window.values, log_num=log_weight, start=start, stop=stop), staged_segment


def settle(window: Window) -> tuple[Window, Block]:
    """Takes the staged tokens into the window and returns those that left it, oldest first."""
    new_keys, left_keys = settle_beside(window, window.keys, window.staging.keys)
    new_values, left_values = settle_beside(window, window.values, window.staging.values)
    _, _, middle = occupancy(window)
    _, _, leaving = _arriving(window)
    settled = Window(
        keys=new_keys,
        values=new_values,
        staging=emptied(window.staging),
        total=window.total + window.staging.count,
        recent=window.recent,
        sinks=window.sinks,
    )
    return settled, Block(left_keys, left_values, first=window.sinks + middle, count=leaving)


def settle_beside(
    window: Window, kept: Shaped[Array, "B H_kv S *N"], staged: Shaped[Array, "B H_kv P *N"]
) -> tuple[Shaped[Array, "B H_kv S *N"], Shaped[Array, "B H_kv P *N"]]:
    """What `settle` does to a window's keys, done to anything that lies beside its slots and its staging slots: what
    then lies beside the settled window, and beside the tokens that left it. The selection's slots stay as they are."""
    recent_slots, sink_slots = window.recent, window.sinks
    slots = staged.shape[2]

    def shift(buffer: Shaped[Array, "H S *N"], staged: Shaped[Array, "H P *N"], sinks, recent, to_sinks, count):
        # The row's tokens after the sinks, contiguous: recent ones end at slot `recent_slots`, staged ones follow.
        line = jnp.concatenate([buffer[:, :recent_slots], jnp.roll(staged, -to_sinks, axis=1)], axis=1)
        left = jax.lax.dynamic_slice_in_dim(line, recent_slots - recent, slots, axis=1)
        buffer = buffer.at[:, :recent_slots].set(jax.lax.dynamic_slice_in_dim(line, count, recent_slots, axis=1))
        if sink_slots:
            number = jnp.arange(slots)
            target = jnp.where(number < to_sinks, recent_slots + sinks + number, buffer.shape[1])
            buffer = buffer.at[:, target].set(staged, mode="drop")
        return buffer, left

    sinks, recent, _ = occupancy(window)
    to_sinks, count, _ = _arriving(window)
    return jax.vmap(shift)(kept, to_front(window.staging, staged), sinks, recent, to_sinks, count)


def _arriving(window: Window) -> tuple[Int[Array, "B"], Int[Array, "B"], Int[Array, "B"]]:
    """How many staged tokens of each row become sinks, how many come after them, and how many tokens leave for it."""
    sinks, recent, _ = occupancy(window)
    to_sinks = jnp.minimum(window.sinks - sinks, window.staging.count)
    count = window.staging.count - to_sinks
    return to_sinks, count, jnp.maximum(recent + count - window.recent, 0)
