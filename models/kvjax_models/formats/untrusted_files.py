"""Reads files of directories from untrusted sources: only regular files inside the directory, of limited size."""

import json
import pathlib
from typing import Any

MAX_TEXT_BYTES = 2**29  # of a JSON file or a template; the largest tokenizers have about 30 MB


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
    try:
        target = path.resolve(strict=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    except (OSError, RuntimeError) as error:  # cyclic links, too long names
        raise ValueError(f"{path} cannot be read: {error}") from error
    home = directory.resolve()
    blobs = home.parent.parent / "blobs"
    if target.parent != home and not (target.parent == blobs and home.parent.name == "snapshots"):
        raise ValueError(f"{path} is a link to {target} outside the directory; copy the file into the directory")
    if not target.is_file():  # reading a pipe would never end
        raise ValueError(f"{path} is not a regular file")
    return path


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
    if (size := path.stat().st_size) > MAX_TEXT_BYTES:
        raise ValueError(f"{path} has {size} bytes; the maximum is {MAX_TEXT_BYTES}")
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
        ValueError: if the file does not contain a JSON object.
    """
    path, text = directory / name, read_text(directory, name)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(values).__name__}")
    return values
