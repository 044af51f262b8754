"""Chunked soft matching: similar neighbours in the text become one weighted entry (Chelsea, section 5.2).

Entries stand in the order of the text. Within each chunk those at even places (A) look for the most similar entry at
odd places (B) by cosine; over all chunks the most similar pairs merge, weighted by their degrees (how many tokens an
entry stands for). Alternation is optimal where similarity falls with distance (Chelsea, Theorem 6.1).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.state import HEAD_DIM, SLOTS, array, state


@state
class Centroids:
    """One head's entries in the order of the text, in the slots [0, count) of S."""

    keys: Float[Array, "S D"] = array(SLOTS, HEAD_DIM)  # float32 or the cache's dtype: means over tokens
    values: Float[Array, "S D_v"] = array(SLOTS, "value_dim")
    degree: Int[Array, "S"] = array(SLOTS)  # int32 tokens, 0 in empty slots
    count: Int[Array, ""] = array()  # int32


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The share of entries that step i of a compression may merge: max(floor, first - decay min(i, steps)), i from 0.

    Source: Chelsea, appendix C (its values for Llama-2, Llama-3 and Qwen); the floor is ours, since Qwen's falls to 0.
    """

    first: float = 0.35
    decay: float = 0.1
    steps: int = 2
    floor: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.first <= 0.5 or not 0 < self.floor <= 0.5:
            raise ValueError(f"first={self.first}, floor={self.floor}; a step merges a share in (0, 0.5]")
        if self.decay < 0 or self.steps < 0:
            raise ValueError(f"decay={self.decay}, steps={self.steps}; they must not be negative")

    def share(self, step: Int[Array, ""]) -> Float[Array, ""]:
        return jnp.maximum(self.floor, self.first - self.decay * jnp.minimum(step, self.steps))


def best_partners(
    keys: Float[Array, "S D"], count: Int[Array, ""], chunk: int
) -> tuple[Float[Array, "n a"], Int[Array, "n a"]]:
    """For the A entries of each of n = ceil(S / chunk) chunks (a = chunk / 2 of them): cosine with the most similar B
    entry of the chunk, -inf where either is missing, and that one's place among the chunk's B entries."""
    slots = keys.shape[0]
    pairs = -(-slots // chunk) * chunk // 2
    keys = jnp.pad(keys.astype(jnp.float32), ((0, 2 * pairs - slots), (0, 0)))
    # A key of norm zero is like no other: its cosine is taken as zero.
    unit = keys * jax.lax.rsqrt(jnp.maximum(jnp.sum(keys * keys, axis=1, keepdims=True), 1e-30))
    unit = unit.reshape(-1, chunk // 2, 2, keys.shape[1])
    place = jnp.arange(2 * pairs).reshape(-1, chunk // 2, 2)
    cosine = jnp.einsum("nad,nbd->nab", unit[:, :, 0], unit[:, :, 1], precision=jax.lax.Precision.HIGHEST)
    there = (place[:, :, None, 0] < count) & (place[:, None, :, 1] < count)
    cosine = jnp.where(there, cosine, -jnp.inf)
    return jnp.max(cosine, axis=2), jnp.argmax(cosine, axis=2).astype(jnp.int32)


def merge_most_similar(entries: Centroids, edges: Int[Array, ""], chunk: int) -> Centroids:
    """Merges the `edges` A entries that are most similar to their partners into them; degrees add, keys and values
    become means weighted by degree. Of equally similar ones the earlier go first."""
    slots = entries.degree.shape[0]
    similarity, partner = best_partners(entries.keys, entries.count, chunk)
    flat = similarity.reshape(-1)
    rank = jnp.zeros(flat.shape, jnp.int32).at[jnp.argsort(-flat, stable=True)].set(jnp.arange(flat.shape[0]))
    joins = (rank < edges) & ~jnp.isneginf(flat)

    place = jnp.arange(slots)
    chunk_start, inside = place // chunk * chunk, place % chunk // 2
    index = place // chunk * (chunk // 2) + inside  # of an A entry among all
    joined = joins[index] & (place % 2 == 0)
    home = jnp.where(joined, chunk_start + 2 * partner.reshape(-1)[index] + 1, place)
    degree = jnp.zeros_like(entries.degree).at[home].add(entries.degree)
    weight = entries.degree / jnp.maximum(degree[home], 1)

    def mean(x: Float[Array, "S F"]) -> Float[Array, "S F"]:
        return jnp.zeros(x.shape, jnp.float32).at[home].add(weight[:, None] * x.astype(jnp.float32)).astype(x.dtype)

    stays = (place < entries.count) & ~joined
    order = jnp.nonzero(stays, size=slots, fill_value=0)[0]
    count = jnp.sum(stays, dtype=jnp.int32)
    return Centroids(
        keys=mean(entries.keys)[order],
        values=mean(entries.values)[order],
        degree=jnp.where(place < count, degree[order], 0),
        count=count,
    )


def compress(entries: Centroids, budget: Int[Array, ""] | int, chunk: int, schedule: Schedule) -> Centroids:
    """Merges step by step, as the schedule allows, until exactly `budget` entries are left (or as many as there were).

    A step merges floor(share x entries), at least one and no more than are too many; so the last one ends at the
    budget.
    """

    def step(carry):
        number, entries = carry
        # Shares are meant as decimals: 0.3 of 10 entries are 3, whatever float32 makes of 0.3.
        allowed = jnp.maximum(jnp.floor(schedule.share(number) * entries.count + 1e-3), 1).astype(jnp.int32)
        return number + 1, merge_most_similar(entries, jnp.minimum(allowed, entries.count - budget), chunk)

    return jax.lax.while_loop(lambda carry: carry[1].count > budget, step, (jnp.int32(0), entries))[1]
