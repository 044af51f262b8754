"""The tokens that baselines keep of a prompt against kvpress 0.5.5: from a golden file always, live where it is
installed. Both read the same small random checkpoint."""

import pathlib

import numpy as np
import pytest

import kvjax
from tests.models import kvpress_runs
from tests.models.kvpress_runs import CHECKPOINT, RUNS, SCORED_RUNS, TOKENS

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "kvpress.npz"
every_run = pytest.mark.parametrize("name", RUNS)
every_scored_run = pytest.mark.parametrize("name", SCORED_RUNS)


def golden(name):
    with np.load(GOLDEN) as arrays:
        return arrays[name], arrays["tokens"]


@every_run
def test_golden_tokens(name):
    expected, tokens = golden(name)
    np.testing.assert_array_equal(kvpress_runs.kept_by_kvjax(RUNS[name].policy, CHECKPOINT, tokens), expected)


def test_the_golden_choices_tell_presses_layers_and_heads_apart():
    kept = {name: golden(name)[0] for name in RUNS}
    assert kept["snapkv"].sum(-1).tolist() == kept["pyramidkv_flat"].sum(-1).tolist()
    assert kept["pyramidkv"].sum(-1)[:, 0, 0].tolist() == [36, 12]
    for name in ("snapkv", "pyramidkv", "h2o"):
        assert (kept[name][:, :, 0] != kept[name][:, :, 1]).any()
        assert (kept[name][:, 0] != kept[name][:, 1]).any()


@pytest.mark.parametrize(
    "name, policy",
    [
        # Sums, as the released code of H2O takes them, favour early tokens, which more queries saw.
        ("h2o", kvjax.H2O(kvpress_runs.budget(0.5), recent=0)),
        ("h2o", kvjax.H2O(kvpress_runs.budget(0.5), average=True)),
        # The released code's layers have their window beside the number that kvpress takes it from.
        ("pyramidkv", kvjax.PyramidKV(kvpress_runs.budget(0.75), window_size=8, beta=2)),
        ("snapkv_defaults", kvjax.SnapKV(kvpress_runs.budget(0.25), window_size=32)),
    ],
)
def test_other_definitions_keep_other_tokens(name, policy):
    expected, tokens = golden(name)
    kept = kvpress_runs.kept_by_kvjax(policy, CHECKPOINT, tokens)
    assert (kept != expected).any()
    if name != "pyramidkv":
        np.testing.assert_array_equal(kept.sum(-1), expected.sum(-1))


@every_run
def test_live_tokens(name):
    pytest.importorskip("torch")
    pytest.importorskip("kvpress")
    tokens = np.random.default_rng(11).integers(0, 64, (2, TOKENS))
    expected, margin = kvpress_runs.kept_by_kvpress(RUNS[name], CHECKPOINT, tokens)
    assert margin > kvpress_runs.LEAST_MARGIN, "too close to call: choose other tokens"
    np.testing.assert_array_equal(kvpress_runs.kept_by_kvjax(RUNS[name].policy, CHECKPOINT, tokens), expected)


@every_scored_run
def test_golden_tokens_of_scores(name):
    expected, tokens = golden(name)
    same_but_for_ties(kvpress_runs.kept_by_kvjax(SCORED_RUNS[name].policy, CHECKPOINT, tokens), expected, name)
    # Heads share a layer's budget where the press lets them.
    shares = isinstance(SCORED_RUNS[name].policy, kvjax.AdaKV)
    assert (len(np.unique(expected.sum(-1))) > 1) == shares


@every_scored_run
def test_live_tokens_of_scores(name):
    pytest.importorskip("torch")
    pytest.importorskip("kvpress")
    tokens = np.random.default_rng(11).integers(0, 64, (2, TOKENS))
    expected = kvpress_runs.kept_by_scored_press(SCORED_RUNS[name], CHECKPOINT, tokens)
    same_but_for_ties(kvpress_runs.kept_by_kvjax(SCORED_RUNS[name].policy, CHECKPOINT, tokens), expected, name)


def same_but_for_ties(found, expected, name):
    """In the first layer equal tokens have equal keys before their positions turn them, and so equal leverage, and
    keys and values of equal norms."""
    if name not in ("leverage_scores", "ada_kv", "knorm", "cur", "cur_of_sums"):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found.sum((-2, -1)), expected.sum((-2, -1)))
    assert (found != expected).mean() <= 0.01
    np.testing.assert_array_equal(found[1:], expected[1:])
