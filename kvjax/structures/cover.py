"""Centres that cover all points within delta: who stands when delta grows (see `cluster_table`)."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.argmin import min_and_argmin

T = TypeVar("T")

# Centres that are compared with all others at a time.
ROWS = 128


def squared_distances(
    a: Float[Array, "N D"], b: Float[Array, "K D"], a_norms: Float[Array, "N"], b_norms: Float[Array, "K"]
) -> Float[Array, "N K"]:
    """|a|^2 + |b|^2 - 2 a.b, zero where float32 does not tell it from zero."""
    norms = a_norms[:, None] + b_norms[None, :]
    return _resolved(norms - 2 * _product(a, b), norms)


def nearest_center(
    a: Float[Array, "N D"],
    b: Float[Array, "K D"],
    a_norms: Float[Array, "N"],
    b_norms: Float[Array, "K"],
    before: Int[Array, "N"] | None = None,
) -> tuple[Float[Array, "N"], Int[Array, "N"]]:
    """Squared distance of each a to the nearest b, and which that is; those of infinite norm are not there, nor, where
    `before` is given, those from that number on."""
    # With the bs along the leading axis: that is how the least is found at the speed of the product.
    relative = b_norms[:, None] - 2 * _product(b, a)
    if before is not None:
        relative = jnp.where(jnp.arange(b.shape[0])[:, None] < before, relative, jnp.inf)
    least, nearest = min_and_argmin(relative, axis=0)
    return _resolved(a_norms + least, a_norms + b_norms[nearest]), nearest


def _product(a: Float[Array, "N D"], b: Float[Array, "K D"]) -> Float[Array, "N K"]:
    # The highest precision: accelerators would round the factors of float32 products to fewer digits.
    return jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST)


def _resolved(squared: Float[Array, "..."], norms: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.where((squared <= 2.0**-20 * norms) & jnp.isfinite(norms), 0.0, squared)


def greedy_cover(near: Bool[Array, "N N"], candidate: Bool[Array, "N"]) -> Bool[Array, "N"]:
    """Goes through the candidates in order and takes each that is not near one taken before.

    Whoever has no undecided candidate near and before it is decided, all such at once; the rounds this takes are the
    longest chain of decisions that hang on each other, mostly a few.
    """
    number = jnp.arange(near.shape[0])
    before = near & (number[None, :] < number[:, None])

    def decide(carry):
        taken, undecided = carry
        now = undecided & ~jnp.any(before & undecided[None, :], axis=1)
        return taken | now, undecided & ~now & ~jnp.any(before & now[None, :], axis=1)

    start = (jnp.zeros_like(candidate), candidate)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), decide, start)[0]


def widen(
    between: Float[Array, "M M"], waiting: Float[Array, ""], delta: Float[Array, ""], growth: float
) -> tuple[Float[Array, ""], Bool[Array, "M"], Int[Array, "M"]]:
    """Grows the delta of a full table so far that clusters merge, or that the waiting key finds a centre.

    Args:
        between: squared distances between centres.
        waiting: squared distance of the key for which there is no room to its nearest centre.

    Returns:
        The new delta; the centres that stand: in order, each that is farther than delta from all that stand before it;
        and of every centre the nearest that stands, itself for those (not transitively: no farther than delta).
    """
    capacity = between.shape[0]
    number = jnp.arange(capacity, dtype=jnp.int32)
    pairs = number[:, None] < number[None, :]
    near = jnp.minimum(jnp.min(jnp.where(pairs, between, jnp.inf)), waiting)
    # Rounded up, so that its square is no less than the distance's.
    delta = jnp.maximum(growth * delta, jnp.sqrt(near) * (1 + 2.0**-22))
    stands = greedy_cover(between <= delta * delta, jnp.ones(capacity, bool))
    _, heir = min_and_argmin(jnp.where(stands[None, :], between, jnp.inf))
    return delta, stands, jnp.where(stands, number, heir)


class Ahead(NamedTuple):
    """What is known of every centre's nearest centre in a lower slot."""

    squared: Float[Array, "M"]  # the squared distance to it; inf where there is none
    slot: Int[Array, "M"]
    stale: Bool[Array, "M"]  # centres of which this is to be found out

    def opened(self, slot: Int[Array, "N"], squared: Float[Array, "N"], nearest: Int[Array, "N"]) -> "Ahead":
        """With centres that opened in these slots; a slot of M is dropped."""
        put = lambda old, new: old.at[slot].set(new, mode="drop")  # noqa: E731
        return Ahead(put(self.squared, squared), put(self.slot, nearest), put(self.stale, False))

    def packed(self, stands: Bool[Array, "M"], packed: Int[Array, "M"], place: Int[Array, "M"]) -> "Ahead":
        """Of the centres that stand, each moved to its place (M for the others): who lost its nearest has to look
        again."""
        put = lambda old, new: old.at[place].set(new, mode="drop")  # noqa: E731
        gone = stands & ~stands[self.slot] & jnp.isfinite(self.squared)
        none = none_known(jnp.zeros_like(stands))
        return Ahead(put(none.squared, self.squared), put(none.slot, packed[self.slot]), put(none.stale, gone))


