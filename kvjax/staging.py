"""Where new tokens go: a small buffer in front of stores that decoding leaves untouched.

Appending a token to a large buffer inside a compiled loop can cost a pass over the whole buffer, so new tokens go to
`Staging`, at one offset for the whole batch. It belongs to the library: policies are handed its tokens by `compact`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.segment import Segment
from kvjax.spec import CacheSpec
from kvjax.state import fault, state

_MOST = 2**29  # where counters stay, far past what a cache can be made for


@state
class Tokens:
    """Consecutive tokens of every row, in order, the first `count[b]` of P; what lies behind them is noise."""

    keys: Float[Array, "B H_kv P D"]
    values: Float[Array, "B H_kv P D_v"]
    count: Int[Array, "B"]  # int32
    first: Int[Array, "B"]  # int32, position of the row's first
    slot: Int[Array, "B P"]  # int32, in which staging slot each lay; for those not there, the first slots

    @property
    def present(self) -> Bool[Array, "B P"]:
        """Which places hold a token."""
        return jnp.arange(self.keys.shape[2]) < self.count[:, None]

    @property
    def position(self) -> Int[Array, "B P"]:
        """Of every token in the row's text."""
        return self.first[:, None] + jnp.arange(self.keys.shape[2])

    def beside(self, x: Shaped[Array, "B H_kv P *N"]) -> Shaped[Array, "B H_kv P *N"]:
        """What lies beside the staging slots, in the order of these tokens."""
        return jax.vmap(lambda x, slot: x[:, slot])(x, self.slot)


@state
class Staging:
    """Tokens appended since the last compaction, in slots [0, offset) of P."""

    keys: Float[Array, "B H_kv P D"]
    values: Float[Array, "B H_kv P D_v"]
    log_weight: Float[Array, "B H_kv P"]  # float32: 0 where the row has a token, -inf elsewhere
    offset: Int[Array, ""]  # int32
    count: Int[Array, "B"]  # int32, tokens of the row among the slots
    first: Int[Array, "B"]  # int32, tokens of the row before them
    overflow: Int[Array, "B"] = fault(
        "tokens came to a full staging buffer, or with lengths that cannot be, and are lost"
    )


def init_staging(spec: CacheSpec) -> Staging:
    """An empty buffer of `spec.staging` slots."""
    shape = (spec.batch, spec.kv_heads, spec.staging)
    return Staging(
        keys=jnp.zeros((*shape, spec.head_dim), spec.dtype),
        values=jnp.zeros((*shape, spec.value_width), spec.dtype),
        log_weight=jnp.full(shape, -jnp.inf, jnp.float32),
        offset=jnp.zeros((), jnp.int32),
        # One buffer per field: a state must be fit to be donated.
        count=jnp.zeros(spec.batch, jnp.int32),
        first=jnp.zeros(spec.batch, jnp.int32),
        overflow=jnp.zeros(spec.batch, jnp.int32),
    )


