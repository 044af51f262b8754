"""The results page: complete, as its rows make it, and every command on it can be typed."""

import dataclasses
import importlib
import re
import shlex

import pytest

from experiments.common import options, page, settings
from experiments.common.jobs import JOBS, PROFILES
from experiments.common.papers import PAPERS, Figures, Item, Paper
from experiments.common.processes import ROOT, command
from experiments.common.results import Row
from experiments.common.suites import ABLATIONS

# Numbers of figures and tables, as the papers print them.
PRINTED = {
    "SubGen": (range(1, 2), range(1, 2)),
    "ClusterGen (SubGen's second text)": (range(1, 2), range(1, 4)),
    "BalanceKV": (range(1, 5), range(1, 3)),
    "ClusterKV": (range(1, 14), range(1, 2)),
    "Chelsea": (range(1, 9), range(1, 12)),
    "Choices of the systems": (range(0), range(0)),
}
# No experiments: they train, compile for other machines, write text, or run the others.
OTHER_COMMANDS = {"train", "train_lm", "ahead_of_time", "pod_plan", "all"}


def test_every_table_and_figure_has_a_line():
    for paper in PAPERS:
        named = {"Figure": [], "Table": []}
        for item in paper.items:
            for kind, numbers in re.findall(r"(Figure|Table)s? ((?:\d+|I)(?:(?:, | and )\d+)*)", item.name):
                named[kind] += [1 if number == "I" else int(number) for number in re.findall(r"\d+|I", numbers)]
        figures, tables = PRINTED[paper.name]
        assert (sorted(named["Figure"]), sorted(named["Table"])) == (list(figures), list(tables)), paper.name


def test_the_page_is_what_its_rows_make():
    assert page.PAGE.read_text(encoding="utf-8") == page.render(page.published())


def test_every_experiment_is_run_and_every_figure_has_a_job():
    modules = {path.stem for path in (ROOT / "experiments").glob("*.py")} - {"__init__"}
    assert {job.experiment for job in JOBS.values()} == modules - OTHER_COMMANDS
    assert {figures.job for paper in PAPERS for item in paper.items for figures in item.figures} <= set(JOBS)


def test_every_ablation_is_run_and_has_a_line():
    shown = {figures.where.get("ablation") for paper in PAPERS for item in paper.items for figures in item.figures}
    run = [name for job in JOBS.values() for name in job.what.get("ablation", ())]
    assert shown - {None} == set(ABLATIONS) and sorted(run) == sorted(ABLATIONS)


def test_every_command_can_be_typed():
    commands = [command(job.experiment, job.arguments(profile)) for job in JOBS.values() for profile in PROFILES]
    commands += re.findall(r"`(python -m experiments\.[^`]+)`", page.PAGE.read_text(encoding="utf-8"))
    names, chosen = set(), set()
    for one in dict.fromkeys(commands):
        _, _, module, *arguments = shlex.split(one)
        names.add(module)
        imported = importlib.import_module(module)
        given = options.parse(imported.Options, arguments)
        if isinstance(given, options.Policies) and "press" not in vars(given):
            chosen.update(settings.settings(given.policy, given.budget))
    for ablation in ABLATIONS.values():
        policies = [policy for policy in ablation.policies if "heads=" not in policy]  # which name files
        chosen.update(settings.settings(policies, ablation.budgets))
    for setting in chosen:
        setting.make(32768)
    assert len(names) > 10


def row(policy, value, low=None, high=None, **extra):
    return Row(
        "e", "m", policy, "accuracy", value, ci95_low=low, ci95_high=high, n=50, context_tokens=2048, extra=extra
    )


RANKED = Figures("ablations_kept", "accuracy", groups=("budget",), order=("exact", "chelsea", "uniform"))


@pytest.mark.parametrize(
    "chelsea, uniform, expected",
    [
        ((0.6, 0.5, 0.7), (0.3, 0.2, 0.4), "**yes**: 2 of 2 comparisons as there"),
        (
            (0.3, 0.2, 0.4),
            (0.6, 0.5, 0.7),
            "**no**: 1 of 2 comparisons as there; the other way round: `uniform` before `chelsea` (1)",
        ),
        ((0.5, 0.4, 0.6), (0.4, 0.3, 0.5), "**in part**: 1 of 2 comparisons as there, 1 within their intervals"),
        ((0.98, 0.9, 1), (0.97, 0.9, 1), "**not told apart**: 0 of 2 comparisons as there, 2 within their intervals"),
    ],
)
def test_an_order_holds_where_intervals_do_not_meet(chelsea, uniform, expected):
    rows = [row("exact", 1.0, 0.95, 1.0, budget=None), row("chelsea", *chelsea, budget="25%")]
    rows.append(row("uniform", *uniform, budget="25%"))
    assert page.verdict(RANKED, rows) == expected


