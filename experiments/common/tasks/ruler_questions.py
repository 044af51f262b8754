"""RULER's two tasks of question answering, from files that a user has: documents that answer a question among others.

"qa_1" asks SQuAD 2.0 (https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json), "qa_2" HotpotQA
(http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json). Template, answer length, the order in which
documents are taken and scoring are RULER's (Hsieh et al. 2024, NVIDIA, https://github.com/NVIDIA/RULER, Apache-2.0);
questions are drawn in place of the first ones of the file.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.common.tasks.problem import Problem, longest_that_fits

CONTEXT = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}"
)
QUESTION = (
    "\n\nAnswer the question based on the given documents. Only give me the answer and do not output any other "
    "words.\n\nQuestion: {query} Answer:"
)
DOCUMENT = "Document {number}:\n{document}"
ANSWER_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, its right answers, and numbers of documents: those that it is about, and others on the same page."""

    query: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Questions:
    """The questions of a data set, and its documents, sorted."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


def read_squad(path: pathlib.Path) -> Questions:
    """SQuAD 2.0: a paragraph is a document, those of its article are near, and questions without an answer are left
    out.

    Raises:
        ValueError: for a file that is not there or not of this kind.
    """
    articles = _read(path, "SQuAD 2.0")
    try:
        texts = [[part["context"] for part in article["paragraphs"]] for article in articles["data"]]
        numbers = _numbered(text for article in texts for text in article)
        questions = [
            Question(
                asked["question"],
                tuple(answer["text"] for answer in asked["answers"]),
                (numbers[part["context"]],),
                tuple(numbers[text] for text in of_article if text != part["context"]),
            )
            for article, of_article in zip(articles["data"], texts, strict=True)
            for part in article["paragraphs"]
            for asked in part["qas"]
            if not asked["is_impossible"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not SQuAD 2.0: {error!r}") from error
    return _checked(path, questions, numbers)


def read_hotpotqa(path: pathlib.Path) -> Questions:
    """HotpotQA with distractors: all of a question's paragraphs, each under its title, are its own.

    Raises:
        ValueError: for a file that is not there or not of this kind.
    """
    entries = _read(path, "HotpotQA")
    try:
        texts = [[f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]] for entry in entries]
        numbers = _numbered(text for entry in texts for text in entry)
        questions = [
            Question(entry["question"], (entry["answer"],), tuple(numbers[text] for text in of_entry))
            for entry, of_entry in zip(entries, texts, strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not HotpotQA: {error!r}") from error
    return _checked(path, questions, numbers)


READERS = {"qa_1": read_squad, "qa_2": read_hotpotqa}


@functools.cache
def read(task: str, path: pathlib.Path) -> Questions:
    """The questions of a task from its file; see `READERS`."""
    return READERS[task](path)


def generate(
    questions: Questions, rng: np.random.Generator, token_length: Callable[[str], int], tokens: int
) -> Problem:
    """A problem whose prompt and answer take at most `tokens` tokens, of as many documents as fit.

    Raises:
        ValueError: where the question's own documents alone take more.
    """
    question = questions.questions[int(rng.integers(len(questions.questions)))]
    near = rng.permutation(np.array(question.near, int))
    others = rng.permutation(np.setdiff1d(np.arange(len(questions.documents)), [*question.own, *question.near]))
    order = np.concatenate([np.array(question.own, int), near, others])
    seed = int(rng.integers(2**63))

    def make(size: int) -> Problem:
        # Documents are repeated where there are not enough. The same draws for every size: each document's place among
        # those that are there already does not depend on how many follow.
        chosen = np.resize(order, len(question.own) - 1 + size)
        placed = chosen[np.argsort(np.random.default_rng(seed).random(len(chosen)))]
        listed = [DOCUMENT.format(number=n, document=questions.documents[which]) for n, which in enumerate(placed, 1)]
        context = CONTEXT.format(context="\n\n".join(listed))
        return Problem(context, QUESTION.format(query=question.query), question.answers, ANSWER_TOKENS)

    return longest_that_fits(make, token_length, tokens, tokens)  # no document is shorter than a token


def score(prediction: str, answers: Sequence[str]) -> float:
    """Whether the prediction contains any of the answers, in any case of letters (RULER's `string_match_part`)."""
    return float(any(answer.lower() in prediction.lower() for answer in answers))


def _read(path: pathlib.Path, name: str) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} is not there: it is to be a file of {name}, see {__name__}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _numbered(texts: Any) -> dict[str, int]:
    return {text: number for number, text in enumerate(sorted(set(texts)))}


def _checked(path: pathlib.Path, questions: Sequence[Question], numbers: dict[str, int]) -> Questions:
    if not questions:
        raise ValueError(f"{path} has no question that can be answered")
    return Questions(tuple(questions), tuple(numbers))
