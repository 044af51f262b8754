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
EVERY = np.ones(POINTS, bool)
STARTS = ("random", "k-means++")


@functools.partial(
    jax.jit, static_argnames=("kmeans_init", "tolerance", "iterations", "sample", "polish", "centroid_update")
)
def cluster(seed, keys, valid=EVERY, tolerance=0.0, iterations=ITERATIONS, **options):
    rng = jax.random.key(seed)
    return k_means(rng, keys, valid, CLUSTERS, iterations=iterations, tolerance=tolerance, block=8, **options)


def first_directions(seed, points, valid=EVERY, draw=_draw_uniformly):
    """Returns the points that are drawn as initial centroids."""
    present = jnp.asarray(np.where(valid[:, None], points, 0), jnp.float32)
    return points[np.asarray(draw(jax.random.key(seed), present, jnp.asarray(valid), CLUSTERS))]


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
    result = cluster(seed, keys, valid, kmeans_init=start)
    points = unit(keys.astype(np.float64))
    directions = first_directions(seed, points, valid, _draw_uniformly if start == "random" else _draw_apart)
    label, _, objective = by_loops(directions, points[valid], ITERATIONS)
    np.testing.assert_array_equal(np.asarray(result.label)[valid], label)
    np.testing.assert_allclose(result.objective, objective, atol=1e-4)


@pytest.mark.parametrize("start", STARTS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), duplicates=st.booleans())
def test_clusters_are_a_partition_and_the_objective_never_increases(start, seed, duplicates):
    keys, valid = stream(seed, duplicates)
    result = cluster(seed, keys, valid, kmeans_init=start)
    label = np.asarray(result.label)
    assert (label[~valid] == CLUSTERS).all() and (label[valid] < CLUSTERS).all()
    assert (np.diff(result.objective) <= 1e-4).all()


def test_stops_when_the_gain_is_below_the_tolerance():
    keys, _ = stream(0)
    converged = cluster(0, keys)
    gains = -np.diff(converged.objective) / np.asarray(converged.objective)[1:]
    last = int(converged.iterations)
    assert last < ITERATIONS and gains[last - 2] <= 1e-6 < gains[last - 3]  # converged
    tolerance = float(gains[last - 3] + gains[last - 4]) / 2
    early = cluster(0, keys, tolerance=tolerance)
    num_iterations = int(early.iterations)
    assert num_iterations == np.argmax(gains <= tolerance) + 2 < last
    np.testing.assert_allclose(early.objective[num_iterations - 1 :], converged.objective[num_iterations - 1])


def test_fewer_keys_than_clusters_leave_clusters_empty():
    keys, _ = stream(1)
    result = cluster(0, keys, np.arange(POINTS) < 2)
    assert len(set(np.asarray(result.label)[:2].tolist())) == 2 and (result.label[2:] == CLUSTERS).all()
    empty = cluster(0, keys, ~EVERY)
    assert (empty.label == CLUSTERS).all() and np.isfinite(empty.objective).all()


def test_keys_of_norm_zero_and_masked_noise_are_allowed():
    keys, valid = stream(2)
    keys[3] = 0
    result, noisy = (cluster(0, one, valid) for one in (keys, np.where(valid[:, None], keys, np.float32(np.nan))))
    np.testing.assert_array_equal(result.label, noisy.label)
    np.testing.assert_array_equal(result.objective, noisy.objective)


@pytest.mark.parametrize("used", [1, 2, 3])
def test_num_clusters_limits_the_clusters(used):
    keys, valid = stream(4)
    result = cluster(0, keys, valid, num_clusters=used)
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
    result = cluster(seed, keys, valid, iterations=6, sample=3, polish=2)
    assert result.objective.shape == (2,)
    assert result.objective[1] <= result.objective[0] + 1e-4
    points = unit(keys.astype(np.float64))
    directions = first_directions(seed, points, valid)
    for sampled, count in ((valid & (np.arange(POINTS) % 3 == 0), 4), (valid, 1)):
        _, directions, _ = by_loops(directions, points[sampled], count)
    np.testing.assert_array_equal(np.asarray(result.label)[valid], (points[valid] @ directions.T).argmax(axis=1))


def test_centroids_may_be_updated_by_unnormalized_keys():
    keys, _ = stream(6)
    result = cluster(0, keys, iterations=5, centroid_update="keys")
    points = unit(keys.astype(np.float64))
    label, _, _ = by_loops(first_directions(0, points), points, 5, keys.astype(np.float64))
    np.testing.assert_array_equal(result.label, label)
    assert int(result.iterations) == 5


def draw_often(draw, points, valid, count, times, seed):
    rngs = jax.random.split(jax.random.key(seed), times)
    return np.asarray(jax.jit(jax.vmap(lambda rng: draw(rng, jnp.float32(points), valid, count)))(rngs))


def test_random_initial_points_are_distinct_and_uniform():
    valid = np.arange(POINTS) % 3 == 0
    drawn = draw_often(_draw_uniformly, np.ones((POINTS, DIM)), valid, CLUSTERS, 2000, 0)
    assert valid[drawn].all()
    assert all(len(set(row)) == CLUSTERS for row in drawn.tolist())
    assert stats.chisquare(np.bincount(drawn[:, 0], minlength=POINTS)[valid]).pvalue > 1e-3


def test_k_means_plus_plus_draws_in_proportion_to_the_distance():
    # With three directions at known angles, the second point is drawn in proportion to 1 - cosine.
    angles = np.array([0.0, 0.5, 2.0])
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    drawn = draw_often(_draw_apart, points, np.ones(3, bool), 2, 6000, 1)
    assert stats.chisquare(np.bincount(drawn[:, 0], minlength=3)).pvalue > 1e-3
    counts, share = np.bincount(drawn[drawn[:, 0] == 0, 1], minlength=3), 1 - np.cos(angles)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:], counts.sum() * share[1:] / share.sum()).pvalue > 1e-3
