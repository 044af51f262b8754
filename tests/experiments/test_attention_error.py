"""The attention error that the command measures, in a small run."""

import re

import numpy as np
import pytest

from experiments import attention_error
from experiments.common import results, streams
from tests.experiments.running import run, select


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Rows and output of a small run with three policies, a synthetic stream at two norms and a recorded one; the
    output includes the number of compiled programs at the start of every case."""
    directory = tmp_path_factory.mktemp("attention_error")
    said = []

    def measure(case, *rest, measure=attention_error.measure):
        said.append(f"programs at {case.where} {case.number:g} {attention_error.programs.cache_info().currsize}")
        return measure(case, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_error, "measure", measure)
        patch.setattr(attention_error.settings.tqdm, "write", said.append)
        rows = run(
            attention_error,
            directory,
            quick=False,
            policy=("exact", "uniform", "clustergen", "leverage_scores@50%"),
            budget=("50%", "2.5%"),
            stream=("tight", "recorded"),
            norm=(2.0, 4.0),
            seeds=4,
            tokens=512,
            head_dim=16,
            queries=8,
            recorded_tokens=192,
        )
    assert (directory / "attention_error.png").stat().st_size > 3_000
    return rows, "\n".join(said)


@pytest.fixture(scope="module")
def rows(done):
    return done[0]


def test_rows_are_complete(rows):
    errors = select(rows, metric="relative_error")
    # Exact and two policies in four cases (two norms, two layers), and at a second budget in two of them.
    assert len(errors) == 4 * (1 + 2) + 2 * 2
    assert {(row["stream"], row.get("norm"), row.get("layer")) for row in errors} == {
        ("tight", 2, None), ("tight", 4, None), ("recorded", None, 0), ("recorded", None, 1)
    }  # fmt: skip
    assert all(row["n"] == 4 and row["seed"] == 10 and row["effective_rank"] >= 1 for row in rows)
    assert all(row["ci95_low"] <= row["value"] <= row["ci95_high"] for row in errors)
    assert len(select(rows, metric="compress_seconds")) == len(errors)
    assert len(select(rows, metric="relative_error_clamped")) == len(errors)


def test_programs_are_freed_after_their_last_use(done):
    found = dict(re.findall(r"programs at (\w+ \d) (\d+)", done[1]))
    # Norms share a spec; layers have different ones.
    assert found == {"norm 2": "0", "norm 4": "5", "layer 0": "0", "layer 1": "0"}


def test_exact_has_no_error_and_budgets_are_met(rows):
    errors = select(rows, metric="relative_error")
    assert max(row["value"] for row in errors if row["policy"] == "exact") < 1e-5
    for budget, share in (("50%", 0.5), ("2.5%", 0.025)):
        assert all(0.9 * share < row["budget_fraction"] <= share for row in errors if row["budget"] == budget)


def test_synthetic_streams_have_no_window_and_recorded_ones_do(rows):
    assert {row["sinks_and_recent"] for row in select(rows, stream="tight")} == {0}
    assert {row["sinks_and_recent"] for row in select(rows, stream="recorded")} == {3}


def test_differences_are_paired_with_uniform_at_the_same_budget(rows):
    differences = select(rows, metric="relative_error_minus_uniform")
    assert {row["policy"] for row in differences} == {"clustergen"}
    for row in differences:
        case = {name: row.get(name) for name in ("stream", "norm", "layer", "budget")}
        errors = select(rows, metric="relative_error", **case)
        value = {one["policy"]: one["value"] for one in errors}
        assert row["value"] == pytest.approx(value["clustergen"] - value["uniform"])


def test_the_error_of_uniform_sampling_equals_a_simulation(rows):
    # With equal bytes and independent draws, so the errors are equal up to chance.
    drawn = streams.synthetic("tight", range(40), 512, 8, 16).scaled(4.0)
    kept = 256 - 64 // 32
    rng = np.random.default_rng(0)
    picks = np.stack([rng.permutation(512)[:kept] for _ in range(40)])[..., None, None]
    sampled = streams.Streams(
        np.take_along_axis(drawn.keys, picks, 1), np.take_along_axis(drawn.values, picks, 1), drawn.queries
    )
    expected = streams.relative_errors(streams.exact_attention(sampled), streams.exact_attention(drawn))
    [row] = select(rows, metric="relative_error", policy="uniform", stream="tight", norm=4.0, budget="50%")
    assert row["value"] == pytest.approx(expected.mean(), rel=0.3)


def test_too_small_budgets_are_left_out(done):
    rows, printed = done
    small = select(rows, budget="2.5%", metric="relative_error")
    assert {row["stream"] for row in small} == {"tight"}
    assert "uniform @ 2.5% is left out: " in printed
    # The streams have no RoPE frequencies, which only the compression of the prompt detects.
    assert not select(rows, policy="leverage_scores")
    assert printed.count("leverage_scores @ 50% is left out: rotated=False needs CacheSpec.rope_frequencies") == 4


def test_intervals():
    # Student's t for 1, 2, 3: mean 2, standard error 1/sqrt(3), quantile 4.303 at two degrees of freedom.
    estimate = results.mean_interval(np.array([1.0, 2.0, 3.0]))
    assert tuple(estimate) == pytest.approx((2, 2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), rel=1e-4)
    with pytest.raises(ValueError, match="at least 2 seeds"):
        results.mean_interval(np.ones(1))


def test_slopes_of_power_laws_are_their_exponents():
    sizes = np.array([4.0, 16.0, 64.0])
    measured = np.array([[2.0], [5.0], [0.1]]) * sizes**-0.5
    assert tuple(results.log_slope(sizes, measured)) == pytest.approx((-0.5, -0.5, -0.5))
