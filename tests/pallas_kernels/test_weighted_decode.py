"""Compares the implementations of `weighted_decode` with its oracle in float64, and measures the kernels' traffic."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, hopper, packing
from pallas_kernels.hopper import GpuConfig
from pallas_kernels.partials import MASK_VALUE
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.weighted_decode import (
    Entries,
    TpuConfig,
    mosaic_gpu,
    oracle,
    weighted_decode,
    weighted_decode_many,
    xla,
)
from pallas_kernels.weighted_decode import entries as entries_module
from pallas_kernels.weighted_decode.entries import COMPUTE_BOUND_QUERIES
from pallas_kernels.weighted_decode.slots_as_rows import SlotsAsRows
from tests.pallas_kernels import helpers, traffic

TPU = {"implementation": "mosaic_tpu", "interpret": True}
FORMS = helpers.make_forms(TpuConfig(block_slots=128))
FORMS["mosaic_tpu_split"] = {**TPU, "config": TpuConfig(128, splits=2)}
every_form = pytest.mark.parametrize("form", FORMS)
QUICK = ("xla", "mosaic_tpu", "device")
quick_form = pytest.mark.parametrize("form", [form for form in QUICK if form in FORMS])
# Relative to the largest sum: the error of rounding entries, queries and weights to the dtype.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-6, "int8": 2e-6, "float8_e4m3fn": 2e-6}


@functools.partial(jax.jit, static_argnames=("form", "logits"))
def run(queries, *stores, form, logits=False):
    return weighted_decode(queries, *stores, logits=logits, **FORMS[form])


def run_gpu(queries, *stores, splits=1, logits=False):
    # Few splits, so that several blocks use the same memory.
    return weighted_decode(queries, *stores, logits=logits, config=GpuConfig(stages=2, splits=splits), **helpers.GPU)


def run_tpu(queries, *stores):
    return weighted_decode(queries, *stores, **FORMS["mosaic_tpu"])


def make(
    seed=0, batch=2, heads=2, queries=4, slots=304, head_dim=64, dtype="float32", fields=(), feeds="both", norm=1.0,
    start=None, stop=None, logit_cap=None,
):  # fmt: skip
    """Returns queries, and entries with the log-weights and scales `fields` that feed both sums or one of them."""
    rng = np.random.default_rng(seed)
    per_slot = (batch, heads, slots)
    keys, values = (norm * rng.normal(size=(*per_slot, head_dim)) for _ in range(2))
    if dtype == "int8":
        keys, values = (np.clip(np.round(40 * x), -127, 127) for x in (keys, values))
    keys, values = jnp.asarray(keys, dtype), jnp.asarray(values, dtype)
    factors = {name: 0.02 if "scale" in name else 1.0 for name in fields}
    weights = {name: jnp.asarray(x * rng.normal(size=per_slot), jnp.float32) for name, x in factors.items()}
    query_dtype = "bfloat16" if dtype == "bfloat16" else "float32"
    q = jnp.asarray(norm * rng.normal(size=(batch, heads, queries, head_dim)), query_dtype)
    if feeds == "numerator":
        weights["log_den"] = jnp.full(per_slot, -jnp.inf)
    if "key_scale" in weights:
        keys = QuantizedArray(keys, weights.pop("key_scale"))
    if "value_scale" in weights:
        values = QuantizedArray(values, weights.pop("value_scale"))
    start, stop = (None if bound is None else jnp.asarray(bound, jnp.int32) for bound in (start, stop))
    values = None if feeds == "denominator" else values
    return q, Entries(keys, values, **weights, start=start, stop=stop, logit_cap=logit_cap)


def make_packed(bits, head_dim, value_bits=0, **sizes):
    """Returns queries, packed entries (with int8 values if `value_bits` is None), and the same entries in float32."""
    queries, entries = make(head_dim=head_dim, fields=("log_num", "key_scale", "value_scale"), **sizes)
    rng = np.random.default_rng(bits)
    packed, plain = {}, {}
    for name, width in {"keys": bits, "values": bits if value_bits == 0 else value_bits}.items():
        codes = rng.integers(0, 2 ** (width or 8), entries.keys.shape)
        numbers = 2 * codes - (2**width - 1) if width else codes - 128
        x = packing.pack(jnp.asarray(codes, jnp.uint8), width) if width else jnp.asarray(numbers, jnp.int8)
        scale = getattr(entries, name).scale.astype(jnp.bfloat16)
        packed[name] = QuantizedArray(x, scale, offset=jnp.ones((*x.shape[:2], head_dim)), bits=width)
        plain[name] = QuantizedArray(jnp.asarray(numbers, jnp.float32), scale.astype(jnp.float32))
    stop = jnp.array([[entries.slots], [201]])[: queries.shape[0]]
    plain = dataclasses.replace(entries, **plain, stop=stop)
    return queries, dataclasses.replace(plain, **packed), plain


def mask_some(entries):
    """Returns entries of which every seventh log-weight is -inf."""
    weights = {name: getattr(entries, name) for name in ("log_num", "log_den") if getattr(entries, name) is not None}
    return dataclasses.replace(entries, **{name: x.at[:, :, ::7].set(-jnp.inf) for name, x in weights.items()})


def expected(queries, *stores, **options):
    prepared = (entries_module.prepare(entries, queries.shape[2]) for entries in stores)
    return helpers.in_float64(oracle.weighted_decode, queries, *prepared, **options)


def compare(actual, queries, *stores, tolerance=2e-6, logits=False):
    """Compares sums, and logits where they are requested; returns which queries have entries."""
    if logits:
        reference = expected(queries, *stores, logits=True).logits
        is_read = reference > MASK_VALUE / 2
        np.testing.assert_array_equal(np.asarray(actual.logits) > MASK_VALUE / 2, is_read)
        np.testing.assert_allclose(np.asarray(actual.logits)[is_read], reference[is_read], rtol=1e-4, atol=1e-4)
    return helpers.compare_partials(actual, expected(queries, *stores), tolerance)


@quick_form
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_shapes_and_dtypes(form, head_dim, dtype):
    if dtype == "float16" and form == "mosaic_tpu":
        pytest.skip("the TPU kernel does not support float16")
    fields = ("key_scale", "value_scale", "log_num") if jnp.dtype(dtype).itemsize == 1 else ("log_num",)
    inputs = make(head_dim=head_dim, dtype=dtype, fields=fields, stop=[304, 130])
    compare(run(*inputs, form=form), *inputs, tolerance=TOLERANCE[dtype])


@every_form
@pytest.mark.parametrize("slots, queries", [(1, 3), (100, 1), (128, 8), (256, 3), (300, 1), (300, 8)])
def test_any_number_of_slots_and_queries(form, slots, queries):
    inputs = make(queries=queries, slots=slots, head_dim=128)
    compare(run(*inputs, form=form), *inputs)


RANGES = {
    "empty range": ([0, 40], [0, 40]),
    "one slot": ([303, 0], [304, 1]),
    "within a block": ([130, 5], [200, 6]),
    "across blocks": ([120, 1], [140, 299]),
    "of each query": ([[0, 10, 250, 7], [3, 3, 3, 3]], [[304, 10, 260, 8], [9, 130, 257, 3]]),
}


@every_form
@pytest.mark.parametrize("name", RANGES)
def test_only_slots_in_the_range_are_read(form, name):
    start, stop = (np.array(bound) for bound in RANGES[name])
    queries, entries = make(start=start, stop=stop, fields=("log_num",))
    some = compare(run(queries, entries, form=form), queries, entries)
    assert some.all() == (name in ("one slot", "within a block", "across blocks"))
    # Blocks outside the range may be NaN; on a GPU, a head's last block also contains slots of the next head.
    if start.ndim == 1 and form != "xla" and not (form == "device" and stop.max() == 304):
        block = np.arange(304) // 128
        is_read = (block >= start[:, None] // 128) & (block <= (stop[:, None] - 1) // 128)
        spoiled = dataclasses.replace(entries, keys=jnp.where(is_read[:, None, :, None], entries.keys, jnp.nan))
        compare(run(queries, spoiled, form=form), queries, entries)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "mosaic_tpu_checked"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bits", packing.PLANES)
def test_packed_numbers(form, head_dim, bits):
    queries, entries, plain = make_packed(bits, head_dim)
    compare(run(queries, entries, form=form, logits=True), queries, plain, logits=True)


@pytest.mark.parametrize("sizes", [{"slots": 330}, {"queries": COMPUTE_BOUND_QUERIES}], ids=str)
def test_quantized_entries_of_several_blocks_or_many_queries(sizes, monkeypatch):
    queries, entries, plain = make_packed(3, 64, **sizes)
    monkeypatch.setattr(xla, "DEQUANTIZED_BLOCK", 128 * queries.shape[0] * queries.shape[1] * 64)
    compare(weighted_decode(queries, entries, logits=True, implementation="xla"), queries, plain, logits=True)


def test_small_values_do_not_underflow_in_float16():
    """Weights times scales of values are below float16's normal numbers."""
    queries, entries = make(dtype="int8", queries=100, fields=("key_scale", "value_scale"))
    values = dataclasses.replace(entries.values, scale=entries.values.scale * 1e-5)
    entries, queries = dataclasses.replace(entries, values=values), queries.astype(jnp.float16)
    actual, expected = (weighted_decode(queries, entries, implementation=name) for name in ("xla", "oracle"))
    np.testing.assert_allclose(actual.numerator, expected.numerator, atol=1e-3 * np.max(np.abs(expected.numerator)))


