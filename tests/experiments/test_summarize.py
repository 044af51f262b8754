"""Means, intervals and differences of rows, and the command that prints them."""

import dataclasses
import json

import numpy as np
import pytest

from experiments import summarize
from experiments.common import statistics
from experiments.common.statistics import Estimate
from tests.experiments.support import row, rows_of


def test_means_are_over_documents_and_differences_are_paired():
    rows = [
        *rows_of("exact", "a", [1.0] * 20), *rows_of("snapkv", "a", [0.0, 1.0] * 10),
        row("exact", "b", "0", 1.0), row("exact", "b", "0", 0.5, item=1), row("exact", "b", "1", 1.0),
        row("snapkv", "b", "0", 1.0), row("snapkv", "b", "1", None),
    ]  # fmt: skip
    [table] = summarize.summarize(rows)
    full, snapkv = table.lines
    assert (full.setting, snapkv.setting) == ("exact", "snapkv @ 25%")
    assert full.scores["b"].value == pytest.approx(0.875) and full.mean.value == pytest.approx(0.9375)
    assert snapkv.mean.value == pytest.approx(0.75) and snapkv.errors == 1 and snapkv.documents == 21
    # Task a: -.5; task b: only the question that both answered.
    assert snapkv.difference.value == pytest.approx(-0.25) and snapkv.difference.high < 0
    columns, lines = summarize.cells(table, "exact")
    assert len(columns) == len(lines[0]) and lines[1][1] == "25.0%"


def test_a_document_under_several_seeds_is_one():
    once = rows_of("exact", "a", [1.0, 0.0, 1.0, 1.0])
    thrice = [dataclasses.replace(one, seed=seed) for one in once for seed in range(3)]
    [first], [second] = (summarize.summarize(rows) for rows in (once, thrice))
    assert first.lines == second.lines


def test_failures_are_counted_next_to_the_scores_of_their_setting():
    failed = [row(policy, "a", "2", None, error="a fault") for policy in ("snapkv", "h2o", "kvpress SnapKV")]
    scored = [
        *rows_of("exact", "a", [1.0] * 3, tail_fraction=0.1),
        *rows_of("snapkv", "a", [1.0] * 2, tail_fraction=0.1),
    ]
    older, of_text = summarize.summarize([*scored, *failed, *rows_of("kvpress SnapKV", "a", [1.0] * 2)])
    assert {line.setting: line.errors for line in of_text.lines} == {"exact": 0, "snapkv @ 25%": 1, "h2o @ 25%": 1}
    assert [(line.setting, line.errors) for line in older.lines] == [("kvpress SnapKV @ 25%", 1)]


def test_tasks_that_the_model_cannot_do_are_left_out():
    rows = [
        *rows_of("exact", "good", [1, 1, 1, 0]), *rows_of("exact", "bad", [1, 0, 0, 0]),
        *rows_of("exact", "choice", [1, 0, 1, 0], chance=0.25), *rows_of("exact", "coin", [1, 0, 1, 0], chance=0.5),
    ]  # fmt: skip
    [table] = summarize.summarize(rows)
    assert table.left_out == {"bad": 0.25, "coin": 0.5}
    assert table.lines[0].mean.value == pytest.approx((0.75 + 0.5) / 2)


def test_the_bootstrap_has_the_coverage_of_its_intervals():
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        sample = (rng.random(60) < 0.4).astype(float)
        low, high = statistics.bootstrap([sample], seed)[1:]
        covered += low <= 0.4 <= high
    assert 0.89 <= covered / 200 <= 0.99
    two = statistics.bootstrap([np.ones(5), np.zeros(50)])
    assert two == Estimate(0.5, 0.5, 0.5)
    assert np.isnan(statistics.bootstrap([np.ones(1)]).low)


def test_intervals_against_published_quantiles():
    value, low, high = statistics.mean_interval(np.array([1.0, 2.0, 3.0, 4.0]))
    assert value == 2.5 and high - value == pytest.approx(3.182446 * 1.290994 / 2, rel=1e-4) == value - low
    assert statistics.median_interval(np.arange(1.0, 8.0)) == Estimate(4.0, 1.0, 7.0)
    for function, count in ((statistics.mean_interval, 1), (statistics.median_interval, 5)):
        with pytest.raises(ValueError, match=f"{count} samples have no"):
            function(np.ones(count))
    slope = statistics.log_slope([1, 2, 4], np.array([[1, 4, 16], [3, 12, 48]]))
    assert slope.value == pytest.approx(2) and slope.high == pytest.approx(2)
    assert str(Estimate(1234.5)) == "1234" and Estimate(0.5, 0.25, 1).fixed("+") == "+0.50 [+0.25, +1.00]"


def test_the_command_writes_markdown(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    rows = [*rows_of("exact", "a", [1.0, 1.0]), *rows_of("exact", "p", [2.0, 3.0], metric="nll")]
    path.write_text("".join(json.dumps(vars(one)) + "\n" for one in rows) + '{"cut')
    summarize.main(summarize.Options(rows=(str(path),), markdown=tmp_path / "t.md"))
    text = (tmp_path / "t.md").read_text()
    assert "| exact |" in text and "nats per token" in text and "exact" in capsys.readouterr().out
