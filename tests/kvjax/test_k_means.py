"""Spherical k-means against Lloyd's algorithm in float64, and its initializations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvjax.shared.k_means import _draw_apart, _draw_uniformly, k_means
from tests.kvjax.support import each

POINTS, DIM, CLUSTERS, ITERATIONS = 30, 5, 4, 12
STARTS = ("random", "k-means++")


@functools.partial(
    jax.jit, static_argnames=("kmeans_init", "tolerance", "iterations", "sample", "polish", "centroid_update")
)
def cluster(rng, keys, valid, tolerance=0.0, iterations=ITERATIONS, **options):
    return k_means(rng, keys, valid, CLUSTERS, iterations=iterations, tolerance=tolerance, block=8, **options)


def stream(seed, duplicates=False):
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(POINTS, DIM)) * rng.uniform(0.1, 9, size=(POINTS, 1))
    keys = keys[rng.integers(0, 3, POINTS)] if duplicates else keys
    return keys.astype(np.float32), rng.random(POINTS) < 0.8


def unit(x):
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    return np.where(norm > 0, x / np.where(norm > 0, norm, 1), 0)


def by_loops(directions, points, iterations, summands=None):
    """Runs Lloyd's algorithm in float64; returns labels, centroids, and the objective after each iteration."""
    objective, summands = [], points if summands is None else summands
    for _ in range(iterations):
        cosine = points @ directions.T
        label = cosine.argmax(axis=1)
        objective.append(len(points) - cosine.max(axis=1).sum())
        sums = np.stack([summands[label == number].sum(axis=0) for number in range(CLUSTERS)])
        directions = np.where((sums != 0).any(axis=1, keepdims=True), unit(sums), directions)
    return label, directions, np.array(objective)


@pytest.mark.parametrize("start", each(STARTS, quick=("random",)))
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_equals_lloyd_s_algorithm(start, seed):
    keys, valid = stream(seed)
    rng = jax.random.key(seed)
    result = cluster(rng, keys, valid, kmeans_init=start)
    draw = _draw_uniformly if start == "random" else _draw_apart
    points = unit(keys.astype(np.float64))
    drawn = np.asarray(draw(rng, jnp.asarray(np.where(valid[:, None], points, 0), jnp.float32), valid, CLUSTERS))
    label, _, objective = by_loops(points[drawn], points[valid], ITERATIONS)
    np.testing.assert_array_equal(np.asarray(result.label)[valid], label)
    np.testing.assert_allclose(result.objective, objective, atol=1e-4)


@pytest.mark.parametrize("start", STARTS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), duplicates=st.booleans())
def test_clusters_are_a_partition_and_the_objective_never_increases(start, seed, duplicates):
    keys, valid = stream(seed, duplicates)
    result = cluster(jax.random.key(seed), keys, valid, kmeans_init=start)
    label = np.asarray(result.label)
    assert (label[~valid] == CLUSTERS).all() and (label[valid] < CLUSTERS).all()
    assert (np.diff(result.objective) <= 1e-4).all()


def test_stops_when_the_gain_is_below_the_tolerance():
    keys, _ = stream(0)
    every = np.ones(POINTS, bool)
    converged = cluster(jax.random.key(0), keys, every)
    gains = -np.diff(converged.objective) / np.asarray(converged.objective)[1:]
    last = int(converged.iterations)
    assert last < ITERATIONS and gains[last - 2] <= 1e-6 < gains[last - 3]  # converged
    tolerance = float(gains[last - 3] + gains[last - 4]) / 2
    early = cluster(jax.random.key(0), keys, every, tolerance=tolerance)
    num_iterations = int(early.iterations)
    assert num_iterations == np.argmax(gains <= tolerance) + 2 < last
    repeated = np.repeat(converged.objective[num_iterations - 1], ITERATIONS - num_iterations + 1)
    np.testing.assert_allclose(early.objective[num_iterations - 1 :], repeated)


def test_fewer_keys_than_clusters_leave_clusters_empty():
    keys, _ = stream(1)
    result = cluster(jax.random.key(0), keys, np.arange(POINTS) < 2)
    assert len(set(np.asarray(result.label)[:2].tolist())) == 2 and (result.label[2:] == CLUSTERS).all()
    empty = cluster(jax.random.key(0), keys, np.zeros(POINTS, bool))
    assert (empty.label == CLUSTERS).all() and np.isfinite(empty.objective).all()


