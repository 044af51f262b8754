"""The pages of results: complete, short, as their rows make them, and every command on them can be typed."""

import dataclasses
import importlib
import re
import shlex

import PIL.Image
import pytest

from experiments.common import comparisons, options, page, plots, results, sections, settings, width_tables
from experiments.common.jobs import JOBS, PROFILES
from experiments.common.processes import ROOT, command
from experiments.common.results import Row
from experiments.common.sections import Figure, Section
from experiments.common.suites import ABLATIONS
from kvjax.registry import POLICIES

# Numbers of figures and tables, as the papers print them.
PRINTED = {
    ("papers/subgen.md", "SubGen"): (range(1, 2), range(1, 2)),
    ("papers/subgen.md", "ClusterGen"): (range(1, 2), range(1, 4)),
    ("papers/balancekv.md", ""): (range(1, 5), range(1, 3)),
    ("papers/clusterkv.md", ""): (range(1, 14), range(1, 2)),
    ("papers/chelsea.md", ""): (range(1, 9), range(1, 12)),
}
# No experiments: they show, compile for other machines, or run the others.
OTHER_COMMANDS = {"demo", "ahead_of_time", "pod_plan", "all", "device"}


@pytest.mark.parametrize(("path", "paper"), PRINTED)
def test_every_table_and_figure_has_a_section(path, paper):
    [own] = [one for one in sections.pages() if one.path == path]
    named = {"Figure": [], "Table": []}
    for section in own.sections:
        for name in section.name.split("; "):
            for kind, numbers in re.findall(r"(Figure|Table)s? ((?:\d+|I)(?:(?:, | and )\d+)*)", name):
                if name.startswith(paper):
                    named[kind] += [1 if number == "I" else int(number) for number in re.findall(r"\d+|I", numbers)]
    figures, tables = PRINTED[path, paper]
    assert (sorted(named["Figure"]), sorted(named["Table"])) == (list(figures), list(tables))


def test_the_pages_are_what_their_rows_make_and_short():
    found = page.published()
    for path, text in page.render(found).items():
        assert (page.DOCS / path).read_text(encoding="utf-8") == text, "python -m experiments.pages"
        assert len(text.encode()) <= page.MOST_BYTES, path
        for picture in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text):
            drawn = (page.DOCS / path).parent / picture
            assert drawn.stat().st_size < 100_000
            assert PIL.Image.open(drawn).width > 600


def test_what_has_not_run_is_off_the_pages_and_on_the_list():
    found = page.published()
    missing = [place for places in page.not_run(found).values() for place in places]
    text = "\n".join(page.render(found).values())
    for own, section, figure in sections.figures():
        rows = [row for jobs in found.values() for job in figure.jobs if job in jobs for row in jobs[job].rows]
        listed = any(place.startswith(f"{own.path}: {section.title}") for place in missing)
        assert any(map(figure.takes, rows)) or listed
        assert f"## {section.title}\n" in text or listed
    assert "not run" not in text.lower() and page.not_run({})


def test_every_experiment_is_run_and_every_figure_has_a_job():
    modules = {path.stem for path in (ROOT / "experiments").glob("*.py")} - {"__init__"}
    assert {job.experiment for job in JOBS.values()} == modules - OTHER_COMMANDS
    assert {job for _, _, figure in sections.figures() for job in figure.jobs} <= set(JOBS)


def test_every_ablation_is_run_and_has_a_section():
    shown = {figure.where.get("ablation") for _, _, figure in sections.figures()}
    run = [name for job in JOBS.values() for name in job.what.get("ablation", ())]
    assert shown - {None} == set(ABLATIONS) and sorted(run) == sorted(ABLATIONS)


def test_every_command_can_be_typed():
    commands = [command(job.experiment, job.arguments(profile)) for job in JOBS.values() for profile in PROFILES]
    for text in page.render(page.published()).values():
        commands += re.findall(r"^(python -m experiments\..+)$", text, flags=re.MULTILINE)
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


