"""The tasks that a language model is trained on beside natural text: long texts with questions about them.

A text is asked about many times, so that much of what is read leads to an answer; the tasks as published, which ask
once, are what the trained model is measured on. Everything is drawn from the generator that is given, and from nothing
else.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from experiments.common.tasks import line_retrieval, ruler
from experiments.common.tasks.line_tokenizer import Conversation
from experiments.common.tasks.problem import Problem, longest_that_fits
from kvjax_models.tokenizer import Tokenizer

# Questions of a text, at most.
MOST_TURNS = 32
# What answers call the values of one key.
ORDINALS = ("first", "second", "third", "fourth")


@dataclasses.dataclass(frozen=True)
class Exercise:
    """A text, and questions about it with their answers."""

    context: str
    turns: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task to train on.

    Args:
        exercise: from a generator, how much text there is (of at least 1), and the tokens that it is made for.
        problem: the task as published, of at most so many tokens of the tokenizer.
        score: of an answer, from 0 to 1.
        fewest_tokens: what the shortest exercises take.
        share: how often it is trained on, against tasks of share 1.
    """

    exercise: Callable[[np.random.Generator, int, int], Exercise]
    problem: Callable[[np.random.Generator, Callable[[str], int], int], Problem]
    score: Callable[[str, Sequence[str]], float]
    fewest_tokens: int
    share: float = 1.0


def _lines(rng: np.random.Generator, size: int, tokens: int) -> Exercise:
    """A record of so many lines; every line may be asked for."""
    record = line_retrieval.generate(rng, size)
    asked = [record.ask(int(line)) for line in rng.permutation(size)]
    return Exercise(record.context, tuple((one.question, str(one.answer)) for one in asked))


def _line_problem(rng: np.random.Generator, token_length: Callable[[str], int], tokens: int) -> Problem:
    seed = int(rng.integers(2**63))

    def make(size: int) -> Problem:
        record = line_retrieval.generate(np.random.default_rng(seed), size)
        return Problem(record.context, record.question, (str(record.answer),), answer_tokens=8, depth=record.depth)

    return longest_that_fits(make, token_length, tokens, most=tokens)


def _line_score(prediction: str, answers: Sequence[str]) -> float:
    return float(str(line_retrieval.parse_answer(prediction)) in answers)


