"""Rows, intervals and formatted figures."""

import json

import numpy as np
import pytest

from experiments.common import results


def test_rows_are_flat_and_complete(tmp_path):
    row = results.Row("line_retrieval", "m", "uniform", "accuracy", 0.5, extra={"budget": "25%"})
    results.write_rows(tmp_path / "deep" / "rows.json", [row])
    [read] = json.loads((tmp_path / "deep" / "rows.json").read_text())
    assert read["budget"] == "25%"
    assert "extra" not in read
    promised = (
        "experiment model task stream policy variant budget_fraction context_tokens batch question_seen metric value "
        "ci95_low ci95_high n seed device_bytes host_bytes read_bytes_per_token parameter_bytes"
    )
    assert set(promised.split()) <= set(read)
    assert read["stream"] is None


def test_wilson_interval():
    # Wilson (1927) for 45 of 50, worked by hand: centre (p + z^2/2n) / (1 + z^2/n), z = 1.96.
    low, high = results.share_interval(45, 50)
    assert (low, high) == pytest.approx((0.7864, 0.9565), abs=1e-4)
    assert results.share_interval(0, 10)[0] == 0
    assert results.share_interval(10, 10)[1] == 1


def test_intervals_of_scores_follow_their_kind():
    assert results.score_interval([1.0, 0.0, 1.0, 1.0]) == results.share_interval(3, 4)
    low, high = results.score_interval([0.5, 0.6, 0.4, 0.5])
    assert 0.3 < low < 0.5 < high < 0.7
    assert results.score_interval([0.5]) == (0.0, 1.0)
    assert results.score_interval([0.99, 0.5, 1.0])[1] == 1.0


def test_median_interval_is_of_order_statistics():
    # The range of 6 samples misses the median with probability 2 / 64, the range of 5 with 2 / 32.
    assert results.median_interval(np.array([6.0, 1, 5, 2, 4, 3])) == (3.5, 1, 6)
    # Of 20 samples the 6th and the 15th: the usual table's entry.
    assert results.median_interval(np.arange(1.0, 21)) == (10.5, 6, 15)
    with pytest.raises(ValueError, match="5 samples have no 95% interval"):
        results.median_interval(np.arange(5.0))


def test_paired_difference_of_shares():
    # Newcombe (1998), Statistics in Medicine 17, table II: 36 both, 12 the first alone, 2 the second alone, 0 neither.
    first, second = [1.0] * 48 + [0.0] * 2, [1.0] * 36 + [0.0] * 12 + [1.0] * 2
    assert results.paired_difference(first, second) == pytest.approx((0.2, 0.0569, 0.3404), abs=1e-4)
    # Two ways that always agree may still differ a little.
    same = results.paired_difference([1.0] * 50, [1.0] * 50)
    assert same == pytest.approx((0, -0.0714, 0.0714), abs=1e-3)


def test_paired_difference_of_scores():
    assert results.paired_difference([0.5, 0.75, 1.0], [0.25, 0.5, 0.5]) == pytest.approx(
        results.mean_interval(np.array([0.25, 0.25, 0.5]))
    )
    assert results.paired_difference([0.5], [0.25]) == (0.25, -1, 1)
    with pytest.raises(ValueError, match="2 scores cannot be paired with 1"):
        results.paired_difference([0.5, 1], [0.5])


def test_the_error_of_a_mean_is_the_root_of_summed_squares():
    estimates = [results.Estimate(0.5, 0.2, 0.6), results.Estimate(0.7, 0.3, 0.9)]
    assert results.mean_of(estimates) == pytest.approx((0.6, 0.6 - 0.25, 0.6 + np.sqrt(0.05) / 2))


def test_rows_are_grouped_by_the_text_of_their_setting():
    row = results.Row("e", "m", "uniform", "accuracy", 0.5, variant="sinks=4", extra={"budget": "25%"})
    exact = results.Row("e", "m", "exact", "accuracy", 0.5, extra={"budget": None})
    assert list(results.by_setting([row, exact, row])) == ["uniform:sinks=4 @ 25%", "exact"]
    assert row.estimate.value == 0.5 and np.isnan(row.estimate.low)
    assert results.Estimate(0.5, -0.25, 1).fixed("+") == "+0.50 [-0.25, +1.00]"


def test_a_row_refuses_a_second_value():
    assert results.row("e", "m", "vacuous", 1.0, policy="p", value_norm=0.5).extra == {"value_norm": 0.5}
    with pytest.raises(ValueError, match="value=0.5 would take the place of vacuous"):
        results.row("e", "m", "vacuous", 1.0, policy="p", value=0.5)
