"""A store of the highest-ranked tokens of a prompt, whose lowest-ranked tokens give way to later ones.

Without scores, later tokens need none: they overwrite the prompt's tokens in the order of rank (`append`). With scores,
every compaction drops the tokens of lowest score among all but the sinks and the newest (`append_scored`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.quantization import write_entries
from kvjax.segment import Segment
from kvjax.shared.per_head import per_head
from kvjax.spec import CacheSpec, allocated_slots
from kvjax.staging import Tokens
from kvjax.state import kv_entries, state, static


@state
class TopKStore:
    """The kept tokens of every head: a prompt's by rank in slots [0, ranked).

    Later tokens are in the slots of `later_token_slots`, or with scores in those of the tokens that they replace.
    """

    keys: Float[Array, "B H_kv S D"] = kv_entries(written_once=True)
    values: Float[Array, "B H_kv S D_v"] = kv_entries(written_once=True)
    ranked: Int[Array, "B"]  # int32, tokens of the prompt
    received: Int[Array, "B"]  # int32, `ranked` and all tokens after the prompt, which may be more than there are slots
    slots: int = static()  # maximum number of tokens; the remaining ones of S stay empty
    log_weights: Float[Array, "B H_kv S"] | None = None  # in the dtype of the cache; None for 0
    scores: Float[Array, "B H_kv S"] | None = None  # bfloat16, -inf in empty slots; None if later tokens have none
    newest: Int[Array, "B H_kv R"] | None = None  # int32, slots of the newest tokens, oldest first; S for no token


def init_top_k_store(spec: CacheSpec, slots: int, *, weighted: bool = False, newest: int | None = None) -> TopKStore:
    """Returns an empty store.

    Args:
        slots: maximum number of tokens per KV head.
        weighted: whether entries have log-weights.
        newest: number of newest tokens that `append_scored` keeps, at least `spec.staging_slots`; None for a store
            without scores.

    Returns:
        The store.
    """
    shape = (spec.batch, spec.kv_heads, allocated_slots(slots))
    return TopKStore(
        keys=jnp.zeros((*shape, spec.head_dim), spec.dtype),
        values=jnp.zeros((*shape, spec.value_width), spec.dtype),
        ranked=jnp.zeros(spec.batch, jnp.int32),
        received=jnp.zeros(spec.batch, jnp.int32),
        slots=slots,
        log_weights=jnp.zeros(shape, spec.dtype) if weighted else None,
        scores=None if newest is None else jnp.full(shape, -jnp.inf, jnp.bfloat16),
        newest=None if newest is None else jnp.full((*shape[:2], newest), shape[2], jnp.int32),
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
        rank: rank of every token; -inf past a row's length.
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
    keys, values = write(store.keys, keys), write(store.values, values)
    return dataclasses.replace(store, keys=keys, values=values, ranked=ranked, received=ranked)


def start_scores(
    store: TopKStore, rank: Float[Array, "B H_kv T"], scores: Float[Array, "B H_kv T"], sinks: int, recent: int
) -> TopKStore:
    """Adds the scores of a prompt to a store that `fill` filled.

    Args:
        rank: rank of every token, as for `fill`; the last tokens are ranked right after the sinks, newest first.
        sinks: first tokens, which are never dropped.
        recent: last tokens of the prompt that are always kept.

    Returns:
        The store.
    """
    assert store.scores is not None and store.newest is not None
    slots, size = store.scores.shape[2], store.newest.shape[2]
    count = min(slots, rank.shape[2])
    _, best = jax.lax.top_k(rank, count)
    kept = jnp.take_along_axis(scores, best, axis=2)
    kept = jnp.where(jnp.arange(count) < store.ranked[:, None, None], kept, -jnp.inf)
    age = jnp.arange(size)[::-1]
    newest = jnp.where(age < jnp.minimum(recent, store.ranked[:, None] - sinks), sinks + age, slots)
    return dataclasses.replace(
        store,
        scores=store.scores.at[:, :, :count].set(kept.astype(store.scores.dtype)),
        newest=jnp.broadcast_to(newest[:, None], store.newest.shape),
    )


def append_scored(store: TopKStore, new: Tokens, sinks: int) -> TopKStore:
    """Writes later tokens over those of lowest score, other than sinks and the newest tokens.

    Args:
        new: later tokens with predicted scores.
        sinks: first tokens, which are never overwritten.

    Returns:
        The store.
    """
    assert store.scores is not None and store.newest is not None and new.scores is not None
    size, tokens = store.newest.shape[2], new.keys.shape[2]

    def choose(
        scores: Float[Array, "S"], newest: Int[Array, "R"], new_scores: Float[Array, "P"], count: Int[Array, ""]
    ) -> tuple[Int[Array, "P"], Float[Array, "S"], Int[Array, "R"]]:
        """Returns the slots of one head's `count` new tokens, and the scores and the newest slots afterwards."""
        slot = jnp.arange(scores.shape[0])
        rank = jnp.where((slot < sinks) & ~jnp.isneginf(scores), jnp.inf, scores.astype(jnp.float32))
        rank = jnp.where(slot < store.slots, rank, jnp.inf)
        staying = jnp.where(jnp.arange(size) < count, scores.shape[0], newest)
        rank = rank.at[staying].set(jnp.inf, mode="drop")
        _, lowest = jax.lax.top_k(-rank, tokens)  # empty slots first, in their order
        target = jnp.where(jnp.arange(tokens) < count, lowest, scores.shape[0])
        scores = scores.at[target].set(new_scores.astype(scores.dtype), mode="drop")
        newest = jax.lax.dynamic_slice(jnp.concatenate([newest, target]), (count,), (size,))
        return target, scores, newest

    target, scores, newest = per_head(choose, 0, 0, 0, None)(store.scores, store.newest, new.scores, new.count)
    return dataclasses.replace(_write(store, new, target), scores=scores, newest=newest)


