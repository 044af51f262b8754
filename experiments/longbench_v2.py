"""LongBench v2 through compressed caches, from the benchmark's own file: questions of four choices about long texts.

    python -m experiments.longbench_v2 --model DIRECTORY --data data.json --policy exact --policy clusterkv --budget 20%

The file is data.json of https://huggingface.co/datasets/THUDM/LongBench-v2. Prompts, truncation in the middle, answer
length and scoring are published (see `tasks.longbench_v2`); accuracy is told for all questions, by difficulty and by
the text's length. How texts are read and compressed, and how a run goes on, is as for `longbench`.
"""

import pathlib
from collections.abc import Sequence

from experiments import longbench
from experiments.common import answers, results, sweeping, tables
from experiments.common.options import Experiment
from experiments.common.results import Row
from experiments.common.tasks import longbench_v2 as task

NAME = task.TASK.name
Options = longbench.Benchmark


def run(options: Options) -> list[Row]:
    """The rows of every setting: over all questions, and by their classes.

    Raises:
        ValueError: where --data is not given, or is not the benchmark's file.
    """
    if options.data is None:
        raise ValueError("--data=FILE is needed: data.json of the benchmark")
    examples = task.read(pathlib.Path(options.data))[: options.documents or None]
    sweep = sweeping.Sweep(NAME, options)
    longest = options.longest(sweep)
    rows: list[Row] = []
    for prefill, question in sweep.kinds():
        answered = longbench.answers_to(sweep, examples, longest, prefill, question, chat=options.chat)
        found = sweep.rows(answered, NAME, longest)
        for number, (kind, names) in enumerate(task.CLASSES.items()):
            for name in names:
                if own := [place for place, example in enumerate(examples) if example.classes[number] == name]:
                    found += sweep.rows(answers.part(answered, own), NAME, longest, **{f"{kind}_class": name})
        title = f"LongBench v2: prompts of up to {longest} tokens, prefill {prefill}, question {question}"
        shown = [row for row in found if row.metric == longbench.SCORE]
        results.print_rows(title, shown, results.setting_label, _part)
        rows += found
    return rows


def _part(row: Row) -> str:
    return next((str(row.extra[key]) for kind in task.CLASSES if (key := f"{kind}_class") in row.extra), "all")


def draw(path: pathlib.Path, rows: Sequence[Row]) -> None:
    tables.plot(path, [row for row in rows if _part(row) == "all"], longbench.SCORE)


EXPERIMENT = Experiment(NAME, Options, run, draw)
if __name__ == "__main__":
    EXPERIMENT.main()
