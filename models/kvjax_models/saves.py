"""Saves of arrays in a directory, of which the newest ones are kept.

    DIRECTORY/STEP/arrays          arrays as orbax writes them; all processes of a run, each its shards
                  /manifest        values that must be equal when the arrays are used again, as JSON
                  /notes           further values, as JSON
                  /digests.json    the step and the SHA-256 of every file

orbax's manager commits a save by renaming its directory and removes the oldest ones; the digests follow. Reading
compares every file with its digest and falls back to the newest intact save, so an interrupted save does not affect the
previous ones. Only one process, or one run of several processes, may write at a time.
"""

import json
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any

import filelock
import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils
from jaxtyping import Array

from kvjax.distributed.memory import is_on_host
from kvjax.messages import shorten
from kvjax.spec import check_integer
from kvjax_models import atomic_io

DIGESTS = "digests.json"
_DIGEST = re.compile("[0-9a-f]{64}")


class Saves:
    """The saves in a directory."""

    def __init__(self, directory: str | os.PathLike, keep: int = 2, *, is_document: bool = False) -> None:
        """Opens a directory.

        Args:
            directory: created when something is saved.
            keep: number of saves to keep.
            is_document: whether a document is saved, and not the states of a run; for messages.
        """
        self.directory, self._keep = pathlib.Path(directory).absolute(), keep
        self._is_document = is_document
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
                if self._is_document:
                    raise ValueError(
                        f"{self.directory} already has a saved document; open it (`llm.open`, --document) or use "
                        "another directory"
                    )
                raise ValueError(
                    f"{self.directory} already has saves of step {', '.join(map(str, steps))}; resume from them or use "
                    "another directory"
                )

        atomic_io.run_on_first_process(lock_and_check)

    def save(self, step: int, tree: Any, manifest: Any, notes: Any) -> None:
        """Writes a save. Damaged saves that are not older are renamed first.

        A step that is not newer than all intact saves, or is not an integer from 0, raises a ValueError.

        Args:
            step: number of the save.
            tree: pytree of arrays, which may be sharded.
            manifest: values that must be equal when the arrays are used again, as JSON.
            notes: further values, as JSON; numbers and arrays of NumPy are written as numbers and lists.

        Raises:
            OSError: if the save cannot be written; the previous saves are unchanged.
        """
        step = check_integer("step", step, minimum=0)
        items = {"arrays": ocp.args.StandardSave(_named_arrays(tree))}
        items |= {"manifest": ocp.args.JsonSave(to_json(manifest)), "notes": ocp.args.JsonSave(to_json(notes))}
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self.lock()
        atomic_io.run_on_first_process(lambda: self._make_way(step))
        try:
            with ocp.CheckpointManager(self.directory, options=options) as manager:
                manager.save(step, args=ocp.args.Composite(**items))
            atomic_io.run_on_first_process(lambda: self._write_digests(step))
        except Exception as error:  # tensorstore raises ValueError, RuntimeError and its own errors
            for partial in (*self.directory.glob(f"{step}.orbax*"), self.directory / str(step)):
                if not (partial / DIGESTS).exists():
                    shutil.rmtree(partial, ignore_errors=True)
            reason = str(error).strip().partition("\n")[0]
            raise OSError(f"step {step} could not be saved to {self.directory}: {reason}") from error

    def steps(self) -> list[int]:
        """Returns the numbers of all saves in ascending order, intact or not."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdecimal())

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
            raise FileNotFoundError(f"{self.directory} has no saved {'document' if self._is_document else 'states'}")

        atomic_io.run_on_first_process(find)
        return int(multihost_utils.broadcast_one_to_all(newest)) if jax.distributed.is_initialized() else int(newest)

    def manifest(self, step: int) -> Any:
        """Returns the manifest of a save."""
        return self._read_json(step, "manifest")

    def notes(self, step: int) -> Any:
        """Returns the notes of a save."""
        return self._read_json(step, "notes")

    def restore(self, step: int, like: Any) -> Any:
        """Reads the arrays of a save.

        Args:
            step: number of the save.
            like: pytree of arrays with the shapes, dtypes, shardings and memory spaces of the result.

        Returns:
            The pytree with the saved arrays.
        """
        abstract = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
            for name, leaf in _named_arrays(like).items()
        }
        with ocp.StandardCheckpointer() as checkpointer:
            arrays = checkpointer.restore(self.directory / str(step) / "arrays", abstract)
        return jax.tree_util.tree_map_with_path(lambda path, leaf: _like(arrays.get(_name(path)), leaf), like)

    def _read_json(self, step: int, name: str) -> Any:
        return json.loads((self.directory / str(step) / name / "metadata").read_text(encoding="utf-8"))

    def _make_way(self, step: int) -> None:
        """Renames damaged saves from a step on, which a run that fell back to an older save reaches again.

        Raises:
            ValueError: if an intact save is not older than the step.
        """
        for other in self.steps():
            if other < step:
                continue
            if (problem := self._find_damage(other)) is None:
                raise ValueError(
                    f"step {step} is not newer than the save of step {other} in {self.directory}; resume from that "
                    "save or use another directory"
                )
            logging.warning("renaming damaged save %s: %s", self.directory / str(other), problem)
            damaged = self.directory / f"damaged-{other}"
            shutil.rmtree(damaged, ignore_errors=True)
            (self.directory / str(other)).rename(damaged)

    def _write_digests(self, step: int) -> None:
        """Writes the digests of a save's files into it."""
        directory = self.directory / str(step)
        atomic_io.write_text(directory / DIGESTS, json.dumps({"step": step, "sha256": _digests(directory)}) + "\n")

    def _find_damage(self, step: int) -> str | None:
        """Returns a description of a save's damage; None if it is intact."""
        directory = self.directory / str(step)
        try:
            saved = json.loads((directory / DIGESTS).read_text(encoding="utf-8"))
            expected, actual = dict(saved["sha256"]), _digests(directory)
        except FileNotFoundError:
            return f"{DIGESTS} is missing"
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            return f"{DIGESTS} or another file cannot be read: {shorten(str(error))}"
        if saved["step"] != step:
            return f"the directory was renamed: it holds the save of step {saved['step']}"
        names = sorted({*expected, *actual})
        return next((f"{name} is damaged" for name in names if expected.get(name) != actual.get(name)), None)


