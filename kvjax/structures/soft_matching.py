"""Chunked soft matching: similar neighbors in the text are merged into one weighted entry (Chelsea).

Entries are in the order of the text. Within each chunk, every entry at an even index looks for the most similar entry
at an odd index, by cosine similarity. Over all chunks, the most similar pairs are merged, weighted by their degrees
(numbers of tokens). Alternation is optimal if similarity falls with distance (Chelsea, Theorem 6.1).

Reference:
    Chelsea, section 5.2.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.state import state
from pallas_kernels.soft_match import soft_match

# Steps that leave more than this share of the slots run in one loop, and half of it once few of the first slots are
# left. A larger share wastes less work on empty slots and takes longer to compile.
_LOOP_SHARE, _FEW_SLOTS = 0.7, 1 / 8
_CUMSUM_BLOCK = 1024


@state
class Centroids:
    """One head's entries in the order of the text, in slots [0, count) of S."""

    keys: Float[Array, "S D"]  # mean keys, float32 or the cache's dtype
    values: Float[Array, "S D_v"]  # mean values
    degree: Int[Array, "S"]  # int32 tokens, 0 in empty slots
    count: Int[Array, ""]  # int32


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The share of entries that step i of a compression may merge: max(floor, first - decay min(i, steps)).

    Shares are rounded to a thousandth. The paper keeps shares above 0 by hand, because the schedule for Qwen falls
    to 0; the floor of 0.05 is kvjax's choice.

    Attributes:
        first: share of the first step (r_init).
        decay: decrease per step (alpha).
        steps: number of steps after which the share no longer decreases (m).
        floor: smallest share.

    Reference:
        Chelsea, appendix C.
    """

    first: float = 0.35
    decay: float = 0.1
    steps: int = 2
    floor: float = 0.05

    def __post_init__(self) -> None:
        """Checks the shares."""
        if not 0.001 <= self.first <= 0.5 or not 0.001 <= self.floor <= 0.5:
            raise ValueError(f"first={self.first} and floor={self.floor} must be in [0.001, 0.5]")
        if self.decay < 0 or self.steps < 0:
            raise ValueError(f"decay={self.decay} and steps={self.steps} must be at least 0")

    def max_merges(self, step: int, entries: Int[Array, ""] | int) -> Int[Array, ""] | int:
        """Returns the largest number of entries that a step may merge, at least one.

        Args:
            step: number of the step, from 0.
            entries: number of entries before the step.

        Returns:
            floor(share x entries), in integer arithmetic, so that slots can be planned ahead.
        """
        share = max(self.floor, self.first - self.decay * min(step, self.steps))
        merges = entries * round(1000 * share) // 1000
        return max(merges, 1) if isinstance(merges, int) else jnp.maximum(merges, 1)

    def lengths(self, entries: int, budget: int) -> list[int]:
        """Returns the number of entries after every step of a compression.

        Args:
            entries: number of entries before.
            budget: number of entries at the end.

        Returns:
            One number per step; the last one is the budget.
        """
        lengths = [entries]
        while lengths[-1] > budget:
            lengths.append(max(budget, lengths[-1] - int(self.max_merges(len(lengths) - 1, lengths[-1]))))
        return lengths[1:]


SCHEDULES = {"llama-2": Schedule(0.45, 0.05, 3), "llama-3": Schedule(0.35, 0.1, 2), "qwen": Schedule(0.2, 0.1, 2)}


def merge_most_similar(
    entries: Centroids,
    merges: Int[Array, ""] | int,
    chunk: int,
    max_merges: int,
    *,
    slots: int | None = None,
) -> Centroids:
    """Merges the entries at even indices that are most similar to their partners into these partners.

    Ties go to the earlier entry. Degrees add; keys and values become means weighted by degree.

    Args:
        entries: the entries.
        merges: number of entries to merge.
        chunk: entries among which an entry looks for a partner; even.
        max_merges: upper bound of `merges`.
        slots: slots of the result, at least the number of entries that remain; None for the slots of `entries`.

    Returns:
        The entries that remain.
    """
    old_slots = entries.degree.shape[0]
    slots = old_slots if slots is None else slots
    similarity, partner = soft_match(entries.keys, entries.count, chunk)
    candidates = similarity.shape[0]
    is_merged = _largest(similarity, merges) & ~jnp.isneginf(similarity)
    max_merges = min(max_merges, candidates)
    pair = jnp.arange(candidates, dtype=jnp.int32)
    place = jnp.where(is_merged, _places_by_target(is_merged, partner, chunk // 2), max_merges)
    number = jnp.full(max_merges, candidates, jnp.int32).at[place].set(pair, mode="drop")
    merge, number = number < candidates, jnp.minimum(number, candidates - 1)
    target_pair = number // (chunk // 2) * (chunk // 2) + partner[number]
    source = jnp.minimum(2 * number, old_slots - 1)
    # Entries at even and at odd indices are listed separately, because TPUs take long to compile their interleaving.
    even_remains, odd_remains = (2 * pair < entries.count) & ~is_merged, 2 * pair + 1 < entries.count
    sums = _cumsum(even_remains.astype(jnp.int32) + odd_remains)
    even_place = jnp.where(even_remains, sums - odd_remains - 1, slots)
    odd_place = jnp.where(odd_remains, sums - 1, slots)
    new_place, old_index = jnp.concatenate([even_place, odd_place]), jnp.concatenate([2 * pair, 2 * pair + 1])
    order = jnp.zeros(slots, jnp.int32).at[new_place].set(old_index, mode="drop")
    target = jnp.where(merge, odd_place[target_pair], slots)

    def add(x: Shaped[Array, "S_out *F"], merged: Shaped[Array, "M *F"]) -> Shaped[Array, "S_out *F"]:
        """Adds merged entries to their targets. Without the hint, TPUs sort them, which takes long to compile."""
        return x.at[target].add(merged, mode="drop", indices_are_sorted=True)

    count = sums[-1]
    old_degree = jnp.where(jnp.arange(slots) < count, entries.degree[order], 0)
    merged_degree = entries.degree[source]
    degree = add(old_degree, merged_degree)
    old_share = old_degree / jnp.maximum(degree, 1)
    merged_share = merged_degree / jnp.maximum(degree[jnp.minimum(target, slots - 1)], 1)

    def mean(x: Float[Array, "S F"]) -> Float[Array, "S_out F"]:
        """Returns `x` of the remaining entries, as means weighted by degree."""
        old, merged = (part.astype(jnp.float32) for part in (x[order], x[source]))
        return add(old * old_share[:, None], merged_share[:, None] * merged).astype(x.dtype)

    return Centroids(
        keys=mean(entries.keys),
        values=mean(entries.values),
        degree=degree,
        count=count,
    )


def _largest(x: Float[Array, "N"], count: Int[Array, ""] | int) -> Bool[Array, "N"]:
    """Marks the largest values; ties go to the earlier value.

    Bisection finds the smallest of them: a sort takes longer, also to compile for a TPU.

    Args:
        x: float32 values.
        count: number of values to mark.

    Returns:
        Whether each value is one of the `count` largest.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # without the sign of -0
    # Unsigned integers in the order of the values.
    rank = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    def bisect(num_bits: int, is_enough: Callable[[Int[Array, ""]], Bool[Array, ""]]) -> Int[Array, ""]:
        """Returns the largest number for which `is_enough`, which is true up to it."""

        def set_bit(step: Int[Array, ""], number: Int[Array, ""]) -> Int[Array, ""]:
            larger = number | jnp.uint32(1) << (num_bits - 1 - step).astype(jnp.uint32)
            return jnp.where(is_enough(larger), larger, number)

        return jax.lax.fori_loop(0, num_bits, set_bit, jnp.uint32(0))

    smallest = bisect(32, lambda number: jnp.sum(rank >= number) >= count)
    index, is_tie = jnp.arange(len(x), dtype=jnp.uint32), rank == smallest
    num_ties = count - jnp.sum(rank > smallest)
    end = bisect(32, lambda number: jnp.sum(is_tie & (index < number)) <= num_ties)
    return (rank > smallest) | (is_tie & (index < end))


