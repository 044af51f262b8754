"""Writes that prove themselves: whole or not at all, on the disk before they count, with digests to hold them against,
by one writer at a time."""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator

import filelock
import jax
import numpy as np
from jax.experimental import multihost_utils

from kvjax_models.devices import is_first_process

DIGESTS = "digests.json"
LOCK = ".lock"


def run_on_first_process(action: Callable[[], None]) -> None:
    """Runs an action in the first process of a run, while the others wait: where it fails, all of them do.

    Raises:
        OSError: in the other processes. In the first one, what the action raised.
    """
    error: Exception | None = None
    if is_first_process():
        try:
            action()
        except Exception as raised:
            error = raised
    if jax.distributed.is_initialized():
        failed = bool(multihost_utils.broadcast_one_to_all(np.asarray(error is not None)))
        if failed and error is None:
            raise OSError("the first process of the run could not do its part: see its error")
    if error is not None:
        raise error


def lock_directory(directory: pathlib.Path, name: str = LOCK) -> filelock.BaseFileLock:
    """The right to write to a directory (which is made), until it is released or the process ends, however it does.
    One process may claim it many times.

    Raises:
        OSError: where another process has it, or the directory cannot be written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory.resolve() / name
    lock = filelock.FileLock(path, is_singleton=True)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise OSError(
            f"another process is writing to {directory} (it holds {path.name}): wait for it, or give another directory"
        ) from None
    return lock


@contextlib.contextmanager
def atomic_replace(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path to write a file to, which takes the place of `path` when it is whole and on the disk. Where writing fails,
    what was there stays."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        fsync(partial)
        partial.replace(path)
        fsync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a text in UTF-8 in the place of what was there."""
    with atomic_replace(path) as partial:
        partial.write_text(text, encoding="utf-8")


def append_line(path: pathlib.Path, line: str) -> None:
    """Adds a line, which is on the disk when this returns; after one that was cut off, or that could not be written
    whole, it starts anew."""
    with path.open("a+b", buffering=0) as file:  # what does not fit must not be written later
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        data = (b"" if file.read(1) in (b"", b"\n") else b"\n") + line.encode() + b"\n"
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(file.fileno())
        except OSError:
            os.truncate(path, end)
            raise


def fsync(path: pathlib.Path) -> None:
    """Waits until a file, or a directory's list of names, is on the disk."""
    if path.is_dir() and os.name == "nt":  # where directories cannot be opened
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of_bytes(data: bytes) -> str:
    """SHA-256, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: pathlib.Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_digests(directory: pathlib.Path) -> None:
    """Writes the digests of all files of a directory into it, with everything on the disk when this returns."""
    found = {name: sha256_of_file(path) for name, path in _files(directory).items()}
    for path in directory.rglob("*"):
        fsync(path)
    # The digests have one, too: a flip there would blame a file that is whole.
    text = json.dumps(found, indent=1, sort_keys=True)
    write_text(directory / DIGESTS, json.dumps({"sha256": sha256_of_bytes(text.encode()), "files": text}) + "\n")


def find_damage(directory: pathlib.Path) -> str | None:
    """What is wrong with a sealed directory; None where every file is there as it was sealed, and no other."""
    try:
        held = json.loads((directory / DIGESTS).read_text(encoding="utf-8"))
        text = held["files"]
        if sha256_of_bytes(text.encode()) != held["sha256"]:
            return f"{DIGESTS} is damaged"
        expected = json.loads(text)
    except FileNotFoundError:
        return f"{DIGESTS} is not there"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{DIGESTS} is damaged"
    except OSError as error:
        return f"{DIGESTS} cannot be read: {error}"
    try:
        files = _files(directory)
        if absent := sorted(expected.keys() - files.keys()):
            return f"{absent[0]} is not there"
        if strange := sorted(files.keys() - expected.keys()):
            return f"{strange[0]} was not there when it was saved"
        for name, path in files.items():
            if sha256_of_file(path) != expected[name]:
                return f"{name} is damaged: its SHA-256 is not the one that it was saved with"
    except OSError as error:
        return f"a file cannot be read: {error}"
    return None


def _files(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    """All files below a directory by their path there, but for their digests."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_symlink() or not path.is_dir()]
    found = {path.relative_to(directory).as_posix(): path for path in paths}
    found.pop(DIGESTS, None)
    return found
