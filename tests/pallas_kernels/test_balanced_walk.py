"""Compares the implementations of the balanced walk with its oracle in float64, and measures the kernel's traffic."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import batching
from pallas_kernels.balanced_walk import Block, TpuConfig, assign_signs, oracle
from tests.pallas_kernels import helpers, traffic

FORMS = helpers.make_forms(TpuConfig()) | ({"mosaic_gpu": helpers.GPU} if helpers.RUNS_GPU_KERNELS else {})
every_form, quick_form = helpers.form_marks(FORMS)
# Within this distance of its probability, a draw may be decided by rounding; so may the nearer of two distances.
TOLERANCE = 1e-4


@functools.partial(jax.jit, static_argnames="form")
def run_signs(block, uniforms, gain, weight, form):
    return assign_signs(block, uniforms, gain, weight, **FORMS[form])


def make(entries=40, head_dim=64, values=True, norm=2.0, empty=(), seed=0):
    """Returns a block, draws, and weights."""
    rng = np.random.default_rng(seed)
    is_present = ~np.isin(np.arange(entries), empty)

    def vectors(norm):
        x = rng.normal(size=(entries, head_dim))
        return np.where(is_present[:, None], norm * x / np.linalg.norm(x, axis=1, keepdims=True), 0)

    keys, factor = vectors(norm), 1 / np.sqrt(head_dim)
    block = Block(keys, vectors(1.0) if values else None, factor, 0.1 if values else 0.0)
    weights = np.where(is_present, rng.choice([1.0, 2.0, 3.5], entries), 0)
    inputs = block, rng.random(entries), weights
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), inputs)


def compare_signs(actual, block, uniforms, gain, weight):
    """Checks that each sign follows from the signs before it; returns the number of clipped decisions."""
    entries, keys = len(uniforms), helpers.float64(block.keys)
    kernel = np.exp(float(block.factor) * keys @ keys.T)
    if block.values is not None:
        values = helpers.float64(block.values)
        kernel *= values @ values.T + float(block.offset)
    gain, weight = (np.broadcast_to(helpers.float64(x), entries) for x in (gain, weight))
    sums, clipped, close = np.zeros(entries), 0, 0
    for i, sign in enumerate(np.asarray(actual.signs)):
        tilt = gain[i] * sums[i]
        clipped += abs(tilt) > 0.5
        margin = 0.5 - tilt - float(uniforms[i])
        close += abs(margin) <= TOLERANCE
        assert sign in (-1.0, 1.0)
        assert sign == (1.0 if margin > 0 else -1.0) or abs(margin) <= TOLERANCE
        sums += sign * weight[i] * kernel[i]
    assert abs(int(actual.num_clipped) - clipped) <= close <= 1 + entries / 20
    if not close:
        expected = helpers.in_float64(oracle.assign_signs, block, uniforms, gain, weight)
        np.testing.assert_array_equal(actual.signs, expected.signs)
        assert actual.num_clipped == expected.num_clipped
    return clipped


@quick_form
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("values", [True, False])
def test_shapes(form, head_dim, values):
    block, uniforms, weight = make(96, head_dim, values)
    weight = weight / weight.max()
    compare_signs(run_signs(block, uniforms, 0.3 * weight, weight, form), block, uniforms, 0.3 * weight, weight)


@every_form
@pytest.mark.parametrize("entries", [2, 7, 20, 130])
def test_any_number_of_entries(form, entries):
    block, uniforms, _ = make(entries)
    compare_signs(run_signs(block, uniforms, 0.3, 1.0, form), block, uniforms, 0.3, 1.0)


@every_form
@pytest.mark.parametrize("empty", [(0,), range(30, 40), (3, 8, 9, 20), range(40)])
def test_entries_of_weight_zero_do_not_affect_the_others(form, empty):
    block, uniforms, weights = make(empty=empty)
    actual = run_signs(block, uniforms, 0.3, weights, form)
    compare_signs(actual, block, uniforms, 0.3, weights)
    present = np.flatnonzero(weights)
    if len(present):
        alone = dataclasses.replace(block, keys=block.keys[present], values=block.values[present])
        signs = run_signs(alone, uniforms[present], 0.3, weights[present], form).signs
        np.testing.assert_array_equal(actual.signs[present], signs)


@quick_form
@pytest.mark.parametrize("norm, gain", [(0.5, 5.0), (45.0, 4.0), (60.0, 1e-25)])
def test_large_gains_are_clipped_and_large_keys_cause_no_overflow(form, norm, gain):
    """At norms of 45 and 60 exponents are up to 250 and 450, which float64 has and float32 does not."""
    block, uniforms, weight = make(130, norm=norm)
    keys = block.keys + 0.5 * jnp.roll(block.keys, 1, axis=0)  # neighbors are similar, as they are after RoPE
    block = dataclasses.replace(block, keys=keys * norm / jnp.linalg.norm(keys, axis=1, keepdims=True))
    assert compare_signs(run_signs(block, uniforms, gain, weight, form), block, uniforms, gain, weight) > 0


@quick_form
def test_equal_keys_are_balanced_where_exponents_exceed_float64(form):
    block, uniforms, _ = make(130, values=False, norm=200.0)  # exponents of 5,000
    block = dataclasses.replace(block, keys=jnp.broadcast_to(block.keys[0], block.keys.shape))
    signs = np.asarray(run_signs(block, uniforms, 4.0, 1.0, form).signs)
    assert np.all(np.abs(np.cumsum(signs)) <= 1)


@pytest.mark.parametrize(
    "options",
    [
        *({**FORMS["mosaic_tpu"], "config": TpuConfig(blocks_per_step)} for blocks_per_step in (1, 4)),
        pytest.param(helpers.GPU, marks=helpers.gpu_kernel),
    ],
    ids=["1 block", "4 blocks", "gpu"],
)
def test_vmap_processes_blocks_in_one_kernel(options):
    inputs = helpers.stack(*(make(20, seed=seed, empty=range(17, 17 + seed % 4)) for seed in range(6)))
    inputs = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), inputs)

    def run(block, uniforms, weights):
        # All blocks share some arguments.
        return assign_signs(block, uniforms, 0.3, weights, **options)

    grids = [("(6,)", "'blocks',")] if options is helpers.GPU else []
    actual = helpers.run_without_loop(jax.vmap(jax.vmap(run)), *inputs, grids=grids)
    for at in np.ndindex(2, 3):
        signs, (block, uniforms, weights) = helpers.pick(actual, *at), helpers.pick(inputs, *at)
        compare_signs(signs, block, uniforms, 0.3, weights)


def test_forms_agree_in_control_flow():
    """A conditional, a loop over groups and a scan, as policies use them."""
    inputs = helpers.stack(*(make(24, seed=seed) for seed in range(4)))

    @functools.partial(jax.jit, static_argnames="form")
    def walk(inputs, is_wanted, form):
        def assign(item):
            return assign_signs(item[0], item[1], 0.3, item[2], **FORMS[form])

        def step(carry, _):
            grouped = jax.lax.map(assign, inputs, batch_size=3)
            return jax.lax.cond(is_wanted, lambda: grouped, lambda: carry), None

        return jax.lax.scan(step, jax.tree.map(jnp.zeros_like, jax.lax.map(assign, inputs)), None, length=2)[0]

    kernel, xla = walk(inputs, True, "mosaic_tpu"), walk(inputs, True, "xla")
    np.testing.assert_array_equal(kernel.signs, xla.signs)
    assert not np.asarray(walk(inputs, False, "mosaic_tpu").signs).any()


@pytest.mark.parametrize("entries, head_dim", [(512, 128), (256, 64)])
def test_the_kernel_reads_every_entry_once(entries, head_dim):
    block, uniforms, weights = make(entries, head_dim)
    gain = jnp.full_like(weights, 0.3)
    assign = functools.partial(assign_signs, **FORMS["mosaic_tpu"])
    # Arrays that are traced for `vmap` cannot be counted.
    with mock.patch.object(batching, "fold_mapped_axes", lambda run: run):
        actual = traffic.moved(assign, block, uniforms, gain, weights, run=False)
    traffic.check(actual.total, sum(x.nbytes for x in jax.tree.leaves((block, uniforms, gain, weights))) + 4 * entries)


@pytest.mark.parametrize(
    "kernel, entries, changes, error, message",
    [
        ("mosaic_tpu", 40, {"values": jnp.zeros((20, 64))}, ValueError, r"values have shape \(20, 64\)"),
        ("mosaic_tpu", 40, {"keys": jnp.zeros((20, 64)), "values": None}, ValueError, r"uniforms has shape \(40,\)"),
        ("mosaic_tpu", 40, {"keys": jnp.zeros((40, 64), jnp.bfloat16)}, NotImplementedError, "keys are bfloat16"),
        ("mosaic_tpu", 8192, {}, NotImplementedError, "8192 entries"),
        ("mosaic_gpu", 8192, {}, NotImplementedError, "8192 entries"),
    ],
)
def test_invalid_and_unsupported_arguments_raise(kernel, entries, changes, error, message):
    block, uniforms, _ = make(entries)
    with pytest.raises(error, match=message):
        assign_signs(dataclasses.replace(block, **changes), uniforms, 1.0, implementation=kernel, interpret=True)
