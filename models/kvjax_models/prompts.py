"""Prompts: texts to continue, or conversations to answer."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from kvjax_models.formats.tokenizer import Tokenizer

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Prompt = str | Sequence[Message]  # a text to continue, or a conversation to answer
TemplateOptions = Mapping[str, Any] | None  # variables of the chat template

_MAX_FILE_NAME = 4096  # characters


def is_prompt(value: object) -> TypeGuard[Prompt]:
    """Returns whether a value is a text or a list of messages."""
    if not isinstance(value, list | tuple):
        return isinstance(value, str)
    return bool(value) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message
        for message in value
    )


def check_prompt(value: object) -> None:
    """Checks the type of a prompt.

    Raises:
        TypeError: if it is neither a text nor a list of messages.
    """
    if not is_prompt(value):
        raise TypeError(
            f"a prompt must be a text or a list of messages with role and content, got {type(value).__name__}"
        )


def as_prompts(prompts: Any) -> Iterable[Prompt]:
    """Returns the prompts of an argument for several of them.

    Raises:
        TypeError: if it is a single prompt, or no iterable.
    """
    if is_prompt(prompts) or isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(
            f"prompts must be a list of texts or conversations, got {type(prompts).__name__}; pass [prompt]"
        )
    return prompts


def warn_of_file_name(prompt: object) -> None:
    """Warns about a text that is the name of an existing file, whose content was probably meant.

    Args:
        prompt: a prompt; conversations and lists are not searched.
    """
    if isinstance(prompt, str) and 0 < len(prompt) <= _MAX_FILE_NAME and os.path.isfile(prompt):
        warnings.warn(
            f"the text {prompt!r} is the name of a file, which is not read; for its content, pass "
            f"pathlib.Path({prompt!r}).read_text(), or --prompt_file on the command line",
            stacklevel=4,  # the caller of a decorated method
        )


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, template_options: TemplateOptions = None) -> list[int]:
    """Converts a prompt to tokens.

    Args:
        prompt: a text, which gets a BOS token if the model uses one, or a conversation, which is written in the
            model's chat template.
        template_options: variables of the chat template.

    Returns:
        Token ids.

    Raises:
        TypeError: if the prompt is neither a text nor a list of messages.
        ValueError: if there are `template_options` and the prompt is a text.
    """
    check_prompt(prompt)
    if not isinstance(prompt, str):
        return tokenizer.encode_chat(prompt, template_options=template_options)
    if template_options:
        raise ValueError(f"template_options={template_options!r} apply to conversations only; pass a list of messages")
    return tokenizer.encode(tokenizer.escape(prompt))


def is_tokens(value: object) -> TypeGuard[Sequence[int]]:
    """Returns whether a value is a list of token ids."""
    return isinstance(value, list | tuple | np.ndarray) and all(isinstance(one, int | np.integer) for one in value)


# Marks the end of a text in a rendered chat template; printable, so that templates neither trim nor escape it.
_END_OF_TEXT = "KVJAX9END2OF7TEXT"


def render_context(tokenizer: Tokenizer, messages: Sequence[Message], options: TemplateOptions = None) -> str:
    """Renders a conversation up to the place where the user's next text begins.

    Args:
        messages: the conversation; a question continues its last message if that is the user's.
        options: variables of the chat template.

    Returns:
        The start of the rendered text, which does not depend on the question.

    Raises:
        ValueError: if the model has no chat template, or the template cannot be split there.
    """
    rendered = tokenizer.render_chat(_with_question(messages, _END_OF_TEXT), template_options=options)
    if rendered.count(_END_OF_TEXT) != 1:
        raise ValueError(
            "the chat template cannot be split after the text: it does not write the content of a message once and "
            "unchanged; read the text with chat=False"
        )
    return rendered.partition(_END_OF_TEXT)[0]


def render_question(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    context: str,
    question: Prompt,
    separator: str = "\n\n",
    options: TemplateOptions = None,
) -> str:
    """Renders what follows `render_context`: the question, and the start of the assistant's answer.

    Args:
        context: what `render_context` returned for it.
        question: a text, or messages that start with the user's.
        separator: text between the last message and the question, if the question continues that message.
        options: variables of the chat template.

    Returns:
        The end of the rendered text.

    Raises:
        ValueError: if the first message is not the user's, or the template renders the conversation differently
            before different questions.
        TypeError: if the content of a message that the question continues, or of its first one, is not a text.
    """
    turns: list[Message] = [{"role": "user", "content": question}] if isinstance(question, str) else [*question]
    if turns[0]["role"] != "user":
        raise ValueError(f"the first message of a question has role={turns[0]['role']!r}; it must be the user's")
    text = _text(turns[0])
    if messages and messages[-1]["role"] == "user":
        text = separator + text
    rendered = tokenizer.render_chat([*_with_question(messages, text), *turns[1:]], template_options=options)
    if not rendered.startswith(context):
        raise ValueError(
            "the chat template cannot be split after the text: it renders the conversation differently before "
            "different questions, for example the system message; read the text with chat=False"
        )
    return rendered[len(context) :]


def _with_question(messages: Sequence[Message], text: str) -> list[Message]:
    """Returns a conversation with a text of the user at its end, which continues a last message of the user."""
    if messages and messages[-1]["role"] == "user":
        return [*messages[:-1], {**messages[-1], "content": _text(messages[-1]) + text}]
    return [*messages, {"role": "user", "content": text}]


def _text(message: Message) -> str:
    """Returns the content of a message, which must be a text where a question begins."""
    content = message["content"]
    if not isinstance(content, str):
        raise TypeError(
            f"the content of a message at which a question begins must be a text, got {type(content).__name__}"
        )
    return content
