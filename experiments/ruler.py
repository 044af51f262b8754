"""RULER's synthetic tasks through compressed caches: needles, variables, common and frequent words.

    python -m experiments.ruler --model DIRECTORY --policy exact --policy clusterkv --budget 25% --context_tokens 4096

Tasks that need no downloaded data, as published; essays are replaced by local prose (see `tasks.ruler`). A cache is
compressed before the question is seen unless `--question=seen` says otherwise. A run that was stopped goes on where it
was: finished tasks stand in OUTPUT_DIR/ruler.jsonl.
"""

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags

from experiments.common import asking, plots, results, settings
from experiments.common.resuming import Finished
from experiments.common.tasks import ruler as task
from experiments.common.tasks.problem import Problem, problems
from models.llama import Llama
from models.tokenizer import Tokenizer

NAME = "ruler"
POLICIES = (
    "exact",
    "uniform",
    "streaming_llm",
    "clustergen:variant=paper,recent=64",
    "subgen",
    "balancekv",
    "chelsea",
    "clusterkv",
    "quest",
    "h2o",
    "snapkv",
    "pyramidkv",
)
# Experiments add their own seed. Training's generators start from 0, so no problem is drawn by both.
EVALUATION_SEED = 2_000_000

settings.define_common(policies=POLICIES, budgets=("50%", "25%"))
_TASK = flags.DEFINE_multi_enum("task", list(task.TASKS), list(task.TASKS), "Tasks; repeatable.")
_CONTEXT = flags.DEFINE_multi_integer("context_tokens", [2048], "Most tokens of prompt and answer; repeatable.")
_DOCUMENTS = flags.DEFINE_integer("documents", 50, "Problems per task and length.")
_BATCH = flags.DEFINE_integer("batch", 10, "Problems decoded together.")
_QUESTION = flags.DEFINE_multi_enum(
    "question", ["unseen"], ["unseen", "seen"], "Whether the question is part of what is compressed; repeatable."
)
_PREFILL = flags.DEFINE_multi_enum(
    "prefill", ["exact"], ["exact", "streaming"], "Whether prompts are read exactly or through the cache; repeatable."
)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    model, tokenizer = settings.load_model(flags.FLAGS.model)
    chosen = settings.settings(flags.FLAGS.policy, flags.FLAGS.budget)
    count = 4 if flags.FLAGS.quick else _DOCUMENTS.value
    directory = pathlib.Path(flags.FLAGS.output_dir)
    finished = Finished(directory / f"{NAME}.jsonl")
    rows: list[results.Row] = []
    for tokens, prefill, question in itertools.product(_CONTEXT.value, _PREFILL.value, _QUESTION.value):
        found = []
        for name in _TASK.value:
            unit: dict[str, Any] = {
                "model": flags.FLAGS.model,
                "seed": flags.FLAGS.seed,
                "documents": count,
                "batch": min(_BATCH.value, count),
                "settings": list(map(str, chosen)),
                "task": name,
                "context_tokens": tokens,
                "prefill": prefill,
                "question": question,
            }
            found += finished.rows(unit, lambda unit=unit: run(model, tokenizer, chosen, unit))  # type: ignore[misc]
        show(found, f"RULER: {count} problems of up to {tokens} tokens, prefill {prefill}, question {question}")
        rows += found
    results.write_rows(directory / f"{NAME}.json", rows)
    plot(directory / f"{NAME}.png", rows)
    print(f"\nRows: {directory / f'{NAME}.json'}   plot: {directory / f'{NAME}.png'}")


def run(
    model: Llama, tokenizer: Tokenizer, chosen: Sequence[settings.Setting], unit: dict[str, Any]
) -> list[results.Row]:
    """One task at one length: rows of every setting."""

    def make(rng: np.random.Generator) -> Problem:
        return task.generate(unit["task"], rng, lambda text: len(tokenizer.encode(text)), unit["context_tokens"])

    made = list(problems(EVALUATION_SEED + unit["seed"], unit["documents"], make))
    outcomes = asking.ask(
        model,
        tokenizer,
        made,
        chosen,
        lambda problem, answer: task.score(answer, problem.answers),
        task=f"{unit['task']}, {unit['context_tokens']} tokens",
        streaming=unit["prefill"] == "streaming",
        question_seen=unit["question"] == "seen",
        batch=unit["batch"],
        answer_tokens=made[0].answer_tokens,
        seed=unit["seed"],
    )
    same: dict[str, Any] = {"experiment": NAME, **{name: unit[name] for name in ("task", "context_tokens", "seed")}}
    return [row for one in outcomes for row in asking.rows(one, model, **same)]


def show(rows: Sequence[results.Row], title: str) -> None:
    """Accuracies, a line per setting and a column per task, their mean last."""
    accuracy = [row for row in rows if row.metric == "accuracy"]
    tasks = list(dict.fromkeys(row.task for row in accuracy))
    lines = []
    for setting, of_setting in by_setting(accuracy).items():
        value = {row.task: row.value for row in of_setting}
        fraction = np.mean([row.budget_fraction for row in of_setting])
        mean = np.mean(list(value.values()))
        lines.append((setting, f"{fraction:.1%}", *(f"{value[name]:.2f}" for name in tasks), f"{mean:.2f}"))
    results.print_table(
        title, ("policy", "of exact's", *(str(name).replace("niah_", "") for name in tasks), "mean"), lines
    )


def by_setting(rows: Sequence[results.Row]) -> dict[str, list[results.Row]]:
    """Rows by policy, its options and its budget."""
    found: dict[str, list[results.Row]] = {}
    for row in rows:
        options = f":{row.variant}" if row.variant else ""
        budget = f" @ {row.extra['budget']}" if row.extra["budget"] else ""
        found.setdefault(f"{row.policy}{options}{budget}", []).append(row)
    return found


def plot(path: pathlib.Path, rows: Sequence[results.Row]) -> None:
    """The mean over tasks against cache bytes, a panel per length, kind of prefill and of question."""
    accuracy = [row for row in rows if row.metric == "accuracy"]
    panel = lambda row: (row.context_tokens, row.extra["prefill"], row.question_seen)  # noqa: E731
    panels = sorted(set(map(panel, accuracy)))
    figure, axes = plt.subplots(1, len(panels), figsize=(1 + 5.5 * len(panels), 4.2), squeeze=False, sharey=True)
    for axis, which in zip(axes[0], panels, strict=True):
        policies: dict[str, list[tuple[float, float]]] = {}
        for of_setting in by_setting([row for row in accuracy if panel(row) == which]).values():
            first = of_setting[0]
            mean = lambda name, found=of_setting: float(np.mean([getattr(row, name) for row in found]))  # noqa: E731
            label = first.policy + (f":{first.variant}" if first.variant else "")
            policies.setdefault(label, []).append((100 * mean("budget_fraction"), mean("value")))
        for label, points in policies.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        tokens, prefill, seen = which
        axis.set_title(f"{tokens} tokens, {prefill} prefill, question {'seen' if seen else 'unseen'}", fontsize=10)
        axis.set_xlabel("cache bytes (read ones for policies that recall), % of exact's")
        axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("mean accuracy")
    axes[0][-1].legend(fontsize=8, loc="lower right")
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
