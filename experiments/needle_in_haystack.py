"""A needle in a haystack through compressed caches: accuracy by length and depth, a heatmap per policy and budget.

    python -m experiments.needle_in_haystack --model DIRECTORY --needle kamradt --context_tokens 4096 --budget 25%

What is hidden and asked is published (see `tasks.needle`); the text around it is local prose. `ruler`, the default,
hides a number that no model can know or guess. A cache is compressed before the question is seen unless
`--question=seen` says otherwise. A run that was stopped goes on where it was.
"""

import functools
import itertools
import pathlib
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags

from experiments.common import evaluating, plots, results, settings, sweeping
from experiments.common.tasks import needle as task
from experiments.common.tasks.problem import Problem, problems

NAME = "needle_in_haystack"
# Experiments add their own seed. Training's generators start from 0, so no problem is drawn by both.
EVALUATION_SEED = 3_000_000
PANELS_ABREAST = 5

sweeping.define_flags(documents=5, batch=10)
_NEEDLE = flags.DEFINE_multi_enum("needle", [task.RULER], task.names(), "What is hidden; repeatable.")
flags.DEFINE_multi_integer("context_tokens", [512, 1024, 1536, 2048], "Most tokens of prompt and answer; repeatable.")
flags.DEFINE_integer("depths", 10, "Depths of the needle, evenly from the text's beginning to its end.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    count, steps = settings.value("documents", quick=2), settings.value("depths", quick=3)
    # A whole percent, as published.
    depths = [float(depth) / 100 for depth in np.round(np.linspace(0, 100, steps))]
    sweep = sweeping.Sweep(NAME, count, prompts=count * steps)
    rows: list[results.Row] = []
    for tokens in settings.value("context_tokens", quick=[512, 1024]):
        make = functools.cache(functools.partial(make_tasks, sweep, tokens, depths))
        for prefill, question in sweep.kinds():
            unit = {"context_tokens": tokens, "depths": depths}
            answered = sweep.evaluate_all(_NEEDLE.value, make, prefill, question, **unit)
            found = [row for kind, of_kind in answered.items() for row in sweep.rows(of_kind, kind, tokens)]
            title = f"Needle in a haystack: up to {tokens} tokens, {steps} depths, {count} documents each"
            sweeping.show(f"{title}, prefill {prefill}, question {question}", found)
            rows += found
            for kind, of_kind in answered.items():
                for number, depth in enumerate(depths):
                    own = evaluating.part(of_kind, range(number * count, (number + 1) * count))
                    rows += sweep.rows(own, kind, tokens, depth=depth)
    sweep.write(rows, draw)


def make_tasks(sweep: sweeping.Sweep, tokens: int, depths: Sequence[float]) -> dict[str, evaluating.Task]:
    """Fresh problems of every needle at one length: so many at the first depth, then the next."""

    def make(kind: str, depth: float, rng: np.random.Generator) -> Problem:
        return task.generate(kind, rng, lambda text: len(sweep.tokenizer.encode(text)), tokens, depth)

    def seed(number: int) -> int:
        return EVALUATION_SEED + 1000 * sweep.seed + number

    tasks = {}
    for kind in _NEEDLE.value:
        made = [
            problem
            for number, depth in enumerate(depths)
            for problem in problems(seed(number), sweep.documents, functools.partial(make, kind, depth))
        ]
        tasks[kind] = evaluating.accuracy_task(
            kind, sweep.tokenizer, made, functools.partial(task.score, kind), made[0].answer_tokens
        )
    return tasks


def draw(path: pathlib.Path, rows: Sequence[results.Row]) -> None:
    """A heatmap of depth by length for every setting, kind of needle, prefill and question."""
    cells = [row for row in rows if row.metric == "accuracy" and "depth" in row.extra]
    kind = lambda row: (row.task, row.extra["prefill"], "seen" if row.question_seen else "unseen")  # noqa: E731
    panels = [
        (of_kind, setting, found)
        for of_kind in dict.fromkeys(map(kind, cells))
        for setting, found in results.by_setting([row for row in cells if kind(row) == of_kind]).items()
    ]
    lengths = sorted({row.context_tokens or 0 for row in cells})
    depths = sorted({row.extra["depth"] for row in cells})
    down = -(-len(panels) // PANELS_ABREAST)
    across = min(len(panels), PANELS_ABREAST)
    size = (1 + 3.2 * across, 1 + 2.6 * down)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for axis, panel in itertools.zip_longest(axes.flat, panels):
        if panel is None:
            axis.axis("off")
            continue
        (name, prefill, question), setting, found = panel
        grid = np.full((len(depths), len(lengths)), np.nan)
        for row in found:
            grid[depths.index(row.extra["depth"]), lengths.index(row.context_tokens or 0)] = row.value
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axis.set_title(f"{setting}\n{name}, {prefill} prefill, question {question}: {np.nanmean(grid):.2f}", fontsize=7)
        axis.set_xticks(range(len(lengths)), [str(tokens) for tokens in lengths], fontsize=7)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
    figure.supxlabel("tokens")
    figure.supylabel("depth")
    figure.colorbar(image, ax=axes, label="accuracy")
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