def test_the_guide_names_every_module():
    guide = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    assert len(guide.encode()) <= page.MOST_BYTES
    modules = {path.stem for path in (ROOT / "experiments").glob("*.py")} - {"__init__"}
    assert modules <= set(re.findall(r"^\| `(\w+)`", guide, flags=re.MULTILINE))


def test_every_policy_has_a_colour_of_its_own():
    assert set(plots.COLOURS) == set(POLICIES)
    assert len(set(plots.COLOURS.values())) == len(POLICIES)
    assert plots.colour("chelsea:slope=None @ 25%") == plots.COLOURS["chelsea"]
    assert plots.colour("low_rank") is None


def row(policy, value, low=None, high=None, **extra):
    return Row(
        "e", "m", policy, "accuracy", value, ci95_low=low, ci95_high=high, n=50, context_tokens=2048, extra=extra
    )


RANKED = Figure(("ablations_kept",), "accuracy", groups=("budget",), order=("exact", "chelsea", "uniform"))


@pytest.mark.parametrize(
    "chelsea, uniform, expected",
    [
        ((0.6, 0.5, 0.7), (0.3, 0.2, 0.4), "**yes**, 2 of 2 comparisons"),
        (
            (0.3, 0.2, 0.4),
            (0.6, 0.5, 0.7),
            "**no**, 1 of 2 comparisons; the other way round: `uniform` before `chelsea` (1)",
        ),
        ((0.5, 0.4, 0.6), (0.4, 0.3, 0.5), "**in part**, 1 of 2 comparisons, 1 within their intervals"),
        ((0.98, 0.9, 1), (0.97, 0.9, 1), "**not told apart**, 0 of 2 comparisons, 2 within their intervals"),
    ],
)
def test_an_order_holds_where_intervals_do_not_meet(chelsea, uniform, expected):
    rows = [row("exact", 1.0, 0.95, 1.0, budget=None), row("chelsea", *chelsea, budget="25%")]
    rows.append(row("uniform", *uniform, budget="25%"))
    assert comparisons.verdict(RANKED, rows) == expected


def test_lower_may_be_better_and_a_figure_without_interval_is_taken_as_it_is():
    figure = Figure(("latency",), "accuracy", order=("uniform", "exact"), lower_is_better=True)
    assert comparisons.verdict(figure, [row("exact", 1.0), row("uniform", 0.5)]).startswith("**yes**")
    assert comparisons.verdict(figure, [row("exact", 0.4), row("uniform", 0.5)]).startswith("**no**")
    assert comparisons.verdict(figure, [row("exact", 0.4)]) == ""


def test_exact_stands_at_every_budget_and_what_are_more_become_lines():
    rows = [row("exact", 1.0, budget=None)]
    rows += [row("chelsea", value, budget=f"{budget}%") for budget, value in ((5, 0.125), (25, 0.5), (50, 1234.5))]
    assert comparisons.table({RANKED: rows}).splitlines() == [
        "|  | `exact` | `chelsea` |",
        "| --- | --: | --: |",
        "| 5% | 1.00 | .12 |",
        "| 25% | 1.00 | .50 |",
        "| 50% | 1.00 | 1,234 |",
    ]
    assert comparisons.table({RANKED: rows[:2]}).splitlines() == [
        "|  | 5% |",
        "| --- | --: |",
        "| `exact` | 1.00 |",
        "| `chelsea` | .12 |",
    ]


