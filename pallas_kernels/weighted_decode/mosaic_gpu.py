"""The fused cluster-attention loop as a Pallas kernel for Hopper GPUs (Mosaic GPU), in the way of
`pallas_kernels.hopper`."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import hopper
from pallas_kernels.batching import fold_mapped_axes
from pallas_kernels.weighted_decode.base import EMPTY, Entries, Partials, merge_splits, occupied, refuse_unknown
from pallas_kernels.weighted_decode.reference import MANY_ROWS

# Weights of slots, each an array [B, H, S] that is read where it is given.
WEIGHTS = ("log_num", "log_den", "key_scale", "value_scale")


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


def check(rows: Float[Array, "B H R D"], entries: Entries, interpret: Any = False) -> None:
    """Raises a NotImplementedError for what the kernel cannot do, with the reason."""
    refuse_unknown(entries)
    if not interpret:
        hopper.check_device()
    if rows.shape[2] >= MANY_ROWS:
        raise NotImplementedError(f"{rows.shape[2]} rows: from {MANY_ROWS} on products, not reading, take the time")
    packed = [name for name, bits in _bits(entries).items() if bits is not None]
    hopper.check_types(*packed, rows=rows, keys=entries.keys, values=entries.values)
    hopper.check_head_dim(rows.shape[3])
    keys, values = entries.keys.dtype, entries.keys.dtype if entries.values is None else entries.values.dtype
    if keys != values and not keys.itemsize == values.itemsize == 1:
        raise NotImplementedError(f"keys are {keys.name}, values {values.name}")
    if entries.keys.shape[2] % 8:
        raise NotImplementedError(f"{entries.keys.shape[2]} slots: the copy engine takes multiples of 8")
    names = _names(entries, with_logits=True)
    hopper.roomiest(functools.partial(_scratch, names, rows, entries, True))


def weighted_decode(
    rows: Float[Array, "B H R D"],
    entries: Entries,
    config: GpuConfig | None = None,
    interpret: Any = False,
    *,
    logits: bool = False,
) -> Partials:
    """`reference.weighted_decode` in one pass over the occupied blocks of slots.

    Every kv head's rows share one read of its keys and values. Blocks outside the occupied range of a row of the batch
    are not read, and the splits share those inside evenly.
    """
    run = functools.partial(_weighted_decode, config=config or GpuConfig(), interpret=interpret, with_logits=logits)
    return fold_mapped_axes(run)(rows, entries)


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


def _weighted_decode(
    rows: Float[Array, "B H R D"], entries: Entries, *, config: GpuConfig, interpret: Any, with_logits: bool
) -> Partials:
    batch, heads, count, head_dim = rows.shape
    slots = entries.keys.shape[2]
    names = _names(entries, with_logits)
    operands = hopper.Operands.of(rows.dtype, entries.keys.dtype)
    scratch_of = functools.partial(_scratch, names, rows, entries, with_logits)
    stages, places = hopper.roomiest(scratch_of, config.stages)
    blocks = pl.cdiv(slots, hopper.SLOTS)
    splits = min(config.splits or hopper.even_splits(batch * heads, blocks, places), blocks)

    start, stop, lowest, highest = occupied(entries)
    arrays: dict[str, Any] = {"rows": hopper.row_parts(rows, operands), "lowest": lowest, "highest": highest}
    arrays |= {name: getattr(entries, name) for name in names}
    if start.ndim == 2 or stop.ndim == 2:
        wide = lambda x: jnp.broadcast_to(x if x.ndim == 2 else x[:, None], (batch, count))  # noqa: E731
        bounds = jnp.stack([wide(start), wide(stop)], axis=1)
        arrays["bounds"] = jnp.pad(bounds, ((0, 0), (0, 0), (0, hopper.ROWS - count)))

    padded = arrays["rows"].shape[3]
    of_rows = jax.ShapeDtypeStruct((batch, heads, splits, hopper.ROWS), jnp.float32)
    results: dict[str, Any] = {"peak": of_rows, "den": of_rows}
    if "values" in names:
        results["num"] = jax.ShapeDtypeStruct((batch, heads, splits, padded, head_dim), jnp.float32)
    if with_logits:
        results["logits"] = jax.ShapeDtypeStruct((batch, heads, padded, blocks * hopper.SLOTS), jnp.float32)

    def weighted_decode(*refs, **scratch):
        named = dict(zip((*arrays, *results), refs, strict=True))
        _kernel(named, scratch, names=names, operands=operands, entries=entries, splits=splits, stages=stages)

    found = plgpu.kernel(
        weighted_decode,
        out_type=list(results.values()),
        scratch_types=scratch_of(stages),
        grid=(splits, heads, batch),
        grid_names=("splits", "heads", "batch"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        **hopper.cost(
            flops=2 * batch * heads * count * slots * head_dim * (2 if "values" in names else 1),
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in (*arrays.values(), *results.values())),
            transcendentals=batch * heads * count * slots,
        ),
    )(*arrays.values())
    found = dict(zip(results, found, strict=True))
    num = found["num"][..., :count, :] if "num" in found else jnp.zeros((batch, heads, splits, count, head_dim))
    sums = merge_splits(Partials(found["peak"][..., :count], num, found["den"][..., :count]))
    if not with_logits:
        return sums
    # Blocks that are not read are not written either.
    slot = jnp.arange(slots, dtype=jnp.int32)
    inside = (slot >= lowest[:, None]) & (slot < highest[:, None])
    return sums._replace(logits=jnp.where(inside[:, None, None], found["logits"][:, :, :count, :slots], EMPTY))


def _scratch(names: tuple[str, ...], rows: Array, entries: Entries, with_logits: bool, stages: int) -> dict[str, Any]:
    """What a program keeps in shared memory, under the names of the arrays that it holds parts of."""
    head_dim = rows.shape[3]
    operands = hopper.Operands.of(rows.dtype, entries.keys.dtype)
    columns = hopper.operand_columns(head_dim, *_bits(entries).values())

    rings = {
        name: hopper.blocked((stages, hopper.SLOTS, stored.shape[3]), stored.dtype)
        for name, stored in (("keys", entries.keys), ("values", entries.values))
        if stored is not None
    }
    of_rows = plgpu.SMEM((hopper.ROWS,), jnp.float32)
    weights = [name for name in WEIGHTS if name in names]
    scratch: dict[str, Any] = {
        "rows": hopper.blocked((operands.row_parts, hopper.ROWS, head_dim), operands.dtype, columns),
        "keys": rings["keys"],
        "peak": of_rows,
        "den": of_rows,
        "rows_came": plgpu.Barrier(num_arrivals=operands.row_parts),
        "keys_came": plgpu.Barrier(num_arrivals=1 + len(weights), num_barriers=stages),
        **{name: plgpu.SMEM((stages, hopper.SLOTS), getattr(entries, name).dtype) for name in weights},
    }
    if not operands.direct:
        scratch["operands"] = hopper.blocked((operands.stored_parts, hopper.SLOTS, head_dim), operands.dtype, columns)
    if "values" in names:
        # The sums leave through the memory of the keys, of which none is read any more then.
        scratch["keys"] = plgpu.RefUnion(rings["keys"], hopper.blocked((hopper.ROWS, head_dim), jnp.float32))
        scratch["values"] = rings["values"]
        scratch["values_came"] = plgpu.Barrier(num_barriers=stages)
        scratch["weights"] = hopper.blocked(
            (operands.row_parts, hopper.ROWS, hopper.SLOTS), operands.dtype, swizzled_as=columns
        )
    if with_logits:
        scratch["logits"] = hopper.blocked((hopper.ROWS, hopper.SLOTS), jnp.float32)
    return scratch


def _kernel(refs, scratch, *, names, operands, entries, splits, stages):
    """One split of one head's slots against all of its rows."""
    batch, head, split = (lax.axis_index(name) for name in ("batch", "heads", "splits"))
    lowest, highest = refs["lowest"][batch], refs["highest"][batch]
    rings = {name: scratch[name] for name in names}
    if "values" in names:
        rings["keys"], num_out = scratch["keys"]
    head_dim, padded = refs["rows"].shape[4], refs["rows"].shape[3]
    bits = _bits(entries)
    weights = [name for name in WEIGHTS if name in names]
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
            slots = pl.ds((begin + step) * hopper.SLOTS, hopper.SLOTS)
            for name in names:
                came = scratch["values_came" if name == "values" else "keys_came"]
                plgpu.copy_gmem_to_smem(refs[name].at[batch, head, slots], rings[name].at[stage], came.at[stage])

    for part in range(operands.row_parts):
        plgpu.copy_gmem_to_smem(
            refs["rows"].at[batch, head, part], scratch["rows"].at[part, pl.ds(0, padded)], scratch["rows_came"]
        )
    for early in range(stages):
        fetch(jnp.int32(early), *names)
    if "bounds" in refs:
        bounds = [hopper.load(refs["bounds"].at[batch, side], hopper.OF_ROWS, optimized=False) for side in (0, 1)]
    plgpu.barrier_wait(scratch["rows_came"])

    # A block that the matrix unit reads where it came to makes room for the next once it has been multiplied; what is
    # read in another way does so when that reading has been committed.
    late = weights if operands.direct else names

    def step(number, before):
        stage = lax.rem(number, stages)
        plgpu.barrier_wait(scratch["keys_came"].at[stage])
        keys = hopper.as_operands(rings["keys"].at[stage], scratch.get("operands"), operands, bits["keys"])
        if not operands.direct:
            plgpu.commit_smem()
        scores = hopper.logits(scratch["rows"], keys, operands) * (head_dim**-0.5 * hopper.LOG2E)
        if operands.direct:
            fetch(number + stages, "keys")

        given = {name: hopper.load(rings[name].at[stage], hopper.OF_SLOTS).astype(jnp.float32) for name in weights}
        if "key_scale" in given:
            scores = scores * hopper.of_slots(given["key_scale"], in_two)
        place = (begin + number) * hopper.SLOTS
        slot = place + plgpu.broadcasted_iota(jnp.int32, (hopper.SLOTS,), 0, layout=hopper.OF_SLOTS)
        inside = (slot >= lowest) & (slot < highest)

        def weighed(name):
            bias = jnp.maximum(given[name], EMPTY) * hopper.LOG2E if name in given else 0.0
            biased = scores + hopper.of_slots(jnp.where(inside, bias, EMPTY * hopper.LOG2E), in_two)
            if "bounds" not in refs:
                return biased
            slots = place + plgpu.broadcasted_iota(jnp.int32, in_two, 1, layout=hopper.LAYOUT)
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
            for part, part_of_weight in enumerate(hopper.parts(weight, operands.row_parts, operands.dtype)):
                scratch["weights"][part] = part_of_weight
            plgpu.barrier_wait(scratch["values_came"].at[stage])
            values = hopper.as_operands(rings["values"].at[stage], scratch.get("operands"), operands, bits["values"])
        plgpu.commit_smem()
        fetch(number + stages, *late)
        if "logits" in refs:
            plgpu.copy_smem_to_gmem(
                scratch["logits"].at[pl.ds(0, padded)], refs["logits"].at[batch, head, :, pl.ds(place, hopper.SLOTS)]
            )
        num = before.num
        if "values" in names:
            num = hopper.add_values(num, fade, scratch["weights"], values, operands)
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
        plgpu.copy_smem_to_gmem(scratch[name], refs[name].at[batch, head, split])
    if "values" in names:
        plgpu.copy_smem_to_gmem(num_out.at[pl.ds(0, padded)], refs["num"].at[batch, head, split])
    plgpu.wait_smem_to_gmem(0)
