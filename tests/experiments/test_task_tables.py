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
    chelsea = next(line for line in task_tables.lines(FOUND) if line.label == "chelsea")
    kept = {task: share.value for task, share in chelsea.kept.items()}
    assert kept == pytest.approx({"ruler: niah": 0.75, "ruler: rare": 0.5, "perplexity: held out": 0.8})
    assert chelsea.kept["ruler: niah"] == pytest.approx((0.75, 0.5 / 0.8, 0.7 / 0.8))
    assert chelsea.kept["perplexity: held out"] == pytest.approx((0.8, 1 / 1.35, 1 / 1.15))
    assert set(chelsea.scores) == {"ruler: niah", "ruler: vt", "ruler: rare", "perplexity: held out"}
    text = task_tables.section(FOUND)
    assert "Exact attention itself scores under 0.1 on ruler: vt: shares leave these out." in text
    assert "the mean over tasks but ruler: rare, where few policies were run" in text


def test_the_best_come_first_apart_by_what_is_held_and_what_is_read():
    lines = task_tables.section(FOUND).splitlines()
    begin = lines.index("## At 25% of exact's bytes") + 4
    assert [line.split(" | ")[0] for line in lines[begin : begin + 4]] == [
        "| `exact`", "| `chelsea`", "| `subgen`", "| `clusterkv`"
    ]  # fmt: skip
    assert lines[begin + 1].endswith("| .77 [.71, .85] | .50 |") and lines[begin + 3].endswith("| 1.00 |")
    assert "99% on every task: `clusterkv`." in lines


def test_pictures_show_policies_that_were_run_on_what_is_shared(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(task_tables.plots, "save", lambda figure, path, dpi: drawn.update({path.name: figure}))
    task_tables.draw(FOUND, tmp_path)
    [kept] = drawn["kept.png"].axes
    curves = {container.get_label(): container[0] for container in kept.containers}
    assert list(curves) == ["clusterkv", "chelsea", "subgen"]
    assert [curve.get_ydata().item() for curve in curves.values()] == pytest.approx([0.9975, 0.775, 0.5], abs=1e-4)
    assert all(abs(curve.get_xdata()[0] - 0.25) < 0.005 for curve in curves.values())
    assert [curve.get_linestyle() for curve in curves.values()] == ["--", "-", "-"]
    assert [axis.get_title() for axis in drawn["accuracy.png"].axes if axis.axison][:1] == ["ruler"]


def test_of_each_policy_the_setting_that_keeps_most_is_drawn():
    rows = [row("exact", 1.0, budget=None)]
    rows += [dataclasses.replace(row("chelsea", value), variant=f"chunk={value}") for value in (0.2, 0.9, 0.5)]
    every = task_tables.lines({"ruler": rows})
    [[best]] = task_tables.of_each_policy(every, ["ruler: niah"])
    assert best.label == "chelsea:chunk=0.9"


def test_lengths_are_averaged():
    rows = [row("exact", 1.0, budget=None), row("exact", 0.5, budget=None), row("uniform", 0.75), row("uniform", 0.25)]
    uniform = next(line for line in task_tables.lines({"ruler": rows}) if line.policy == "uniform")
    assert uniform.scores["ruler: niah"].value == 0.5
    assert uniform.kept["ruler: niah"].value == pytest.approx(2 / 3)


def test_nothing_was_run():
    assert task_tables.section({}) == ""
