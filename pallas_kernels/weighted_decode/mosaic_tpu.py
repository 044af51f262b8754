"""`weighted_decode` as a Pallas kernel for TPU (Mosaic)."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import packing
from pallas_kernels.dispatch import check_config, tensor_cores
from pallas_kernels.partials import MASK_VALUE, Partials, merge_splits
from pallas_kernels.quantized_array import product_dtype
from pallas_kernels.tpu import dot_stored, launch
from pallas_kernels.weighted_decode.entries import PER_SLOT, Entries, Ranges, check_kernel_support, read_ranges

SUBLANES = 8  # of a register
# Elements of a step's keys, and of its values. The products of a step depend on each other and take some hundred
# cycles; blocks of 1 MiB in bfloat16 take longer to fetch. Converted values must fit on chip, too.
MAX_BLOCK_ELEMENTS = 2**19
# Blocks in which a range begins or ends are fetched entirely, so a block holds at most this share of the slots, but at
# least this many bytes.
MAX_BLOCK_SHARE, MIN_BLOCK_BYTES = 1 / 8, 2**18

# Mosaic does not load float16, and XLA copies a store that is passed as int16.
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """How the kernel divides its work.

    Attributes:
        block_slots: Slots per step of the pipeline, a multiple of 128. None: chosen by `default_block_slots`.
        splits: Parts of a head's slots whose partials are merged outside the kernel, so that several cores share one
            sequence. None: the number of cores that share a program if sequences times heads do not divide by it,
            otherwise 1.
    """

    block_slots: int | None = None
    splits: int | None = None

    def __post_init__(self) -> None:
        check_config(self, block_slots=128, splits=1)


def default_block_slots(*stores: Entries) -> list[int]:
    """Returns the slots per pipeline step of each store."""
    keys = [entries.slot_arrays["keys"] for entries in stores]
    row_bytes = [x.shape[3] * x.dtype.itemsize for x in keys]
    slots = [entries.slots for entries in stores]
    # All stores have blocks on chip at a time. Small ones need not be counted.
    large = sum(count * size > MIN_BLOCK_BYTES for count, size in zip(slots, row_bytes, strict=True))
    max_elements = MAX_BLOCK_ELEMENTS // max(large, 1)
    blocks = [
        min(max_elements // entries.key_dim, max(MIN_BLOCK_BYTES // size, int(count * MAX_BLOCK_SHARE)))
        for entries, count, size in zip(stores, slots, row_bytes, strict=True)
    ]
    return [max(block // 128, 1) * 128 for block in blocks]


def check(queries: Float[Array, "B H R D"], entries: Entries, **_options: Any) -> None:
    """Checks that the kernel supports one store of `weighted_decode`.

    Args:
        queries: The R queries of each KV head.

    Raises:
        NotImplementedError: If the kernel does not support them.
    """
    check_kernel_support(queries, entries.logit_cap, entries.value_dim)
    arrays = {"queries": queries, **entries.slot_arrays}
    for name in ("queries", "keys", "values"):
        dtype = arrays[name].dtype.name if name in arrays else None
        if dtype is not None and dtype not in DTYPES and entries.bits.get(name) is None:
            raise NotImplementedError(f"{name} are {dtype}; the TPU kernel supports {', '.join(DTYPES)}")
    if any(bits is not None for bits in entries.bits.values()) and queries.shape[3] % (8 * SUBLANES):
        raise NotImplementedError(
            f"packed vectors have {queries.shape[3]} dimensions; the TPU kernel supports multiples of {8 * SUBLANES}"
        )


def weighted_decode(
    queries: Float[Array, "B H R D"], *stores: Entries, logits: bool, config: TpuConfig, interpret: Any
) -> Partials:
    """`xla.weighted_decode` in one pass over the blocks of slots that are read, one store after the other.

    The queries of a KV head share one read of its keys and values. Blocks outside the range of a sequence are neither
    fetched nor computed. Vectors whose dimension is not a multiple of 128, and packed vectors, are read with slots as
    the minor axis. XLA stores such arrays in this layout, so that they are not copied. Packed codes are unpacked in
    registers and multiplied; the difference to the numbers that they stand for is added to the products.

    Args:
        queries: The R queries of each KV head.
        *stores: One or more sets of entries, from `entries.prepare`.
        logits: Whether to return logits; for one store only.
        config: How to divide the work.
        interpret: Passed to `pallas_call`.

    Returns:
        Partials over the union of the entries.
    """
    batch, heads, count, head_dim = queries.shape
    wanted = default_block_slots(*stores) if config.block_slots is None else [config.block_slots] * len(stores)
    blocks = [min(block, entries.slots) for block, entries in zip(wanted, stores, strict=True)]
    max_blocks = max(pl.cdiv(entries.slots, block) for entries, block in zip(stores, blocks, strict=True))
    cores = tensor_cores()
    splits = min(config.splits or (cores if batch * heads % cores else 1), max_blocks)
    blocked, steps = [], 0
    for index, (entries, block) in enumerate(zip(stores, blocks, strict=True)):
        blocked.append(_BlockedStore.create(entries, index, block, splits, steps))
        steps += blocked[-1].per_split

    def split_index(b, h, s, j, *_):
        return b, h, s, 0, 0

    arrays: dict[tuple[int | None, str], tuple[Array, pl.BlockSpec]] = {
        (None, "queries"): (queries, pl.BlockSpec((1, 1, count, head_dim), lambda b, h, s, j, *_: (b, h, 0, 0)))
    }
    for store in blocked:
        arrays |= {(store.number, name): array for name, array in store.arrays(count).items()}
    outputs: list[tuple[Any, ...]] = [
        ((batch, heads, splits, count, width), jnp.float32, pl.BlockSpec((1, 1, 1, count, width), split_index))
        for width in (1, head_dim, 1)
    ]
    if logits:
        # Every step writes its own block, so that slots of skipped blocks are masked.
        (store,) = blocked
        spec = pl.BlockSpec((1, 1, count, store.block), lambda b, h, s, j, *_: (b, h, 0, s * steps + j))
        outputs.append(((batch, heads, count, splits * steps * store.block), jnp.float32, spec))
    products = sum(store.entries.slots * (1 if store.entries.values is None else 2) for store in blocked)
    results = launch(
        "weighted_decode", functools.partial(_kernel, stores=blocked, names=tuple(arrays), with_logits=logits),
        arrays.values(), outputs, parallel=(batch, heads, splits), sequential=(steps,),
        scalars=[bound for store in blocked for bound in store.block_ranges], interpret=interpret,
        flops=2 * batch * heads * count * head_dim * products,
        transcendentals=batch * heads * count * sum(entries.slots for entries in stores),
    )  # fmt: skip
    merged = merge_splits(Partials(results[0][..., 0], results[1], results[2][..., 0]))
    return merged._replace(logits=results[3][..., : blocked[0].entries.slots]) if logits else merged


class _BlockedStore(NamedTuple):
    """A store whose blocks are read in the steps [first_step, first_step + per_split) of a head."""

    entries: Entries
    number: int  # index among the stores
    block: int  # slots
    per_split: int  # blocks
    first_step: int
    ranges: Ranges
    block_ranges: tuple[Array, Array, Array, Array]  # first and last block, lowest and highest slot, per sequence

    @classmethod
    def create(cls, entries: Entries, number: int, block: int, splits: int, first_step: int) -> "_BlockedStore":
        blocks = pl.cdiv(entries.slots, block)
        ranges = read_ranges(entries)
        highest = jnp.minimum(ranges.highest, entries.slots)
        # One block is always fetched: an empty range refers to an existing block.
        first = jnp.clip(ranges.lowest // block, 0, blocks - 1)
        last = jnp.clip((highest - 1) // block, first, blocks - 1)
        block_ranges = first, last, ranges.lowest, highest
        return cls(entries, number, block, pl.cdiv(blocks, splits), first_step, ranges, block_ranges)

    def is_slots_minor(self, name: str) -> bool:
        return self.entries.key_dim % 128 != 0 or self.entries.bits[name] is not None

    def prefetched(self, block_ranges: Sequence[Any]) -> Sequence[Any]:
        """Returns this store's ranges among the prefetched ranges of all stores."""
        return block_ranges[4 * self.number : 4 * self.number + 4]

    def arrays(self, queries: int) -> dict[str, tuple[Array, pl.BlockSpec]]:
        """Returns the arrays that the kernel reads for `queries` queries, and their blocks."""
        block = self.block

        def block_index(b, s, j, *block_ranges):
            # Steps outside the range refer to its nearest block, which the pipeline then does not fetch again.
            first, last, *_ = self.prefetched(block_ranges)
            step = jnp.clip(j - self.first_step, 0, self.per_split - 1) if len(block_ranges) > 4 else j
            return jnp.clip(s * self.per_split + step, first[b], last[b])

        def stored(name: str, array: Array) -> tuple[Array, pl.BlockSpec]:
            """Returns `array`, the keys or values (`name`), in the layout that is read, and its blocks."""
            slots_minor = self.is_slots_minor(name)

            def slot_index(b, h, s, j, *block_ranges):
                index = block_index(b, s, j, *block_ranges)
                return (b, h, 0, index) if slots_minor else (b, h, index, 0)

            shape = (1, 1, array.shape[3], block) if slots_minor else (1, 1, block, array.shape[3])
            return array.swapaxes(2, 3) if slots_minor else array, pl.BlockSpec(shape, slot_index)

        slot_arrays = self.entries.slot_arrays
        arrays: dict[str, Any] = {
            name: stored(name, slot_arrays[name]) for name in ("keys", "values") if name in slot_arrays
        }
        per_slot = pl.BlockSpec((1, 1, 1, block), lambda b, h, s, j, *ranges: (b, h, 0, block_index(b, s, j, *ranges)))
        arrays |= {name: (slot_arrays[name][:, :, None], per_slot) for name in PER_SLOT if name in slot_arrays}
        start, stop = self.ranges.start, self.ranges.stop
        if start.ndim == 2 or stop.ndim == 2:
            shape = (len(start), queries)
            bounds = [jnp.broadcast_to(x if x.ndim == 2 else x[:, None], shape) for x in (start, stop)]
            spec = pl.BlockSpec((1, queries, 2), lambda b, h, s, j, *_: (b, 0, 0))
            arrays["bounds"] = (jnp.stack(bounds, axis=-1), spec)
        return arrays


