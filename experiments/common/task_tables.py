"""Every policy on every task that needs no downloaded data: what each keeps of exact's results, told and drawn."""

import collections
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.ticker

from experiments.common import comparisons, plots, results
from experiments.common.results import Estimate, Row


class Swept(NamedTuple):
    """Rows of a job that score policies on its tasks."""

    job: str
    metric: str
    where: Mapping[str, Any]
    perplexity: bool = False  # a ratio to exact's, where less is better; otherwise a score from 0 to 1

    def takes(self, row: Row) -> bool:
        flat = row.flat()
        return row.metric == self.metric and all(flat.get(name) == value for name, value in self.where.items())


_UNSEEN = {"question_seen": False, "prefill": "exact"}
SWEPT = (
    Swept("line_retrieval", "accuracy", _UNSEEN),
    Swept("ruler", "accuracy", _UNSEEN),
    Swept("needle_in_haystack", "accuracy", _UNSEEN | {"depth": None}),
    Swept("code_completion", "edit_similarity", _UNSEEN),
    Swept("perplexity", "perplexity_ratio", {"form": "per_position"}, perplexity=True),
)
# Where exact attention itself scores less, shares of it say nothing.
LEAST_OF_EXACT = 0.1
BUDGET = "25%"


class Line(NamedTuple):
    """One policy at one budget."""

    label: str  # the policy and its settings
    policy: str
    budget: str | None
    recalls: bool
    fraction: float  # of exact's bytes, held or read
    scores: dict[str, Estimate]  # by task
    kept: dict[str, Estimate]  # by task, as a share of exact's score; of perplexity the inverse ratio

    def average(self, tasks: Sequence[str]) -> Estimate | None:
        """The mean share of exact's over tasks; None without a share of every one of them."""
        if not tasks or any(task not in self.kept for task in tasks):
            return None
        return results.mean_of([self.kept[task] for task in tasks])

    def of_job(self, job: str) -> Estimate | None:
        """The mean score over a job's tasks."""
        own = [score for task, score in self.scores.items() if job_of(task) == job]
        return results.mean_of(own) if own else None


def job_of(task: str) -> str:
    """The job of a task: "ruler" of "ruler: niah_single_1"."""
    return task.partition(":")[0]


def lines(found: Mapping[str, Sequence[Row]]) -> list[Line]:
    """Every setting's scores by task, the mean over lengths.

    Args:
        found: rows by job.
    """
    by_setting: dict[str, list[tuple[str, Swept, Row]]] = {}
    for swept in SWEPT:
        for row in found.get(swept.job, ()):
            if swept.takes(row):
                task = swept.job if row.task in (None, swept.job) else f"{swept.job}: {row.task}"
                [setting] = results.by_setting([row])
                by_setting.setdefault(setting, []).append((task, swept, row))
    of_exact = _scores(by_setting.get("exact", ()))
    made = []
    for own in by_setting.values():
        scores = _scores(own)
        kept = {}
        for task, score in scores.items():
            if task in {task for task, swept, _ in own if swept.perplexity}:
                kept[task] = Estimate(1 / score.value, 1 / score.high, 1 / score.low)
            elif task in of_exact and of_exact[task].value >= LEAST_OF_EXACT:
                kept[task] = Estimate(*(bound / of_exact[task].value for bound in score))
        first = own[0][2]
        fraction = sum(row.budget_fraction or 0 for _, _, row in own) / len(own)
        recalls, budget = bool(first.extra.get("recalls")), first.extra.get("budget")
        made.append(Line(results.policy_label(first), first.policy, budget, recalls, fraction, scores, kept))
    return made


def _scores(own: Iterable[tuple[str, Swept, Row]]) -> dict[str, Estimate]:
    by_task: dict[str, list[Estimate]] = {}
    for task, _, row in own:
        bounds = (
            (row.value, row.value) if row.ci95_low is None or row.ci95_high is None else (row.ci95_low, row.ci95_high)
        )
        by_task.setdefault(task, []).append(Estimate(row.value, *bounds))
    return {task: results.mean_of(estimates) for task, estimates in by_task.items()}


