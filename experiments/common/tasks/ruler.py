"""RULER's tasks that need no downloaded data: needles, variables, common words and frequent words; `ruler_questions`
has the other two.

Templates, answer prefixes, answer lengths, task settings and scoring are RULER's (Hsieh et al. 2024, NVIDIA,
https://github.com/NVIDIA/RULER, Apache-2.0); its word lists come from the `wonderwords` package, as there. Where RULER
takes essays by Paul Graham, `prose` stands in. Generators are kvjax's own and draw from the same distributions.
"""

import dataclasses
import functools
import itertools
import string
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from scipy.special import zeta
from wonderwords import random_word

from experiments.common.tasks import prose
from experiments.common.tasks.problem import Problem, longest_that_fits
from experiments.common.tasks.ruler_templates import (
    COMMON_CONTEXT,
    COMMON_QUESTION,
    FREQUENT_CONTEXT,
    FREQUENT_QUESTION,
    NEEDLE,
    NEEDLE_CONTEXT,
    NEEDLE_QUESTION,
    NOISE,
    VARIABLES_CONTEXT,
    VARIABLES_QUESTION,
)

# Needles and links of chains stand at depths of so many steps from the first sentence to the last.
DEPTHS = np.round(np.linspace(0, 100, num=40)).astype(int)
# Common words that are asked for.
LISTED = 10
# Experiments add their own seed. Training's generators start from 0, so no problem is drawn by both.
EVALUATION_SEED = 2_000_000
# Below so many tokens common words are repeated less often.
SHORT = 4096

Kind = Literal["numbers", "words", "uuids"]


@dataclasses.dataclass(frozen=True)
class Needles:
    """A task of the needle family: so many keys with so many values each, of which so many keys are asked for."""

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


def generate(
    task: str, rng: np.random.Generator, token_length: Callable[[str], int], tokens: int, *, depth: float | None = None
) -> Problem:
    """A problem whose prompt and answer take at most `tokens` tokens, as many as fit.

    Args:
        task: a name of `TASKS`.
        depth: where the one needle of a "niah_single" task stands, from 0 to 1; drawn where it is not given.

    Raises:
        ValueError: for an unknown task, a depth for a task that has no single needle, or too few tokens.
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r} is not known; known: {', '.join(TASKS)}")
    if depth is not None and not task.startswith("niah_single"):
        raise ValueError(f"depth={depth} means nothing to {task}: its needles are several")
    seed = int(rng.integers(2**63))

    def make(size: int) -> Problem:
        # The same draws for every size, so that a size decides nothing but how much text there is.
        fresh = np.random.default_rng(seed)
        if task in NEEDLE_TASKS:
            return needles(NEEDLE_TASKS[task], fresh, size, depth)
        return OTHER_TASKS[task](fresh, size, tokens)

    # No unit of any task is shorter than a token.
    most = min(tokens, len(_vocabulary()) - LISTED) if task == "cwe" else tokens
    return longest_that_fits(make, token_length, tokens, most)


def score(prediction: str, answers: Sequence[str]) -> float:
    """The share of the answers that the prediction contains, in any case of letters (RULER's `string_match_all`)."""
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)


# --- needles ---


@dataclasses.dataclass(frozen=True)
class Hidden:
    """A text with needles in it, before anyone asks: `values[n]` are those of `keys[n]`, in order of the text."""

    task: Needles
    text: str
    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    depths: tuple[float, ...]  # of all needles in order, from 0 to 1

    def ask(self, asked: Sequence[int]) -> Problem:
        """The problem of naming all values of these keys."""
        names = [self.keys[number] for number in asked]
        query = listed(names)
        answers = tuple(value for number in asked for value in self.values[number])
        context, question, kind = NEEDLE_CONTEXT, NEEDLE_QUESTION, str(self.task.value)
        if len(answers) == 1:
            context, question, kind = _of_one(context), _of_one(question), kind[:-1]
        return Problem(
            context.format(type_needle_v=kind, context=self.text),
            question.format(type_needle_v=kind, query=query),
            answers,
            answer_tokens=128,
            depth=self.depths[0] if len(self.depths) == 1 else None,
        )


def needles(task: Needles, rng: np.random.Generator, size: int, depth: float | None = None) -> Problem:
    """A problem of needles in a haystack of so many words of an essay, repetitions of the noise, or other needles."""
    hidden = hide(task, rng, size, depth)
    return hidden.ask(rng.choice(len(hidden.keys), task.queries, replace=False).tolist())