def append(store: TopKStore, new: Tokens, sinks: int) -> TopKStore:
    """Writes later tokens into free slots, then over the tokens of lowest rank.

    Args:
        new: later tokens.
        sinks: first tokens, which are never overwritten.

    Returns:
        The store.
    """
    number = (store.received - store.ranked)[:, None] + jnp.arange(new.keys.shape[2])
    target = later_token_slots(number, store.ranked, store.slots - store.ranked, sinks)
    target = jnp.broadcast_to(jnp.where(new.present, target, store.keys.shape[2])[:, None], new.keys.shape[:3])
    return _write(store, new, target)


def _write(store: TopKStore, new: Tokens, target: Int[Array, "B H_kv P"]) -> TopKStore:
    """Writes later tokens into slots; those without a slot (S) are dropped."""

    def put(slots: Float[Array, "B H S *D"], new: Float[Array, "B H P *D"]) -> Float[Array, "B H S *D"]:
        return per_head(_put)(slots, target, new)

    log_weights = store.log_weights
    if log_weights is not None:
        log_weights = put(log_weights, jnp.zeros(target.shape))
    return dataclasses.replace(
        store,
        keys=write_entries(store.keys, new.keys, put, valid=new.present[:, None]),
        values=write_entries(store.values, new.values, put),
        received=store.received + new.count,
        log_weights=log_weights,
    )


def _put(slots: Float[Array, "S *D"], target: Int[Array, "P"], new: Float[Array, "P *D"]) -> Float[Array, "S *D"]:
    return slots.at[target].set(new.astype(slots.dtype), mode="drop")


def store_segment(store: TopKStore) -> Segment:
    """Returns the store as attention reads it."""
    # Without empty slots at the end, the bound needs no minimum, which would be a kernel launch per decode step.
    stop = store.received if store.slots == store.keys.shape[2] else jnp.minimum(store.received, store.slots)
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
