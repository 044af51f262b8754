"""What sweeps of questions print and draw."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.common import plots, results
from experiments.common.results import Estimate, Row


def show(title: str, rows: Sequence[Row], metric: str = "accuracy") -> None:
    """The table of one length and kind: of a single task all there is to say, of several a column each."""
    if not rows:
        return
    if len({row.task for row in rows}) == 1:
        show_details(title, rows, metric)
    else:
        show_tasks(title, rows, metric)


def show_details(title: str, rows: Sequence[Row], metric: str) -> None:
    """A line per setting: bytes, score, difference to exact, time."""
    columns = ("policy", "held", "read per token", "of exact's", f"{metric} [95%]", "to exact's [95%]", "ms per step")
    lines = []
    for setting, of_setting in results.by_setting(rows).items():
        by_metric = {row.metric: row for row in of_setting}
        row = by_metric[metric]
        difference, time = by_metric.get(f"{metric}_difference"), by_metric.get("ms_per_token")
        lines.append(
            (
                setting,
                results.readable_bytes(row.device_bytes or 0)
                + (f" + {results.readable_bytes(row.host_bytes)} in the host" if row.host_bytes else ""),
                results.readable_bytes(row.read_bytes_per_token or 0),
                f"{row.budget_fraction:.1%}" + (" read" if row.extra["recalls"] else ""),
                row.estimate.fixed(),
                "-" if difference is None else difference.estimate.fixed("+"),
                "-" if time is None else f"{time.value:.2f}",
            )
        )
    results.print_table(title, columns, lines)


def show_tasks(title: str, rows: Sequence[Row], metric: str) -> None:
    """A line per setting and a column per task, their mean and its difference to exact last."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    lines = []
    for setting, of_setting in results.by_setting(rows).items():
        value = {row.task: row.value for row in of_setting if row.metric == metric}
        fraction = np.mean([row.budget_fraction for row in of_setting])
        mean, difference = mean_row(of_setting, metric), mean_row(of_setting, f"{metric}_difference")
        lines.append(
            (
                setting,
                f"{fraction:.1%}",
                *(f"{value[name]:.2f}" for name in tasks),
                "-" if mean is None else f"{mean.value:.2f}",
                "-" if difference is None else difference.fixed("+"),
            )
        )
    names = (str(name).replace("niah_", "") for name in tasks)
    results.print_table(title, ("policy", "of exact's", *names, "mean", "to exact's [95%]"), lines)


def mean_row(rows: Sequence[Row], metric: str) -> Estimate | None:
    """The mean over tasks of a metric, None where there is none."""
    estimates = [row.estimate for row in rows if row.metric == metric]
    return results.mean_of(estimates) if estimates else None


def plot(path: pathlib.Path, rows: Sequence[Row], metric: str = "accuracy") -> None:
    """The mean over tasks against cache bytes, a panel per length, kind of prefill and of question."""

    def panel(row: Row) -> str:
        question = "seen" if row.question_seen else "unseen"
        return f"{row.context_tokens} tokens, {row.extra['prefill']} prefill, question {question}"

    means: list[Row] = []
    scored = sorted((row for row in rows if row.metric == metric), key=lambda row: row.context_tokens or 0)
    for title in dict.fromkeys(map(panel, scored)):
        for of_setting in results.by_setting(row for row in scored if panel(row) == title).values():
            fraction = float(np.mean([row.budget_fraction for row in of_setting]))
            mean = results.mean_of([row.estimate for row in of_setting])
            of: dict[str, Any] = {
                "value": mean.value,
                "ci95_low": mean.low,
                "ci95_high": mean.high,
                "budget_fraction": fraction,
            }
            means.append(dataclasses.replace(of_setting[0], **of))
    plots.by_rows(
        path,
        means,
        panel=panel,
        x=lambda row: 100 * (row.budget_fraction or 0),
        label=results.policy_label,
        xlabel="cache bytes (read ones for policies that recall), % of exact's",
        ylabel=metric.replace("_", " "),
        ylim=(-0.03, 1.03),
    )
