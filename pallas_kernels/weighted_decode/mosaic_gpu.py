"""The fused cluster-attention loop as a Pallas kernel for Hopper GPUs (Mosaic GPU), in the way of
`pallas_kernels.hopper`."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import hopper
from pallas_kernels.batching import fold_mapped_axes
from pallas_kernels.dispatch import Unsuited
from pallas_kernels.weighted_decode.base import (
    EMPTY,
    Entries,
    Partials,
    merge_splits,
    merge_sums,
    occupied,
    refuse_unknown,
)
from pallas_kernels.weighted_decode.reference import MANY_ROWS

# Weights of slots, each an array [B, H, S] that is read where it is given.
WEIGHTS = ("log_num", "log_den", "key_scale", "value_scale")
TILE = 8


@dataclasses.dataclass(frozen=True)
class GpuConfig:
    """How the kernel cuts its work.

    Attributes:
        stages: blocks of 64 slots on their way or in use at a time; None: as many as fit beside a second program on a
            multiprocessor.
        splits: parts that a head's slots are cut into, each with sums of its own, merged outside; None: as many as fill
            the GPU.
    """

    stages: int | None = None
    splits: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}; it must be None or at least 1")


def check(rows: Float[Array, "B H R D"], *stores: Entries, interpret: Any = False) -> None:
    """Raises a NotImplementedError for what the kernel cannot do, with the reason."""
    for entries in stores:
        _check_store(rows, entries, interpret)


def _check_store(rows: Float[Array, "B H R D"], entries: Entries, interpret: Any) -> None:
    refuse_unknown(entries)
    if not interpret:
        hopper.check_device()
    if rows.shape[2] >= MANY_ROWS:
        raise Unsuited(f"{rows.shape[2]} rows: from {MANY_ROWS} on products, not reading, take the time")
    packed = [name for name, bits in _bits(entries).items() if bits is not None]
    hopper.check_types(*packed, rows=rows, keys=entries.keys, values=entries.values)
    hopper.check_head_dim(rows.shape[3])
    keys, values = entries.keys.dtype, entries.keys.dtype if entries.values is None else entries.values.dtype
    if keys != values and not keys.itemsize == values.itemsize == 1:
        raise NotImplementedError(f"keys are {keys.name}, values {values.name}")
    heads, slots = entries.keys.shape[1:3]
    if heads * slots % TILE:
        raise NotImplementedError(f"{heads} heads of {slots} slots: the copy engine takes multiples of {TILE}")
    hopper.roomiest(functools.partial(_scratch, [_Part.of(rows, entries, True)], True))


def weighted_decode(
    parts: Sequence[tuple[Any, ...]],
    config: GpuConfig | None = None,
    interpret: Any = False,
    *,
    logits: bool = False,
) -> list[Partials]:
    """`reference.weighted_decode` of every part (rows, *stores), in one pass over the occupied blocks of slots; stores
    that are alike share a launch.

    Every kv head's rows share one read of its keys and values. Blocks outside the occupied range of a row of the batch
    are not read, and the splits share those inside evenly.
    """
    run = functools.partial(_launch, config=config or GpuConfig(), interpret=interpret, with_logits=logits)
    launches: dict[Any, dict[int, list[Entries]]] = {}
    for number, (rows, *stores) in enumerate(parts):
        for entries in stores:
            launches.setdefault(_stored_as(rows, entries), {}).setdefault(number, []).append(entries)
    found: list[list[Partials]] = [[] for _ in parts]
    for launch in launches.values():
        given = [(parts[number][0], *stores) for number, stores in launch.items()]
        for number, sums in zip(launch, fold_mapped_axes(run)(*given), strict=True):
            found[number].append(sums)
    return [merge_sums(*sums) for sums in found]


def _stored_as(rows: Float[Array, "B H R D"], entries: Entries) -> Any:
    """What parts have in common that go through the same memory of a program."""
    values = entries.keys if entries.values is None else entries.values
    value_bits = entries.key_bits if entries.values is None else entries.value_bits
    scales = {scale.dtype.name for scale in (entries.key_scale, entries.value_scale) if scale is not None}
    types = (rows.dtype.name, entries.keys.dtype.name, values.dtype.name, *sorted(scales))
    return rows.shape, types, entries.key_bits, value_bits


def _bits(entries: Entries) -> dict[str, int | None]:
    return {"keys": entries.key_bits, "values": entries.value_bits}


def _names(entries: Entries, with_logits: bool) -> tuple[str, ...]:
    """Which of the entries' arrays are read slot by slot."""
    unread: set[str] = set()
    if entries.feeds == "denominator":
        unread = {"values", "value_scale"} | ({"log_num"} if entries.log_den is not None else set())
    elif entries.feeds == "numerator" and not with_logits:
        unread = {"log_den"}
    named = ("keys", "values", *WEIGHTS)
    return tuple(name for name in named if name not in unread and getattr(entries, name) is not None)


