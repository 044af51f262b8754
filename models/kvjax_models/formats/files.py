"""Reads small files of a model's directory; errors name the file."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

_MAX_MESSAGE = 1000  # characters of an error; values of a wrong file may have millions


def read_text(path: pathlib.Path) -> str:
    """Returns the content of a UTF-8 file.

    Raises:
        ValueError: if it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
        ValueError: if the file does not contain a JSON object.
    """
    try:
        values = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(values).__name__}")
    return values


def shorten(message: object) -> str:
    """Returns a message about the values of a file, cut to a readable length."""
    text = str(message)
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}... ({len(text)} characters)"


def join_some(items: Sequence[str], separator: str = ", ", maximum: int = 20) -> str:
    """Joins the first items of a list.

    Args:
        separator: text between them.
        maximum: number of items; further ones are counted.

    Returns:
        The text.
    """
    more = [f"{len(items) - maximum} more"] if len(items) > maximum else []
    return separator.join([*items[:maximum], *more])