def test_a_section_shows_rows_of_its_jobs_alone(monkeypatch):
    section = Section("what", "Table 9", "setting", "found", why="Because.", figures=(RANKED,))
    assert page.render_section(section, {}) == ""
    rows = [row("exact", 1.0, 0.9, 1.0, budget=None), row("chelsea", 0.25, 0.1, 0.4, budget="25%")]
    rows += [row("h2o", 0.77, budget="25%"), Row("e", "m", "chelsea", "perplexity", 9.0)]
    monkeypatch.setattr(sections, "pages", lambda: (sections.Page("a.md", "A", "", (section,)),))
    found = page.collect({"ablations_kept": page.Done("the command", rows)}, "a machine")
    assert [one.policy for one in found["ablations_kept"].rows if one.extra["budget"]] == ["chelsea"]
    shown = page.render_section(section, {"cpu": found})
    assert shown.startswith("## Table 9: what\n\n**The paper** (setting): found.\n\n")
    assert "| `chelsea` | .25 [.10, .40] |" in shown and ".77" not in shown and "Because." in shown
    assert "# m, 2,048 tokens, n = 50; a machine\nthe command\n" in shown
    assert page.not_run({"cpu": found}) == {} and len(page.not_run({"cpu": {}})) == 1


def test_the_largest_profile_that_ran_a_figure_is_shown():
    section = Section("what", figures=(RANKED,))
    found = {
        profile: {"ablations_kept": page.Done("c", [row("chelsea", value, budget="25%")])}
        for profile, value in (("quick", 0.1), ("cpu", 0.2))
    }
    assert ".20 |" in page.render_section(section, found | {"h200": {}})


