"""The tokens that policies select from a prompt against a golden file of kvpress 0.5.5, and live if it is installed."""

import numpy as np
import pytest

import kvjax
from tests.models import kvpress_runs
from tests.models.kvpress_runs import CHECKPOINT, RUNS, TOKENS
from tests.models.support import GOLDEN

every_run = pytest.mark.parametrize("name", RUNS)


def load_golden(name):
    with np.load(GOLDEN.with_name("kvpress.npz")) as arrays:
        return arrays[name], arrays["tokens"]


def assert_equal_up_to_ties(name, actual, expected):
    """In the first layer equal tokens have equal keys before rotation: equal leverage, and equal norms."""
    if name not in ("leverage_scores", "ada_kv", "knorm", "cur", "cur_of_sums"):
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(actual.sum((-2, -1)), expected.sum((-2, -1)))
    assert (actual != expected).mean() <= 0.01
    np.testing.assert_array_equal(actual[1:], expected[1:])


@every_run
def test_golden_tokens(name):
    expected, tokens = load_golden(name)
    policy = RUNS[name].policy
    assert_equal_up_to_ties(name, kvpress_runs.kvjax_mask(policy, CHECKPOINT, tokens), expected)
    # Only heads that share a layer's budget have different numbers of tokens.
    assert np.ptp(expected.sum(-1), axis=(1, 2)).any() == isinstance(policy, kvjax.AdaKV)


@pytest.mark.parametrize(
    "name, policy",
    [
        # Sums, as in the released code of H2O, favor early tokens, which more queries attend to.
        ("h2o", kvjax.H2O(kvpress_runs.budget(0.5), recent=0)),
        ("h2o", kvjax.H2O(kvpress_runs.budget(0.5), average=True)),
        # In the released code the window of a layer is added to its number of tokens; kvpress subtracts it.
        ("pyramidkv", kvjax.PyramidKV(kvpress_runs.budget(0.75), window_size=8, beta=2)),
        ("snapkv_defaults", kvjax.SnapKV(kvpress_runs.budget(0.25), window_size=32)),
    ],
)
def test_other_definitions_select_other_tokens(name, policy):
    expected, tokens = load_golden(name)
    mask = kvpress_runs.kvjax_mask(policy, CHECKPOINT, tokens)
    assert (mask != expected).any()
    if name != "pyramidkv":
        np.testing.assert_array_equal(mask.sum(-1), expected.sum(-1))


@every_run
def test_live_tokens(name):
    pytest.importorskip("torch")
    pytest.importorskip("kvpress")
    tokens = np.random.default_rng(11).integers(0, 64, (2, TOKENS))
    expected = kvpress_runs.kvpress_mask(RUNS[name], CHECKPOINT, tokens)
    assert_equal_up_to_ties(name, kvpress_runs.kvjax_mask(RUNS[name].policy, CHECKPOINT, tokens), expected)
