"""Units of work of an evaluation: prompts that are processed together, and the questions about them."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from experiments.tasks.task import Document, Question, Task
from kvjax_models.compile_cache import length_bucket
from kvjax_models.formats.tokenizer import Tokenizer

_MARK = "\0"  # splits a rendered chat template


class Item(NamedTuple):
    """A question of a unit.

    Attributes:
        row: batch row of the prompt.
        document: name of the document.
        number: index of the question in the document.
        question: the question.
        tokens: tokens after the compressed prompt.
    """

    row: int
    document: str
    number: int
    question: Question
    tokens: list[int]


class Unit(NamedTuple):
    """Prompts that are processed together.

    Attributes:
        prompts: tokens of the compressed prompt of each row; rows after `num_prompts` repeat the last prompt.
        items: the questions.
    """

    prompts: list[list[int]]
    items: list[Item]

    def context(self, item: Item) -> list[int]:
        """Returns the tokens before the answer to a question."""
        return self.prompts[item.row] + item.tokens

    @property
    def bucket(self) -> range:
        """Prompt lengths that share compiled programs with this unit."""
        return length_bucket(max(map(len, self.prompts)))


def encode(tokenizer: Tokenizer, document: Document, question: Question, chat: bool) -> tuple[list[int], list[int]]:
    """Converts a prompt to tokens.

    Args:
        tokenizer: tokenizer of the model.
        document: the document.
        question: one of its questions.
        chat: whether to use the chat template, if the model has one.

    Returns:
        The tokens of the context, and the tokens after it.
    """
    context, [after] = encode_questions(tokenizer, document, [question], chat)
    return context, after


def encode_questions(
    tokenizer: Tokenizer, document: Document, questions: Sequence[Question], chat: bool
) -> tuple[list[int], list[list[int]]]:
    """Converts a document and questions about it to tokens; the chat template is rendered once.

    Args:
        tokenizer: tokenizer of the model.
        document: the document.
        questions: questions of the document.
        chat: whether to use the chat template, if the model has one.

    Returns:
        The tokens of the context, and for every question the tokens after it.
    """
    if not (chat and tokenizer.chat_template):
        context = tokenizer.encode(document.context)
        texts = [question.text + question.prefix for question in questions]
    else:
        rendered = tokenizer.render_chat([{"role": "user", "content": f"{document.context}{_MARK}"}])
        before, after = rendered.split(_MARK)
        context = tokenizer.encode_continuation(before, context=())
        texts = [question.text + after + question.prefix.lstrip() for question in questions]
    return context, [tokenizer.encode_continuation(text, context) for text in texts]


def make_units(task: Task, tokenizer: Tokenizer, question_seen: bool, batch: int, tokens: int) -> list[Unit]:
    """Splits the documents of a task into units.

    Args:
        task: the task.
        tokenizer: tokenizer of the model.
        question_seen: whether the question is part of the compressed prompt.
        batch: batch rows.
        tokens: length of the passages of a task without questions.

    Returns:
        The units. Units of prompts whose lengths share programs have equally many rows, at most `batch`; documents with
        several questions have one row if the question is not part of the compressed prompt.
    """
    if task.kind in ("continue", "stream"):
        rows = [_passage(task, tokenizer, document, tokens) for document in task.documents]
        return list(_batches(rows, batch))
    if not question_seen and any(len(document.questions) > 1 for document in task.documents):
        return [_document_unit(task, tokenizer, document) for document in task.documents]
    rows = []
    for document in task.documents:
        for number, question in enumerate(document.questions):
            context, after = encode(tokenizer, document, question, task.chat)
            prompt, rest = (context + after, []) if question_seen else (context, after)
            rows.append((prompt, Item(0, document.name, number, question, rest)))
    return list(_batches(rows, batch))


def _passage(task: Task, tokenizer: Tokenizer, document: Document, tokens: int) -> tuple[list[int], Item]:
    """Returns a passage of `tokens` tokens and its measured tokens."""
    ids = tokenizer.encode(document.context)[:tokens]
    if len(ids) < tokens:
        raise ValueError(f"document {document.name} of {task.name} has {len(ids)} tokens, fewer than tokens={tokens}")
    position = tokens - task.answer_tokens if task.kind == "continue" else 0
    if position < 0:
        raise ValueError(f"{task.name} measures {task.answer_tokens} tokens, more than tokens={tokens}")
    prompt = ids[:position] if position else ids
    return prompt, Item(0, document.name, 0, Question("", ()), ids[position:])


def _document_unit(task: Task, tokenizer: Tokenizer, document: Document) -> Unit:
    """Returns the unit of a document with several questions."""
    context, texts = encode_questions(tokenizer, document, document.questions, task.chat)
    items = [
        Item(0, document.name, number, question, after)
        for number, (question, after) in enumerate(zip(document.questions, texts, strict=True))
    ]
    return Unit([context], items)


def _batches(rows: Sequence[tuple[list[int], Item]], batch: int) -> Iterator[Unit]:
    """Yields units of rows whose lengths share programs; the last unit of a length repeats its last row."""
    by_bucket: dict[int, list[tuple[list[int], Item]]] = {}
    for prompt, item in rows:
        by_bucket.setdefault(length_bucket(len(prompt))[-1], []).append((prompt, item))
    for _, of_bucket in sorted(by_bucket.items()):
        for first in range(0, len(of_bucket), batch):
            part = of_bucket[first : first + batch]
            prompts = [prompt for prompt, _ in part]
            prompts += [prompts[-1]] * (min(batch, len(of_bucket)) - len(prompts))
            yield Unit(prompts, [item._replace(row=row) for row, (_, item) in enumerate(part)])


def batched(items: Sequence[Item], batch: int) -> Iterator[list[Item]]:
    """Yields lists of at most `batch` items."""
    for first in range(0, len(items), batch):
        yield list(itertools.islice(items, first, first + batch))
