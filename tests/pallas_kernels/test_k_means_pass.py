"""Every form of a pass of Lloyd's algorithm against plain float64, and the kernel's traffic."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.k_means import TpuConfig, k_means
from tests.pallas_kernels import traffic
from tests.pallas_kernels.programs import equations

SMALL = TpuConfig(block_points=128)
FORMS = {
    "xla": {"implementation": "xla", "block_size": 128},
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
TOLERANCE = 2e-6  # relative to norms


@functools.partial(jax.jit, static_argnames="form")
def run(points, directions, valid, used, summed, form):
    return k_means(points, directions, valid, num_centroids=used, summands=summed, **FORMS[form])


def make(points=300, clusters=11, head_dim=64, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape)  # noqa: E731
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)  # noqa: E731
    given = scale * unit(normal(points, head_dim)), unit(normal(clusters, head_dim)), rng.random(points) < 0.9
    return *(jnp.asarray(x, jnp.float32) for x in given[:2]), jnp.asarray(given[2])


def compare(found, points, directions, valid, used=None, summed=None):
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
    valid, (clusters, _) = np.asarray(valid), directions.shape
    product = np.where(valid[:, None], np.nan_to_num(wide(points)), 0) @ wide(directions).T
    product[:, clusters if used is None else used :] = -np.inf
    best = product.max(axis=1)
    label = np.asarray(found.labels)
    assert found.labels.shape == valid.shape and found.sums.shape == directions.shape
    np.testing.assert_array_equal(label[~valid], clusters)
    assert ((label >= 0) & (label < (clusters if used is None else used)))[valid].all()
    # The label is that of the best but for ties within rounding.
    slack = TOLERANCE * (1 + np.abs(best).max(initial=0))
    near = product >= best[:, None] - slack
    assert near[np.arange(len(label)), np.minimum(label, clusters - 1)][valid].all()
    clear = valid & (near.sum(axis=1) == 1)
    np.testing.assert_array_equal(label[clear], product.argmax(axis=1)[clear])
    np.testing.assert_allclose(found.total_product, best[valid].sum(), rtol=1e-5, atol=slack)
    # Sums are those of the clusters that were found.
    added = np.where(valid[:, None], np.nan_to_num(wide(points if summed is None else summed)), 0)
    member = label[None] == np.arange(clusters)[:, None]
    largest = np.linalg.norm(added, axis=1).max(initial=1e-30)
    np.testing.assert_allclose(found.sums, member @ added, atol=TOLERANCE * largest * np.sqrt(1 + member.sum(1).max()))
    return clear


@quick_form
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("points, clusters", [(300, 11), (256, 200)])
def test_shapes(form, head_dim, points, clusters):
    given = make(points, clusters, head_dim)
    assert compare(run(*given, None, None, form), *given).mean() > 0.8


@every_form
@pytest.mark.parametrize("points, clusters", [(1, 1), (5, 3), (128, 4), (129, 1), (300, 9), (20, 40)])
def test_any_number_of_points_and_clusters(form, points, clusters):
    given = make(points, clusters)
    compare(run(*given, None, None, form), *given)


@every_form
@pytest.mark.parametrize("used", [1, 7, 11])
def test_only_open_clusters_are_joined(form, used):
    given = make()
    found = run(*given, used, None, form)
    compare(found, *given, used=used)
    np.testing.assert_array_equal(found.sums[used:], 0.0)


@every_form
def test_other_numbers_than_points_may_be_summed(form):
    points, directions, valid = make()
    summed = 7 * jnp.roll(points, 3, axis=0)
    compare(run(points, directions, valid, None, summed, form), points, directions, valid, summed=summed)


@every_form
def test_no_valid_point(form):
    points, directions, _ = make()
    found = run(points, directions, jnp.zeros(300, bool), None, None, form)
    np.testing.assert_array_equal(found.labels, 11)
    np.testing.assert_array_equal(found.sums, 0.0)
    assert found.total_product == 0


@quick_form
def test_of_equal_directions_the_first_is_taken(form):
    points, directions, valid = make()
    twice = jnp.concatenate([directions, directions])
    found = run(points, twice, valid, None, None, form)
    assert (np.asarray(found.labels)[np.asarray(valid)] < len(directions)).all()


@quick_form
def test_large_norms(form):
    given = make(scale=200.0)
    compare(run(*given, None, None, form), *given)


def test_it_stays_one_kernel_under_vmap():
    stacks = [jnp.stack(parts) for parts in zip(*(make(150, 5, seed=seed) for seed in range(6)), strict=True)]
    points, directions, valid = (x.reshape(2, 3, *x.shape[1:]) for x in stacks)
    used = jnp.array([5, 2])

    def one(points, directions, valid, used):
        return k_means(points, directions, valid, num_centroids=used, **FORMS["mosaic_tpu"])

    mapped = jax.vmap(jax.vmap(one, (0, 0, 0, None)))
    traced = jax.jit(mapped).trace(points, directions, valid, used)
    names = [equation.primitive.name for equation in equations(traced.jaxpr.jaxpr)]
    assert names.count("pallas_call") == 1
    assert not {"while", "scan"} & set(names)
    found = traced.lower().compile()(points, directions, valid, used)
    for row in range(2):
        for head in range(3):
            pick = lambda x, row=row, head=head: x[row, head]  # noqa: E731
            compare(jax.tree.map(pick, found), *map(pick, (points, directions, valid)), used=int(used[row]))


@pytest.mark.parametrize("points, clusters, head_dim, other", [(16384, 205, 128, False), (16368, 205, 64, True)])
def test_no_more_bytes_move_than_have_to(points, clusters, head_dim, other):
    array = jnp.zeros((points, head_dim))
    given = array, jnp.zeros((clusters, head_dim)), jnp.ones(points, bool)
    summed = array + 1 if other else None
    found = traffic.moved(
        lambda *given: k_means(*given, summands=summed, implementation="mosaic_tpu", interpret=True), *given, run=False
    )
    least = array.nbytes * (1 + other) + 2 * given[1].nbytes + points * (1 + 4)
    assert least <= found.total <= 1.05 * least


needs_gpu_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter for GPU kernels came with JAX 0.11"
)


def run_for_gpu(points, directions, valid, used=None, summed=None):
    interpreter = plgpu.InterpretGPUParams(detect_races=True)
    return k_means(
        points,
        directions,
        valid,
        num_centroids=used,
        summands=summed,
        implementation="mosaic_gpu",
        interpret=interpreter,
    )


# Several tiles of points and of clusters, of which the last is not full; clusters that are closed; other sums.
@needs_gpu_interpreter
@pytest.mark.parametrize(
    "points, clusters, head_dim, used, other, scale",
    [(100, 70, 64, 66, False, 1.0), (64, 5, 128, None, True, 1.0), (7, 9, 80, 3, False, 200.0)],
)
def test_the_kernels_for_gpus(points, clusters, head_dim, used, other, scale):
    given = make(points, clusters, head_dim, scale=scale)
    summed = 7 * jnp.roll(given[0], 3, axis=0) if other else None
    found = jax.jit(run_for_gpu)(*given, used, summed)
    compare(found, *given, used=used, summed=summed)


@needs_gpu_interpreter
def test_the_kernels_for_gpus_stay_two_under_vmap():
    given = [jnp.stack(parts)[None] for parts in zip(make(20, 3), make(20, 3, seed=1), strict=True)]
    traced = jax.jit(jax.vmap(jax.vmap(run_for_gpu))).trace(*given)
    assert not {"while", "scan"} & {equation.primitive.name for equation in traced.jaxpr.jaxpr.eqns}
    assert re.findall(r"Mesh\(grid=(\([\d, ]*\)), grid_names=\((.*?)\)", str(traced.jaxpr)) == [
        ("(1, 2)", "'tiles', 'batch'"),
        ("(1, 1, 2)", "'tiles', 'splits', 'batch'"),
    ]
    found = traced.lower().compile()(*given)
    for head in range(2):
        compare(jax.tree.map(lambda x, head=head: x[0, head], found), *(x[0, head] for x in given))


@pytest.mark.parametrize(
    "head_dim, dtype, message",
    [
        (64, jnp.bfloat16, "points are bfloat16"),
        (72, jnp.float32, "head dimension 72"),
        (256, jnp.float32, "do not fit in shared memory"),
    ],
)
def test_what_the_kernels_for_gpus_cannot_do_is_refused(head_dim, dtype, message):
    given = jnp.zeros((64, head_dim), dtype), jnp.zeros((8, head_dim)), jnp.ones(64, bool)
    with pytest.raises(NotImplementedError, match=message):
        k_means(*given, implementation="mosaic_gpu", interpret=True)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"centroids": jnp.zeros((4, 32))}, ValueError, r"centroids has shape \(4, 32\)"),
        ({"is_valid": jnp.zeros(299, bool)}, ValueError, r"is_valid has shape \(299,\)"),
        ({"summands": jnp.zeros((300, 32))}, ValueError, r"summands has shape \(300, 32\)"),
        ({"implementation": "cuda"}, ValueError, "implementation='cuda'"),
        ({"points": jnp.zeros((300, 64), jnp.bfloat16)}, NotImplementedError, "points are bfloat16"),
        ({"centroids": jnp.zeros((60000, 64))}, NotImplementedError, "60000 clusters"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message):
    points, directions, valid = make()
    given = {"points": points, "centroids": directions, "is_valid": valid, "implementation": "mosaic_tpu"}
    with pytest.raises(error, match=message):
        k_means(**{**given, **change})


def test_blocks_are_of_whole_lanes():
    with pytest.raises(ValueError, match="block_points=100"):
        TpuConfig(block_points=100)
