"""LongEval line retrieval through compressed caches: which policies still find the line, and at how many bytes.

    python -m experiments.line_retrieval --policy exact --policy clustergen --budget 25% --budget 50%

Policies that keep a part are compared at equal bytes held; those that keep everything and recall a part per query, at
equal bytes read per token, their bytes held beside.
Documents are fresh (no seed of training is used here). By default a cache is compressed before the question is seen:
the context is read exactly, compressed, and only then the question and the answer go through the compressed cache.
"""

import dataclasses
from typing import Any, ClassVar

from experiments.common import evaluating, suites, sweeping, tables
from experiments.common.options import LINES_CHECKPOINT, Experiment, each
from experiments.common.results import Row
from experiments.common.tasks import line_retrieval as task
from kvjax_models.formats.tokenizer import Tokenizer

NAME = "line_retrieval"


@dataclasses.dataclass(frozen=True)
class Options(sweeping.AtLengths):
    """Options of this experiment."""

    model: str = LINES_CHECKPOINT
    documents: int = 100  # per length
    policy: tuple[str, ...] = each(*suites.SUITES["lines"].policies)
    answer_tokens: int = task.ANSWER_TOKENS  # most tokens of an answer

    QUICK: ClassVar[dict[str, Any]] = {**sweeping.QUICK, "documents": 10, "context_tokens": (512,)}


def run(options: Options) -> list[Row]:
    """The rows of every length and setting."""
    sweep = sweeping.Sweep(NAME, options)

    def make(tokens: int) -> dict[str, evaluating.Task]:
        made = make_documents(sweep.tokenizer, tokens, options.documents, options.seed)
        return {NAME: evaluating.accuracy_task(NAME, sweep.tokenizer, made, is_right, options.answer_tokens)}

    title = f"Line retrieval: {options.documents} documents"
    return sweep.over_lengths(title, [NAME], make, answer_tokens=options.answer_tokens)


def make_documents(tokenizer: Tokenizer, context_tokens: int, count: int, seed: int) -> list[task.Document]:
    """Fresh documents whose prompts have at least so many tokens."""
    length = lambda text: len(tokenizer.encode(text))  # noqa: E731
    make = lambda rng: task.generate_for_tokens(rng, length, context_tokens)  # noqa: E731
    return list(task.documents(task.EVALUATION_SEED + seed, count, make))


def is_right(document: task.Document, answer: str) -> bool:
    return task.parse_answer(answer) == document.answer


EXPERIMENT = Experiment(NAME, Options, run, tables.plot)
if __name__ == "__main__":
    EXPERIMENT.main()
