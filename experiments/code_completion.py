"""The next line of code through compressed caches, in packages that no model here was trained on: the roles of LCC and
RepoBench-P.

    python -m experiments.code_completion --model DIRECTORY --context_tokens 4096 --budget 25%

Edit similarity as LongBench computes it, and exact matches. The question, which is not seen when the context is
compressed, is the last line before the one asked for (`file`), or the file's own lines (`repository`). A model is shown
the code alone; with `--template longbench` in the benchmark's words. A run that was stopped goes on where it was.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from experiments.common import evaluating, metrics, sweeping, tables
from experiments.common.options import Experiment, each, one_of
from experiments.common.results import Row
from experiments.common.tasks import code_completion as task
from experiments.common.tasks.problem import Problem, problems

NAME = "code_completion"
SIMILARITY, MATCH = "edit_similarity", "exact_match"


@dataclasses.dataclass(frozen=True)
class Options(sweeping.AtLengths):
    """Options of this experiment."""

    template: str = one_of("plain", task.TEMPLATES)  # what stands around the code
    task: tuple[str, ...] = each(*task.TASKS, choices=task.TASKS)  # tasks; repeatable

    QUICK: ClassVar[dict[str, Any]] = {**sweeping.AtLengths.QUICK, "task": ("file",)}


def run(options: Options) -> list[Row]:
    """The rows of every task, length and setting."""
    sweep = sweeping.Sweep(NAME, options)

    def make(tokens: int) -> dict[str, evaluating.Task]:
        # Held-out packages are no model's training text: seeds need no offset.
        return {name: make_task(sweep, name, options.template, tokens) for name in options.task}

    title = f"Code completion: {options.documents} lines"
    return sweep.over_lengths(title, options.task, make, (SIMILARITY, MATCH), template=options.template)


def make_task(sweep: sweeping.Sweep, name: str, template: str, tokens: int) -> evaluating.Task:
    """Lines of a task at one length."""
    generate = lambda rng: task.generate(name, template, rng, sweep.length, tokens)  # noqa: E731
    made = list(problems(sweep.seed, sweep.documents, generate))
    prompts = [evaluating.Prompt.of(sweep.tokenizer, problem) for problem in made]
    by_metric = {SIMILARITY: metrics.code_similarity, MATCH: task.exact_match}
    scores = {kind: functools.partial(scored, metric, made) for kind, metric in by_metric.items()}
    return evaluating.Task(name, prompts, scores, task.ANSWER_TOKENS)


def scored(metric: task.Metric, made: Sequence[Problem], number: int, answer: str) -> float:
    """A metric of the answer to a problem."""
    [line] = made[number].answers
    return metric(answer, line)


EXPERIMENT = Experiment(NAME, Options, run, functools.partial(tables.plot, metric=SIMILARITY))
if __name__ == "__main__":
    EXPERIMENT.main()
