"""LongEval's line retrieval: a record of named lines, each holding a number, and a question about one of them.

Prompt, word lists and answer parsing are those of LongEval (LongChat, lm-sys, https://github.com/DachengLi1/LongChat,
Apache-2.0), which draws its line names from the `wonderwords` package.
"""

import bisect
import dataclasses
import functools
import re
from collections.abc import Callable

import numpy as np
import wonderwords

from experiments.common.tasks.problem import problems

HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of "
    "a certain line index. Now the record start:\n\n"
)
LINE_START, LINE_MIDDLE, LINE_END = "line", ": REGISTER_CONTENT is <", ">\n"
QUESTION_START = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line"
QUESTION_END = "? I need the number."
LARGEST_NUMBER = 50_000

# A seed's documents are drawn as all problems are.
documents = problems

# Experiments add their own seed. Training's generators start from 0, so no document is drawn by both.
EVALUATION_SEED = 1_000_000
ANSWER_TOKENS = 8  # most that an answer has

# A line is more than four tokens of any tokenizer: "line", a name of two words, the phrase, a number, the end.
_FEWEST_TOKENS_PER_LINE = 4


@functools.cache
def adjectives() -> tuple[str, ...]:
    """The first words of line names: lowercase ascii, sorted."""
    return _plain_words("adjective")


@functools.cache
def nouns() -> tuple[str, ...]:
    """The second words of line names: lowercase ascii, sorted."""
    return _plain_words("noun")


def _plain_words(category: str) -> tuple[str, ...]:
    words = wonderwords.RandomWord().filter(include_categories=[category], regex="[a-z]+")
    return tuple(sorted(set(wonderwords.filter_profanity(words))))


@dataclasses.dataclass(frozen=True)
class Lines:
    """Lines as integers: indices into `adjectives()` and `nouns()`, and the numbers, each `[lines]`."""

    adjectives: np.ndarray
    nouns: np.ndarray
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)


@dataclasses.dataclass(frozen=True)
class Document:
    """A record of lines and the line asked for. The prompt is `context + question`."""

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    asked: int

    @property
    def context(self) -> str:
        lines = (
            f"{LINE_START} {name}{LINE_MIDDLE}{number}{LINE_END}"
            for name, number in zip(self.names, self.numbers, strict=True)
        )
        return HEADER + "".join(lines)

    @property
    def question(self) -> str:
        return f"{QUESTION_START} {self.names[self.asked]}{QUESTION_END}"

    @property
    def answer(self) -> int:
        return self.numbers[self.asked]

    @property
    def depth(self) -> float:
        """Where the asked line stands in the record: 0 for the first line, 1 for the last."""
        return self.asked / max(1, len(self.names) - 1)

    def ask(self, line: int) -> "Document":
        """The same record with a question about another line."""
        return dataclasses.replace(self, asked=line)

    def shortened(self, lines: int) -> "Document":
        """The record's first `lines` lines; the question must be about one of them."""
        return Document(self.names[:lines], self.numbers[:lines], self.asked)


def draw_lines(rng: np.random.Generator, lines: int) -> Lines:
    """Lines of different names (adjective and noun drawn independently) with numbers from 1 to 50,000."""
    names = rng.choice(len(adjectives()) * len(nouns()), size=lines, replace=False)
    numbers = rng.integers(1, LARGEST_NUMBER, size=lines, endpoint=True)
    return Lines(*np.divmod(names, len(nouns())), numbers)


def document(lines: Lines, asked: int) -> Document:
    """The text form of drawn lines."""
    names = (f"{adjectives()[a]}-{nouns()[n]}" for a, n in zip(lines.adjectives, lines.nouns, strict=True))
    return Document(tuple(names), tuple(lines.numbers.tolist()), asked)


def generate(rng: np.random.Generator, lines: int) -> Document:
    """A document of so many lines, asking for one of them."""
    return document(draw_lines(rng, lines), asked=int(rng.integers(lines)))


def generate_for_tokens(rng: np.random.Generator, token_length: Callable[[str], int], tokens: int) -> Document:
    """The shortest prefix of a drawn record whose prompt has at least `tokens` tokens, asking for one of its lines.

    Args:
        rng: decides the whole record, so the result does not depend on how the length is searched.
        token_length: number of tokens of a text, special tokens included where the prompt will have them.
        tokens: least number of tokens of `context + question`.
    """
    longest = document(draw_lines(rng, max(1, tokens // _FEWEST_TOKENS_PER_LINE)), asked=0)

    def prompt_tokens(lines: int) -> int:
        shortened = longest.shortened(lines)
        return token_length(shortened.context + shortened.question)

    lines = bisect.bisect_left(range(1, len(longest.names)), tokens, key=prompt_tokens) + 1
    # The question's name may be a token shorter or longer than the first line's, which the search assumed.
    asked = int(rng.integers(lines))
    while True:
        result = longest.shortened(lines).ask(asked)
        if token_length(result.context + result.question) >= tokens or lines == len(longest.names):
            return result
        lines += 1


def parse_answer(text: str) -> int | None:
    """The first run of digits of a model's output, as LongEval reads it; None where there is none."""
    digits = re.findall(r"\d+", text)
    return int(digits[0]) if digits else None
