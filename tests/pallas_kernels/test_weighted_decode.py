"""Every form of the fused cluster-attention loop against plain float64 sums, and the kernel's traffic."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch, packing
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.weighted_decode import (
    COMPUTE_BOUND_QUERIES,
    MASK_VALUE,
    Entries,
    GpuConfig,
    Partials,
    TpuConfig,
    reference,
    weighted_decode,
    weighted_decode_many,
)
from tests.pallas_kernels import traffic
from tests.pallas_kernels.programs import equations

SMALL = TpuConfig(block_slots=128)
FORMS = {
    "xla": {"implementation": "xla"},
    "mosaic_tpu": {"implementation": "mosaic_tpu", "config": SMALL, "interpret": True},
    "mosaic_tpu_split": {"implementation": "mosaic_tpu", "config": TpuConfig(128, splits=2), "interpret": True},
    # The slow interpreter knows memory spaces: it raises on reads out of bounds and on races.
    "mosaic_tpu_checked": {
        "implementation": "mosaic_tpu",
        "config": SMALL,
        "interpret": pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise"),
    },
}
if jax.default_backend() != "cpu":
    FORMS["device"] = {}  # the kernel of this machine, as programs run it
every_form = pytest.mark.parametrize("form", FORMS)
quick_form = pytest.mark.parametrize("form", [form for form in FORMS if form in ("xla", "mosaic_tpu", "device")])
# Relative to the largest sum: what rounding entries, rows and weights to the type costs.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-6, "int8": 2e-6, "float8_e4m3fn": 2e-6}


@functools.partial(jax.jit, static_argnames=("form", "logits"))
def run(rows, entries, form, logits=False):
    return weighted_decode(rows, entries, logits=logits, **FORMS[form])


def make(seed=0, batch=2, heads=2, rows=4, slots=304, head_dim=64, dtype="float32", fields=(), feeds="both",
         scale=1.0, **others):  # fmt: skip
    """Queries, and entries with the named weights and scales that feed both sums, or one."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape)  # noqa: E731
    stored = [scale * normal(batch, heads, slots, head_dim) for _ in range(2)]
    if dtype == "int8":
        stored = [np.clip(np.round(40 * x), -127, 127) for x in stored]
    keys, values = (jnp.asarray(x, dtype) for x in stored)
    given = {name: normal(batch, heads, slots) * (0.02 if "scale" in name else 1.0) for name in fields}
    given = {name: jnp.asarray(x, jnp.float32) for name, x in given.items()}
    queries = jnp.asarray(
        scale * normal(batch, heads, rows, head_dim), "bfloat16" if dtype == "bfloat16" else "float32"
    )
    if feeds == "numerator":
        given["log_den"] = jnp.full((batch, heads, slots), -jnp.inf)
    key_scale, value_scale = given.pop("key_scale", None), given.pop("value_scale", None)
    keys = keys if key_scale is None else QuantizedArray(keys, key_scale)
    values = values if value_scale is None else QuantizedArray(values, value_scale)
    return queries, Entries(keys, None if feeds == "denominator" else values, **given, **others)


def expected(rows, entries):
    """max, num and den in float64, max -inf where a row finds no entry."""
    arrays = {name: np.asarray(x, np.float64) for name, x in entries.slot_arrays.items()}
    batch, _, count, head_dim = rows.shape
    slots = entries.slots
    logits = np.einsum("bhrd,bhsd->bhrs", np.asarray(rows, np.float64), arrays["keys"]) / np.sqrt(head_dim)
    logits = logits * arrays.get("key_scale", np.ones(slots))[..., None, :]
    inside = np.ones((batch, count, slots), bool)
    for bound, holds in ((entries.start, np.greater_equal), (entries.stop, np.less)):
        if bound is not None:
            bound = np.asarray(bound)
            inside &= holds(np.arange(slots), (bound[:, None] if bound.ndim == 1 else bound)[:, :, None])
    log_num = arrays.get("log_num", np.zeros(slots))
    log_den = arrays.get("log_den", log_num)
    num, den = (np.where(inside[:, None], logits + x[..., None, :], -np.inf) for x in (log_num, log_den))
    if "values" not in arrays:
        num = np.full_like(num, -np.inf)
    peak = np.maximum(num, den).max(-1)
    base = np.where(np.isfinite(peak), peak, 0.0)[..., None]
    weight = np.exp(num - base) * arrays.get("value_scale", np.ones(slots))[..., None, :]
    values = arrays.get("values", np.zeros(entries.keys.shape))
    return peak, np.einsum("bhrs,bhsd->bhrd", weight, values), np.exp(den - base).sum(-1)


