"""Escapes docstrings, which are plain text with `code` in single backticks, for reStructuredText.

Napoleon converts their sections. This extension escapes the characters that reStructuredText treats as markup (|v|, *N,
x_), separates code from letters that follow it (`Segment`s), and marks indented paragraphs as literal blocks.
"""

import re
from typing import Any

from sphinx.application import Sphinx

_SHAPE = re.compile(r"(?:jaxlib\._jax\.|jax\.)?Array, '([^']*)'")
_CODE = re.compile(r"(`[^`]*`)")
_SECTION = re.compile(r"(Args|Attributes|Example|Raises|Reference|Returns|Yields):$")


def escape(lines: list[str]) -> list[str]:
    """Returns the lines of a docstring as reStructuredText, before napoleon converts its sections."""
    # Code in single backticks may continue on the next line.
    parts = _CODE.split("\n".join(lines))  # text, code, text, ...
    text = [re.sub(r"([|*]|(?<=\w)_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    text[1:] = [re.sub(r"^(?=\w)", lambda _: "\\ ", part) for part in text[1:]]
    code = [re.sub(r"\s*\n\s*", " ", part) for part in parts[1::2]]
    escaped = "".join(part for pair in zip(text, [*code, ""], strict=True) for part in pair).split("\n")
    return _mark_literal_blocks(escaped)


def _mark_literal_blocks(lines: list[str]) -> list[str]:
    """Inserts "::" before indented paragraphs outside sections."""
    marked: list[str] = []
    in_block = in_section = False
    for line in lines:
        if line and not line.startswith(" "):
            in_block, in_section = False, bool(_SECTION.match(line)) or (in_section and marked[-1:] != [""])
        elif line.startswith("    ") and not in_block and not in_section and marked and not marked[-1].strip():
            marked += ["::", ""]
            in_block = True
        marked.append(line.replace("\\|", "|").replace("\\*", "*").replace("\\_", "_") if in_block else line)
    return marked


def _process_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = escape(lines)


def _process_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, ...]:
    """Writes shapes as in the source: Float[Array, "B T H_kv D"]."""
    return tuple(text and _SHAPE.sub(r'Array, "\1"', text) for text in (signature, returns))


def _skip_member(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Skips fields of named tuples and classes whose docstring was generated."""
    doc = getattr(obj, "__doc__", None) or ""
    generated = isinstance(obj, type) and doc.startswith(f"{obj.__name__}(")
    return True if generated or doc.startswith("Alias for field number") else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the functions of this module to autodoc's events.

    Args:
        app: the Sphinx application.

    Returns:
        The properties of the extension.
    """
    app.connect("autodoc-process-docstring", _process_docstring, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", _process_signature)
    app.connect("autodoc-skip-member", _skip_member)
    return {"parallel_read_safe": True}
