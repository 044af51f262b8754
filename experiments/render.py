"""Renders pages of the papers' results: the paper's numbers, the command, measured rows and a verdict per claim.

    python -m experiments.render --rows experiments/results/rows.jsonl

`papers/*.toml` lists every table and figure of a paper. A verdict compares measured rows: a claim holds if all paired
differences are significantly positive; it does not hold if one is significantly negative; otherwise the difference is
not significant. A result without rows is "not run".
"""

import dataclasses
import json
import pathlib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

from experiments import summarize
from experiments.common import ROOT, caches, plots
from experiments.common.console import markdown_table
from experiments.common.flags import Flags, repeatable, run_command
from experiments.common.output import as_text, figure_table
from experiments.common.rows import Row, read_rows
from experiments.common.statistics import Estimate
from experiments.tasks import RULER

PAPERS = ROOT / "experiments" / "papers"
DIRECTORY = ROOT / "docs" / "papers"


class Shown(NamedTuple):
    """The rows that a page shows: patterns of their columns."""

    policies: tuple[str, ...] = ("*",)
    question: str = "*"
    tokens: str = "*"

    def matches(self, row: Row) -> bool:
        """Returns whether the page shows a `row`."""
        policy = any(fnmatch(row.policy, pattern) for pattern in self.policies)
        return policy and fnmatch(row.question, self.question) and fnmatch(str(row.tokens), self.tokens)


# Pages with tables between markers.
PAGES = {
    ROOT / "README.md": Shown(
        ("exact", "auto", "clusterkv", "snapkv", "kvpress KVzip", "kvpress KVgrad"), "unseen", "1024"
    ),
    ROOT / "docs" / "results.md": Shown(),
}
PICTURE = ROOT / "docs" / "images" / "score_by_bytes.png"  # of the table with most settings
_MARKED = re.compile(r"(<!-- Written by experiments.render: -->\n).*?(<!-- End of the results. -->)", re.DOTALL)
_FIGURES = re.compile(r"(<!-- (\S+) of (\S+): -->\n).*?(<!-- End of the figures. -->)", re.DOTALL)
HOLDS, FAILS, UNCLEAR, NOT_RUN = "holds", "does not hold", "not significant", "not run"


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
    """Returns a page with tables of figures between markers, which name the metrics and the file in a `directory`."""

    def table(match: re.Match[str]) -> str:
        metrics = match[2].split(",")
        figures = [one for one in json.loads((directory / match[3]).read_text()) if one["metric"] in metrics]
        figures.sort(key=lambda one: metrics.index(one["metric"]))
        return f"{match[1]}\n{markdown_table(*figure_table(figures, 'setting'))}\n{match[4]}"

    return _FIGURES.sub(table, page)


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
        overview.append((result["name"], result["claim"], verdict))
        sections.append(_section(result, verdict, measured))
    head = (
        f"# {paper['title'].partition(':')[0]}\n\n[{paper['title']}]({paper['link']}). {paper['settings']}\n\n"
        "This page lists every table and figure of the paper, with the paper's numbers and measurements of kvjax on\n"
        "pretrained models. `python -m experiments.render` writes it.\n\n"
    )
    return head + markdown_table(("result", "claim", "verdict"), overview).replace("---:", "---") + "".join(sections)


def _section(result: Mapping[str, Any], verdict: str, measured: str) -> str:
    """Returns the section of a table or figure."""
    text = f"\n## {result['name']}\n\n{result['title']}.\n\n**Claim.** {result['claim']} **Verdict:** {verdict}.\n"
    if "rows" in result:
        text += f"\nThe paper's numbers:\n\n{markdown_table(result['columns'], result['rows'])}"
    if measured:
        text += f"\nMeasured:\n\n{measured}"
    if "command" in result:
        text += f"\nCommand:\n\n    {result['command']}\n"
    if "needs" in result:
        text += f"\nThe paper's own setting was not run; it needs {result['needs']}.\n"
    return text