def _kernel(*refs, stores, names, with_logits):
    """Adds one block of a head's slots to the partials of the head's queries.

    The partials are output blocks, which stay on chip while the last axis of the grid runs.
    """
    block_ranges, array_refs = refs[: 4 * len(stores)], refs[4 * len(stores) :]
    inputs = dict(zip(names, array_refs, strict=False))
    outputs = dict(zip(("max", "numerator", "denominator", "logits"), array_refs[len(names) :], strict=False))
    b, s, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        outputs["max"][...] = jnp.full_like(outputs["max"], MASK_VALUE)
        outputs["numerator"][...] = jnp.zeros_like(outputs["numerator"])
        outputs["denominator"][...] = jnp.zeros_like(outputs["denominator"])

    if with_logits:
        outputs["logits"][...] = jnp.full_like(outputs["logits"], MASK_VALUE)
    for store in stores:
        first, last, lowest, highest = (bound[b] for bound in store.prefetched(block_ranges))
        block = s * store.per_split + j - store.first_step
        is_read = (block >= first) & (block <= last)
        if len(stores) > 1:
            is_read &= (j >= store.first_step) & (j < store.first_step + store.per_split)
        store_refs = {name: ref for (index, name), ref in inputs.items() if index in (None, store.number)}
        pl.when(is_read)(functools.partial(_add_block, store, store_refs | outputs, block, lowest, highest))


