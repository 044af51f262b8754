"""Tables of rows of `experiments.evaluate`: means by task, and differences to the full cache.

    python -m experiments.summarize --rows build/rows.jsonl
    python -m experiments.summarize --rows build/*.jsonl --markdown build/table.md --reference snapkv

Intervals are 95% bootstrap intervals over documents. Differences are paired by document and question. A task whose
score with the full cache is too low says little about caches: tasks below `--floor`, and multiple-choice tasks less
than .2 above chance, are listed but not part of the mean.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.common import caches
from experiments.common.console import markdown_table, print_table
from experiments.common.flags import Flags, repeatable, run_command
from experiments.common.rows import Row, group_by, read_rows
from experiments.common.statistics import Estimate, bootstrap

ABOVE_CHANCE = 0.2


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of a summary."""

    rows: tuple[str, ...] = repeatable("build/rows.jsonl")  # Files of rows; repeatable.
    reference: str = caches.FULL  # Setting that others are compared with, such as "exact" or "snapkv @ 25%".
    floor: float = 0.6  # Smallest score of the full cache with which a task counts in the mean.
    markdown: pathlib.Path | None = None  # File for the tables in Markdown.


class Line(NamedTuple):
    """The results of one setting.

    Attributes:
        setting: policy, budget and quantization.
        held: mean resident share of a full bfloat16 cache.
        tail: mean share of question and answer in addition; None if the other shares include them.
        read: mean share that a decode step reads.
        scores: mean score of each task.
        mean: mean over the tasks that count.
        difference: paired difference to the reference, over the same tasks.
        documents: number of documents over all tasks.
        errors: number of questions without a score.
    """

    setting: str
    held: float
    tail: float | None
    read: float
    scores: dict[str, Estimate]
    mean: Estimate | None
    difference: Estimate | None
    documents: int
    errors: int


class Table(NamedTuple):
    """The results of one model, length and kind of question."""

    title: str
    metric: str
    tasks: list[str]
    left_out: dict[str, float]
    lines: list[Line]


