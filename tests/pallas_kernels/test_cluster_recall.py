"""Compares the implementations of `cluster_recall` with its oracle in float64, and measures the kernels' traffic."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import benchmarking, hopper, packing
from pallas_kernels.cluster_recall import (
    Blocks,
    TpuConfig,
    cluster_recall,
    mosaic_gpu,
    mosaic_tpu,
    oracle,
    padded_width,
    xla,
)
from pallas_kernels.cluster_recall.blocks import Inputs
from pallas_kernels.hopper import GpuConfig
from tests.pallas_kernels import helpers, traffic

SMALL = TpuConfig(step_blocks=8, cores=1)
IN_XLA = ("xla_row_chunks", "xla_chunks", "xla_gather")
FORMS = helpers.make_forms(SMALL) | {
    **{name: {"implementation": name} for name in IN_XLA},
    "mosaic_tpu_cores": {
        "implementation": "mosaic_tpu",
        "config": TpuConfig(step_blocks=8, cores=2),
        "interpret": dataclasses.replace(helpers.CHECKED, num_cores_or_threads=2),
    },
    "gpu": helpers.GPU,
}
DEVICE = [form for form in FORMS if form == "device"]
checked_form = pytest.mark.parametrize("form", ("xla", "mosaic_tpu_checked", *DEVICE))
quick_form = pytest.mark.parametrize("form", ("xla", "mosaic_tpu", *DEVICE))
# Relative to the largest sum: the error of rounding entries, queries and weights to the dtype.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "int8": 2e-6, "float8_e4m3fn": 2e-6}
ONE_HEAD = {"batch": 1, "kv_heads": 1, "heads": 1}


@functools.partial(jax.jit, static_argnames=("form", "config"))
def run(inputs, form, **config):
    return cluster_recall(*inputs, **FORMS[form] | config)


def run_gpu(inputs, splits=1, stages=2):
    # Few splits, so that several blocks use the same memory.
    return run(inputs, "gpu", config=GpuConfig(stages, splits))


def make(
    seed=0, batch=2, kv_heads=2, heads=2, queries=4, blocks=9, selected=5, block_size=16, head_dim=64, dtype="float32",
    scaled=False, norm=1.0, lengths=None,
):  # fmt: skip
    """Returns inputs with random lengths. Unused columns, and tokens after the length, are random, too."""
    rng = np.random.default_rng(seed)
    shape = (batch, kv_heads, blocks, block_size)
    entries = norm * rng.normal(size=(*shape, 2 * padded_width(head_dim)))
    if dtype == "int8":
        entries = np.clip(np.round(40 * entries), -127, 127)
    scale = jnp.asarray(0.02 * rng.normal(size=(*shape, 2)), jnp.float32) if scaled else None
    q = norm * rng.normal(size=(batch, heads, queries, head_dim))
    # No block is selected twice.
    indices = np.argsort(rng.random((batch, heads, max(blocks, selected))), axis=-1)[..., :selected] % blocks
    random_lengths = rng.integers(0, block_size + 1, indices.shape)
    lengths = np.broadcast_to(random_lengths if lengths is None else lengths, indices.shape)
    q, store = (
        jnp.asarray(q, "bfloat16" if dtype == "bfloat16" else "float32"),
        Blocks(jnp.asarray(entries, dtype), scale),
    )
    return Inputs(q, store, jnp.int32(indices), jnp.asarray(lengths, jnp.int32))


def make_packed(key_bits, value_bits, head_dim, **sizes):
    """Returns inputs with packed blocks, and the same inputs with all numbers in float32."""
    inputs = make(head_dim=head_dim, scaled=True, **sizes)
    rng = np.random.default_rng(key_bits)
    packed, plain = [], []
    for bits in (key_bits, value_bits):
        codes = rng.integers(0, 2**bits, (*inputs.blocks.entries.shape[:4], head_dim))
        x = packing.pack(jnp.asarray(codes, jnp.uint8), bits)
        padding = packing.packed_width(padded_width(head_dim), bits) - x.shape[-1]
        packed.append(jnp.pad(x, [(0, 0)] * 4 + [(0, padding)], constant_values=173))
        plain.append(np.pad(2 * codes - (2**bits - 1), [(0, 0)] * 4 + [(0, padded_width(head_dim) - head_dim)]))
    scale = inputs.blocks.scale.astype(jnp.bfloat16)
    plain = Blocks(jnp.asarray(np.concatenate(plain, axis=-1), jnp.float32), scale.astype(jnp.float32))
    packed = Blocks(jnp.concatenate(packed, axis=-1), scale, key_bits=key_bits, value_bits=value_bits)
    return inputs._replace(blocks=packed), inputs._replace(blocks=plain)


def compare(actual, inputs, tolerance=2e-6):
    helpers.compare_partials(actual, helpers.in_float64(oracle.cluster_recall, inputs), tolerance)


def spoil_unread(inputs):
    """Returns inputs whose blocks are NaN if they are not read."""
    entries = inputs.blocks.entries
    is_read, group = np.zeros(entries.shape[:3], bool), inputs.queries.shape[1] // entries.shape[1]
    for b, h, k in zip(*np.nonzero(inputs.block_lengths), strict=True):
        is_read[b, h // group, inputs.block_indices[b, h, k]] = True
    spoiled = jnp.where(is_read[..., None, None], entries, jnp.nan)
    return inputs._replace(blocks=dataclasses.replace(inputs.blocks, entries=spoiled))


@pytest.mark.parametrize("head_dim", [64, 48])
@pytest.mark.parametrize("attend", [xla.attend_to_rows, xla.attend_to_columns])
def test_merged_chunks_give_the_partials_of_all_blocks(attend, head_dim):
    inputs = make(blocks=50, selected=40, head_dim=head_dim)  # two chunks of 16 blocks, and 8 blocks
    compare(jax.jit(functools.partial(xla.attend_in_chunks, attend))(inputs), inputs)


@quick_form
@pytest.mark.parametrize(
    "head_dim, dtype", [(head_dim, "float32") for head_dim in (64, 96, 128, 256)] + [(80, dtype) for dtype in TOLERANCE]
)
def test_shapes_and_dtypes(form, head_dim, dtype):
    inputs = make(head_dim=head_dim, dtype=dtype, scaled=jnp.dtype(dtype).itemsize == 1)
    compare(run(inputs, form), inputs, TOLERANCE[dtype])


@pytest.mark.parametrize("form", IN_XLA)
def test_every_form_in_xla_supports_what_another_one_is_preferred_for(form):
    for sizes in ({"head_dim": 80}, {"dtype": "bfloat16"}, {"dtype": "int8", "scaled": True}):
        inputs = make(**sizes)
        if form == "xla_row_chunks" and "scaled" in sizes:
            with pytest.raises(NotImplementedError, match="entries have factors"):
                run(inputs, form)
        else:
            compare(run(inputs, form), inputs, TOLERANCE[sizes.get("dtype", "float32")])


@pytest.mark.parametrize(
    "form, key_bits, value_bits, head_dim",
    [
        *(("xla", 3, 2, 64), ("mosaic_tpu_checked", 4, 4, 128), ("mosaic_tpu", 2, 2, 256), ("mosaic_tpu", 4, 4, 96)),
        *(("gpu", *sizes) for sizes in ((4, 4, 128), (3, 3, 128), (4, 2, 128), (2, 2, 64))),
    ],
)
def test_packed_numbers(form, key_bits, value_bits, head_dim):
    inputs, plain = make_packed(key_bits, value_bits, head_dim, selected=9, **(ONE_HEAD if form == "gpu" else {}))
    compare(run_gpu(inputs) if form == "gpu" else run(inputs, form), plain)


@pytest.mark.parametrize(
    "form, selected, queries, heads",
    [(form, *sizes) for form in ("xla", "mosaic_tpu_checked") for sizes in ((1, 3, 2), (8, 1, 6), (11, 3, 2))]
    + [("mosaic_tpu_cores", 11, 3, 2)],
)
def test_any_number_of_blocks_for_kv_heads_or_query_heads(form, selected, queries, heads):
    inputs = make(selected=selected, queries=queries, heads=heads, blocks=12)
    compare(run(inputs, form), inputs)


LENGTHS = {
    "nothing": 0,
    "everything": 16,
    "one token of the last block": np.arange(5) == 4,
    "one token of the first block": np.arange(5) == 0,
    "blocks in the middle are skipped": [16, 0, 0, 0, 3],
    "some heads read nothing": np.array([[0, 1], [2, 0]])[..., None],
    "only the last head reads": np.array([[0, 0], [0, 7]])[..., None],
}


@checked_form
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(form, name):
    inputs = make(lengths=LENGTHS[name])
    compare(run(inputs, form), inputs)


@checked_form
def test_blocks_that_are_not_selected_may_be_nan(form):
    inputs = make(selected=4)
    spoiled = spoil_unread(inputs._replace(block_lengths=jnp.ones_like(inputs.block_lengths)))
    compare(run(inputs._replace(blocks=spoiled.blocks), form), inputs)


@quick_form
def test_a_block_may_be_read_twice(form):
    inputs = make()
    indices = inputs.block_indices
    inputs = inputs._replace(block_indices=indices.at[..., 1].set(indices[..., 0]))
    compare(run(inputs, form), inputs)


@quick_form
def test_extreme_logits_cause_no_overflow(form):
    # Norms near 200 give logits of some thousands.
    inputs = make(norm=200 / 8)
    compare(run(inputs, form), inputs, tolerance=2e-3)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"entries": jnp.zeros((2, 2, 9, 16, 126))}, r"entries have shape \(2, 2, 9, 16, 126\)"),
        ({"entries": jnp.zeros((2, 3, 9, 16, 128))}, "H is a multiple of H_kv"),
        ({"scale": jnp.zeros((2, 2, 9, 16))}, r"scale has shape \(2, 2, 9, 16\)"),
        ({"key_bits": 4, "value_bits": 4}, "packed blocks with key_bits=4 need a scale"),
        ({"block_indices": jnp.zeros((2, 2, 0), jnp.int32)}, "block_indices has shape"),
        ({"block_lengths": jnp.zeros((2, 2, 4), jnp.int32)}, "block_lengths has shape"),
    ],
)
def test_invalid_shapes_raise(change, message):
    inputs, of_inputs = make(), change.keys() <= set(Inputs._fields)
    change = change if of_inputs else {"blocks": dataclasses.replace(inputs.blocks, **change)}
    with pytest.raises(ValueError, match=message):
        cluster_recall(*inputs._replace(**change))


@pytest.mark.parametrize(
    "kernel, sizes, message",
    [
        ("mosaic_tpu", {"queries": 64}, "64 queries"),
        ("mosaic_tpu", {"dtype": "float16"}, "entries are float16"),
        ("mosaic_tpu", {"head_dim": 32}, "blocks are 16 x 64"),
        ("mosaic_tpu", {"block_size": 8}, "blocks are 8 x 128"),
        ("mosaic_tpu", {"selected": 20000}, "20000 blocks per head"),
        ("mosaic_gpu", {"queries": 64}, "64 queries"),
        ("mosaic_gpu", {"head_dim": 32}, "blocks are 16 x 64"),
        ("mosaic_gpu", {"block_size": 24}, "blocks are 24 x 128"),
        ("mosaic_gpu", {"head_dim": 256}, "bytes do not fit in shared memory"),
    ],
)
def test_kernels_reject_unsupported_arguments(kernel, sizes, message):
    inputs = make(**ONE_HEAD, **sizes)
    with pytest.raises(NotImplementedError, match=message):
        cluster_recall(*inputs, implementation=kernel, interpret=True)
    if kernel == "mosaic_tpu":  # XLA supports them
        jax.jit(cluster_recall).trace(*inputs).lower(lowering_platforms=("tpu",))


TRAFFIC = {
    "four bits": {"head_dim": 128, "bits": 4, "kv_heads": 1, "heads": 1, "blocks": 256, "selected": 200},
    "wide heads": {"head_dim": 128, "dtype": "bfloat16"},
    "query heads": {"heads": 4, "queries": 1},
    "eight bits": {"dtype": "int8", "scaled": True},
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_the_kernel_copies_blocks_that_are_read_once(name):
    sizes = {"batch": 1, "blocks": 64, "selected": 24} | TRAFFIC[name]
    bits = sizes.pop("bits", None)
    inputs = make(**sizes) if bits is None else make_packed(bits, bits, **sizes)[0]
    queries, blocks, indices, lengths = inputs
    moved = traffic.moved(
        functools.partial(mosaic_tpu.recall_unmapped, config=SMALL, interpret=helpers.CHECKED), inputs
    )
    blocks_read = int((np.asarray(lengths) > 0).sum())
    assert blocks_read < lengths.size
    assert moved.copies == blocks_read * blocks.entries[0, 0, 0].nbytes
    partials = jax.eval_shape(cluster_recall, *inputs)
    scales = 0 if blocks.scale is None else indices.size * blocks.scale[0, 0, 0].nbytes
    traffic.check(moved.total, moved.copies + scales + benchmarking.array_bytes(queries, indices, lengths, partials))


@pytest.mark.parametrize("is_mapped", [True, False], ids=["stores", "one store"])
@pytest.mark.parametrize("form", ["mosaic_tpu", pytest.param("gpu", marks=helpers.gpu_kernel)])
def test_vmap_gives_one_kernel(form, is_mapped):
    inputs = make(heads=4, queries=2) if form == "mosaic_tpu" else make(**ONE_HEAD, selected=3)
    other = Inputs(2 * inputs.queries, jax.tree.map(lambda x: -x, inputs.blocks), 8 - inputs.block_indices,
                   16 - inputs.block_lengths)  # fmt: skip
    stacked, axes = helpers.stack(inputs, other), Inputs(0, 0, 0, 0)
    if not is_mapped:
        stacked, axes = stacked._replace(blocks=inputs.blocks), axes._replace(blocks=None)
    mapped = jax.vmap(lambda inputs: cluster_recall(*inputs, **FORMS[form]), in_axes=(axes,))
    grids = [("(1, 1, 2)" if is_mapped else "(1, 2, 1)", "'splits', 'heads', 'batch'")] if form == "gpu" else []
    actual = helpers.run_without_loop(mapped, stacked, grids=grids)
    for i, one in enumerate((inputs, other)):
        compare(helpers.pick(actual, i), one if is_mapped else one._replace(blocks=inputs.blocks))


# The interpreter takes two seconds per case, so each case tests several things.
GPU_CASES = {
    "bfloat16": {"dtype": "bfloat16", "head_dim": 128, "selected": 11, "blocks": 12},
    "float16": {"dtype": "float16", "head_dim": 64, "queries": 9, "selected": 9},
    "float32": {"head_dim": 80, "stages": 1},
    "int8": {"dtype": "int8", "head_dim": 96, "scaled": True},
    "float8": {"dtype": "float8_e4m3fn", "head_dim": 64, "scaled": True, "block_size": 32},
    "wide": {"dtype": "bfloat16", "head_dim": 256, "block_size": 8, "selected": 9},
    "of query heads": {"queries": 1, "heads": 2, "block_size": 64, "splits": 2},
    "norms of 200": {"norm": 200 / 8, "splits": 2},
    "nothing": {"lengths": 0},
    "everything": {"lengths": 16, "selected": 8, "splits": 2},
    "one token of the last block": {"lengths": np.arange(9) == 8, "selected": 9, "splits": 3},
    "blocks in the middle are skipped": {"lengths": [16, 0, 0, 0, 0, 0, 0, 0, 3], "selected": 9},
}


@helpers.gpu_kernel
@pytest.mark.parametrize("case", GPU_CASES)
def test_the_gpu_kernel(case):
    sizes = {**ONE_HEAD, "blocks": 10} | GPU_CASES[case]
    config = {name: sizes.pop(name) for name in ("splits", "stages") if name in sizes}
    inputs = make(**sizes)
    is_float = jnp.issubdtype(inputs.blocks.entries.dtype, jnp.floating)
    tolerance = 2e-3 if "norm" in sizes else TOLERANCE.get(sizes.get("dtype", "float32"), 2e-6)
    compare(run_gpu(spoil_unread(inputs) if is_float else inputs, **config), inputs, tolerance)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="lowers the GPU kernel as GPU machines do")
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("bits", itertools.product((4, 3, 2), repeat=2))
def test_the_gpu_kernel_lowers_for_the_packed_numbers_that_it_supports(head_dim, bits, monkeypatch):
    monkeypatch.setattr(hopper, "check_device", lambda: None)  # lowering needs no GPU and no CUDA compiler
    inputs, _ = make_packed(*bits, head_dim, **ONE_HEAD)
    try:
        mosaic_gpu.check(inputs, interpret=False)
    except NotImplementedError:
        assert bits[0] != bits[1] or 3 in bits  # otherwise, all are supported
        return
    recall = jax.jit(functools.partial(cluster_recall, implementation="mosaic_gpu"))
    recall.trace(*inputs).lower(lowering_platforms=("cuda",))


@pytest.mark.gpu_interpreter
def test_the_gpu_kernel_copies_blocks_that_are_read_once():
    lengths = jnp.arange(20) % 5  # every fifth block is not read
    inputs = make(**ONE_HEAD, blocks=32, selected=20, head_dim=128, dtype="bfloat16", lengths=lengths)
    actual = traffic.copied_for_gpu(run_gpu, inputs)
    traffic.check(actual, 16 * 16 * 2 * 128 * 2 + inputs.queries.nbytes + 4 * 4 * (128 + 2))