@pytest.mark.parametrize("fields", [(), ("log_num", "log_den"), ("key_scale", "value_scale")])
def test_blocks_of_many_queries_add_up(monkeypatch, fields):
    monkeypatch.setattr(xla, "MANY_QUERIES_BLOCK", 64)
    # Of 304 slots, in four blocks and a partial one, the first and the last ones are not read by all queries.
    stop = np.minimum(np.arange(COMPUTE_BOUND_QUERIES) * 5, [[304], [190]])
    queries, entries = make(queries=COMPUTE_BOUND_QUERIES, fields=fields, start=[70, 0], stop=stop)
    compare(weighted_decode(queries, entries, logits=True, implementation="xla"), queries, entries, logits=True)


@quick_form
@pytest.mark.parametrize("feeds", ["both", "numerator", "denominator"])
@pytest.mark.parametrize("fields", [(), ("log_num", "log_den"), ("log_den",), ("key_scale", "value_scale")])
def test_weights_and_contributions(form, feeds, fields):
    queries, entries = make(fields=fields, feeds=feeds)
    entries = mask_some(entries)
    compare(run(queries, entries, form=form), queries, entries)


@every_form
def test_queries_without_entries(form):
    queries, entries = make()
    entries = dataclasses.replace(entries, log_num=jnp.full((2, 2, 304), -jnp.inf).at[0, 0, 303].set(0.0))
    some = compare(run(queries, entries, form=form), queries, entries)
    assert some[0, 0].all() and some.sum() == some[0, 0].size


