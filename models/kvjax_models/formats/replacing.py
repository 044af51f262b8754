"""Replaces the files of a model in a directory as one, although a file system can only replace single files.

While files are replaced, the subdirectory `PREVIOUS` holds the previous ones with a record: the inode number of the
subdirectory, and size and modification time of every file before and after. The record is valid as long as each visible
file is one of the two, in the directory in which it was written. A copy or download has other inode numbers, and a file
that is put there later has another time: the subdirectory is then ignored.
"""

import contextlib
import json
import os
import pathlib
import shutil

from kvjax_models import atomic_io
from kvjax_models.formats import untrusted_files

PREVIOUS = ".previous"
CONFIG_FILE, SINGLE_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
_FILES = (CONFIG_FILE, SINGLE_FILE, INDEX_FILE, "model-*-of-*.safetensors")
_RECORD = "record.json"


def weights_directory(directory: pathlib.Path) -> pathlib.Path:
    """Returns where configuration and weights are: in `PREVIOUS` if a save was interrupted while it replaced them."""
    previous = directory / PREVIOUS
    return directory if _recorded_names(directory, previous) is None else previous


def replace_files(directory: pathlib.Path, new: pathlib.Path) -> None:
    """Replaces the model in a directory by all files of a subdirectory of it.

    If this fails or is interrupted at any point, the previous model stays the one that `weights_directory` finds.

    Args:
        directory: the directory.
        new: subdirectory with the new files, which are on disk. They are moved.

    Raises:
        OSError: if a file cannot be replaced.
    """
    partial = directory / f"{PREVIOUS}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        previous, files = _record_files(directory, new, partial), {path.name: path for path in new.iterdir()}
        partial.rename(directory / PREVIOUS)
        atomic_io.fsync(directory)
        # The single file would hide new shards; previous shards would be orphans.
        for name in sorted(previous - files.keys()):
            (directory / name).unlink()
        for name, path in sorted(files.items()):
            path.replace(directory / name)
        _remove(directory / PREVIOUS)
    except OSError:
        with contextlib.suppress(OSError):
            restore_files(directory)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _record_files(directory: pathlib.Path, new: pathlib.Path, partial: pathlib.Path) -> set[str]:
    """Writes the previous files and the record to a new subdirectory; returns the names of the previous files."""
    partial.mkdir()
    previous = {path.name for pattern in _FILES for path in directory.glob(pattern) if path.exists()}
    for name in sorted(previous):
        _link(directory / name, partial / name)
    names = {SINGLE_FILE, INDEX_FILE, *previous, *(path.name for path in new.iterdir())}
    states = {name: [_file_state(directory / name), _file_state(new / name)] for name in sorted(names)}
    record = {"inode": partial.stat().st_ino, "files": states}
    atomic_io.write_text(partial / _RECORD, json.dumps(record) + "\n")
    return previous


def _link(path: pathlib.Path, target: pathlib.Path) -> None:
    """Creates a hard link, or a copy with the same times if the file system has no links."""
    try:
        os.link(path.resolve(), target)
    except OSError:
        shutil.copy2(path, target)
        atomic_io.fsync(target)


def restore_files(directory: pathlib.Path) -> None:
    """Restores the model that an interrupted save was replacing, and removes `PREVIOUS`; restartable at any point."""
    previous = directory / PREVIOUS
    names = _recorded_names(directory, previous)
    for name in names or ():
        if not (previous / name).exists():
            (directory / name).unlink(missing_ok=True)
            continue
        with atomic_io.atomic_replace(directory / name) as partial:
            _link(previous / name, partial)
    if previous.is_symlink():
        previous.unlink()
    elif previous.exists():
        _remove(previous)


def _remove(previous: pathlib.Path) -> None:
    """Removes `PREVIOUS` once the visible files are on disk; renamed first, so that a part of it is never read."""
    partial = previous.with_name(f"{PREVIOUS}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    atomic_io.fsync(previous.parent)
    previous.rename(partial)
    atomic_io.fsync(previous.parent)
    shutil.rmtree(partial, ignore_errors=True)


def _recorded_names(directory: pathlib.Path, previous: pathlib.Path) -> list[str] | None:
    """Returns the names of the files that an unfinished save replaces; None without a valid record of one."""
    if previous.is_symlink() or not previous.is_dir():
        return None
    try:
        record = untrusted_files.read_json_object(previous, _RECORD)
        if record["inode"] != previous.stat().st_ino:
            return None
        names = {pathlib.PurePath(name).name: states for name, states in record["files"].items()}
        valid = all(_file_state(directory / name) in states for name, states in names.items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return list(names) if valid else None


def _file_state(path: pathlib.Path) -> list[int] | None:
    """Returns size and modification time of a file; None if it does not exist."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return [stat.st_size, stat.st_mtime_ns]
