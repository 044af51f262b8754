"""Renders pages of the papers' results: the paper's numbers, the command, measured rows and a verdict per claim.

    python -m experiments.render --rows experiments/results/rows.jsonl

`papers/*.toml` lists every table and figure of a paper. A verdict compares measured rows: a claim holds if all paired
differences are significantly positive; it does not hold if one is significantly negative; otherwise the difference is
not significant. Tasks at the floor, in which all compressed caches have scores near 0, have no verdict. A result
without rows is "not run". A result with `profile` has a second verdict: of the same policies with the heads of the
model's profile, at equal bytes.
"""

import dataclasses
import json
import pathlib
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

import numpy as np

from experiments import device, summarize
from experiments.common import ROOT, caches, plots
from experiments.common.console import markdown_table
from experiments.common.flags import Flags, repeatable, run_command
from experiments.common.output import as_text, figure, figure_table
from experiments.common.rows import Row, read_rows
from experiments.common.statistics import Estimate, mean_interval
from experiments.tasks import RULER

PAPERS = ROOT / "experiments" / "papers"
DIRECTORY = ROOT / "docs" / "papers"


WITH_PROFILE = (
    "**With the profile.** The same comparison with `heads=auto`: in all policies the heads that retrieve keep every\n"
    "token, and all bytes together are equal. The question is not part of the compressed text."
)


class Shown(NamedTuple):
    """The rows that a page shows: patterns of their columns."""

    settings: tuple[str, ...] = ("*",)
    tasks: str = "*"
    question: str = "*"
    tokens: str = "*"
    older: bool = True  # also rows of budgets that include question and answer

    def matches(self, row: Row) -> bool:
        """Returns whether the page shows a `row`."""
        setting = any(fnmatch(row.setting, pattern) for pattern in self.settings)
        return (
            setting
            and (self.older or row.is_of_text)
            and all(
                fnmatch(str(value), pattern)
                for value, pattern in ((row.task, self.tasks), (row.question, self.question), (row.tokens, self.tokens))
            )
        )


SYSTEMS = ("subgen_mean", "clustergen", "balancekv", "clusterkv", "chelsea")  # of the four papers

