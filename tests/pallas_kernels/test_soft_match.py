"""Compares the implementations of `soft_match` with its oracle in float64, and measures the kernel's traffic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.soft_match import TpuConfig, oracle, soft_match
from tests.pallas_kernels import helpers, traffic

FORMS = helpers.make_forms(TpuConfig(block_keys=64))
every_form, quick_form = helpers.form_marks(FORMS)
QUICK = [form for form in FORMS if form != "mosaic_tpu_checked"]
TOLERANCE = 2e-6  # of cosines, in float32


@functools.partial(jax.jit, static_argnames=("chunk_size", "form"))
def run(keys, num_keys, chunk_size, form):
    return soft_match(keys, num_keys, chunk_size, **FORMS[form])


def make(slots, head_dim=64, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(slots, head_dim)) * rng.uniform(0.1, 9, (slots, 1)), dtype)


def compare(actual, keys, num_keys, chunk_size):
    best = helpers.in_float64(oracle.soft_match, keys, np.int32(num_keys), chunk_size=chunk_size)
    some = np.isfinite(best.cosine)
    assert actual.cosine.shape == actual.partner.shape == best.cosine.shape
    np.testing.assert_array_equal(np.asarray(actual.cosine)[~some], -np.inf)
    np.testing.assert_allclose(np.asarray(actual.cosine)[some], best.cosine[some], atol=TOLERANCE)
    # The partner is the best one, except for ties within rounding.
    index = np.flatnonzero(some)
    chunk, partner = index // (chunk_size // 2), np.asarray(actual.partner)[index]
    assert ((partner >= 0) & (partner < chunk_size // 2)).all()
    keys = helpers.float64(keys)
    keys /= np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-15)
    a, b = keys[2 * index], keys[chunk * chunk_size + 2 * partner + 1]
    np.testing.assert_allclose(np.sum(a * b, axis=1), best.cosine[index], atol=2 * TOLERANCE)
    return some


@quick_form
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shapes_and_dtypes(form, head_dim, dtype):
    keys = make(150, head_dim, dtype)
    assert compare(run(keys, 143, 32, form), keys, 143, 32).sum() == 72


@every_form
@pytest.mark.parametrize(
    "slots, chunk_size", [(64, 16), (70, 16), (100, 10), (7, 2), (5, 16), (300, 256), (1, 4), (96, 6)]
)
def test_any_number_of_keys_and_any_even_chunk_size(form, slots, chunk_size):
    keys = make(slots)
    compare(run(keys, slots, chunk_size, form), keys, slots, chunk_size)


@every_form
@pytest.mark.parametrize("num_keys", [0, 1, 2, 33, 64, 65, 100])
def test_keys_after_the_last_valid_one_are_ignored(form, num_keys):
    keys = make(100).at[num_keys:].set(jnp.nan)
    some = compare(run(keys, num_keys, 32, form), keys, num_keys, 32)
    # The last key has a partner unless it is the first of its chunk.
    assert some.sum() == (num_keys + 1) // 2 - (num_keys % 32 == 1)


@pytest.mark.parametrize("options", [*map(FORMS.get, QUICK), pytest.param(helpers.GPU, marks=helpers.gpu_kernel)])
def test_the_first_of_equal_cosines_is_chosen(options):
    keys = jnp.eye(64)[np.random.default_rng(0).integers(0, 3, 256)].at[5].set(0.0)
    actual = soft_match(keys, 256, 256, **options)
    expected = helpers.in_float64(oracle.soft_match, keys, np.int32(256), chunk_size=256)
    np.testing.assert_array_equal(actual.partner, expected.partner)


@quick_form
def test_zero_keys_and_large_norms(form):
    keys = make(64).at[5].set(0.0).at[8].set(0.0) * 200
    compare(run(keys, 64, 16, form), keys, 64, 16)
    zeros = run(jnp.zeros((64, 16)), 64, 16, form)
    assert not np.asarray(zeros.cosine).any() and not np.asarray(zeros.partner).any()


@pytest.mark.parametrize(
    "options, sizes, num_keys, slots, chunk_size",
    [
        (FORMS["mosaic_tpu"], (2, 3), [[100, 51, 0], [7, 100, 99]], 100, 32),
        pytest.param(helpers.GPU, (1, 2), [[128, 77]], 128, 128, marks=helpers.gpu_kernel),
    ],
)
def test_vmap_gives_one_kernel(options, sizes, num_keys, slots, chunk_size):
    keys = jnp.stack([make(slots, seed=seed) for seed in range(np.prod(sizes))]).reshape(*sizes, slots, 64)
    match = jax.vmap(jax.vmap(lambda keys, num_keys: soft_match(keys, num_keys, chunk_size, **options)))
    grids = [("(1, 1, 2)", "'tiles', 'chunks', 'batch'")] if options is helpers.GPU else []
    actual = helpers.run_without_loop(match, keys, jnp.array(num_keys), grids=grids)
    for at in np.ndindex(*sizes):
        compare(helpers.pick(actual, *at), keys[at], num_keys[at[0]][at[1]], chunk_size)


@pytest.mark.parametrize("slots, head_dim, dtype", [(16384, 128, "float32"), (16380, 64, "bfloat16")])
def test_the_kernel_reads_every_key_once(slots, head_dim, dtype):
    keys = jnp.zeros((slots, head_dim), dtype)
    match = functools.partial(soft_match, num_keys=slots, chunk_size=256, implementation="mosaic_tpu", interpret=True)
    traffic.check(traffic.moved(match, keys, run=False).total, keys.nbytes + 8 * slots // 2)


@helpers.gpu_kernel
@pytest.mark.parametrize(
    "slots, head_dim, dtype, chunk_size, num_keys",
    [
        (256, 64, "float32", 256, 250),
        (300, 128, "bfloat16", 128, 257),
        (333, 96, "float32", 160, 333),  # the second tile of a chunk is not full
        (140, 128, "float32", 128, 0),
    ],
)
def test_the_gpu_kernel(slots, head_dim, dtype, chunk_size, num_keys):
    keys = make(slots, head_dim, dtype)
    match = jax.jit(functools.partial(soft_match, chunk_size=chunk_size, **helpers.GPU))
    compare(match(keys.at[num_keys:].set(jnp.nan), num_keys), keys, num_keys, chunk_size)


@pytest.mark.parametrize(
    "kernel, shape, dtype, chunk_size, message",
    [
        ("mosaic_gpu", (64, 64), "float32", 64, "chunk_size=64"),
        ("mosaic_gpu", (64, 64), "float32", 136, "chunk_size=136"),
        ("mosaic_gpu", (64, 64), "float16", 128, "keys are float16"),
        ("mosaic_gpu", (64, 72), "float32", 128, "head dimension 72"),
        ("mosaic_gpu", (64, 256), "float32", 128, "do not fit in shared memory"),
        ("mosaic_tpu", (64, 64), "float16", 16, "keys are float16"),
        ("mosaic_tpu", (64, 64), "float32", 4096, "chunk_size=4096"),
        ("mosaic_tpu", (64, 160), "float32", 16, "keys have 160 dimensions"),
    ],
)
def test_kernels_reject_unsupported_arguments(kernel, shape, dtype, chunk_size, message):
    with pytest.raises(NotImplementedError, match=message):
        soft_match(jnp.zeros(shape, dtype), 64, chunk_size, implementation=kernel, interpret=True)
    soft_match(jnp.zeros(shape, dtype), 64, chunk_size)  # XLA supports them
    for invalid in (0, 7):
        with pytest.raises(ValueError, match=f"chunk_size={invalid}"):
            soft_match(jnp.zeros(shape, dtype), 64, invalid)
