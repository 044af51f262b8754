"""RULER's thirteen tasks through compressed caches: needles, variables, common and frequent words, questions.

    python -m experiments.ruler --model DIRECTORY --policy exact --policy clusterkv --budget 25% --context_tokens 4096

As published; essays are replaced by local prose (see `tasks.ruler`), and the questions of qa_1 and qa_2 are asked where
`--squad` and `--hotpotqa` name the data sets' files (see `tasks.ruler_questions`). A cache is compressed before the
question is seen unless `--question=seen` says otherwise. A run that was stopped goes on where it was: finished tasks
stand in OUTPUT_DIR/ruler.jsonl.
"""

import dataclasses
import pathlib
from typing import Any, ClassVar

from experiments.common import evaluating, sweeping, tables
from experiments.common.named_tasks import make_task
from experiments.common.options import Experiment, each
from experiments.common.results import Row
from experiments.common.tasks import ruler as task
from experiments.common.tasks import ruler_questions

NAME = "ruler"


@dataclasses.dataclass(frozen=True)
class Options(sweeping.AtLengths):
    """Options of this experiment."""

    # tasks; repeatable; by default all whose files are given
    task: tuple[str, ...] = each(choices=(*task.TASKS, *ruler_questions.READERS))
    squad: str | None = None  # the file that qa_1 asks: dev-v2.0.json of SQuAD
    hotpotqa: str | None = None  # the file that qa_2 asks: hotpot_dev_distractor_v1.json

    QUICK: ClassVar[dict[str, Any]] = {**sweeping.AtLengths.QUICK, "task": ("niah_single_1", "niah_single_2")}


def run(options: Options) -> list[Row]:
    """The rows of every task, length and setting.

    Raises:
        ValueError: for a task of questions whose file is not given, or not right.
    """
    given = {"qa_1": ("squad", options.squad), "qa_2": ("hotpotqa", options.hotpotqa)}
    files = {name: pathlib.Path(path) for name, (_, path) in given.items() if path is not None}
    tasks = options.task or (*task.TASKS, *files)
    for name in tasks:  # before hours of work
        if name in given and name not in files:
            raise ValueError(f"task {name} asks the questions of a file: --{given[name][0]}=FILE is needed")
        if name in files:
            ruler_questions.read(name, files[name])
    sweep = sweeping.Sweep(NAME, options)

    def make(tokens: int) -> dict[str, evaluating.Task]:
        count, seeds = options.documents, [options.seed]
        return {name: make_task(name, sweep.tokenizer, tokens, seeds, count, files.get(name)) for name in tasks}

    return sweep.over_lengths(f"RULER: {options.documents} problems", tasks, make)


EXPERIMENT = Experiment(NAME, Options, run, tables.plot)
if __name__ == "__main__":
    EXPERIMENT.main()
