"""Every form of attention to recalled blocks against plain float64 sums."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import benchmarking, packing
from pallas_kernels.cluster_recall import (
    Blocks,
    GpuConfig,
    Inputs,
    TpuConfig,
    cluster_recall,
    mosaic_tpu,
    padded_width,
    reference,
)
from pallas_kernels.partials import MASK_VALUE, Partials
from tests.pallas_kernels import traffic

SMALL = TpuConfig(step_blocks=8, cores=1)
# The slow interpreter knows memory spaces: it raises on reads out of bounds and on races, and memory that nothing was
# written to holds NaN.
CHECKED = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise")
FORMS = {
    "xla": {"implementation": "xla"},
    "mosaic_tpu": {"implementation": "mosaic_tpu", "config": SMALL, "interpret": True},
    "mosaic_tpu_checked": {"implementation": "mosaic_tpu", "config": SMALL, "interpret": CHECKED},
    "mosaic_tpu_cores": {
        "implementation": "mosaic_tpu",
        "config": TpuConfig(step_blocks=8, cores=2),
        "interpret": dataclasses.replace(CHECKED, num_cores_or_threads=2),
    },
}
checked_form = pytest.mark.parametrize("form", ("xla", "mosaic_tpu_checked"))
quick_form = pytest.mark.parametrize("form", ("xla", "mosaic_tpu"))
# Relative to the largest sum: what rounding entries, rows and weights to the type costs.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "int8": 2e-6, "float8_e4m3fn": 2e-6}


@functools.partial(jax.jit, static_argnames="form")
def run(rows, blocks, number, count, form):
    return cluster_recall(rows, blocks, number, count, **FORMS[form])


def make(
    seed=0,
    batch=2,
    kv_heads=2,
    heads=2,
    rows=4,
    there=9,
    recalled=5,
    places=16,
    head_dim=64,
    dtype="float32",
    scaled=False,
    scale=1.0,
):
    """Rows, blocks, numbers and counts, of all kinds of counts. Columns that hold neither key nor value hold noise, and
    so do places behind the count."""
    rng = np.random.default_rng(seed)
    stored = scale * rng.normal(size=(batch, kv_heads, there, places, 2 * padded_width(head_dim)))
    if dtype == "int8":
        stored = np.clip(np.round(40 * stored), -127, 127)
    factors = 0.02 * rng.normal(size=(batch, kv_heads, there, places, 2)) if scaled else None
    kind = "bfloat16" if dtype == "bfloat16" else "float32"
    queries = scale * rng.normal(size=(batch, heads, rows, head_dim))
    # No block twice.
    number = np.argsort(rng.random((batch, heads, max(there, recalled))), axis=-1)[..., :recalled] % there
    count = rng.integers(0, places + 1, (batch, heads, recalled))
    return (
        jnp.asarray(queries, kind),
        Blocks(jnp.asarray(stored, dtype), None if factors is None else jnp.asarray(factors, jnp.float32)),
        jnp.asarray(number, jnp.int32),
        jnp.asarray(count, jnp.int32),
    )


def packed(key_bits, value_bits, head_dim, **sizes):
    """Rows, blocks of packed numbers, numbers and counts; and the same blocks with every number in float32."""
    rows, plain, number, count = make(head_dim=head_dim, scaled=True, **sizes)
    rng = np.random.default_rng(key_bits)
    stored, wide = [], []
    for bits in (key_bits, value_bits):
        codes = rng.integers(0, 2**bits, (*plain.entries.shape[:4], head_dim))
        room = packing.packed_width(padded_width(head_dim), bits)
        numbers = packing.pack(jnp.asarray(codes, jnp.uint8), bits)
        fill = [(0, 0)] * 4 + [(0, room - numbers.shape[-1])]
        stored.append(jnp.pad(numbers, fill, constant_values=173))
        wide.append(np.pad(2 * codes - (2**bits - 1), [(0, 0)] * 4 + [(0, padded_width(head_dim) - head_dim)]))
    scale = plain.scale.astype(jnp.bfloat16)
    plain = Blocks(jnp.asarray(np.concatenate(wide, axis=-1), jnp.float32), scale.astype(jnp.float32))
    blocks = Blocks(jnp.concatenate(stored, axis=-1), scale, key_bits=key_bits, value_bits=value_bits)
    return (rows, blocks, number, count), plain


@pytest.mark.parametrize("head_dim", [64, 48])
def test_keys_and_values_gathered_together_are_those_gathered_apart(head_dim):
    inputs = Inputs(*make(head_dim=head_dim))
    together, apart = (jax.jit(form)(inputs) for form in (reference.attend_to_rows, reference.attend_to_columns))
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def expected(rows, blocks, number, count):
    """max, num and den in float64, token by token; max -inf where nothing is read."""
    rows, entries = np.asarray(rows, np.float64), np.asarray(blocks.entries, np.float64)
    batch, heads, _, head_dim = rows.shape
    half = entries.shape[-1] // 2
    scale = np.ones((*entries.shape[:4], 2)) if blocks.scale is None else np.asarray(blocks.scale, np.float64)
    peak, num, den = np.full(rows.shape[:3], -np.inf), np.zeros(rows.shape), np.zeros(rows.shape[:3])
    for b, h in np.ndindex(batch, heads):
        kv = h // (heads // entries.shape[1])
        tokens = [(n, p) for n, c in zip(number[b, h], count[b, h], strict=True) for p in range(int(c))]
        if not tokens:
            continue
        block, place = np.array(tokens).T
        read, factor = entries[b, kv, block, place], scale[b, kv, block, place]
        logits = rows[b, h] @ read[:, :head_dim].T * factor[:, 0] / np.sqrt(head_dim)
        peak[b, h] = logits.max(1)
        weight = np.exp(logits - peak[b, h][:, None])
        num[b, h] = (weight * factor[:, 1]) @ read[:, half : half + head_dim]
        den[b, h] = weight.sum(1)
    return peak, num, den


def compare(found: Partials, *arguments, tolerance=2e-6):
    peak, num, den = expected(*arguments)
    assert (found.max.shape, found.numerator.shape, found.denominator.shape) == (peak.shape, num.shape, den.shape)
    some = np.isfinite(peak)
    np.testing.assert_array_equal(np.asarray(found.max) > MASK_VALUE / 2, some)
    # Both are relative to a maximum of their own.
    shift = np.exp(np.where(some, np.asarray(found.max, np.float64) - np.where(some, peak, 0), 0))
    largest = max(np.abs(num).max(), np.abs(den).max(), 1e-30)
    for mine, true in (
        (np.asarray(found.numerator) * shift[..., None], num),
        (np.asarray(found.denominator) * shift, den),
    ):
        assert np.abs(mine - true)[some].max(initial=0) <= tolerance * largest


@quick_form
@pytest.mark.parametrize(
    "head_dim, dtype", [(head_dim, "float32") for head_dim in (64, 96, 128, 256)] + [(80, dtype) for dtype in TOLERANCE]
)
def test_shapes_and_types(form, head_dim, dtype):
    arguments = make(head_dim=head_dim, dtype=dtype, scaled=jnp.dtype(dtype).itemsize == 1)
    compare(run(*arguments, form), *arguments, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize(
    "form, key_bits, value_bits, head_dim",
    [("xla", 3, 2, 64), ("mosaic_tpu_checked", 4, 4, 128), ("mosaic_tpu", 2, 2, 256), ("mosaic_tpu", 4, 4, 96)],
)
def test_packed_numbers_are_read_as_what_they_stand_for(form, key_bits, value_bits, head_dim):
    (rows, blocks, number, count), plain = packed(key_bits, value_bits, head_dim, recalled=9)
    compare(run(rows, blocks, number, count, form), rows, plain, number, count)


@pytest.mark.parametrize(
    "form, recalled, rows, heads",
    [(form, *sizes) for form in ("xla", "mosaic_tpu_checked") for sizes in ((1, 3, 2), (8, 1, 6), (11, 3, 2))]
    + [("mosaic_tpu_cores", 11, 3, 2)],
)
def test_any_number_of_blocks_for_kv_heads_or_query_heads(form, recalled, rows, heads):
    arguments = make(recalled=recalled, rows=rows, heads=heads, there=12)
    compare(run(*arguments, form), *arguments)


COUNTS = {
    "nothing": 0,
    "everything": 16,
    "one token of the last block": np.arange(5) == 4,
    "one token of the first block": np.arange(5) == 0,
    "blocks in the middle are skipped": [16, 0, 0, 0, 3],
    "some heads read nothing": np.array([[0, 1], [2, 0]])[..., None],
    "only the last head reads": np.array([[0, 0], [0, 7]])[..., None],
}


@checked_form
@pytest.mark.parametrize("name", COUNTS)
def test_counts(form, name):
    rows, blocks, number, _ = make()
    count = jnp.broadcast_to(jnp.asarray(COUNTS[name], jnp.int32), number.shape)
    compare(run(rows, blocks, number, count, form), rows, blocks, number, count)


@checked_form
def test_blocks_that_are_not_named_may_hold_anything(form):
    rows, blocks, number, count = make(recalled=4)
    named = np.zeros(blocks.entries.shape[:3], bool)
    np.put_along_axis(named, np.asarray(number), True, axis=2)
    spoilt = dataclasses.replace(blocks, entries=jnp.where(named[..., None, None], blocks.entries, jnp.nan))
    compare(run(rows, spoilt, number, count, form), rows, blocks, number, count)


@quick_form
def test_a_block_may_be_read_twice(form):
    rows, blocks, number, count = make()
    number = number.at[..., 1].set(number[..., 0])
    compare(run(rows, blocks, number, count, form), rows, blocks, number, count)


@quick_form
def test_extreme_logits_neither_overflow_nor_vanish(form):
    # Norms near 200: logits of some thousands either way.
    arguments = make(scale=200 / 8)
    found = run(*arguments, form)
    assert all(np.isfinite(np.asarray(part)).all() for part in found[:3])
    compare(found, *arguments, tolerance=2e-3)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"entries": jnp.zeros((2, 2, 9, 16, 126))}, r"entries have shape \(2, 2, 9, 16, 126\)"),
        ({"entries": jnp.zeros((2, 3, 9, 16, 128))}, "H is a multiple of H_kv"),
        ({"scale": jnp.zeros((2, 2, 9, 16))}, r"scale has shape \(2, 2, 9, 16\)"),
        ({"number": jnp.zeros((2, 2, 0), jnp.int32)}, "block_indices has shape"),
        ({"count": jnp.zeros((2, 2, 4), jnp.int32)}, "block_lengths has shape"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    rows, blocks, number, count = make()
    fields = {field.name for field in dataclasses.fields(Blocks)}
    blocks = dataclasses.replace(blocks, **{name: x for name, x in change.items() if name in fields})
    with pytest.raises(ValueError, match=message):
        cluster_recall(rows, blocks, change.get("number", number), change.get("count", count))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rows": 64}, "64 queries"),
        ({"dtype": "float16"}, "entries are float16"),
        ({"head_dim": 32}, "blocks are 16 x 64"),
        ({"places": 8}, "blocks are 8 x 128"),
        ({"recalled": 20000}, "20000 blocks per head"),
    ],
)
def test_what_the_kernel_cannot_do_is_told_and_left_to_xla(change, message):
    arguments = make(batch=1, kv_heads=1, heads=1, **change)
    with pytest.raises(NotImplementedError, match=message):
        cluster_recall(*arguments, implementation="mosaic_tpu", interpret=True)
    jax.jit(cluster_recall).trace(*arguments).lower(lowering_platforms=("tpu",))


def test_unknown_forms_and_configs_are_refused():
    with pytest.raises(ValueError, match="implementation='cuda'"):
        cluster_recall(*make(), implementation="cuda")
    for wrong in ({"step_blocks": 12}, {"step_blocks": 0}, {"cores": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TpuConfig(**wrong)


TRAFFIC = {
    "four bits": {"head_dim": 128, "bits": 4, "kv_heads": 1, "heads": 1, "there": 256, "recalled": 200},
    "wide heads": {"head_dim": 128, "dtype": "bfloat16"},
    "query heads": {"heads": 4, "rows": 1},
    "eight bits": {"dtype": "int8", "scaled": True},
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_blocks_that_are_read_are_moved_once_and_no_others(name):
    given = {"batch": 1, "there": 64, "recalled": 24} | TRAFFIC[name]
    bits = given.pop("bits", None)
    rows, blocks, number, count = make(**given) if bits is None else packed(bits, bits, **given)[0]
    moved = traffic.moved(
        functools.partial(mosaic_tpu.recall_unmapped, config=SMALL, interpret=CHECKED),
        Inputs(rows, blocks, number, count),
    )
    blocks_read = int((np.asarray(count) > 0).sum())
    assert blocks_read < count.size
    assert moved.copies == blocks_read * blocks.entries[0, 0, 0].nbytes
    sums = jax.eval_shape(cluster_recall, rows, blocks, number, count)
    scales = 0 if blocks.scale is None else number.size * blocks.scale[0, 0, 0].nbytes
    least = moved.copies + scales + benchmarking.array_bytes(rows, number, count, sums)
    assert moved.total <= 1.05 * least


@pytest.mark.parametrize("own_stores", [True, False])
def test_it_stays_one_kernel_under_vmap(own_stores):
    rows, blocks, number, count = make(heads=4, rows=2)
    stack = lambda tree, change: jax.tree.map(lambda x: jnp.stack([x, change(x)]), tree)  # noqa: E731
    others = (stack(rows, lambda x: 2 * x), stack(number, lambda x: 8 - x), stack(count, lambda x: 16 - x))
    stores = stack(blocks, lambda x: -x) if own_stores else blocks
    inner = lambda rows, blocks, number, count: cluster_recall(rows, blocks, number, count, **FORMS["mosaic_tpu"])  # noqa: E731
    mapped = jax.vmap(inner, in_axes=(0, 0 if own_stores else None, 0, 0))
    arguments = (others[0], stores, *others[1:])
    jaxpr = str(jax.make_jaxpr(mapped)(*arguments))
    assert jaxpr.count("pallas_call[") == 1
    found = mapped(*arguments)
    for place in range(2):
        pick = lambda tree, place=place: jax.tree.map(lambda x: x[place], tree)  # noqa: E731
        store = pick(stores) if own_stores else blocks
        compare(pick(found), pick(others[0]), store, *map(pick, others[1:]))


# Interpreting takes two seconds each: every case is there for several reasons.
GPU_CASES = {
    "bfloat16": {"dtype": "bfloat16", "head_dim": 128, "recalled": 11, "there": 12},
    "float16": {"dtype": "float16", "head_dim": 64, "rows": 9, "recalled": 9},
    "float32": {"head_dim": 80, "stages": 1},
    "int8": {"dtype": "int8", "head_dim": 96, "scaled": True},
    "float8": {"dtype": "float8_e4m3fn", "head_dim": 64, "scaled": True, "places": 32},
    "wide": {"dtype": "bfloat16", "head_dim": 256, "places": 8, "recalled": 9},
    "of query heads": {"rows": 1, "heads": 2, "places": 64, "splits": 2},
    "norms of 200": {"scale": 200 / 8, "splits": 2},
    "nothing": {"counts": 0},
    "everything": {"counts": 16, "recalled": 8, "splits": 2},
    "one token of the last block": {"counts": np.arange(9) == 8, "recalled": 9, "splits": 3},
    "blocks in the middle are skipped": {"counts": [16, 0, 0, 0, 0, 0, 0, 0, 3], "recalled": 9},
}
needs_gpu_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter for GPU kernels came with JAX 0.11"
)


def run_for_gpu(*arguments, splits=1, stages=2):
    # Few splits, so that several blocks pass through the same memory.
    interpreter = plgpu.InterpretGPUParams(detect_races=True)
    config = GpuConfig(stages=stages, splits=splits)
    return cluster_recall(*arguments, implementation="mosaic_gpu", config=config, interpret=interpreter)


@needs_gpu_interpreter
@pytest.mark.parametrize("case", GPU_CASES)
def test_the_kernel_for_gpus(case):
    given = {"batch": 1, "kv_heads": 1, "heads": 1, "there": 10} | GPU_CASES[case]
    counts = given.pop("counts", None)
    settings = {name: given.pop(name) for name in ("splits", "stages") if name in given}
    rows, blocks, number, count = make(**given)
    if counts is not None:
        count = jnp.broadcast_to(jnp.asarray(counts, jnp.int32), number.shape)
    # Blocks that are not read may hold anything.
    read = np.zeros(blocks.entries.shape[2], bool)
    read[np.asarray(number)[np.asarray(count) > 0]] = True
    spoilt = blocks
    if jnp.issubdtype(blocks.entries.dtype, jnp.floating):
        spoilt = dataclasses.replace(blocks, entries=jnp.where(read[:, None, None], blocks.entries, jnp.nan))
    found = jax.jit(functools.partial(run_for_gpu, **settings))(rows, spoilt, number, count)
    dtype = given.get("dtype", "float32")
    tolerance = 2e-3 if "scale" in given else TOLERANCE.get(dtype, 2e-6)
    compare(found, rows, blocks, number, count, tolerance=tolerance)


@needs_gpu_interpreter
@pytest.mark.parametrize("key_bits, value_bits, head_dim", [(4, 4, 128), (3, 3, 128), (4, 2, 128), (2, 2, 64)])
def test_the_kernel_for_gpus_brings_packed_numbers_apart(key_bits, value_bits, head_dim):
    sizes = {"batch": 1, "kv_heads": 1, "heads": 1, "there": 10, "recalled": 9}
    (rows, blocks, number, count), plain = packed(key_bits, value_bits, head_dim, **sizes)
    found = jax.jit(run_for_gpu)(rows, blocks, number, count)
    compare(found, rows, plain, number, count)


@needs_gpu_interpreter
def test_the_kernel_for_gpus_moves_the_blocks_that_are_read_and_no_other():
    rows, blocks, number, _ = make(batch=1, heads=1, kv_heads=1, there=32, recalled=20, head_dim=128, dtype="bfloat16")
    count = jnp.broadcast_to(jnp.arange(20) % 5, number.shape)  # every fifth block is left out
    found = traffic.copied_for_gpu(run_for_gpu, rows, blocks, number, count)
    least = 16 * 16 * 2 * 128 * 2 + rows.nbytes + 4 * 4 * (128 + 2)
    assert least <= found <= 1.05 * least


@needs_gpu_interpreter
@pytest.mark.parametrize("own_stores", [True, False])
def test_the_kernel_for_gpus_stays_one_under_vmap(own_stores):
    rows, blocks, number, count = make(batch=1, kv_heads=1, heads=1, recalled=3)
    others = jax.tree.map(lambda x, y: jnp.stack([x, y]), (rows, number, count), (2 * rows, 8 - number, 16 - count))
    stores = jax.tree.map(lambda x: jnp.stack([x, -x]), blocks) if own_stores else blocks
    mapped = jax.vmap(run_for_gpu, in_axes=(0, 0 if own_stores else None, 0, 0))
    arguments = (others[0], stores, *others[1:])
    jaxpr = jax.make_jaxpr(mapped)(*arguments)
    assert not {"scan", "while"} & {equation.primitive.name for equation in jaxpr.eqns}
    grid = "(1, 1, 2)" if own_stores else "(1, 2, 1)"
    assert re.findall(r"Mesh\(grid=(\([\d, ]*\)), grid_names=\((.*?)\)", str(jaxpr)) == [
        (grid, "'splits', 'heads', 'batch'")
    ]
    found = mapped(*arguments)
    for place in range(2):
        pick = lambda tree, place=place: jax.tree.map(lambda x: x[place], tree)  # noqa: E731
        store = pick(stores) if own_stores else blocks
        compare(pick(found), pick(others[0]), store, *map(pick, others[1:]))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rows": 64}, "64 queries"),
        ({"head_dim": 32}, "blocks are 16 x 64"),
        ({"places": 24}, "blocks are 24 x 128"),
        ({"head_dim": 256}, "bytes do not fit in shared memory"),
    ],
)
def test_what_the_kernel_for_gpus_cannot_do_is_told(change, message):
    arguments = make(batch=1, kv_heads=1, heads=1, **change)
    with pytest.raises(NotImplementedError, match=message):
        cluster_recall(*arguments, implementation="mosaic_gpu", interpret=True)


@pytest.mark.parametrize("settings", [{"stages": 0}, {"splits": 0}])
def test_settings_of_the_kernel_for_gpus_are_checked(settings):
    with pytest.raises(ValueError, match="it must be None or at least 1"):
        GpuConfig(**settings)