def _add_block(store: _BlockedStore, refs, index, lowest, highest):
    """Adds a store's block to the partials."""
    max_ref, num_ref, den_ref = refs["max"], refs["numerator"], refs["denominator"]
    slots, block, bits = store.entries.slots, store.block, store.entries.bits
    slots_minor = {name: int(store.is_slots_minor(name)) for name in bits}
    queries, keys = refs["queries"][0, 0], refs["keys"][0, 0]
    logits = _product(queries, keys, axis=1 - slots_minor["keys"], bits=bits["keys"])
    logits = logits * queries.shape[1] ** -0.5
    if "key_scale" in refs:
        logits = logits * refs["key_scale"][0, 0].astype(jnp.float32)
    slot = index * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
    is_read = (slot >= lowest) & (slot < highest)
    if "bounds" in refs:
        bounds = refs["bounds"][0]
        is_read = is_read & (slot >= bounds[:, :1]) & (slot < bounds[:, 1:])

    def add_log_weights(name):
        """Returns masked logits plus the log-weights `name`."""
        shifted = logits + jnp.maximum(refs[name][0, 0].astype(jnp.float32), MASK_VALUE) if name in refs else logits
        return jnp.where(is_read, shifted, MASK_VALUE)

    num_logits = add_log_weights("log_num")
    den_logits = add_log_weights("log_den") if "log_den" in refs else num_logits
    if "logits" in refs:
        refs["logits"][0, 0] = den_logits
    contributions = (num_logits, den_logits) if "values" in refs else (den_logits,)
    old_max = max_ref[0, 0, 0]
    new_max = functools.reduce(jnp.maximum, (jnp.max(x, axis=1, keepdims=True) for x in contributions), old_max)
    rescale = jnp.exp(old_max - new_max)
    max_ref[0, 0, 0] = new_max
    denominator, numerator = den_ref[0, 0, 0] * rescale, num_ref[0, 0, 0] * rescale
    den_ref[0, 0, 0] = denominator + jnp.sum(jnp.exp(den_logits - new_max), axis=1, keepdims=True)
    if "values" in refs:
        weight = jnp.exp(num_logits - new_max)
        # Scales and values beyond the last slot are undefined, and 0 * NaN is NaN.
        if "value_scale" in refs:
            weight = jnp.where(is_read, weight * refs["value_scale"][0, 0].astype(jnp.float32), 0.0)
        values = refs["values"][0, 0]
        if slots % block and bits["values"] is None:  # every packed byte is finite
            value_slot = index * block + jax.lax.broadcasted_iota(jnp.int32, values.shape, slots_minor["values"])
            values = jnp.where(value_slot < slots, values, jnp.zeros_like(values))
        weight = weight.astype(product_dtype(queries.dtype, values.dtype))
        numerator += _product(weight, values, axis=slots_minor["values"], bits=bits["values"])
    num_ref[0, 0, 0] = numerator


def _product(
    left: Float[Array, "R K"], stored: Float[Array, "S D"], *, axis: int, bits: int | None
) -> Float[Array, "R N"]:
    """Returns queries times keys, or weights times values, in float32; `axis` of `stored` is contracted."""
    if bits is None:
        return dot_stored(left, stored, axis)
    # In int32, the unpacked runs fill entire registers.
    product = dot_stored(left, packing.unpack(stored.astype(jnp.int32), bits, axis=0), axis)
    total = jnp.sum(left.astype(jnp.float32), axis=1, keepdims=True)
    return 2 * product - packing.largest(bits) * total