def hide(task: Needles, rng: np.random.Generator, size: int, depth: float | None = None) -> Hidden:
    """The needles of a task in such a haystack; those that are part of it are no keys."""
    keys = [_draw(task.key, rng) for _ in range(max(task.keys, task.queries))]
    hidden = [(number, _draw(task.value, rng)) for number in range(len(keys)) for _ in range(task.values)]
    rng.shuffle(hidden)
    say = functools.partial(NEEDLE.format, type_needle_v=task.value)
    if depth is not None:
        depths = np.array([depth])
    elif task.haystack == "essay":
        depths = np.sort(rng.choice(DEPTHS, len(hidden), replace=False)) / 100
    else:
        depths = np.sort(rng.random(len(hidden)))
    if task.haystack == "essay":
        all_words = prose.words(rng)
        repeated = -(-size // len(all_words)) * all_words
        between = prose.sentences(" ".join(repeated[:size]))
        joint = " "
    else:
        between = [
            NOISE if task.haystack == "noise" else say(key=_draw(task.key, rng), value=_draw(task.value, rng))
            for _ in range(size)
        ]
        joint = "\n"
    said = [say(key=keys[number], value=value) for number, value in hidden]
    return Hidden(
        task,
        joint.join(_inserted(between, said, depths)),
        tuple(keys),
        tuple(tuple(value for of_key, value in hidden if of_key == number) for number in range(len(keys))),
        tuple(depths.tolist()),
    )


def listed(names: Sequence[str]) -> str:
    """Names as RULER's questions list them: "a" or "a, b, and c"."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]


def _of_one(template: str) -> str:
    """RULER's template for a single answer."""
    return template.replace("Some", "A").replace("are all", "is").replace("are", "is")


def _inserted(between: Sequence[str], hidden: Sequence[str], depths: np.ndarray) -> list[str]:
    """The hidden sentences in order at these depths of the others."""
    found = list(between)
    for number, (sentence, depth) in enumerate(zip(hidden, depths, strict=True)):
        found.insert(int(len(between) * depth) + number, sentence)
    return found


def _draw(kind: Kind, rng: np.random.Generator) -> str:
    if kind == "numbers":
        return str(rng.integers(10**6, 10**7))
    if kind == "uuids":
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))
    return f"{rng.choice(_list('adjectivelist.txt'))}-{rng.choice(_list('nounlist.txt'))}"


@functools.cache
def _list(name: str) -> np.ndarray:
    return np.array(random_word._get_words_from_text_file(name))


# --- variables ---


def variables(rng: np.random.Generator, size: int, tokens: int) -> Problem:
    """One chain of five variables, each assigned the one before, among repetitions of the noise; an example with an
    answer comes first, in a text of a few lines."""
    example = _chain(rng, letters=3, noise=5)
    asked = _chain(rng, letters=5, noise=max(size, 5))
    shown = example.context + example.question + " " + " ".join(example.answers) + "\n\n"
    return dataclasses.replace(asked, context=shown + asked.context)


def _chain(rng: np.random.Generator, letters: int, noise: int, hops: int = 4) -> Problem:
    names: list[str] = []
    while len(names) <= hops:
        name = "".join(rng.choice(list(string.ascii_uppercase), letters))
        names += [name] if name not in names else []
    value = str(rng.integers(10000, 99999))
    # RULER writes a space behind every link but the first.
    links = [f"VAR {names[0]} = {value}"] + [f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names)]
    places = np.sort(rng.choice(noise, len(links), replace=False))
    lines = [NOISE] * noise
    for number, (place, link) in enumerate(zip(places, links, strict=True)):
        lines.insert(int(place) + number, link)
    return Problem(
        VARIABLES_CONTEXT.format(context="\n".join(lines).replace(". \n", ".\n")),
        VARIABLES_QUESTION.format(query=value, num_v=hops + 1),
        tuple(names),
        answer_tokens=30,
    )


# --- words ---


def common_words(rng: np.random.Generator, size: int, tokens: int) -> Problem:
    """A numbered list of words, ten of which are repeated more often; a short one with its answer comes first."""
    short = tokens < SHORT
    example = _word_list(rng, *((20, 3, 1) if short else (40, 10, 3)))
    asked = _word_list(rng, LISTED + size, *((6, 1) if short else (30, 3)))
    numbered = " ".join(f"{number}. {word}" for number, word in enumerate(example.answers, start=1))
    shown = f"{example.context}{example.question} {numbered}\n"
    return dataclasses.replace(asked, context=shown + asked.context)


def _word_list(rng: np.random.Generator, words: int, often: int, seldom: int) -> Problem:
    vocabulary = _vocabulary()
    # A longer list has the same first words.
    chosen = vocabulary[rng.permutation(len(vocabulary))[:words]]
    listed = np.concatenate([np.repeat(chosen[:LISTED], often), np.repeat(chosen[LISTED:], seldom)])
    rng.shuffle(listed)
    context = " ".join(f"{number}. {word}" for number, word in enumerate(listed, start=1))
    return Problem(
        COMMON_CONTEXT.format(context=context), COMMON_QUESTION, tuple(map(str, chosen[:LISTED])), answer_tokens=120
    )


@functools.cache
def _vocabulary() -> np.ndarray:
    lists = (_list(f"{kind}list.txt") for kind in ("noun", "adjective", "verb"))
    return np.unique(np.concatenate(list(lists)))


def frequent_words(rng: np.random.Generator, size: int, tokens: int) -> Problem:
    """Coded words whose frequencies fall with the square of their rank (zeta distribution, alpha 2); the most frequent
    one is dots, and the next three are asked for."""
    count = max((tokens - 50) // 50, 4)
    coded: dict[str, None] = {"...": None}
    while len(coded) < count:
        coded["".join(rng.choice(list(string.ascii_lowercase), 6))] = None
    words = np.array(list(coded))
    rank = np.arange(1, count + 1)
    # From 200 on the last word that is asked for is more frequent than the next.
    times = ((200 + 8 * size) * rank**-2.0 / zeta(2.0)).astype(int)
    listed = np.repeat(words, times)
    rng.shuffle(listed)
    return Problem(
        FREQUENT_CONTEXT.format(context=" ".join(listed)),
        FREQUENT_QUESTION,
        tuple(map(str, words[1:4])),
        answer_tokens=50,
    )


OTHER_TASKS = {"vt": variables, "cwe": common_words, "fwe": frequent_words}
TASKS = (*NEEDLE_TASKS, *OTHER_TASKS)