def to_json(values: Any) -> Any:
    """Returns values as JSON gives them back: lists for tuples and arrays, numbers for NumPy's.

    Raises:
        TypeError: if a value cannot be written as JSON.
    """

    def convert(value: Any) -> Any:
        if isinstance(value, np.generic | np.ndarray | jax.Array):
            return np.asarray(value).tolist()
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")

    return json.loads(json.dumps(values, default=convert))


def describe_difference(expected: Any, actual: Any) -> str | None:
    """Compares two manifests.

    Args:
        expected: manifest of this run.
        actual: manifest of a save.

    Returns:
        The first value that differs, in the order of `expected`; None for equal manifests. Digests are not shown.
    """
    values, saved = dict(_flatten(to_json(expected))), dict(_flatten(actual))
    for name in {**values, **saved}:
        if values.get(name) != saved.get(name):
            if isinstance(values.get(name), str) and _DIGEST.fullmatch(values[name]):
                return f"{name} differs"
            return f"{name} is {shorten(saved.get(name))}, not {shorten(values.get(name))}"
    return None


def _flatten(values: Any, name: str = "") -> list[tuple[str, Any]]:
    """Returns the values of nested dictionaries and lists by name."""
    if isinstance(values, Mapping):
        children = [(f"{name}.{key}".lstrip("."), value) for key, value in values.items()]
    elif isinstance(values, list):
        children = [(f"{name}[{index}]", value) for index, value in enumerate(values)]
    else:
        return [(name, values)]
    return [item for child, value in children for item in _flatten(value, child)]


def _digests(directory: pathlib.Path) -> dict[str, str]:
    """Returns the SHA-256 of every file below a directory except the digests, by relative path."""
    paths = [path for path in directory.rglob("*") if path.is_file() and path != directory / DIGESTS]
    return {path.relative_to(directory).as_posix(): atomic_io.sha256_of_file(path) for path in sorted(paths)}


def _named_arrays(tree: Any) -> dict[str, Any]:
    """Returns arrays by path, random keys as integers; orbax refuses empty arrays, which are omitted."""
    return {_name(path): _key_data(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if leaf.size}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(leaf: Any) -> Any:
    """Returns the integers of random keys, and other arrays unchanged."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _like(array: Array | None, leaf: Any) -> Array:
    """Returns a saved array with the memory space and the key type of `leaf`; `leaf` itself if it was omitted."""
    if array is None:
        return leaf
    if is_on_host(leaf):
        # orbax restores to host memory, but without the memory space in the type that programs depend on.
        array = jax.device_put(array, jax.memory.Space.Host)
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else array
