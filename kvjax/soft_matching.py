"""Chunked soft matching: similar neighbours in the text become one weighted entry (Chelsea, section 5.2).

Entries stand in the order of the text. Within each chunk those at even places (A) look for the most similar entry at
odd places (B) by cosine; over all chunks the most similar pairs merge, weighted by their degrees (how many tokens an
entry stands for). Alternation is optimal where similarity falls with distance (Chelsea, Theorem 6.1).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.first_least import first_least
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
) -> tuple[Float[Array, "A"], Int[Array, "A"]]:
    """For every A entry its cosine with the most similar B entry of its chunk, -inf where either is missing, and that
    one's place among the chunk's B entries (of equal ones the first). A = ceil(S / chunk) chunk / 2."""
    slots, pairs = keys.shape[0], chunk // 2
    padding = -slots % chunk
    keys = jnp.pad(keys.astype(jnp.float32), ((0, padding), (0, 0)))
    # A key of norm zero is like no other: its cosine is taken as zero.
    unit = keys * jax.lax.rsqrt(jnp.maximum(jnp.sum(keys * keys, axis=1, keepdims=True), 1e-30))
    unit = unit.reshape(-1, pairs, 2, keys.shape[1])
    place = jnp.arange(slots + padding).reshape(-1, pairs, 2)
    cosine = jnp.einsum("nad,nbd->nab", unit[:, :, 0], unit[:, :, 1], precision=jax.lax.Precision.HIGHEST)
    there = (place[:, :, None, 0] < count) & (place[:, None, :, 1] < count)
    cosine = jnp.where(there, cosine, -jnp.inf)
    least, partner = first_least(-cosine)
    return -least.reshape(-1), partner.reshape(-1)


def merge_most_similar(entries: Centroids, edges: Int[Array, ""] | int, chunk: int, most: int) -> Centroids:
    """Merges the `edges` A entries that are most similar to their partners into them (no more than `most`, which is
    static); degrees add, keys and values become means weighted by degree. Of equally similar ones the earlier go
    first."""
    slots = entries.degree.shape[0]
    similarity, partner = best_partners(entries.keys, entries.count, chunk)
    similarity, number = jax.lax.top_k(similarity, min(most, similarity.shape[0]))
    joins = (jnp.arange(number.shape[0]) < edges) & ~jnp.isneginf(similarity)
    start = number // (chunk // 2) * chunk
    joined = jnp.where(joins, start + 2 * (number % (chunk // 2)), slots)
    home = jnp.where(joins, start + 2 * partner[number] + 1, slots)

    degree = entries.degree.at[home].add(entries.degree[jnp.minimum(joined, slots - 1)], mode="drop")
    share = entries.degree / jnp.maximum(degree, 1)

    def mean(x: Float[Array, "S F"]) -> Float[Array, "S F"]:
        moving = jnp.minimum(joined, slots - 1)
        weight = entries.degree[moving] / jnp.maximum(degree[jnp.minimum(home, slots - 1)], 1)
        x = x.astype(jnp.float32)
        return (x * share[:, None]).at[home].add(weight[:, None] * x[moving], mode="drop")

    stays = (jnp.arange(slots) < entries.count).at[joined].set(False, mode="drop")
    order = jnp.nonzero(stays, size=slots, fill_value=0)[0]
    count = jnp.sum(stays, dtype=jnp.int32)
    return Centroids(
        keys=mean(entries.keys)[order].astype(entries.keys.dtype),
        values=mean(entries.values)[order].astype(entries.values.dtype),
        degree=jnp.where(jnp.arange(slots) < count, degree[order], 0),
        count=count,
    )


def compress(entries: Centroids, budget: int, chunk: int, schedule: Schedule) -> Centroids:
    """Merges step by step, as the schedule allows, until exactly `budget` entries are left (or as many as there were).

    A step merges floor(share x entries), at least one and no more than are too many; so the last one ends at the
    budget.

    Returns:
        Entries in min(S, budget) slots.
    """

    def step(carry):
        number, entries = carry
        # Shares are meant as decimals: 0.3 of 10 entries are 3, whatever float32 makes of 0.3.
        allowed = jnp.maximum(jnp.floor(schedule.share(number) * entries.count + 1e-3), 1).astype(jnp.int32)
        most = int(max(schedule.first, schedule.floor) * entries.degree.shape[0]) + 1
        return number + 1, merge_most_similar(entries, jnp.minimum(allowed, entries.count - budget), chunk, most)

    carry = (jnp.int32(0), entries)
    # What a step costs follows the slots, not the entries in them: so slots go as entries do.
    while (slots := carry[1].degree.shape[0]) > budget:
        fewer = max(budget, int(_STAGE * slots))
        number, entries = jax.lax.while_loop(functools.partial(_more_than, fewer), step, carry)
        carry = number, jax.tree.map(lambda x: x[:fewer] if x.ndim else x, entries)  # noqa: B023
    return carry[1]


def _more_than(budget: int, carry: tuple[Int[Array, ""], Centroids]) -> Bool[Array, ""]:
    return carry[1].count > budget


_STAGE = 0.7
