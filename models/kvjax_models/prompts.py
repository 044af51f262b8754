"""Prompts: texts to continue, or conversations to answer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Prompt = str | Sequence[Message]  # a text to continue, or a conversation to answer
TemplateOptions = Mapping[str, Any] | None  # variables of the chat template


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
