"""LongBench v2 from a file that a user has: questions of four choices about long texts, asked and scored as published.

The file is the benchmark's own (https://huggingface.co/datasets/THUDM/LongBench-v2, `data.json`; Bai et al. 2412.15204,
MIT): a list of objects with `context`, `question`, `choice_A` to `choice_D`, `answer`, `difficulty` and `length`. Asked
without a chain of thought; published answers are sampled at temperature 0.1, ours greedy.
"""

import dataclasses
import json
import pathlib
import re
from typing import Any

from experiments.common.tasks.longbench import Example, Task
from experiments.common.tasks.problem import Problem

SOURCE = "https://huggingface.co/datasets/THUDM/LongBench-v2"
CONTEXT = "Please read the following text and answer the question below.\n\n<text>\n{context}"
QUESTION = (
    "\n</text>\n\nWhat is the correct answer to this question: {question}\nChoices:\n(A) {choice_A}\n(B) {choice_B}\n"
    '(C) {choice_C}\n(D) {choice_D}\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
)
TASK = Task("longbench_v2", CONTEXT + QUESTION, 128, "accuracy", first_line=False, chat=True, by_length=False)
CHOICES = ("choice_A", "choice_B", "choice_C", "choice_D")
# What questions are counted by, and the values of each.
CLASSES = {"difficulty": ("easy", "hard"), "length": ("short", "medium", "long")}


@dataclasses.dataclass(frozen=True)
class Choice(Example):
    """One question. `classes` are its difficulty and the length of its text, `length` its characters."""

    def score(self, prediction: str) -> float:
        """1 where the right letter is named, 0 where another or none is."""
        return float(chosen(prediction) == self.problem.answers[0])


def chosen(prediction: str) -> str | None:
    """The letter that a prediction says is right, if it says so in the words that it was asked for."""
    text = prediction.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return found[1] if found else None


def read(path: pathlib.Path) -> list[Choice]:
    """The questions of the benchmark's file.

    Raises:
        ValueError: for a file that is not there or not of this kind, or an entry that lacks a field, with its number.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not there: it is data.json of {SOURCE}")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{path} must hold a list of questions, as data.json of {SOURCE}")
    return [_choice(entry, f"{path.name}, question {number}") for number, entry in enumerate(entries, 1)]


def _choice(entry: Any, where: str) -> Choice:
    wanted = ("context", "question", *CHOICES, "answer", *CLASSES)
    if not isinstance(entry, dict) or (missing := [key for key in wanted if not isinstance(entry.get(key), str)]):
        raise ValueError(f"{where} lacks {', '.join(missing) if isinstance(entry, dict) else 'all of its fields'}")
    for key, known in {"answer": ("A", "B", "C", "D"), **CLASSES}.items():
        if entry[key] not in known:
            raise ValueError(f"{where}: {key}={entry[key]!r}; known: {', '.join(known)}")
    said = {key: entry[key].strip() for key in ("question", *CHOICES)}
    problem = Problem(
        context=CONTEXT.format(context=entry["context"].strip()),
        question=QUESTION.format(**said),
        answers=(entry["answer"],),
        answer_tokens=TASK.answer_tokens,
    )
    return Choice(TASK, problem, len(entry["context"]), (entry["difficulty"], entry["length"]))
