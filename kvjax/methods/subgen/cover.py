"""Greedy covers: which cluster centers remain when the radius grows (see `cluster_table`)."""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.argmin import min_and_argmin

T = TypeVar("T")


def squared_distances(
    a: Float[Array, "N D"], b: Float[Array, "K D"], a_norms: Float[Array, "N"], b_norms: Float[Array, "K"]
) -> Float[Array, "N K"]:
    """Computes all squared distances by one matrix product; zero below the resolution of float32.

    Args:
        a: vectors.
        b: vectors.
        a_norms: squared norms of `a`.
        b_norms: squared norms of `b`.

    Returns:
        |a|^2 + |b|^2 - 2 a.b.
    """
    norms = a_norms[:, None] + b_norms[None, :]
    return _zero_unresolved(norms - 2 * _product(a, b), norms)


def nearest_center(
    points: Float[Array, "N D"],
    centers: Float[Array, "K D"],
    point_norms: Float[Array, "N"],
    center_norms: Float[Array, "K"],
    before: Int[Array, "N"] | None = None,
) -> tuple[Float[Array, "N"], Int[Array, "N"]]:
    """Finds the nearest center of every point.

    Args:
        points: vectors.
        centers: vectors.
        point_norms: squared norms of the points.
        center_norms: squared norms of the centers; inf for a center that does not count.
        before: for every point, the end of the centers that count; None for all.

    Returns:
        The squared distance to the nearest center, and its index.
    """
    # Reductions over the leading axis run at the speed of the product.
    relative = center_norms[:, None] - 2 * _product(centers, points)
    if before is not None:
        relative = jnp.where(jnp.arange(centers.shape[0])[:, None] < before, relative, jnp.inf)
    smallest, nearest = min_and_argmin(relative, axis=0)
    return _zero_unresolved(point_norms + smallest, point_norms + center_norms[nearest]), nearest


def _product(a: Float[Array, "N D"], b: Float[Array, "K D"]) -> Float[Array, "N K"]:
    # Accelerators would otherwise round the factors to fewer digits.
    return jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST)


def _zero_unresolved(squared: Float[Array, "..."], norms: Float[Array, "..."]) -> Float[Array, "..."]:
    """Replaces squared distances below the rounding error of their norms by zero."""
    return jnp.where((squared <= 2.0**-20 * norms) & jnp.isfinite(norms), 0.0, squared)


def greedy_cover(near: Bool[Array, "N N"], candidate: Bool[Array, "N"]) -> Bool[Array, "N"]:
    """Selects candidates in order, skipping each that is near one selected before it.

    A round decides all candidates that have no undecided candidate near and before them. A few rounds are enough
    unless decisions form a long chain.

    Args:
        near: which pairs are near each other, symmetric.
        candidate: candidates.

    Returns:
        The selected candidates.
    """
    index = jnp.arange(near.shape[0])
    before = near & (index[None, :] < index[:, None])

    def decide(carry: tuple[Bool[Array, "N"], Bool[Array, "N"]]) -> tuple[Bool[Array, "N"], Bool[Array, "N"]]:
        """Runs one round on the `carry` of selected and undecided candidates."""
        selected, undecided = carry
        now = undecided & ~jnp.any(before & undecided[None, :], axis=1)
        return selected | now, undecided & ~now & ~jnp.any(before & now[None, :], axis=1)

    # Two rounds are often enough, and a GPU waits for the host in every round of a loop.
    first = decide(decide((jnp.zeros_like(candidate), candidate)))
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), decide, first)[0]


class EarlierNeighbors(NamedTuple):
    """The nearest center in a lower slot, for every center.

    Attributes:
        squared_distance: float32; inf without a neighbor.
        slot: int32, slot of the neighbor.
        stale: centers whose neighbor is unknown and must be computed.
    """

    squared_distance: Float[Array, "M"]
    slot: Int[Array, "M"]
    stale: Bool[Array, "M"]

    def insert(
        self, slot: Int[Array, "N"], squared_distance: Float[Array, "N"], neighbor: Int[Array, "N"]
    ) -> "EarlierNeighbors":
        """Sets the neighbors of centers.

        Args:
            slot: slots of the centers; M is dropped.
            squared_distance: distances to the neighbors.
            neighbor: slots of the neighbors.

        Returns:
            The updated neighbors.
        """
        new = EarlierNeighbors(squared_distance, neighbor, jnp.zeros(slot.shape, bool))
        return jax.tree.map(lambda old, new: old.at[slot].set(new, mode="drop"), self, new)

    def compact(self, remains: Bool[Array, "M"]) -> "EarlierNeighbors":
        """Moves the centers that remain (`remains`) to the first slots; centers without their neighbor become stale."""
        rank = jnp.cumsum(remains, dtype=jnp.int32) - 1
        lost = remains & ~remains[self.slot] & jnp.isfinite(self.squared_distance)
        old = EarlierNeighbors(self.squared_distance, rank[self.slot], lost)
        target = jnp.where(remains, rank, remains.shape[0])
        empty = unknown_neighbors(jnp.zeros_like(remains))
        return jax.tree.map(lambda new, old: new.at[target].set(old, mode="drop"), empty, old)


def unknown_neighbors(present: Bool[Array, "M"]) -> EarlierNeighbors:
    """Returns neighbors that are all to be computed, for the centers that are present."""
    return EarlierNeighbors(jnp.full(present.shape, jnp.inf), jnp.zeros(present.shape, jnp.int32), present)