def test_lower_may_be_better_and_a_figure_without_interval_is_taken_as_it_is():
    figures = Figures("latency", "accuracy", order=("uniform", "exact"), lower_is_better=True)
    assert page.verdict(figures, [row("exact", 1.0), row("uniform", 0.5)]).startswith("**yes**")
    assert page.verdict(figures, [row("exact", 0.4), row("uniform", 0.5)]).startswith("**no**")
    assert page.verdict(figures, [row("exact", 0.4)]) == page.NOT_RUN


def test_a_line_shows_rows_of_its_job_alone_and_says_what_has_not_run(monkeypatch):
    item = Item("Table 9", "what", "the paper's", (RANKED,), why="Because.")
    assert page.NOT_RUN in page.line(item, {}) and "Because." not in page.line(item, {})
    rows = [row("exact", 1.0, 0.9, 1.0, budget=None), row("chelsea", 0.25, 0.1, 0.4, budget="25%")]
    rows += [row("h2o", 0.77, budget="25%"), Row("e", "m", "chelsea", "perplexity", 9.0)]
    monkeypatch.setattr(page, "PAPERS", (Paper("A", "", (item,)),))
    found = page.collect({"ablations_kept": page.Done("the command", rows)}, "a machine")
    assert [one.policy for one in found["ablations_kept"].rows if one.extra["budget"]] == ["chelsea"]
    shown = page.line(item, {"cpu": found})
    assert "25%: `chelsea` 0.25 [0.10, 0.40]" in shown and "0.77" not in shown and page.NOT_RUN not in shown
    assert "`the command`: m, 2,048 tokens, n = 50; a machine (`cpu`)" in shown


def test_a_method_alone_is_shown_and_not_ranked():
    item = Item("Figure 12", "what", "the paper's", (dataclasses.replace(RANKED, order=("chelsea",)),), why="Because.")
    done = page.Done("the command", [row("chelsea", 0.25, 0.1, 0.4, budget="25%")])
    cells = page.line(item, {"cpu": {"ablations_kept": done}}).split(" | ")
    assert cells[2:4] == ["25%: `chelsea` 0.25 [0.10, 0.40]", "-"]


def test_results_are_read_as_they_were_written(tmp_path):
    found = {"latency": page.Done("a command", [row("exact", 1.0, budget=None), row("h2o", 0.5, budget="5%")], "here")}
    page.save(found, tmp_path / "cpu.json")
    [read] = page.load(tmp_path / "cpu.json").values()
    assert read.command == "a command" and read.machine == "here"
    assert [one.value for one in read.rows] == [1.0, 0.5] and read.rows[1].extra["budget"] == "5%"


def test_what_is_published_takes_the_place_of_earlier_and_quick_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(page, "PAGE", tmp_path / "README.md")

    def done(value):
        rows = [row("exact", 1.0, budget=None, prefill="exact"), row("h2o", value, budget="25%", prefill="exact")]
        unseen = [dataclasses.replace(one, question_seen=False, budget_fraction=0.25) for one in rows]
        return page.Done("a command", unseen, "here")

    page.publish({"ruler": done(0.1), "line_retrieval": done(0.5)}, "quick")
    assert "](results/quick.png)" in page.PAGE.read_text() and (page.RESULTS / "quick.png").exists()
    page.publish({"line_retrieval": done(0.6)}, "cpu")
    page.publish({"ruler": done(0.7)}, "cpu")
    published = {
        profile: {job: one.rows[1].value for job, one in jobs.items()} for profile, jobs in page.published().items()
    }
    assert published == {"quick": {}, "cpu": {"line_retrieval": 0.6, "ruler": 0.7}}
    assert (tmp_path / "README.md").read_text() == page.render(page.published())
    assert "](results/cpu.png)" in page.PAGE.read_text() and "quick.png" not in page.PAGE.read_text()
