"""`weighted_decode` as a Pallas kernel for Hopper GPUs (Mosaic GPU); see `pallas_kernels.hopper`."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import hopper
from pallas_kernels.batching import fold_mapped_axes
from pallas_kernels.hopper import GpuConfig
from pallas_kernels.partials import MASK_VALUE, Partials, merge_partials, merge_splits
from pallas_kernels.weighted_decode.entries import (
    PER_SLOT,
    SLOT_TILE,
    Entries,
    Ranges,
    check_kernel_support,
    read_ranges,
)


def check(queries: Float[Array, "B H R D"], entries: Entries, *, interpret: Any, **_options: Any) -> None:
    """Checks that the kernel supports one store of `weighted_decode`.

    Args:
        queries: The R queries of each KV head.
        entries: The entries of the store.
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
    hopper.choose_stages(functools.partial(_scratch, [_Store(queries, entries)], True))


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
    scales = {arrays[name].dtype.name for name in ("key_scale", "value_scale") if name in arrays}
    dtypes = (queries.dtype.name, arrays["keys"].dtype.name, arrays[values].dtype.name, *sorted(scales))
    return queries.shape, dtypes, bits["keys"], value_bits


class _Store(NamedTuple):
    """What some of a launch's programs read."""

    queries: Float[Array, "B H R D"]
    entries: Entries

    @property
    def weights(self) -> list[str]:
        """The names of the arrays [B, H, S] that are read."""
        return [name for name in PER_SLOT if name in self.entries.slot_arrays]

    @property
    def names(self) -> list[str]:
        """The names of the arrays that are read slot by slot."""
        return ["keys", *(() if self.entries.values is None else ("values",)), *self.weights]

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.entries.slots, hopper.SLOTS)


def _launch(*parts: tuple[Any, ...], config: GpuConfig, interpret: Any, with_logits: bool) -> list[Partials]:
    """Returns the partials of parts that share a launch, with one program per split of every head of every store."""
    stores = [_Store(queries, entries) for queries, *own_stores in parts for entries in own_stores]
    batch, heads, count, head_dim = stores[0].queries.shape
    operands = hopper.Operands.create(stores[0].queries.dtype, stores[0].entries.slot_arrays["keys"].dtype)
    scratch_of = functools.partial(_scratch, stores, with_logits)
    stages, programs = hopper.choose_stages(scratch_of, config.stages)
    if config.splits is None:
        splits = hopper.balance_splits(batch * heads, [store.blocks for store in stores], programs)
    else:
        splits = [min(config.splits, store.blocks) for store in stores]
    ranges = [read_ranges(store.entries) for store in stores]
    inputs = [_inputs(store, store_ranges, operands) for store, store_ranges in zip(stores, ranges, strict=True)]
    padded = inputs[0]["queries"].shape[3]

    has_values = any(store.entries.values is not None for store in stores)
    outputs = hopper.partials_shapes(batch, heads, sum(splits), padded, head_dim if has_values else None)
    widths = [store.blocks * hopper.SLOTS for store in stores if with_logits]
    logits_out = [jax.ShapeDtypeStruct((batch, heads, padded, width), jnp.float32) for width in widths]

    def weighted_decode(*refs, **scratch):
        next_ref = iter(refs)
        input_refs = [{name: next(next_ref) for name in arrays} for arrays in inputs]
        output_refs = {name: next(next_ref) for name in outputs}
        launch_split, first = lax.axis_index("splits"), 0
        for store, store_refs, store_splits in zip(stores, input_refs, splits, strict=True):
            store_refs |= output_refs | ({"logits": next(next_ref)} if with_logits else {})
            program = functools.partial(
                _program, store, store_refs, scratch, launch_split, launch_split - first, store_splits,
                operands=operands, stages=stages,
            )  # fmt: skip
            if len(stores) == 1:
                program()
            else:
                pl.when((launch_split >= first) & (launch_split < first + store_splits))(program)
            first += store_splits

    slots = sum(store.entries.slots for store in stores)
    results = hopper.launch(
        weighted_decode, [x for arrays in inputs for x in arrays.values()], [*outputs.values(), *logits_out],
        scratch_of(stages), grid={"splits": sum(splits), "heads": heads, "batch": batch}, interpret=interpret,
        flops=2 * batch * heads * count * slots * head_dim * (1 + has_values),
        transcendentals=batch * heads * count * slots, approx_math=True,
    )  # fmt: skip
    maximum, denominator = results[0][..., :count], results[1][..., :count]
    numerator = results[2][..., :count, :] if has_values else jnp.zeros((*maximum.shape, head_dim))
    launch_partials = Partials(maximum, numerator, denominator)
    store_partials, first = [], 0
    for store, store_splits in zip(stores, splits, strict=True):
        split_range = slice(first, first := first + store_splits)
        partials = merge_splits(jax.tree.map(lambda x, at=split_range: x[:, :, at], launch_partials))
        if store.entries.values is None:  # its numerator was not written
            partials = partials._replace(numerator=jnp.zeros_like(partials.numerator))
        store_partials.append(partials)
    next_partials = iter(store_partials)
    merged = [merge_partials(*(next(next_partials) for _ in own_stores)) for _, *own_stores in parts]
    if not with_logits:
        return merged

    def mask_logits(store: _Store, store_ranges: Ranges, logits: Array) -> Array:
        """Returns the logits of a store; blocks outside of `store_ranges` were not written."""
        slot = jnp.arange(store.entries.slots, dtype=jnp.int32)
        is_read = (slot >= store_ranges.lowest[:, None]) & (slot < store_ranges.highest[:, None])
        return jnp.where(is_read[:, None, None], logits[:, :, :count, : len(slot)], MASK_VALUE)

    return [
        partials._replace(logits=mask_logits(store, store_ranges, logits))
        for partials, store, store_ranges, logits in zip(merged, stores, ranges, results[len(outputs) :], strict=True)
    ]


