"""Units of work of an evaluation: a text, and the questions about it."""

from collections.abc import Iterator
from typing import NamedTuple

from experiments.tasks.task import Document, Question, Task
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.prompts import render_context, render_question


class Item(NamedTuple):
    """A question of a unit.

    Attributes:
        number: index of the question in the document.
        question: the question.
        tokens: tokens after the text, with the start of the answer.
        choices: tokens of the choices of a multiple-choice question.
    """

    number: int
    question: Question
    tokens: list[int]
    choices: list[list[int]]


class Unit(NamedTuple):
    """A text that caches compress, and questions about it.

    Attributes:
        document: name of the document.
        text: tokens of the text; with a question seen, of the entire prompt.
        items: the questions.
    """

    document: str
    text: list[int]
    items: list[Item]


def encode(tokenizer: Tokenizer, document: Document, chat: bool) -> tuple[list[int], list[list[int]]]:
    """Converts a document and its questions to tokens, as `CachedModel.read` and `Document.encode` do.

    Args:
        tokenizer: tokenizer of the model.
        document: the document.
        chat: whether to use the chat template, if the model has one.

    Returns:
        The tokens of the context, and for every question the tokens after it, with the start of the answer.
    """
    if not (chat and tokenizer.chat_template):
        context = tokenizer.encode(tokenizer.escape(document.context))
        texts = [tokenizer.escape(question.text + question.prefix) for question in document.questions]
    else:
        messages = [{"role": "user", "content": document.context}]
        rendered = render_context(tokenizer, messages)
        context = tokenizer.encode_continuation(rendered, context=())
        texts = [
            render_question(tokenizer, messages, rendered, question.text, separator="") + question.prefix.lstrip()
            for question in document.questions
        ]
    return context, [tokenizer.encode_continuation(text, context) for text in texts]


def make_units(task: Task, tokenizer: Tokenizer, question_seen: bool, tokens: int) -> list[Unit]:
    """Splits the documents of a task into units: one per document, or per question if the text includes it.

    Args:
        task: the task.
        tokenizer: tokenizer of the model.
        question_seen: whether the question is part of the compressed text.
        tokens: length of the passages of a task without questions.

    Returns:
        The units.
    """
    if task.kind in ("continue", "stream"):
        return [_passage(task, tokenizer, document, tokens) for document in task.documents]
    return [unit for document in task.documents for unit in _units(task, tokenizer, document, question_seen)]


def _units(task: Task, tokenizer: Tokenizer, document: Document, question_seen: bool) -> Iterator[Unit]:
    """Yields the units of a document with questions."""
    context, questions = encode(tokenizer, document, task.chat)
    items = []
    for number, (question, after) in enumerate(zip(document.questions, questions, strict=True)):
        choices = question.choices if task.kind == "choose" else ()
        encoded = [tokenizer.encode_continuation(choice, context + after) for choice in choices]
        if question_seen:
            yield Unit(document.name, context + after, [Item(number, question, [], encoded)])
        items.append(Item(number, question, after, encoded))
    if not question_seen:
        yield Unit(document.name, context, items)


def _passage(task: Task, tokenizer: Tokenizer, document: Document, tokens: int) -> Unit:
    """Returns a passage of `tokens` tokens and its measured tokens."""
    ids = tokenizer.encode(document.context)[:tokens]
    if len(ids) < tokens:
        raise ValueError(f"document {document.name} of {task.name} has {len(ids)} tokens, fewer than tokens={tokens}")
    if task.kind == "continue" and task.answer_tokens < 2:
        raise ValueError(
            f"{task.name} measures {task.answer_tokens} tokens, but needs two: the exact prefill predicts the first"
        )
    position = tokens - task.answer_tokens if task.kind == "continue" else tokens
    if position < 1:
        raise ValueError(f"{task.name} measures {task.answer_tokens} tokens, more than tokens={tokens}")
    return Unit(document.name, ids[:position], [Item(0, Question("", ()), ids[position:], [])])
