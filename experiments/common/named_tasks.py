"""Tasks by name, with documents of several seeds."""

from collections.abc import Sequence

from experiments.common import evaluating
from experiments.common.tasks import line_retrieval, ruler
from experiments.common.tasks.problem import Problem, problems
from kvjax_models.tokenizer import Tokenizer

LINES = "line_retrieval"


def make_task(name: str, tokenizer: Tokenizer, tokens: int, seeds: Sequence[int], documents: int) -> evaluating.Task:
    """A task's documents of all seeds."""
    length = lambda text: len(tokenizer.encode(text))  # noqa: E731
    if name == LINES:
        make_lines = lambda rng: line_retrieval.generate_for_tokens(rng, length, tokens)  # noqa: E731
        lines = [
            line for seed in seeds for line in problems(line_retrieval.EVALUATION_SEED + seed, documents, make_lines)
        ]
        right = lambda line, answer: line_retrieval.parse_answer(answer) == line.answer  # noqa: E731
        return evaluating.accuracy_task(name, tokenizer, lines, right, line_retrieval.ANSWER_TOKENS)
    make = lambda rng: ruler.generate(name, rng, length, tokens)  # noqa: E731
    made: list[Problem] = [one for seed in seeds for one in problems(ruler.EVALUATION_SEED + seed, documents, make)]
    scored = lambda problem, answer: ruler.score(answer, problem.answers)  # noqa: E731
    return evaluating.accuracy_task(name, tokenizer, made, scored, made[0].answer_tokens)