class _Part(NamedTuple):
    """What some of a launch's programs read."""

    rows: Float[Array, "B H R D"]
    entries: Entries
    names: tuple[str, ...]  # of the entries' arrays that are read slot by slot

    @classmethod
    def of(cls, rows: Float[Array, "B H R D"], entries: Entries, with_logits: bool) -> "_Part":
        return cls(rows, entries, _names(entries, with_logits))

    @property
    def weights(self) -> list[str]:
        return [name for name in WEIGHTS if name in self.names]

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.entries.keys.shape[2], hopper.SLOTS)


def _launch(*given: tuple[Any, ...], config: GpuConfig, interpret: Any, with_logits: bool) -> list[Partials]:
    """Programs for every split of every head of every store of every part."""
    parts = [_Part.of(rows, entries, with_logits) for rows, *stores in given for entries in stores]
    batch, heads, count, head_dim = parts[0].rows.shape
    operands = hopper.Operands.of(parts[0].rows.dtype, parts[0].entries.keys.dtype)
    scratch_of = functools.partial(_scratch, parts, with_logits)
    stages, places = hopper.roomiest(scratch_of, config.stages)
    if config.splits is None:
        splits = hopper.even_splits(batch * heads, [part.blocks for part in parts], places)
    else:
        splits = [min(config.splits, part.blocks) for part in parts]
    ranges = [occupied(part.entries) for part in parts]
    read = [_arrays(part, *of_part, operands) for part, of_part in zip(parts, ranges, strict=True)]
    padded = read[0]["rows"].shape[3]

    of_rows = jax.ShapeDtypeStruct((batch, heads, sum(splits), hopper.ROWS), jnp.float32)
    results: dict[str, Any] = {"peak": of_rows, "den": of_rows}
    if any("values" in part.names for part in parts):
        results["num"] = jax.ShapeDtypeStruct((batch, heads, sum(splits), padded, head_dim), jnp.float32)
    of_slots = [
        jax.ShapeDtypeStruct((batch, heads, padded, part.blocks * hopper.SLOTS), jnp.float32)
        for part in parts
        if with_logits
    ]

    def weighted_decode(*refs, **scratch):
        ahead = iter(refs)
        inputs = [{name: next(ahead) for name in arrays} for arrays in read]
        sums = {name: next(ahead) for name in results}
        place, first = lax.axis_index("splits"), 0
        for part, named, of_part in zip(parts, inputs, splits, strict=True):
            named |= sums | ({"logits": next(ahead)} if with_logits else {})
            program = functools.partial(
                _program, part, named, scratch, place, place - first, of_part, operands=operands, stages=stages
            )
            if len(parts) == 1:
                program()
            else:
                pl.when((place >= first) & (place < first + of_part))(program)
            first += of_part

    moved = [*(x for arrays in read for x in arrays.values()), *results.values(), *of_slots]
    slots = sum(part.entries.keys.shape[2] for part in parts)
    found = plgpu.kernel(
        weighted_decode,
        out_type=[*results.values(), *of_slots],
        scratch_types=scratch_of(stages),
        grid=(sum(splits), heads, batch),
        grid_names=("splits", "heads", "batch"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        **hopper.cost(
            flops=2 * batch * heads * count * slots * head_dim * (2 if "num" in results else 1),
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in moved),
            transcendentals=batch * heads * count * slots,
        ),
    )(*(x for arrays in read for x in arrays.values()))
    peak, den, *rest = found
    num = rest.pop(0)[..., :count, :] if "num" in results else jnp.zeros((*peak.shape[:3], count, head_dim))
    all_sums = Partials(peak[..., :count], num, den[..., :count])
    written = np.repeat(["values" in part.names for part in parts], splits)
    if not written.all():
        all_sums = all_sums._replace(num=jnp.where(written[:, None, None], all_sums.num, 0.0))
    of_stores, first = [], 0
    for of_part in splits:
        own = slice(first, first := first + of_part)
        of_stores.append(merge_splits(jax.tree.map(lambda x, own=own: x[:, :, own], all_sums)))
    ahead = iter(of_stores)
    merged = [merge_sums(*(next(ahead) for _ in stores)) for _, *stores in given]
    if not with_logits:
        return merged

    def logits_of(part: _Part, lowest: Array, highest: Array, found: Array) -> Array:
        # Blocks that are not read are not written either.
        slot = jnp.arange(part.entries.keys.shape[2], dtype=jnp.int32)
        inside = ((slot >= lowest[:, None]) & (slot < highest[:, None]))[:, None, None]
        return jnp.where(inside, found[:, :, :count, : len(slot)], EMPTY)

    return [
        sums._replace(logits=logits_of(part, *of_part[2:], one))
        for sums, part, of_part, one in zip(merged, parts, ranges, rest, strict=True)
    ]


