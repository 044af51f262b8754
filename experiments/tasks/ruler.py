"""RULER's synthetic tasks: needles, variables, common words and frequent words (`questions` has `qa_1` and `qa_2`).

Templates, answer prefixes, answer lengths, settings and scores are RULER's (Hsieh et al. 2024, NVIDIA,
https://github.com/NVIDIA/RULER, Apache-2.0); its word lists come from the package `wonderwords`, as in RULER. The
generators are written for kvjax and draw from the same distributions.
"""

import dataclasses
import functools
import itertools
import string
import uuid
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy.special import zeta
from wonderwords import random_word

from experiments.tasks import haystacks
from experiments.tasks import ruler_templates as templates
from experiments.tasks.task import Document, Question, Request, Task, longest_that_fits, share_contained

# Depths of needles in essays, in percent of the sentences.
DEPTHS = np.round(np.linspace(0, 100, num=40)).astype(int)
COMMON_WORDS = 10  # number of common words that the question asks for
SHORT = 4096  # below this number of tokens, common words are repeated less often

Kind = Literal["numbers", "words", "uuids"]


@dataclasses.dataclass(frozen=True)
class Needles:
    """A task with needles: `keys` keys with `values` values each; the question asks for `queries` of the keys."""

    haystack: Literal["noise", "essay", "needle"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


NEEDLE_TASKS = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value="uuids"),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", key="uuids", value="uuids"),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", queries=4),
}
ANSWER_TOKENS = dict.fromkeys(NEEDLE_TASKS, 128) | {"vt": 30, "cwe": 120, "fwe": 50}
TASKS = tuple(ANSWER_TOKENS)


def make_task(name: str, argument: str, request: Request) -> Task:
    """Returns a task; the argument "docs" replaces the essays by Python's documentation."""
    documents = request.generate(lambda rng, _: generate(name, argument, rng, request))
    return Task(documents, score=share_contained, answer_tokens=ANSWER_TOKENS[name])


def generate(name: str, source: str, rng: np.random.Generator, request: Request) -> Document:
    """Returns the longest document of a task that fits.

    Args:
        name: a name in `TASKS`.
        source: the haystack (`haystacks.words`).
        rng: determines the document.
        request: maximum number of tokens, and the directory of the essays.

    Returns:
        The document.
    """
    seed = int(rng.integers(2**63))

    def make(size: int) -> Document:
        """Makes a document of a `size`; every size draws the same random numbers."""
        same_rng = np.random.default_rng(seed)
        if name in NEEDLE_TASKS:
            return hide_needles(NEEDLE_TASKS[name], same_rng, size, source, request)
        return OTHER_TASKS[name](same_rng, size, request.tokens)

    # No unit of any task is shorter than a token.
    largest = min(request.tokens, len(_vocabulary()) - COMMON_WORDS) if name == "cwe" else request.tokens
    return longest_that_fits(make, request, ANSWER_TOKENS[name], largest)


def hide_needles(task: Needles, rng: np.random.Generator, size: int, source: str, request: Request) -> Document:
    """Returns a haystack of `size` words, sentences of noise or other needles, with the task's needles in it."""
    keys = [_draw(task.key, rng) for _ in range(max(task.keys, task.queries))]
    hidden = [(number, _draw(task.value, rng)) for number in range(len(keys)) for _ in range(task.values)]
    rng.shuffle(hidden)
    say = functools.partial(templates.NEEDLE.format, type_needle_v=task.value)
    if task.haystack == "essay":
        depths = np.sort(rng.choice(DEPTHS, len(hidden), replace=False)) / 100
        between = haystacks.sentences(haystacks.take(haystacks.words(rng, source, request.data_dir), size))
        separator = " "
    else:
        depths = np.sort(rng.random(len(hidden)))
        between = [
            templates.NOISE if task.haystack == "noise" else say(key=_draw(task.key, rng), value=_draw(task.value, rng))
            for _ in range(size)
        ]
        separator = "\n"
    needles = [say(key=keys[number], value=value) for number, value in hidden]
    text = separator.join(_insert(between, needles, depths))
    asked = rng.choice(len(keys), task.queries, replace=False).tolist()
    answers = tuple(value for key in asked for number, value in hidden if number == key)
    kind, parts = str(task.value), [templates.NEEDLE_CONTEXT, templates.NEEDLE_QUESTION, templates.NEEDLE_ANSWER]
    if len(answers) == 1:
        kind, parts = kind[:-1], [_singular(part) for part in parts]
    fields = {"type_needle_v": kind, "query": _enumerate([keys[number] for number in asked]), "context": text}
    context, question, prefix = (part.format(**fields) for part in parts)
    return Document(context, (Question(question, answers, prefix),))


def _enumerate(names: Sequence[str]) -> str:
    """Returns names as RULER's questions list them: "a" or "a, b, and c"."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]


def _singular(template: str) -> str:
    """Returns RULER's template for a single answer."""
    return template.replace("Some", "A").replace("are all", "is").replace("are", "is")


