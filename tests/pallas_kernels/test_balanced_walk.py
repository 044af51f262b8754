"""Every form of the walk against plain float64 loops, and the kernel's traffic."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import batching
from pallas_kernels.balanced_walk import (
    Block,
    TpuConfig,
    assign_signs,
    kernel_diagonal,
    kernel_matrix,
    thin_pairs,
)
from tests.pallas_kernels import traffic
from tests.pallas_kernels.programs import equations

FORMS = {
    "xla": {"implementation": "xla"},
    "mosaic_tpu": {"implementation": "mosaic_tpu", "interpret": True},
    "mosaic_tpu_checked": {
        "implementation": "mosaic_tpu",
        "interpret": pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise"),
    },
}
if hasattr(plgpu, "InterpretGPUParams"):  # from JAX 0.11 on
    FORMS["mosaic_gpu"] = {"implementation": "mosaic_gpu", "interpret": plgpu.InterpretGPUParams(detect_races=True)}
if jax.default_backend() != "cpu":
    FORMS["device"] = {}  # the kernel of this machine, as programs run it
every_form = pytest.mark.parametrize("form", FORMS)
quick_form = pytest.mark.parametrize("form", [form for form in FORMS if form != "mosaic_tpu_checked"])
# How near to its probability a draw may lie, and how near to each other two distances, for rounding to decide.
TOLERANCE = 1e-4


@functools.partial(jax.jit, static_argnames="form")
def run_signs(block, uniforms, gain, weight, form):
    return assign_signs(block, uniforms, gain, weight, **FORMS[form])


@functools.partial(jax.jit, static_argnames="form")
def run_pairs(block, uniforms, weights, gamma, form):
    return thin_pairs(block, uniforms, weights, gamma, **FORMS[form])


def make(entries=40, head_dim=64, values=True, norm=2.0, empty=(), seed=0):
    """A block, draws for signs, draws for pairs, and weights."""
    rng = np.random.default_rng(seed)
    there = ~np.isin(np.arange(entries), empty)

    def vectors(norm):
        x = rng.normal(size=(entries, head_dim))
        return jnp.asarray(
            np.where(there[:, None], norm * x / np.linalg.norm(x, axis=1, keepdims=True), 0), jnp.float32
        )

    keys, factor = vectors(norm), 1 / np.sqrt(head_dim)
    number = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    block = Block(
        keys=keys,
        values=vectors(1.0) if values else None,
        factor=number(factor),
        shift=number(factor * norm**2),
        offset=number(0.1 if values else 0.0),
    )
    weights = np.where(there, rng.choice([1.0, 2.0, 3.5], entries), 0)
    return block, number(rng.random(entries)), number(rng.random(entries // 2)), number(weights)


def plain_matrix(block):
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
    kernel = np.exp(wide(block.factor) * wide(block.keys) @ wide(block.keys).T - wide(block.shift))
    if block.values is not None:
        kernel *= wide(block.values) @ wide(block.values).T + wide(block.offset)
    return kernel


def compare_signs(found, block, uniforms, gain, weight):
    """Follows the signs that were found: each must be the one that those before it call for."""
    kernel, entries = plain_matrix(block), len(uniforms)
    gain, weight = (np.broadcast_to(np.asarray(x, np.float64), entries) for x in (gain, weight))
    sums, clipped, within = np.zeros(entries), 0, 0
    for place, sign in enumerate(np.asarray(found.signs)):
        tilt = gain[place] * sums[place]
        clipped += abs(tilt) > 0.5
        margin = 0.5 - tilt - float(uniforms[place])
        within += abs(margin) <= TOLERANCE
        assert sign in (-1.0, 1.0)
        assert sign == (1.0 if margin > 0 else -1.0) or abs(margin) <= TOLERANCE
        sums += sign * weight[place] * kernel[place]
    assert abs(int(found.num_clipped) - clipped) <= within
    assert within <= 1 + entries / 20
    return clipped


def compare_pairs(found, block, uniforms, weights, gamma):
    """Follows the pairs that were found, likewise. An entry that goes is not told: it is the nearest left."""
    kernel, weights = plain_matrix(block), np.asarray(weights, np.float64)
    own, entries = np.diagonal(kernel), len(weights)
    free = [*np.flatnonzero(weights > 0), *np.flatnonzero(weights == 0)]
    sums, clipped, within = np.zeros(entries), 0, 0
    largest = max(weights.max(), 1e-30)
    for number, uniform in enumerate(np.asarray(uniforms, np.float64)):
        first = free.pop(0)
        away = np.array([own[j] - 2 * kernel[first, j] if weights[j] > 0 else 3e38 for j in free])
        second = free.pop(int(np.argmin(away)))
        total = weights[first] + weights[second]
        share = weights[first] / total if total else 0.5
        apart = max(own[first] + own[second] - 2 * kernel[first, second], 1e-6 * own.max() + 1e-30)
        tilt = 4 * share * (1 - share) * gamma * (sums[first] - sums[second]) / apart
        clipped += abs(share - tilt - 0.5) > 0.5
        kept = int(found.indices[number])
        assert kept in (first, second)
        margin = share - tilt - uniform
        within += abs(margin) <= TOLERANCE
        assert kept == (first if margin > 0 else second) or abs(margin) <= TOLERANCE
        assert found.weights[number] == pytest.approx(total)
        sums += (weights[second] if kept == first else -weights[first]) / largest * (kernel[first] - kernel[second])
    assert abs(int(found.num_clipped) - clipped) <= within
    return clipped


@quick_form
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("values", [True, False])
def test_shapes(form, head_dim, values):
    block, of_signs, of_pairs, weights = make(96, head_dim, values)
    weight = weights / weights.max()
    compare_signs(run_signs(block, of_signs, 0.3 * weight, weight, form), block, of_signs, 0.3 * weight, weight)
    compare_pairs(run_pairs(block, of_pairs, weights, 4.0, form), block, of_pairs, weights, 4.0)


@every_form
@pytest.mark.parametrize("entries", [2, 7, 20, 130])
def test_any_number_of_entries(form, entries):
    block, of_signs, of_pairs, weights = make(entries)
    compare_signs(run_signs(block, of_signs, 0.3, 1.0, form), block, of_signs, 0.3, 1.0)
    compare_pairs(run_pairs(block, of_pairs, weights, 0.5, form), block, of_pairs, weights, 0.5)


@every_form
@pytest.mark.parametrize("empty", [(0,), range(30, 40), (3, 8, 9, 20), range(40)])
def test_empty_places_come_last_and_what_meets_them_stays(form, empty):
    block, _, of_pairs, weights = make(empty=empty)
    found = run_pairs(block, of_pairs, weights, 4.0, form)
    compare_pairs(found, block, of_pairs, weights, 4.0)
    assert np.count_nonzero(found.weights) == -(-np.count_nonzero(weights) // 2)
    assert float(found.weights.sum()) == pytest.approx(float(weights.sum()))


@quick_form
def test_strong_walks_are_clipped(form):
    block, of_signs, of_pairs, weights = make(norm=0.5)
    assert compare_signs(run_signs(block, of_signs, 5.0, 1.0, form), block, of_signs, 5.0, 1.0) > 0
    assert compare_pairs(run_pairs(block, of_pairs, weights, 20.0, form), block, of_pairs, weights, 20.0) > 0


@quick_form
def test_keys_of_large_norm_neither_overflow_nor_spoil_choices(form):
    block, of_signs, of_pairs, weights = make(norm=200.0)
    found = run_pairs(block, of_pairs, weights, 4.0, form)
    assert len(set(np.asarray(found.indices).tolist())) == 20
    assert float(found.weights.sum()) == pytest.approx(float(weights.sum()))
    # Every entry is orthogonal to every other: no sum ever turns a sign.
    sign = run_signs(block, of_signs, 0.3, 1.0, form).signs
    np.testing.assert_array_equal(sign, np.where(np.asarray(of_signs) < 0.5, 1.0, -1.0))


def test_the_matrix_and_its_diagonal_are_those_of_the_definition():
    for values in (True, False):
        block = make(values=values)[0]
        np.testing.assert_allclose(kernel_matrix(block), plain_matrix(block), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(kernel_diagonal(block), np.diagonal(plain_matrix(block)), rtol=1e-5)


def compare_all(one, stack):
    """Several blocks at once, under two mapped axes, against each by itself."""
    of_signs, of_pairs = one
    for row in range(2):
        for head in range(3):
            pick = functools.partial(jax.tree.map, lambda x, row=row, head=head: x[row, head])
            block, uniforms, of_pair, weights = pick(stack)
            compare_signs(pick(of_signs), block, uniforms, 0.3, 1.0)
            compare_pairs(pick(of_pairs), block, of_pair, weights, 4.0)


def make_many():
    made = [make(20, seed=seed, empty=range(17, 17 + seed % 4)) for seed in range(6)]
    return jax.tree.map(lambda *x: jnp.stack(x).reshape(2, 3, *x[0].shape), *made)


def both(block, of_signs, of_pairs, weights, **options):
    # Some arguments are the same for all blocks.
    return assign_signs(block, of_signs, 0.3, **options), thin_pairs(block, of_pairs, weights, 4.0, **options)


@pytest.mark.parametrize("together", [1, 4])
def test_blocks_are_walked_side_by_side_in_one_kernel(together):
    stack = make_many()
    options = {"implementation": "mosaic_tpu", "config": TpuConfig(together), "interpret": True}
    mapped = jax.vmap(jax.vmap(functools.partial(both, **options)))
    traced = jax.jit(mapped).trace(*stack)
    names = [equation.primitive.name for equation in equations(traced.jaxpr.jaxpr)]
    assert names.count("pallas_call") == 2
    assert not {"while", "scan"} & set(names)
    compare_all(traced.lower().compile()(*stack), stack)


@pytest.mark.skipif("mosaic_gpu" not in FORMS, reason="the interpreter for GPU kernels came with JAX 0.11")
def test_the_kernel_for_gpus_has_a_program_for_every_block():
    stack = make_many()
    mapped = jax.vmap(jax.vmap(functools.partial(both, **FORMS["mosaic_gpu"])))
    traced = jax.jit(mapped).trace(*stack)
    assert not {"while", "scan"} & {equation.primitive.name for equation in traced.jaxpr.jaxpr.eqns}
    assert (
        re.findall(r"Mesh\(grid=(\([\d, ]*\)), grid_names=\((.*?)\)", str(traced.jaxpr)) == [("(6,)", "'blocks',")] * 2
    )
    compare_all(traced.lower().compile()(*stack), stack)


def test_forms_decide_alike_where_programs_use_them():
    """Under a conditional, a loop over groups and a scan, as policies have it."""
    made = [make(24, seed=seed) for seed in range(4)]
    stack = jax.tree.map(lambda *x: jnp.stack(x), *made)

    @functools.partial(jax.jit, static_argnames="form")
    def halve(stack, wanted, form):
        def one(item):
            block, _, uniforms, weights = item
            return thin_pairs(block, uniforms, weights, 4.0, **FORMS[form])

        def step(carry, _):
            grouped = jax.lax.map(one, stack, batch_size=3)
            return jax.lax.cond(wanted, lambda: grouped, lambda: carry), None

        return jax.lax.scan(step, jax.tree.map(jnp.zeros_like, jax.lax.map(one, stack)), None, length=2)[0]

    ours, xla = halve(stack, True, "mosaic_tpu"), halve(stack, True, "xla")
    np.testing.assert_array_equal(ours.indices, xla.indices)
    np.testing.assert_array_equal(ours.weights, xla.weights)
    assert not np.asarray(halve(stack, False, "mosaic_tpu").weights).any()


@pytest.mark.parametrize("entries, head_dim", [(512, 128), (256, 64)])
def test_no_more_bytes_move_than_have_to(entries, head_dim):
    block, _, uniforms, weights = make(entries, head_dim)
    # Tracing for `vmap` would hide the arrays from the count.
    with mock.patch.object(batching, "fold_mapped_axes", lambda run: run):
        found = traffic.moved(
            lambda *given: thin_pairs(*given, implementation="mosaic_tpu", interpret=True),
            block, uniforms, weights, 4.0, run=False,
        )  # fmt: skip
    least = sum(x.nbytes for x in jax.tree.leaves((block, uniforms, weights))) + 2 * 4 * (entries // 2)
    assert least <= found.total <= 1.05 * least


def test_what_does_not_fit_is_refused():
    block, of_signs, of_pairs, weights = make()
    with pytest.raises(ValueError, match=r"uniforms has shape \(20,\)"):
        assign_signs(block, of_pairs, 1.0)
    with pytest.raises(ValueError, match=r"weights has shape \(40, 1\)"):
        thin_pairs(block, of_pairs, weights[:, None], 1.0)
    with pytest.raises(ValueError, match=r"values have shape \(20, 64\)"):
        assign_signs(Block(**{**vars(block), "values": block.values[:20]}), of_signs, 1.0)
    with pytest.raises(ValueError, match="implementation='cuda'"):
        assign_signs(block, of_signs, 1.0, implementation="cuda")
    with pytest.raises(ValueError, match="blocks_per_step=0"):
        TpuConfig(blocks_per_step=0)
    half = Block(**{**vars(block), "keys": block.keys.astype(jnp.bfloat16)})
    with pytest.raises(NotImplementedError, match="keys are bfloat16"):
        assign_signs(half, of_signs, 1.0, implementation="mosaic_tpu")
    large = Block(**{**vars(block), "keys": jnp.zeros((8192, 64)), "values": None})
    for implementation in ("mosaic_tpu", "mosaic_gpu"):
        with pytest.raises(NotImplementedError, match="8192 entries"):
            assign_signs(large, jnp.zeros(8192), 1.0, implementation=implementation, interpret=True)
