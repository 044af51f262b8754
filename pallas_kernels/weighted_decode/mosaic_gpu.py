"""`weighted_decode` as a Pallas kernel for Hopper GPUs (Mosaic GPU); see `pallas_kernels.hopper`."""

import functools
import itertools
import operator
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
from pallas_kernels.hopper import GpuConfig
from pallas_kernels.partials import MASK_VALUE, Partials, merge_partials, merge_splits
from pallas_kernels.weighted_decode import slots_as_rows
from pallas_kernels.weighted_decode.entries import (
    PER_SLOT,
    SLOT_TILE,
    Entries,
    Ranges,
    check_kernel_support,
    read_ranges,
)
from pallas_kernels.weighted_decode.gpu_block import Block
from pallas_kernels.weighted_decode.queries_as_rows import QueriesAsRows
from pallas_kernels.weighted_decode.slots_as_rows import SlotsAsRows

Form = SlotsAsRows | QueriesAsRows


def check(queries: Float[Array, "B H R D"], entries: Entries, *, interpret: Any, **_options: Any) -> None:
    """Checks that the kernel supports one store of `weighted_decode`.

    Args:
        queries: The R queries of each KV head.
        interpret: Whether the kernel is interpreted, on any device.

    Raises:
        NotImplementedError: If the kernel does not support them.
    """
    check_kernel_support(queries, entries.logit_cap, entries.value_dim)
    if not interpret:
        hopper.check_device()
    packed = [name for name, bits in entries.bits.items() if bits is not None]
    stored = {name: x for name, x in entries.slot_arrays.items() if name in ("keys", "values")}
    keys, values = stored["keys"], stored.get("values", stored["keys"])
    hopper.check_dtypes(*packed, queries=queries, **stored)
    hopper.check_head_dim(queries.shape[3])
    if keys.dtype != values.dtype and not keys.dtype.itemsize == values.dtype.itemsize == 1:
        raise NotImplementedError(f"keys are {keys.dtype.name} and values {values.dtype.name}")
    # A block is copied from slot `head * slots + first` of all heads, and the copy engine addresses tiles of slots. A
    # block that starts inside a tile arrives shifted, or does not lower, depending on JAX's version.
    if entries.slots % SLOT_TILE:
        raise NotImplementedError(
            f"a head has {entries.slots} slots; the copy engine needs a multiple of {SLOT_TILE} slots per head"
        )
    stores = [_Store(queries, entries)]
    form = _choose_form(stores, interpret)
    hopper.choose_stages(functools.partial(_scratch, form, stores, True), max_programs=form.max_programs)


def weighted_decode(
    parts: Sequence[tuple[Any, ...]], *, logits: bool, config: GpuConfig, interpret: Any
) -> list[Partials]:
    """`xla.weighted_decode` of several parts, in one pass over the blocks of slots that are read.

    Stores with the same storage format share a launch. The queries of a KV head share one read of its keys and values.
    Blocks outside the range of a sequence are not read; the splits of a head share the others evenly.

    Args:
        parts: Tuples (queries, *stores) with entries from `entries.prepare`.
        logits: Whether to return logits; every part then has one store.
        config: How to divide the work.
        interpret: Passed to `plgpu.kernel`.

    Returns:
        The partials of every part.
    """
    run = functools.partial(_launch, config=config, interpret=interpret, with_logits=logits)
    launches: dict[Any, dict[int, list[Entries]]] = {}
    for index, (queries, *stores) in enumerate(parts):
        for entries in stores:
            launches.setdefault(_storage_format(queries, entries), {}).setdefault(index, []).append(entries)
    results: list[list[Partials]] = [[] for _ in parts]
    for launch in launches.values():
        launch_parts = [(parts[index][0], *stores) for index, stores in launch.items()]
        for index, partials in zip(launch, fold_mapped_axes(run)(*launch_parts), strict=True):
            results[index].append(partials)
    return [merge_partials(*partials) for partials in results]


def _storage_format(queries: Float[Array, "B H R D"], entries: Entries) -> Any:
    """Returns the properties that stores have in common if they share the scratch memory of a program."""
    arrays, bits = entries.slot_arrays, entries.bits
    values, value_bits = ("keys", bits["keys"]) if entries.values is None else ("values", bits["values"])
    scales = [arrays[name].dtype.name for name in ("key_scale", "value_scale") if name in arrays]
    if len(scales) == 1:  # such a store shares the memory of stores whose two scales have this dtype
        scales *= 2
    dtypes = (queries.dtype.name, arrays["keys"].dtype.name, arrays[values].dtype.name, *scales)
    batch, _, count, head_dim = queries.shape
    return (batch, count, head_dim), dtypes, bits["keys"], value_bits


