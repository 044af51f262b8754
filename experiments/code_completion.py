"""The next line of code through compressed caches, in packages that no model here was trained on: the roles of LCC and
RepoBench-P.

    python -m experiments.code_completion --model DIRECTORY --context_tokens 4096 --budget 25%

Edit similarity as LongBench computes it, and exact matches. The question, which is not seen when the context is
compressed, is the last line before the one asked for (`file`), or the file's own lines (`repository`). A model is shown
the code alone; with `--template longbench` in the benchmark's words. A run that was stopped goes on where it was.
"""

import functools
import pathlib
from collections.abc import Sequence

import numpy as np
from absl import app, flags

from experiments.common import evaluating, metrics, results, settings, sweeping
from experiments.common.tasks import code_completion as task
from experiments.common.tasks.problem import Problem, problems

NAME = "code_completion"
SIMILARITY, MATCH = "edit_similarity", "exact_match"

sweeping.define_flags(documents=50, batch=10)
flags.DEFINE_multi_enum("task", list(task.TASKS), list(task.TASKS), "Tasks; repeatable.")
flags.DEFINE_multi_integer("context_tokens", [2048], "Most tokens of prompt and answer; repeatable.")
_TEMPLATE = flags.DEFINE_enum("template", "plain", task.TEMPLATES, "What stands around the code.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    count = settings.value("documents", quick=4)
    names = settings.value("task", quick=["file"])
    sweep = sweeping.Sweep(NAME, count)
    rows: list[results.Row] = []
    for tokens in settings.value("context_tokens", quick=[1024]):
        make = functools.cache(functools.partial(make_tasks, sweep, names, tokens))
        for prefill, question in sweep.kinds():
            unit = {"context_tokens": tokens, "template": _TEMPLATE.value}
            answered = sweep.evaluate_all(names, make, prefill, question, **unit)
            found = [row for name in names for row in sweep.rows(answered[name], name, tokens)]
            title = f"Code completion: {count} lines, up to {tokens} tokens, prefill {prefill}, question {question}"
            for metric in (SIMILARITY, MATCH):
                sweeping.show(f"{title}: {metric.replace('_', ' ')}", found, metric)
            rows += found
    sweep.write(rows, draw)


def make_tasks(sweep: sweeping.Sweep, names: Sequence[str], tokens: int) -> dict[str, evaluating.Task]:
    """Lines of every task at one length. Held-out packages are no model's training text: seeds need no offset."""

    def make(name: str, rng: np.random.Generator) -> Problem:
        return task.generate(name, _TEMPLATE.value, rng, lambda text: len(sweep.tokenizer.encode(text)), tokens)

    tasks = {}
    for name in names:
        made = list(problems(sweep.seed, sweep.documents, functools.partial(make, name)))
        tasks[name] = evaluating.Task(
            name,
            [evaluating.Prompt.of(sweep.tokenizer, problem) for problem in made],
            {
                SIMILARITY: functools.partial(scored, metrics.code_similarity, made),
                MATCH: functools.partial(scored, task.exact_match, made),
            },
            task.ANSWER_TOKENS,
        )
    return tasks


def scored(metric: task.Metric, made: Sequence[Problem], number: int, answer: str) -> float:
    [line] = made[number].answers
    return metric(answer, line)


def draw(path: pathlib.Path, rows: Sequence[results.Row]) -> None:
    sweeping.plot(path, rows, SIMILARITY)


if __name__ == "__main__":
    app.run(main)