# Pages with tables between markers.
PAGES = {
    ROOT / "README.md": Shown(
        (
            "exact",
            "auto @ *",
            *(f"{name}:heads=auto @ 25%, int8" for name in SYSTEMS),
            *(f"{name} @ 25%" for name in SYSTEMS),
        ),
        "facts",
        "unseen",
        "1024",
        older=False,
    ),
    ROOT / "docs" / "results.md": Shown(),
}
PICTURE = ROOT / "docs" / "images" / "score_by_bytes.png"  # of the table with most settings
_MARKED = re.compile(r"(<!-- Written by experiments.render: -->\n).*?(<!-- End of the results. -->)", re.DOTALL)
_DEVICE = re.compile(r"(<!-- ([^\n]+) of (\S+\.jsonl): -->\n).*?(<!-- End of the rows. -->)", re.DOTALL)
_FIGURES = re.compile(r"(<!-- (\S+) of (\S+\.json): -->\n).*?(<!-- End of the figures. -->)", re.DOTALL)
HOLDS, FAILS, UNCLEAR, NOT_RUN = "holds", "does not hold", "not significant", "not run"
FLOOR = 0.2  # largest mean score at the floor of a task
AT_FLOOR = (
    f"Every compressed cache scores at most {FLOOR}, the floor of this task. The order of such scores says little, and "
    "the\nverdict does not use it."
)


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of the renderer."""

    rows: tuple[str, ...] = repeatable()  # Files of rows; by default experiments/results/*.jsonl.gz.
    figures_dir: str = str(ROOT / "experiments" / "results")  # Directory of other experiments' figures.
    output_dir: str = str(DIRECTORY)  # Directory of the pages; README and other pages are written with the default.


def main(options: Options) -> None:
    """Writes a page per paper."""
    default = (ROOT / "experiments" / "results").glob("*.jsonl.gz")
    rows = read_rows(map(pathlib.Path, options.rows) if options.rows else sorted(default))
    directory = pathlib.Path(options.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(PAPERS.glob("*.toml")):
        paper = tomllib.loads(path.read_text(encoding="utf-8"))
        page = render(paper, rows, pathlib.Path(options.figures_dir))
        (directory / f"{path.stem}.md").write_text(page, encoding="utf-8")
        print(directory / f"{path.stem}.md")
    if directory == DIRECTORY:
        for path, shown in PAGES.items():
            page = with_figures(path.read_text(encoding="utf-8"), pathlib.Path(options.figures_dir))
            path.write_text(with_results(page, rows, shown), encoding="utf-8")
        tables = [table for of_group in _by_group(rows).values() for table in summarize.summarize(of_group)]
        plots.save(score_figure(max(tables, key=lambda table: len(table.lines))), PICTURE)


def _by_group(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Returns the rows of each task; all tasks of RULER are one group."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault("RULER" if row.task.partition(":")[0] in RULER else row.task, []).append(row)
    return groups


def with_results(page: str, rows: Sequence[Row], shown: Shown) -> str:
    """Returns a page with the tables of rows between its markers.

    Tasks with a low score of the full cache are listed after the tables (see `summarize`).

    Args:
        page: the page in Markdown.
        rows: measured rows.
        shown: the rows that the page shows.

    Returns:
        The page.
    """
    text, left_out = "", dict[str, float]()
    for group, of_group in _by_group(filter(shown.matches, rows)).items():
        for table in summarize.summarize(of_group):
            left_out |= {f"{task}, {table.title}": score for task, score in table.left_out.items()}
            if counted := [task for task in table.tasks if task not in table.left_out]:
                columns, lines = summarize.cells(table._replace(tasks=counted), caches.FULL)
                text += f"\n{group}, {table.title}:\n\n{markdown_table(columns, lines)}"
    if left_out:
        names = markdown_table(("task", "score"), [(task, f"{score:.2f}") for task, score in left_out.items()])
        text += f"\nTasks that the full cache does not solve, which say little about compressed caches:\n\n{names}"
    return _MARKED.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page)


def with_figures(page: str, directory: pathlib.Path) -> str:
    """Returns a page with tables of figures between markers, which name the metrics and the file in a `directory`.

    Tables of rows of `experiments.device` have markers that name the table.
    """

    def table(match: re.Match[str]) -> str:
        metrics = match[2].split(",")
        figures = [one for one in json.loads((directory / match[3]).read_text()) if one["metric"] in metrics]
        figures.sort(key=lambda one: metrics.index(one["metric"]))
        return f"{match[1]}\n{markdown_table(*figure_table(figures, 'setting'))}\n{match[4]}"

    def device_table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{device.table(match[2], device.read_rows(directory / match[3]))}\n{match[4]}"

    return _DEVICE.sub(device_table, _FIGURES.sub(table, page))


def score_figure(table: summarize.Table) -> plots.plt.Figure:
    """Draws the mean score of every policy against the bytes that its cache holds.

    Args:
        table: the table.

    Returns:
        The figure, with the presses of kvpress in grey; low scores have no names, which would overlap.
    """
    figure, axes = plots.plt.subplots(figsize=(8.5, 4.2))
    by_policy: dict[str, list[summarize.Line]] = {}
    for line in table.lines:
        if line.mean is not None:
            by_policy.setdefault(line.setting.partition(" @ ")[0], []).append(line)
    for policy, lines in by_policy.items():
        lines.sort(key=lambda line: line.held)
        held, scores = [100 * line.held for line in lines], [line.mean.value for line in lines if line.mean]
        if policy.startswith("kvpress "):
            axes.plot(held, scores, color="0.7", marker="o", markersize=4, zorder=1)
            name = policy if scores[-1] > 0.4 else ""
            axes.annotate(name, (held[-1], scores[-1]), (5, -3), textcoords="offset points", fontsize=7, color="0.4")
        else:
            axes.plot(held, scores, marker="o", markersize=4, zorder=3, label=policy)
    axes.set(xscale="log", xlabel="bytes held, % of a full bfloat16 cache", ylabel="mean score", ylim=(-0.03, 1.03))
    axes.set_xticks(ticks := [3.1, 6.25, 12.5, 25, 50, 100], [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_title(table.title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, frameon=False)
    return figure


def render(paper: Mapping[str, Any], rows: Sequence[Row], figures_dir: pathlib.Path) -> str:
    """Returns the page of a paper.

    Args:
        paper: content of its TOML file.
        rows: measured rows.
        figures_dir: directory of other experiments' figures.

    Returns:
        The page in Markdown.
    """
    sections, overview = [], []
    for result in paper["results"]:
        verdict, measured = evaluate_claim(result, rows, figures_dir)
        section = _section(result, verdict, measured)
        with_profile = "-"
        if "profile" in result:
            with_profile, measured = evaluate_claim({"compare": result["profile"]}, rows, figures_dir)
            section += f"\n{WITH_PROFILE} **Verdict:** {with_profile}.\n"
            section += f"\nMeasured:\n\n{measured}" if measured else ""
        overview.append((result["name"], result["claim"], verdict, with_profile))
        sections.append(section)
    head = (
        f"# {paper['title'].partition(':')[0]}\n\n[{paper['title']}]({paper['link']}). {paper['settings']}\n\n"
        "This page lists every table and figure of the paper, with the paper's numbers and measurements of kvjax on\n"
        "pretrained models. `python -m experiments.render` writes it.\n\n"
    )
    columns = ("result", "claim", "as published", "with the profile")
    return head + markdown_table(columns, overview).replace("---:", "---") + "".join(sections)


def _section(result: Mapping[str, Any], verdict: str, measured: str) -> str:
    """Returns the section of a table or figure."""
    text = f"\n## {result['name']}\n\n{result['title']}.\n\n**Claim.** {result['claim']} **Verdict:** {verdict}.\n"
    if "note" in result:
        text += "\n" + textwrap.fill(result["note"], 120, break_long_words=False, break_on_hyphens=False) + "\n"
    if "rows" in result:
        text += f"\nThe paper's numbers:\n\n{markdown_table(result['columns'], result['rows'])}"
    if measured:
        text += f"\nMeasured:\n\n{measured}"
    if "command" in result:
        command = result["command"].replace("; ", "\n    ")
        text += f"\nCommand:\n\n    {command}\n"
    if "needs" in result:
        text += f"\nThe paper's setting was not run. It needs {result['needs']}.\n"
    return text


def evaluate_claim(result: Mapping[str, Any], rows: Sequence[Row], figures_dir: pathlib.Path) -> tuple[str, str]:
    """Returns the verdict of a claim and the tables of its measurements.

    Args:
        result: the table or figure, with checks by kind (`CHECKS`): one or a list.
        rows: measured rows.
        figures_dir: directory of other experiments' figures.

    Returns:
        The verdict of all checks, and Markdown.
    """
    differences, text = list[Estimate](), ""
    for kind, evaluate in CHECKS.items():
        checks = result.get(kind, [])
        for check in checks if isinstance(checks, list) else [checks]:
            found, table = evaluate(check, rows if kind == "compare" else _read_figures(figures_dir / check["file"]))
            differences += found
            text += f"\n{table}" if text and table else table
    return (UNCLEAR if not differences and AT_FLOOR in text else _verdict(differences)), text


def _read_figures(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the figures of a file; none if it does not exist."""
    return json.loads(path.read_text()) if path.exists() else []


