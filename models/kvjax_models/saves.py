"""A save of arrays in a directory.

    DIRECTORY/0/arrays           arrays as orbax writes them; all processes of a run, each its shards
               /manifest         values that must be equal when the arrays are used again, as JSON
               /notes            further values, as JSON
               /digests.json     the SHA-256 of every file

orbax's manager commits a save by renaming its directory; the digests follow. A directory without digests is a save that
was interrupted, which the next one replaces. Reading compares every file with its digest. Only one process, or one run
of several processes, may write at a time.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
from collections.abc import Collection
from typing import Any

import filelock
import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array

from kvjax.distributed.memory import is_on_host
from kvjax.messages import shorten
from kvjax_models import atomic_io

DIGESTS = "digests.json"
_STEP = 0  # of orbax's manager
_DIGEST = re.compile("[0-9a-f]{64}")


class Save:
    """The save of a document in a directory."""

    def __init__(self, directory: str | os.PathLike) -> None:
        """Opens a directory, which is created when something is saved."""
        self.directory = pathlib.Path(directory).absolute()
        self._path = self.directory / str(_STEP)
        self._lock: filelock.BaseFileLock | None = None

    def lock(self) -> None:
        """Acquires the right to write, until this object is deleted or the process ends.

        Raises:
            ValueError: if the directory has a save.
            OSError: if another process has the lock, or the directory is not writable.
        """

        def lock_and_check() -> None:
            self._lock = self._lock or atomic_io.lock_directory(self.directory)
            if (self._path / DIGESTS).exists():
                raise ValueError(
                    f"{self.directory} already has a saved document; open it (`llm.open`, --document) or use another "
                    "directory"
                )

        atomic_io.run_on_first_process(lock_and_check)

    def write(self, tree: Any, manifest: Any, notes: Any) -> None:
        """Writes the save.

        Args:
            tree: pytree of arrays, which may be sharded.
            manifest: values that must be equal when the arrays are used again, as JSON.
            notes: further values, as JSON; numbers and arrays of NumPy are written as numbers and lists.

        Raises:
            ValueError: if the directory has a save.
            OSError: if it cannot be written.
        """
        items = {"arrays": ocp.args.StandardSave(_named_arrays(tree))}
        items |= {"manifest": ocp.args.JsonSave(to_json(manifest)), "notes": ocp.args.JsonSave(to_json(notes))}
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, cleanup_tmp_directories=True)
        self.lock()
        atomic_io.run_on_first_process(self._remove_incomplete)
        try:
            with ocp.CheckpointManager(self.directory, options=options) as manager:
                manager.save(_STEP, args=ocp.args.Composite(**items))
            atomic_io.run_on_first_process(self._write_digests)
        except Exception as error:  # tensorstore raises ValueError, RuntimeError and its own errors
            self._remove_incomplete()
            reason = str(error).strip().partition("\n")[0]
            raise OSError(f"the document could not be saved to {self.directory}: {reason}") from error

    def check(self) -> None:
        """Checks that the save is complete and intact.

        Raises:
            FileNotFoundError: if the directory has no save.
            ValueError: if the save is damaged.
        """

        def find_damage() -> None:
            if not self._path.is_dir():
                raise FileNotFoundError(f"{self.directory} has no saved document")
            if (problem := self._find_damage()) is not None:
                raise ValueError(f"the document in {self.directory} is damaged: {problem}")

        atomic_io.run_on_first_process(find_damage)

    @property
    def manifest(self) -> Any:
        """The manifest."""
        return self._read_json("manifest")

    @property
    def notes(self) -> Any:
        """The notes."""
        return self._read_json("notes")

    def restore(self, like: Any, resizable: Collection[str] = ()) -> Any:
        """Reads the arrays.

        Args:
            like: pytree of arrays with the shapes, dtypes, shardings and memory spaces of the result.
            resizable: names of arrays (`array_name`) whose saved shape may differ: missing numbers are zeros, and
                further ones are omitted.

        Returns:
            The pytree with the saved arrays.
        """
        abstract = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
            for name, leaf in _named_arrays(like).items()
        }
        options = ocp.checkpoint_utils.construct_restore_args(abstract)
        for name in abstract.keys() & set(resizable):
            options[name] = dataclasses.replace(options[name], strict=False)
        with ocp.PyTreeCheckpointer() as checkpointer:
            arrays = checkpointer.restore(
                self._path / "arrays", args=ocp.args.PyTreeRestore(item=abstract, restore_args=options)
            )
        return jax.tree_util.tree_map_with_path(lambda path, leaf: _like(arrays.get(array_name(path)), leaf), like)

    def _read_json(self, name: str) -> Any:
        return json.loads((self._path / name / "metadata").read_text(encoding="utf-8"))

    def _remove_incomplete(self) -> None:
        """Removes the files of an interrupted save."""
        for path in (self._path, *self.directory.glob(f"{_STEP}.orbax*")):
            if not (path / DIGESTS).exists():
                shutil.rmtree(path, ignore_errors=True)

    def _write_digests(self) -> None:
        digests = {"step": _STEP, "sha256": _digests(self._path)}
        atomic_io.write_text(self._path / DIGESTS, json.dumps(digests) + "\n")

    def _find_damage(self) -> str | None:
        """Returns a description of the damage; None if the save is intact."""
        try:
            saved = json.loads((self._path / DIGESTS).read_text(encoding="utf-8"))
            expected, actual = dict(saved["sha256"]), _digests(self._path)
        except FileNotFoundError:
            return f"{DIGESTS} is missing"
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            return f"{DIGESTS} or another file cannot be read: {shorten(str(error))}"
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
        The first value that differs, in the order of names; None for equal manifests. Digests are not shown.
    """
    values, saved = _by_name(to_json(expected)), _by_name(actual)
    for name in {**values, **saved}:
        if values.get(name) != saved.get(name):
            if isinstance(values.get(name), str) and _DIGEST.fullmatch(values[name]):
                return f"{name} differs"
            return f"{name} is {shorten(saved.get(name))}, not {shorten(values.get(name))}"
    return None


def _by_name(values: Any) -> dict[str, Any]:
    """Returns the values of nested dictionaries and lists by name."""
    leaves = jax.tree_util.tree_leaves_with_path(values, is_leaf=lambda one: one is None)
    return {array_name(path): value for path, value in leaves}


def _digests(directory: pathlib.Path) -> dict[str, str]:
    """Returns the SHA-256 of every file below a directory except the digests, by relative path."""
    paths = [path for path in directory.rglob("*") if path.is_file() and path != directory / DIGESTS]
    return {path.relative_to(directory).as_posix(): atomic_io.sha256_of_file(path) for path in sorted(paths)}


def _named_arrays(tree: Any) -> dict[str, Any]:
    """Returns arrays by path, random keys as integers; orbax refuses empty arrays, which are omitted."""
    return {array_name(path): _key_data(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if leaf.size}


def array_name(path: Any) -> str:
    """Returns the name of the array at a path of a pytree."""
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
