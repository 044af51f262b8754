"""Retrieval of facts: JSON key-value pairs, and bAbI's stories hidden in books (BABILong)."""

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from experiments.tasks import data_files, haystacks
from experiments.tasks.task import Document, Question, Request, Task, contains, longest_that_fits

# The prompt of https://github.com/nelson-liu/lost-in-the-middle (MIT).
KEY_VALUE_CONTEXT = (
    "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{{{records}}}"
)
KEY_VALUE_QUESTION = '\n\nKey: "{key}"'
KEY_VALUE_ANSWER = "\nCorresponding value:"
KEY_VALUE_ANSWER_TOKENS = 64

BABI_CONTEXT = (
    "The following text contains facts about persons, places and objects, hidden among sentences of a book. Answer the "
    "question based on these facts only.\n\n{text}"
)
BABI_QUESTION = "\n\nQuestion: {question} Answer with one word."
BABI_ANSWER_TOKENS = 16
_PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
# Possible answers of bAbI's tasks.
BABI_LABELS = dict.fromkeys("1234", _PLACES) | {"5": ("bill", "fred", "jeff", "mary", "apple", "football", "milk")}


def key_values(argument: str, request: Request) -> Task:
    """Returns JSON objects with as many of the published pairs as fit; the argument is the number of questions."""
    entries = request.select(data_files.read_jsonl(request.data_dir, "kv_retrieval/75_keys.jsonl.gz"))
    count = int(argument or 1)
    documents = []
    for number, entry in enumerate(entries):
        rng = np.random.default_rng([request.seed, number])
        document = _key_value_document(entry["ordered_kv_records"], entry["key"], count, rng, request)
        documents.append(dataclasses.replace(document, name=entry["key"]))
    return Task(tuple(documents), score=contains, answer_tokens=KEY_VALUE_ANSWER_TOKENS)


def _key_value_document(
    records: list[list[str]], key: str, questions: int, rng: np.random.Generator, request: Request
) -> Document:
    """Returns the longest JSON object that fits and contains the asked keys."""
    values = dict(records)
    others = [name for name in values if name != key]
    asked = [key, *rng.permutation(others)[: questions - 1].tolist()]
    order = [name for name in others if name not in asked]
    if len(asked) > len(values):
        raise ValueError(f"kv_retrieval:{questions} asks for more keys than the {len(values)} of an object")

    texts = tuple(Question(KEY_VALUE_QUESTION.format(key=one), (values[one],), KEY_VALUE_ANSWER) for one in asked)

    def make(size: int) -> Document:
        """Makes an object with `size` - 1 pairs that no question asks for, in the published order."""
        kept = {*asked, *order[: size - 1]}
        lines = ",\n ".join(f'"{name}": "{value}"' for name, value in values.items() if name in kept)
        return Document(KEY_VALUE_CONTEXT.format(records=lines), texts)

    return longest_that_fits(make, request, KEY_VALUE_ANSWER_TOKENS, len(order) + 1)


class Story(NamedTuple):
    """A story of bAbI: facts, and questions with the number of facts before them."""

    facts: tuple[str, ...]
    questions: tuple[tuple[int, str, str], ...]


def read_stories(text: str) -> list[Story]:
    """Reads a file of bAbI, whose line numbers restart at 1 with every story."""
    stories: list[tuple[list[str], list[tuple[int, str, str]]]] = []
    for line in text.splitlines():
        number, _, content = line.partition(" ")
        if number == "1":
            stories.append(([], []))
        facts, questions = stories[-1]
        question, *answer = re.split(r"\s*[\t|]\s*", content.strip())
        if answer:
            questions.append((len(facts), question, answer[0]))
        else:
            facts.append(content.strip())
    return [Story(tuple(facts), tuple(questions)) for facts, questions in stories]


def babi(argument: str, request: Request) -> Task:
    """Returns stories of bAbI's task `argument` (1 to 5) with their last question, hidden in books."""
    number = argument or "1"
    if number not in BABI_LABELS:
        raise ValueError(f"babi:{number} is not a task; pass babi:1 to babi:5")
    [path] = data_files.find(request.data_dir, "babi").glob(f"qa{number}_*_test.txt")
    stories = request.select(read_stories(path.read_text(encoding="utf-8")))
    texts = [" ".join(text.split()) for _, text in data_files.read_directory(request.data_dir, "books")]
    books = [haystacks.sentences(text) for text in texts]
    documents = []
    for index, story in enumerate(stories):
        document = _hide_story(story, books, np.random.default_rng([request.seed, index]), request)
        documents.append(dataclasses.replace(document, name=str(index)))
    score = functools.partial(only_label, BABI_LABELS[number])
    return Task(tuple(documents), score=score, answer_tokens=BABI_ANSWER_TOKENS)


def only_label(labels: Iterable[str], answer: str, question: Question) -> float:
    """Scores an answer as BABILong does (https://github.com/booydar/babilong).

    Args:
        labels: possible answers of the task, in lower case.
        answer: the generated answer, of which the first sentence counts.
        question: the question; labels that it names do not count.

    Returns:
        1 if the correct label is the only one in the answer, otherwise 0.
    """
    sentence = re.split(r"\.|<context>|<example>", answer.lower())[0]
    named = {label for label in labels if label in sentence and label not in question.text.lower()}
    return float(named == {question.answers[0].lower()})


def _hide_story(story: Story, books: list[list[str]], rng: np.random.Generator, request: Request) -> Document:
    """Returns the longest passage of a book that fits with the facts of a story in it."""
    count, question, answer = story.questions[-1]
    facts = story.facts[:count]
    book = books[int(rng.integers(len(books)))]
    start = int(rng.integers(len(book)))
    places = np.sort(rng.random(len(facts)))

    def make(size: int) -> Document:
        """Makes a passage of `size` sentences."""
        sentences = [book[(start + index) % len(book)] for index in range(size)]
        for number, (place, fact) in enumerate(zip(places, facts, strict=True)):
            sentences.insert(int(place * size) + number, fact)
        text = BABI_CONTEXT.format(text=" ".join(sentences))
        return Document(text, (Question(BABI_QUESTION.format(question=question), (answer,), " Answer:"),))

    return longest_that_fits(make, request, BABI_ANSWER_TOKENS)


TASKS = {"kv_retrieval": key_values, "babi": babi}
