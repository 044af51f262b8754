"""What policies keep of exact's results, from rows."""

import dataclasses

import pytest

from experiments.common import task_tables
from experiments.common.results import Row


def row(policy, value, task="niah", budget="25%", recalls=False, metric="accuracy", **extra):
    half = 0.1
    return Row(
        "e", "m", policy, metric, value, task=task, question_seen=False, budget_fraction=0.25, ci95_low=value - half,
        ci95_high=value + half, extra={"budget": budget, "prefill": "exact", "recalls": recalls, **extra},
    )  # fmt: skip


FOUND = {
    "ruler": [
        row("exact", 0.8, budget=None), row("exact", 0.05, task="vt", budget=None),
        row("chelsea", 0.6), row("chelsea", 0.05, task="vt"),
        row("exact", 1.0, task="rare", budget=None), row("chelsea", 0.5, task="rare"),
        row("subgen", 0.4), row("clusterkv", 0.8, recalls=True), row("clusterkv", 0.1, task="vt", recalls=True),
        dataclasses.replace(row("chelsea", 0.7), question_seen=True),
    ],
    "perplexity": [
        row("chelsea", 1.25, task="held out", metric="perplexity_ratio", form="per_position"),
        row("subgen", 2.0, task="held out", metric="perplexity_ratio", form="per_position"),
        row("clusterkv", 1.005, task="held out", recalls=True, metric="perplexity_ratio", form="per_position"),
    ],
}  # fmt: skip


def test_shares_are_of_exact_and_tasks_that_it_fails_are_left_out():
    by_setting = {line.setting: line for line in task_tables.lines(FOUND)}
    chelsea = by_setting["chelsea @ 25%"]
    assert chelsea.kept == pytest.approx({"ruler: niah": 0.75, "ruler: rare": 0.5, "perplexity: held out": 0.8})
    assert set(chelsea.scores) == {"ruler: niah", "ruler: vt", "ruler: rare", "perplexity: held out"}
    text = task_tables.section(FOUND)
    assert "Exact attention itself scores under 0.1 on ruler: vt: shares leave these out." in text
    assert "Averages leave out ruler: rare, where few policies were run." in text


def test_the_best_are_named_apart_by_what_is_held_and_what_is_read():
    told = "\n".join(task_tables.best(task_tables.lines(FOUND)))
    assert "- Best by bytes held at 25%: `chelsea @ 25%` keeps 0.775" in told
    assert "- Best by bytes read at 25%: `clusterkv @ 25%` keeps 0.998" in told
    assert "0.995 at least (`perplexity: held out`); .99 on every task is met." in told
    assert "- Best of SubGen at 25%: `subgen @ 25%` keeps 0.500" in told and "BalanceKV" not in told


def test_the_picture_shows_policies_that_were_run_on_what_is_shared(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(task_tables.plots, "save", lambda figure, path: drawn.append(figure))
    task_tables.plot(FOUND, tmp_path / "plot.png")
    held, read = drawn[0].axes
    assert {line.get_label(): line.get_xydata().tolist() for line in held.lines} == {
        "chelsea": [[0.25, pytest.approx(0.775)]], "subgen": [[0.25, pytest.approx(0.5)]]
    }  # fmt: skip
    assert [line.get_label() for line in read.lines] == ["clusterkv"]


def test_lengths_are_averaged():
    rows = [row("exact", 1.0, budget=None), row("exact", 0.5, budget=None), row("uniform", 0.75), row("uniform", 0.25)]
    uniform = next(line for line in task_tables.lines({"ruler": rows}) if line.policy == "uniform")
    assert uniform.scores["ruler: niah"].value == 0.5
    assert uniform.kept == pytest.approx({"ruler: niah": 2 / 3})


def test_nothing_was_run():
    assert task_tables.section({}).startswith("Not run yet: `python -m experiments.all")