def _needles(task: str, rng: np.random.Generator, size: int, tokens: int) -> Exercise:
    """A needle task of RULER's with more keys than it has, up to a needle in 64 tokens; every key may be asked for."""
    settings = ruler.NEEDLE_TASKS[task]
    if settings.haystack == "needle":
        # All needles are alike: then all of them may be asked for.
        settings, size = dataclasses.replace(settings, keys=size), 0
    elif settings.values == 1:
        # Of several values of a key, which comes next is learnt where the key is the only one.
        fewest, most = max(settings.keys, settings.queries), min(len(ruler.DEPTHS), tokens // 64)
        settings = dataclasses.replace(settings, keys=int(rng.integers(fewest, max(fewest, most), endpoint=True)))
    hidden = ruler.hide(settings, rng, size)
    order = rng.permutation(len(hidden.keys))
    groups = [order[begin : begin + settings.queries] for begin in range(0, len(order), settings.queries)]
    asked = [group.tolist() for group in groups if len(group) == settings.queries]
    problems = [hidden.ask(group) for group in asked]
    answers = [_answer(hidden, group) for group in asked]
    return Exercise(problems[0].context, tuple(zip((one.question for one in problems), answers, strict=True)))


def _answer(hidden: ruler.Hidden, asked: Sequence[int]) -> str:
    """All values of the keys: " value", or where there are several " name: value, name: value, and name: value", of
    keys by the key, of values of one key by their number.

    What a value is looked up by then stands before it. Scores ask what an answer contains, whatever else it says.
    """
    names = [hidden.keys[number] for number in asked] if len(asked) > 1 else ORDINALS
    values = [value for number in asked for value in hidden.values[number]]
    if len(values) > 1:
        values = [f"{name}: {value}" for name, value in zip(names, values, strict=True)]
    return " " + ruler.listed(values)


_FEWEST_TOKENS = {"niah_single_3": 512, "niah_multikey_3": 512, "niah_multivalue": 512, "niah_multiquery": 512}
# What is learnt slowly.
_SHARES = {"niah_multikey_3": 3.0, "niah_multivalue": 4.0, "niah_multiquery": 2.0}

TASKS = {
    "line_retrieval": Task(_lines, _line_problem, _line_score, fewest_tokens=256),
    **{
        task: Task(
            functools.partial(_needles, task),
            functools.partial(ruler.generate, task),
            ruler.score,
            _FEWEST_TOKENS.get(task, 256),
            _SHARES.get(task, 1.0),
        )
        for task in ruler.NEEDLE_TASKS
    },
}


def most_answer_tokens(tokens: int) -> int:
    """Answer tokens of an exercise of so many tokens, at most."""
    return tokens // 4


def conversation(task: str, tokenizer: Tokenizer, rng: np.random.Generator, tokens: int) -> Conversation:
    """An exercise of a task that takes up to so many tokens: a text of at least half of them, and as many questions
    with answers as there is room for.

    Raises:
        ValueError: where not even one question fits.
    """
    seed = int(rng.integers(2**63))
    # Long texts with few questions, as the tasks are measured, and shorter ones with many.
    room = tokens - int(tokens * rng.uniform(0.0, 0.5))

    def make(size: int) -> tuple[Exercise, int]:
        made = TASKS[task].exercise(np.random.default_rng(seed), size, tokens)
        return made, len(tokenizer.encode(made.context)) + sum(map(len, _turn(tokenizer, made.turns[0])))

    # Length is nearly a line through two sizes; where it is not, sizes are tried downwards.
    small, large = 4, max(8, tokens // 32)
    (_, first), (_, second) = make(small), make(large)
    size = max(1, small + int((room - first) * (large - small) / (second - first)))
    while True:
        made, taken = make(size)
        if taken <= tokens or size == 1:
            return encode(tokenizer, made, tokens)
        size = min(size - 1, int(0.95 * size))


def encode(tokenizer: Tokenizer, exercise: Exercise, tokens: int) -> Conversation:
    """The text and as many turns as there is room for, each answer followed by the end of the text.

    Raises:
        ValueError: where not even one turn fits.
    """
    found = tokenizer.encode(exercise.context)
    is_answer = [False] * len(found)
    for number, turn in enumerate(exercise.turns[:MOST_TURNS]):
        asked, answered = _turn(tokenizer, turn)
        fits = len(found) + len(asked) + len(answered) <= tokens
        if not fits or sum(is_answer) + len(answered) > most_answer_tokens(tokens):
            if number == 0:
                taken = len(found) + len(asked) + len(answered)
                raise ValueError(f"tokens={tokens}; the text and one turn take {taken}, its answer {len(answered)}")
            break
        found += asked + answered
        is_answer += [False] * len(asked) + [True] * len(answered)
    return Conversation(np.array(found, np.int32), np.array(is_answer))


def _turn(tokenizer: Tokenizer, turn: tuple[str, str]) -> tuple[list[int], list[int]]:
    """The tokens of a question, and those of its answer with the end of the text."""
    question, answer = turn
    return tokenizer.encode(question, add_bos=False), [
        *tokenizer.encode(answer, add_bos=False),
        tokenizer.eos_ids[0],
    ]


def contexts(tasks: Sequence[str], seed: int, each: int = 20, size: int = 64) -> Iterator[str]:
    """Some texts of the tasks, to learn a tokenizer from."""
    rng = np.random.default_rng(seed)
    for task in tasks:
        for _ in range(each):
            yield TASKS[task].exercise(rng, size, 32 * size).context


def problem(task: str, tokenizer: Tokenizer, rng: np.random.Generator, tokens: int) -> Problem:
    """The task as published, of at most so many tokens with its answer."""
    return TASKS[task].problem(rng, lambda text: len(tokenizer.encode(text)), tokens)
