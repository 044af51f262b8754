"""Arrays on disk in numbered saves, of which the newest are kept.

    DIRECTORY/STEP/arrays          what orbax writes; all processes of a run, each its part
                  /belongs.json    what must be the same where the arrays are used again
                  /notes.json      what goes with them
                  /digests.json    SHA-256 of every file

A save is written beside the others and renamed when it is whole, so that one that is cut off leaves those before it.
Reading holds every file against its digest and falls back on the newest save that is whole. One process (or run of
several) at a time may write.
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

from kvjax_models import atomic_io

_PARTIAL, _DAMAGED = ".partial", ".damaged"


class NumberedSaves:
    """The saves of a directory.

    Args:
        keep: so many of the newest stay.
    """

    def __init__(self, directory: pathlib.Path, keep: int = 2) -> None:
        self.directory, self.keep = directory.absolute(), keep
        self._lock: filelock.BaseFileLock | None = None
        self._whole: set[int] = set()  # steps whose files were held against their digests, or written here

    def lock(self, *, require_empty: bool = False) -> None:
        """Takes the right to write, as long as this is there and the process runs.

        Args:
            fresh: there must be no save yet.

        Raises:
            OSError: where another process has it, or the directory cannot be written to.
            ValueError: for `fresh`, where there are saves.
        """

        def check() -> None:
            self._lock = self._lock or atomic_io.lock_directory(self.directory)
            if require_empty and (steps := self.steps()):
                raise ValueError(
                    f"{self.directory} holds saves already, of step {', '.join(map(str, steps))}: resume from them, or "
                    "give another directory"
                )

        atomic_io.run_on_first_process(check)

    def save(self, step: int, arrays: Mapping[str, Any], belongs: Any, notes: Any) -> None:
        """Writes a save. It must be newer than all that are whole; damaged ones that are not older are set aside.

        Raises:
            ValueError: for a step that is not newer.
            OSError: where it could not be written; what was there is as it was.
        """
        partial = self.directory / f"{step}{_PARTIAL}"

        def begin() -> None:
            self._set_aside(step)
            if (steps := self.steps()) and steps[-1] >= step:
                raise ValueError(
                    f"{self.directory} holds a save of step {steps[-1]}, and step {step} is not newer: give another "
                    "directory, or go on from that save"
                )
            for left in self.directory.glob(f"*{_PARTIAL}*"):
                shutil.rmtree(left)
            partial.mkdir()
            for name, values in (("belongs", belongs), ("notes", notes)):
                atomic_io.write_text(partial / f"{name}.json", json.dumps(values) + "\n")

        def finish() -> None:
            atomic_io.write_digests(partial)
            partial.rename(self.directory / str(step))
            atomic_io.fsync(self.directory)
            self._whole.add(step)
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
        """The numbers of all saves, the newest last, whole or not."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdecimal())

    def newest(self) -> int:
        """The newest save that is whole. Where newer ones are not, it says so.

        Raises:
            FileNotFoundError: where nothing is saved.
            ValueError: where no save is whole, with what is wrong with each.
        """
        found = np.asarray(-1)

        def look() -> None:
            nonlocal found
            problems: list[str] = []
            for step in reversed(self.steps()):
                if (problem := self._problem(step)) is None:
                    for each in problems:
                        logging.warning("%s; the save of step %d is used", each, step)
                    found = np.asarray(step)
                    return
                problems.append(f"{self.directory / str(step)}: {problem}")
            if problems:
                raise ValueError(f"no save is whole: {'; '.join(problems)}")
            raise FileNotFoundError(f"{self.directory} holds no saved state")

        atomic_io.run_on_first_process(look)
        return int(multihost_utils.broadcast_one_to_all(found)) if jax.distributed.is_initialized() else int(found)

    def belongs(self, step: int) -> Any:
        """What the save belongs to."""
        return self._json(step, "belongs")

    def notes(self, step: int) -> Any:
        """What goes with the save."""
        return self._json(step, "notes")

    def arrays(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of a save, in these shapes, types and places."""
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(self.directory / str(step) / "arrays", dict(like))

    def _json(self, step: int, name: str) -> Any:
        return json.loads((self.directory / str(step) / f"{name}.json").read_text(encoding="utf-8"))

    def _problem(self, step: int) -> str | None:
        """What is wrong with a save."""
        if step in self._whole:
            return None
        if (problem := atomic_io.find_damage(self.directory / str(step))) is None:
            self._whole.add(step)
        return problem

    def _set_aside(self, step: int) -> None:
        """Renames damaged saves that stand in the way of a step: a run that fell back on an older one goes past them
        again."""
        for old in self.steps():
            if old >= step and (problem := self._problem(old)) is not None:
                logging.warning("%s is set aside: %s", self.directory / str(old), problem)
                aside = self.directory / f"{old}{_DAMAGED}"
                shutil.rmtree(aside, ignore_errors=True)
                (self.directory / str(old)).rename(aside)


def write_arrays(directory: pathlib.Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays, all processes of a run together.

    Raises:
        OSError: where that fails, however the library says so.
    """
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory, dict(arrays))
    except Exception as error:  # tensorstore's are ValueErrors, RuntimeErrors and its own
        raise OSError(str(error).strip().partition("\n")[0]) from error