def append(
    staging: Staging,
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D_v"],
    lengths: Int[Array, "B"] | None,
) -> Staging:
    """Appends T tokens, `lengths[b]` of them real in row b (all, when None).

    Tokens that find no slot, and lengths that cannot be, are known at run time only: `overflow` counts them.

    Raises:
        ValueError: for more tokens than the buffer has slots.
    """
    batch, tokens = keys.shape[:2]
    slots = staging.keys.shape[2]
    if tokens > slots:
        raise ValueError(
            f"{tokens} tokens cannot be staged in {slots} slots: append at most {slots} at a time, or give the policy "
            "a larger compact_every"
        )
    lengths = jnp.full(batch, tokens, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    lengths = jnp.clip(lengths, -_MOST, _MOST)  # so that what is counted of them cannot run over
    possible = jnp.clip(lengths, 0, tokens)
    fits = staging.offset + tokens <= slots
    real = (jnp.arange(tokens) < possible[:, None]) & fits
    # A slice that does not fit would be moved, silently, over older tokens: then write back what is there instead.
    at = (0, 0, jnp.where(fits, staging.offset, 0), 0)
    kept_keys, kept_values, kept_weights = (
        jax.lax.dynamic_slice_in_dim(buffer, at[2], tokens, axis=2)
        for buffer in (staging.keys, staging.values, staging.log_weight)
    )
    # Zeros where a row has no token: of what is padding nothing must remain, and NaN times a weight of zero would.
    new_keys, new_values = (
        jnp.where(fits, jnp.where(real[:, None, :, None], new.swapaxes(1, 2).astype(kept.dtype), 0), kept)
        for new, kept in ((keys, kept_keys), (values, kept_values))
    )
    weights = jnp.broadcast_to(jnp.where(real, 0.0, -jnp.inf)[:, None, :], kept_weights.shape)
    return dataclasses.replace(
        staging,
        keys=jax.lax.dynamic_update_slice(staging.keys, new_keys, at),
        values=jax.lax.dynamic_update_slice(staging.values, new_values, at),
        log_weight=jax.lax.dynamic_update_slice(staging.log_weight, jnp.where(fits, weights, kept_weights), at[:3]),
        offset=staging.offset + jnp.where(fits, tokens, 0),
        count=staging.count + jnp.where(fits, possible, 0),
        overflow=jnp.minimum(staging.overflow + jnp.abs(lengths - jnp.where(fits, possible, 0)), _MOST),
    )


def appended(staging: Staging, tokens: int) -> Bool[Array, "B T"]:
    """Which of the last T slots hold a token: rows that have ended append none."""
    weight = jax.lax.dynamic_slice_in_dim(staging.log_weight[:, 0], staging.offset - tokens, tokens, axis=1)
    return weight == 0


def staged(staging: Staging, tokens: int) -> Segment:
    """The buffer as attention reads it: the queries of the last `tokens` tokens see up to their own, any other all."""
    if tokens == 1:
        stop = jnp.broadcast_to(staging.offset, staging.count.shape)[:, None]
    else:
        stop = jnp.broadcast_to(_ends(staging, tokens), (staging.count.shape[0], tokens))
    return Segment(staging.keys, staging.values, log_num=staging.log_weight, stop=stop)


def newer_tokens(staging: Staging, tokens: int) -> Int[Array, "B #T"]:
    """How many staged tokens of its row each of those queries sees."""
    if tokens == 1:
        return staging.count[:, None]
    real = staging.log_weight[:, 0] == 0
    seen = jnp.arange(real.shape[1]) < _ends(staging, tokens)[:, None]
    return jnp.sum(real[:, None] & seen, axis=-1, dtype=jnp.int32)


def _ends(staging: Staging, tokens: int) -> Int[Array, "T"]:
    """Behind which slot ends what each of the queries of the last T slots sees: its own."""
    return staging.offset - tokens + 1 + jnp.arange(tokens, dtype=jnp.int32)


def take_out(staging: Staging) -> tuple[Tokens, Staging]:
    """The staged tokens, every row's at the front, and the buffer without them."""

    def order(real: Bool[Array, "P"]) -> Int[Array, "P"]:
        slots = real.shape[0]
        # Slot i's token goes to the number of tokens before it; slots without one are dropped.
        target = jnp.where(real, jnp.cumsum(real) - 1, slots)
        return jnp.zeros(slots, jnp.int32).at[target].set(jnp.arange(slots, dtype=jnp.int32), mode="drop")

    slot = jax.vmap(order)(staging.log_weight[:, 0] == 0)
    front = jax.vmap(lambda x, slot: x[:, slot])
    tokens = Tokens(front(staging.keys, slot), front(staging.values, slot), staging.count, staging.first, slot)
    emptied = dataclasses.replace(
        staging,
        log_weight=jnp.full_like(staging.log_weight, -jnp.inf),
        offset=jnp.zeros_like(staging.offset),
        count=jnp.zeros_like(staging.count),
        first=jnp.minimum(staging.first + staging.count, _MOST),
    )
    return tokens, emptied