def compare(found: Partials, rows, entries, tolerance):
    peak, num, den = expected(rows, entries)
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
    return some


@quick_form
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_shapes_and_types(form, head_dim, dtype):
    if dtype == "float16" and form == "mosaic_tpu":
        pytest.skip("no float16 on TPU")
    fields = ("key_scale", "value_scale", "log_num") if jnp.dtype(dtype).itemsize == 1 else ("log_num",)
    rows, entries = make(head_dim=head_dim, dtype=dtype, fields=fields, stop=jnp.array([304, 130]))
    compare(run(rows, entries, form), rows, entries, TOLERANCE[dtype])


@every_form
@pytest.mark.parametrize("slots, rows", [(1, 3), (100, 1), (128, 8), (256, 3), (300, 1), (300, 8)])
def test_any_number_of_slots_and_rows(form, slots, rows):
    queries, entries = make(rows=rows, slots=slots, head_dim=128)
    compare(run(queries, entries, form), queries, entries, 2e-6)


RANGES = {
    "empty row": ([0, 40], [0, 40]),
    "one slot": ([303, 0], [304, 1]),
    "within a block": ([130, 5], [200, 6]),
    "across blocks": ([120, 1], [140, 299]),
    "of each row": ([[0, 10, 250, 7], [3, 3, 3, 3]], [[304, 10, 260, 8], [9, 130, 257, 3]]),
}