def _cumsum(x: Int[Array, "N"]) -> Int[Array, "N"]:
    """Returns the cumulative sums: in blocks, which TPUs compile in seconds, not in minutes."""
    blocks = jnp.pad(x, (0, -len(x) % _CUMSUM_BLOCK)).reshape(-1, _CUMSUM_BLOCK)
    sums = jnp.cumsum(blocks, axis=1, dtype=jnp.int32)
    before = jnp.cumsum(sums[:, -1]) - sums[:, -1]
    return (sums + before[:, None]).reshape(-1)[: len(x)]


def _places_by_target(is_merged: Bool[Array, "A"], partner: Int[Array, "A"], pairs: int) -> Int[Array, "A"]:
    """Returns the place of every merged entry in the order of the entries that they are merged into.

    Args:
        is_merged: which entries at even indices are merged.
        partner: the index of the entry that each one is merged into, among those at odd indices of its chunk.
        pairs: entries at even indices per chunk.
    """
    mask, partner = is_merged.reshape(-1, pairs), partner.reshape(-1, pairs)
    key = jnp.where(mask, partner * pairs + jnp.arange(pairs, dtype=jnp.int32), pairs * pairs)
    rank = jnp.sum(key[:, None] < key[:, :, None], axis=2, dtype=jnp.int32)
    merged = jnp.sum(mask, axis=1, dtype=jnp.int32)
    return ((jnp.cumsum(merged) - merged)[:, None] + rank).reshape(-1)


