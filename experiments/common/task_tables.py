"""Every policy on every task that needs no downloaded data: one table, and which policies keep most of exact's results
at equal bytes."""

import collections
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.ticker

from experiments.common import plots, results
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
# The papers' systems and the policies that are theirs.
SYSTEMS = {
    "SubGen": ("subgen", "clustergen"),
    "BalanceKV": ("balancekv", "balancekv_reference", "balancekv_paper"),
    "ClusterKV": ("clusterkv", "clusterkv_paper", "clusterkv_reference", "clusterkv_certified"),
    "Chelsea": ("chelsea",),
}
# Where exact attention itself scores less, shares of it say nothing.
LEAST_OF_EXACT = 0.1
BUDGET = "25%"


class Line(NamedTuple):
    """One policy at one budget."""

    setting: str
    label: str  # the policy and its settings
    policy: str
    budget: str | None
    recalls: bool
    fraction: float  # of exact's bytes, held or read
    scores: dict[str, Estimate]  # by task
    kept: dict[str, float]  # by task, as a share of exact's; of perplexity the inverse ratio


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
    for setting, own in by_setting.items():
        scores = _scores(own)
        perplexities = {task for task, swept, _ in own if swept.perplexity}
        kept = {
            task: 1 / score.value if task in perplexities else score.value / of_exact[task].value
            for task, score in scores.items()
            if task in perplexities or (task in of_exact and of_exact[task].value >= LEAST_OF_EXACT)
        }
        first = own[0][2]
        fraction = sum(row.budget_fraction or 0 for _, _, row in own) / len(own)
        recalls = bool(first.extra.get("recalls"))
        label = results.policy_label(first)
        made.append(Line(setting, label, first.policy, first.extra.get("budget"), recalls, fraction, scores, kept))
    return made


def _scores(own: Iterable[tuple[str, Swept, Row]]) -> dict[str, Estimate]:
    by_task: dict[str, list[Estimate]] = {}
    for task, _, row in own:
        bounds = (
            (row.value, row.value) if row.ci95_low is None or row.ci95_high is None else (row.ci95_low, row.ci95_high)
        )
        by_task.setdefault(task, []).append(Estimate(row.value, *bounds))
    return {task: results.mean_of(estimates) for task, estimates in by_task.items()}


def section(found: Mapping[str, Sequence[Row]]) -> str:
    """The table and what is best, in Markdown; a sentence where nothing was run."""
    every = lines(found)
    shared = shared_tasks(every)
    tasks = list(dict.fromkeys(task for line in every for task in line.scores))
    if not tasks:
        return "Not run yet: `python -m experiments.all --profile cpu --job line_retrieval --job ruler`.\n"
    parts = ["| policy | of exact's bytes | " + " | ".join(tasks) + " | kept on average | at least |"]
    parts.append("|---" * (len(tasks) + 4) + "|")
    for line in every:
        scores = [_score(line.scores.get(task)) for task in tasks]
        average = f"{mean(line, shared):.3f}" if comparable(line, shared) else "-"
        kept = [average, f"{min(line.kept.values()):.3f}" if line.kept else "-"]
        fraction = f"{line.fraction:.1%}" + (" read" if line.recalls else "")
        parts.append("| " + " | ".join([f"`{line.setting}`", fraction, *scores, *kept]) + " |")
    if left_out := [task for task in tasks if any(task in line.kept for line in every) and task not in shared]:
        parts.append(f"\nAverages leave out {', '.join(left_out)}, where few policies were run.")
    parts += ["", *best(every)]
    failing = [task for line in every if line.setting == "exact" for task in line.scores if task not in line.kept]
    if failing:
        parts.append(
            f"\nExact attention itself scores under {LEAST_OF_EXACT:g} on {', '.join(failing)}: shares leave these out."
        )
    return "\n".join(parts) + "\n"


def _score(score: Estimate | None) -> str:
    return "-" if score is None else f"{score.value:.2f} [{score.low:.2f}, {score.high:.2f}]"


def shared_tasks(every: Sequence[Line]) -> set[str]:
    """The tasks that more than half of the lines have shares of, which averages are taken over."""
    counts = collections.Counter(task for line in every for task in line.kept)
    return {task for task, count in counts.items() if 2 * count > len(every)}


def comparable(line: Line, tasks: Collection[str]) -> bool:
    """Whether a line has a share of exact's for every one of the tasks, of which there are some."""
    return bool(tasks) and all(task in line.kept for task in tasks)


def mean(line: Line, tasks: Collection[str]) -> float:
    """The mean share of exact's over tasks."""
    return sum(line.kept[task] for task in tasks) / len(tasks)


def best(every: Sequence[Line]) -> list[str]:
    """What keeps most of exact's results at a quarter of its bytes: by bytes held, by bytes read, of each system."""
    shared = shared_tasks(every)
    at_budget = [line for line in every if line.budget == BUDGET and comparable(line, shared)]
    groups = {
        "by bytes held": [line for line in at_budget if not line.recalls],
        "by bytes read": [line for line in at_budget if line.recalls],
        **{system: [line for line in at_budget if line.policy in names] for system, names in SYSTEMS.items()},
    }
    told = []
    for name, candidates in groups.items():
        if candidates:
            first = max(candidates, key=lambda line: mean(line, shared))
            task = min(first.kept, key=lambda task: first.kept[task])
            least, met = first.kept[task], "met" if first.kept[task] >= 0.99 else "not met"
            told.append(
                f"- Best {'of ' if name in SYSTEMS else ''}{name} at {BUDGET}: `{first.setting}` keeps "
                f"{mean(first, shared):.3f} of exact's results on average and {least:.3f} at least (`{task}`); .99 on "
                f"every task is {met}."
            )
    return told


def plot(found: Mapping[str, Sequence[Row]], path: pathlib.Path) -> None:
    """What policies keep of exact's results on average against their bytes, those held and those read side by side."""
    every = lines(found)
    shared = shared_tasks(every)
    figure, panels = plots.plt.subplots(1, 2, figsize=(14, 7), sharey=True)
    for panel, what, recalls in zip(panels, ("held", "read"), (False, True), strict=True):
        points: dict[str, list[tuple[float, float]]] = {}
        for line in every:
            if line.recalls == recalls and line.budget and comparable(line, shared):
                points.setdefault(line.label, []).append((line.fraction, mean(line, shared)))
        for number, (label, at) in enumerate(points.items()):
            marker, style = "osv^D"[number % 5], ("-", "--", ":")[number // 10 % 3]
            panel.plot(*zip(*sorted(at), strict=True), marker=marker, linestyle=style, label=label)
        panel.set_xscale("log")
        percent = matplotlib.ticker.PercentFormatter(1, decimals=0)
        panel.xaxis.set_major_formatter(percent)
        panel.xaxis.set_minor_formatter(percent)
        panel.set_xlabel(f"bytes {what}, of exact's")
        panel.grid(alpha=0.3)
        if points:
            panel.legend(fontsize=7)
    panels[0].set_ylabel(f"share of exact's results kept, mean over tasks: {len(shared)}")
    plots.save(figure, path)
