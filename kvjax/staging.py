"""The staging buffer: new tokens go to a small buffer in front of stores that decoding leaves untouched.

Appending to a large buffer inside a compiled loop can cost a pass over the entire buffer. New tokens are therefore
written to `Staging`, at one offset for the whole batch. Every `compact_every` tokens a policy takes them over.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.segment import Segment
from kvjax.spec import CacheSpec, allocated_slots
from kvjax.state import fault, state

_MAX_COUNT = 2**29  # counters saturate here, far above any capacity


@state
class Tokens:
    """Consecutive tokens of every row, the first `count[b]` of P slots; the content of other slots is undefined."""

    keys: Float[Array, "B H_kv P D"]
    values: Float[Array, "B H_kv P D_v"]
    count: Int[Array, "B"]  # int32
    first: Int[Array, "B"]  # int32, position of the row's first token
    slot: Int[Array, "B P"]  # int32, staging slot of each token
    scores: Float[Array, "B H_kv P"] | None = None  # float32 predicted scores (`Requirements.predicted_scores`)

    @property
    def present(self) -> Bool[Array, "B P"]:
        """Which slots hold a token."""
        return jnp.arange(self.keys.shape[2]) < self.count[:, None]

    @property
    def position(self) -> Int[Array, "B P"]:
        """Position of every token in its sequence."""
        return self.first[:, None] + jnp.arange(self.keys.shape[2])

    def gather_staged(self, x: Shaped[Array, "B H_kv S *N"]) -> Shaped[Array, "B H_kv P *N"]:
        """Reorders an array over staging slots to the order of these tokens."""
        return jax.vmap(lambda x, slot: x[:, slot])(x, self.slot)


@state
class Staging:
    """Keys and values appended since the last compaction, in slots [0, offset) of the P slots of `Counters`.

    S is P, rounded up to a multiple of 8 (`spec.allocated_slots`).
    """

    keys: Float[Array, "B H_kv S D"]
    values: Float[Array, "B H_kv S D_v"]
    scores: Float[Array, "B H_kv S"] | None = None  # float32 predicted scores, if the policy requires them


@state
class Counters:
    """The number of tokens that the rows of a batch have received. Layers that receive the same tokens share one."""

    present: Bool[Array, "B P"]  # staging slots that hold a token of the row; finished sequences append none
    offset: Int[Array, ""]  # int32, staging slots in use
    count: Int[Array, "B"]  # int32, tokens of the row in the staging buffer
    first: Int[Array, "B"]  # int32, tokens of the row before them
    overflow: Int[Array, "B"] = fault("tokens were appended to a full staging buffer, or with invalid lengths")
    past: Int[Array, "B"] = fault("tokens were appended beyond max_prompt_tokens + max_new_tokens")

    @property
    def slots(self) -> int:
        """Maximum number of tokens in the staging buffer, P."""
        return self.present.shape[1]

    @property
    def num_tokens(self) -> Int[Array, "B"]:
        """Tokens that every row has received, evicted ones included."""
        return self.first + self.count


def init_staging(spec: CacheSpec, slots: int, *, scored: bool = False) -> tuple[Staging, Counters]:
    """Returns an empty staging buffer and its counters.

    Args:
        slots: maximum number of tokens in the buffer, P.
        scored: whether tokens have predicted scores.

    Returns:
        The buffer and the counters.
    """
    shape = (spec.batch, spec.kv_heads, allocated_slots(slots))
    staging = Staging(
        keys=jnp.zeros((*shape, spec.head_dim), spec.dtype),
        values=jnp.zeros((*shape, spec.value_width), spec.dtype),
        scores=jnp.zeros(shape, jnp.float32) if scored else None,
    )
    # One buffer per field, so that the state can be donated.
    counts = {name: jnp.zeros(spec.batch, jnp.int32) for name in ("count", "first", "overflow", "past")}
    return staging, Counters(jnp.zeros((spec.batch, slots), bool), jnp.zeros((), jnp.int32), **counts)


def check_counters(staging: Staging, counters: Counters, spec: CacheSpec) -> None:
    """Checks that counters belong to a cache.

    Args:
        staging: staging buffer of the cache.

    Raises:
        TypeError: if they are not `Counters`.
        ValueError: if their sizes differ from the cache's.
    """
    if not isinstance(counters, Counters):
        raise TypeError(f"counters must be kvjax.Counters, which kvjax.init returns, got {type(counters).__name__}")
    (rows, slots), expected = counters.present.shape, (staging.keys.shape[0], spec.staging_slots)
    if (rows, slots) != expected:
        raise ValueError(
            f"counters of {rows} rows and {slots} staging slots do not belong to a cache of {expected[0]} rows and "
            f"{expected[1]} slots; pass the counters that kvjax.init returned with the cache"
        )


def append(
    staging: Staging,
    counters: Counters,
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D_v"],
    lengths: Int[Array, "B"] | None,
    scores: Float[Array, "B H_kv T"] | None = None,
) -> tuple[Staging, Counters]:
    """Appends T tokens, the first `lengths[b]` of them in row b.

    Args:
        lengths: tokens per row; None for T.
        scores: predicted scores, if the buffer has them.

    Returns:
        The buffer and the counters. Tokens without a slot and invalid lengths are counted in `overflow`.

    Raises:
        ValueError: if T exceeds the slots of the buffer.
    """
    batch, tokens = keys.shape[:2]
    slots = counters.slots
    if tokens > slots:
        raise ValueError(
            f"cannot append {tokens} tokens to {slots} staging slots; append at most {slots} at a time, or give the "
            "policy a larger compact_every"
        )
    lengths = jnp.full(batch, tokens, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    lengths = jnp.clip(lengths, -_MAX_COUNT, _MAX_COUNT)  # so that sums of counts cannot overflow
    valid = jnp.clip(lengths, 0, tokens)
    fits = counters.offset + tokens <= slots
    real = (jnp.arange(tokens) < valid[:, None]) & fits
    # `dynamic_update_slice` would move a slice that does not fit over older tokens: write those back instead.
    start = jnp.where(fits, counters.offset, 0)

    def write(buffer: Shaped[Array, "B H S *D"], new: Shaped[Array, "B H T *D"]) -> Shaped[Array, "B H S *D"]:
        """Writes `new` into the staging `buffer` from slot `start` on; a buffer that is too full is unchanged."""
        old = jax.lax.dynamic_slice_in_dim(buffer, start, tokens, axis=2)
        # Zeros where a row has no token: a NaN there would survive a weight of zero.
        new = jnp.where(jnp.expand_dims(real[:, None], range(3, new.ndim)), new.astype(buffer.dtype), 0)
        return jax.lax.dynamic_update_slice_in_dim(buffer, jnp.where(fits, new, old), start, axis=2)

    old_present = jax.lax.dynamic_slice_in_dim(counters.present, start, tokens, axis=1)
    present = jax.lax.dynamic_update_slice(counters.present, jnp.where(fits, real, old_present), (0, start))
    taken = jnp.where(fits, valid, 0)
    counters = dataclasses.replace(
        counters,
        present=present,
        offset=counters.offset + jnp.where(fits, tokens, 0),
        count=counters.count + taken,
        overflow=jnp.minimum(counters.overflow + jnp.abs(lengths - taken), _MAX_COUNT),
    )
    new_scores = staging.scores if staging.scores is None or scores is None else write(staging.scores, scores)
    keys, values = write(staging.keys, keys.swapaxes(1, 2)), write(staging.values, values.swapaxes(1, 2))
    return Staging(keys, values, new_scores), counters


def appended_mask(counters: Counters, tokens: int) -> Bool[Array, "B T"]:
    """Returns which of the newest staging slots hold a token.

    Args:
        tokens: T, number of newest slots.

    Returns:
        Whether a row has a token in each of them; finished sequences append none.
    """
    return jax.lax.dynamic_slice_in_dim(counters.present, counters.offset - tokens, tokens, axis=1)


def staged_segment(staging: Staging, counters: Counters, tokens: int) -> Segment:
    """Returns the buffer as attention reads it.

    Args:
        tokens: T newest tokens, whose queries see tokens up to their own (causal attention); 1 for queries that see
            everything.

    Returns:
        A segment.
    """
    batch, _, slots, _ = staging.keys.shape
    present = jnp.pad(counters.present, ((0, 0), (0, slots - counters.slots)))
    log_weight = jnp.where(present, 0.0, -jnp.inf)[:, None]
    return Segment(
        staging.keys,
        staging.values,
        log_num=jnp.broadcast_to(log_weight, staging.keys.shape[:3]),
        stop=jnp.broadcast_to(_causal_ends(counters, tokens), (batch, tokens)),
    )


def num_visible_staged(counters: Counters, tokens: int) -> Int[Array, "B #T"]:
    """Counts the staged tokens of its row that each query sees.

    Returns:
        int32 counts.
    """
    if tokens == 1:
        return counters.count[:, None]
    visible = jnp.arange(counters.slots) < _causal_ends(counters, tokens)[:, None]
    return jnp.sum(counters.present[:, None] & visible, axis=-1, dtype=jnp.int32)


def _causal_ends(counters: Counters, tokens: int) -> Int[Array, "T"]:
    """Returns the exclusive end of the slots that each of the newest T tokens' queries sees."""
    return counters.offset - tokens + 1 + jnp.arange(tokens, dtype=jnp.int32)


