"""Chelsea: budgets of its schedules, conserved sums, and outlier heads."""

import numpy as np
import pytest

import kvjax
from kvjax.methods.chelsea.soft_matching import SCHEDULES
from tests.kvjax.support import (
    LENGTHS,
    NEW,
    POLICIES,
    WINDOW,
    after,
    decoded,
    each,
    go,
    make_stream,
    prefilled,
)


@pytest.mark.parametrize("schedule", each(SCHEDULES, quick=("llama-3",)))
def test_the_budget_is_full_after_every_compaction_for_every_schedule(schedule):
    stream = make_stream()
    state = prefilled(kvjax.Chelsea(20, **WINDOW, chunk=8, schedule=schedule))
    for tokens in range(0, NEW + 1, 8):
        middle = np.maximum(np.array(LENGTHS) + tokens - 10, 0)
        np.testing.assert_array_equal(state[0].state.count, np.minimum(middle, 10))
        degree = np.asarray(state[0].state.degree)
        np.testing.assert_array_equal(degree.sum(-1), np.repeat(middle[:, None], 2, axis=1))
        np.testing.assert_array_equal((degree > 0).sum(-1), np.minimum(middle, 10)[:, None].repeat(2, axis=1))
        if tokens < NEW:
            _, _, *state = go(*state, after(stream, LENGTHS, 8, tokens))


def test_equal_keys_in_every_cluster_make_attention_exact():
    stream = make_stream(7)
    stream = stream._replace(keys=3 * stream.keys[:, np.arange(64) // 16])  # four different keys in long runs
    outputs, expected = (decoded(policy, stream)[0] for policy in (POLICIES["chelsea"], POLICIES["exact"]))
    assert np.abs(outputs - expected).max() < 2e-5
