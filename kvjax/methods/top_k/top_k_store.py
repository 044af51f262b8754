"""A store of the highest-ranked tokens of a prompt, whose lowest-ranked tokens give way to later ones."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.quantization import write_entries
from kvjax.segment import Segment
from kvjax.shared.per_head import per_head
from kvjax.shared.staging import Tokens
from kvjax.spec import CacheSpec, allocated_slots
from kvjax.state import kv_entries, state, static


@state
class TopKStore:
    """The kept tokens of every head: a prompt's by rank in slots [0, ranked), later ones by `later_token_slots`."""

    keys: Float[Array, "B H_kv S D"] = kv_entries(written_once=True)
    values: Float[Array, "B H_kv S D_v"] = kv_entries(written_once=True)
    ranked: Int[Array, "B"]  # int32, tokens of the prompt
    later: Int[Array, "B"]  # int32, tokens received after the prompt
    slots: int = static()  # maximum number of tokens; the remaining ones of S stay empty
    log_weights: Float[Array, "B H_kv S"] | None = None  # in the dtype of the cache; None for 0


def init_top_k_store(spec: CacheSpec, slots: int, *, weighted: bool = False) -> TopKStore:
    """Returns an empty store.

    Args:
        spec: the cache's spec.
        slots: maximum number of tokens per KV head.
        weighted: whether entries have log-weights.

    Returns:
        The store.
    """
    shape = (spec.batch, spec.kv_heads, allocated_slots(slots))
    return TopKStore(
        keys=jnp.zeros((*shape, spec.head_dim), spec.dtype),
        values=jnp.zeros((*shape, spec.value_width), spec.dtype),
        ranked=jnp.zeros(spec.batch, jnp.int32),
        later=jnp.zeros(spec.batch, jnp.int32),
        slots=slots,
        log_weights=jnp.zeros(shape, spec.dtype) if weighted else None,
    )


def fill(
    store: TopKStore,
    rank: Float[Array, "B H_kv T"],
    keys: Float[Array, "B H_kv T D"],
    values: Float[Array, "B H_kv T D_v"],
    lengths: Int[Array, "B"],
    count: int,
) -> TopKStore:
    """Writes the `count` tokens of highest rank into an empty store, best first.

    Args:
        store: an empty store.
        rank: rank of every token; -inf past a row's length.
        keys: keys of the prompt.
        values: values of the prompt.
        lengths: tokens per row.
        count: slots to fill.

    Returns:
        The store.
    """
    count = min(count, keys.shape[2])
    _, best = jax.lax.top_k(rank, count)

    def write(slots: Float[Array, "B H S D"], x: Float[Array, "B H T D"]) -> Float[Array, "B H S D"]:
        return slots.at[:, :, :count].set(jnp.take_along_axis(x, best[..., None], axis=2).astype(slots.dtype))

    ranked = jnp.minimum(lengths, count)
    return dataclasses.replace(store, keys=write(store.keys, keys), values=write(store.values, values), ranked=ranked)


def append(store: TopKStore, new: Tokens, sinks: int) -> TopKStore:
    """Writes later tokens into free slots, then over the tokens of lowest rank.

    Args:
        new: later tokens.
        sinks: first tokens, which are never overwritten.

    Returns:
        The store.
    """
    number = store.later[:, None] + jnp.arange(new.keys.shape[2])
    target = later_token_slots(number, store.ranked, store.slots - store.ranked, sinks)
    target = jnp.broadcast_to(jnp.where(new.present, target, store.keys.shape[2])[:, None], new.keys.shape[:3])

    def put(slots: Float[Array, "B H S *D"], new: Float[Array, "B H P *D"]) -> Float[Array, "B H S *D"]:
        return per_head(_put)(slots, target, new)

    log_weights = store.log_weights
    if log_weights is not None:
        log_weights = put(log_weights, jnp.zeros(target.shape))
    return dataclasses.replace(
        store,
        keys=write_entries(store.keys, new.keys, put, valid=new.present[:, None]),
        values=write_entries(store.values, new.values, put),
        later=store.later + new.count,
        log_weights=log_weights,
    )


def _put(slots: Float[Array, "S *D"], target: Int[Array, "P"], new: Float[Array, "P *D"]) -> Float[Array, "S *D"]:
    return slots.at[target].set(new.astype(slots.dtype), mode="drop")


def store_segment(store: TopKStore) -> Segment:
    """Returns the store as attention reads it."""
    stop = jnp.minimum(store.ranked + store.later, store.slots)
    log_weights = None if store.log_weights is None else store.log_weights.astype(jnp.float32)
    return Segment(store.keys, store.values, log_num=log_weights, stop=stop[:, None])


def later_token_slots(
    number: Int[Array, "... P"], ranked: Int[Array, "..."], empty: Int[Array, "..."], sinks: int
) -> Int[Array, "... P"]:
    """Returns the slot of each later token.

    Later tokens fill the empty slots first, then overwrite the tokens of lowest rank, upwards until only sinks are
    left, and then start again with the oldest later token.

    Args:
        number: numbers of the later tokens, from 0.
        ranked: slots that hold tokens of the prompt.
        empty: free slots after the prompt.
        sinks: first tokens, which are never overwritten.

    Returns:
        Slot indices.
    """
    ranked, empty = ranked[..., None], empty[..., None]
    size = ranked + empty
    # A prompt shorter than the sinks leaves the remaining sinks to the tokens that follow it.
    missing = jnp.maximum(sinks - ranked, 0)
    turn = jnp.where(number < missing, number, missing + (number - missing) % jnp.maximum(size - sinks, 1))
    return jnp.where(turn < empty, ranked + turn, size - 1 - turn)