def _insert(between: Sequence[str], needles: Sequence[str], depths: np.ndarray) -> list[str]:
    """Inserts needles, in order, at the given depths of other sentences."""
    result = list(between)
    for number, (sentence, depth) in enumerate(zip(needles, depths, strict=True)):
        result.insert(int(len(between) * depth) + number, sentence)
    return result


def _draw(kind: Kind, rng: np.random.Generator) -> str:
    """Draws a key or a value."""
    if kind == "numbers":
        return str(rng.integers(10**6, 10**7))
    if kind == "uuids":
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))
    return f"{rng.choice(_word_list('adjectivelist.txt'))}-{rng.choice(_word_list('nounlist.txt'))}"


@functools.cache
def _word_list(name: str) -> np.ndarray:
    return np.array(random_word._get_words_from_text_file(name))


def variables(rng: np.random.Generator, size: int, tokens: int) -> Document:
    """Returns a chain of five variables in `size` sentences of noise, after a short example with its answer."""
    del tokens
    example = _chain(rng, letters=3, noise=5)
    asked = _chain(rng, letters=5, noise=max(size, 5))
    [question] = example.questions
    shown = f"{example.context}{question.text}{question.prefix} {' '.join(question.answers)}\n\n"
    return dataclasses.replace(asked, context=shown + asked.context)


def _chain(rng: np.random.Generator, letters: int, noise: int, hops: int = 4) -> Document:
    """Returns a chain of variables in `noise` sentences, with names of `letters` letters."""
    names: list[str] = []
    while len(names) <= hops:
        name = "".join(rng.choice(list(string.ascii_uppercase), letters))
        names += [name] if name not in names else []
    value = str(rng.integers(10000, 99999))
    # RULER writes a space after every link except the first.
    links = [f"VAR {names[0]} = {value}"] + [f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names)]
    places = np.sort(rng.choice(noise, len(links), replace=False))
    lines = [templates.NOISE] * noise
    for number, (place, link) in enumerate(zip(places, links, strict=True)):
        lines.insert(int(place) + number, link)
    context = templates.VARIABLES_CONTEXT.format(context="\n".join(lines).replace(". \n", ".\n"))
    question = templates.VARIABLES_QUESTION.format(query=value)
    prefix = templates.VARIABLES_ANSWER.format(query=value, num_v=hops + 1)
    return Document(context, (Question(question, tuple(names), prefix),))


def common_words(rng: np.random.Generator, size: int, tokens: int) -> Document:
    """Returns a list of words, ten of which are repeated more often, after a short example with its answer."""
    short = tokens < SHORT
    example = _repeated_words(rng, *((20, 3, 1) if short else (40, 10, 3)))
    asked = _repeated_words(rng, COMMON_WORDS + size, *((6, 1) if short else (30, 3)))
    [question] = example.questions
    numbered = " ".join(f"{number}. {word}" for number, word in enumerate(question.answers, start=1))
    shown = f"{example.context}{question.text}{question.prefix} {numbered}\n"
    return dataclasses.replace(asked, context=shown + asked.context)


def _repeated_words(rng: np.random.Generator, words: int, common_count: int, other_count: int) -> Document:
    """Returns a list of `words` different words, each repeated `common_count` or `other_count` times."""
    vocabulary = _vocabulary()
    # A longer list starts with the same words.
    chosen = vocabulary[rng.permutation(len(vocabulary))[:words]]
    common, others = chosen[:COMMON_WORDS], chosen[COMMON_WORDS:]
    repeated = np.concatenate([np.repeat(common, common_count), np.repeat(others, other_count)])
    rng.shuffle(repeated)
    text = " ".join(f"{number}. {word}" for number, word in enumerate(repeated, start=1))
    question = Question(templates.COMMON_QUESTION, tuple(map(str, common)), templates.COMMON_ANSWER)
    return Document(templates.COMMON_CONTEXT.format(context=text), (question,))


@functools.cache
def _vocabulary() -> np.ndarray:
    lists = (_word_list(f"{kind}list.txt") for kind in ("noun", "adjective", "verb"))
    return np.unique(np.concatenate(list(lists)))


def frequent_words(rng: np.random.Generator, size: int, tokens: int) -> Document:
    """Returns coded words whose frequencies follow a zeta distribution with exponent 2.

    The most frequent word is "...", and the question asks for the next three.
    """
    count = max((tokens - 50) // 50, 4)
    coded: dict[str, None] = {"...": None}
    while len(coded) < count:
        coded["".join(rng.choice(list(string.ascii_lowercase), 6))] = None
    words = np.array(list(coded))
    rank = np.arange(1, count + 1)
    # From 200 on, the third word of the answer is more frequent than the next one.
    times = ((200 + 8 * size) * rank**-2.0 / zeta(2.0)).astype(int)
    repeated = np.repeat(words, times)
    rng.shuffle(repeated)
    question = Question(templates.FREQUENT_QUESTION, tuple(map(str, words[1:4])), templates.FREQUENT_ANSWER)
    return Document(templates.FREQUENT_CONTEXT.format(context=" ".join(repeated)), (question,))


OTHER_TASKS = {"vt": variables, "cwe": common_words, "fwe": frequent_words}
