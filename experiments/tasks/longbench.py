"""LongBench and LongBench-E from a user's files: prompts, truncation and scores as published.

The files are the benchmark's (https://huggingface.co/datasets/THUDM/LongBench, data.zip), in DATA_DIR/longbench: one
JSON object per line with `input`, `context`, `answers`, `length` and `all_classes`.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence

from experiments.tasks import data_files, metrics
from experiments.tasks.task import Document, Question, Request, Task

DATA = pathlib.Path(__file__).parent / "data" / "longbench.json"
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
# The data sets that the papers report.
PRESETS = {
    "clusterkv": (
        "2wikimqa", "triviaqa", "hotpotqa", "multifieldqa_en", "musique", "narrativeqa", "qasper", "gov_report",
    ),
    "chelsea": (
        "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "dureader", "multi_news", "trec",
        "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc",
    ),
    "balancekv": (
        "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum",
        "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DataSet:
    """Prompt and score of a data set.

    Attributes:
        prompt: template with {context} and, for most data sets, {input}.
        answer_tokens: maximum number of tokens of an answer.
        metric: name of the score.
        first_line: whether only the first line of an answer is scored.
        chat: whether chat models get the prompt in their template.
        by_length: whether LongBench-E has it.
    """

    prompt: str
    answer_tokens: int
    metric: str
    first_line: bool
    chat: bool
    by_length: bool


@functools.cache
def data_sets() -> Mapping[str, DataSet]:
    """Returns the settings of all data sets."""
    values = json.loads(DATA.read_text(encoding="utf-8"))["tasks"]
    return {name: DataSet(**settings) for name, settings in values.items()}


def expand(task: str) -> list[str]:
    """Returns the tasks of a preset ("longbench:chelsea"), or the task itself."""
    family, _, argument = task.partition(":")
    if not family.startswith("longbench") or argument in data_sets():
        return [task]
    if argument != "all" and argument not in PRESETS:
        known = ", ".join(("all", *PRESETS, *data_sets()))
        raise ValueError(f"task {task!r} is unknown; {family} has {known}")
    names = data_sets() if argument == "all" else PRESETS[argument]
    return [f"{family}:{name}" for name in names if family == "longbench" or data_sets()[name].by_length]


def make_task(family: str, name: str, request: Request) -> Task:
    """Returns a data set of LongBench ("longbench") or LongBench-E ("longbench_e")."""
    settings = data_sets()[name]
    file = f"longbench/{name}_e.jsonl" if family == "longbench_e" else f"longbench/{name}.jsonl"
    entries = data_files.read_jsonl(request.data_dir, file)
    documents = [read_entry(settings, entry, f"{file}, entry {n}", str(n)) for n, entry in enumerate(entries, 1)]
    return Task(
        tuple(truncate(document, settings.answer_tokens, request) for document in request.select(documents)),
        score=functools.partial(score, settings),
        answer_tokens=settings.answer_tokens,
        chat=settings.chat,
    )


def read_entry(settings: DataSet, entry: Mapping, where: str, name: str) -> Document:
    """Returns the document of an entry.

    Args:
        settings: settings of the data set.
        entry: an object of a file.
        where: place of the entry, for errors.
        name: name of the document.

    Returns:
        The document.

    Raises:
        ValueError: if a field or the answer is missing.
    """
    if missing := {"input", "context", "answers", "length", "all_classes"} - entry.keys():
        raise ValueError(f"{where} lacks {', '.join(sorted(missing))}")
    if not entry["answers"]:
        raise ValueError(f"{where} has no answer")
    before, after = settings.prompt.split("{context}")
    text, classes = after.format(input=entry["input"]), tuple(entry["all_classes"] or ())
    return Document(before + entry["context"], (Question(text, tuple(entry["answers"]), choices=classes),), name)


def score(settings: DataSet, answer: str, question: Question) -> float:
    """Returns the best score with any of the correct answers."""
    if settings.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    metric = METRICS.get(settings.metric, functools.partial(metrics.classification, classes=question.choices))
    return max(metric(answer, correct) for correct in question.answers)


def truncate(document: Document, answer_tokens: int, request: Request) -> Document:
    """Cuts a document in the middle so that prompt and answer have at most `request.tokens` tokens."""
    [question] = document.questions
    context = request.tokenizer.encode_continuation(document.context, context=())
    after = request.tokenizer.encode_continuation(question.text, context)
    kept = truncate_tokens(context, after, request.tokens - answer_tokens)
    if kept is context:
        return document
    half = (request.tokens - answer_tokens) // 2
    # As published: each half is decoded alone, without the space that SentencePiece has at the cut.
    text = request.tokenizer.decode(kept[:half]) + request.tokenizer.decode(kept[half:])
    return dataclasses.replace(document, context=text)


def truncate_tokens(context: Sequence[int], question: Sequence[int], longest: int) -> Sequence[int]:
    """Cuts a context in the middle; the first and the last half of the prompt remain, as published.

    Args:
        context: tokens of the context.
        question: tokens after it.
        longest: maximum number of tokens of the prompt.

    Returns:
        The tokens of the context that remain.

    Raises:
        ValueError: if the question is longer than half of the prompt.
    """
    if len(context) + len(question) <= longest:
        return context
    half = longest // 2
    if len(question) > half:
        raise ValueError(f"a question of {len(question)} tokens does not fit in the last half of {longest}")
    after = half - len(question)
    return [*context[:half], *(context[-after:] if after else ())]
