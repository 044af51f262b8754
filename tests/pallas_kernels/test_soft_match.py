"""Every form of the search for partners against plain float64 cosines, and the kernel's traffic."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.soft_match import TpuConfig, soft_match
from tests.pallas_kernels import traffic
from tests.pallas_kernels.programs import equations

SMALL = TpuConfig(block_keys=64)
FORMS = {
    "xla": {"implementation": "xla"},
    "mosaic_tpu": {"implementation": "mosaic_tpu", "config": SMALL, "interpret": True},
    "mosaic_tpu_checked": {
        "implementation": "mosaic_tpu",
        "config": SMALL,
        "interpret": pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise"),
    },
}
if jax.default_backend() != "cpu":
    FORMS["device"] = {}  # the kernel of this machine, as programs run it
every_form = pytest.mark.parametrize("form", FORMS)
quick_form = pytest.mark.parametrize("form", [form for form in FORMS if form != "mosaic_tpu_checked"])
TOLERANCE = 2e-6  # of cosines, in float32


@functools.partial(jax.jit, static_argnames=("chunk", "form"))
def run(keys, count, chunk, form):
    return soft_match(keys, count, chunk, **FORMS[form])


def make(slots, head_dim=64, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(slots, head_dim)) * rng.uniform(0.1, 9, (slots, 1)), dtype)


def expected(keys, count, chunk):
    """Cosines [chunks, A, B] in float64, -inf where either is missing."""
    keys = np.asarray(keys, np.float64)
    slots = -(-len(keys) // chunk) * chunk
    keys = np.pad(np.where(np.arange(len(keys))[:, None] < count, keys, 0), ((0, slots - len(keys)), (0, 0)))
    norm = np.linalg.norm(keys, axis=1, keepdims=True)
    there = (np.arange(slots) < count).reshape(-1, chunk)
    split = (keys / np.where(norm > 0, norm, 1)).reshape(-1, chunk, keys.shape[1])
    cosine = np.einsum("nad,nbd->nab", split[:, ::2], split[:, 1::2])
    return np.where(there[:, ::2, None] & there[:, None, 1::2], cosine, -np.inf)


def compare(found, keys, count, chunk):
    cosine = expected(keys, count, chunk).reshape(-1, chunk // 2)
    best = cosine.max(axis=1)
    some = np.isfinite(best)
    assert found.cosine.shape == found.partner.shape == best.shape
    np.testing.assert_array_equal(np.asarray(found.cosine)[~some], -np.inf)
    np.testing.assert_allclose(np.asarray(found.cosine)[some], best[some], atol=TOLERANCE)
    # The place is that of the best but for ties within rounding.
    place = np.asarray(found.partner)
    assert ((place >= 0) & (place < chunk // 2))[some].all()
    assert (cosine[np.arange(len(place)), np.clip(place, 0, chunk // 2 - 1)] >= best - TOLERANCE)[some].all()
    clear = some & ((cosine >= best[:, None] - TOLERANCE).sum(axis=1) == 1)
    np.testing.assert_array_equal(place[clear], cosine.argmax(axis=1)[clear])
    return some


@quick_form
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shapes_and_types(form, head_dim, dtype):
    keys = make(150, head_dim, dtype)
    assert compare(run(keys, 143, 32, form), keys, 143, 32).sum() == 72


@every_form
@pytest.mark.parametrize("slots, chunk", [(64, 16), (70, 16), (100, 10), (7, 2), (5, 16), (300, 256), (1, 4), (96, 6)])
def test_any_number_of_keys_and_any_even_chunk(form, slots, chunk):
    keys = make(slots)
    compare(run(keys, slots, chunk, form), keys, slots, chunk)


@every_form
@pytest.mark.parametrize("count", [0, 1, 2, 33, 64, 65, 100])
def test_only_so_many_keys_are_there(form, count):
    keys = make(100).at[count:].set(jnp.nan)
    some = compare(run(keys, count, 32, form), keys, count, 32)
    # The last key finds a partner unless it is the first of its chunk.
    assert some.sum() == (count + 1) // 2 - (count % 32 == 1)


@quick_form
def test_of_equal_cosines_the_first_is_taken(form):
    keys = jnp.asarray(np.eye(4)[np.random.default_rng(0).integers(0, 3, 64)], jnp.float32)
    found = run(keys, 64, 32, form)
    np.testing.assert_array_equal(found.partner, expected(keys, 64, 32).argmax(axis=2).reshape(-1))


@quick_form
def test_keys_without_a_direction_and_large_norms(form):
    keys = make(64).at[5].set(0.0).at[8].set(0.0) * 200
    compare(run(keys, 64, 16, form), keys, 64, 16)
    nothing = run(jnp.zeros((64, 16)), 64, 16, form)
    np.testing.assert_array_equal(nothing.cosine, 0.0)
    np.testing.assert_array_equal(nothing.partner, 0)


def test_it_stays_one_kernel_under_vmap():
    keys = jnp.stack([make(100, seed=seed) for seed in range(6)]).reshape(2, 3, 100, 64)
    count = jnp.array([[100, 51, 0], [7, 100, 99]])
    search = jax.vmap(jax.vmap(lambda keys, count: soft_match(keys, count, 32, **FORMS["mosaic_tpu"])))
    traced = jax.jit(search).trace(keys, count)
    names = [equation.primitive.name for equation in equations(traced.jaxpr.jaxpr)]
    assert names.count("pallas_call") == 1
    assert not {"while", "scan"} & set(names)
    found = traced.lower().compile()(keys, count)
    for row in range(2):
        for head in range(3):
            one = jax.tree.map(lambda x, row=row, head=head: x[row, head], found)
            compare(one, keys[row, head], int(count[row, head]), 32)


@pytest.mark.parametrize("slots, head_dim, dtype", [(16384, 128, "float32"), (16380, 64, "bfloat16")])
def test_no_more_bytes_move_than_have_to(slots, head_dim, dtype):
    keys = jnp.zeros((slots, head_dim), dtype)
    found = traffic.moved(
        lambda keys: soft_match(keys, slots, 256, implementation="mosaic_tpu", interpret=True), keys, run=False
    )
    least = keys.nbytes + 8 * slots // 2
    assert least <= found.total <= 1.05 * least


needs_gpu_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter for GPU kernels came with JAX 0.11"
)


def run_for_gpu(keys, count, chunk):
    interpreter = plgpu.InterpretGPUParams(detect_races=True)
    return soft_match(keys, count, chunk, implementation="mosaic_gpu", interpret=interpreter)


@needs_gpu_interpreter
@pytest.mark.parametrize(
    "slots, head_dim, dtype, chunk, count",
    [
        (256, 64, "float32", 256, 250),
        (300, 128, "bfloat16", 128, 257),
        (333, 96, "float32", 160, 333),  # the second tile of a chunk is not full
        (140, 128, "float32", 128, 0),
    ],
)
def test_the_kernel_for_gpus(slots, head_dim, dtype, chunk, count):
    keys = make(slots, head_dim, dtype)
    found = jax.jit(run_for_gpu, static_argnums=2)(keys.at[count:].set(jnp.nan), count, chunk)
    compare(found, keys, count, chunk)


@needs_gpu_interpreter
def test_the_kernel_for_gpus_takes_the_first_of_equal_cosines():
    keys = jnp.asarray(np.eye(64)[np.random.default_rng(0).integers(0, 3, 256)], jnp.float32)
    found = run_for_gpu(keys.at[5].set(0.0), 256, 256)
    np.testing.assert_array_equal(found.partner, expected(keys.at[5].set(0.0), 256, 256).argmax(axis=2).reshape(-1))


@needs_gpu_interpreter
def test_the_kernel_for_gpus_stays_one_under_vmap():
    keys = jnp.stack([make(128, seed=seed) for seed in range(2)])[None]
    count = jnp.array([[128, 77]])
    search = jax.vmap(jax.vmap(functools.partial(run_for_gpu, chunk=128)))
    traced = jax.jit(search).trace(keys, count)
    assert not {"while", "scan"} & {equation.primitive.name for equation in traced.jaxpr.jaxpr.eqns}
    assert re.findall(r"Mesh\(grid=(\([\d, ]*\)), grid_names=\((.*?)\)", str(traced.jaxpr)) == [
        ("(1, 1, 2)", "'tiles', 'chunks', 'batch'")
    ]
    found = traced.lower().compile()(keys, count)
    for head in range(2):
        one = jax.tree.map(lambda x, head=head: x[0, head], found)
        compare(one, keys[0, head], int(count[0, head]), 128)


@pytest.mark.parametrize(
    "keys, chunk, message",
    [
        (jnp.zeros((64, 64)), 64, "chunk_size=64"),
        (jnp.zeros((64, 64)), 136, "chunk_size=136"),
        (jnp.zeros((64, 64), jnp.float16), 128, "keys are float16"),
        (jnp.zeros((64, 72)), 128, "head dimension 72"),
        (jnp.zeros((64, 256)), 128, "do not fit in shared memory"),
    ],
)
def test_what_the_kernel_for_gpus_cannot_do_is_refused(keys, chunk, message):
    with pytest.raises(NotImplementedError, match=message):
        soft_match(keys, 64, chunk, implementation="mosaic_gpu", interpret=True)


def test_what_cannot_be_is_refused():
    keys = make(64)
    for chunk in (0, 7):
        with pytest.raises(ValueError, match=f"chunk_size={chunk}"):
            soft_match(keys, 64, chunk)
    with pytest.raises(ValueError, match="implementation='cuda'"):
        soft_match(keys, 64, 16, implementation="cuda")
    with pytest.raises(NotImplementedError, match="keys are float16"):
        soft_match(keys.astype(jnp.float16), 64, 16, implementation="mosaic_tpu")
    with pytest.raises(NotImplementedError, match="chunk_size=4096"):
        soft_match(keys, 64, 4096, implementation="mosaic_tpu")
    with pytest.raises(NotImplementedError, match="keys have 160 dimensions"):
        soft_match(jnp.zeros((64, 160)), 64, 16, implementation="mosaic_tpu")
    with pytest.raises(ValueError, match="block_keys=0"):
        TpuConfig(block_keys=0)
    soft_match(keys.astype(jnp.float16), 64, 16)  # falls through