def compress(entries: Centroids, budget: int, chunk: int, schedule: Schedule) -> Centroids:
    """Merges entries step by step until exactly `budget` entries are left, or as many as there were.

    The cost of a step depends on the slots, not on the entries in them. Slots therefore shrink with every step, as
    planned for full slots; fewer entries need no more steps.

    Args:
        entries: the entries.
        budget: number of entries at the end.
        chunk: entries among which an entry looks for a partner; even.
        schedule: share of entries that each step merges.

    Returns:
        Entries in min(S, budget) slots.
    """

    def step(entries: Centroids, number: int, slots: int) -> Centroids:
        """Runs the step with this `number` of the schedule and returns the entries in `slots` slots."""
        max_merges = int(schedule.max_merges(number, entries.degree.shape[0]))
        excess = jnp.maximum(entries.count - budget, 0)
        merges = jnp.minimum(schedule.max_merges(number, entries.count), excess)
        return merge_most_similar(entries, merges, chunk, max_merges, slots=slots)

    def step_in_place(slots: int, _: Int[Array, ""], entries: Centroids) -> Centroids:
        return step(entries, schedule.steps, slots)

    first_slots = entries.degree.shape[0]
    lengths = schedule.lengths(first_slots, budget)
    done = 0
    while done < len(lengths):
        slots = entries.degree.shape[0]
        # Once the share is constant, small steps are one loop over the same slots.
        share = _LOOP_SHARE if slots > _FEW_SLOTS * first_slots else _LOOP_SHARE / 2
        small = [length for length in lengths[done:] if length > share * slots]
        if done >= schedule.steps and len(small) > 1:
            entries = jax.lax.fori_loop(0, len(small), functools.partial(step_in_place, slots), entries)
            first = slice(small[-1])
            entries = Centroids(entries.keys[first], entries.values[first], entries.degree[first], entries.count)
            done += len(small)
        else:
            entries = step(entries, done, lengths[done])
            done += 1
    return entries


def single_token_entries(
    keys: Float[Array, "B H_kv T D"], values: Float[Array, "B H_kv T D_v"], count: Int[Array, "B"]
) -> Centroids:
    """Returns tokens as entries of degree one, float32.

    Args:
        keys: keys of the tokens.
        values: values of the tokens.
        count: number of tokens per row; the first ones.

    Returns:
        The entries of all rows and heads.
    """
    degree = (jnp.arange(keys.shape[2]) < count[:, None]).astype(jnp.int32)
    return Centroids(
        keys=keys.astype(jnp.float32),
        values=values.astype(jnp.float32),
        degree=jnp.broadcast_to(degree[:, None], keys.shape[:3]),
        count=jnp.broadcast_to(count[:, None], keys.shape[:2]),
    )
