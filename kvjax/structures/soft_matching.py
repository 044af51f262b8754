"""Chunked soft matching: similar neighbours in the text become one weighted entry (Chelsea, section 5.2).

Entries stand in the order of the text. Within each chunk those at even places (A) look for the most similar entry at
odd places (B) by cosine; over all chunks the most similar pairs merge, weighted by their degrees (how many tokens an
entry stands for). Alternation is optimal where similarity falls with distance (Chelsea, Theorem 6.1).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.state import state
from pallas_kernels.soft_match import soft_match


@state
class Centroids:
    """One head's entries in the order of the text, in the slots [0, count) of S."""

    keys: Float[Array, "S D"]  # float32 or the cache's dtype: means over tokens
    values: Float[Array, "S D_v"]
    degree: Int[Array, "S"]  # int32 tokens, 0 in empty slots
    count: Int[Array, ""]  # int32


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The share of entries that step i of a compression may merge: max(floor, first - decay min(i, steps)), i from 0,
    to a thousandth.

    Source: Chelsea, appendix C (its values for Llama-2, Llama-3 and Qwen); the floor is ours, since Qwen's falls to 0.
    """

    first: float = 0.35
    decay: float = 0.1
    steps: int = 2
    floor: float = 0.05

    def __post_init__(self) -> None:
        if not 0.001 <= self.first <= 0.5 or not 0.001 <= self.floor <= 0.5:
            raise ValueError(f"first={self.first}, floor={self.floor}; a step merges a share in [0.001, 0.5]")
        if self.decay < 0 or self.steps < 0:
            raise ValueError(f"decay={self.decay}, steps={self.steps}; they must not be negative")

    def edges(self, step: int, entries: Int[Array, ""] | int) -> Int[Array, ""] | int:
        """The most of so many entries that a step may merge: floor(share x entries), at least one. Computed in whole
        numbers, since the slots of a compression are planned ahead by it."""
        share = max(self.floor, self.first - self.decay * min(step, self.steps))
        allowed = entries * round(1000 * share) // 1000
        return max(allowed, 1) if isinstance(allowed, int) else jnp.maximum(allowed, 1)

    def lengths(self, entries: int, budget: int) -> list[int]:
        """How many of so many entries are left after every step of a compression to the budget; the last step ends
        there."""
        left = [entries]
        while left[-1] > budget:
            left.append(max(budget, left[-1] - int(self.edges(len(left) - 1, left[-1]))))
        return left[1:]


SCHEDULES = {
    "llama-2": Schedule(0.45, 0.05, 3),
    "llama-3": Schedule(0.35, 0.1, 2),
    "qwen": Schedule(0.2, 0.1, 2),
}


def merge_most_similar(
    entries: Centroids,
    edges: Int[Array, ""] | int,
    chunk: int,
    most: int,
    *,
    slots: int | None = None,
    drop: bool = False,
) -> Centroids:
    """Joins the `edges` A entries that are most similar to their partners to these. Of equally similar ones the earlier
    go first. Degrees add; keys and values become means weighted by degree.

    Args:
        most: the largest that `edges` can be, static.
        slots: of the result, those of the entries by default; as many as there can be entries left.
        drop: keys and values of what joins are dropped, instead of averaged: the partner's stand for both.
    """
    before = entries.degree.shape[0]
    slots = before if slots is None else slots
    similarity, partner = soft_match(entries.keys, entries.count, chunk)
    similarity, number = jax.lax.top_k(similarity, min(most, similarity.shape[0]))
    joins = (jnp.arange(number.shape[0]) < edges) & ~jnp.isneginf(similarity)
    start = number // (chunk // 2) * chunk
    joined = jnp.where(joins, start + 2 * (number % (chunk // 2)), before)
    home = jnp.where(joins, start + 2 * partner[number] + 1, before)

    moving, at_home = jnp.minimum(joined, before - 1), jnp.minimum(home, before - 1)
    degree = entries.degree.at[home].add(entries.degree[moving], mode="drop")
    stays = (jnp.arange(before) < entries.count).at[joined].set(False, mode="drop")
    order = jnp.nonzero(stays, size=slots, fill_value=0)[0]
    count = jnp.sum(stays, dtype=jnp.int32)
    share = (entries.degree / jnp.maximum(degree, 1))[order]
    weight = entries.degree[moving] / jnp.maximum(degree[at_home], 1)
    new_home = jnp.where(joins, (jnp.cumsum(stays) - 1)[at_home], slots)

    def mean(x: Float[Array, "S F"]) -> Float[Array, "S_out F"]:
        if drop:
            return x[order]
        staying, moved = (part.astype(jnp.float32) for part in (x[order], x[moving]))
        sums = (staying * share[:, None]).at[new_home].add(weight[:, None] * moved, mode="drop")
        return sums.astype(x.dtype)

    return Centroids(
        keys=mean(entries.keys),
        values=mean(entries.values),
        degree=jnp.where(jnp.arange(slots) < count, degree[order], 0),
        count=count,
    )


def compress(entries: Centroids, budget: int, chunk: int, schedule: Schedule, *, drop: bool = False) -> Centroids:
    """Merges step by step, as the schedule allows, until exactly `budget` entries are left (or as many as there were).

    A step merges floor(share x entries), at least one and no more than are too many; so the last one ends at the
    budget. What a step costs follows the slots, not the entries in them: so slots go as entries do. How many go at
    each step is known before, since fewer entries in the same slots need no more steps.

    Returns:
        Entries in min(S, budget) slots.
    """

    def step(entries: Centroids, number: int, slots: int) -> Centroids:
        most = int(schedule.edges(number, entries.degree.shape[0]))
        edges = jnp.minimum(schedule.edges(number, entries.count), jnp.maximum(entries.count - budget, 0))
        return merge_most_similar(entries, edges, chunk, most, slots=slots, drop=drop)

    lengths = schedule.lengths(entries.degree.shape[0], budget)
    done = 0
    while done < len(lengths):
        before = entries.degree.shape[0]
        # Once the share has come to rest, small steps are one loop over slots that go together.
        together = [length for length in lengths[done:] if length > _STAGE * before]
        if done >= schedule.steps and len(together) > 1:
            same = lambda _, entries: step(entries, schedule.steps, before)  # noqa: B023, E731
            entries = jax.lax.fori_loop(0, len(together), same, entries)
            entries = jax.tree.map(lambda x: x[: together[-1]] if x.ndim else x, entries)  # noqa: B023
            done += len(together)
        else:
            entries = step(entries, done, lengths[done])
            done += 1
    return entries


# A larger share is less work on empty slots, and more to compile.
_STAGE = 0.7


def fresh_entries(
    keys: Float[Array, "B H_kv T D"], values: Float[Array, "B H_kv T D_v"], count: Int[Array, "B"]
) -> Centroids:
    """The first `count` tokens of every row as float32 entries of degree one."""
    degree = (jnp.arange(keys.shape[2]) < count[:, None]).astype(jnp.int32)
    return Centroids(
        keys=keys.astype(jnp.float32),
        values=values.astype(jnp.float32),
        degree=jnp.broadcast_to(degree[:, None], keys.shape[:3]),
        count=jnp.broadcast_to(count[:, None], keys.shape[:2]),
    )
