"""Questions about passages among other passages: RULER's `qa_1` and `qa_2`, SQuAD, HotpotQA, MuSiQue and NQ.

The prompt, the answer length and the score are RULER's (https://github.com/NVIDIA/RULER, Apache-2.0). RULER asks one
question per document; `squad`, `hotpotqa`, `musique` and `nq` ask several, whose passages share the document.
"""

import functools
import pathlib
from typing import NamedTuple

import numpy as np

from experiments.tasks import data_files
from experiments.tasks import ruler_templates as templates
from experiments.tasks.task import Document, Question, Request, Task, contains, longest_that_fits

ANSWER_TOKENS = 32


class Item(NamedTuple):
    """A question, its answers, the passages that answer it, and passages that should be its first distractors."""

    question: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]
    related: tuple[str, ...] = ()


@functools.cache
def read_squad(data_dir: pathlib.Path | None) -> tuple[Item, ...]:
    """Reads XQuAD's English questions, which are SQuAD's; paragraphs of the same article are related."""
    return tuple(
        Item(
            question["question"],
            tuple(dict.fromkeys(answer["text"] for answer in question["answers"])),
            (paragraph["context"],),
            tuple(other["context"] for other in article["paragraphs"] if other is not paragraph),
        )
        for article in data_files.read_json(data_dir, "qa/xquad_en.json")["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    )


@functools.cache
def read_hotpotqa(data_dir: pathlib.Path | None) -> tuple[Item, ...]:
    """Reads HotpotQA in the form with distractors, which are the related passages."""
    items = []
    for entry in data_files.read_json(data_dir, "qa/hotpotqa.json"):
        supporting = {title for title, _ in entry["supporting_facts"]}
        texts = [(title in supporting, f"{title}\n{''.join(sentences)}") for title, sentences in entry["context"]]
        items.append(_item(entry["question"], (entry["answer"],), texts))
    return tuple(items)


@functools.cache
def read_musique(data_dir: pathlib.Path | None) -> tuple[Item, ...]:
    """Reads MuSiQue's questions that have an answer."""
    items = []
    for entry in data_files.read_json(data_dir, "qa/musique.json"):
        paragraphs = entry["paragraphs"]
        texts = [(one["is_supporting"], f"{one['title']}\n{one['paragraph_text']}") for one in paragraphs]
        if entry["answerable"]:
            items.append(_item(entry["question"], (entry["answer"], *entry["answer_aliases"]), texts))
    return tuple(items)


def _item(question: str, answers: tuple[str, ...], texts: list[tuple[bool, str]]) -> Item:
    """Returns an item whose passages are marked as supporting or not."""
    supporting, related = (tuple(text for mark, text in texts if mark == wanted) for wanted in (True, False))
    return Item(question, answers, supporting, related)


@functools.cache
def read_nq(data_dir: pathlib.Path | None) -> tuple[Item, ...]:
    """Reads Natural Questions with their gold passages."""
    return tuple(
        Item(
            entry["question"],
            tuple(entry["answers"]),
            tuple(f"{one['title']}\n{one['text']}" for one in entry["ctxs"] if one["isgold"]),
        )
        for entry in data_files.read_jsonl(data_dir, "qa/nq_open_oracle.jsonl.gz")
    )


# Reader, and number of questions per document.
TASKS = {
    "qa_1": (read_squad, 1),
    "qa_2": (read_hotpotqa, 1),
    "squad": (read_squad, 4),
    "hotpotqa": (read_hotpotqa, 4),
    "musique": (read_musique, 2),
    "nq": (read_nq, 4),
}


def make_task(name: str, argument: str, request: Request) -> Task:
    """Returns a task; the argument is the number of questions per document."""
    reader, default = TASKS[name]
    count = int(argument or default)
    items = reader(request.data_dir)
    order = np.random.default_rng(request.seed).permutation(len(items))
    pool = tuple(sorted({text for item in items for text in (*item.passages, *item.related)}))

    def make(rng: np.random.Generator, index: int) -> Document:
        """Makes the document of an `index`, with the next questions of the order."""
        chosen = [items[order[number % len(order)]] for number in range(index * count, (index + 1) * count)]
        return generate(chosen, pool, rng, request)

    return Task(request.generate(make), score=contains, answer_tokens=ANSWER_TOKENS)


def generate(items: list[Item], pool: tuple[str, ...], rng: np.random.Generator, request: Request) -> Document:
    """Returns a document with the passages of all items and as many others as fit.

    Args:
        items: the questions.
        pool: other passages.
        rng: determines the distractors and the order of the passages.
        request: maximum number of tokens.

    Returns:
        The document.
    """
    needed = list(dict.fromkeys(text for item in items for text in item.passages))
    related = list(dict.fromkeys(text for item in items for text in item.related if text not in needed))
    others = sorted(set(pool) - {*needed, *related})
    # Passages are repeated if there are too few.
    available = [*needed, *rng.permutation(related).tolist(), *rng.permutation(others).tolist()]
    seed = int(rng.integers(2**63))
    questions = tuple(
        Question(templates.QA_QUESTION.format(query=item.question), item.answers, templates.QA_ANSWER) for item in items
    )

    def make(size: int) -> Document:
        """Makes a document with `size` - 1 distractors; their order does not depend on the size."""
        count = len(needed) - 1 + size
        chosen = (available * (count // len(available) + 1))[:count]
        places = np.argsort(np.random.default_rng(seed).random(count))
        numbered = ((number, chosen[place]) for number, place in enumerate(places, start=1))
        texts = [templates.QA_DOCUMENT.format(number=number, document=document) for number, document in numbered]
        return Document(templates.QA_CONTEXT.format(context="\n\n".join(texts)), questions)

    return longest_that_fits(make, request, ANSWER_TOKENS)