def evaluate_claim(result: Mapping[str, Any], rows: Sequence[Row], figures_dir: pathlib.Path) -> tuple[str, str]:
    """Returns the verdict of a claim and the tables of its measurements.

    Args:
        result: the table or figure.
        rows: measured rows.
        figures_dir: directory of other experiments' figures.

    Returns:
        The verdict, and Markdown.
    """
    if "compare" in result:
        return _compare_rows(result["compare"], rows)
    for kind, evaluate in (("figures", _compare_figures), ("range", _check_range), ("ratio", _check_ratio)):
        if kind in result:
            path = figures_dir / result[kind]["file"]
            return evaluate(result[kind], json.loads(path.read_text())) if path.exists() else (NOT_RUN, "")
    return NOT_RUN, ""


def _compare_rows(compare: Mapping[str, Any], rows: Sequence[Row]) -> tuple[str, str]:
    """Compares settings by rows of `experiments.evaluate`, for each model and length."""
    settings = [compare["better"], *compare["than"]]
    selected = [
        row
        for row in rows
        if row.question == compare["question"]
        and row.setting in (caches.FULL, *settings)
        and any(fnmatch(row.task, pattern) for pattern in compare["tasks"])
    ]
    differences, text = [], ""
    for table in summarize.summarize(selected):
        # A small negative log-likelihood is better.
        sign = -1.0 if table.metric == "nll" else 1.0
        for other in compare["than"]:
            reference = [row for row in selected if row.setting == other and summarize.title_of(row) == table.title]
            better = [row for row in selected if row.setting == settings[0] and summarize.title_of(row) == table.title]
            tasks = [task for task in table.tasks if task not in table.left_out]
            if (found := summarize.paired_differences(better, reference, tasks)) is not None:
                differences.append(Estimate(*sorted(sign * x for x in found)) if sign < 0 else found)
        columns, lines = summarize.cells(table, caches.FULL)
        text += f"{table.title}\n\n{markdown_table(columns, lines)}\n"
    return _verdict(differences), text


def _verdict(differences: Iterable[Estimate]) -> str:
    """Returns the verdict of differences that a claim expects to be positive."""
    found = list(differences)
    if not found:
        return NOT_RUN
    if any(one.high < 0 for one in found):
        return FAILS
    return HOLDS if all(one.low > 0 for one in found) else UNCLEAR


def _compare_figures(compare: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Compares the intervals of two settings in every case that both have."""
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for one in figures:
        if one["metric"] == compare["metric"] and one["setting"] in (compare["better"], compare["than"]):
            case = str(one.get("case", f"{one.get('model')}, {one.get('context_tokens')} tokens"))
            cases.setdefault(case, {})[one["setting"]] = one
    pairs = [
        (case, found[compare["better"]], found[compare["than"]]) for case, found in cases.items() if len(found) == 2
    ]
    lines = [(case, as_text(better), as_text(other)) for case, better, other in pairs]
    sign = 1 if compare.get("larger") else -1
    differences = [
        # Disjoint intervals are a significant difference.
        Estimate(0.0, *sorted((sign * (b["low"] - o["high"]), sign * (b["high"] - o["low"]))))
        for _, b, o in pairs
    ]
    header = (compare["metric"], compare["better"], compare["than"])
    return _verdict(differences), markdown_table(header, lines) if lines else ""


def _check_range(check: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Checks that the intervals of figures overlap a range."""
    metric, setting = check["metric"], check.get("setting")
    found = [one for one in figures if one["metric"] == metric and one.get("setting") == setting]
    lines = [(one.get("line", one.get("case", "")), as_text(one)) for one in found]
    if not found:
        return NOT_RUN, ""
    bounds = [(one.get("low", one["value"]), one.get("high", one["value"])) for one in found]
    holds = all(low <= check["high"] and high >= check["low"] for low, high in bounds)
    return HOLDS if holds else FAILS, markdown_table(("", metric), lines)


def _check_ratio(check: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Checks that a measured ratio is below 1."""
    found = [one for one in figures if one["metric"] == "ratio" and one["walk"] == check["walk"]]
    lines = [(one["line"], as_text(one)) for one in found]
    verdict = _verdict(Estimate(1 - one["value"], 1 - one["high"], 1 - one["low"]) for one in found)
    return verdict, markdown_table(("", "ratio"), lines) if lines else ""


if __name__ == "__main__":
    run_command(main, Options)
