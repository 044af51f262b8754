"""The tokens that policies select from a prompt against a golden file of kvpress 0.5.5, and live if it is installed."""

import numpy as np
import pytest

import kvjax
from tests.models import kvpress_runs
from tests.models.kvpress_runs import CHECKPOINT, RUNS, TOKENS
from tests.models.support import GOLDEN

every_run = pytest.mark.parametrize("name", RUNS)


def assert_equal_up_to_ties(name, actual, expected):
    """In the first layer equal tokens have equal keys before rotation: equal leverage, and equal norms."""
    if name not in ("leverage_scores", "ada_kv", "knorm", "cur", "cur_of_sums"):
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(actual.sum((-2, -1)), expected.sum((-2, -1)))
    assert (actual != expected).mean() <= 0.01
    np.testing.assert_array_equal(actual[1:], expected[1:])


@every_run
def test_golden_tokens(name):
    with np.load(GOLDEN.with_name("kvpress.npz")) as arrays:
        expected, tokens = arrays[name], arrays["tokens"]
    policy = RUNS[name].policy
    assert_equal_up_to_ties(name, kvpress_runs.kvjax_mask(policy, CHECKPOINT, tokens), expected)
    # Only heads that share a layer's budget have different numbers of tokens.
    assert np.ptp(expected.sum(-1), axis=(1, 2)).any() == isinstance(policy, kvjax.AdaKV)


@every_run
def test_live_tokens(name):
    pytest.importorskip("torch")
    pytest.importorskip("kvpress")
    tokens = np.random.default_rng(11).integers(0, 64, (2, TOKENS))
    expected = kvpress_runs.kvpress_mask(RUNS[name], CHECKPOINT, tokens)
    assert_equal_up_to_ties(name, kvpress_runs.kvjax_mask(RUNS[name].policy, CHECKPOINT, tokens), expected)
