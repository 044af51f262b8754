"""Chunked soft matching: similar neighbors in the text are merged into one weighted entry (Chelsea).

Entries are in the order of the text. One step of `compress`, for one head:

    for every chunk of c entries:
        a, b = entries at even indices, entries at odd indices
        partner[i], similarity[i] = the entry of b with the key most similar to a[i] (cosine)
    the r pairs with the largest similarity of all chunks are merged:
        degree[b] += degree[a];  key[b], value[b] = means weighted by degree;  a is removed

Steps repeat until the budget is reached; `Schedule` says which share of the entries each step merges. Alternation is
optimal if similarity falls with distance (Chelsea, Theorem 6.1).

The code differs in what TPUs would take minutes to compile. Chunks are processed in tiles of slots, all steps are one
loop, cumulative sums are computed in blocks (`_cumsum`), the r-th largest similarity is found by bisection instead of a
sort (`_largest`), and merged entries are added in the order of their targets (`_places_by_target`).

Reference:
    Chelsea, section 5.2.
"""

import dataclasses
import functools
import itertools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.state import state
from pallas_kernels.bisection import bisect, float_ranks
from pallas_kernels.soft_match import Partners, soft_match

# Slots are processed in at most `_TILES` tiles of at least `_MIN_TILE` slots. Smaller tiles compile faster and waste
# less work on empty slots.
_TILES, _MIN_TILE = 16, 512
_CUMSUM_BLOCK = 1024