def _verdict(differences: Sequence[Estimate]) -> str:
    """Returns the verdict of differences that a claim expects to be positive."""
    if not differences:
        return NOT_RUN
    if any(one.high < 0 for one in differences):
        return FAILS
    return HOLDS if all(one.low > 0 for one in differences) else UNCLEAR


def _compare_rows(compare: Mapping[str, Any], rows: Sequence[Row]) -> tuple[list[Estimate], str]:
    """Compares settings by rows of `experiments.evaluate`, for each model and length."""
    name, others = compare["better"], compare["than"]
    selected = [
        row
        for row in rows
        if row.question == compare["question"]
        and row.setting in (caches.FULL, name, *others)
        and any(fnmatch(row.task, pattern) for pattern in compare["tasks"])
    ]
    differences, texts = list[Estimate](), []
    for table in summarize.summarize(selected):
        if all(line.setting == caches.FULL for line in table.lines):
            continue
        is_loss = table.metric == "nll"
        columns, lines = summarize.cells(table, caches.FULL)
        unit = ": nats per token, smaller is better" if is_loss else ""
        texts.append(f"{table.title}{unit}\n\n{markdown_table(columns, lines)}")
        found = _paired_differences(table, selected, name, others)
        if found and not is_loss and _is_at_floor(table):
            texts.append(f"{AT_FLOOR}\n")
            continue
        if found:
            lines = [[f"{name} minus {other}", pair.fixed("+", digits=3)] for other, pair in found.items()]
            texts.append(markdown_table(("", "paired difference"), lines))
            if not is_loss and (score := _mean_score(table, name)) is not None and score <= FLOOR:
                texts.append(f"{name} scores at most {FLOOR}, the floor of this task.\n")
        within = compare.get("within")  # with it, the claim is that the settings differ by less
        differences += [
            (-pair if is_loss else pair) if within is None else _margin(pair, within) for pair in found.values()
        ]
    return differences, "\n".join(texts)


