"""Prompts: texts to continue, or conversations to answer."""

from collections.abc import Mapping, Sequence
from typing import TypeGuard

Message = Mapping[str, str]  # {"role": "user", "content": "..."}
Prompt = str | Sequence[Message]  # a text to continue, or a conversation to answer


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