class _Store(NamedTuple):
    """What some of a launch's programs read; `first_head` counts the heads of the parts before."""

    queries: Float[Array, "B H R D"]
    entries: Entries
    first_head: int = 0

    @property
    def weights(self) -> list[str]:
        """The names of the arrays [B, H, S] that are read."""
        return [name for name in PER_SLOT if name in self.entries.slot_arrays]

    @property
    def names(self) -> list[str]:
        """The names of the arrays that are read slot by slot."""
        return ["keys", *(() if self.entries.values is None else ("values",)), *self.weights]


def _choose_form(stores: Sequence[_Store], interpret: Any) -> Form:
    """Returns how the matrix unit multiplies the queries and entries of a launch, whose stores have one format."""
    queries, entries = stores[0].queries, stores[0].entries
    _, _, count, head_dim = queries.shape
    with_values = next((store.entries for store in stores if store.entries.values is not None), None)
    keys, values = entries.slot_arrays["keys"], None if with_values is None else with_values.slot_arrays["values"]
    bits = {"keys": entries.bits["keys"], "values": None if with_values is None else with_values.bits["values"]}
    formats = bits["keys"], bits["values"], with_values is not None
    if slots_as_rows.is_supported(queries, keys, values, bits):
        return SlotsAsRows(count, head_dim, *formats, interpret)
    operands = hopper.Operands.create(queries.dtype, keys.dtype)
    columns = hopper.operand_columns(head_dim, *bits.values())
    return QueriesAsRows(queries.dtype, count, head_dim, operands, columns, *formats)


def _launch(*parts: tuple[Any, ...], config: GpuConfig, interpret: Any, with_logits: bool) -> list[Partials]:
    """Returns the partials of parts that share a launch, with one program per split of every head of every store."""
    first_heads = list(itertools.accumulate((queries.shape[1] for queries, *_ in parts), initial=0))
    stores = [
        _Store(queries, entries, first_head)
        for first_head, (queries, *own_stores) in zip(first_heads, parts, strict=False)
        for entries in own_stores
    ]
    batch, _, count, head_dim = stores[0].queries.shape
    form = _choose_form(stores, interpret)
    scratch_of = functools.partial(_scratch, form, stores, with_logits)
    stages, programs = hopper.choose_stages(scratch_of, config.stages, form.max_programs)
    blocks = [pl.cdiv(store.entries.slots, form.slots) for store in stores]
    heads = [store.queries.shape[1] for store in stores]
    if config.splits is None:
        splits = hopper.balance_splits([batch * count for count in heads], blocks, programs)
    else:
        splits = [min(config.splits, count) for count in blocks]
    # The programs of each store follow the programs of the store before.
    starts = list(itertools.accumulate(map(operator.mul, heads, splits), initial=0))
    ranges = [read_ranges(store.entries) for store in stores]
    queries = form.query_input(jnp.concatenate([part_queries for part_queries, *_ in parts], axis=1))
    inputs = [_inputs(form, store, store_ranges) for store, store_ranges in zip(stores, ranges, strict=True)]
    outputs = form.output_shapes(batch, starts[-1])
    logits_out = [form.logits_shape(batch, *sizes) for sizes in zip(heads, blocks, strict=True) if with_logits]

    def weighted_decode(*refs, **scratch):
        next_ref = iter(refs)
        shared_refs = {"queries": next(next_ref)}
        input_refs = [{name: next(next_ref) for name in arrays} for arrays in inputs]
        shared_refs |= {name: next(next_ref) for name in outputs}
        launch_program = lax.axis_index("programs")
        for index, (store, store_refs) in enumerate(zip(stores, input_refs, strict=True)):
            store_refs |= shared_refs | ({"logits": next(next_ref)} if with_logits else {})
            program = functools.partial(
                _program, form, store, store_refs, scratch, launch_program, launch_program - starts[index],
                splits[index], stages,
            )  # fmt: skip
            if len(stores) == 1:
                program()
            else:
                is_mine = (launch_program >= starts[index]) & (launch_program < starts[index + 1])
                pl.when(is_mine)(program)

    slots = sum(count * store.entries.slots for count, store in zip(heads, stores, strict=True))
    results = hopper.launch(
        weighted_decode, [queries, *(x for arrays in inputs for x in arrays.values())],
        [*outputs.values(), *logits_out],
        scratch_of(stages), grid={"programs": starts[-1], "batch": batch}, interpret=interpret,
        flops=2 * batch * count * slots * head_dim * (1 + form.has_values),
        transcendentals=batch * count * slots, approx_math=True,
    )  # fmt: skip
    named = dict(zip(outputs, results, strict=False))
    if form.has_values and not all(is_written := [store.entries.values is not None for store in stores]):
        program_is_written = np.repeat(is_written, np.diff(starts))[:, None, None]
        named["numerator"] = jnp.where(program_is_written, named["numerator"], 0.0)
    programs_of_heads: list[list[int]] = [[] for _ in range(first_heads[-1])]
    for store, start, store_heads, per_head in zip(stores, starts, heads, splits, strict=False):
        for head in range(store_heads):
            first = start + head * per_head
            programs_of_heads[store.first_head + head] += range(first, first + per_head)
    partials = _merge_programs(form, named, programs_of_heads)
    merged = [jax.tree.map(lambda x, own=slice(*own): x[:, own], partials) for own in itertools.pairwise(first_heads)]
    if not with_logits:
        return merged

    def mask_logits(store: _Store, store_ranges: Ranges, logits: Array) -> Array:
        """Returns the logits of a store; blocks outside of `store_ranges` were not written."""
        slot = jnp.arange(store.entries.slots, dtype=jnp.int32)
        is_read = (slot >= store_ranges.lowest[:, None]) & (slot < store_ranges.highest[:, None])
        return jnp.where(is_read[:, None, None], form.logits(logits)[..., : len(slot)], MASK_VALUE)

    return [
        partials._replace(logits=mask_logits(store, store_ranges, logits))
        for partials, store, store_ranges, logits in zip(merged, stores, ranges, results[len(outputs) :], strict=True)
    ]