def by_document(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """Returns the mean score of every document, by task and document.

    Generated documents have the seed in their names; a published one under several seeds is one document.
    """
    scored = [row for row in rows if row.score is not None]
    documents = group_by(lambda row: (row.task, row.document), scored)
    return {key: float(np.mean([row.score for row in of_document])) for key, of_document in documents.items()}


def paired_differences(rows: Sequence[Row], reference: Sequence[Row], tasks: Sequence[str]) -> Estimate | None:
    """Returns the mean difference over tasks, paired by document and question; None without common questions."""
    scores = {(row.task, row.seed, row.document, row.item): row.score for row in reference if row.score is not None}
    pairs = [
        dataclasses.replace(row, score=row.score - scores[key])
        for row in rows
        if row.score is not None and (key := (row.task, row.seed, row.document, row.item)) in scores
    ]
    groups = _groups(pairs, tasks)
    return bootstrap(list(groups.values())) if groups and set(groups) == set(tasks) else None


def _groups(rows: Iterable[Row], tasks: Sequence[str]) -> dict[str, Float[np.ndarray, "n"]]:
    """Returns the documents' mean scores of each task."""
    of_tasks = group_by(lambda item: item[0][0], by_document(rows).items())
    return {task: np.asarray([value for _, value in of_tasks[task]]) for task in of_tasks if task in tasks}


def title_of(row: Row) -> str:
    """Returns the title of a row's table: model, length, kind of question, dtype and kind of budget."""
    budgets = ", budgets of the text" if row.is_of_text else ""
    return f"{row.model}, {row.tokens} tokens, question {row.question}, {row.dtype}{budgets}"


def place_failures(rows: Sequence[Row]) -> list[Row]:
    """Returns rows whose failures are in the table of their setting, or of the other settings if it has no scores.

    A policy fails before its cache has a size, so that its row does not say whether its budget is of the text.
    """
    kinds: dict[Any, bool] = {}
    for row in rows:
        for key in (_labels(row), (_labels(row), row.setting)) if row.score is not None else ():
            kinds[key] = kinds.get(key, False) or row.is_of_text

    def is_of_text(row: Row) -> bool:
        return kinds.get((_labels(row), row.setting), kinds.get(_labels(row), row.is_of_text))

    return [
        dataclasses.replace(row, tail_fraction=0.0 if is_of_text(row) else None) if row.score is None else row
        for row in rows
    ]


def _labels(row: Row) -> tuple[Any, ...]:
    """Returns the properties that the rows of a table share, except for the kind of budget."""
    return row.model, row.tokens, row.question, row.dtype, row.metric


def summarize(rows: Sequence[Row], reference: str = caches.FULL, floor: float = 0.6) -> list[Table]:
    """Returns a table for every model, length, kind of question, dtype and metric.

    Args:
        rows: the rows.
        reference: setting that others are compared with.
        floor: smallest score of the full cache with which a task counts.

    Returns:
        The tables.
    """
    parts = sorted(group_by(lambda row: (title_of(row), row.metric), place_failures(rows)).items())
    return [_table(title, metric, part, reference, floor) for (title, metric), part in parts]


def _table(title: str, metric: str, rows: Sequence[Row], reference: str, floor: float) -> Table:
    """Returns the table of rows with one title and metric."""
    by_setting = group_by(lambda row: row.setting, rows)
    tasks = list(dict.fromkeys(row.task for row in rows))
    full = {task: float(np.mean(values)) for task, values in _groups(by_setting.get(caches.FULL, []), tasks).items()}
    chance = {row.task: row.chance for row in rows}
    left_out = {}
    if metric == "score":
        minimum = {task: chance[task] + ABOVE_CHANCE if chance[task] else floor for task in tasks}
        left_out = {task: score for task, score in full.items() if score < minimum[task]}
    counted = [task for task in tasks if task not in left_out]
    lines = []
    for setting, of_setting in by_setting.items():
        groups = _groups(of_setting, tasks)
        is_complete = bool(counted) and all(task in groups for task in counted)
        scored = [row for row in of_setting if row.score is not None]
        lines.append(
            Line(
                setting,
                _mean([row.cache_fraction for row in scored]),
                _mean([row.tail_fraction or 0.0 for row in scored]) if scored and scored[0].is_of_text else None,
                _mean([row.read_fraction for row in scored]),
                {task: bootstrap([values]) for task, values in groups.items()},
                bootstrap([groups[task] for task in counted]) if is_complete else None,
                None
                if setting == reference
                else paired_differences(of_setting, by_setting.get(reference, []), counted),
                sum(len(groups[task]) for task in counted or tasks if task in groups),
                sum(row.score is None for row in of_setting),
            )
        )
    sign = 1 if metric == "nll" else -1
    lines.sort(key=lambda line: sign * line.mean.value if line.mean else float("inf"))
    return Table(title, metric, tasks, left_out, lines)


def _mean(values: Sequence[float]) -> float:
    """Returns the mean of values; NaN without values."""
    return float(np.mean(values)) if values else float("nan")


def cells(table: Table, reference: str) -> tuple[list[str], list[list[str]]]:
    """Returns the columns and lines of a table."""
    mean = ["mean"] if len(table.tasks) > 1 else []
    tail = ["question and answer"] if any(line.tail is not None for line in table.lines) else []
    columns = ["", "held", *tail, "read", *table.tasks, *mean, f"minus {reference}", "documents", "errors"]
    lines = [
        [
            line.setting,
            f"{line.held:.1%}",
            *("-" if line.tail is None else f"+{line.tail:.1%}" for _ in tail),
            f"{line.read:.1%}",
            *(line.scores[task].fixed() if task in line.scores else "-" for task in table.tasks),
            *(line.mean.fixed() if line.mean else "-" for _ in mean),
            line.difference.fixed("+") if line.difference else "-",
            str(line.documents),
            str(line.errors),
        ]
        for line in table.lines
    ]
    return columns, lines


def main(options: Options) -> None:
    """Prints the tables and writes them as Markdown."""
    text = ""
    for table in summarize(read_rows(map(pathlib.Path, options.rows)), options.reference, options.floor):
        columns, lines = cells(table, options.reference)
        note = ", ".join(f"{task} ({score:.2f})" for task, score in table.left_out.items())
        unit = "nats per token, smaller is better" if table.metric == "nll" else "score"
        title = f"{table.title}: {unit}" + (f"; not in the mean: {note}" if note else "")
        print_table(title, columns, lines)
        text += f"**{title}**\n\n{markdown_table(columns, lines)}\n"
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_command(main, Options)