def shared_tasks(every: Sequence[Line]) -> list[str]:
    """The tasks that more than half of the lines have shares of, which averages are taken over."""
    counts = collections.Counter(task for line in every for task in line.kept)
    return [task for task, count in counts.items() if 2 * count > len(every)]


def section(found: Mapping[str, Sequence[Row]]) -> str:
    """What is kept at a quarter of exact's bytes, and at every budget, in Markdown; empty where nothing was run."""
    every = lines(found)
    shared = shared_tasks(every)
    tasks = list(dict.fromkeys(task for line in every for task in line.scores))
    if not tasks:
        return ""

    def place(line: Line) -> tuple[bool, float]:
        average = line.average(shared)
        return line.recalls, -2.0 if line.budget is None else 1.0 if average is None else -average.value

    at_budget = [line for line in every if line.budget in (None, BUDGET) and len(line.scores) > 1]
    at_budget.sort(key=place)
    jobs = list(dict.fromkeys(map(job_of, tasks)))
    head = ["", "bytes", *(job.replace("_", " ") for job in jobs), "kept", "at least"]
    told = [f"## At {BUDGET} of exact's bytes"]
    told.append(comparisons.markdown(head, ([_named(line), *_cells(line, jobs, shared)] for line in at_budget)))
    told.append(
        f"`kept` is the share of exact's results, the mean over tasks{_left_out(every, shared)}, `at least` the least "
        f"of them; of perplexity it is the inverse ratio.{_failing(every)}"
    )
    whole = [line.label for line in at_budget if line.budget and line.kept and _least(line) >= 0.99]
    told.append(f"99% on every task: {', '.join(f'`{label}`' for label in whole) or 'none'}.")
    told.append("![share of exact's results that is kept against bytes](../images/kept.png)")
    told.append("![accuracy against bytes, task by task](../images/accuracy.png)")
    for job in jobs:
        of_job = [task for task in tasks if job_of(task) == job]
        if len(of_job) > 1:
            names = [task.partition(": ")[2].removeprefix("niah_") for task in of_job]
            own = [line for line in at_budget if any(task in line.scores for task in of_job)]
            cells = ([_named(line), *(written(line.scores.get(task)) for task in of_job)] for line in own)
            told += [f"## {job.replace('_', ' ')} at {BUDGET}, task by task", comparisons.markdown(["", *names], cells)]
    told += ["## Kept at every budget", _by_budget(every, lambda line: line.average(shared))]
    alone = [line for line in every if all(len(other.scores) == 1 for other in every if other.label == line.label)]
    if alone:
        told.append("Settings that were run on one task alone, by their scores there:")
        told.append(_by_budget(alone, lambda line: next(iter(line.scores.values()))))
    return "\n\n".join(told)


def _named(line: Line) -> str:
    return f"`{line.label}`"


def written(score: Estimate | None) -> str:
    if score is None:
        return "-"
    return comparisons.short(f"{score.value:.2f}" if score.low == score.high else score.fixed())


def _least(line: Line) -> float:
    return min(kept.value for kept in line.kept.values())


def _cells(line: Line, jobs: Sequence[str], shared: Sequence[str]) -> list[str]:
    average = line.average(shared)
    fraction = f"{line.fraction:.1%}" + (" read" if line.recalls else "")
    least = "-" if average is None else comparisons.short(f"{_least(line):.2f}")
    return [fraction, *(written(line.of_job(job)) for job in jobs), written(average), least]


def _by_budget(every: Sequence[Line], score: Callable[[Line], Estimate | None]) -> str:
    """A figure of every policy, budget by budget."""
    found: dict[str, dict[str, str]] = {}
    for line in every:
        told = score(line)
        if line.budget and told is not None:
            found.setdefault(_named(line), {})[line.budget] = comparisons.short(f"{told.value:.2f}")
    budgets = sorted({budget for own in found.values() for budget in own}, key=lambda text: float(text.rstrip("%")))
    return comparisons.markdown(
        ["", *budgets], ([name, *(own.get(budget, "-") for budget in budgets)] for name, own in found.items())
    )