def take_staged(staging: Staging, counters: Counters) -> tuple[Tokens, Counters]:
    """Returns the staged tokens for a compaction.

    Returns:
        The tokens, moved to the first slots of every row, and the counters of an empty buffer.
    """

    def order(present: Bool[Array, "P"]) -> Int[Array, "P"]:
        """Returns the staging slots that are `present`, in order and padded with 0."""
        slots = present.shape[0]
        # The token of slot i goes to the number of tokens before it; empty slots are dropped.
        target = jnp.where(present, jnp.cumsum(present) - 1, slots)
        return jnp.zeros(slots, jnp.int32).at[target].set(jnp.arange(slots, dtype=jnp.int32), mode="drop")

    slot = jax.vmap(order)(counters.present)
    gather = jax.vmap(lambda x, slot: x[:, slot])
    keys, values = gather(staging.keys, slot), gather(staging.values, slot)
    scores = None if staging.scores is None else gather(staging.scores, slot)
    tokens = Tokens(keys, values, counters.count, counters.first, slot, scores)
    emptied = dataclasses.replace(
        counters,
        present=jnp.zeros_like(counters.present),
        offset=jnp.zeros_like(counters.offset),
        count=jnp.zeros_like(counters.count),
        first=jnp.minimum(counters.num_tokens, _MAX_COUNT),
    )
    return tokens, emptied
