"""LongBench and LongBench-E through compressed caches, from the benchmark's own files.

    python -m experiments.longbench --model DIRECTORY --data DIRECTORY --policy exact --policy chelsea --budget 20%

Files are those of https://huggingface.co/datasets/THUDM/LongBench (data.zip), one per task; with `--e` LongBench-E's,
which are scored by classes of length, too. Prompts, truncation in the middle, answer lengths and metrics are published
(see `tasks.longbench`). A text is read into caches made for it or a little more (up to a fifth), so that a budget in
percent is a share of each text (of 2,048 tokens at least), as in the papers. A compressed text does not see the
question unless `--question=seen` says otherwise. A run that was stopped goes on where it was: what settings did with
finished tasks stands in OUTPUT_DIR/longbench.jsonl.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar

from experiments.common import answers, evaluating, results, sweeping, tables
from experiments.common.options import Experiment, each
from experiments.common.results import Row
from experiments.common.tasks import longbench as task

NAME = "longbench"
SCORE, MEAN = "score", "mean_score"
# Texts that are shorter count as this long: a share of a few hundred tokens holds no policy's window.
SHORTEST = 2048
# Where no length is given: as published for models of 4k, 8k, 16k and 32k tokens.
LEFT_FOR_ANSWERS = 500


@dataclasses.dataclass(frozen=True)
class Benchmark(sweeping.Questions):
    """Options of a benchmark that has its own files."""

    documents: int = 0  # per task; 0 for all
    batch: int = 1
    budget: tuple[str, ...] = each("20%")
    data: str | None = None  # the benchmark's files: a directory, or one file
    max_prompt_tokens: int | None = (
        None  # tokens of a prompt before it is cut; by default 500 less than the model reads
    )
    chat: bool = True  # use the model's chat template, if it has one, for the tasks that take one

    QUICK: ClassVar[dict[str, Any]] = {**sweeping.QUICK, "documents": 4}

    def longest(self, sweep: sweeping.Sweep) -> int:
        """Tokens of a prompt before it is cut."""
        return self.max_prompt_tokens or sweep.model.config.max_length - LEFT_FOR_ANSWERS


@dataclasses.dataclass(frozen=True)
class Options(Benchmark):
    """Options of this experiment."""

    e: bool = False  # LongBench-E in place of LongBench
    task: tuple[str, ...] = each(choices=task.tasks())  # tasks; repeatable; all by default


def run(options: Options) -> list[Row]:
    """The rows of every task, category and setting.

    Raises:
        ValueError: where --data is not given.
        FileNotFoundError: for a task whose file is not there.
    """
    if options.data is None:
        raise ValueError("--data=DIRECTORY is needed: the directory of the benchmark's files")
    names = options.task or [name for name, one in task.tasks().items() if one.by_length or not options.e]
    paths = {name: pathlib.Path(options.data) / f"{name}{'_e' if options.e else ''}.jsonl" for name in names}
    read = functools.cache(lambda name: task.read(paths[name])[: options.documents or None])
    for name in names:  # before hours of work, all files
        read(name)
    sweep = sweeping.Sweep(NAME, options)
    longest = options.longest(sweep)
    rows: list[Row] = []
    for prefill, question in sweep.kinds():
        found = [
            row for name in names for row in parse_batch_size(sweep, options, read(name), longest, prefill, question)
        ]
        found += means(found)
        title = f"LongBench{'-E' if options.e else ''}: prompts of up to {longest} tokens"
        shown = [row for row in found if row.metric == MEAN or (row.metric, row.task) == (f"{MEAN}_difference", "all")]
        what = lambda row: str(row.task) if row.metric == MEAN else "to exact's"  # noqa: E731
        title += f", prefill {prefill}, question {question}"
        results.print_rows(title, shown, results.setting_label, what)
        rows += found
    return rows


def parse_batch_size(
    sweep: sweeping.Sweep,
    options: Options,
    examples: Sequence[task.Example],
    longest: int,
    prefill: str,
    question: str,
) -> list[Row]:
    """The rows of one task: over all of its examples, and for LongBench-E by their length."""
    of_task = examples[0].task
    answered = answers_to(sweep, examples, longest, prefill, question, chat=options.chat, e=options.e)
    extra = {"scored_by": of_task.metric, "benchmark": "LongBench-E" if options.e else "LongBench"}
    rows = sweep.rows(answered, of_task.name, longest, **extra)
    for name in task.LENGTHS if options.e else ():
        own = [number for number, example in enumerate(examples) if example.length_class == name]
        if own:
            rows += sweep.rows(answers.part(answered, own), of_task.name, longest, **extra, length_class=name)
    return rows


def answers_to(
    sweep: sweeping.Sweep,
    examples: Sequence[task.Example],
    longest: int,
    prefill: str,
    question: str,
    *,
    chat: bool,
    **unit: Any,
) -> list[answers.Result]:
    """What every setting answers to the examples of one task, in caches made for each length.

    Args:
        unit: what else decides answers, by which a run that was stopped finds its own.
    """
    of_task = examples[0].task
    prompts = [task.prompt_of(sweep.tokenizer, example, longest, chat=chat) for example in examples]
    scores = {SCORE: lambda number, answer: examples[number].score(answer)}
    made = {of_task.name: evaluating.Task(of_task.name, prompts, scores, of_task.answer_tokens)}
    lengths = [len(prompt.context) + (len(prompt.question) if question == "seen" else 0) for prompt in prompts]
    sizes = sorted(set(map(made_for, lengths)))
    unit |= {"max_prompt_tokens": longest, "chat": chat}
    return sweep.evaluate([of_task.name], lambda: made, prefill, question, sizes=sizes, **unit)[of_task.name]


def made_for(tokens: int) -> int:
    """The size of caches that read so many tokens: four to an octave, so that few programs are compiled."""
    return math.ceil(2 ** (math.ceil(4 * math.log2(max(tokens, SHORTEST))) / 4))


def means(rows: Sequence[Row]) -> list[Row]:
    """Each setting's mean over the tasks of each category, and over all tasks; none where it was left out of one."""
    whole = [row for row in rows if "length_class" not in row.extra]
    asked = {row.task for row in whole}
    found = []
    for of_setting in results.by_setting(whole).values():
        for category, names in {**task.CATEGORIES, "all": tuple(task.tasks())}.items():
            for metric, mean in ((SCORE, MEAN), (f"{SCORE}_difference", f"{MEAN}_difference")):
                own = [row for row in of_setting if row.metric == metric and row.task in names]
                if own and {row.task for row in own} == asked.intersection(names):
                    estimate = results.mean_of([row.estimate for row in own])
                    kept = ("budget", "prefill", "recalls", "benchmark")
                    found.append(
                        dataclasses.replace(
                            own[0],
                            task=category,
                            metric=mean,
                            value=estimate.value,
                            ci95_low=estimate.low,
                            ci95_high=estimate.high,
                            budget_fraction=sum(row.budget_fraction or 0 for row in own) / len(own),
                            n=sum(row.n or 0 for row in own),
                            extra={name: own[0].extra[name] for name in kept},
                        )
                    )
    return found


def draw(path: pathlib.Path, rows: Sequence[Row]) -> None:
    tables.plot(path, [row for row in rows if "length_class" not in row.extra], SCORE)


EXPERIMENT = Experiment(NAME, Options, run, draw)
if __name__ == "__main__":
    EXPERIMENT.main()
