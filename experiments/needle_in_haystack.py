"""A needle in a haystack through compressed caches: accuracy by length and depth, a heatmap per policy and budget.

    python -m experiments.needle_in_haystack --model DIRECTORY --needle kamradt --context_tokens 4096 --budget 25%

What is hidden and asked is published (see `tasks.needle`); the text around it is local prose. `ruler`, the default,
hides a number that no model can know or guess. A cache is compressed before the question is seen unless
`--question=seen` says otherwise. A run that was stopped goes on where it was.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from experiments.common import answers, evaluating, plots, results, sweeping
from experiments.common.options import Experiment, each
from experiments.common.results import Row
from experiments.common.tasks import needle as task
from experiments.common.tasks.problem import Problem, problems

NAME = "needle_in_haystack"
# Experiments add their own seed. Training's generators start from 0, so no problem is drawn by both.
EVALUATION_SEED = 3_000_000


@dataclasses.dataclass(frozen=True)
class Options(sweeping.AtLengths):
    """Options of this experiment."""

    documents: int = 5  # per depth and length
    context_tokens: tuple[int, ...] = each(512, 1024, 1536, 2048)  # most tokens of prompt and answer; repeatable
    needle: tuple[str, ...] = each(task.RULER, choices=task.names())  # what is hidden; repeatable
    depths: int = 10  # depths of the needle, evenly from the text's beginning to its end

    QUICK: ClassVar[dict[str, Any]] = {**sweeping.QUICK, "documents": 2, "depths": 3, "context_tokens": (512, 1024)}


def run(options: Options) -> list[Row]:
    """The rows of every needle and length: over all depths, and by depth."""
    count = options.documents
    # A whole percent, as published.
    depths = [float(depth) / 100 for depth in np.round(np.linspace(0, 100, options.depths))]
    sweep = sweeping.Sweep(NAME, options, prompts=count * options.depths)

    def by_depth(answered: Mapping[str, Sequence[answers.Result]], tokens: int) -> list[Row]:
        rows: list[Row] = []
        for kind, found in answered.items():
            for number, depth in enumerate(depths):
                own = answers.part(found, range(number * count, (number + 1) * count))
                rows += sweep.rows(own, kind, tokens, depth=depth)
        return rows

    make = functools.partial(make_tasks, sweep, options.needle, depths)
    title = f"Needle in a haystack: {options.depths} depths, {count} documents each"
    return sweep.over_lengths(title, options.needle, make, more=by_depth, depths=depths)


def make_tasks(
    sweep: sweeping.Sweep, kinds: Sequence[str], depths: Sequence[float], tokens: int
) -> dict[str, evaluating.Task]:
    """Fresh problems of every needle at one length: so many at the first depth, then the next."""
    first = EVALUATION_SEED + 1000 * sweep.seed
    tasks = {}
    for kind in kinds:
        made = [
            problem
            for number, depth in enumerate(depths)
            for problem in problems(
                first + number,
                sweep.documents,
                functools.partial(make_problem, kind, sweep, tokens, depth),
            )
        ]
        score = functools.partial(task.score, kind)
        tasks[kind] = evaluating.accuracy_task(kind, sweep.tokenizer, made, score, made[0].answer_tokens)
    return tasks


def make_problem(kind: str, sweep: sweeping.Sweep, tokens: int, depth: float, rng: np.random.Generator) -> Problem:
    return task.generate(kind, rng, sweep.length, tokens, depth)


def draw(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """A heatmap of depth by length for every setting, kind of needle, prefill and question."""
    cells = [row for row in rows if row.metric == "accuracy" and "depth" in row.extra]
    kind = lambda row: (row.task, row.extra["prefill"], "seen" if row.question_seen else "unseen")  # noqa: E731
    kinds = list(dict.fromkeys(map(kind, cells)))
    maps = [
        (of_kind, setting, found)
        for of_kind in kinds
        for setting, found in results.by_setting(row for row in cells if kind(row) == of_kind).items()
    ]
    lengths = sorted({row.context_tokens or 0 for row in cells})
    depths = sorted({row.extra["depth"] for row in cells})
    figure, axes = plots.panels(len(maps), size=(2.6, 2.7))
    for axis, (of_kind, setting, found) in zip(axes, maps, strict=True):
        grid = np.full((len(depths), len(lengths)), np.nan)
        for row in found:
            grid[depths.index(row.extra["depth"]), lengths.index(row.context_tokens or 0)] = row.value
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        told = [f"{setting}: {np.nanmean(grid):.2f}".replace(":shares", "\n:shares")]
        told += ["{}, {} prefill, question {}".format(*of_kind)] if len(kinds) > 1 else []
        axis.set_title("\n".join(told), fontsize=8)
        axis.set_xticks(range(len(lengths)), [f"{tokens:,}" for tokens in lengths], fontsize=7)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
        axis.label_outer()
    figure.supxlabel("tokens of the text", fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    figure.set_layout_engine("constrained")
    figure.colorbar(image, ax=axes, label="right answers")
    plots.save(figure, path)


EXPERIMENT = Experiment(NAME, Options, run, draw)
if __name__ == "__main__":
    EXPERIMENT.main()
