"""Twelve facts in one text, each with a question. A cache compresses the text before it knows any of the questions.

`facts` inserts them in essays, `facts:docs` in Python's documentation. The demo asks the same questions.
"""

import re
from collections.abc import Sequence

import numpy as np

from experiments.tasks import haystacks
from experiments.tasks.task import Document, Question, Request, Task, longest_that_fits

# Question, the sentence up to its answer, and the answer, in which "#" is a random digit.
FACTS = (
    ("What is the access code of the Lisbon office?", "The access code of the Lisbon office is", "#######"),
    ("What is the password of the wireless network?", "The password of the wireless network is", "tangerine-####"),
    ("At which pier does the ferry to Oslo leave?", "The ferry to Oslo leaves at pier number", "###"),
    ("How many grams does the blue diamond weigh?", "The weight of the blue diamond in grams is", "####"),
    ("What is the telephone extension of the library?", "The telephone extension of the library is", "####"),
    ("Where does Doctor Alvarez park her red truck?", "Doctor Alvarez parks her red truck in space", "###"),
    ("What is the serial number of the old printer?", "The serial number of the old printer is", "######"),
    ("How many steps lead up to the lighthouse?", "The number of steps up to the lighthouse is", "####"),
    ("Which locker contains Maria's violin?", "Maria keeps her violin in locker", "####"),
    ("How many sheep does the farmer near Dublin own?", "The number of sheep of the farmer near Dublin is", "####"),
    ("What is the number of the flight to Nairobi?", "The plane to Nairobi has the flight number", "####"),
    ("What is the combination of the kitchen safe?", "The combination of the kitchen safe is", "######"),
)
ANSWER_TOKENS = 10


def make_task(argument: str, request: Request) -> Task:
    """Returns the task.

    Args:
        argument: "docs" for Python's documentation, "" for the essays.
        request: number of documents and tokens.

    Returns:
        The task.

    Raises:
        ValueError: if the argument is unknown.
    """
    if argument not in ("", haystacks.DOCS):
        raise ValueError(f"facts:{argument} is not a task; pass facts or facts:docs")
    documents = request.generate(lambda rng, _: _generate(rng, argument, request))
    return Task(documents, score=_score, answer_tokens=ANSWER_TOKENS, stop="\n")


def _score(answer: str, question: Question) -> float:
    return float(is_word(answer, question.answers[0]))


def _generate(rng: np.random.Generator, source: str, request: Request) -> Document:
    """Returns the longest document that fits, with the facts in random order and at equal distances."""
    words, answers = haystacks.words(rng, source, request.data_dir), make_answers(rng)
    order = rng.permutation(len(FACTS))
    questions = tuple(
        Question(f"\n\n{question}", (answer,), f" {sentence}")
        for (question, sentence, _), answer in zip(FACTS, answers, strict=True)
    )

    def make(size: int) -> Document:
        """Makes a document with a haystack of `size` words."""
        texts = haystacks.sentences(haystacks.take(words, size))
        return Document(" ".join(insert(texts, [f"{FACTS[i][1]} {answers[i]}." for i in order])), questions)

    return longest_that_fits(make, request, ANSWER_TOKENS)


def make_answers(rng: np.random.Generator) -> list[str]:
    """Returns the values of the facts."""
    return [re.sub("#", lambda _: str(rng.integers(1, 10)), answer) for _, _, answer in FACTS]


def insert(texts: Sequence[str], facts: Sequence[str]) -> list[str]:
    """Inserts facts between texts, at equal distances.

    Args:
        texts: sentences or paragraphs.
        facts: as many sentences as there are facts.

    Returns:
        Texts and facts.
    """
    result = list(texts)
    for number in reversed(range(len(facts))):
        result.insert(int((number + 0.5) * len(texts) / len(facts)), facts[number])
    return result


def is_word(answer: str, value: str) -> bool:
    """Returns whether an answer has a value as a word."""
    return value in re.findall(r"[\w-]+", answer)