@every_form
@pytest.mark.parametrize("feeds", ["both", "numerator"])
@pytest.mark.parametrize("stop", [None, [130, 0], [[304, 1, 7, 129], [2, 3, 4, 200]]])
def test_logits(form, feeds, stop):
    inputs = make(fields=("log_num", "log_den", "key_scale"), stop=stop, feeds=feeds)
    compare(run(*inputs, form=form, logits=True), *inputs, logits=True)


# Large and small, with and without weights, of several dtypes, for both sums or one of them.
STORES = (
    {"slots": 304, "fields": ("log_num",), "stop": [0, 264]},
    {"slots": 72, "start": [3, 0], "stop": [[60], [0]]},
    {"slots": 64, "feeds": "denominator", "fields": ("log_num", "log_den"), "norm": 2.0},
    {"slots": 136, "dtype": "int8", "fields": ("key_scale", "value_scale"), "start": [[0, 130, 9, 7], [5, 5, 5, 5]]},
    {"slots": 8, "feeds": "numerator"},
)


def make_stores(of=STORES, **sizes):
    """Returns queries, and the entries of several stores."""
    made = [make(seed, **store, **sizes) for seed, store in enumerate(of)]
    return made[0][0], [entries for _, entries in made]


@every_form
@pytest.mark.parametrize("of", [STORES, STORES[::-1]], ids=["in order", "backwards"])
def test_the_union_of_several_stores(form, of):
    queries, stores = make_stores(of)
    assert compare(run(queries, *stores, form=form), queries, *stores).all()
    traced = run.trace(queries, *stores, form=form)
    if form == "device":  # lowering removes the branches for other platforms
        kernels = re.findall("custom_call @(tpu_custom_call|mosaic_gpu)", traced.lower().as_text())
        on_hopper = hopper.HOPPER.search(jax.devices()[0].device_kind)
        assert len(kernels) == (1 if jax.default_backend() == "tpu" else 2 if on_hopper else 0)
    else:
        assert str(traced.jaxpr).count("pallas_call[") == (form != "xla")


@quick_form
def test_extreme_logits_cause_no_overflow(form):
    # Norms near 200 give logits of some thousands.
    inputs = make(norm=200 / 8, head_dim=64)
    compare(run(*inputs, form=form), *inputs, tolerance=2e-3)


def moved_bytes(queries, *stores, **config):
    return traffic.moved(functools.partial(weighted_decode, **TPU, **config), queries, *stores, run=False).total


@pytest.mark.parametrize("bits", packing.PLANES)
def test_the_kernel_reads_packed_entries_once(bits):
    queries, entries, _ = make_packed(bits, 128, slots=1024)
    parts = {name: dataclasses.replace(getattr(entries, name), offset=None) for name in ("keys", "values")}
    entries = dataclasses.replace(entries, **parts, start=None, stop=None)
    least = sum(x.nbytes for x in (queries, *jax.tree.leaves(entries))) + 4 * queries.shape[0] * 2 * 4 * (128 + 2)
    assert moved_bytes(queries, entries, config=TpuConfig(128)) <= 1.05 * least


