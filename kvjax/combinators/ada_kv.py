"""AdaKV (Feng et al. 2024): one budget for all heads of a layer, given to the tokens of highest score of any head."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.per_head import per_head
from kvjax.policy import Policy
from kvjax.segment import Segment
from kvjax.selection import Ranked, Selection, init_ranked, places
from kvjax.state import state


@state
class Shared:
    """The slots of all heads as one row of slots, head behind head: a head's are [start, start + ranked + empty)."""

    pool: Ranked
    start: Int[Array, "B H_kv"]  # int32
    ranked: Int[Array, "B H_kv"]  # int32, tokens of the prompt that the head kept
    empty: Int[Array, "B H_kv"]  # int32, slots that it had left for later ones


@dataclasses.dataclass(frozen=True)
class AdaKV(Policy[Shared]):
    """A selection whose heads get slots by need: of all tokens of all heads of a layer, those of highest score stay, in
    a buffer that is no larger than that of equal heads.

    Where devices share the heads of a layer, the heads of a device share what is theirs. Attention reads each head's
    own slots; XLA multiplies those of the other heads too, and drops them.

    Attributes:
        policy: the selection.
        floor: share of its budget that every head keeps of its own best tokens (the paper's safeguard alpha), and in
            any case the sinks and a compaction's tokens.

    Source: Ada-KV, section 3.3 (https://arxiv.org/abs/2407.11550); kvpress's AdaKVPress.
    """

    policy: Selection
    floor: float = 0.2

    streams = False
    pools_heads = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor={self.floor}; it must lie in [0, 1]")

    compact_every = property(lambda self: self.policy.compact_every)
    prompt_queries = property(lambda self: self.policy.prompt_queries)
    repeat = property(lambda self: self.policy.repeat)

    def at(self, spec) -> "AdaKV":
        return dataclasses.replace(self, policy=cast(Selection, self.policy.at(spec)))

    def init(self, spec, row_keys) -> Shared:
        slots = self.policy.slots(spec)
        none = jnp.zeros((spec.batch, spec.kv_heads), jnp.int32)
        start = none + slots * jnp.arange(spec.kv_heads, dtype=jnp.int32)
        return Shared(init_ranked(spec, slots), start, none, none + slots)

    def prefill(self, state: Shared, prompt) -> Shared:
        rank = self.policy.rank(prompt)
        heads, tokens = rank.shape[1:]
        best = min(int(self.floor * self.policy.budget), tokens)
        if not self.policy.beside:
            best = min(max(best, self.policy.sinks + self.policy.compact_every), tokens)
        if best:
            top, index = jax.lax.top_k(rank, best)
            above = _SAFE * (2 - jnp.arange(best) / best)  # in the same order
            safe = jnp.where(jnp.isneginf(top), top, jnp.maximum(top, above))
            rank = per_head(lambda rank, index, safe: rank.at[index].set(safe))(rank, index, safe)
        keep = heads * min(self.policy.budget, tokens)
        of_row = lambda pool, rank, *fresh: _share(pool, rank, keep, *fresh)  # noqa: E731
        buffers = (state.pool.keys, state.pool.values)
        buffers, start, ranked, empty = jax.vmap(of_row)(buffers, rank, prompt.keys, prompt.values)
        pool = dataclasses.replace(state.pool, keys=buffers[0], values=buffers[1], ranked=prompt.lengths)
        return Shared(pool, start, ranked, empty)

    def read(self, state: Shared, newer):
        flat = lambda x: x.reshape(x.shape[0], 1, -1, x.shape[3])  # noqa: E731
        keys, values = flat(state.pool.keys), flat(state.pool.values)
        occupied = state.ranked + jnp.minimum(state.pool.later[:, None], state.empty)
        stop = state.start + occupied
        one = lambda bound, head: bound[:, head : head + 1]  # noqa: E731
        return tuple(
            Segment(keys, values, start=one(state.start, head), stop=one(stop, head), heads=(head, head + 1))
            for head in range(state.start.shape[1])
        )

    def compact(self, state: Shared, new) -> Shared:
        number = state.pool.later[:, None] + jnp.arange(new.keys.shape[2])
        place = places(number[:, None], state.ranked, state.empty, self.policy.sinks)
        total = state.pool.keys.shape[1] * state.pool.keys.shape[2]
        place = jnp.where(new.present[:, None], state.start[..., None] + place, total)
        put = lambda pool, new: jax.vmap(_put)(pool, place, new)  # noqa: E731
        pool = dataclasses.replace(
            state.pool,
            keys=put(state.pool.keys, new.keys),
            values=put(state.pool.values, new.values),
            later=state.pool.later + new.count,
        )
        return dataclasses.replace(state, pool=pool)


_SAFE = 1e25  # above any score, below what is kept for its place


def _put(pool: Float[Array, "H S D"], place: Int[Array, "H P"], new: Float[Array, "H P D"]) -> Float[Array, "H S D"]:
    """Writes tokens into the slots of all heads by their number."""
    flat, new = pool.reshape(-1, pool.shape[2]), new.reshape(-1, new.shape[-1])
    return flat.at[place.reshape(-1)].set(new.astype(pool.dtype), mode="drop").reshape(pool.shape)


def _share(
    pools: Any, rank: Float[Array, "H T"], keep: int, keys: Float[Array, "H T D"], values: Float[Array, "H T D_v"]
) -> tuple[Any, Int[Array, "H"], Int[Array, "H"], Int[Array, "H"]]:
    """One row's pools with its `keep` best tokens, and of every head the first slot, ranked and empty slots."""
    heads, tokens = rank.shape
    slots = heads * pools[0].shape[1]
    top, index = jax.lax.top_k(rank.reshape(-1), keep)
    head, token, valid = index // tokens, index % tokens, ~jnp.isneginf(top)
    chosen = (head[:, None] == jnp.arange(heads)) & valid[:, None]
    ranked = jnp.sum(chosen, axis=0, dtype=jnp.int32)
    # Equal shares of what is left, the first heads one more.
    left = slots - jnp.sum(ranked)
    empty = left // heads + (jnp.arange(heads) < left % heads)
    start = jnp.cumsum(ranked + empty) - ranked - empty
    place = start[head] + jnp.cumsum(chosen, axis=0)[jnp.arange(keep), head] - 1
    place = jnp.where(valid, place, slots)
    put = lambda pool, x: _put(pool, place, x[head, token])  # noqa: E731
    return (put(pools[0], keys), put(pools[1], values)), start, ranked, empty
