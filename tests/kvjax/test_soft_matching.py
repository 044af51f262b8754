"""Bipartite soft matching of Chelsea against loops in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.methods.chelsea import soft_matching
from kvjax.methods.chelsea.soft_matching import Centroids, Schedule
from tests.kvjax.support import each

LLAMA_2 = Schedule(0.45, 0.05, 3)
LLAMA_3 = Schedule(0.35, 0.1, 2)
QWEN = Schedule(0.2, 0.1, 2)
SLOTS, CHUNK, DIM = 48, 16, 6


def entries_of(keys, values=None, degree=None, slots=SLOTS):
    """Returns centroids whose slots after the keys hold arbitrary numbers."""
    count = len(keys)
    degree = np.ones(count, np.int32) if degree is None else degree
    arrays = [np.full((slots, keys.shape[1]), 7, np.float32) for _ in range(2)]
    for array, entries in zip(arrays, (keys, keys if values is None else values), strict=True):
        array[:count] = entries
    return Centroids(*map(jnp.asarray, arrays), jnp.asarray(np.pad(degree, (0, slots - count))), jnp.int32(count))


def random_entries(seed, count, duplicates=False):
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(count, DIM)).astype(np.float32)
    if duplicates:
        keys = np.eye(DIM, dtype=np.float32)[rng.integers(0, 3, count)]  # cosines of exactly 0 and 1: many ties
    return entries_of(keys, rng.normal(size=(count, DIM)), rng.integers(1, 5, count).astype(np.int32))


def by_lists(entries, edges, chunk):
    """Merges in loops in float64; returns (key, value, degree) of every entry in the order of the text."""
    count = int(entries.count)
    keys, values = (np.asarray(x, np.float64)[:count] for x in (entries.keys, entries.values))
    degree, unit = np.asarray(entries.degree)[:count], keys / np.linalg.norm(keys, axis=1, keepdims=True)
    candidates = []
    for start in range(0, count, chunk):
        end = min(start + chunk, count)
        for a in range(start, end, 2) if end > start + 1 else ():
            cosines = unit[start + 1 : end : 2] @ unit[a]
            best = cosines.max()
            candidates.append((best, a, start + 1 + 2 * int(np.argmax(cosines > best - 1e-6))))
    joined = {a: b for _, a, b in sorted(candidates, key=lambda edge: (-round(edge[0], 5), edge[1]))[:edges]}
    merged = []
    for place in range(count):
        if place not in joined:
            members = [place, *(a for a, b in joined.items() if b == place)]
            total = degree[members].sum()
            merged.append((*(degree[members] @ x[members] / total for x in (keys, values)), total))
    return merged


@jax.jit
def merge(entries, edges):
    return soft_matching.merge_most_similar(entries, edges, CHUNK, SLOTS, tile=CHUNK, num_tiles=SLOTS // CHUNK)


@functools.partial(jax.jit, static_argnames=("budget", "schedule"))
def compress(entries, budget, schedule):
    return soft_matching.compress(entries, budget, CHUNK, schedule)


@pytest.mark.parametrize("size", [1, 1024, 3000])
def test_the_largest_values_equal_those_of_top_k(size):
    rng = np.random.default_rng(size)
    x = rng.integers(-5, 6, size).astype(np.float32) / 3  # with ties
    x[rng.random(size) < 0.2] = -np.inf
    for count in (0, 1, size // 3, size):
        largest = soft_matching._largest(jnp.asarray(x), count)
        np.testing.assert_array_equal(np.flatnonzero(largest), np.sort(np.asarray(jax.lax.top_k(x, count)[1])))
        np.testing.assert_array_equal(soft_matching._cumsum(jnp.int32(largest)), np.cumsum(largest))
    zeros = jnp.array([-0.0, 0.0, -1.0, -0.0])  # whose signs do not matter
    np.testing.assert_array_equal(jax.jit(soft_matching._largest)(zeros, 2), [True, True, False, False])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), count=st.integers(0, SLOTS), edges=st.integers(0, 20), duplicates=st.booleans())
def test_one_step_equals_merging_in_loops(seed, count, edges, duplicates):
    entries = random_entries(seed, count, duplicates)
    merged, expected = merge(entries, edges), by_lists(entries, edges, CHUNK)
    assert int(merged.count) == len(expected)
    for number, (key, value, degree) in enumerate(expected):
        np.testing.assert_allclose(merged.keys[number], key, atol=1e-5)
        np.testing.assert_allclose(merged.values[number], value, atol=1e-5)
        assert int(merged.degree[number]) == degree
    assert np.asarray(merged.degree)[len(expected) :].sum() == 0


@pytest.mark.parametrize(
    "schedule, budget", each(itertools.product((LLAMA_2, LLAMA_3, QWEN), (1, 18)), quick=[(LLAMA_2, 18)])
)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), count=st.integers(1, SLOTS), duplicates=st.booleans())
def test_the_budget_is_reached_exactly_and_sums_are_conserved(budget, schedule, seed, count, duplicates):
    entries = random_entries(seed, count, duplicates)
    merged = compress(entries, budget, schedule)
    assert int(merged.count) == min(count, budget)
    for total in (lambda of: of.degree.sum(), lambda of: of.degree @ of.keys, lambda of: of.degree @ of.values):
        before, after = (total(jax.tree.map(np.float64, of)) for of in (entries, merged))
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-3)


def test_tiles_do_not_change_the_result(monkeypatch):
    """Two rows of different lengths, in 45 slots that tiles do not divide."""
    rng = np.random.default_rng(0)
    rows = [entries_of(rng.normal(size=(count, DIM)), slots=45) for count in (45, 29)]
    entries = jax.tree.map(lambda *rows: jnp.stack(rows), *rows)

    def run():
        return jax.jit(jax.vmap(lambda entries: soft_matching.compress(entries, 10, CHUNK, LLAMA_3)))(entries)

    whole = run()
    monkeypatch.setattr(soft_matching, "_MIN_TILE", 1)
    assert soft_matching.tile_slots(45, CHUNK) == CHUNK
    jax.tree.map(np.testing.assert_array_equal, run(), whole)


@pytest.mark.parametrize("schedule", each((LLAMA_2, LLAMA_3, QWEN), quick=(LLAMA_2,)))
def test_no_step_merges_more_than_its_schedule_allows(schedule):
    """Compressions to decreasing budgets show the length after every step."""
    entries = current = random_entries(0, SLOTS)
    length = SLOTS
    for step in range(6):
        share = max(schedule.floor, schedule.first - schedule.decay * min(step, schedule.steps))
        edges = max(int(np.floor(share * length + 1e-9)), 1)
        length -= edges
        if length < 2:
            break
        current, compressed = merge(current, edges), compress(entries, length, schedule)
        np.testing.assert_allclose(compressed.keys, current.keys[:length], atol=1e-5, err_msg=f"step {step}")
        np.testing.assert_array_equal(compressed.degree, current.degree[:length])