def test_the_kernel_reads_occupied_blocks_of_several_stores_once():
    queries, stores = make_stores(({"slots": 1024, "stop": [600, 1024]}, {"slots": 64}), head_dim=128)
    least = 2 * (640 + 1024 + 2 * 64) * 2 * 128 * 4 + queries.nbytes + 4 * 2 * 2 * 4 * (128 + 2)
    traffic.check(moved_bytes(queries, *stores, config=TpuConfig(128)), least)


@pytest.mark.parametrize(
    "slots, head_dim, dtype, block",
    [(32768, 128, "bfloat16", 4096), (4096, 64, "float32", 1024), (4096, 128, "int8", 2048)],
)
def test_the_kernel_reads_occupied_blocks_once(slots, head_dim, dtype, block):
    batch, heads, count = 2, 8, 4
    per_slot = jnp.zeros((batch, heads, slots))
    stored = jnp.zeros((*per_slot.shape, head_dim), dtype)
    slot_bytes = 2 * head_dim * stored.dtype.itemsize + 4 * (3 if dtype == "int8" else 1)
    stored = QuantizedArray(stored, per_slot) if dtype == "int8" else stored
    queries = jnp.zeros((batch, heads, count, head_dim), jnp.bfloat16)

    def moved(*stop):
        return moved_bytes(queries, Entries(stored, stored, per_slot, stop=jnp.array(stop, jnp.int32)))

    results = 4 * batch * heads * count * (head_dim + 2)
    traffic.check(moved(slots, slots // 2), heads * (slots + slots // 2) * slot_bytes + queries.nbytes + results)
    # One more slot in the next block adds this block.
    assert moved(slots, slots // 2 + 1) - moved(slots, slots // 2) == heads * block * slot_bytes


@pytest.mark.parametrize("attend", [run_tpu, pytest.param(run_gpu, marks=helpers.gpu_kernel)])
def test_vmap_gives_one_kernel(attend):
    grids = [("(1, 2)", "'programs', 'batch'")] if attend is run_gpu else []
    sizes = {"batch": 1, "heads": 1, "slots": 64, "stop": [50]} if attend is run_gpu else {}
    inputs = [make(seed, **sizes) for seed in (0, 1)]
    actual = helpers.run_without_loop(jax.vmap(attend), *helpers.stack(*inputs), grids=grids)
    for i, one in enumerate(inputs):
        compare(helpers.pick(actual, i), *one)


# The interpreter takes two seconds per case, so each case tests several things.
GPU_CASES = {
    "bfloat16": {"dtype": "bfloat16", "head_dim": 128, "fields": ("log_num",), "queries": 8},
    "no log-weights": {"dtype": "bfloat16"},
    "no log-weights, converted": {"dtype": "float16", "feeds": "denominator"},
    "float16": {"dtype": "float16", "head_dim": 80, "fields": ("log_num",), "queries": 5},
    "float32": {"head_dim": 96, "slots": 104, "fields": ("log_num", "log_den")},
    "int8": {"dtype": "int8", "head_dim": 128, "fields": ("key_scale", "value_scale", "log_num")},
    "float8": {"dtype": "float8_e4m3fn", "head_dim": 80, "fields": ("key_scale", "value_scale")},
    "wide": {"dtype": "bfloat16", "head_dim": 256, "fields": ("log_den",)},
    "one block": {"slots": 8, "queries": 17},
    "numerator": {"feeds": "numerator", "fields": ("log_num", "log_den")},
    "denominator": {"feeds": "denominator", "fields": ("log_num", "log_den")},
    "norms of 200": {"norm": 200 / 8},
    "empty range": {"start": [0, 40], "stop": [0, 40], "batch": 2, "splits": None},
    "within blocks": {"start": [130, 303], "stop": [250, 304], "batch": 2, "splits": 2},
    "from before the first slot": {"start": [-200], "stop": [50], "heads": 2},
    "of each query": {"start": [[0, 10, 250, 7]], "stop": [[304, 10, 260, 8]], "fields": ("log_num",), "splits": 2},
    "logits": {"fields": ("log_num", "log_den"), "stop": [200, 0], "batch": 2, "logits": True, "splits": 2},
    "logits of each query": {"stop": [[304, 1, 7, 129]], "logits": True},
    "heads that end inside blocks": {"heads": 4, "slots": 72, "fields": ("log_num",), "logits": True},
}


def test_summands_of_queries_are_exact_however_xla_simplifies_conversions():
    x = jax.random.normal(jax.random.key(0), (8, 64))
    split = jax.jit(functools.partial(hopper.split_outside_kernels, parts=3, dtype=jnp.bfloat16, axis=0))
    parts = helpers.float64(split(x))
    assert np.abs(parts.sum(0) - helpers.float64(x)).max() < 1e-7 and (parts[1] != 0).mean() > 0.9
    # On GPUs, XLA removes a conversion to bfloat16 and back, but keeps this operation.
    assert split.lower(x).as_text().count("reduce_precision") == 3


def check_on_gpu(make_inputs, tolerance, batch=1, heads=1, splits=1, logits=False, **sizes):
    queries, entries = make_inputs(batch=batch, heads=heads, **sizes)
    entries = mask_some(entries)
    actual = jax.jit(functools.partial(run_gpu, splits=splits, logits=logits))(queries, entries)
    compare(actual, queries, entries, tolerance=tolerance, logits=logits)
    return queries, entries


@helpers.gpu_kernel
@pytest.mark.parametrize("case", GPU_CASES)
def test_the_gpu_kernel(case):
    sizes = GPU_CASES[case]
    check_on_gpu(make, 2e-3 if "norm" in sizes else TOLERANCE[sizes.get("dtype", "float32")], **sizes)


def count_gpu_launches(jaxpr):
    return sum(equation.primitive.name == "mpmd_map" for equation in helpers.equations(jaxpr.jaxpr))


@helpers.gpu_kernel
@pytest.mark.parametrize("splits", [2, None])
def test_the_gpu_kernel_has_one_launch_per_storage_format(splits):
    queries, stores = make_stores(({**STORES[0], "stop": [1, 264]}, *STORES[1:4]))
    traced = jax.jit(functools.partial(run_gpu, splits=splits)).trace(queries, *stores)
    assert count_gpu_launches(traced.jaxpr) == 2
    assert compare(traced.lower().compile()(queries, *stores), queries, *stores).all()


@helpers.gpu_kernel
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_the_gpu_kernel_multiplies_narrow_floats_of_any_scale(dtype, size):
    queries, entries = make(batch=1, heads=1, slots=136, dtype=dtype, fields=("log_num", "key_scale", "value_scale"))
    # Queries and scales are out of the range of float16; logits and the ratios of sums are not.
    spread = 10.0 ** np.random.default_rng(1).uniform(-3, 3, entries.values.scale.shape)
    queries = (queries * size).astype(jnp.bfloat16)
    keys = dataclasses.replace(entries.keys, scale=entries.keys.scale / size)
    values = dataclasses.replace(entries.values, scale=jnp.asarray(spread, jnp.float32) * size)
    entries = dataclasses.replace(entries, keys=keys, values=values)
    actual = jax.jit(run_gpu)(queries, entries)
    maximum, numerator, denominator, _ = expected(queries, entries)
    shift = np.exp(helpers.float64(actual.max) - maximum)
    np.testing.assert_allclose(np.asarray(actual.denominator) * shift, denominator, rtol=2e-6)
    error = np.asarray(actual.numerator) * shift[..., None] - numerator
    assert np.abs(error).max() <= 5e-4 * np.abs(numerator).max()


@helpers.gpu_kernel
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_small_values_do_not_underflow_in_float16_on_a_gpu(dtype):
    queries, entries = make(batch=1, heads=1, slots=136, dtype=dtype, fields=("key_scale", "value_scale"))
    values = dataclasses.replace(entries.values, scale=entries.values.scale * 1e-5)
    queries, entries = queries.astype(jnp.float16), dataclasses.replace(entries, values=values)
    actual, (maximum, numerator, *_) = jax.jit(run_gpu)(queries, entries), expected(queries, entries)
    error = np.asarray(actual.numerator) * np.exp(helpers.float64(actual.max) - maximum)[..., None] - numerator
    assert np.abs(error).max() <= 5e-4 * np.abs(numerator).max()


@helpers.gpu_kernel
def test_stores_whose_scales_differ_in_dtypes_have_separate_gpu_launches():
    stores, dtypes = [], (jnp.float32, jnp.bfloat16)
    for seed, order in enumerate((dtypes, dtypes[::-1])):
        queries, entries = make(seed, 1, 1, slots=64, dtype="int8", fields=("key_scale", "value_scale"))
        names = zip(("keys", "values"), order, strict=True)
        scaled = {name: QuantizedArray(getattr(entries, name).values, getattr(entries, name).scale.astype(dtype))
                  for name, dtype in names}  # fmt: skip
        stores.append(dataclasses.replace(entries, **scaled))
    compare(jax.jit(run_gpu)(queries, *stores), queries, *stores)


@helpers.gpu_kernel
@pytest.mark.parametrize("splits", [2, None])
@pytest.mark.parametrize("logits", [False, True])
def test_parts_of_one_storage_format_share_a_gpu_launch(splits, logits):
    parts = [make(seed, **sizes) for seed, sizes in enumerate(STORES[:4])]
    check_parts(parts, 2, 2e-6, GpuConfig(stages=2, splits=splits), logits=logits)


def check_parts(parts, launches, tolerance, config, logits=False):
    """Compares all parts in one program, which has this number of launches; returns the program."""
    run_parts = functools.partial(weighted_decode_many, config=config, logits=logits, **helpers.GPU)
    traced = jax.jit(run_parts).trace(parts)
    assert count_gpu_launches(traced.jaxpr) == launches
    for actual, part in zip(traced.lower().compile()(parts), parts, strict=True):
        compare(actual, *part, tolerance=tolerance, logits=logits)
    return traced.jaxpr


def test_unsupported_parts_run_in_xla_which_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_default_platform", lambda: "tpu")
    parts = make(), make(logit_cap=20.0), make(queries=64)
    run_parts = jax.jit(lambda *parts: weighted_decode_many(parts))
    for _ in range(2):
        lowered = run_parts.trace(*parts).lower(lowering_platforms=("tpu",)).as_text()
        run_parts.clear_cache()
    assert lowered.count("tpu_custom_call") == 1
    message = "weighted_decode runs without mosaic_tpu: logit_cap=20.0; only XLA caps logits"
    assert [record.message for record in caplog.records] == [message]
    for actual, part in zip(run_parts(*parts), parts, strict=True):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        jax.tree.map(close, actual, run(*part, form="xla"))


@helpers.gpu_kernel
@pytest.mark.parametrize(
    "key_bits, value_bits, head_dim", [(4, 4, 64), (3, 3, 128), (4, 2, 128), (2, None, 64), (4, "no values", 64)]
)
def test_the_gpu_kernel_unpacks_numbers(key_bits, value_bits, head_dim):
    bits = 0 if value_bits == "no values" else value_bits
    queries, entries, plain = make_packed(key_bits, head_dim, value_bits=bits, batch=1, heads=1, slots=136)
    if value_bits == "no values":
        entries, plain = (dataclasses.replace(each, values=None) for each in (entries, plain))
    compare(jax.jit(run_gpu)(queries, entries), queries, plain)


# Few bfloat16 queries and entries of 8 or 4 bits, which the matrix unit multiplies as bytes.
BYTE_CASES = {
    "int8": {"head_dim": 128, "fields": ("log_num",)},
    "int8, a query": {"head_dim": 64, "queries": 1, "slots": 8},
    "int8, wide": {"head_dim": 256, "queries": 9, "slots": 136},
    "int8, many queries": {"head_dim": 64, "queries": 32, "splits": 2},
    "int4": {"bits": 4, "head_dim": 128, "fields": ("log_num",)},
    "int4, wide": {"bits": 4, "head_dim": 256, "queries": 17, "slots": 136},
    "numerator": {"head_dim": 64, "feeds": "numerator", "fields": ("log_num",)},
    "denominator": {"bits": 4, "head_dim": 128, "feeds": "denominator", "fields": ("log_num", "log_den")},
    "two log-weights": {"bits": 4, "head_dim": 128, "fields": ("log_num", "log_den"), "splits": 2},
    "empty range": {"head_dim": 64, "start": [0, 40], "stop": [0, 40], "batch": 2, "splits": None},
    "within blocks": {"head_dim": 64, "start": [130, 303], "stop": [250, 304], "batch": 2, "splits": 2},
    "of each query": {"head_dim": 64, "start": [[0, 10, 250, 7]], "stop": [[304, 10, 260, 8]], "splits": 2},
    "logits": {"head_dim": 64, "fields": ("log_num", "log_den"), "stop": [200, 0], "batch": 2, "logits": True},
    "heads that end inside blocks": {"bits": 4, "head_dim": 128, "heads": 3, "slots": 72, "logits": True},
}


def make_bytes(bits=None, seed=0, **sizes):
    """Returns bfloat16 queries and entries of 8 or 4 bits, of which every seventh has no weight."""
    queries, entries = make(seed, dtype="int8", **sizes)
    rng = np.random.default_rng(seed + 1)

    def stored(x):
        if x is None:
            return None
        scale = jnp.asarray(0.03 * rng.uniform(0.2, 1, x.shape[:3]), jnp.bfloat16)
        if bits is None:
            return QuantizedArray(x, scale)
        codes = jnp.asarray(rng.integers(0, 2**bits, x.shape), jnp.uint8)
        return QuantizedArray(packing.pack(codes, bits), scale, bits=bits)

    entries = dataclasses.replace(entries, keys=stored(entries.keys), values=stored(entries.values))
    return queries.astype(jnp.bfloat16), mask_some(entries)


def is_multiplied_as_bytes(queries, entries):
    stores = [mosaic_gpu._Store(queries, entries)]
    return isinstance(mosaic_gpu._choose_form(stores, True), SlotsAsRows)


@helpers.gpu_kernel
@pytest.mark.parametrize("case", BYTE_CASES)
def test_the_gpu_kernel_multiplies_bytes(case):
    assert is_multiplied_as_bytes(*check_on_gpu(make_bytes, 2e-4, **BYTE_CASES[case]))


@helpers.gpu_kernel
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_bytes_are_as_exact_as_float32_at_any_scale(bits, size):
    queries, entries = make_bytes(bits, batch=1, heads=1, slots=264, head_dim=128)
    # Values of very different sizes share a block.
    spread = size * 10.0 ** np.random.default_rng(2).uniform(-2, 2, entries.values.scale.shape)
    spread[..., 5] = 0  # a vector of zeros has a weight in the denominator
    keys = dataclasses.replace(entries.keys, scale=entries.keys.scale / size)
    values = dataclasses.replace(entries.values, scale=jnp.asarray(spread, jnp.bfloat16))
    entries = dataclasses.replace(entries, keys=keys, values=values)
    queries = (queries * size).astype(jnp.bfloat16)
    compare(jax.jit(run_gpu)(queries, entries), queries, entries, tolerance=2e-4)


@helpers.gpu_kernel
def test_one_large_weight_does_not_hide_many_small_ones():
    queries, entries = make_bytes(batch=1, heads=1, slots=1024, head_dim=64)
    log_num = jnp.where(jnp.arange(1024) == 3, 12.0, 0.0) + jnp.zeros((1, 1, 1024))
    # The first slot of weight e^12 has values near zero, so that the others are most of the numerator.
    values = dataclasses.replace(entries.values, scale=entries.values.scale.at[..., 3].set(1e-6))
    entries = dataclasses.replace(entries, log_num=log_num, values=values)
    compare(jax.jit(run_gpu)(queries, entries), queries, entries, tolerance=2e-4)


@helpers.gpu_kernel
@pytest.mark.parametrize(
    "dtype, sizes, expected",
    [
        ("bfloat16", {"head_dim": 128}, True),
        ("bfloat16", {"bits": 4, "head_dim": 64}, False),  # 32 bytes of keys are too few for a product from registers
        ("bfloat16", {"head_dim": 80}, False),
        ("bfloat16", {"head_dim": 64, "queries": 33}, False),
        ("float32", {"head_dim": 128}, False),
    ],
)
def test_which_arguments_are_multiplied_as_bytes(dtype, sizes, expected):
    queries, entries = make_bytes(batch=1, heads=1, slots=16, **sizes)
    assert is_multiplied_as_bytes(queries.astype(dtype), entries) == expected
    run_gpu(queries.astype(dtype), entries)


@pytest.mark.parametrize("key_bits, value_bits, head_dim", [(2, 2, 80), (4, 2, 80), (3, None, 96), (3, 3, 112)])
def test_the_gpu_kernel_refuses_packed_numbers_that_have_no_swizzle(key_bits, value_bits, head_dim):
    queries, entries, _ = make_packed(key_bits, head_dim, value_bits, batch=1, heads=1, slots=16)
    with pytest.raises(NotImplementedError, match="columns at a time are too few for the matrix unit"):
        mosaic_gpu.check(queries, entries, interpret=True)


@helpers.gpu_kernel
def test_stores_of_bytes_share_a_gpu_launch():
    queries, first = make_bytes(batch=1, heads=2, slots=136, head_dim=64, fields=("log_num",))
    _, second = make_bytes(batch=1, heads=2, slots=72, head_dim=64, seed=5, stop=[40])
    stores = first, dataclasses.replace(second, values=None), second
    traced = jax.jit(functools.partial(run_gpu, splits=None)).trace(queries, *stores)
    assert count_gpu_launches(traced.jaxpr) == 1
    assert compare(traced.lower().compile()(queries, *stores), queries, *stores, tolerance=2e-4).all()


@helpers.gpu_kernel
@pytest.mark.parametrize("splits", [2, None])
def test_parts_with_other_numbers_of_heads_share_a_gpu_launch(splits):
    parts = [make_bytes(seed=seed, batch=2, heads=heads, slots=slots, head_dim=64)
             for seed, (heads, slots) in enumerate([(3, 136), (1, 520)])]  # fmt: skip
    program = check_parts(parts, 1, 2e-4, GpuConfig(stages=2, splits=splits))
    # The splits of all heads are merged together.
    assert [equation.primitive.name for equation in helpers.equations(program.jaxpr)].count("reduce_max") == 1


@pytest.mark.gpu_interpreter
@pytest.mark.parametrize("make_inputs, number_bytes, queries", [(make, 2, 4), (make_bytes, 1, 8)])
def test_the_gpu_kernel_reads_occupied_blocks_once(make_inputs, number_bytes, queries):
    options = {"dtype": "bfloat16", "fields": ("log_num",)} if make_inputs is make else {}
    q, entries = make_inputs(batch=1, heads=1, slots=768, head_dim=128, stop=[512], **options)
    # The log-weights of a slot, or the scales of its key and value.
    least = 512 * (2 * 128 * number_bytes + 4) + q.nbytes + 4 * queries * (128 + 2)
    traffic.check(traffic.copied_for_gpu(run_gpu, q, entries), least)


@helpers.gpu_kernel
def test_the_gpu_kernel_reads_nothing_out_of_range():
    queries, entries = make(batch=1, fields=("log_num",), stop=[64])
    entries = dataclasses.replace(entries, log_num=entries.log_num.at[0, 1].set(-jnp.inf))
    spoiled = {name: getattr(entries, name).at[:, :, 64:].set(jnp.nan) for name in ("keys", "values", "log_num")}
    some = compare(run_gpu(queries, dataclasses.replace(entries, **spoiled)), queries, entries)
    assert some[0, 0].all() and not some[0, 1].any()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"values": jnp.zeros((2, 2, 303, 64))}, r"values has shape \(2, 2, 303, 64\)"),
        ({"log_den": jnp.zeros((2, 2, 304, 1))}, "log_den has shape"),
        ({"stop": jnp.zeros(3, jnp.int32)}, r"stop has shape \(3,\)"),
        ({"keys": QuantizedArray(jnp.zeros((2, 2, 304, 32), jnp.uint8), jnp.zeros((2, 2, 304)), bits=2)},
         r"keys has shape \(2, 2, 304, 128\)"),
        ({"keys": QuantizedArray(jnp.zeros((2, 2, 304, 64), jnp.int8), jnp.zeros((2, 2, 303)))}, "key_scale has shape"),
    ],
)  # fmt: skip
def test_invalid_shapes_raise(change, message):
    queries, entries = make()
    with pytest.raises(ValueError, match=message):
        weighted_decode(queries, dataclasses.replace(entries, **change), **TPU)


