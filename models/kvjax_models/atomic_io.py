"""Atomic file writes and locks: a file is either complete and on disk, or unchanged."""

import contextlib
import errno
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator

import filelock
import jax
import numpy as np
from jax.experimental import multihost_utils

from kvjax_models.devices import is_first_process

LOCK = ".lock"


def run_on_first_process(action: Callable[[], None]) -> None:
    """Runs an action on the first process of a run while the other processes wait.

    Raises:
        OSError: on the other processes, if the action failed on the first one, which raises the original error.
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
            raise OSError("an operation failed on the first process of the run; see that process's error")
    if error is not None:
        raise error


def lock_directory(directory: pathlib.Path, name: str = LOCK) -> filelock.BaseFileLock:
    """Acquires the right to write to a directory, until it is released or the process ends.

    The directory is created if it does not exist. A process may acquire the same lock several times.

    Args:
        name: name of the lock file in it.

    Returns:
        The acquired lock.

    Raises:
        OSError: if another process holds the lock or the directory is not writable.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory.resolve() / name
    lock = filelock.FileLock(path, is_singleton=True)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise OSError(
            f"another process is writing to {directory} (it holds {path.name}); wait for it or use another directory"
        ) from None
    return lock


@contextlib.contextmanager
def atomic_replace(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path whose file replaces `path` once it is complete and on disk.

    If the body raises, `path` keeps its content.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        fsync(partial)
        partial.replace(path)
        fsync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a UTF-8 text file atomically.

    Args:
        path: the file, which is replaced if it exists.
    """
    with atomic_replace(path) as partial:
        partial.write_text(text, encoding="utf-8")


def append_line(path: pathlib.Path, line: str) -> None:
    """Appends a line that is on disk when this returns.

    A truncated last line is terminated first. If the line cannot be written completely, the file is restored.

    Args:
        path: the file, which is created if it does not exist.
        line: the line, without a line break.

    Raises:
        OSError: if the line cannot be written.
    """
    with path.open("a+b", buffering=0) as file:  # a buffer could write the remaining bytes after an error
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
    """Waits until a file, or the list of names of a directory, is on disk.

    Args:
        path: the file or directory. Directories are skipped on Windows, which cannot open them.
    """
    if path.is_dir() and os.name == "nt":  # Windows cannot open directories
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of_bytes(data: bytes) -> str:
    """Returns the SHA-256 digest of bytes in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: pathlib.Path) -> str:
    """Returns the SHA-256 digest of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
