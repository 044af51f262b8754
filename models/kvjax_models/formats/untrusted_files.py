"""Reads files of directories from untrusted sources: only regular files inside the directory, of limited size."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

MAX_TEXT_BYTES = 2**22  # of a JSON file or a template
# Files that are larger in some models: the largest tokenizers have about 35 MB.
_MAX_BYTES = {"tokenizer.json": 40 * 2**20, "tokenizer_config.json": 2**24, "model.safetensors.index.json": 2**25}
_MAX_MESSAGE = 1000  # characters of an error; values of files may have millions


def resolve_file(directory: pathlib.Path, name: object) -> pathlib.Path:
    """Returns the path of a regular file in a directory.

    Args:
        directory: the directory.
        name: name of the file, from an untrusted source.

    Raises:
        ValueError: if `name` is not a plain file name, or refers to something else than a regular file, or to a link
            that leaves the directory. Links to the blobs of the hub's cache are allowed.
        FileNotFoundError: if the file does not exist.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or pathlib.PurePath(name).name != name:
        raise ValueError(f"{directory}: {name!r} is not a file name")
    path = directory / name
    target, home = _resolve(path), directory.resolve()
    blobs = home.parent.parent / "blobs"
    if target.parent != home and not (target.parent == blobs and home.parent.name == "snapshots"):
        raise ValueError(f"{path} is a link to {target} outside the directory; copy the file into the directory")
    resolve_links(path)
    return path


def resolve_links(path: pathlib.Path) -> pathlib.Path:
    """Returns the regular file that a path refers to, also through links.

    Args:
        path: a path that the user chose.

    Raises:
        ValueError: if the path refers to something else than a regular file.
        FileNotFoundError: if the file does not exist.
    """
    target = _resolve(path)
    if not target.is_file():  # reading a pipe would never end
        raise ValueError(f"{path} is not a regular file")
    return target


def _resolve(path: pathlib.Path) -> pathlib.Path:
    """Returns the target of a path.

    Raises:
        ValueError: if the path cannot be resolved.
        FileNotFoundError: if the target does not exist.
    """
    try:
        return path.resolve(strict=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    except (OSError, RuntimeError) as error:  # cyclic links, too long names
        raise ValueError(f"{path} cannot be read: {error}") from error


def has_entry(directory: pathlib.Path, name: str) -> bool:
    """Returns whether a directory has an entry of this name, of any kind.

    Args:
        directory: the directory.
        name: name of the entry.
    """
    path = directory / name
    return path.is_symlink() or path.exists()


def read_text(directory: pathlib.Path, name: str) -> str:
    """Returns the content of a UTF-8 file; see `resolve_file` for further errors.

    Args:
        directory: the directory.
        name: name of the file.

    Raises:
        ValueError: if it is too large or not UTF-8.
    """
    path = resolve_file(directory, name)
    maximum = _MAX_BYTES.get(name, MAX_TEXT_BYTES)
    if (size := path.stat().st_size) > maximum:
        raise ValueError(f"{path} has {size} bytes; the maximum is {maximum}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def read_json_object(directory: pathlib.Path, name: str) -> dict[str, Any]:
    """Returns the object in a JSON file; see `read_text` for further errors.

    Args:
        directory: the directory.
        name: name of the file.

    Raises:
        ValueError: if the file does not contain a JSON object, or contains strings that are not Unicode.
    """
    return parse_json_object(directory / name, read_text(directory, name))


def parse_json_object(path: pathlib.Path, text: str) -> dict[str, Any]:
    """Returns the object in a JSON text.

    Args:
        path: file of the text, for errors.
        text: the text.

    Raises:
        ValueError: if it is not a JSON object, or contains strings that are not Unicode.
    """
    try:
        values = json.loads(text)
        if "\\ud" in text.lower():  # an escaped surrogate, which may lack its other half
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {shorten(error)}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(values).__name__}")
    return values


def shorten(message: object) -> str:
    """Returns a message about untrusted values, cut to a readable length."""
    text = str(message)
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}... ({len(text)} characters)"


def join_some(items: Sequence[str], separator: str = ", ", maximum: int = 20) -> str:
    """Joins the first items of a list.

    Args:
        items: the items.
        separator: text between them.
        maximum: number of items; further ones are counted.

    Returns:
        The text.
    """
    more = [f"{len(items) - maximum} more"] if len(items) > maximum else []
    return separator.join([*map(shorten, items[:maximum]), *more])
