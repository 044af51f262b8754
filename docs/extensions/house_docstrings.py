"""Docstrings of the house, which are plain text, as reStructuredText: code between single backticks, blocks indented by
four behind a paragraph, norms written |v| and names such as *N."""

import re
from typing import Any

from sphinx.application import Sphinx

_SHAPE = re.compile(r"(?:jaxlib\._jax\.|jax\.)?Array, '([^']*)'")
_CODE = re.compile(r"(`[^`]*`)")
_SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")


def as_rest(lines: list[str]) -> list[str]:
    """The lines of a docstring, without indentation of their own."""
    out: list[str] = []
    in_code = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not in_code and out and not out[-1].strip() and not _in_section(out):
            out += ["::", ""]
            in_code = True
        elif line.strip() and not indented:
            in_code = False
        out.append(line if in_code else _escaped(line))
    return out


def _in_section(before: list[str]) -> bool:
    """Whether the last line that is not indented heads a section of arguments."""
    return next((line.strip() in _SECTIONS for line in reversed(before) if line and not line.startswith(" ")), False)


def _escaped(line: str) -> str:
    parts = _CODE.split(line)  # text, code, text, ...
    text = [re.sub(r"([|*]|(?<=\w)_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    # Behind code a letter needs a separator: `Segment`s.
    text[1:] = [re.sub(r"^(?=\w)", lambda _: "\\ ", part) for part in text[1:]]
    return "".join(part for pair in zip(text, [*parts[1::2], ""], strict=True) for part in pair)


def _on_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = as_rest(lines)


def _on_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Shapes as they are written: Float[Array, "B T H_kv D"]."""
    return tuple(text and _SHAPE.sub(r'Array, "\1"', text) for text in (signature, returns))  # type: ignore[return-value]


def _on_member(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out what nobody described: fields of named tuples, and classes whose docstring dataclasses made up."""
    said = getattr(obj, "__doc__", None) or ""
    made_up = isinstance(obj, type) and said.startswith(f"{obj.__name__}(")
    return True if made_up or said.startswith("Alias for field number") else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _on_docstring, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", _on_signature)
    app.connect("autodoc-skip-member", _on_member)
    return {"parallel_read_safe": True}
