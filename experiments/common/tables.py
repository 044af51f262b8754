"""What sweeps of questions print and draw."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.common import plots, results
from experiments.common.results import Row
from kvjax.budget import format_bytes


def show(title: str, rows: Sequence[Row], metric: str = "accuracy") -> None:
    """The table of one length and kind: a line per setting with its bytes; a column per task, their mean and its
    difference to exact last, and of a single task what a step takes."""
    single = len({row.task for row in rows}) == 1
    shown: list[Row] = []
    for of_setting in results.by_setting(rows).values():
        kinds = {kind: [row for row in of_setting if row.metric == kind] for kind in (metric, f"{metric}_difference")}
        shown += [] if single else [dataclasses.replace(row, metric=str(row.task)) for row in kinds[metric]]
        shown += [mean_of(own) for own in kinds.values() if own]
        shown += [row for row in of_setting if single and row.metric == "ms_per_token"]

    def line(row: Row) -> str:
        host = f" + {format_bytes(row.host_bytes)} in the host" if row.host_bytes else ""
        read = " read" if row.extra["recalls"] else ""
        held = f"{format_bytes(row.device_bytes or 0)}{host}, {row.budget_fraction:.1%}{read} of exact's"
        return f"{results.setting_label(row)} ({held})" if single else results.setting_label(row)

    results.print_rows(title, shown, line)


def mean_of(rows: Sequence[Row]) -> Row:
    """The mean over tasks of one setting's rows, and of the bytes that they stand at."""
    mean = results.mean_of([row.estimate for row in rows])
    of: dict[str, Any] = {"value": mean.value, "ci95_low": mean.low, "ci95_high": mean.high}
    of["budget_fraction"] = float(np.mean([row.budget_fraction for row in rows]))
    return dataclasses.replace(rows[0], **of)


def plot(path: pathlib.Path, rows: Sequence[Row], metric: str = "accuracy") -> None:
    """The mean over tasks against cache bytes, a panel per length, kind of prefill and of question."""

    def panel(row: Row) -> str:
        question = "seen" if row.question_seen else "unseen"
        return f"{row.context_tokens} tokens, {row.extra['prefill']} prefill, question {question}"

    scored = sorted((row for row in rows if row.metric == metric), key=lambda row: row.context_tokens or 0)
    means = [
        mean_of(of_setting)
        for title in dict.fromkeys(map(panel, scored))
        for of_setting in results.by_setting(row for row in scored if panel(row) == title).values()
    ]
    plots.against_bytes(
        path,
        means,
        panel=panel,
        ylabel=metric.replace("_", " "),
        ylim=(-0.03, 1.03),
    )
