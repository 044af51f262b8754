"""The fused cluster-attention loop as a Pallas kernel for TPU (Mosaic)."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import packing
from pallas_kernels.dispatch import Unsuited, tensor_cores
from pallas_kernels.weighted_decode.base import (
    EMPTY,
    Entries,
    Partials,
    compute_type,
    merge_splits,
    occupied,
    refuse_unknown,
)
from pallas_kernels.weighted_decode.reference import MANY_ROWS

SUBLANES = 8  # rows of a register
# Of a step's keys, and of its values, at most. A step takes some hundred cycles in which its products wait for one
# another, however many they are: with these, 1 MiB in bfloat16, a chip's memory is the slower. What is widened must fit
# beside them.
BLOCK_NUMBERS = 2**19
# A range begins and ends inside blocks, which are read whole: a block is at most this share of the slots, but not less
# than so many bytes.
BLOCK_SHARE, LEAST_BYTES = 1 / 8, 2**18

# Mosaic loads no float16, and handing it over as int16 makes XLA copy the store.
TYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel cuts its work.

    Attributes:
        block_slots: slots per step of the pipeline; a multiple of 128. None: by their number and size.
        splits: parts that a head's slots are cut into, each with sums of its own, so that several cores share one
            sequence; merged outside. None: one for each core that shares a program, where rows and heads do not divide
            evenly among them.
    """

    block_slots: int | None = None
    splits: int | None = None

    def __post_init__(self) -> None:
        if self.block_slots is not None and (self.block_slots < 128 or self.block_slots % 128):
            raise ValueError(f"block_slots={self.block_slots}; it must be None or a multiple of 128")
        if self.splits is not None and self.splits < 1:
            raise ValueError(f"splits={self.splits}; it must be None or at least 1")


