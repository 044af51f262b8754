"""Documents with questions, and the tasks that consist of them."""

import bisect
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeVar

import numpy as np

from kvjax_models.formats.tokenizer import Tokenizer

T = TypeVar("T")

Kind = Literal["generate", "choose", "continue", "stream", "trace"]


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about a document.

    Attributes:
        text: text of the prompt after the context.
        answers: correct answers; for a multiple-choice question the index of the correct choice.
        prefix: beginning of the answer, which the prompt contains.
        choices: continuations of a multiple-choice question, or classes that the score needs.
    """

    text: str
    answers: tuple[str, ...]
    prefix: str = ""
    choices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Document:
    """A text and questions about it. A prompt is `context + question.text + question.prefix`.

    Attributes:
        context: the text that a cache compresses.
        questions: the questions.
        name: unique name within the task.
    """

    context: str
    questions: tuple[Question, ...] = ()
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Task:
    """Documents and the measurement of a model on them.

    Attributes:
        documents: the documents.
        kind: "generate" scores generated answers; "choose" compares the likelihoods of choices; "continue" measures the
            likelihood of the last tokens after exact prefill; "stream" measures the likelihood of all tokens, each
            computed from the compressed cache; "trace" compares next-token distributions with the full cache's.
        score: score of an answer from 0 to 1; only for "generate".
        answer_tokens: maximum number of generated tokens, or the number of measured ones.
        chat: whether instruction-tuned models get the prompt in their chat template.
        stop: text that ends an answer.
        name: name with argument, as on the command line.
    """

    documents: tuple[Document, ...]
    kind: Kind = "generate"
    score: Callable[[str, Question], float] | None = None
    answer_tokens: int = 0
    chat: bool = True
    stop: str | None = None
    name: str = ""

    def score_answer(self, answer: str, question: Question) -> tuple[float, str]:
        """Returns the score of a generated answer, and the answer up to `stop`."""
        assert self.score is not None
        if self.stop is not None:
            answer = answer.strip().partition(self.stop)[0]
        return float(self.score(answer, question)), answer


@dataclasses.dataclass(frozen=True)
class Request:
    """The documents that a run needs.

    Attributes:
        tokenizer: tokenizer of the model.
        tokens: maximum number of tokens of a prompt and its answer, without the chat template.
        documents: number of documents.
        seed: seed of the documents.
        data_dir: directory of downloaded files (`data_files`).
        truncate: whether longer documents are cut in the middle; otherwise they are left out.
    """

    tokenizer: Tokenizer
    tokens: int = 2048
    documents: int = 10
    seed: int = 0
    data_dir: pathlib.Path | None = None
    truncate: bool = False

    def num_tokens(self, text: str) -> int:
        """Returns the number of tokens of a text."""
        return len(self.tokenizer.encode(text))

    def generate(self, make: Callable[[np.random.Generator, int], Document]) -> tuple[Document, ...]:
        """Generates documents; each depends on the seed and its index only."""
        return tuple(
            dataclasses.replace(make(np.random.default_rng([self.seed, index]), index), name=f"{self.seed}-{index}")
            for index in range(self.documents)
        )

    def select(self, documents: Sequence[T]) -> list[T]:
        """Returns a random selection in random order; if there are too few documents, all of them."""
        order = np.random.default_rng(self.seed).permutation(len(documents))
        return [documents[index] for index in order[: self.documents]]


def length_with_answer(request: Request, document: Document, answer_tokens: int) -> int:
    """Returns the number of tokens of the longest prompt of a document, with the answer."""
    longest = max((request.num_tokens(one.text + one.prefix) for one in document.questions), default=0)
    return request.num_tokens(document.context) + longest + answer_tokens


def longest_that_fits(
    make: Callable[[int], Document], request: Request, answer_tokens: int, largest: int | None = None
) -> Document:
    """Returns the largest document whose prompts fit in `request.tokens`.

    Args:
        make: makes a document of a size; the size determines only the length of the text.
        request: the maximum number of tokens.
        answer_tokens: tokens that answers need.
        largest: the largest size; by default the number of tokens.

    Returns:
        The document.

    Raises:
        ValueError: if the smallest document is too long.
    """
    sizes = range(1, (largest or request.tokens) + 1)
    count = bisect.bisect_right(
        sizes, request.tokens, key=lambda size: length_with_answer(request, make(size), answer_tokens)
    )
    if not count:
        shortest = length_with_answer(request, make(1), answer_tokens)
        raise ValueError(f"tokens={request.tokens} is too small; the shortest document takes {shortest}")
    return make(count)


def fit_documents(documents: Iterable[Document], request: Request, answer_tokens: int) -> tuple[Document, ...]:
    """Selects documents whose prompts fit in `request.tokens`; cuts longer ones in the middle if requested.

    Args:
        documents: the documents.
        request: number of documents and tokens.
        answer_tokens: tokens that answers need.

    Returns:
        The documents.

    Raises:
        ValueError: if no document fits.
    """
    fitting = list(_fitting(documents, request, answer_tokens))
    if not fitting:
        raise ValueError(f"no document fits in tokens={request.tokens}; pass more tokens or truncate=True")
    return tuple(request.select(fitting))


def _fitting(documents: Iterable[Document], request: Request, answer_tokens: int) -> Iterator[Document]:
    """Yields the documents that fit, cut if requested."""
    for document in documents:
        length = length_with_answer(request, document, answer_tokens)
        if length <= request.tokens:
            yield document
            continue
        remaining = request.num_tokens(document.context) - (length - request.tokens)
        if request.truncate and remaining > 1:  # half of them from the beginning
            yield dataclasses.replace(document, context=cut_middle(request.tokenizer, document.context, remaining))


def cut_middle(tokenizer: Tokenizer, text: str, tokens: int) -> str:
    """Removes the middle of a text so that about `tokens` tokens remain."""
    ids = tokenizer.encode_continuation(text, context=())
    if len(ids) <= tokens:
        return text
    half = max(tokens // 2, 1)
    return tokenizer.decode(ids[:half]) + tokenizer.decode_continuation(ids[-half:], ids[:-half])


def contains(answer: str, question: Question) -> float:
    """Returns 1 if the answer contains a correct one, regardless of case (RULER's `string_match_part`)."""
    return float(any(correct.lower() in answer.lower() for correct in question.answers))


def share_contained(answer: str, question: Question) -> float:
    """Returns the share of the correct answers that the answer contains (RULER's `string_match_all`)."""
    return sum(correct.lower() in answer.lower() for correct in question.answers) / len(question.answers)
