"""What every task that asks about a long text has in common."""

import bisect
import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A text, a question about it, and what a right answer says. The prompt is `context + question`."""

    context: str  # what a cache holds and compresses before the question is seen
    question: str  # with the beginning of the answer, where the task gives one
    answers: tuple[str, ...]
    answer_tokens: int  # most tokens of an answer
    depth: float | None = None  # where in the context the answer stands, from 0 to 1, if it stands in one place

    @property
    def prompt(self) -> str:
        return self.context + self.question


def longest_that_fits(
    make: Callable[[int], Problem], token_length: Callable[[str], int], tokens: int, most: int
) -> Problem:
    """The problem of the largest size whose prompt and answer take at most `tokens` tokens.

    Args:
        make: a problem of a size of at least 1, which decides nothing but how much text there is.
        most: the largest size.

    Raises:
        ValueError: where even the smallest is too long.
    """

    def total(size: int) -> int:
        problem = make(size)
        return token_length(problem.prompt) + problem.answer_tokens

    fitting = bisect.bisect_right(range(1, most + 1), tokens, key=total)
    if not fitting:
        raise ValueError(f"tokens={tokens}; the shortest problem takes {total(1)}")
    return make(fitting)


def problems(seed: int, count: int, make: Callable[[np.random.Generator], T]) -> Iterator[T]:
    """Problems or documents of one seed, each from a generator of its own: the n-th does not depend on how many are
    made."""
    for index in range(count):
        yield make(np.random.default_rng([seed, index]))
