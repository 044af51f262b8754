"""Parts of messages: shortened values, sizes, and suggestions for misspelled names."""

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

_MAX_LENGTH = 100  # characters of a value in a message

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = _MAX_LENGTH


def shorten(value: Any) -> str:
    """Returns the repr of a value, of which long texts, numbers and sequences are cut in the middle."""
    return _REPR.repr(value)


def did_you_mean(name: Any, names: Iterable[str]) -> str:
    """Returns a suggestion for a misspelled name.

    Args:
        name: the name as a user wrote it.

    Returns:
        "did you mean 'x'? ", or an empty text if no valid name is similar.
    """
    similar = difflib.get_close_matches(str(name)[:_MAX_LENGTH], list(names), n=1)
    return f"did you mean {similar[0]!r}? " if similar else ""


def unknown_policy(name: Any, names: Iterable[str]) -> str:
    """Describes an error: the name of a policy that is none of the valid names."""
    names = sorted(names)
    return f"policy {shorten(name)} is unknown; {did_you_mean(name, names)}choose one of {', '.join(names)}"


def describe_os_error(error: OSError) -> str:
    """Returns an error of the operating system as a sentence that begins with the file."""
    if error.filename is None or error.strerror is None:
        return str(error)
    if isinstance(error, FileNotFoundError):
        return f"{error.filename} does not exist"
    return f"{error.filename} cannot be used: {error.strerror}"


def format_bytes(count: float) -> str:
    """Formats bytes in binary units: 1536 is "1.5 KiB".

    Returns:
        The number with its unit: B, KiB, MiB or GiB.
    """
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