def none_known(present: Bool[Array, "M"]) -> Ahead:
    """Of the centres that are there nothing is known."""
    return Ahead(jnp.full(present.shape, jnp.inf), jnp.zeros(present.shape, jnp.int32), present)


def widen_known(
    centers: Float[Array, "M D"],
    norms: Float[Array, "M"],
    ahead: Ahead,
    waiting: Float[Array, ""],
    delta: Float[Array, ""],
    growth: float,
) -> tuple[Float[Array, ""], Bool[Array, "M"], Int[Array, "M"], Ahead]:
    """As `widen`, from the centres and their squared norms. Only those of which nothing is known, or which have one
    within delta before them, are compared with all, in the order of their slots: whoever stands then knows its nearest
    before it among those that stand. No M x M distances are held, and where `ahead` is known few are computed.

    Returns:
        As `widen`, and `ahead` of those that stand, where nothing is stale but what lost its nearest.
    """
    capacity = norms.shape[0]
    number = jnp.arange(capacity, dtype=jnp.int32)

    def nearest_of(rows: Int[Array, "R"], stands: Bool[Array, "M"], before: Int[Array, "R"] | None = None):
        return nearest_center(centers[rows], centers, norms[rows], jnp.where(stands, norms, jnp.inf), before=before)

    def settle(carry: tuple) -> tuple:
        delta, _, ahead, _ = carry
        reach = delta * delta
        asked = ahead.stale | (ahead.squared <= reach)

        def decide(carry: tuple[Bool[Array, "M"], Ahead], rows: Int[Array, "R"]) -> tuple[Bool[Array, "M"], Ahead]:
            stands, ahead = carry
            at = jnp.minimum(rows, capacity - 1)
            squared, nearest = nearest_of(at, stands, before=at)
            among = squared_distances(centers[at], centers[at], norms[at], norms[at])
            # A nearest one that is known is within delta, whatever rounding makes of their distance this time: who made
            # delta merges.
            known, slot = ~ahead.stale[at], ahead.slot[at]
            near = (among <= reach) | (known[:, None] & (slot[:, None] == at))
            free = (rows < capacity) & (squared > reach) & ~(known & stands[slot])
            stand = greedy_cover(near, free)
            to_new, new = min_and_argmin(jnp.where(stand & (at < at[:, None]), among, jnp.inf))
            ahead = ahead.opened(rows, jnp.minimum(squared, to_new), jnp.where(to_new < squared, at[new], nearest))
            return stands.at[rows].set(stand, mode="drop"), ahead

        # Whose nearest is not asked, and so stands, goes without being compared.
        sure = ~ahead.stale & ~asked[ahead.slot]
        stands, ahead = _by_rows(decide, (~asked, ahead), asked & ~sure)
        settled = ~jnp.all(stands) | (waiting <= reach)
        # Nobody went: delta grows to the least distance, rounded up, so that its square is no less.
        grown = jnp.sqrt(jnp.minimum(jnp.min(ahead.squared), waiting)) * (1 + 2.0**-22)
        return jnp.where(settled, delta, jnp.maximum(delta, grown)), stands, ahead, settled

    start = (growth * delta, jnp.ones(capacity, bool), ahead, jnp.zeros((), bool))
    delta, stands, ahead, _ = jax.lax.while_loop(lambda carry: ~carry[3], settle, start)

    def inherit(heir: Int[Array, "M"], rows: Int[Array, "R"]) -> Int[Array, "M"]:
        return heir.at[rows].set(nearest_of(jnp.minimum(rows, capacity - 1), stands)[1], mode="drop")

    return delta, stands, _by_rows(inherit, number, ~stands), ahead


def _by_rows(step: Callable[[T, Int[Array, "R"]], T], carry: T, marked: Bool[Array, "M"]) -> T:
    """Takes the marked rows in order, `ROWS` at a time; what is left over of the last ones is M."""
    capacity = marked.shape[0]

    def further(carry):
        carry, left = carry
        rows = jnp.nonzero(left, size=min(ROWS, capacity), fill_value=capacity)[0].astype(jnp.int32)
        return step(carry, rows), left.at[rows].set(False, mode="drop")

    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), further, (carry, marked))[0]