@every_form
@pytest.mark.parametrize("name", RANGES)
def test_only_the_occupied_range_is_read(form, name):
    start, stop = (jnp.array(bound, jnp.int32) for bound in RANGES[name])
    rows, entries = make(start=start, stop=stop, fields=("log_num",))
    some = compare(run(rows, entries, form), rows, entries, 2e-6)
    assert some.all() == (name in ("one slot", "within a block", "across blocks"))
    if start.ndim == 1:  # what blocks outside hold does not matter, be it NaN
        slot = np.arange(304) // 128
        within = (slot >= np.array(start)[:, None] // 128) & (slot <= (np.array(stop)[:, None] - 1) // 128)
        spoilt = jnp.where(within[:, None, :, None], entries.keys, jnp.nan)
        if form != "xla":
            again = run(rows, Entries(spoilt, entries.values, entries.log_num, start=start, stop=stop), form)
            compare(again, rows, entries, 2e-6)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "mosaic_tpu_checked"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bits", packing.PLANES)
def test_packed_numbers_are_read_as_what_they_stand_for(form, head_dim, bits):
    rows, entries, plain = packed(bits, head_dim)
    found, wide = run(rows, entries, form, logits=True), run(rows, plain, "xla", logits=True)
    compare(found, rows, plain, 2e-6)
    read = np.asarray(wide.logits) > MASK_VALUE / 2
    np.testing.assert_allclose(np.asarray(found.logits)[read], np.asarray(wide.logits)[read], rtol=1e-5, atol=1e-5)


def test_packed_numbers_of_many_rows_are_read_too():
    rows, entries, plain = packed(3, 64, rows=COMPUTE_BOUND_QUERIES)
    compare(run(rows, entries, "xla"), rows, plain, 2e-6)


def test_blocks_that_are_widened_one_after_the_other_add_up(monkeypatch):
    rows, entries, plain = packed(4, 64, slots=330)
    monkeypatch.setattr(reference, "DEQUANTIZED_BLOCK", 128 * rows.shape[0] * rows.shape[1] * 64)
    found = weighted_decode(rows, entries, logits=True, implementation="xla")
    compare(found, rows, plain, 2e-6)
    check_logits(found.logits, rows, plain)


@pytest.mark.parametrize("bits", packing.PLANES)
def test_packed_numbers_move_no_more_bytes_than_have_to(bits):
    rows, entries, _ = packed(bits, 128, slots=1024)
    entries = dataclasses.replace(entries, start=None, stop=None)
    least = sum(x.nbytes for x in (rows, *jax.tree.leaves(entries))) + 4 * rows.shape[0] * 2 * 4 * (128 + 2)
    call = functools.partial(weighted_decode, implementation="mosaic_tpu", config=SMALL)
    assert traffic.moved(call, rows, entries, run=False).total <= 1.05 * least


def packed(bits, head_dim, value_bits=0, **sizes):
    """Rows, entries of packed numbers (values in eight bits where theirs are None), and the same entries with every
    number in float32."""
    rows, entries = make(head_dim=head_dim, fields=("log_num", "key_scale", "value_scale"), **sizes)
    rng = np.random.default_rng(bits)
    widths = {"keys": bits, "values": bits if value_bits == 0 else value_bits}
    stored, wide = {}, {}
    for name, width in widths.items():
        codes = rng.integers(0, 2 ** (width or 8), entries.keys.shape)
        numbers = 2 * codes - (2**width - 1) if width else codes - 128
        packed = packing.pack(jnp.asarray(codes, jnp.uint8), width) if width else jnp.asarray(numbers, jnp.int8)
        scale = getattr(entries, name).scale.astype(jnp.bfloat16)
        stored[name] = QuantizedArray(packed, scale, offset=jnp.ones((*packed.shape[:2], head_dim)), bits=width)
        wide[name] = QuantizedArray(jnp.asarray(numbers, jnp.float32), scale.astype(jnp.float32))
    stop = jnp.array([[entries.slots], [201]])[: rows.shape[0]]
    plain = dataclasses.replace(entries, **wide, stop=stop)
    return rows, dataclasses.replace(plain, **stored), plain


@quick_form
@pytest.mark.parametrize("feeds", ["both", "numerator", "denominator"])
@pytest.mark.parametrize("fields", [(), ("log_num", "log_den"), ("log_den",), ("key_scale", "value_scale")])
def test_every_weight_and_either_sum(form, feeds, fields):
    rows, entries = make(fields=fields, feeds=feeds)
    compare(run(rows, masked(entries), form), rows, masked(entries), 2e-6)


def masked(entries):
    """The entries with every seventh log-weight -inf."""
    given = {name: x for name in ("log_num", "log_den") if (x := getattr(entries, name)) is not None}
    return dataclasses.replace(entries, **{name: x.at[:, :, ::7].set(-jnp.inf) for name, x in given.items()})


@every_form
def test_rows_without_any_entry_are_told(form):
    rows, entries = make(fields=("log_num",))
    entries = dataclasses.replace(entries, **{"log_num": jnp.full((2, 2, 304), -jnp.inf).at[0, 0, 303].set(0.0)})
    some = compare(run(rows, entries, form), rows, entries, 2e-6)
    assert some[0, 0].all() and some.sum() == some[0, 0].size


@every_form
@pytest.mark.parametrize("feeds", ["both", "numerator"])
@pytest.mark.parametrize("stop", [None, [130, 0], [[304, 1, 7, 129], [2, 3, 4, 200]]])
def test_logits_tell_what_each_slot_adds(form, feeds, stop):
    stop = None if stop is None else jnp.array(stop, jnp.int32)
    rows, entries = make(fields=("log_num", "log_den", "key_scale"), stop=stop, feeds=feeds)
    found = run(rows, entries, form, logits=True)
    compare(found, rows, entries, 2e-6)
    check_logits(found.logits, rows, entries)


def check_logits(logits, rows, entries):
    slots = entries.keys.shape[2]
    assert logits.shape == (*rows.shape[:3], slots)
    den = expected(rows, dataclasses.replace(entries, values=None))[2]
    some = den > 0
    peak = np.asarray(logits, np.float64).max(-1)
    weights = np.exp(np.asarray(logits, np.float64) - peak[..., None])
    np.testing.assert_array_equal(peak > MASK_VALUE / 2, some)
    np.testing.assert_allclose(weights.sum(-1)[some], den[some], rtol=1e-4)
    if entries.stop is not None:
        stop = np.asarray(entries.stop).reshape(len(rows), 1, -1, 1)
        outside = np.broadcast_to(np.arange(slots) >= stop, logits.shape)
        assert (np.asarray(logits)[outside] <= MASK_VALUE / 2).all()


# What one query reads: large and small, with and without weights, of several types, feeding both sums or one.
STORES = (
    {"slots": 304, "fields": ("log_num",), "stop": [0, 264]},
    {"slots": 68, "start": [3, 0], "stop": [[60], [0]]},
    {"slots": 64, "feeds": "denominator", "fields": ("log_num", "log_den"), "scale": 2.0},
    {"slots": 136, "dtype": "int8", "fields": ("key_scale", "value_scale"), "start": [[0, 130, 9, 7], [5, 5, 5, 5]]},
    {"slots": 8, "feeds": "numerator"},
)


def make_stores(of=STORES, **sizes):
    """Rows, and entries of several stores."""
    parts = []
    for seed, given in enumerate(of):
        bounds = {name: jnp.array(given[name], jnp.int32) for name in ("start", "stop") if name in given}
        parts.append(make(seed, **{**given, **bounds, **sizes}))
    return parts[0][0], [entries for _, entries in parts]


def compare_together(found, rows, stores, tolerance):
    """Against sums over all stores' entries, relative to one maximum."""
    peaks, nums, dens = zip(*(expected(rows, entries) for entries in stores), strict=True)
    peak = np.max(peaks, axis=0)
    factors = [np.exp(np.where(np.isfinite(one), one - peak, -np.inf)) for one in peaks]
    num = sum(num * factor[..., None] for num, factor in zip(nums, factors, strict=True))
    den = sum(den * factor for den, factor in zip(dens, factors, strict=True))
    shift = np.exp(np.asarray(found.max, np.float64) - peak)
    for mine, true in (
        (np.asarray(found.numerator) * shift[..., None], num),
        (np.asarray(found.denominator) * shift, den),
    ):
        assert np.abs(mine - true).max() <= tolerance * np.abs(num).max()


@every_form
@pytest.mark.parametrize("of", [STORES, STORES[::-1], STORES[1:2]], ids=["in order", "backwards", "one"])
def test_entries_of_several_stores_count_as_one(form, of):
    rows, stores = make_stores(of)
    if len(of) == 1:
        compare(run(rows, stores[0], form), rows, stores[0], 2e-6)
        return
    together = jax.jit(lambda rows, *stores: weighted_decode(rows, *stores, **FORMS[form]))
    compare_together(together(rows, *stores), rows, stores, 2e-6)
    text = str(together.trace(rows, *stores).jaxpr)
    assert text.count("pallas_call[") == (0 if form in ("xla", "device") else 1)


def test_several_stores_have_no_logits_together_and_values_of_one_size():
    rows, stores = make_stores(STORES[:2])
    with pytest.raises(ValueError, match="logits=True with 2 stores"):
        weighted_decode(rows, *stores, logits=True)
    with pytest.raises(ValueError, match="at least one store"):
        weighted_decode(rows)
    wider = dataclasses.replace(stores[1], values=jnp.tile(stores[1].values, 2))
    with pytest.raises(ValueError, match="must have the same dimension"):
        weighted_decode(rows, stores[0], wider)


def test_each_store_s_occupied_blocks_are_fetched_once():
    rows, stores = make_stores(({"slots": 1024, "stop": [600, 1024]}, {"slots": 64}), head_dim=128)
    call = functools.partial(weighted_decode, implementation="mosaic_tpu", config=SMALL, interpret=True)
    found = traffic.moved(call, rows, *stores, run=False)
    least = 2 * (640 + 1024 + 2 * 64) * 2 * 128 * 4 + rows.nbytes + 4 * 2 * 2 * 4 * (128 + 2)
    assert least <= found.total <= 1.05 * least


@quick_form
def test_extreme_logits_neither_overflow_nor_vanish(form):
    # Norms near 200: logits of some thousands either way.
    rows, entries = make(scale=200 / 8, head_dim=64)
    found = run(rows, entries, form)
    assert all(np.isfinite(np.asarray(part)).all() for part in found[:3])
    compare(found, rows, entries, 2e-3)


@pytest.mark.parametrize(
    "slots, head_dim, dtype, block",
    [(32768, 128, "bfloat16", 4096), (4096, 64, "float32", 1024), (4096, 128, "int8", 2048)],
)
def test_no_more_bytes_move_than_have_to(slots, head_dim, dtype, block):
    batch, heads, rows = 2, 8, 4
    store = jnp.zeros((batch, heads, slots, head_dim), dtype)
    of_slots = jnp.zeros((batch, heads, slots))
    stop = jnp.array([slots, slots // 2], jnp.int32)
    stored = QuantizedArray(store, of_slots) if dtype == "int8" else store
    entries = Entries(stored, stored, of_slots, stop=stop)
    queries = jnp.zeros((batch, heads, rows, head_dim), jnp.bfloat16)
    found = traffic.moved(
        lambda *given: weighted_decode(*given, implementation="mosaic_tpu", interpret=True), queries, entries, run=False
    )
    per_slot = 2 * head_dim * store.dtype.itemsize + 4 * (3 if dtype == "int8" else 1)
    least = heads * (slots + slots // 2) * per_slot + queries.nbytes + 4 * batch * heads * rows * (head_dim + 2)
    assert least <= found.total <= 1.05 * least
    # Blocks that hold nothing occupied are not fetched: one block more where the range ends inside it.
    entries = dataclasses.replace(entries, **{"stop": stop + jnp.array([0, 1])})
    more = traffic.moved(
        lambda *given: weighted_decode(*given, implementation="mosaic_tpu", interpret=True), queries, entries, run=False
    )
    assert more.total - found.total == heads * block * per_slot


def test_it_stays_one_kernel_under_vmap():
    rows, entries = make(batch=2)
    inner = lambda rows, entries: weighted_decode(rows, entries, **FORMS["mosaic_tpu"])  # noqa: E731
    stack = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), (rows, entries))
    jaxpr = str(jax.make_jaxpr(jax.vmap(inner))(*stack))
    assert jaxpr.count("pallas_call") == 1
    assert "while[" not in jaxpr and "scan[" not in jaxpr
    found = jax.vmap(inner)(*stack)
    for number in range(2):
        one, other = (jax.tree.map(lambda x, n=number: x[n], part) for part in stack)
        compare(jax.tree.map(lambda x, n=number: x[n], found), one, other, 2e-6)


# Interpreting takes two seconds each: every case is there for several reasons.
GPU_CASES = {
    "bfloat16": {"dtype": "bfloat16", "head_dim": 128, "fields": ("log_num",), "rows": 8},
    "float16": {"dtype": "float16", "head_dim": 80, "fields": ("log_num",), "rows": 5},
    "float32": {"head_dim": 96, "slots": 104, "fields": ("log_num", "log_den")},
    "int8": {"dtype": "int8", "head_dim": 128, "fields": ("key_scale", "value_scale", "log_num")},
    "float8": {"dtype": "float8_e4m3fn", "head_dim": 80, "fields": ("key_scale", "value_scale")},
    "wide": {"dtype": "bfloat16", "head_dim": 256, "fields": ("log_den",)},
    "one block": {"slots": 8, "rows": 17},
    "numerator": {"feeds": "numerator", "fields": ("log_num", "log_den")},
    "denominator": {"feeds": "denominator", "fields": ("log_num", "log_den")},
    "norms of 200": {"scale": 200 / 8},
    "empty row": {"start": [0, 40], "stop": [0, 40], "batch": 2, "splits": None},
    "within blocks": {"start": [130, 303], "stop": [250, 304], "batch": 2, "splits": 2},
    "of each row": {"start": [[0, 10, 250, 7]], "stop": [[304, 10, 260, 8]], "fields": ("log_num",), "splits": 2},
    "logits": {"fields": ("log_num", "log_den"), "stop": [200, 0], "batch": 2, "logits": True, "splits": 2},
    "logits of each row": {"stop": [[304, 1, 7, 129]], "logits": True},
    "heads that end inside tiles": {"heads": 4, "slots": 70, "fields": ("log_num",), "logits": True},
}
needs_gpu_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter for GPU kernels came with JAX 0.11"
)


def run_for_gpu(rows, entries, splits=1, **settings):
    # Few splits, so that several blocks pass through the same memory.
    interpreter = plgpu.InterpretGPUParams(detect_races=True)
    config = GpuConfig(stages=2, splits=splits)
    return weighted_decode(rows, entries, implementation="mosaic_gpu", config=config, interpret=interpreter, **settings)


@needs_gpu_interpreter
@pytest.mark.parametrize("case", GPU_CASES)
def test_the_kernel_for_gpus(case):
    given = {"batch": 1, "heads": 1} | GPU_CASES[case]
    settings = {name: given.pop(name) for name in ("splits", "logits") if name in given}
    bounds = {name: jnp.array(given.pop(name), jnp.int32) for name in ("start", "stop") if name in given}
    rows, entries = make(**given, **bounds)
    entries = masked(entries)
    found = jax.jit(functools.partial(run_for_gpu, **settings))(rows, entries)
    compare(found, rows, entries, 2e-3 if "scale" in given else TOLERANCE[given.get("dtype", "float32")])
    if "logits" in settings:
        check_logits(found.logits, rows, entries)


@needs_gpu_interpreter
@pytest.mark.parametrize("splits", [2, None])
def test_the_kernel_for_gpus_reads_several_stores_in_a_launch_for_each_kind(splits):
    rows, stores = make_stores(STORES[:4], heads=2)
    stores[0] = dataclasses.replace(stores[0], stop=jnp.array([1, 264]))
    interpreter = plgpu.InterpretGPUParams(detect_races=True)
    options = {"implementation": "mosaic_gpu", "config": GpuConfig(stages=2, splits=splits), "interpret": interpreter}
    together = jax.jit(lambda rows, *stores: weighted_decode(rows, *stores, **options))
    traced = together.trace(rows, *stores).jaxpr
    assert sum(one.primitive.name == "mpmd_map" for one in equations(traced.jaxpr)) == 2
    compare_together(together(rows, *stores), rows, stores, 2e-6)


@needs_gpu_interpreter
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_the_kernel_for_gpus_multiplies_narrow_floats_in_float16_whatever_their_scales(dtype, size):
    rows, entries = make(batch=1, heads=1, slots=136, dtype=dtype, fields=("log_num", "key_scale", "value_scale"))
    # Queries and scales are far out of float16's range, logits and the sums' proportions are not.
    spread = jnp.asarray(10.0 ** np.random.default_rng(1).uniform(-3, 3, entries.values.scale.shape), jnp.float32)
    rows = (rows * size).astype(jnp.bfloat16)
    keys = dataclasses.replace(entries.keys, scale=entries.keys.scale / size)
    entries = dataclasses.replace(entries, keys=keys, values=dataclasses.replace(entries.values, scale=spread * size))
    found = jax.jit(run_for_gpu)(rows, entries)
    peak, num, den = expected(rows, entries)
    shift = np.exp(np.asarray(found.max, np.float64) - peak)
    np.testing.assert_allclose(np.asarray(found.denominator) * shift, den, rtol=2e-6)
    assert np.abs(np.asarray(found.numerator) * shift[..., None] - num).max() <= 5e-4 * np.abs(num).max()


# Segments of a cache: large and small, with and without weights, of rows of their own, one of another type.
PARTS = (
    {"slots": 264, "fields": ("log_num",), "stop": [200, 264]},
    {"slots": 68, "start": [3, 0], "stop": [60, 0]},
    {"slots": 64, "feeds": "denominator", "fields": ("log_num", "log_den"), "scale": 2.0},
    {"slots": 72, "dtype": "int8", "fields": ("key_scale", "value_scale")},
)


@needs_gpu_interpreter
@pytest.mark.parametrize("splits", [2, None])
@pytest.mark.parametrize("logits", [False, True])
def test_parts_that_are_stored_alike_share_a_launch(splits, logits):
    parts = []
    for seed, given in enumerate(PARTS):
        bounds = {name: jnp.array(given[name], jnp.int32) for name in ("start", "stop") if name in given}
        parts.append(make(seed, heads=2, **{**given, **bounds}))
    options = {"implementation": "mosaic_gpu", "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    run_all = functools.partial(
        weighted_decode_many, logits=logits, config=GpuConfig(stages=2, splits=splits), **options
    )
    launches = [one for one in equations(jax.make_jaxpr(run_all)(parts).jaxpr) if one.primitive.name == "mpmd_map"]
    assert len(launches) == 2
    for found, (rows, entries) in zip(jax.jit(run_all)(parts), parts, strict=True):
        compare(found, rows, entries, TOLERANCE[entries.slot_arrays["keys"].dtype.name])
        if logits:
            check_logits(found.logits, rows, entries)


def test_parts_that_a_kernel_cannot_do_are_left_to_xla_and_that_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_default_platform", lambda: "tpu")
    able, capped = make(), make(logit_cap=20.0)
    run_both = jax.jit(lambda *parts: weighted_decode_many(parts))
    for _ in range(2):
        lowered = run_both.trace(able, capped, make(rows=64)).lower(lowering_platforms=("tpu",)).as_text()
        run_both.clear_cache()
    assert lowered.count("tpu_custom_call") == 1
    assert [record.message for record in caplog.records] == [
        "weighted_decode: XLA instead of mosaic_tpu: logit_cap=20.0; only XLA caps logits"
    ]
    for found, alone in zip(run_both(able, capped, make(rows=64)), (able, capped, make(rows=64)), strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, run(*alone, "xla"))


@needs_gpu_interpreter
@pytest.mark.parametrize("key_bits, value_bits, head_dim", [(4, 4, 64), (3, 3, 128), (4, 2, 128), (2, None, 64)])
def test_the_kernel_for_gpus_brings_packed_numbers_apart(key_bits, value_bits, head_dim):
    rows, entries, plain = packed(key_bits, head_dim, value_bits=value_bits, batch=1, heads=1, slots=136)
    found = jax.jit(run_for_gpu)(rows, entries)
    compare(found, rows, plain, 2e-6)


@needs_gpu_interpreter
def test_the_kernel_for_gpus_reads_nothing_outside_and_tells_rows_without_entries():
    rows, entries = make(batch=1, fields=("log_num",), stop=jnp.array([64], jnp.int32))
    entries = dataclasses.replace(entries, **{"log_num": entries.log_num.at[0, 1].set(-jnp.inf)})
    spoilt = {name: getattr(entries, name).at[:, :, 64:].set(jnp.nan) for name in ("keys", "values", "log_num")}
    found = run_for_gpu(rows, dataclasses.replace(entries, **{**spoilt}))
    some = compare(found, rows, entries, 2e-6)
    assert some[0, 0].all() and not some[0, 1].any()


@needs_gpu_interpreter
def test_the_kernel_for_gpus_moves_no_more_bytes_than_it_has_to():
    stop = jnp.array([512], jnp.int32)
    rows, entries = make(batch=1, heads=1, slots=768, head_dim=128, dtype="bfloat16", fields=("log_num",), stop=stop)
    found = traffic.copied_for_gpu(run_for_gpu, rows, entries)
    least = 512 * (2 * 128 * 2 + 4) + rows.nbytes + 4 * 4 * (128 + 2)
    assert least <= found <= 1.05 * least


@needs_gpu_interpreter
def test_the_kernel_for_gpus_stays_one_under_vmap():
    one, other = (make(batch=1, heads=1, slots=64, seed=seed, stop=jnp.array([50], jnp.int32)) for seed in (0, 1))
    stack = jax.tree.map(lambda *x: jnp.stack(x), one, other)
    jaxpr = jax.make_jaxpr(jax.vmap(run_for_gpu))(*stack)
    assert not {"scan", "while"} & {equation.primitive.name for equation in jaxpr.eqns}
    assert re.findall(r"Mesh\(grid=(\([\d, ]*\)), grid_names=\((.*?)\)", str(jaxpr)) == [
        ("(1, 1, 2)", "'splits', 'heads', 'batch'")
    ]
    found = jax.vmap(run_for_gpu)(*stack)
    for number, given in enumerate((one, other)):
        compare(jax.tree.map(lambda x, n=number: x[n], found), *given, 2e-6)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"values": jnp.zeros((2, 2, 303, 64))}, ValueError, r"values has shape \(2, 2, 303, 64\)"),
        ({"log_den": jnp.zeros((2, 2, 304, 1))}, ValueError, "log_den has shape"),
        ({"stop": jnp.zeros(3, jnp.int32)}, ValueError, r"stop has shape \(3,\)"),
        ({"keys": jnp.zeros((2, 2, 304, 64), jnp.float16)}, NotImplementedError, "keys are float16"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message):
    rows, entries = make()
    with pytest.raises(error, match=message):
        weighted_decode(rows, dataclasses.replace(entries, **{**change}), implementation="mosaic_tpu", interpret=True)


