"""Tasks by name, with documents of several seeds."""

import pathlib
from collections.abc import Sequence

from experiments.common import evaluating
from experiments.common.tasks import line_retrieval, ruler, ruler_questions
from experiments.common.tasks.problem import Problem, problems
from kvjax_models.formats.tokenizer import Tokenizer

LINES = "line_retrieval"


def make_task(
    name: str,
    tokenizer: Tokenizer,
    tokens: int,
    seeds: Sequence[int],
    documents: int,
    file: pathlib.Path | None = None,
) -> evaluating.Task:
    """A task's documents of all seeds; `file` is that of a task of RULER's that asks a data set's questions."""
    length = lambda text: len(tokenizer.encode(text))  # noqa: E731
    if name == LINES:
        make_lines = lambda rng: line_retrieval.generate_for_tokens(rng, length, tokens)  # noqa: E731
        lines = [
            line for seed in seeds for line in problems(line_retrieval.EVALUATION_SEED + seed, documents, make_lines)
        ]
        right = lambda line, answer: line_retrieval.parse_answer(answer) == line.answer  # noqa: E731
        return evaluating.accuracy_task(name, tokenizer, lines, right, line_retrieval.ANSWER_TOKENS)
    if file is None:
        make, score = (lambda rng: ruler.generate(name, rng, length, tokens)), ruler.score
    else:
        questions = ruler_questions.read(name, file)
        make = lambda rng: ruler_questions.generate(questions, rng, length, tokens)  # noqa: E731
        score = ruler_questions.score
    made: list[Problem] = [one for seed in seeds for one in problems(ruler.EVALUATION_SEED + seed, documents, make)]
    scored = lambda problem, answer: score(answer, problem.answers)  # noqa: E731
    return evaluating.accuracy_task(name, tokenizer, made, scored, made[0].answer_tokens)
