"""Farthest-first traversal against brute force."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.methods.clustergen import k_center
from kvjax.methods.clustergen.k_center import greedy_k_center

POINTS, DIM, SIZE = 14, 3, 5
choose = jax.jit(greedy_k_center, static_argnums=2)

# Integers give exact distances and many ties and duplicates.
grids = st.lists(st.tuples(*[st.integers(-2, 2)] * DIM), min_size=POINTS, max_size=POINTS).map(
    lambda rows: np.array(rows, np.float32)
)
masks = st.lists(st.booleans(), min_size=POINTS, max_size=POINTS).map(np.array)


def squared(a, b):
    return np.sum((np.asarray(a, np.float64)[:, None] - np.asarray(b, np.float64)[None]) ** 2, axis=-1)


def brute_force(points, valid, size):
    chosen, separations, free = [], [], list(np.flatnonzero(valid))
    while free and len(chosen) < size:
        gaps = squared(points[free], points[chosen]).min(axis=1) if chosen else np.full(len(free), np.inf)
        best = int(np.argmax(gaps))
        chosen.append(free.pop(best))
        separations.append(np.sqrt(gaps[best]))
    return chosen, separations


@settings(max_examples=40, deadline=None)
@given(points=grids, valid=masks, candidates=st.sampled_from([1, 4]), block=st.sampled_from([3, k_center.BLOCK]))
def test_equals_brute_force_with_ties_duplicates_and_masked_points(points, valid, candidates, block):
    result = chosen_in_rounds(points, valid, candidates, block)
    expected, separations = brute_force(points, valid, SIZE)
    np.testing.assert_array_equal(result.index[: len(expected)], expected)
    np.testing.assert_allclose(result.separation[: len(expected)], separations, rtol=1e-6)
    assert np.isneginf(result.separation[len(expected) :]).all()
    if expected:
        distance = squared(points[valid], points[expected])
        np.testing.assert_allclose(np.asarray(result.distance)[valid], np.sqrt(distance.min(axis=1)), rtol=1e-6)
    assert np.isneginf(np.asarray(result.distance)[~valid]).all()


@functools.partial(jax.jit, static_argnums=(2, 3))
def chosen_in_rounds(points, valid, candidates, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(k_center, "CANDIDATES", candidates)
        patch.setattr(k_center, "BLOCK", block)
        return greedy_k_center(points, valid, SIZE)


def test_terminates_with_nan_keys():
    points = np.full((POINTS, DIM), np.nan, np.float32)
    points[3:] = np.arange(3 * (POINTS - 3)).reshape(-1, 3)
    index = np.asarray(choose(points, np.ones(POINTS, bool), SIZE).index)
    assert len(set(index.tolist())) == SIZE


def test_bfloat16_keys_are_compared_in_float32():
    points = jnp.asarray([[0.0], [256.0], [257.0], [1.0]], jnp.bfloat16)  # 257 is stored as 256
    result = choose(points, np.ones(4, bool), 4)
    np.testing.assert_array_equal(result.index, [0, 1, 3, 2])
    assert result.separation.dtype == jnp.float32