def _inputs(store: _Store, ranges: Ranges, operands: Any) -> dict[str, Array]:
    """Returns the arrays that a store's programs read."""
    batch, _, count, _ = store.queries.shape
    queries = hopper.query_operands(store.queries, operands)
    arrays = {"queries": queries, "lowest": ranges.lowest, "highest": ranges.highest}
    for name in store.names:
        array = store.entries.slot_arrays[name]
        # The copy engine needs rows of a multiple of 16 bytes, and heads in tiles of `SLOT_TILE` slots.
        if name in PER_SLOT:
            array = jnp.pad(array, ((0, 0), (0, 0), (0, -array.shape[2] % (16 // array.dtype.itemsize))))
        else:
            array = array.reshape(batch, -1, array.shape[3])
        arrays[name] = array
    if ranges.start.ndim == 2 or ranges.stop.ndim == 2:
        wide = [jnp.broadcast_to(x if x.ndim == 2 else x[:, None], (batch, count)) for x in ranges[:2]]
        arrays["bounds"] = jnp.pad(jnp.stack(wide, axis=1), ((0, 0), (0, 0), (0, hopper.ROWS - count)))
    return arrays


def _scratch(stores: Sequence[_Store], with_logits: bool, stages: int) -> dict[str, Any]:
    """Returns the shared memory of a program of any of the stores, named after the arrays whose blocks it holds."""
    queries, entries = stores[0].queries, stores[0].entries
    head_dim, keys = queries.shape[3], entries.slot_arrays["keys"]
    operands = hopper.Operands.create(queries.dtype, keys.dtype)
    columns = hopper.operand_columns(head_dim, *entries.bits.values())
    values = next((store.entries.slot_arrays["values"] for store in stores if store.entries.values is not None), None)

    def ring(x: Array) -> Any:
        return hopper.blocked((stages, hopper.SLOTS, x.shape[3]), x.dtype)

    weights = {name: store.entries.slot_arrays[name].dtype for store in stores for name in store.weights}
    scratch = {
        **hopper.attention_scratch(queries.dtype, operands, head_dim, columns, has_values=values is not None),
        "keys": ring(keys),
        **{name: plgpu.SMEM((stages, hopper.SLOTS), dtype) for name, dtype in weights.items()},
    }
    for store in stores:
        scratch[_key_barrier(store)] = plgpu.Barrier(num_arrivals=1 + len(store.weights), num_barriers=stages)
    if values is not None:
        # The numerator is written through the memory of the keys, whose reads are complete by then.
        scratch["keys"] = plgpu.RefUnion(ring(keys), hopper.blocked((hopper.ROWS, head_dim), jnp.float32))
        scratch["values"] = ring(values)
        scratch["value_barrier"] = plgpu.Barrier(num_barriers=stages)
    if with_logits:
        scratch["logits"] = hopper.blocked((hopper.ROWS, hopper.SLOTS), jnp.float32)
    return scratch


def _key_barrier(store: _Store) -> str:
    """Returns the name of the barrier at which a block's keys and weights arrive."""
    return f"key_barrier_{len(store.weights)}"


def _program(store: _Store, refs, scratch, launch_split, split, splits, *, operands, stages):
    """Attends with all queries of a head to one split of its slots.

    Args:
        store: The queries and entries that the program reads.
        refs: Arrays in global memory, by name.
        scratch: Arrays in shared memory, by name.
        launch_split: The index of the split among the splits of all stores.
        split: The index of the split among the splits of this store.
        splits: The number of splits of this store.
        operands: How queries and entries become operands of the matrix unit.
        stages: Blocks that are in flight or in use at a time.
    """
    batch, head = (lax.axis_index(name) for name in ("batch", "heads"))
    lowest, highest = refs["lowest"][batch], refs["highest"][batch]
    entries, names, weights, bits = store.entries, store.names, store.weights, store.entries.bits
    rings = {name: scratch[name] for name in names}
    key_barrier = scratch[_key_barrier(store)]
    if "values" in scratch:
        rings["keys"], numerator_out = scratch["keys"]
    head_dim, padded = refs["queries"].shape[4], refs["queries"].shape[3]
    block_shape = (hopper.ROWS, hopper.SLOTS)

    # The splits share the blocks of the range evenly.
    first = lax.div(lowest, hopper.SLOTS)
    blocks = jnp.where(highest > lowest, lax.div(highest + (hopper.SLOTS - 1), hopper.SLOTS) - first, 0)
    per_split = lax.div(blocks + (splits - 1), splits)
    begin = first + split * per_split
    steps = jnp.clip(blocks - split * per_split, 0, per_split)

    def fetch(step, *names):
        """Starts the copies of a step's blocks."""

        @pl.when(step < steps)
        def _():
            stage = lax.rem(step, stages)
            first_slot = (begin + step) * hopper.SLOTS
            slots = pl.ds(first_slot, hopper.SLOTS)
            # A block that exceeds a head's last slot contains the next head's first slots, which are masked.
            rows = pl.ds(head * entries.slots + first_slot, hopper.SLOTS)
            for name in names:
                barrier = scratch["value_barrier"] if name == "values" else key_barrier
                source = refs[name].at[batch, head, slots] if name in PER_SLOT else refs[name].at[batch, rows]
                plgpu.copy_gmem_to_smem(source, rings[name].at[stage], barrier.at[stage])

    hopper.fetch_queries(refs["queries"].at[batch, head], scratch)
    for early in range(stages):
        fetch(jnp.int32(early), *names)
    if "bounds" in refs:
        bounds = [hopper.load(refs["bounds"].at[batch, side], hopper.ROW_LAYOUT, optimized=False) for side in (0, 1)]
    query_powers = hopper.await_queries(scratch)

    # Blocks that the matrix unit reads directly are free for the next fetch after their product; blocks that are
    # converted or loaded are free once those reads are committed.
    fetched_late = weights if operands.is_direct else names

    def process_step(index, before):
        """Returns the partials `before` with the block of step `index` added."""
        stage = lax.rem(index, stages)
        plgpu.barrier_wait(key_barrier.at[stage])
        keys = hopper.as_operands(rings["keys"].at[stage], scratch.get("operands"), operands, bits["keys"])
        if not operands.is_direct:
            plgpu.commit_smem()
        scores = hopper.query_key_products(scratch["queries"], keys, operands) * (head_dim**-0.5 * hopper.LOG2E)
        if operands.is_direct:
            fetch(index + stages, "keys")
        if query_powers is not None:
            scores = scores * hopper.broadcast_rows(query_powers, block_shape)

        loaded = {name: hopper.load(rings[name].at[stage], hopper.SLOT_LAYOUT).astype(jnp.float32) for name in weights}
        if "key_scale" in loaded:
            scores = scores * hopper.broadcast_slots(loaded["key_scale"], block_shape)
        first_slot = (begin + index) * hopper.SLOTS
        slot = first_slot + plgpu.broadcasted_iota(jnp.int32, (hopper.SLOTS,), 0, layout=hopper.SLOT_LAYOUT)
        is_read = (slot >= lowest) & (slot < highest)

        def add_log_weights(name):
            """Returns masked scores plus the log-weights `name`."""
            bias = jnp.maximum(loaded[name], MASK_VALUE) * hopper.LOG2E if name in loaded else 0.0
            biased = scores + hopper.broadcast_slots(jnp.where(is_read, bias, MASK_VALUE * hopper.LOG2E), block_shape)
            if "bounds" not in refs:
                return biased
            slots = first_slot + plgpu.broadcasted_iota(jnp.int32, block_shape, 1, layout=hopper.LAYOUT)
            starts, stops = (hopper.broadcast_rows(bound, block_shape) for bound in bounds)
            return jnp.where((slots >= starts) & (slots < stops), biased, MASK_VALUE * hopper.LOG2E)

        den_scores = num_scores = add_log_weights("log_num")
        if "log_den" in loaded:
            den_scores = add_log_weights("log_den")
        if "values" not in names:
            num_scores = None
        maximum, rescale, denominator, weight = hopper.update_max(before, num_scores, den_scores)
        if "logits" in refs:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            scratch["logits"][...] = den_scores * (1 / hopper.LOG2E)
        if "values" in names:
            if "value_scale" in loaded:
                weight = weight * hopper.broadcast_slots(loaded["value_scale"], block_shape)
            powers = hopper.store_weights(scratch["weights"], weight, operands)
            plgpu.barrier_wait(scratch["value_barrier"].at[stage])
            values = hopper.as_operands(rings["values"].at[stage], scratch.get("operands"), operands, bits["values"])
        plgpu.commit_smem()
        fetch(index + stages, *fetched_late)
        if "logits" in refs:
            plgpu.copy_smem_to_gmem(
                scratch["logits"].at[pl.ds(0, padded)],
                refs["logits"].at[batch, head, :, pl.ds(first_slot, hopper.SLOTS)],
            )
        numerator = before.numerator
        if "values" in names:
            numerator = hopper.add_values(numerator, rescale, scratch["weights"], values, operands, powers)
            if operands.is_direct:
                fetch(index + stages, "values")
        return hopper.RunningPartials(maximum, denominator, numerator)

    empty = hopper.RunningPartials.create(head_dim if "values" in names else None)
    partials = lax.fori_loop(0, steps, process_step, empty)
    index = batch, head, launch_split
    hopper.write_partials(partials, scratch, refs, index, numerator_out if "values" in names else None)
