"""LooGLE: many questions about one text of 50 to 130 thousand characters (https://arxiv.org/abs/2311.04939).

The published code (https://github.com/bigai-nlco/LooGLE, MIT) has the same prompts. Answers are scored by F1 of their
words; the published code reports, among others, the recall of ROUGE, which rewards long answers. Clozes are scored by
the share of masked names that are exactly right, as published. With `--truncate`, the middle of a text is cut, and
questions whose evidence is cut with it are left out.
"""

import ast
import dataclasses
import json
import re
from typing import Any

from experiments.tasks import data_files, metrics
from experiments.tasks.task import Document, Question, Request, Task, fit_documents

TASKS = ("shortdep_qa", "longdep_qa", "shortdep_cloze")
QA_TOKENS, CLOZE_TOKENS = 64, 50  # of an answer; the published code allows 300 and 500 for questions
_QA_TEXT = "Please answer the question based on the long texts below. \n"
_CLOZE_TEXT = (
    "Please fill in the clozes based on the given long texts below. Each of the placeholder '<mask-n>' in the question "
    "could be an entity of Person, Location or Organiocation. The same masks represent the same entity. Output a json "
    "format answer, for example: {'<mask-0>': 'Bob', '<mask-1>': 'Gorrosion Magazine','<mask-2>': 'Bethel Horizon'}\n"
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def make_task(name: str, _: str, request: Request) -> Task:
    """Returns a task; texts that do not fit are left out or cut, as requested."""
    is_cloze = name == "shortdep_cloze"
    answer_tokens = CLOZE_TOKENS if is_cloze else QA_TOKENS
    documents: list[Document] = []
    evidence: dict[Question, list[str]] = {}
    for number, entry in enumerate(data_files.read_jsonl(request.data_dir, f"loogle/{name}.jsonl")):
        asked = dict(_cloze(pair) if is_cloze else _question(pair) for pair in ast.literal_eval(entry["qa_pairs"]))
        evidence |= asked
        context = (_CLOZE_TEXT if is_cloze else _QA_TEXT) + entry["input"]
        documents.append(Document(context, tuple(asked), str(number)))
    fitting = []
    for document in fit_documents(documents, request, answer_tokens):
        text = " ".join(document.context.split())
        left = tuple(one for one in document.questions if all(sentence in text for sentence in evidence[one]))
        if left:
            fitting.append(dataclasses.replace(document, questions=left))
    if not fitting:
        raise ValueError(f"tokens={request.tokens} leave no evidence of a question in the texts; pass more tokens")
    return Task(tuple(fitting), score=_score_cloze if is_cloze else _score, answer_tokens=answer_tokens)


def _question(pair: dict[str, Any]) -> tuple[Question, list[str]]:
    """Returns a question, and the sentences of the text that answer it."""
    parts = [pair["S"]] if isinstance(pair["S"], str) else pair["S"]
    sentences = [sentence for part in parts for sentence in _SENTENCE_END.split(part.strip()) if sentence]
    evidence = [" ".join(sentence.split()) for sentence in sentences]
    return Question(f"\nQuestion: {pair['Q']}", (pair["A"],), "\nAnswer: "), evidence


def _cloze(pair: dict[str, Any]) -> tuple[Question, list[str]]:
    """Returns the question of a cloze, whose answer is a JSON object with the name of every mask."""
    text = f"\n Question: {pair['Q']} What are the masked entities? "
    return Question(text, (json.dumps(pair["A"]),), "\nAnswer:"), []


def _score(answer: str, question: Question) -> float:
    return metrics.qa_f1(answer.strip().partition("\n")[0], question.answers[0])


def _score_cloze(answer: str, question: Question) -> float:
    """Returns the share of masks whose names are right; 0 if the answer is not a dictionary."""
    try:
        names = ast.literal_eval(answer.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        names = None  # a TypeError is a list or dictionary as a key, or in a set
    if not isinstance(names, dict):
        return 0.0
    right = json.loads(question.answers[0])
    return sum(names.get(mask) == name for mask, name in right.items()) / len(right)