def _left_out(every: Sequence[Line], shared: Sequence[str]) -> str:
    left_out = dict.fromkeys(task for line in every for task in line.kept if task not in shared)
    return f" but {', '.join(left_out)}, where few policies were run" if left_out else ""


def _failing(every: Sequence[Line]) -> str:
    failing = [task for line in every if line.budget is None for task in line.scores if task not in line.kept]
    told = f" Exact attention itself scores under {LEAST_OF_EXACT:g} on {', '.join(failing)}: shares leave these out."
    return told if failing else ""


def of_each_policy(every: Sequence[Line], tasks: Sequence[str]) -> list[list[Line]]:
    """Of each policy the setting that keeps most of exact's results at a quarter of its bytes, at all budgets."""
    by_label: dict[str, list[Line]] = {}
    for line in every:
        if line.budget and line.average(tasks):
            by_label.setdefault(line.label, []).append(line)

    def kept(own: Sequence[Line]) -> float:
        averages = (line.average(tasks) for line in own if line.budget == BUDGET)
        return max((average.value for average in averages if average), default=0.0)

    best: dict[str, list[Line]] = {}
    for own in sorted(by_label.values(), key=kept):
        best[own[0].policy] = own
    return sorted(best.values(), key=kept, reverse=True)


def draw(found: Mapping[str, Sequence[Row]], directory: pathlib.Path) -> list[pathlib.Path]:
    """Pictures of `of_each_policy`: what is kept on average against bytes, and every kind of task on its own. What is
    recalled is dashed, by the bytes that are read.

    Returns:
        Where they are.
    """
    every = lines(found)
    shared = shared_tasks(every)
    drawn = of_each_policy(every, shared)
    jobs = list(dict.fromkeys(map(job_of, shared)))

    figure, axis = plots.plt.subplots(figsize=(8, 4.8), layout="constrained")
    axis.axhline(1, color=plots.COLOURS["exact"], linewidth=1, label="exact")
    _curves(axis, drawn, lambda line: line.average(shared))
    axis.set_ylabel("share of exact's results that is kept")
    figure.legend(loc="outside right upper", fontsize=9)
    plots.save(figure, directory / "kept.png", dpi=100)

    height = 3.4 * math.ceil(len(jobs) / 2)
    figure, axes = plots.plt.subplots(-(-len(jobs) // 2), 2, figsize=(10, height), layout="constrained", squeeze=False)
    for axis, job in zip(axes.flat, jobs, strict=False):
        for line in every:
            if line.budget is None and (score := line.of_job(job)):
                axis.axhline(score.value, color=plots.COLOURS["exact"], linewidth=1, label="exact")
        _curves(axis, drawn, lambda line, job=job: line.of_job(job))  # type: ignore[misc]
        axis.set_title(job.replace("_", " ") + (", ratio to exact's (less is better)" if job == "perplexity" else ""))
    for axis in axes.flat[len(jobs) :]:
        axis.set_axis_off()
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    plots.save(figure, directory / "accuracy.png", dpi=80)
    return [directory / "kept.png", directory / "accuracy.png"]


def _curves(axis: plots.plt.Axes, drawn: Sequence[Sequence[Line]], score: Callable[[Line], Estimate | None]) -> None:
    """A curve per policy, each a little further right than the last, so that intervals stand side by side."""
    for number, own in enumerate(drawn):
        aside = 1 + 0.007 * (number - len(drawn) / 2)
        points = [(aside * line.fraction, told) for line in own if (told := score(line))]
        style = {"marker": "s", "linestyle": "--"} if own[0].recalls else {"marker": "o", "linestyle": "-"}
        plots.line_with_interval(axis, points, label=own[0].policy, markersize=4, **style)
    axis.set_xscale("log")
    axis.set_xticks([0.05, 0.1, 0.25, 0.5, 1])
    axis.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
    axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axis.set_xlabel("bytes held (dashed: read), of exact's")
    axis.grid(alpha=0.3)
