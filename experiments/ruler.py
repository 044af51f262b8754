"""RULER's synthetic tasks through compressed caches: needles, variables, common and frequent words.

    python -m experiments.ruler --model DIRECTORY --policy exact --policy clusterkv --budget 25% --context_tokens 4096

Tasks that need no downloaded data, as published; essays are replaced by local prose (see `tasks.ruler`). A cache is
compressed before the question is seen unless `--question=seen` says otherwise. A run that was stopped goes on where it
was: finished tasks stand in OUTPUT_DIR/ruler.jsonl.
"""

import dataclasses
from typing import Any, ClassVar

from experiments.common import evaluating, sweeping, tables
from experiments.common.named_tasks import make_task
from experiments.common.options import Experiment, each
from experiments.common.results import Row
from experiments.common.tasks import ruler as task

NAME = "ruler"


@dataclasses.dataclass(frozen=True)
class Options(sweeping.AtLengths):
    """Options of this experiment."""

    task: tuple[str, ...] = each(*task.TASKS, choices=task.TASKS)  # tasks; repeatable

    QUICK: ClassVar[dict[str, Any]] = {**sweeping.AtLengths.QUICK, "task": ("niah_single_1", "niah_single_2")}


def run(options: Options) -> list[Row]:
    """The rows of every task, length and setting."""
    sweep = sweeping.Sweep(NAME, options)

    def make(tokens: int) -> dict[str, evaluating.Task]:
        count, seeds = options.documents, [options.seed]
        return {name: make_task(name, sweep.tokenizer, tokens, seeds, count) for name in options.task}

    return sweep.over_lengths(f"RULER: {options.documents} problems", options.task, make)


EXPERIMENT = Experiment(NAME, Options, run, tables.plot)
if __name__ == "__main__":
    EXPERIMENT.main()
