"""Generation states on disk, to resume interrupted runs and to reuse compressed prompts.

A directory contains one run: `states`, which are `NumberedSaves`, and the model's `parameters`, written once.
Each state is saved with a manifest of its format, model, policies, sizes and run. A state with another manifest is
refused, and the error names the first difference.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jaxtyping import Array

import kvjax
from kvjax.distributed.memory import is_on_host
from kvjax.messages import shorten
from kvjax.spec import check_integer
from kvjax_models import atomic_io
from kvjax_models.fingerprint import model_fingerprint
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.numbered_saves import NumberedSaves, plain_json, write_arrays
from kvjax_models.generation.state import GenerationState
from kvjax_models.model.llama import Llama

FORMAT = 8  # increased with every change of a state's fields or their meaning
_SIZES = ("batch", "max_prompt_tokens", "max_new_tokens", "streaming")


class RestoredState(NamedTuple):
    """A state from disk."""

    step: int
    state: GenerationState
    notes: dict[str, Any]  # as passed to `save`


class SavedStates:
    """The saved states of one run."""

    def __init__(self, directory: str | pathlib.Path, keep: int = 2):
        """Opens a directory.

        Args:
            directory: directory of the run, created when something is saved.
            keep: number of states to keep.
        """
        self.directory = pathlib.Path(directory).absolute()
        self._states = NumberedSaves(self.directory / "states", keep)
        self._has_parameters = False  # whether the parameters on disk are known to be intact and the model's

    def lock(self, *, require_empty: bool = False) -> None:
        """Acquires the right to write; call it before the work that will be saved. See `NumberedSaves.lock`.

        Args:
            require_empty: whether to refuse a directory with saves.
        """
        self._states.lock(require_empty=require_empty)

    def save(
        self,
        step: int,
        generator: Generator,
        state: GenerationState,
        run: Mapping[str, Any] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes a settled state, and the model's parameters if they are not on disk.

        Saving is atomic: if it fails with an OSError, previous states are unchanged. A step that is not newer than all
        saved ones or not an integer from 0, and parameters of another model, raise a ValueError.

        Args:
            step: number of the state within the run, such as the number of tokens so far.
            generator: the generator of the state.
            state: the state as `Generator` returns it.
            run: further values that must be equal when the state is used again, as JSON.
            notes: values to return with the state, as JSON, such as the tokens so far.
        """
        step = check_integer("step", step, minimum=0)
        self.lock()
        if not self._has_parameters:
            self._save_parameters(generator.model)
            self._has_parameters = True
        self._states.save(step, _named_arrays(state), _manifest(generator, run), dict(notes or {}))

    def restore(self, generator: Generator, run: Mapping[str, Any] | None = None) -> RestoredState:
        """Reads the newest intact state onto the generator's devices; logs a warning if newer ones are damaged.

        A directory without states raises a FileNotFoundError.

        Args:
            generator: the generator that will continue the state.
            run: the values that were saved with the state.

        Returns:
            The state.

        Raises:
            ValueError: if the state has another format, model, policy, size or run, with the first difference.
        """
        step = self._states.newest()
        if difference := describe_difference(_manifest(generator, run), self._states.manifest(step)):
            raise ValueError(f"the state of step {step} in {self.directory} belongs to another run: {difference}")
        template = generator.init_state()
        arrays = self._states.arrays(step, _abstract_arrays(template))
        return RestoredState(step, _with_arrays(template, arrays), self._states.notes(step))

    def generator_sizes(self) -> dict[str, Any]:
        """Returns the sizes of the newest state's generator, as keyword arguments of `Generator`."""
        return self._states.manifest(self._states.newest())["sizes"]

    def restore_parameters(self, model: Llama) -> Llama:
        """Reads the run's parameters.

        Damaged parameters raise a ValueError.

        Args:
            model: a model with shapes and shardings of the parameters; it may be abstract.

        Returns:
            The model with the parameters.

        Raises:
            FileNotFoundError: if no parameters are saved.
        """
        if not self._parameters.exists():
            raise FileNotFoundError(f"{self.directory} has no parameters")
        atomic_io.run_on_first_process(self._check_parameters)
        with ocp.StandardCheckpointer() as checkpointer:
            return _with_arrays(model, checkpointer.restore(self._parameters / "arrays", _abstract_arrays(model)))

    @property
    def _parameters(self) -> pathlib.Path:
        return self.directory / "parameters"

    def _save_parameters(self, model: Llama) -> None:
        """Writes the parameters, or compares those on disk with the model's.

        Raises:
            OSError: if they cannot be written.
        """
        fingerprint, partial = model_fingerprint(model), self._parameters.with_suffix(".partial")
        # The first process decides for all, because either every process or no process writes its shards.
        exist = self._parameters.exists()
        if jax.distributed.is_initialized():
            exist = bool(multihost_utils.broadcast_one_to_all(np.asarray(exist)))

        def begin() -> None:
            if exist:
                self._check_parameters()
                if (saved := (self._parameters / "model").read_text(encoding="utf-8")) != fingerprint:
                    raise ValueError(
                        f"{self._parameters} belong to model {saved}, not {fingerprint}; use another directory"
                    )
            else:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                atomic_io.write_text(partial / "model", fingerprint)

        def finish() -> None:
            atomic_io.write_digests(partial)
            partial.rename(self._parameters)
            atomic_io.fsync(self.directory)

        atomic_io.run_on_first_process(begin)
        if not exist:
            try:
                write_arrays(partial / "arrays", _named_arrays(model))
                atomic_io.run_on_first_process(finish)
            except OSError as error:
                shutil.rmtree(partial, ignore_errors=True)
                raise OSError(f"the parameters could not be saved to {self.directory}: {error}") from error

    def _check_parameters(self) -> None:
        """Compares the parameters with their digests.

        Raises:
            ValueError: if they are damaged.
        """
        if (problem := atomic_io.find_damage(self._parameters)) is not None:
            raise ValueError(f"{self._parameters}: {problem}")


