"""Files of a directory that a stranger may have made: regular ones, inside it, of a size that they can have."""

import json
import pathlib
from typing import Any

COMPLETE = ".complete"  # in a directory: where a saved model lies from when it is whole until it is in its place
MAX_TEXT_BYTES = 2**29  # of a JSON file or a template; the largest tokenizers have some 30 MB


def resolve_file(directory: pathlib.Path, name: object) -> pathlib.Path:
    """The path of a directory's file by its name.

    Raises:
        ValueError: for what is no plain name, no regular file (a pipe would never end), or a link out of the directory
            (but for the hub's cache, whose files are links to its own blobs).
        FileNotFoundError: where there is nothing.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or pathlib.PurePath(name).name != name:
        raise ValueError(f"{directory}: {name!r} is no name of a file in it")
    path = directory / name
    try:
        target = path.resolve(strict=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is not there") from None
    except (OSError, RuntimeError) as error:  # links in a circle, names that are too long
        raise ValueError(f"{path} cannot be read: {error}") from error
    home = directory.resolve()
    blobs = home.parent.parent / "blobs"
    if target.parent != home and not (target.parent == blobs and home.parent.name == "snapshots"):
        raise ValueError(f"{path} is a link out of the directory, to {target}: put the file itself there")
    if not target.is_file():
        raise ValueError(f"{path} is no regular file")
    return path


def weights_directory(directory: pathlib.Path) -> pathlib.Path:
    """Where the configuration and weights of a directory are: aside, if a save was stopped before it was done."""
    complete = directory / COMPLETE
    return complete if complete.is_dir() and not complete.is_symlink() else directory


def has_entry(directory: pathlib.Path, name: str) -> bool:
    """Whether a directory has something of this name, be it as it should or not."""
    path = directory / name
    return path.is_symlink() or path.exists()


def read_text(directory: pathlib.Path, name: str) -> str:
    """A file's text; raises as `inside`, and a ValueError for what is no UTF-8, or too long to be one."""
    path = resolve_file(directory, name)
    if (size := path.stat().st_size) > MAX_TEXT_BYTES:
        raise ValueError(f"{path} has {size} bytes; more than {MAX_TEXT_BYTES} are not read")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error


def read_json_object(directory: pathlib.Path, name: str) -> dict[str, Any]:
    """A JSON file's object; raises as `read_text`, and a ValueError for what is no object."""
    path, text = directory / name, read_text(directory, name)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values
