"""Compares the implementations of `k_means` with its oracle in float64, and measures the kernel's traffic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.k_means import TpuConfig, XlaConfig, k_means, oracle
from tests.pallas_kernels import helpers, traffic

FORMS = helpers.make_forms(TpuConfig(block_points=128), XlaConfig(block_points=128))
every_form, quick_form = helpers.form_marks(FORMS)
FORMS["gpu"] = helpers.GPU

TOLERANCE = 2e-6  # relative to norms


@functools.partial(jax.jit, static_argnames="form")
def run(points, centroids, is_valid, num_centroids=None, summands=None, *, form):
    return k_means(points, centroids, is_valid, num_centroids=num_centroids, summands=summands, **FORMS[form])


def make(points=300, clusters=11, head_dim=64, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    points, centroids = rng.normal(size=(points, head_dim)), rng.normal(size=(clusters, head_dim))
    points, centroids = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (points, centroids))
    is_valid = rng.random(len(points)) < 0.9
    return jnp.asarray(scale * points, jnp.float32), jnp.asarray(centroids, jnp.float32), jnp.asarray(is_valid)


def compare(actual, points, centroids, is_valid, num_centroids=None, summands=None):
    clusters = len(centroids)
    inputs = oracle.Inputs(points, centroids, is_valid, np.int32(num_centroids or clusters), summands)
    best = helpers.in_float64(oracle.k_means, inputs)
    is_valid, labels = np.asarray(is_valid), np.asarray(actual.labels)
    assert actual.labels.shape == is_valid.shape and actual.sums.shape == centroids.shape
    np.testing.assert_array_equal(labels[~is_valid], clusters)
    assert ((labels >= 0) & (labels < inputs.num_centroids))[is_valid].all()
    # The label is the best cluster, except for ties within rounding.
    products = np.sum(helpers.float64(points) * helpers.float64(centroids)[np.minimum(labels, clusters - 1)], axis=1)
    best_products = np.sum(helpers.float64(points) * helpers.float64(centroids)[best.labels % clusters], axis=1)
    slack = TOLERANCE * (1 + np.abs(best_products).max())
    assert (products >= best_products - slack)[is_valid].all()
    np.testing.assert_allclose(actual.total_product, best.total_product, rtol=1e-5, atol=slack)
    # Sums belong to the clusters of the result.
    added = np.where(is_valid[:, None], helpers.float64(points if summands is None else summands), 0)
    is_member = labels[None] == np.arange(clusters)[:, None]
    largest = np.linalg.norm(added, axis=1).max(initial=1e-30)
    tolerance = TOLERANCE * largest * np.sqrt(1 + is_member.sum(1).max())
    np.testing.assert_allclose(actual.sums, is_member @ added, atol=tolerance)
    np.testing.assert_array_equal(np.asarray(actual.sums)[~is_member.any(axis=1)], 0.0)
    if (labels == best.labels).all():
        np.testing.assert_allclose(actual.sums, best.sums, atol=tolerance)
    return labels == best.labels


@quick_form
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("points, clusters", [(300, 11), (256, 200)])
def test_shapes(form, head_dim, points, clusters):
    inputs = make(points, clusters, head_dim)
    assert compare(run(*inputs, form=form), *inputs).mean() > 0.8


@every_form
@pytest.mark.parametrize("points, clusters", [(1, 1), (5, 3), (128, 4), (129, 1), (300, 9), (20, 40)])
def test_any_number_of_points_and_clusters(form, points, clusters):
    inputs = make(points, clusters)
    compare(run(*inputs, form=form), *inputs)


INPUTS = {
    **{f"{used} centroids": (make(), {"num_centroids": used}) for used in (1, 7, 11)},
    "other summands": (make(), {"summands": 7 * jnp.roll(make()[0], 3, axis=0)}),
    "no valid point": ((*make()[:2], jnp.zeros(300, bool)), {}),
    "large norms": (make(scale=200.0), {}),
}


@every_form
@pytest.mark.parametrize("name", INPUTS)
def test_options_and_inputs(form, name):
    inputs, options = INPUTS[name]
    compare(run(*inputs, **options, form=form), *inputs, **options)


@quick_form
def test_the_first_of_equal_centroids_is_chosen(form):
    points, centroids, is_valid = make()
    actual = run(points, jnp.concatenate([centroids, centroids]), is_valid, form=form)
    assert (np.asarray(actual.labels)[np.asarray(is_valid)] < len(centroids)).all()


def test_vmap_gives_one_kernel():
    rows = [helpers.stack(*(make(150, 5, seed=3 * row + head) for head in range(3))) for row in range(2)]
    inputs, used = helpers.stack(*rows), jnp.array([5, 2])
    iterate = jax.vmap(functools.partial(run, form="mosaic_tpu"), (0, 0, 0, None))
    actual = helpers.run_without_loop(jax.vmap(iterate), *inputs, used)
    for at in np.ndindex(2, 3):
        compare(helpers.pick(actual, *at), *helpers.pick(inputs, *at), used[at[0]])


@pytest.mark.parametrize("points, clusters, head_dim, other", [(16384, 205, 128, False), (16368, 205, 64, True)])
def test_the_kernel_reads_every_point_once(points, clusters, head_dim, other):
    array, centroids = jnp.zeros((points, head_dim)), jnp.zeros((clusters, head_dim))
    summands = array + 1 if other else None
    iterate = functools.partial(k_means, summands=summands, implementation="mosaic_tpu", interpret=True)
    actual = traffic.moved(iterate, array, centroids, jnp.ones(points, bool), run=False)
    traffic.check(actual.total, array.nbytes * (1 + other) + 2 * centroids.nbytes + points * (1 + 4))


@helpers.gpu_kernel
@pytest.mark.parametrize(
    "points, clusters, head_dim, used, other, scale",
    [(100, 70, 64, 66, False, 1.0), (64, 5, 128, None, True, 1.0), (7, 9, 80, 3, False, 200.0)],
)
def test_the_gpu_kernels(points, clusters, head_dim, used, other, scale):
    inputs = make(points, clusters, head_dim, scale=scale)
    summands = 7 * jnp.roll(inputs[0], 3, axis=0) if other else None
    compare(run(*inputs, used, summands, form="gpu"), *inputs, used, summands)


@helpers.gpu_kernel
def test_vmap_gives_two_gpu_kernels():
    inputs = helpers.stack(helpers.stack(make(20, 3), make(20, 3, seed=1)))
    iterate = jax.vmap(jax.vmap(functools.partial(k_means, **helpers.GPU)))
    grids = ("(1, 2)", "'tiles', 'batch'"), ("(1, 1, 2)", "'tiles', 'splits', 'batch'")
    actual = helpers.run_without_loop(iterate, *inputs, grids=grids)
    for head in range(2):
        compare(helpers.pick(actual, 0, head), *helpers.pick(inputs, 0, head))


@pytest.mark.parametrize(
    "kernel, change, error, message",
    [
        ("mosaic_gpu", {"points": jnp.zeros((300, 64), jnp.bfloat16)}, NotImplementedError, "points are bfloat16"),
        ("mosaic_gpu", {"head_dim": 72}, NotImplementedError, "head dimension 72"),
        ("mosaic_gpu", {"head_dim": 256}, NotImplementedError, "do not fit in shared memory"),
        ("mosaic_tpu", {"centroids": jnp.zeros((4, 32))}, ValueError, r"centroids has shape \(4, 32\)"),
        ("mosaic_tpu", {"is_valid": jnp.zeros(299, bool)}, ValueError, r"is_valid has shape \(299,\)"),
        ("mosaic_tpu", {"summands": jnp.zeros((300, 32))}, ValueError, r"summands has shape \(300, 32\)"),
        ("mosaic_tpu", {"points": jnp.zeros((300, 64), jnp.bfloat16)}, NotImplementedError, "points are bfloat16"),
        ("mosaic_tpu", {"centroids": jnp.zeros((60000, 64))}, NotImplementedError, "60000 clusters"),
    ],
)
def test_invalid_and_unsupported_arguments_raise(kernel, change, error, message):
    inputs = dict(zip(("points", "centroids", "is_valid"), make(head_dim=change.pop("head_dim", 64)), strict=True))
    with pytest.raises(error, match=message):
        k_means(**inputs | change, implementation=kernel, interpret=True)