def test_a_picture_has_a_point_per_policy_and_group(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(comparisons.plots, "save", lambda figure, path, dpi: drawn.append(figure))
    rows = [row(policy, value, 0.1, 0.9, budget=budget) for policy, budget, value in (
        ("chelsea", "5%", 0.2), ("chelsea", "25%", 0.5), ("uniform", "5%", 0.1)
    )]  # fmt: skip
    comparisons.draw({RANKED: rows}, tmp_path / "a.png")
    [axis] = drawn[0].axes
    points = [container[0] for container in axis.containers]
    assert sorted(float(point.get_xdata()[0]) for point in points) == [0.1, 0.2, 0.5]
    assert [point.get_color() for point in points] == [
        plots.COLOURS[name] for name in ("chelsea", "uniform", "chelsea")
    ]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["uniform", "chelsea"]


def test_a_section_s_picture_may_be_drawn_by_its_job_from_rows_that_its_table_leaves_out(tmp_path):
    told = {"budget": "25%", "prefill": "exact"}
    rows = [dataclasses.replace(row("snapkv", 0.25, **told), task="ruler", question_seen=False)]
    rows += [dataclasses.replace(rows[0], value=depth, extra={**told, "depth": depth}) for depth in (0.0, 0.5, 1.0)]
    rows.append(dataclasses.replace(rows[0], metric="ms_per_token"))
    found = page.collect({"needle_map": page.Done("the command", rows)}, "a machine")
    assert found["needle_map"].rows == rows[:-1]
    written = page.write({"cpu": found}, tmp_path)
    with PIL.Image.open(tmp_path / "images" / "needle.png") as drawn:
        assert len(drawn.convert("RGB").getcolors(2**16)) > 10
    assert tmp_path / "images" / "needle.png" in written
    text = (tmp_path / "results" / "accuracy.md").read_text()
    assert "| `snapkv` | .25 |" in text and "images/needle.png" in text and ".50" not in text


def test_one_of_several_ablations_is_typed_alone():
    figure = Figure(("ablations_kept",), "accuracy", {"ablation": "b"}, groups=("budget",))
    done = page.Done(
        "python -m e --ablation=a --ablation=b --ablation=b2", [row("h2o", 1.0, budget="5%", ablation="b")]
    )
    assert "\npython -m e --ablation=b\n" in page.render_section(
        Section("w", figures=(figure,)), {"cpu": {"ablations_kept": done}}
    )


def test_a_method_alone_is_shown_and_not_ranked():
    section = Section("what", figures=(dataclasses.replace(RANKED, order=("chelsea",)),))
    done = page.Done("the command", [row("chelsea", 0.25, 0.1, 0.4, budget="25%")])
    shown = page.render_section(section, {"cpu": {"ablations_kept": done}})
    assert "| `chelsea` | .25 [.10, .40] |" in shown and "order" not in shown


def test_results_are_read_as_they_were_written(tmp_path):
    found = {"latency": page.Done("a command", [row("exact", 1.0, budget=None), row("h2o", 0.5, budget="5%")], "here")}
    page.save(found, tmp_path / "cpu.json")
    [read] = page.load(tmp_path / "cpu.json").values()
    assert read.command == "a command" and read.machine == "here"
    assert [one.value for one in read.rows] == [1.0, 0.5] and read.rows[1].extra["budget"] == "5%"


def test_what_is_published_takes_the_place_of_earlier_and_quick_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(page, "DOCS", tmp_path / "docs")

    def done(value):
        rows = [row("exact", 1.0, budget=None, prefill="exact"), row("h2o", value, budget="25%", prefill="exact")]
        unseen = [dataclasses.replace(one, question_seen=False, budget_fraction=0.25) for one in rows]
        return page.Done("a command", unseen, "here")

    def shown():
        return (page.DOCS / "results" / "accuracy.md").read_text()

    page.publish({"ruler": done(0.1), "line_retrieval": done(0.5)}, "quick")
    assert "| `h2o` | 25.0% | .50 | .10 |" in shown() and (page.DOCS / "images" / "kept.png").exists()
    page.publish({"line_retrieval": done(0.6)}, "cpu")
    page.publish({"ruler": done(0.7)}, "cpu")
    published = {
        profile: {job: one.rows[1].value for job, one in jobs.items()} for profile, jobs in page.published().items()
    }
    assert published == {"quick": {}, "cpu": {"line_retrieval": 0.6, "ruler": 0.7}}
    assert shown() == page.render(page.published())["results/accuracy.md"]
    assert "| `h2o` | 25.0% | .60 | .70 |" in shown()


def test_widths_are_told_and_drawn_by_bytes(tmp_path):
    def row(metric, value, policy="exact", **fields):
        [setting] = settings.settings((policy,), ("25%",))
        return results.row("ruler", "m", metric, value, setting, **fields)

    def right(value, policy, fraction):
        found = results.Estimate(value, value - 0.03, value + 0.04)
        asked = {"question_seen": False, "prefill": "exact", "task": "niah_single_1"}
        return row("accuracy", found, policy, budget_fraction=fraction, **asked)

    jobs = {
        "few_bits": [
            right(0.9, "exact", 1.0),
            right(0.8, "exact:storage=int4", 0.13),
            right(0.86, "uniform:storage=int4", 0.06),
            right(0.4, "uniform", 0.06),
        ],
        "few_bits_perplexity": [
            row("perplexity_ratio", 1.2, "exact:storage=int4", form="per_position", budget_fraction=0.13)
        ],
    }
    assert all(width_tables.takes(job, one) for job, rows in jobs.items() for one in rows)
    lines = width_tables.section(jobs).splitlines()
    [line] = [one for one in lines if one.startswith("| `exact:storage=int4")]
    assert "13.0% | 26.0% | .80 [.77, .84] | 1.20" in line
    [best] = [one for one in lines if one.startswith("Best")]
    # Of independent shares' differences Newcombe's interval: sqrt(.03^2 + .04^2) on either side.
    assert "at 12.0% of bfloat16's bytes: `uniform:storage=int4`, -.04 [-.09, +.01] to exact" in best
    assert "+.46 [+.41, +.51] to the selection alone (`uniform`, 12.0%)" in best
    assert "+.06 [+.01, +.11] to the fewest bits alone (`exact:storage=int4`, 26.0%)" in best
    [path] = width_tables.draw(jobs, tmp_path)
    with PIL.Image.open(path) as drawn:
        assert len(drawn.convert("RGB").getcolors(2**16)) > 10
