"""Numbered saves of arrays in a directory, of which the newest ones are kept.

    DIRECTORY/STEP/arrays          arrays as orbax writes them; all processes of a run, each its shards
                  /manifest.json   values that must be equal when the arrays are used again
                  /notes.json      further values
                  /step            the number
                  /digests.json    SHA-256 of every file

A save is written to a temporary directory and renamed when it is complete, so an interrupted save does not affect the
previous ones. Reading compares every file with its digest and falls back to the newest intact save. Only one process,
or one run of several processes, may write at a time.
"""

import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import filelock
import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils

from kvjax.spec import check_integer
from kvjax_models import atomic_io

_PARTIAL, _DAMAGED, _STEP = ".partial", ".damaged", "step"


class NumberedSaves:
    """The saves in a directory."""

    def __init__(self, directory: pathlib.Path, keep: int = 2) -> None:
        """Opens a directory.

        Args:
            directory: created when something is saved.
            keep: number of saves to keep.
        """
        self.directory, self.keep = directory.absolute(), keep
        self._lock: filelock.BaseFileLock | None = None

    def lock(self, *, require_empty: bool = False) -> None:
        """Acquires the right to write, until this object is deleted or the process ends.

        If another process has the lock, or the directory is not writable, an OSError is raised.

        Args:
            require_empty: whether to refuse a directory with saves by a ValueError.
        """

        def lock_and_check() -> None:
            self._lock = self._lock or atomic_io.lock_directory(self.directory)
            if require_empty and (steps := self.steps()):
                raise ValueError(
                    f"{self.directory} already has saves of step {', '.join(map(str, steps))}; resume from them or use "
                    "another directory"
                )

        atomic_io.run_on_first_process(lock_and_check)

    def save(self, step: int, arrays: Mapping[str, Any], manifest: Any, notes: Any) -> None:
        """Writes a save. Damaged saves that are not older are renamed first.

        A step that is not newer than all intact saves, or is not an integer from 0, raises a ValueError.

        Args:
            step: number of the save.
            arrays: arrays by name.
            manifest: values that must be equal when the arrays are used again, as JSON.
            notes: further values, as JSON; numbers and arrays of NumPy are written as numbers and lists.

        Raises:
            OSError: if the save cannot be written; the previous saves are unchanged.
        """
        step = check_integer("step", step, minimum=0)
        partial = self.directory / f"{step}{_PARTIAL}"

        def begin() -> None:
            self._rename_damaged(step)
            if (steps := self.steps()) and steps[-1] >= step:
                raise ValueError(
                    f"step {step} is not newer than the save of step {steps[-1]} in {self.directory}; resume from that "
                    "save or use another directory"
                )
            for interrupted in self.directory.glob(f"*{_PARTIAL}*"):
                shutil.rmtree(interrupted)
            partial.mkdir()
            for name, values in (("manifest", manifest), ("notes", notes)):
                atomic_io.write_text(partial / f"{name}.json", json.dumps(values, default=plain_json) + "\n")
            atomic_io.write_text(partial / _STEP, f"{step}\n")

        def finish() -> None:
            atomic_io.write_digests(partial)
            partial.rename(self.directory / str(step))
            atomic_io.fsync(self.directory)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.directory / str(old))

        self.lock()
        try:
            atomic_io.run_on_first_process(begin)
            write_arrays(partial / "arrays", arrays)
            atomic_io.run_on_first_process(finish)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise OSError(f"step {step} could not be saved to {self.directory}: {error}") from error

    def steps(self) -> list[int]:
        """Returns the numbers of all saves in ascending order, intact or not."""
        if not self.directory.is_dir():
            return []
        names = [path.name for path in self.directory.iterdir()]
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))

    def newest(self) -> int:
        """Returns the newest intact save; logs a warning if newer ones are damaged.

        Raises:
            FileNotFoundError: if the directory has no saves.
            ValueError: if all saves are damaged, with the damage of each.
        """
        newest = np.asarray(-1)

        def find() -> None:
            nonlocal newest
            problems: list[str] = []
            for step in reversed(self.steps()):
                if (problem := self._find_damage(step)) is None:
                    for damage in problems:
                        logging.warning("%s; falling back to the save of step %d", damage, step)
                    newest = np.asarray(step)
                    return
                problems.append(f"{self.directory / str(step)}: {problem}")
            if problems:
                raise ValueError(f"all saves are damaged: {'; '.join(problems)}")
            raise FileNotFoundError(f"{self.directory} has no saves")

        atomic_io.run_on_first_process(find)
        return int(multihost_utils.broadcast_one_to_all(newest)) if jax.distributed.is_initialized() else int(newest)

    def manifest(self, step: int) -> Any:
        """Returns the manifest of a save.

        Raises:
            ValueError: if the save was written by an older version, which had no such file.
        """
        try:
            return self._read_json(step, "manifest")
        except FileNotFoundError:
            raise ValueError(
                f"{self.directory / str(step)} was saved by an older version and cannot be restored; start a new run"
            ) from None

    def notes(self, step: int) -> Any:
        """Returns the notes of a save."""
        return self._read_json(step, "notes")

    def arrays(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the arrays of a save.

        Args:
            step: number of the save.
            like: shapes, dtypes and shardings of the arrays.

        Returns:
            Arrays by name.
        """
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(self.directory / str(step) / "arrays", dict(like))

    def _read_json(self, step: int, name: str) -> Any:
        return json.loads((self.directory / str(step) / f"{name}.json").read_text(encoding="utf-8"))

    def _find_damage(self, step: int) -> str | None:
        """Returns a description of a save's damage; None if it is intact."""
        directory = self.directory / str(step)
        problem, number = atomic_io.find_damage(directory), directory / _STEP
        # Saves of older versions have no such file; `manifest` refuses them.
        if problem is None and number.exists() and (saved := number.read_text(encoding="utf-8").strip()) != str(step):
            problem = f"the directory was renamed: it holds the save of step {saved}"
        return problem

    def _rename_damaged(self, step: int) -> None:
        """Renames damaged saves from a step on, which a run that fell back to an older save reaches again."""
        for old in self.steps():
            if old >= step and (problem := self._find_damage(old)) is not None:
                logging.warning("renaming damaged save %s: %s", self.directory / str(old), problem)
                damaged = self.directory / f"{old}{_DAMAGED}"
                shutil.rmtree(damaged, ignore_errors=True)
                (self.directory / str(old)).rename(damaged)


def plain_json(value: Any) -> Any:
    """Converts a NumPy or JAX value for JSON.

    Returns:
        A number, or a list of numbers.

    Raises:
        TypeError: if it is none.
    """
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return np.asarray(value).tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def write_arrays(directory: pathlib.Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays; all processes of a run must call this.

    Args:
        directory: directory to create.
        arrays: arrays by name.

    Raises:
        OSError: if writing fails.
    """
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory, dict(arrays))
    except Exception as error:  # tensorstore raises ValueError, RuntimeError and its own errors
        raise OSError(str(error).strip().partition("\n")[0]) from error