def block_slots(*stores: Entries) -> list[int]:
    """How many slots of each store a step reads, where nobody says so."""
    row_bytes = [entries.keys.shape[3] * entries.keys.dtype.itemsize for entries in stores]
    slots = [entries.keys.shape[2] for entries in stores]
    # All stores have blocks on chip at a time; those that are small anyway take no room of the others.
    large = sum(number * size > LEAST_BYTES for number, size in zip(slots, row_bytes, strict=True))
    most = BLOCK_NUMBERS // max(large, 1)
    found = [
        min(most // entries.key_dim, max(LEAST_BYTES // size, int(number * BLOCK_SHARE)))
        for entries, number, size in zip(stores, slots, row_bytes, strict=True)
    ]
    return [max(one // 128, 1) * 128 for one in found]


def check(rows: Float[Array, "B H R D"], *stores: Entries) -> None:
    """Raises a NotImplementedError for what the kernel cannot do, with the reason."""
    for entries in stores:
        _check_store(rows, entries)


def _check_store(rows: Float[Array, "B H R D"], entries: Entries) -> None:
    refuse_unknown(entries)
    if rows.shape[2] >= MANY_ROWS:
        raise Unsuited(f"{rows.shape[2]} rows: from {MANY_ROWS} on products, not reading, take the time")
    packed = {"keys": entries.key_bits, "values": entries.value_bits}
    for name, array in {"rows": rows, "keys": entries.keys, "values": entries.values}.items():
        if array is not None and array.dtype.name not in TYPES and packed.get(name) is None:
            raise NotImplementedError(f"{name} are {array.dtype.name}; a TPU kernel takes {', '.join(TYPES)}")
    if any(bits is not None for bits in packed.values()) and rows.shape[3] % (8 * SUBLANES):
        raise NotImplementedError(f"packed rows of {rows.shape[3]} dimensions; it must be a multiple of {8 * SUBLANES}")


def weighted_decode(
    rows: Float[Array, "B H R D"],
    *stores: Entries,
    config: Config | None = None,
    interpret: Any = False,
    logits: bool = False,
) -> Partials:
    """`reference.weighted_decode` in one pass over the occupied blocks of slots, one store after the other.

    Every kv head's rows share one read of its keys and values. Blocks outside the occupied range of a row of the batch
    are neither fetched nor computed. Head dimensions that are no multiple of 128, and packed numbers, are read with
    slots as the minor axis, which is how XLA lays such arrays out, so that no copy is made. What is packed is brought
    apart in registers; codes are multiplied as they are, and what they are short of the numbers is added to the
    products.
    """
    config = config or Config()
    batch, heads, count, head_dim = rows.shape
    wanted = block_slots(*stores) if config.block_slots is None else [config.block_slots] * len(stores)
    blocks = [min(block, entries.keys.shape[2]) for block, entries in zip(wanted, stores, strict=True)]
    most = max(pl.cdiv(entries.keys.shape[2], block) for entries, block in zip(stores, blocks, strict=True))
    cores = tensor_cores()
    splits = min(config.splits or (cores if batch * heads % cores else 1), most)
    cut, steps = [], 0
    for number, (entries, block) in enumerate(zip(stores, blocks, strict=True)):
        cut.append(_Store.of(entries, number, block, splits, steps))
        steps += cut[-1].per_split

    def of_split(b, h, s, j, *_):
        return b, h, s, 0, 0

    arrays: dict[tuple[int | None, str], tuple[Array, pl.BlockSpec]] = {
        (None, "rows"): (rows, pl.BlockSpec((1, 1, count, head_dim), lambda b, h, s, j, *_: (b, h, 0, 0)))
    }
    for store in cut:
        arrays |= {(store.number, name): given for name, given in store.arrays(count).items()}
    out_specs = [pl.BlockSpec((1, 1, 1, count, width), of_split) for width in (1, head_dim, 1)]
    out_shape = [jax.ShapeDtypeStruct((batch, heads, splits, count, width), jnp.float32) for width in (1, head_dim, 1)]
    if logits:
        # Every step has a block of its own, so that what is not read can be told.
        (store,) = cut
        out_specs.append(pl.BlockSpec((1, 1, count, store.block), lambda b, h, s, j, *_: (b, h, 0, s * steps + j)))
        out_shape.append(jax.ShapeDtypeStruct((batch, heads, count, splits * steps * store.block), jnp.float32))
    ranges = [bound for store in cut for bound in store.ranges]
    pairs = sum(store.slots * (2 if store.entries.feeds != "denominator" else 1) for store in cut)
    sums = pl.pallas_call(
        functools.partial(_kernel, stores=cut, names=tuple(arrays), with_logits=logits),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(ranges),
            grid=(batch, heads, splits, steps),
            in_specs=[spec for _, spec in arrays.values()],
            out_specs=out_specs,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * heads * count * head_dim * pairs,
            bytes_accessed=sum(x.nbytes for x, _ in arrays.values())
            + sum(math.prod(x.shape) * x.dtype.itemsize for x in out_shape),
            transcendentals=batch * heads * count * sum(store.slots for store in cut),
        ),
        interpret=interpret,
        name="weighted_decode",
    )(*ranges, *(x for x, _ in arrays.values()))
    merged = merge_splits(Partials(sums[0][..., 0], sums[1], sums[2][..., 0]))
    return merged._replace(logits=sums[3][..., : cut[0].slots]) if logits else merged


class _Store(NamedTuple):
    """How one of a kernel's stores is read: its blocks in the steps [first_step, first_step + per_split) of a head."""

    entries: Entries
    number: int
    block: int
    per_split: int
    first_step: int
    bounds: tuple[Array, Array]  # of what rows read
    ranges: tuple[Array, Array, Array, Array]  # first and last block, lowest and highest slot, of each row of the batch

    @classmethod
    def of(cls, entries: Entries, number: int, block: int, splits: int, first_step: int) -> "_Store":
        blocks = pl.cdiv(entries.keys.shape[2], block)
        start, stop, lowest, highest = occupied(entries)
        # One block is always fetched: an empty range points at one that exists.
        first = jnp.clip(lowest // block, 0, blocks - 1)
        last = jnp.clip((highest - 1) // block, first, blocks - 1)
        ranges = first, last, lowest, highest
        return cls(entries, number, block, pl.cdiv(blocks, splits), first_step, (start, stop), ranges)

    @property
    def slots(self) -> int:
        return self.entries.keys.shape[2]

    @property
    def bits(self) -> dict[str, int | None]:
        return {"keys": self.entries.key_bits, "values": self.entries.value_bits}

    def slots_minor(self, name: str) -> bool:
        return self.entries.key_dim % 128 != 0 or self.bits[name] is not None

    def own_ranges(self, ranges: Sequence[Any]) -> Sequence[Any]:
        """Of the prefetched ranges of all stores."""
        return ranges[4 * self.number : 4 * self.number + 4]

    def arrays(self, rows: int) -> dict[str, tuple[Array, pl.BlockSpec]]:
        """What is read, and which blocks of it."""
        entries, block = self.entries, self.block

        def place(b, s, j, *ranges):
            # Steps outside the range stay on its nearest block, which the pipeline then does not fetch again.
            first, last, *_ = self.own_ranges(ranges)
            step = jnp.clip(j - self.first_step, 0, self.per_split - 1) if len(ranges) > 4 else j
            return jnp.clip(s * self.per_split + step, first[b], last[b])

        def stored(name: str) -> tuple[Array, pl.BlockSpec]:
            array, minor = getattr(entries, name), self.slots_minor(name)

            def of_slots(b, h, s, j, *ranges):
                number = place(b, s, j, *ranges)
                return (b, h, 0, number) if minor else (b, h, number, 0)

            shape = (1, 1, array.shape[3], block) if minor else (1, 1, block, array.shape[3])
            return array.swapaxes(2, 3) if minor else array, pl.BlockSpec(shape, of_slots)

        fed_values = entries.feeds != "denominator"
        arrays = {name: stored(name) for name in ("keys", "values") if name == "keys" or fed_values}
        weights = pl.BlockSpec((1, 1, 1, block), lambda b, h, s, j, *ranges: (b, h, 0, place(b, s, j, *ranges)))
        for name in ("log_num", "log_den", "key_scale", "value_scale"):
            # A scale of values that are not read need not be read either; the same for the numerator's weights.
            used = name != "value_scale" or fed_values
            if used and (given := getattr(entries, name)) is not None:
                arrays[name] = (given[:, :, None], weights)
        if any(bound.ndim == 2 for bound in self.bounds):
            wide = lambda x: jnp.broadcast_to(x if x.ndim == 2 else x[:, None], (len(x), rows))  # noqa: E731
            bounds = jnp.stack([wide(bound) for bound in self.bounds], axis=-1)
            arrays["bounds"] = (bounds, pl.BlockSpec((1, rows, 2), lambda b, h, s, j, *_: (b, 0, 0)))
        return arrays


def _kernel(*refs, stores, names, with_logits):
    """One block of one head's slots of a store against all of its rows. Running sums live in the output blocks, which
    stay on chip while the last axis of the grid runs."""
    ranges, rest = refs[: 4 * len(stores)], refs[4 * len(stores) :]
    given = dict(zip(names, rest, strict=False))
    peak_ref, num_ref, den_ref, *of_logits = rest[len(names) :]
    b, s, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        peak_ref[...] = jnp.full_like(peak_ref, EMPTY)
        num_ref[...] = jnp.zeros_like(num_ref)
        den_ref[...] = jnp.zeros_like(den_ref)

    if with_logits:
        of_logits[0][...] = jnp.full_like(of_logits[0], EMPTY)
    for store in stores:
        first, last, lowest, highest = (bound[b] for bound in store.own_ranges(ranges))
        number = s * store.per_split + j - store.first_step
        here = (number >= first) & (number <= last)
        if len(stores) > 1:
            here &= (j >= store.first_step) & (j < store.first_step + store.per_split)
        own = {name: ref for (of, name), ref in given.items() if of in (None, store.number)}
        own |= {"peak": peak_ref, "num": num_ref, "den": den_ref, **({"logits": of_logits[0]} if with_logits else {})}
        pl.when(here)(functools.partial(_block, store, own, number, lowest, highest))


def _block(store: _Store, given, number, lowest, highest):
    """Adds a store's block to the sums."""
    peak_ref, num_ref, den_ref = given["peak"], given["num"], given["den"]
    slots, block, bits, feeds = store.slots, store.block, store.bits, store.entries.feeds
    minor = {name: store.slots_minor(name) for name in bits}
    queries, keys = given["rows"][0, 0], given["keys"][0, 0]
    logits = _product(queries, keys, contract_slots=False, slots_minor=minor["keys"], bits=bits["keys"])
    logits = logits * queries.shape[1] ** -0.5
    if "key_scale" in given:
        logits = logits * given["key_scale"][0, 0].astype(jnp.float32)
    slot = number * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
    inside = (slot >= lowest) & (slot < highest)
    if "bounds" in given:
        bounds = given["bounds"][0]
        inside = inside & (slot >= bounds[:, :1]) & (slot < bounds[:, 1:])

    def weighed(name):
        shifted = logits + jnp.maximum(given[name][0, 0].astype(jnp.float32), EMPTY) if name in given else logits
        return jnp.where(inside, shifted, EMPTY)

    num_logits = weighed("log_num")
    den_logits = weighed("log_den") if "log_den" in given else num_logits
    if "logits" in given:
        given["logits"][0, 0] = den_logits
    fed = {"both": (num_logits, den_logits), "numerator": (num_logits,), "denominator": (den_logits,)}[feeds]
    before = peak_ref[0, 0, 0]
    peak = functools.reduce(jnp.maximum, (jnp.max(one, axis=1, keepdims=True) for one in fed), before)
    fade = jnp.exp(before - peak)
    peak_ref[0, 0, 0] = peak
    den, num = den_ref[0, 0, 0] * fade, num_ref[0, 0, 0] * fade
    if feeds != "numerator":
        den += jnp.sum(jnp.exp(den_logits - peak), axis=1, keepdims=True)
    den_ref[0, 0, 0] = den
    if feeds != "denominator":
        weight = jnp.exp(num_logits - peak)
        # What lies behind the last slot is unspecified, and 0 * NaN is NaN.
        if "value_scale" in given:
            weight = jnp.where(inside, weight * given["value_scale"][0, 0].astype(jnp.float32), 0.0)
        values = given["values"][0, 0]
        if slots % block and bits["values"] is None:  # every byte is a number
            place = number * block + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1 if minor["values"] else 0)
            values = jnp.where(place < slots, values, jnp.zeros_like(values))
        weight = weight.astype(compute_type(queries.dtype, values.dtype))
        num += _product(weight, values, contract_slots=True, slots_minor=minor["values"], bits=bits["values"])
    num_ref[0, 0, 0] = num


def _product(
    left: Float[Array, "R K"],
    stored: Float[Array, "S D"],
    *,
    contract_slots: bool,
    slots_minor: bool,
    bits: int | None,
) -> Float[Array, "R N"]:
    """Rows against stored keys (over dimensions) or weights against stored values (over slots), in float32."""
    kind = compute_type(left.dtype, stored.dtype)
    left = left.astype(kind)
    if bits is not None:
        stored = packing.unpack(stored.astype(jnp.int32), bits, axis=0)  # wide, so that pieces are whole registers
    if jnp.issubdtype(stored.dtype, jnp.integer):
        stored = stored.astype(jnp.float32)  # from where every type can be reached
    axis = int(slots_minor) if contract_slots else 1 - int(slots_minor)
    precision = jax.lax.Precision.HIGHEST if kind == jnp.float32 else None
    product = jax.lax.dot_general(
        left,
        stored.astype(kind),
        (((1,), (axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    if bits is None:
        return product
    total = jnp.sum(left.astype(jnp.float32), axis=1, keepdims=True)
    return 2 * product - packing.largest(bits) * total
