"""Chelsea: budgets of its schedules, conserved sums, and outlier heads."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.methods.chelsea.soft_matching import SCHEDULES
from tests.kvjax.support import (
    HEAD_DIM,
    LENGTHS,
    NEW,
    POLICIES,
    after,
    decoded,
    each,
    go,
    make_spec,
    make_stream,
    prefilled,
    read_weights,
)

SINKS, RECENT, EVERY = 2, 8, 8
OPTIONS = {"sinks": SINKS, "recent": RECENT, "compact_every": EVERY, "chunk": 8}


@pytest.mark.parametrize("schedule", each(SCHEDULES, quick=("llama-3",)))
def test_the_budget_is_full_after_every_compaction_for_every_schedule(schedule):
    stream = make_stream()
    cache, counters = prefilled(kvjax.Chelsea(20, schedule=schedule, **OPTIONS), stream)
    for tokens in range(0, NEW + 1, EVERY):
        middle = np.maximum(np.array(LENGTHS) + tokens - SINKS - RECENT, 0)
        np.testing.assert_array_equal(cache.state.count, np.minimum(middle, 10))
        degree = np.asarray(cache.state.degree)
        np.testing.assert_array_equal(degree.sum(-1), np.repeat(middle[:, None], 2, axis=1))
        np.testing.assert_array_equal((degree > 0).sum(-1), np.minimum(middle, 10)[:, None].repeat(2, axis=1))
        if tokens < NEW:
            *_, cache, counters = go(cache, counters, after(stream, LENGTHS, EVERY, tokens))


def test_equal_keys_in_every_cluster_make_attention_exact():
    stream = make_stream(7)
    stream = stream._replace(keys=3 * stream.keys[:, np.arange(64) // 16])  # four different keys in long runs
    outputs, expected = (decoded(policy, stream)[0] for policy in (POLICIES["chelsea"], POLICIES["exact"]))
    assert np.abs(outputs - expected).max() < 2e-5


def test_bfloat16_centroids_are_merged_in_float32():
    cache, counters = prefilled(POLICIES["chelsea"], make_stream(), make_spec(dtype=jnp.bfloat16))
    assert kvjax.cache_bytes(cache.state.keys.stored).device == cache.state.keys.stored.size * 2
    weights = read_weights(cache, counters)
    for row in range(len(LENGTHS)):
        present = np.arange(HEAD_DIM) < LENGTHS[row]
        np.testing.assert_allclose(weights[row], np.broadcast_to(present, (2, HEAD_DIM)), atol=2e-2)