def test_keys_of_norm_zero_and_masked_noise_are_allowed():
    keys, valid = stream(2)
    keys[3] = 0
    result = cluster(jax.random.key(0), keys, valid)
    noisy = cluster(jax.random.key(0), np.where(valid[:, None], keys, np.nan).astype(np.float32), valid)
    np.testing.assert_array_equal(result.label, noisy.label)
    np.testing.assert_array_equal(result.objective, noisy.objective)


@pytest.mark.parametrize("used", [1, 2, 3])
def test_num_clusters_limits_the_clusters(used):
    keys, valid = stream(4)
    result = cluster(jax.random.key(0), keys, valid, num_clusters=used)
    assert (np.asarray(result.label)[valid] < used).all()
    fewer = jax.jit(lambda rng: k_means(rng, keys, valid, used, iterations=ITERATIONS, tolerance=0.0, block=8))
    expected = fewer(jax.random.key(0))
    np.testing.assert_array_equal(np.asarray(result.label)[valid], np.asarray(expected.label)[valid])
    np.testing.assert_allclose(result.objective, expected.objective, rtol=1e-6)  # the order of additions differs


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_a_sample_is_clustered_first_then_all_keys(seed):
    keys, valid = stream(seed)
    valid[0] = True  # a sample needs a key
    rng = jax.random.key(seed)
    result = cluster(rng, keys, valid, iterations=6, sample=3, polish=2)
    assert result.objective.shape == (2,)
    assert result.objective[1] <= result.objective[0] + 1e-4
    points = unit(keys.astype(np.float64))
    drawn = np.asarray(_draw_uniformly(rng, jnp.asarray(points), jnp.asarray(valid), CLUSTERS))
    directions = points[drawn]
    for sampled, count in ((valid & (np.arange(POINTS) % 3 == 0), 4), (valid, 1)):
        _, directions, _ = by_loops(directions, points[sampled], count)
    np.testing.assert_array_equal(np.asarray(result.label)[valid], (points[valid] @ directions.T).argmax(axis=1))


def test_centroids_may_be_updated_by_unnormalized_keys():
    keys, _ = stream(6)
    every = np.ones(POINTS, bool)
    rng = jax.random.key(0)
    result = cluster(rng, keys, every, iterations=5, centroid_update="keys")
    points = unit(keys.astype(np.float64))
    directions = points[np.asarray(_draw_uniformly(rng, jnp.asarray(points), jnp.asarray(every), CLUSTERS))]
    label, _, _ = by_loops(directions, points, 5, keys.astype(np.float64))
    np.testing.assert_array_equal(result.label, label)
    assert int(result.iterations) == 5


def test_random_initial_points_are_distinct_and_uniform():
    valid = np.arange(POINTS) % 3 == 0
    points = jnp.ones((POINTS, DIM))
    rngs = jax.random.split(jax.random.key(0), 2000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda rng: _draw_uniformly(rng, points, valid, CLUSTERS)))(rngs))
    assert valid[drawn].all()
    assert all(len(set(row)) == CLUSTERS for row in drawn.tolist())
    counts = np.bincount(drawn[:, 0], minlength=POINTS)[valid]
    assert stats.chisquare(counts).pvalue > 1e-3


def test_k_means_plus_plus_draws_in_proportion_to_the_distance():
    # With three directions at known angles, the second point is drawn in proportion to 1 - cosine.
    angles = np.array([0.0, 0.5, 2.0])
    points = jnp.asarray(np.stack([np.cos(angles), np.sin(angles)], axis=1), jnp.float32)
    valid = np.ones(3, bool)
    rngs = jax.random.split(jax.random.key(1), 6000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda rng: _draw_apart(rng, points, valid, 2)))(rngs))
    assert stats.chisquare(np.bincount(drawn[:, 0], minlength=3)).pvalue > 1e-3
    after_first = drawn[drawn[:, 0] == 0, 1]
    share = 1 - np.cos(angles)
    counts = np.bincount(after_first, minlength=3)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:], len(after_first) * share[1:] / share.sum()).pvalue > 1e-3