@pytest.mark.parametrize(
    "value_dims, logits, message",
    [
        ((64, 64), True, "logits=True with 2 stores"),
        ((), False, "at least one store"),
        ((64, 128), False, "must have the same dimension"),
    ],
)
def test_invalid_stores_raise(value_dims, logits, message):
    queries, entries = make()
    stores = [dataclasses.replace(entries, values=jnp.zeros((2, 2, 304, value_dim))) for value_dim in value_dims]
    with pytest.raises(ValueError, match=message):
        weighted_decode(queries, *stores, logits=logits)


@pytest.mark.parametrize(
    "kernel, sizes, change, message",
    [
        ("mosaic_tpu", {"dtype": "float16"}, {}, "keys are float16"),
        ("mosaic_tpu", {"queries": 64}, {}, "64 queries"),
        ("mosaic_tpu", {"logit_cap": 30.0}, {}, "logit_cap=30.0; only XLA caps logits"),
        ("mosaic_tpu", {}, {"values": jnp.ones((2, 2, 304, 32))}, "values have 32 dimensions and keys 64"),
        ("mosaic_gpu", {"dtype": "int4"}, {}, "keys are int4"),
        ("mosaic_gpu", {"queries": 64}, {}, "64 queries"),
        ("mosaic_gpu", {"logit_cap": 30.0}, {}, "logit_cap=30.0; only XLA caps logits"),
        ("mosaic_gpu", {}, {"values": jnp.ones((2, 2, 304, 32))}, "values have 32 dimensions and keys 64"),
        ("mosaic_gpu", {}, {"values": jnp.zeros((2, 2, 304, 64), "bfloat16")}, "keys are float32 and values bfloat16"),
        ("mosaic_gpu", {"slots": 68}, {}, "a head has 68 slots; the copy engine needs a multiple of 8 slots per head"),
        ("mosaic_gpu", {"head_dim": 72}, {}, "head dimension 72"),
        ("mosaic_gpu", {"head_dim": 256}, {}, "bytes do not fit in shared memory"),
    ],
)
def test_kernels_reject_unsupported_arguments_which_xla_supports(kernel, sizes, change, message):
    queries, entries = make(**sizes)
    entries = dataclasses.replace(entries, **change)
    with pytest.raises(NotImplementedError, match=message):
        weighted_decode(queries, entries, implementation=kernel, interpret=True)
    actual = weighted_decode(queries, entries)
    assert actual.numerator.shape == (*queries.shape[:3], entries.value_dim) and np.isfinite(actual.numerator).all()


@pytest.mark.parametrize("kind, heads, splits", [("TPU v5 lite", 1, 1), ("TPU v5p", 1, 2), ("TPU v5p", 2, 1)])
def test_cores_that_share_a_program_share_one_head(monkeypatch, kind, heads, splits):
    monkeypatch.setattr(dispatch, "target", lambda: types.SimpleNamespace(device_kind=kind))
    inputs = make(batch=1, heads=heads, slots=1100)
    attend = functools.partial(weighted_decode, **TPU)
    grids = re.findall(r"grid=\((.*?)\)", str(jax.make_jaxpr(attend)(*inputs)))
    assert grids == [f"1, {heads}, {splits}, {2 // splits}"]
    compare(jax.jit(attend)(*inputs), *inputs)
