"""Policies and presses in one table, the best first, beside the best press."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.common import answers, results
from experiments.common.results import Estimate, Row
from kvjax.budget import Budget
from kvjax.registry import PolicyChoice

TO_BEST = "accuracy_to_best_press"
RATIO = "perplexity_ratio"

Answered = Mapping[str, Sequence[answers.Result]]  # by task


def pressed(press: str, budget: Budget) -> PolicyChoice:
    """A press as results name it."""
    return PolicyChoice(f"kvpress {press}", (), budget)


def is_press(setting: PolicyChoice) -> bool:
    return setting.name.startswith("kvpress ")


def at(result: answers.Result, budget: str) -> bool:
    """Whether it is of this budget, or of one that takes none."""
    return result.setting.budget is None or str(result.setting.budget) == budget


def best_press(answered: Answered, budget: str) -> PolicyChoice | None:
    """The press of the highest mean accuracy over all tasks, None without any."""
    means: dict[PolicyChoice, list[float]] = {}
    for of_task in answered.values():
        for one in of_task:
            if is_press(one.setting) and at(one, budget):
                means.setdefault(one.setting, []).append(float(np.mean(one.scores["accuracy"])))
    whole = {setting: np.mean(found) for setting, found in means.items() if len(found) == len(answered)}
    return max(whole, key=lambda setting: (whole[setting], setting.name), default=None)


class Line(NamedTuple):
    """A policy or press at one budget."""

    name: str
    held: float  # share of exact's bytes
    recalls: bool
    accuracy: list[float]  # by task
    to_best: Estimate | None  # the mean's difference to the best press
    perplexity: Estimate | None  # ratio to exact's

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracy))

    def cells(self) -> tuple[str, ...]:
        held = f"{self.held:.0%}" + (" read" if self.recalls else "")
        means = (*(f"{value:.2f}" for value in self.accuracy), f"{self.mean:.3f}")
        to_best = "-" if self.to_best is None else self.to_best.fixed("+")
        return self.name, held, *means, to_best, "-" if self.perplexity is None else self.perplexity.fixed()


class Table(NamedTuple):
    """What stands at one budget."""

    budget: str
    seen: bool
    documents: int
    best: str  # press
    tasks: list[str]
    lines: list[Line]

    @property
    def title(self) -> str:
        question = "seen" if self.seen else "unseen"
        return f"{self.budget}, question {question}, {self.documents} documents per task"

    @property
    def columns(self) -> tuple[str, ...]:
        names = (task.replace("niah_", "") for task in self.tasks)
        return "", "held", *names, "mean", f"to {self.best} [95%]", "perplexity [95%]"


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table per budget and kind of question, of those that answered all tasks."""
    found = []
    answers = [row for row in rows if row.metric == "accuracy"]
    for seen in dict.fromkeys(row.question_seen for row in answers):
        own = [row for row in answers if row.question_seen == seen]
        tasks = list(dict.fromkeys(str(row.task) for row in own))
        for budget in dict.fromkeys(row.extra.get("budget") for row in own if row.extra.get("budget")):
            of_budget = [row for row in rows if row.extra.get("budget") in (None, budget)]
            here = [row for row in of_budget if row.metric == "accuracy" and row.question_seen == seen]
            beside = [row for row in of_budget if row.metric in (TO_BEST, RATIO)]
            lines = []
            for name in dict.fromkeys(map(results.policy_label, here)):
                by_task = {row.task: row for row in here if results.policy_label(row) == name}
                if len(by_task) < len(tasks):
                    continue
                named = [row for row in beside if results.policy_label(row) == name]
                to_best = [row.estimate for row in named if row.metric == TO_BEST and row.question_seen == seen]
                ratio = [row.estimate for row in named if row.metric == RATIO]
                first = by_task[tasks[0]]
                lines.append(
                    Line(
                        name,
                        float(np.mean([row.budget_fraction for row in by_task.values()])),
                        first.extra["recalls"],
                        [by_task[task].value for task in tasks],
                        results.mean_of(to_best) if len(to_best) == len(tasks) else None,
                        ratio[0] if ratio else None,
                    )
                )
            presses = [row.extra["best_press"] for row in beside if row.metric == TO_BEST and row.question_seen == seen]
            best = presses[0] if presses else "the best press"
            lines.sort(key=lambda line: -line.mean)
            found.append(Table(str(budget), bool(seen), here[0].n or 0, best, tasks, lines))
    return found


def show(rows: Sequence[Row]) -> None:
    """The tables on the terminal."""
    for table in tables(rows):
        results.print_table(table.title, table.columns, [line.cells() for line in table.lines])