def _arrays(part: _Part, start: Array, stop: Array, lowest: Array, highest: Array, operands: Any) -> dict[str, Array]:
    """What a part's programs read."""
    batch, _, count, _ = part.rows.shape
    arrays = {"rows": hopper.row_parts(part.rows, operands), "lowest": lowest, "highest": highest}
    for name in part.names:
        array = getattr(part.entries, name)
        # The copy engine takes rows of whole 16 bytes, and blocks in tiles of `TILE` slots of all that a row has.
        if name in WEIGHTS:
            array = jnp.pad(array, ((0, 0), (0, 0), (0, -array.shape[2] % (16 // array.dtype.itemsize))))
        else:
            array = array.reshape(batch, -1, array.shape[3])
        arrays[name] = array
    if start.ndim == 2 or stop.ndim == 2:
        wide = lambda x: jnp.broadcast_to(x if x.ndim == 2 else x[:, None], (batch, count))  # noqa: E731
        bounds = jnp.stack([wide(start), wide(stop)], axis=1)
        arrays["bounds"] = jnp.pad(bounds, ((0, 0), (0, 0), (0, hopper.ROWS - count)))
    return arrays


def _scratch(parts: Sequence[_Part], with_logits: bool, stages: int) -> dict[str, Any]:
    """What a program of any of the parts keeps in shared memory, under the names of the arrays that it holds parts
    of."""
    rows, stored = parts[0].rows, parts[0].entries
    head_dim = rows.shape[3]
    operands = hopper.Operands.of(rows.dtype, stored.keys.dtype)
    columns = hopper.operand_columns(head_dim, *_bits(stored).values())
    values = next((part.entries.values for part in parts if "values" in part.names), None)

    ring = lambda x: hopper.blocked((stages, hopper.SLOTS, x.shape[3]), x.dtype)  # noqa: E731
    of_rows = plgpu.SMEM((hopper.ROWS,), jnp.float32)
    weights = {name: getattr(part.entries, name).dtype for part in parts for name in part.weights}
    scratch: dict[str, Any] = {
        **hopper.rows_scratch(rows.dtype, operands, head_dim, columns),
        "keys": ring(stored.keys),
        "peak": of_rows,
        "den": of_rows,
        "rows_came": plgpu.Barrier(num_arrivals=operands.row_parts),
        **{name: plgpu.SMEM((stages, hopper.SLOTS), dtype) for name, dtype in weights.items()},
    }
    for part in parts:
        scratch[_keys_came(part)] = plgpu.Barrier(num_arrivals=1 + len(part.weights), num_barriers=stages)
    if not operands.direct:
        scratch["operands"] = hopper.blocked((operands.stored_parts, hopper.SLOTS, head_dim), operands.dtype, columns)
    if values is not None:
        # The sums leave through the memory of the keys, of which none is read any more then.
        scratch["keys"] = plgpu.RefUnion(ring(stored.keys), hopper.blocked((hopper.ROWS, head_dim), jnp.float32))
        scratch["values"] = ring(values)
        scratch["values_came"] = plgpu.Barrier(num_barriers=stages)
        scratch["weights"] = hopper.blocked(
            (operands.row_parts, hopper.ROWS, hopper.SLOTS), operands.dtype, swizzled_as=columns
        )
    if with_logits:
        scratch["logits"] = hopper.blocked((hopper.ROWS, hopper.SLOTS), jnp.float32)
    return scratch


def _keys_came(part: _Part) -> str:
    """The barrier that hears of a block's keys and weights."""
    return f"keys_came_with_{len(part.weights)}"


def _program(part: _Part, refs, scratch, place, split, splits, *, operands, stages):
    """One split of one head's slots of a part against all of its rows.

    Args:
        place: of the split among those of all parts.
    """
    batch, head = (lax.axis_index(name) for name in ("batch", "heads"))
    lowest, highest = refs["lowest"][batch], refs["highest"][batch]
    entries, names, weights = part.entries, part.names, part.weights
    rings = {name: scratch[name] for name in names}
    keys_came = scratch[_keys_came(part)]
    if "values" in scratch:
        rings["keys"], num_out = scratch["keys"]
    head_dim, padded = refs["rows"].shape[4], refs["rows"].shape[3]
    bits = _bits(entries)
    in_two = (hopper.ROWS, hopper.SLOTS)

    # The splits share the blocks between the bounds evenly.
    first = lax.div(lowest, hopper.SLOTS)
    there = jnp.where(highest > lowest, lax.div(highest + (hopper.SLOTS - 1), hopper.SLOTS) - first, 0)
    per_split = lax.div(there + (splits - 1), splits)
    begin = first + split * per_split
    steps = jnp.clip(there - split * per_split, 0, per_split)

    def fetch(step, *names):
        """Starts the copies of a step's blocks, which say on a barrier when they have come."""

        @pl.when(step < steps)
        def _():
            stage = lax.rem(step, stages)
            first_slot = (begin + step) * hopper.SLOTS
            slots = pl.ds(first_slot, hopper.SLOTS)
            # A block that ends behind a head's last slot holds the next one's first, which nobody adds to.
            of_row = pl.ds(head * entries.keys.shape[2] + first_slot, hopper.SLOTS)
            for name in names:
                came = scratch["values_came"] if name == "values" else keys_came
                source = refs[name].at[batch, head, slots] if name in WEIGHTS else refs[name].at[batch, of_row]
                plgpu.copy_gmem_to_smem(source, rings[name].at[stage], came.at[stage])

    hopper.fetch_rows(refs["rows"].at[batch, head], scratch)
    for early in range(stages):
        fetch(jnp.int32(early), *names)
    if "bounds" in refs:
        bounds = [hopper.load(refs["bounds"].at[batch, side], hopper.OF_ROWS, optimized=False) for side in (0, 1)]
    row_powers = hopper.await_rows(scratch)

    # A block that the matrix unit reads where it came to makes room for the next once it has been multiplied; what is
    # read in another way does so when that reading has been committed.
    late = weights if operands.direct else names

    def step(number, before):
        stage = lax.rem(number, stages)
        plgpu.barrier_wait(keys_came.at[stage])
        keys = hopper.as_operands(rings["keys"].at[stage], scratch.get("operands"), operands, bits["keys"])
        if not operands.direct:
            plgpu.commit_smem()
        scores = hopper.logits(scratch["rows"], keys, operands) * (head_dim**-0.5 * hopper.LOG2E)
        if operands.direct:
            fetch(number + stages, "keys")
        if row_powers is not None:
            scores = scores * hopper.of_rows(row_powers, in_two)

        given = {name: hopper.load(rings[name].at[stage], hopper.OF_SLOTS).astype(jnp.float32) for name in weights}
        if "key_scale" in given:
            scores = scores * hopper.of_slots(given["key_scale"], in_two)
        first_slot = (begin + number) * hopper.SLOTS
        slot = first_slot + plgpu.broadcasted_iota(jnp.int32, (hopper.SLOTS,), 0, layout=hopper.OF_SLOTS)
        inside = (slot >= lowest) & (slot < highest)

        def weighed(name):
            bias = jnp.maximum(given[name], EMPTY) * hopper.LOG2E if name in given else 0.0
            biased = scores + hopper.of_slots(jnp.where(inside, bias, EMPTY * hopper.LOG2E), in_two)
            if "bounds" not in refs:
                return biased
            slots = first_slot + plgpu.broadcasted_iota(jnp.int32, in_two, 1, layout=hopper.LAYOUT)
            begins, ends = (hopper.of_rows(bound, in_two) for bound in bounds)
            return jnp.where((slots >= begins) & (slots < ends), biased, EMPTY * hopper.LOG2E)

        num_scores = weighed("log_num")
        den_scores = weighed("log_den") if "log_den" in given else num_scores
        peak, fade, den, weight = hopper.weigh(before, num_scores, den_scores, entries.feeds)
        if "logits" in refs:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            scratch["logits"][...] = den_scores * (1 / hopper.LOG2E)
        if "values" in names:
            if "value_scale" in given:
                weight = weight * hopper.of_slots(given["value_scale"], in_two)
            powers = hopper.put_weights(scratch["weights"], weight, operands)
            plgpu.barrier_wait(scratch["values_came"].at[stage])
            values = hopper.as_operands(rings["values"].at[stage], scratch.get("operands"), operands, bits["values"])
        plgpu.commit_smem()
        fetch(number + stages, *late)
        if "logits" in refs:
            plgpu.copy_smem_to_gmem(
                scratch["logits"].at[pl.ds(0, padded)],
                refs["logits"].at[batch, head, :, pl.ds(first_slot, hopper.SLOTS)],
            )
        num = before.num
        if "values" in names:
            num = hopper.add_values(num, fade, scratch["weights"], values, operands, powers)
            if operands.direct:
                fetch(number + stages, "values")
        return hopper.Running(peak, den, num)

    sums = lax.fori_loop(0, steps, step, hopper.Running.empty(head_dim if "values" in names else None))
    scratch["peak"][...] = sums.peak * (1 / hopper.LOG2E)
    scratch["den"][...] = sums.den
    if "values" in names:
        hopper.store_columns(num_out, sums.num)
    plgpu.commit_smem()
    for name in ("peak", "den"):
        plgpu.copy_smem_to_gmem(scratch[name], refs[name].at[batch, head, place])
    if "values" in names:
        plgpu.copy_smem_to_gmem(num_out.at[pl.ds(0, padded)], refs["num"].at[batch, head, place])
    plgpu.wait_smem_to_gmem(0)