def grow_delta(
    centers: Float[Array, "M D"],
    norms: Float[Array, "M"],
    neighbors: EarlierNeighbors,
    waiting: Float[Array, ""],
    delta: Float[Array, ""],
    growth: float,
    grows: Bool[Array, ""],
    rows: int,
) -> tuple[Float[Array, ""], Bool[Array, "M"], Int[Array, "M"], EarlierNeighbors]:
    """Grows the delta of a full table until clusters merge or the waiting key is within delta of a center.

    A center remains if it is farther than delta from all earlier centers that remain. Only centers whose neighbor is
    stale or within delta are compared with all others, so that M x M distances are never in memory.

    Args:
        centers: centers of the table.
        norms: their squared norms.
        neighbors: the earlier neighbor of every center.
        waiting: squared distance of the key that finds no slot to its nearest center.
        delta: delta before.
        growth: smallest factor by which delta grows.
        grows: whether delta grows at all; otherwise the results are meaningless and take little time.
        rows: centers that are compared with all others at a time.

    Returns:
        The new delta; the centers that remain; for every center the nearest one that remains, itself included (no
        farther than delta); and the neighbors of the centers that remain, stale where the neighbor does not remain.
    """
    capacity = norms.shape[0]

    def grow(carry: tuple[Array, Array, EarlierNeighbors, Array]) -> tuple[Array, Array, EarlierNeighbors, Array]:
        """Decides which centers remain at the delta in the `carry`; grows delta if all of them do."""
        delta, _, neighbors, _ = carry
        reach = delta * delta
        close = neighbors.stale | (neighbors.squared_distance <= reach)
        # A center whose known neighbor surely remains does not remain.
        merges = ~neighbors.stale & ~close[neighbors.slot]
        decide = functools.partial(_decide_rows, centers, norms, reach)
        remains, neighbors = _scan_rows(decide, (~close, neighbors), close & ~merges, rows)
        done = ~jnp.all(remains) | (waiting <= reach)
        # Rounded up, so that the square of delta is at least the smallest distance.
        smallest = jnp.sqrt(jnp.minimum(jnp.min(neighbors.squared_distance), waiting)) * (1 + 2.0**-22)
        return jnp.where(done, delta, jnp.maximum(delta, smallest)), remains, neighbors, done

    start = (growth * delta, jnp.ones(capacity, bool), neighbors, ~grows)
    delta, remains, neighbors, _ = jax.lax.while_loop(lambda carry: ~carry[3], grow, start)

    def merge_target(target: Int[Array, "M"], merged: Int[Array, "R"]) -> Int[Array, "M"]:
        """Sets the `target` of the centers in rows `merged` to their nearest center that remains."""
        index = jnp.minimum(merged, capacity - 1)
        nearest = nearest_center(centers[index], centers, norms[index], jnp.where(remains, norms, jnp.inf))[1]
        return target.at[merged].set(nearest, mode="drop")

    target = _scan_rows(merge_target, jnp.arange(capacity, dtype=jnp.int32), ~remains, rows)
    return delta, remains, target, neighbors


def _decide_rows(
    centers: Float[Array, "M D"],
    norms: Float[Array, "M"],
    reach: Float[Array, ""],
    carry: tuple[Bool[Array, "M"], EarlierNeighbors],
    rows: Int[Array, "R"],
) -> tuple[Bool[Array, "M"], EarlierNeighbors]:
    """Decides which centers of these rows remain, and finds their neighbors; all earlier rows have been decided."""
    remains, neighbors = carry
    capacity = norms.shape[0]
    index = jnp.minimum(rows, capacity - 1)
    remaining_norms = jnp.where(remains, norms, jnp.inf)
    squared, nearest = nearest_center(centers[index], centers, norms[index], remaining_norms, before=index)
    between = squared_distances(centers[index], centers[index], norms[index], norms[index])
    # A known neighbor is within delta, however its distance is rounded this time.
    known, slot = ~neighbors.stale[index], neighbors.slot[index]
    near = (between <= reach) | (known[:, None] & (slot[:, None] == index))
    candidate = (rows < capacity) & (squared > reach) & ~(known & remains[slot])
    selected = greedy_cover(near, candidate)
    to_new, new = min_and_argmin(jnp.where(selected & (index < index[:, None]), between, jnp.inf))
    neighbor = jnp.where(to_new < squared, index[new], nearest)
    neighbors = neighbors.insert(rows, jnp.minimum(squared, to_new), neighbor)
    return remains.at[rows].set(selected, mode="drop"), neighbors


def _scan_rows(step: Callable[[T, Int[Array, "R"]], T], carry: T, mask: Bool[Array, "M"], count: int) -> T:
    """Calls `step` with the rows of a mask in order, `count` at a time; those that are missing in a call are M."""
    capacity = mask.shape[0]
    if count >= capacity:
        return step(carry, jnp.where(mask, jnp.arange(capacity, dtype=jnp.int32), capacity))

    def take_rows(carry: tuple[T, Bool[Array, "M"]]) -> tuple[T, Bool[Array, "M"]]:
        """Calls `step` with the next rows of the mask in the `carry`, and removes them from it."""
        result, remaining = carry
        rows = jnp.nonzero(remaining, size=count, fill_value=capacity)[0].astype(jnp.int32)
        return step(result, rows), remaining.at[rows].set(False, mode="drop")

    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), take_rows, (carry, mask))[0]