@pytest.mark.parametrize("kernel", ["mosaic_tpu", "mosaic_gpu"])
@pytest.mark.parametrize(
    "change, message",
    [
        ({"logit_cap": 30.0}, "logit_cap=30.0; only XLA caps logits"),
        ({"values": jnp.ones((2, 2, 304, 32))}, "values have 32 dimensions and keys 64"),
    ],
)
def test_caps_and_values_of_another_width_are_xlas(kernel, change, message):
    """Asked for by name a kernel refuses them; left to choose, the operation computes them."""
    rows, entries = make()
    changed = dataclasses.replace(entries, **change)
    with pytest.raises(NotImplementedError, match=message):
        weighted_decode(rows, changed, implementation=kernel, interpret=True)
    found = weighted_decode(rows, changed)
    assert found.numerator.shape == (*rows.shape[:3], changed.values.shape[-1]) and np.isfinite(found.numerator).all()


def test_unknown_forms_and_many_rows_are_refused():
    rows, entries = make(rows=64)
    with pytest.raises(NotImplementedError, match="64 queries"):
        weighted_decode(rows, entries, implementation="mosaic_tpu", interpret=True)
    with pytest.raises(ValueError, match="implementation='cuda'"):
        weighted_decode(rows, entries, implementation="cuda")
    weighted_decode(rows, entries)  # falls through
    with pytest.raises(ValueError, match="block_slots=100; it must be None or a multiple of 128"):
        TpuConfig(block_slots=100)


