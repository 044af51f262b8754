"""One needle in a haystack of essays, as BalanceKV's code and MInference test it.

- `needle`: template, question, answer length and score of BalanceKV's code (https://github.com/ksheth96/BalanceKV),
  which follows Fu et al. 2024: the share of the different words of the expected answer that the answer contains. Depths
  are ten from the first to the last sentence.
- `needle:continue`: the same in a chat model's template; the answer starts with the beginning of the needle. Small
  models end the answer to the published prompt at once.
- `needle:minference`: numbers of cities; scored as right or wrong.

The suffix "docs" (`needle:docs`, `needle:continue+docs`) takes Python's documentation as the haystack.
"""

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.tasks import haystacks
from experiments.tasks.task import Document, Question, Request, Task, contains, longest_that_fits

DATA = pathlib.Path(__file__).parent / "data" / "needles.json"
DEPTHS = np.linspace(0, 1, 10)
FORMS = ("published", "continue", "minference")


@functools.cache
def prompts() -> Mapping[str, Mapping[str, Any]]:
    """Returns the published prompts, with their sources and licenses."""
    return json.loads(DATA.read_text(encoding="utf-8"))


def make_task(argument: str, request: Request) -> Task:
    """Returns the task of a form.

    Args:
        argument: a form of `FORMS`, the haystack "docs", or both, joined with "+".
        request: number of documents and tokens; the depth of document i is `DEPTHS[i % 10]`.

    Returns:
        The task.

    Raises:
        ValueError: if the form is unknown.
    """
    parts = [part for part in argument.split("+") if part]
    source = haystacks.DOCS if haystacks.DOCS in parts else ""
    [form] = [part for part in parts if part != haystacks.DOCS] or ["published"]
    if form not in FORMS:
        raise ValueError(f"needle:{argument} is not a task; pass one of {', '.join(FORMS)}")
    prompt = prompts()["minference" if form == "minference" else "kamradt"]
    documents = request.generate(lambda rng, index: generate(form, rng, DEPTHS[index % len(DEPTHS)], source, request))
    return Task(
        documents,
        score=contains if form == "minference" else share_of_words,
        answer_tokens=prompt["answer_tokens"],
        chat=form == "continue",
        stop=None if form == "minference" else "\n",
    )


def generate(form: str, rng: np.random.Generator, depth: float, source: str, request: Request) -> Document:
    """Returns the longest document that fits.

    Args:
        form: a form of `FORMS`.
        rng: determines the order of the essays, the city and the number.
        depth: depth of the needle, from 0 to 1.
        source: haystack (`haystacks.words`).
        request: maximum number of tokens.

    Returns:
        The document.
    """
    prompt = prompts()["minference" if form == "minference" else "kamradt"]
    words = haystacks.words(rng, source, request.data_dir)
    drawn = {"number": rng.integers(10**6, 10**7)}
    if prompt["cities"]:
        drawn["city"] = rng.choice(prompt["cities"])
    before, after = prompt["prompt"].format(context="\0", question=prompt["question"]).split("\0")
    question = Question(after.format(**drawn), (prompt["answer"].format(**drawn),))
    if form == "continue":
        before = "This is a very long story book: <book> "
        text = " </book>.\nBased on the content of the book, what is the best thing to do in San Francisco?"
        question = Question(text, question.answers, " The best thing to do in San Francisco is")

    def make(size: int) -> Document:
        """Makes a document with a haystack of `size` words."""
        text = insert(haystacks.take(words, size), prompt["needle"].format(**drawn), depth)
        return Document(before + text, (question,))

    return longest_that_fits(make, request, prompt["answer_tokens"])


def insert(text: str, needle: str, depth: float) -> str:
    """Inserts a needle after the last sentence that ends before `depth` of the characters; at the end for depth 1."""
    place = len(text) if depth == 1 else text.rfind(".", 0, int(depth * len(text))) + 1
    return text[:place] + needle + text[place:]


def share_of_words(answer: str, question: Question) -> float:
    """Returns the share of the different expected words that an answer contains, as BalanceKV's code scores."""
    expected = set(question.answers[0].lower().split())
    return len(expected & set(answer.lower().split())) / len(expected)