def _paired_differences(
    table: summarize.Table, rows: Sequence[Row], name: str, others: Sequence[str]
) -> dict[str, Estimate]:
    """Returns the differences of a setting to each of the `others` that a table has."""
    rows = [row for row in rows if (summarize.title_of(row), row.metric) == (table.title, table.metric)]
    by_setting = {setting: [row for row in rows if row.setting == setting] for setting in (name, *others)}
    tasks = [task for task in table.tasks if task not in table.left_out]
    pairs = {other: summarize.paired_differences(by_setting[name], by_setting[other], tasks) for other in others}
    return {other: pair for other, pair in pairs.items() if pair is not None}


def _mean_score(table: summarize.Table, setting: str) -> float | None:
    """Returns the mean score of a setting; None without one."""
    return next((line.mean.value for line in table.lines if line.setting == setting and line.mean), None)


def _is_at_floor(table: summarize.Table) -> bool:
    """Returns whether the mean scores of all compressed caches are at most `FLOOR`."""
    return all(line.setting == caches.FULL or (line.mean and line.mean.value <= FLOOR) for line in table.lines)


def _margin(difference: Estimate, within: float) -> Estimate:
    """Returns by how much the size of a difference is below `within`."""
    bounds = sorted((abs(difference.low), abs(difference.high)))
    smallest = 0.0 if difference.low < 0 < difference.high else bounds[0]
    return Estimate(within - abs(difference.value), within - bounds[1], within - smallest)