@pytest.mark.parametrize(
    "given, changes, message",
    [
        ({"slots": 301}, {}, "2 heads of 301 slots; the copy engine needs a multiple of 8 slots"),
        ({"head_dim": 72}, {}, "head dimension 72"),
        ({"head_dim": 256}, {}, "bytes do not fit in shared memory"),
        ({"rows": 64}, {}, "64 queries"),
        ({}, {"keys": jnp.zeros((2, 2, 304, 64), jnp.int4)}, "keys are int4"),
        ({}, {"values": jnp.zeros((2, 2, 304, 64), jnp.bfloat16)}, "keys are float32 and values bfloat16"),
    ],
)
def test_what_the_kernel_for_gpus_cannot_do_is_refused(given, changes, message):
    rows, entries = make(**given)
    with pytest.raises(NotImplementedError, match=message):
        weighted_decode(rows, dataclasses.replace(entries, **{**changes}), implementation="mosaic_gpu", interpret=True)


@pytest.mark.parametrize("settings", [{"stages": 0}, {"splits": 0}])
def test_settings_of_the_kernel_for_gpus_are_checked(settings):
    with pytest.raises(ValueError, match="it must be None or at least 1"):
        GpuConfig(**settings)


@pytest.mark.parametrize("kind, heads, splits", [("TPU v5 lite", 1, 1), ("TPU v5p", 1, 2), ("TPU v5p", 2, 1)])
def test_cores_that_share_a_program_share_one_head(monkeypatch, kind, heads, splits):
    device = types.SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(dispatch, "target", lambda: device)
    rows, entries = make(batch=1, heads=heads, slots=1100)
    run_it = functools.partial(weighted_decode, implementation="mosaic_tpu", interpret=True)
    grids = re.findall(r"grid=\((.*?)\)", str(jax.make_jaxpr(run_it)(rows, entries)))
    assert grids == [f"1, {heads}, {splits}, {2 // splits}"]
    compare(jax.jit(run_it)(rows, entries), rows, entries, 2e-6)