def _merge_programs(form: Form, outputs: dict[str, Array], programs: Sequence[Sequence[int]]) -> Partials:
    """Merges the partials of a launch's programs for all heads together: every operation of XLA is another launch.

    Args:
        form: How the programs multiplied.
        outputs: The results of the programs, [B, P, ...], by name.

    Returns:
        The partials of the heads.
    """
    most = max(map(len, programs))
    table = np.array([[*one, *(-1,) * (most - len(one))] for one in programs])
    if np.array_equal(table.ravel(), np.arange(table.size)):
        splits = {name: x.reshape(x.shape[0], *table.shape, *x.shape[2:]) for name, x in outputs.items()}
    else:
        splits = {name: x[:, table] for name, x in outputs.items()}
        # A head with fewer programs repeats one, without weight.
        splits["max"] = jnp.where(table[..., None] >= 0, splits["max"], MASK_VALUE)
    return merge_splits(form.partials(**splits))


def _inputs(form: Form, store: _Store, ranges: Ranges) -> dict[str, Array]:
    """Returns the arrays that a store's programs read, except for the queries."""
    batch, _, count, _ = store.queries.shape
    arrays = {"lowest": ranges.lowest, "highest": ranges.highest}
    for name in store.names:
        array = store.entries.slot_arrays[name]
        # The copy engine needs rows of a multiple of 16 bytes, and heads in tiles of `SLOT_TILE` slots.
        if name in PER_SLOT:
            array = jnp.pad(array, ((0, 0), (0, 0), (0, -array.shape[2] % (16 // array.dtype.itemsize))))
        else:
            array = array.reshape(batch, -1, array.shape[3]).view(form.stored_dtype(array.dtype))
        arrays[name] = array
    if ranges.start.ndim == 2 or ranges.stop.ndim == 2:
        wide = [jnp.broadcast_to(x if x.ndim == 2 else x[:, None], (batch, count)) for x in ranges[:2]]
        arrays["bounds"] = jnp.pad(jnp.stack(wide, axis=1), ((0, 0), (0, 0), (0, form.bounds_width - count)))
    return arrays


def _scratch(form: Form, stores: Sequence[_Store], with_logits: bool, stages: int) -> dict[str, Any]:
    """Returns the shared memory of a program of any of the stores, named after the arrays whose blocks it holds."""
    values = next((store.entries.slot_arrays["values"] for store in stores if store.entries.values is not None), None)

    def ring(x: Array) -> Any:
        return hopper.blocked((stages, form.slots, x.shape[3]), form.stored_dtype(x.dtype))

    keys = ring(stores[0].entries.slot_arrays["keys"])
    weights = {name: store.entries.slot_arrays[name].dtype for store in stores for name in store.weights}
    scratch = {
        **form.scratch(with_logits),
        "keys": keys,
        **{name: plgpu.SMEM((stages, form.slots), dtype) for name, dtype in weights.items()},
    }
    for store in stores:
        scratch[_key_barrier(store)] = plgpu.Barrier(num_arrivals=1 + len(store.weights), num_barriers=stages)
    if values is not None:
        # The numerator is written through the memory of the keys, whose reads are complete by then.
        scratch["keys"] = plgpu.RefUnion(keys, form.numerator_memory())
        scratch["values"] = ring(values)
        scratch["value_barrier"] = plgpu.Barrier(num_barriers=stages)
    return scratch


def _key_barrier(store: _Store) -> str:
    """Returns the name of the barrier at which a block's keys and weights arrive."""
    return f"key_barrier_{len(store.weights)}"


def _program(form: Form, store: _Store, refs, scratch, launch_program, program, splits: int, stages: int) -> None:
    """Attends with all queries of a head to one split of its slots.

    Args:
        form: How blocks are multiplied.
        store: The queries and entries that the program reads.
        refs: Arrays in global memory, by name.
        scratch: Arrays in shared memory, by name.
        program: The index of the program in its store.
        splits: The number of splits of each head of this store.
        stages: Blocks that are in flight or in use at a time.
    """
    batch, head, split = lax.axis_index("batch"), lax.div(program, splits), lax.rem(program, splits)
    entries, names = store.entries, store.names
    lowest, highest = jnp.maximum(refs["lowest"][batch], 0), jnp.minimum(refs["highest"][batch], entries.slots)
    rings = {name: scratch[name] for name in names}
    key_barrier, numerator_memory = scratch[_key_barrier(store)], None
    if "values" in scratch:
        rings["keys"], numerator_memory = scratch["keys"]

    # The splits share the blocks of the range evenly.
    first = lax.div(lowest, form.slots)
    blocks = jnp.where(highest > lowest, lax.div(highest + (form.slots - 1), form.slots) - first, 0)
    per_split = lax.div(blocks + (splits - 1), splits)
    begin = first + split * per_split
    steps = jnp.clip(blocks - split * per_split, 0, per_split)

    def fetch(step, fetched=names):
        """Starts the copies of a step's blocks of the arrays `fetched`."""

        @pl.when(step < steps)
        def _():
            stage = lax.rem(step, stages)
            first_slot = (begin + step) * form.slots
            slots = pl.ds(first_slot, form.slots)
            # A block that exceeds a head's last slot contains the next head's first slots, which are masked.
            rows = pl.ds(head * entries.slots + first_slot, form.slots)
            for name in fetched:
                barrier = scratch["value_barrier"] if name == "values" else key_barrier
                source = refs[name].at[batch, head, slots] if name in PER_SLOT else refs[name].at[batch, rows]
                plgpu.copy_gmem_to_smem(source, rings[name].at[stage], barrier.at[stage])

    form.fetch_queries(refs["queries"].at[batch, store.first_head + head], scratch)
    for early in range(stages):
        fetch(jnp.int32(early))
    bounds = None
    if "bounds" in refs:
        bounds = [form.load_bounds(refs["bounds"].at[batch, side]) for side in (0, 1)]
    queries = form.await_queries(scratch)
    has_values = "values" in names

    def process_step(index, before):
        """Returns the partials `before` with the block of step `index` added."""
        stage = lax.rem(index, stages)
        first_slot = (begin + index) * form.slots
        block = Block(
            scratch, queries, bounds, rings["keys"].at[stage], rings["values"].at[stage] if has_values else None,
            {name: rings[name].at[stage] for name in store.weights}, key_barrier.at[stage],
            scratch["value_barrier"].at[stage] if has_values else None,
            form.logits_of(refs["logits"].at[batch, head], first_slot) if "logits" in refs else None,
            first_slot, lowest, highest, functools.partial(fetch, index + stages),
        )  # fmt: skip
        return form.attend(before, block)

    partials = lax.fori_loop(0, steps, process_step, form.empty(names))
    index = batch, launch_program
    form.write(partials, scratch, refs, index, numerator_memory if has_values else None)