T = TypeVar("T")


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

    def share(self, step: int) -> int:
        """Returns the share of entries that a step may merge, in thousandths.

        Integers let the number of entries after every step be planned ahead.
        """
        return round(1000 * max(self.floor, self.first - self.decay * min(step, self.steps)))

    def lengths(self, entries: int, budget: int) -> list[int]:
        """Returns the number of entries before and after every step of a compression.

        Args:
            entries: number of entries before.
            budget: number of entries at the end.

        Returns:
            `entries`, then one number per step; the last one is at most the budget.
        """
        lengths = [entries]
        while lengths[-1] > budget:
            merges = max(lengths[-1] * self.share(len(lengths) - 1) // 1000, 1)
            lengths.append(max(budget, lengths[-1] - merges))
        return lengths


SCHEDULES = {"llama-2": Schedule(0.45, 0.05, 3), "llama-3": Schedule(0.35, 0.1, 2), "qwen": Schedule(0.2, 0.1, 2)}


def merge_most_similar(
    entries: Centroids,
    merges: Int[Array, ""] | int,
    chunk: int,
    max_merges: int,
    tile: int,
    num_tiles: Int[Array, ""] | int,
) -> Centroids:
    """Merges the entries at even indices that are most similar to their partners into these partners.

    Ties go to the earlier entry. Degrees add; keys and values become means weighted by degree.

    Args:
        merges: number of entries to merge.
        chunk: entries among which an entry looks for a partner; even.
        tile: slots that are processed at once: a multiple of `chunk` that divides the number of slots.
        num_tiles: number of tiles that may have entries.

    Returns:
        The entries that remain, in the same number of slots. Keys and values of empty slots are undefined.
    """
    slots = entries.degree.shape[0]

    def match(number: Int[Array, ""], partners: Partners) -> Partners:
        """Writes the partners of one tile."""
        keys = _read(entries.keys, number * tile, tile)
        tile_partners = soft_match(keys, entries.count - number * tile, chunk)
        return _write(partners, tile_partners, number * (tile // 2))

    partners = Partners(jnp.full(slots // 2, -jnp.inf), jnp.zeros(slots // 2, jnp.int32))
    similarity, partner = jax.lax.fori_loop(0, num_tiles, match, partners)
    is_merged = _largest(similarity, merges) & ~jnp.isneginf(similarity)

    def merge(number: Int[Array, ""], remaining: Centroids) -> Centroids:
        """Appends the remaining entries of one tile; entries of later tiles are not overwritten."""
        arrays = remaining.keys, remaining.values, remaining.degree
        is_merged_here, partner_here = _read((is_merged, partner), number * (tile // 2), tile // 2)
        old = Centroids(*_read(arrays, number * tile, tile), jnp.clip(entries.count - number * tile, 0, tile))
        new = _merge_tile(old, is_merged_here, partner_here, chunk // 2, min(max_merges, tile // 2))
        written = _write(arrays, (new.keys, new.values, new.degree), remaining.count)
        return Centroids(*written, remaining.count + new.count)

    remaining = dataclasses.replace(entries, count=jnp.zeros_like(entries.count))
    remaining = jax.lax.fori_loop(0, num_tiles, merge, remaining)
    return dataclasses.replace(remaining, degree=jnp.where(jnp.arange(slots) < remaining.count, remaining.degree, 0))


def _read(arrays: T, start: Int[Array, ""], size: int) -> T:
    """Returns slots [start, start + size) of all arrays."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), arrays)


def _write(arrays: T, parts: T, start: Int[Array, ""]) -> T:
    """Returns the arrays with `parts` in the slots from `start` on."""
    return jax.tree.map(lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, start, 0), arrays, parts)


def _merge_tile(
    entries: Centroids, is_merged: Bool[Array, "A"], partner: Int[Array, "A"], pairs: int, max_merges: int
) -> Centroids:
    """Merges entries into their partners.

    Args:
        is_merged: which entries at even indices are merged.
        partner: the index of the entry that each one is merged into, among those at odd indices of its chunk.
        pairs: entries at even indices per chunk.
        max_merges: upper bound of the number of entries that are merged.

    Returns:
        The entries that remain, in the same number of slots.
    """
    slots, candidates = entries.degree.shape[0], is_merged.shape[0]
    pair = jnp.arange(candidates, dtype=jnp.int32)
    place = jnp.where(is_merged, _places_by_target(is_merged, partner, pairs), max_merges)
    number = jnp.full(max_merges, candidates, jnp.int32).at[place].set(pair, mode="drop")
    merge, number = number < candidates, jnp.minimum(number, candidates - 1)
    target_pair = number // pairs * pairs + partner[number]
    source = 2 * number
    # Even and odd indices are listed one after the other; interleaving them would take long to compile.
    even_remains, odd_remains = (2 * pair < entries.count) & ~is_merged, 2 * pair + 1 < entries.count
    sums = _cumsum(even_remains.astype(jnp.int32) + odd_remains)
    even_place = jnp.where(even_remains, sums - odd_remains - 1, slots)
    odd_place = jnp.where(odd_remains, sums - 1, slots)
    new_place, old_index = jnp.concatenate([even_place, odd_place]), jnp.concatenate([2 * pair, 2 * pair + 1])
    order = jnp.zeros(slots, jnp.int32).at[new_place].set(old_index, mode="drop")
    target = jnp.where(merge, odd_place[target_pair], slots)

    def add(x: Shaped[Array, "S *F"], merged: Shaped[Array, "M *F"]) -> Shaped[Array, "S *F"]:
        """Adds merged entries to their targets. Without the hint, TPUs sort them."""
        return x.at[target].add(merged, mode="drop", indices_are_sorted=True)

    count = sums[-1]
    old_degree = jnp.where(jnp.arange(slots) < count, entries.degree[order], 0)
    merged_degree = entries.degree[source]
    degree = add(old_degree, merged_degree)
    old_share = old_degree / jnp.maximum(degree, 1)
    merged_share = merged_degree / jnp.maximum(degree[jnp.minimum(target, slots - 1)], 1)

    def mean(x: Float[Array, "S F"]) -> Float[Array, "S F"]:
        """Returns `x` of the remaining entries, as means weighted by degree."""
        old, merged = (part.astype(jnp.float32) for part in (x[order], x[source]))
        return add(old * old_share[:, None], merged_share[:, None] * merged).astype(x.dtype)

    return Centroids(mean(entries.keys), mean(entries.values), degree, count)


def _largest(x: Float[Array, "N"], count: Int[Array, ""] | int) -> Bool[Array, "N"]:
    """Marks the `count` largest float32 values; ties go to the earlier value."""
    rank = float_ranks(x)
    smallest = bisect(lambda number: jnp.sum(rank >= number) >= count)
    is_larger, is_tie = rank > smallest, rank == smallest
    return is_larger | (is_tie & (_cumsum(is_tie.astype(jnp.int32)) <= count - jnp.sum(is_larger)))


def _cumsum(x: Int[Array, "N"]) -> Int[Array, "N"]:
    """Returns the cumulative sums."""
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


def tile_slots(slots: int, chunk: int) -> int:
    """Returns how many slots `compress` processes at once: a multiple of the chunk."""
    return chunk * max(1, -(-min(slots, max(-(-slots // _TILES), _MIN_TILE)) // chunk))


def compress(
    entries: Centroids, budget: int, chunk: int, schedule: Schedule, *, max_count: int | None = None
) -> Centroids:
    """Merges entries step by step until exactly `budget` entries are left, or as many as there were.

    A step processes the tiles that have entries if all slots are full at first; fewer entries need no more steps.

    Args:
        entries: the entries. Slots are copied unless their number is a multiple of `tile_slots`.
        budget: number of entries at the end.
        chunk: entries among which an entry looks for a partner; even.
        schedule: share of entries that each step merges.
        max_count: upper bound of the number of entries; None for the number of slots.

    Returns:
        Entries in min(S, budget) slots.
    """
    slots = entries.degree.shape[0]
    if slots <= budget:
        return entries
    lengths = schedule.lengths(slots if max_count is None else max_count, budget)
    tile = tile_slots(slots, chunk)
    keys, values, degree = (
        jnp.pad(x, ((0, -slots % tile), *((0, 0),) * (x.ndim - 1)))
        for x in (entries.keys, entries.values, entries.degree)
    )
    padded = Centroids(keys, values, degree, entries.count)
    shares = jnp.array([schedule.share(step) for step in range(len(lengths) - 1)], jnp.int32)
    max_merges = max((before - after for before, after in itertools.pairwise(lengths)), default=0)

    def run_steps(tile: int, entries: Centroids) -> Centroids:
        """Runs all steps over tiles of `tile` slots."""

        def run_step(entries: Centroids, plan: tuple[Int[Array, ""], Int[Array, ""]]) -> tuple[Centroids, None]:
            num_tiles, share = plan
            merges = jnp.minimum(jnp.maximum(entries.count * share // 1000, 1), jnp.maximum(entries.count - budget, 0))
            return merge_most_similar(entries, merges, chunk, max_merges, tile, num_tiles), None

        num_tiles = jnp.array([-(-length // tile) for length in lengths[:-1]], jnp.int32)
        return jax.lax.scan(run_step, entries, (num_tiles, shares))[0]

    # Tiles limit the time of compiling for TPUs. On GPUs every tile would cost kernel launches.
    entries = jax.lax.platform_dependent(
        padded,
        cuda=functools.partial(run_steps, padded.degree.shape[0]),
        default=functools.partial(run_steps, tile),
    )
    return Centroids(entries.keys[:budget], entries.values[:budget], entries.degree[:budget], entries.count)


def single_token_entries(
    keys: Float[Array, "B H_kv T D"], values: Float[Array, "B H_kv T D_v"], count: Int[Array, "B"]
) -> Centroids:
    """Returns tokens as entries of degree one, float32.

    Args:
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