def _compare_figures(compare: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> tuple[list[Estimate], str]:
    """Compares two settings in every case that both have: seed by seed if the figures have samples."""
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for one in figures:
        if one["metric"] == compare["metric"] and one["setting"] in (compare["better"], compare["than"]):
            case = str(one.get("case", f"{one.get('model')}, {one.get('context_tokens')} tokens"))
            if case in compare.get("cases", [case]):
                cases.setdefault(case, {})[one["setting"]] = one
    # With a factor, the claim is about this multiple of the other setting's value.
    sign, factor = 1 if compare.get("larger") else -1, compare.get("factor", 1.0)
    cases = {case: found for case, found in cases.items() if len(found) == 2}
    if compare.get("mean") and cases:  # The verdict is of the mean over the cases; the table has all of them.
        cases["mean"] = {setting: _mean_of_cases(cases, setting) for setting in (compare["better"], compare["than"])}
    differences, lines = list[Estimate](), list[list[str]]()
    columns: tuple[str, ...] = (compare["metric"], compare["better"], compare["than"])
    for case, found in cases.items():
        better, other = found[compare["better"]], found[compare["than"]]
        line = [case, as_text(better), as_text(other)]
        if "samples" in better and "samples" in other:
            pair = mean_interval(np.asarray(better["samples"]) - factor * np.asarray(other["samples"]))
            line.append(str(pair))
            columns = (*columns[:3], "paired difference")
        else:  # Disjoint intervals are a significant difference.
            bounds = better["low"] - factor * other["high"], better["high"] - factor * other["low"]
            pair = Estimate(better["value"] - factor * other["value"], *bounds)
        differences.append(pair if sign > 0 else -pair)
        lines.append(line)
    if compare.get("mean"):
        differences = differences[-1:]
    if compare.get("shown_only"):
        differences = []
    return differences, markdown_table(columns, lines) if lines else ""


def _mean_of_cases(cases: Mapping[str, Mapping[str, Mapping[str, Any]]], setting: str) -> dict[str, Any]:
    """Returns the figure of a setting's mean over cases, seed by seed."""
    samples = np.mean([found[setting]["samples"] for found in cases.values()], axis=0)
    return figure("mean", mean_interval(samples), samples=samples)


def _check_range(check: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> tuple[list[Estimate], str]:
    """Checks that the intervals of a metric overlap a range; `show` lists metrics that the table has, too."""
    metrics = [check["metric"], *check.get("show", [])]
    found = [one for one in figures if one["metric"] in metrics and one.get("setting") == check.get("setting")]
    if not found:
        return [], ""
    table = figure_table([{"line": one.get("case", ""), **one} for one in found], "line")
    bounds = [
        (one.get("low", one["value"]), one.get("high", one["value"])) for one in found if one["metric"] == metrics[0]
    ]
    inside = [low <= check["high"] and high >= check["low"] for low, high in bounds]
    return [Estimate(0.0, 1.0, 1.0) if one else Estimate(0.0, -1.0, -1.0) for one in inside], markdown_table(*table)


def _check_ratio(check: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> tuple[list[Estimate], str]:
    """Checks that the measured ratios of the `walks` are below 1; the table has all walks."""
    found = [one for one in figures if one["metric"] == "ratio"]
    lines = [(one["line"], as_text(one)) for one in found]
    differences = [
        Estimate(1 - one["value"], 1 - one["high"], 1 - one["low"]) for one in found if one["walk"] in check["walks"]
    ]
    return differences, markdown_table(("", "ratio"), lines) if lines else ""


def _show_figures(shown: Mapping[str, Any], figures: Sequence[dict[str, Any]]) -> tuple[list[Estimate], str]:
    """Returns a table of figures that no verdict uses."""
    found = [one for one in figures if one["metric"] in shown["metrics"] and one.get("setting") in shown["settings"]]
    found.sort(key=lambda one: (shown["settings"].index(one["setting"]), shown["metrics"].index(one["metric"])))
    return [], markdown_table(*figure_table(found, "setting")) if found else ""


# Each returns the differences that a claim expects to be positive, and a table.
CHECKS: dict[str, Callable[[Any, Any], tuple[list[Estimate], str]]] = {
    "compare": _compare_rows,
    "figures": _compare_figures,
    "range": _check_range,
    "ratio": _check_ratio,
    "show": _show_figures,
}


if __name__ == "__main__":
    run_command(main, Options)
