"""One needle in a haystack, at a given depth: the tests that the papers run, and RULER's form of them.

- `kamradt`: Greg Kamradt's needle and question in the template of Fu et al. 2024 for models without a chat template,
  which BalanceKV follows and Chelsea names; scored by Fu et al. as the share of the answer's words that are named (one
  word comes twice and counts once, so that 11/12 is the best).
- `minference`: numbers of cities, as MInference (whose baselines BalanceKV runs) asks for them; right or wrong.
- `ruler`: RULER's `niah_single_2`, a number of a drawn name among essays; right or wrong.

Prompts are data/needles.json, with sources and licences. Where they take essays by Paul Graham or books, `prose` stands
in.
"""

import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.common.tasks import prose, ruler
from experiments.common.tasks.problem import Problem, longest_that_fits

DATA = pathlib.Path(__file__).parent / "data" / "needles.json"
RULER = "ruler"


@functools.cache
def published() -> Mapping[str, Mapping[str, Any]]:
    """The prompts of the data file by name."""
    return json.loads(DATA.read_text(encoding="utf-8"))


@functools.cache
def names() -> tuple[str, ...]:
    """All kinds of needle."""
    return (*published(), RULER)


def generate(
    kind: str, rng: np.random.Generator, token_length: Callable[[str], int], tokens: int, depth: float
) -> Problem:
    """A problem whose prompt and answer take at most `tokens` tokens, as many as fit.

    Args:
        kind: one of `names()`.
        depth: where the needle stands, from 0 to 1.

    Raises:
        ValueError: for an unknown kind, a depth outside [0, 1], or too few tokens.
    """
    if kind not in names():
        raise ValueError(f"needle {kind!r} is not known; known: {', '.join(names())}")
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth} must lie in [0, 1]")
    if kind == RULER:
        return ruler.generate("niah_single_2", rng, token_length, tokens, depth=depth)
    given = published()[kind]
    words = prose.words(rng)
    drawn = {"number": rng.integers(10**6, 10**7)} | ({"city": rng.choice(given["cities"])} if given["cities"] else {})
    before, behind = given["prompt"].format(context="{context}", question=given["question"]).split("{context}")

    def make(size: int) -> Problem:
        repeated = -(-size // len(words)) * words
        return Problem(
            context=before + inserted(" ".join(repeated[:size]), given["needle"].format(**drawn), depth),
            question=behind.format(**drawn),
            answers=(given["answer"].format(**drawn),),
            answer_tokens=given["answer_tokens"],
            depth=depth,
        )

    return longest_that_fits(make, token_length, tokens, most=tokens)


def inserted(text: str, needle: str, depth: float) -> str:
    """The needle in the text at the last end of a sentence before this depth, as Kamradt's test places it (in
    characters here, tokens there); at the very end for depth 1."""
    place = len(text) if depth == 1 else text.rfind(".", 0, int(depth * len(text))) + 1
    return text[:place] + needle + text[place:]


def score(kind: str, problem: Problem, answer: str) -> float:
    """How right an answer is, from 0 to 1, as published for this kind of needle."""
    if kind == RULER:
        return ruler.score(answer, problem.answers)
    [right] = problem.answers
    if published()[kind]["score"] == "contains":
        return float(right in answer)
    words = right.lower().split()
    return len(set(words) & set(answer.lower().split())) / len(words)
