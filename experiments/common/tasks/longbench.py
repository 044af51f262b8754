"""LongBench and LongBench-E from files that a user has: prompts, truncation and scoring as published.

The files are the benchmark's own (https://huggingface.co/datasets/THUDM/LongBench, `data/*.jsonl`): one JSON object per
line with `input`, `context`, `answers`, `length` and `all_classes`. LongBench-E's are called `NAME_e.jsonl`.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence

from experiments.common import metrics
from experiments.common.evaluating import Prompt
from experiments.common.tasks.problem import Problem
from kvjax_models.formats.tokenizer import Tokenizer

DATA = pathlib.Path(__file__).parent / "data" / "longbench.json"
SOURCE = "https://huggingface.co/datasets/THUDM/LongBench"
# LongBench-E's classes of length, in words.
LENGTHS = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, None)}

# The benchmark's categories of tasks.
CATEGORIES = {
    "single-document QA": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "multi-document QA": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "summarization": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "few-shot learning": ("trec", "triviaqa", "samsum", "lsht"),
    "synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    "code completion": ("lcc", "repobench-p"),
}

METRICS = {
    "qa_f1": metrics.qa_f1,
    "qa_f1_zh": metrics.qa_f1_zh,
    "rouge": metrics.rouge_l,
    "rouge_zh": metrics.rouge_l_zh,
    "retrieval": metrics.retrieval,
    "retrieval_zh": metrics.retrieval_zh,
    "count": metrics.count,
    "code_sim": metrics.code_similarity,
}


@dataclasses.dataclass(frozen=True)
class Task:
    """How a data set is asked and scored."""

    name: str
    prompt: str  # with {context} and, for most, {input}
    answer_tokens: int
    metric: str
    first_line: bool  # only the first line of an answer is scored
    chat: bool  # a chat model's template is put around the prompt
    by_length: bool  # part of LongBench-E


@dataclasses.dataclass(frozen=True)
class Example:
    """One line of a data set's file."""

    task: Task
    problem: Problem
    length: int  # words, as the file tells
    classes: tuple[str, ...]

    @property
    def length_class(self) -> str:
        """LongBench-E's class of the length."""
        return next(name for name, (_, end) in LENGTHS.items() if end is None or self.length < end)

    def score(self, prediction: str) -> float:
        """The best score against any of the right answers, from 0 to 1."""
        if self.task.first_line:
            prediction = prediction.lstrip("\n").split("\n")[0]
        if self.task.metric == "classification":
            scores = [metrics.classification(prediction, answer, self.classes) for answer in self.problem.answers]
        else:
            scores = [METRICS[self.task.metric](prediction, answer) for answer in self.problem.answers]
        return max(scores)


@functools.cache
def tasks() -> Mapping[str, Task]:
    """All tasks by name."""
    given = json.loads(DATA.read_text(encoding="utf-8"))["tasks"]
    return {name: Task(name, **settings) for name, settings in given.items()}


def read(path: pathlib.Path) -> list[Example]:
    """The examples of a file called after its task (`qasper.jsonl`, or `qasper_e.jsonl` of LongBench-E).

    Raises:
        ValueError: for a file that is not there, or of no known task, or a line that lacks a field, with its number.
    """
    name = path.stem.removesuffix("_e")
    if name not in tasks():
        raise ValueError(f"{path.name} is not called after a task; known: {', '.join(tasks())}")
    if not path.is_file():
        raise ValueError(f"{path} is not there: it is part of data.zip of {SOURCE}")
    # Not splitlines(): texts hold other ends of lines, which JSON need not escape.
    lines = path.read_text(encoding="utf-8").split("\n")
    return [_example(tasks()[name], line, f"{path.name}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]


def _example(task: Task, line: str, where: str) -> Example:
    given = json.loads(line)
    if missing := {"input", "context", "answers", "length", "all_classes"} - given.keys():
        raise ValueError(f"{where} lacks {', '.join(sorted(missing))}")
    if not given["answers"]:
        raise ValueError(f"{where} has no answer")
    # What stands behind the context is the question, which need not be known when the context is compressed.
    before, behind = task.prompt.split("{context}")
    problem = Problem(
        context=before + given["context"],
        question=behind.format(input=given["input"]),
        answers=tuple(given["answers"]),
        answer_tokens=task.answer_tokens,
    )
    return Example(task, problem, int(given["length"]), tuple(given["all_classes"] or ()))


def truncated(context: Sequence[int], question: Sequence[int], longest: int) -> list[int]:
    """The context's tokens, cut in the middle so that the prompt has `longest` tokens: as published, the first and the
    last half of the whole prompt stay.

    Raises:
        ValueError: where the question alone is longer than the last half.
    """
    if len(context) + len(question) <= longest:
        return list(context)
    half = longest // 2
    if len(question) > half:
        raise ValueError(f"a question of {len(question)} tokens does not fit in the last half of {longest}")
    behind = half - len(question)
    return [*context[:half], *(context[-behind:] if behind else ())]


def prompt_of(tokenizer: Tokenizer, example: Example, longest: int, *, chat: bool) -> Prompt:
    """An example's prompt, cut in the middle and, for the tasks that take it, put as a turn of the chat that the model
    has a template for."""
    whole = Prompt.of(tokenizer, example.problem)
    context = truncated(whole.context, whole.question, longest)
    if not (chat and example.task.chat and tokenizer.chat_template):
        return Prompt(context, whole.question)
    question = example.problem.question
    text = example.problem.context if context == whole.context else tokenizer.decode(context)
    turn = tokenizer.render_chat([{"role": "user", "content": text + question}])
    place = turn.rindex(question.strip())  # templates strip what they are given
    return Prompt(tokenizer.encode(turn[:place], add_bos=False), tokenizer.encode(turn[place:], add_bos=False))
