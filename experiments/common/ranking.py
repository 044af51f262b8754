"""Policies and presses in one table, the best first, beside the best press."""

import numpy as np

from experiments.common import evaluating, results, settings
from kvjax.budget import Budget
from kvjax.registry import PolicyChoice


def pressed(press: str, budget: Budget) -> PolicyChoice:
    """A press as results name it."""
    return PolicyChoice(f"kvpress {press}", (), budget)


def is_press(setting: PolicyChoice) -> bool:
    return setting.name.startswith("kvpress ")


def at(result: evaluating.Result, budget: str) -> bool:
    """Whether it is of this budget, or of one that takes none."""
    return result.setting.budget is None or str(result.setting.budget) == budget


def mean_score(answered: dict[str, list[evaluating.Result]], setting: PolicyChoice) -> float | None:
    """The mean accuracy over tasks, None where not all were answered."""
    own = [
        float(np.mean(one.scores["accuracy"])) for found in answered.values() for one in found if one.setting == setting
    ]
    return float(np.mean(own)) if len(own) == len(answered) else None


def best_press(answered: dict[str, list[evaluating.Result]], budget: str) -> PolicyChoice | None:
    """The press of the highest mean over tasks, None without any."""
    found = {
        one.setting for of_task in answered.values() for one in of_task if is_press(one.setting) and at(one, budget)
    }
    means = {setting: mean for setting in found if (mean := mean_score(answered, setting)) is not None}
    return max(means, key=lambda setting: (means[setting], setting.name), default=None)


def show(title: str, answered: dict[str, list[evaluating.Result]], budget: str) -> None:
    """A line per policy and press, the best first."""
    best = best_press(answered, budget)
    by_task = {task: {one.setting: one for one in found if at(one, budget)} for task, found in answered.items()}
    whole = [setting for setting in next(iter(by_task.values())) if all(setting in found for found in by_task.values())]
    score = {setting: [by_task[task][setting].scores["accuracy"] for task in by_task] for setting in whole}
    lines = []
    for setting in sorted(whole, key=lambda setting: -float(np.mean([np.mean(own) for own in score[setting]]))):
        uses = [use for found in by_task.values() for use in found[setting].uses.values()]
        to_best = "-"
        if best is not None and setting != best:
            pairs = zip(score[setting], score[best], strict=True)
            to_best = results.mean_of([results.paired_difference(*pair) for pair in pairs]).fixed("+")
        means = [float(np.mean(own)) for own in score[setting]]
        recalled = " read" if uses[0].recalls else ""
        lines.append(
            (
                str(settings.plain(setting)),
                f"{np.mean([use.fraction for use in uses]):.1%}{recalled}",
                *(f"{mean:.2f}" for mean in means),
                f"{np.mean(means):.3f}",
                to_best,
            )
        )
    names = [task.replace("niah_", "") for task in by_task]
    columns = ("", "held", *names, "mean", f"to {best.name if best else 'the best press'} [95%]")
    results.print_table(title, columns, lines)
