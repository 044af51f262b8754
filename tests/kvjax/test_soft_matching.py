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
    count = len(keys)

    def pad(x):
        return np.concatenate([x, np.full((slots - count, *x.shape[1:]), 7, x.dtype)])

    degree = np.ones(count, np.int32) if degree is None else degree
    return Centroids(
        keys=jnp.asarray(pad(keys)),
        values=jnp.asarray(pad(keys if values is None else values)),
        degree=jnp.asarray(np.concatenate([degree, np.zeros(slots - count, np.int32)])),
        count=jnp.int32(count),
    )


def random_entries(seed, count, duplicates=False):
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(count, DIM)).astype(np.float32)
    if duplicates:
        keys = np.eye(DIM, dtype=np.float32)[rng.integers(0, 3, count)]  # cosines of exactly 0 and 1: many ties
    return entries_of(
        keys, rng.normal(size=(count, DIM)).astype(np.float32), rng.integers(1, 5, count).astype(np.int32)
    )


def by_lists(entries, edges, chunk):
    """Merges in loops in float64; returns (key, value, degree) of every entry in the order of the text."""
    count = int(entries.count)
    keys, values = (np.asarray(x, np.float64)[:count] for x in (entries.keys, entries.values))
    degree = np.asarray(entries.degree)[:count]
    candidates = []
    for start in range(0, count, chunk):
        block_size = range(start, min(start + chunk, count))
        for a in block_size[::2]:
            cosines = [
                (keys[a] @ keys[b] / np.linalg.norm(keys[a]) / np.linalg.norm(keys[b]), b) for b in block_size[1::2]
            ]
            if cosines:
                best = max(cosine for cosine, _ in cosines)
                candidates.append((best, a, next(b for cosine, b in cosines if cosine > best - 1e-6)))
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
        expected = np.sort(np.asarray(jax.lax.top_k(x, count)[1]))
        np.testing.assert_array_equal(np.flatnonzero(largest), expected)
        np.testing.assert_array_equal(soft_matching._cumsum(jnp.int32(largest)), np.cumsum(largest))


def test_the_sign_of_zero_does_not_matter():
    x = jnp.array([-0.0, 0.0, -1.0, -0.0])
    np.testing.assert_array_equal(jax.jit(soft_matching._largest)(x, 2), [True, True, False, False])


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
    assert int(merged.degree.sum()) == int(entries.degree.sum())
    for name in ("keys", "values"):
        before, after = (
            np.asarray(of.degree, np.float64) @ np.asarray(getattr(of, name), np.float64) for of in (entries, merged)
        )
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-3)


def test_tiles_do_not_change_the_result(monkeypatch):
    """Two rows of different lengths, in 45 slots that tiles do not divide."""
    rng = np.random.default_rng(0)
    rows = [entries_of(rng.normal(size=(count, DIM)).astype(np.float32), slots=45) for count in (45, 29)]
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
    entries = random_entries(0, SLOTS)
    length, lengths = SLOTS, [SLOTS]
    for step in range(6):
        share = max(schedule.floor, schedule.first - schedule.decay * min(step, schedule.steps))
        length -= max(int(np.floor(share * length + 1e-9)), 1)
        if length < 2:
            break
        lengths.append(length)
    current = entries
    for step, (before, after) in enumerate(itertools.pairwise(lengths)):
        current = merge(current, before - after)
        compressed = compress(entries, after, schedule)
        np.testing.assert_allclose(compressed.keys, current.keys[:after], atol=1e-5, err_msg=f"step {step}")
        np.testing.assert_array_equal(compressed.degree, current.degree[:after])
