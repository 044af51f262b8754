"""What attention reads: `Segment`, entries that every query reads, and `Recalled`, of which each query reads a part."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import storage
from kvjax.state import state
from pallas_kernels.weighted_decode import Entries


@state
class Spread:
    """Entries read spread about their mean: a key k as mean_key + scale (k - mean_key), and its value alike."""

    scale: Float[Array, "B H_kv"]  # float32
    mean_key: Float[Array, "B H_kv D"]  # float32
    mean_value: Float[Array, "B H_kv D_v"]  # float32


@state
class Slope:
    """How values follow the query. An entry that stands for several tokens has a value that varies with the query,
    because the query weighs its tokens differently: to first order by covariance q / sqrt(D), softly bounded by a norm
    of `limit`, which is about what so few tokens can give. The same for all entries of a head."""

    covariance: Float[Array, "B H_kv D_v D"]  # float32
    limit: Float[Array, "B H_kv"]  # float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment(Entries):
    """Entries s that add exp(q.k_s / sqrt(D) + log_num_s) v_s to the numerator of attention and
    exp(q.k_s / sqrt(D) + log_den_s) to its denominator: `Entries` [B, H_kv, S, ...], and how a cache shows them.

    Keys with scales stand in the basis in which they are stored (`kvjax.storage`), without the `center` that all of
    them have in common; values with scales stand in that basis, too.

    Only keys and values must be given; everything else is neutral where it is None. A log-weight of -inf marks an empty
    slot. Slots outside [start, stop) are not read; they must hold finite numbers all the same, because backends may
    multiply them by zero.

    Raises:
        ValueError: for shapes that do not agree, or values, a slope or a spread that cannot be.
    """

    spread: Spread | None = None
    slope: Slope | None = None
    turn: Float[Array, "B #T half_D"] | None = None  # angles by which the queries are turned before they read
    center: Float[Array, "B H_kv D"] | None = None  # float32
    value_center: Float[Array, "B H_kv D_v"] | None = None  # float32, what is added to every value
    # Whether devices share the slots: what they find of them is merged.
    in_parts: bool = dataclasses.field(default=False, metadata={"static": True})
    # Which kv heads [first, last) these are entries of; None: all.
    heads: tuple[int, int] | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        shape = getattr(self.keys, "shape", None)
        if shape is None:
            return  # trees are also made of what is no array
        if self.feeds not in ("both", "numerator", "denominator"):
            raise ValueError(f"feeds={self.feeds!r}; it must be 'both', 'numerator' or 'denominator'")
        if self.values is None and self.feeds != "denominator":
            raise ValueError(f"a segment that feeds {self.feeds!r} needs values")
        if self.feeds != "both" and any(x is not None for x in (self.slope, self.spread, self.value_center)):
            raise ValueError("slope, spread and a center of values need a segment that feeds both sums")
        if self.values is not None and self.values.shape[:3] != shape[:3]:
            raise ValueError(
                f"values have shape {self.values.shape}; [B, H_kv, S] must be that of the keys, {shape[:3]}"
            )
        for name in ("log_num", "log_den", "key_scale", "value_scale"):
            weight = getattr(self, name)
            if weight is not None and weight.shape != shape[:3]:
                raise ValueError(f"{name} has shape {weight.shape}; it must be [B, H_kv, S] = {shape[:3]}")
        for name in ("start", "stop"):
            bound = getattr(self, name)
            if bound is not None and (bound.ndim != 2 or bound.shape[0] != shape[0]):
                raise ValueError(f"{name} has shape {bound.shape}; it must be [B, 1] or [B, T] with B = {shape[0]}")


class Choice(NamedTuple):
    """What one query of every row reads of a `Recalled`."""

    block: Int[Array, "B H K"]  # int32 numbers of blocks, for every kv head or (H = H_q) every query head
    tokens: Int[Array, "B H K"]  # int32, how many of each are read, from its first on; 0 where none
    rest: tuple[Segment, ...] = ()  # entries that stand for what is not read
    unread: Float[Array, "B H_q"] | None = None  # log of a bound on the mass of what is not read, if there is one
    taken: Int[Array, "B H C"] | None = None  # tokens that are read of each part of the index, where it has parts


@dataclasses.dataclass(frozen=True)
class Recalled:
    """Tokens in blocks, of which every query reads those that it chooses.

    Attributes:
        store: the blocks (`kvjax.recall.BlockStore`), [B, H_kv, N, P, ...].
        choose: (query [B, 1, H_q, D], round [B] or None) -> Choice, by the index alone and never by stored entries. A
            round, where there is a target, is the next so many whole blocks; `rest` and `unread` are then those after
            that round.
        index: the arrays that choosing reads, for counts of bytes.
        target: recall round by round until no more than this share of attention's mass is unread; None: once.
        rounds: the most rounds.
        recent: blocks that are on the device although the store is not (`HostMemory`).
        heads: as a segment's.
    """

    store: Any
    choose: Callable[[Array, Array | None], Choice]
    index: tuple[Array, ...]
    target: float | None = None
    rounds: int = 1
    recent: Any = None
    heads: tuple[int, int] | None = None


Part = Segment | Recalled
Reading = Any  # a `Part`, or a tuple of readings


def is_part(x: Any) -> bool:
    return isinstance(x, Segment | Recalled)


def map_parts(function: Callable[..., Any], reading: Reading, *others: Any) -> Any:
    """Maps over the parts of readings of one structure."""
    if is_part(reading):
        return function(reading, *others)
    return tuple(map_parts(function, *items) for items in zip(reading, *others, strict=True))


def parts_of(reading: Reading) -> list[Part]:
    """The parts of a reading, in order."""
    return [reading] if is_part(reading) else [part for inner in reading for part in parts_of(inner)]


def cut(segment: Segment, slot: int) -> tuple[Segment, Segment]:
    """The segment's entries before a slot, and those from it on."""
    slots = segment.keys.shape[2]

    def part(begin: int, end: int) -> Segment:
        of_slots = {name: getattr(segment, name) for name in _OF_SLOTS}
        own: dict[str, Any] = {name: None if x is None else x[:, :, begin:end] for name, x in of_slots.items()}
        shifted: dict[str, Any] = {
            name: None if bound is None else jnp.clip(bound - begin, 0, end - begin)
            for name, bound in (("start", segment.start), ("stop", segment.stop))
        }
        return dataclasses.replace(segment, **own, **shifted)

    return part(0, slot), part(slot, slots)


_OF_SLOTS = ("keys", "values", "log_num", "log_den", "key_scale", "value_scale")


def loaded(segment: Segment) -> Segment:
    """The segment with entries in the basis of the queries, where they are stored in another."""
    if segment.key_scale is not None:
        keys = storage.load(segment.keys, segment.key_scale[..., None], segment.key_bits)
        keys = keys if segment.center is None else keys + segment.center[:, :, None]
        segment = dataclasses.replace(segment, keys=keys, key_scale=None, key_bits=None, center=None)
    if segment.value_scale is not None and segment.values is not None:
        values = storage.load(segment.values, segment.value_scale[..., None], segment.value_bits)
        segment = dataclasses.replace(segment, values=values, value_scale=None, value_bits=None)
    return segment


def segment_bytes(*read: Any) -> int:
    """Bytes that one pass over the buffers of segments, or of an index, reads: all slots, whatever their occupancy."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(read))