def describe_generator(generator: Generator) -> dict[str, Any]:
    """Returns everything about a generator that its states depend on, as JSON."""
    state = jax.eval_shape(generator.init_state)
    return {
        "model": {
            **dataclasses.asdict(generator.config),
            "weight_dtype": generator.model.weight_dtype or jnp.dtype(generator.model.embedding.param_dtype).name,
            "sha256": model_fingerprint(generator.model),
        },
        "policy": [kvjax.describe(policy) for policy in generator.policies],
        "sizes": {name: getattr(generator, name) for name in _SIZES},
        "arrays": {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in _named_arrays(state).items()},
    }


def describe_difference(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> str | None:
    """Compares the manifests of two saves.

    Args:
        expected: manifest of this run.
        actual: manifest of the save.

    Returns:
        The first difference; None for equal manifests. Sizes, on which the other values depend, come first.
    """
    expected = json.loads(json.dumps(expected, default=plain_json))  # tuples become lists
    order = {name: number for number, name in enumerate(("format", "model", "sizes"))}
    names = sorted(expected, key=lambda name: order.get(name, len(order)))
    differing = [name for name in names if expected[name] != actual.get(name)]
    return _first_difference(differing[0], expected[differing[0]], actual.get(differing[0])) if differing else None


def _first_difference(name: str, expected: Any, actual: Any) -> str:
    """Returns the name of the first value that differs, and both values."""
    if isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        index = next(index for index in range(len(actual)) if actual[index] != expected[index])
        return _first_difference(f"{name}[{index}]", expected[index], actual[index])
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        key = next(key for key in {**expected, **actual} if actual.get(key) != expected.get(key))
        return _first_difference(f"{name}.{key}", expected.get(key), actual.get(key))
    return f"{name} is {shorten(actual)}, not {shorten(expected)}"


def _manifest(generator: Generator, run: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"format": FORMAT, **describe_generator(generator), "run": dict(run or {})}


def _named_arrays(tree: Any) -> dict[str, Any]:
    """Returns arrays by path, random keys as integers; orbax refuses empty arrays, which are omitted."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {_path_name(path): _key_data(leaf) for path, leaf in leaves if leaf.size}


def _path_name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _key_data(leaf: Any) -> Any:
    """Returns the integers of random keys, and other arrays unchanged."""
    if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)


def _abstract_arrays(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes, dtypes and shardings of `_named_arrays`."""
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
        for name, leaf in _named_arrays(tree).items()
    }


def _with_arrays(tree: Any, arrays: Mapping[str, Array]) -> Any:
    """Returns the tree with the arrays of `_named_arrays`."""

    def replace(path: Any, leaf: Any) -> Array:
        """Returns the array saved under `path` with the memory space and the key type of `leaf`."""
        if not leaf.size:
            return leaf
        array = arrays[_path_name(path)]
        if isinstance(leaf, jax.Array) and is_on_host(leaf):
            # orbax restores to host memory, but without the memory space in the type that programs depend on.
            array = jax.device_put(array, jax.memory.Space.Host)
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key else array

    return jax.tree_util.tree_map_with_path(replace, tree)
