"""Generations on disk: a run that is killed goes on where its last save stands, and a compressed prefix is read once
and continued many times.

A directory holds one run: `states`, which are `numbered_saves`, and `parameters` of the model, written once. What a
state belongs to is saved with it, and a state of another format, model, policy, size or run is refused, with what
differs.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jaxtyping import Array

import kvjax
from kvjax.distributed.memory import is_on_host
from kvjax_models import atomic_io, fingerprint
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.numbered_saves import NumberedSaves, write_arrays
from kvjax_models.generation.state import GenerationState
from kvjax_models.model.llama import Llama

# Of what is written: raised with every change of a state's fields or their meaning.
FORMAT = 7


class RestoredState(NamedTuple):
    """What stood on disk."""

    step: int
    state: GenerationState
    notes: dict[str, Any]  # as given to `save`


class SavedStates:
    """The saved states of one run.

    Args:
        directory: of the run; made when something is saved.
        keep: so many of the newest states stay.
    """

    def __init__(self, directory: str | pathlib.Path, keep: int = 2):
        self.directory = pathlib.Path(directory).absolute()
        self._states = NumberedSaves(self.directory / "states", keep)
        self._has_parameters = False  # whether those on disk are known to be the model's, and whole

    def lock(self, *, require_empty: bool = False) -> None:
        """Takes the right to write: best before the work that is to be saved. See `NumberedSaves.claim`."""
        self._states.lock(require_empty=require_empty)

    def save(
        self,
        step: int,
        generator: Generator,
        state: GenerationState,
        run: Mapping[str, Any] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes a settled state (as `Generator` returns them), and the parameters if they are not there.

        Args:
            step: orders the states of a run, such as the tokens written so far; newer than those that are there.
            run: what else must be the same where the state is used again, in terms of JSON.
            notes: what goes with the state, in terms of JSON, such as the tokens written so far.

        Raises:
            ValueError: for a step that is not newer than what is there, or parameters of another model.
            OSError: where it could not be written, or another process writes here; what was there is as it was.
        """
        self.lock()
        if not self._has_parameters:
            self._save_parameters(generator.model)
            self._has_parameters = True
        self._states.save(step, _plain(state), _belonging(generator, run), dict(notes or {}))

    def restore(self, generator: Generator, run: Mapping[str, Any] | None = None) -> RestoredState:
        """The newest state that is whole, in the places where a fresh one of the generator would lie. Where newer ones
        are damaged, it says so.

        Raises:
            FileNotFoundError: where nothing is saved.
            ValueError: where no state is whole; for a state of another format, model, policy, size or run, with what
                differs.
        """
        step = self._states.newest()
        self._check(_belonging(generator, run), self._states.belongs(step), step)
        fresh = generator.init_state()
        return RestoredState(step, _like(fresh, self._states.arrays(step, _abstract(fresh))), self._states.notes(step))

    def generator_sizes(self) -> dict[str, Any]:
        """Of the newest state: the arguments of `Generator` of these names.

        Raises:
            FileNotFoundError: where nothing is saved.
            ValueError: where no state is whole.
        """
        return self._states.belongs(self._states.newest())["sizes"]

    def restore_parameters(self, model: Llama) -> Llama:
        """The model with the parameters of the run, where `model` has its own, which may be abstract.

        Raises:
            FileNotFoundError: where none are saved.
            ValueError: where they are damaged.
        """
        if not self._parameters.exists():
            raise FileNotFoundError(f"{self.directory} holds no parameters")
        atomic_io.run_on_first_process(self._check_parameters)
        with ocp.StandardCheckpointer() as checkpointer:
            return _like(model, checkpointer.restore(self._parameters / "arrays", _abstract(model)))

    @property
    def _parameters(self) -> pathlib.Path:
        return self.directory / "parameters"

    def _save_parameters(self, model: Llama) -> None:
        """Writes the parameters, or holds those that are there against the model's."""
        own, partial = fingerprint.model_fingerprint(model), self._parameters.with_suffix(".partial")
        # All processes write their parts, or none: the first one says which.
        there = self._parameters.exists()
        if jax.distributed.is_initialized():
            there = bool(multihost_utils.broadcast_one_to_all(np.asarray(there)))

        def begin() -> None:
            if there:
                self._check_parameters()
                if (found := (self._parameters / "model").read_text(encoding="utf-8")) != own:
                    raise ValueError(f"{self._parameters} is of model {found}, not {own}: give another directory")
            else:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                atomic_io.write_text(partial / "model", own)

        def finish() -> None:
            atomic_io.write_digests(partial)
            partial.rename(self._parameters)
            atomic_io.fsync(self.directory)

        atomic_io.run_on_first_process(begin)
        if not there:
            try:
                write_arrays(partial / "arrays", _plain(model))
                atomic_io.run_on_first_process(finish)
            except OSError as error:
                shutil.rmtree(partial, ignore_errors=True)
                raise OSError(f"the parameters could not be saved to {self.directory}: {error}") from error

    def _check_parameters(self) -> None:
        if (problem := atomic_io.find_damage(self._parameters)) is not None:
            raise ValueError(f"{self._parameters}: {problem}")

    def _check(self, expected: Mapping[str, Any], found: Mapping[str, Any], step: int) -> None:
        if differences := describe_differences(expected, found):
            raise ValueError(f"the state of step {step} in {self.directory} is not of this run: {differences}")


def describe_differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """What is not as expected of what a save belongs to, with both values; None where nothing is."""
    expected = json.loads(json.dumps(expected))  # tuples are lists there
    # Nothing else can be compared between formats.
    names = ["format"] if expected["format"] != found.get("format") else list(expected)
    wrong = [name for name in names if expected[name] != found.get(name)]
    return "; ".join(f"{name} is {_differing(found.get(name), expected[name])}" for name in wrong) or None


def _belonging(generator: Generator, run: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is saved beside a state, and must be the same where it is used again."""
    return {"format": FORMAT, **describe_generator(generator), "run": dict(run or {})}


def describe_generator(generator: Generator) -> dict[str, Any]:
    """What a state of the generator belongs to, in terms of JSON."""
    state = jax.eval_shape(generator.init_state)
    return {
        "model": {**dataclasses.asdict(generator.config), "sha256": fingerprint.model_fingerprint(generator.model)},
        "policy": [kvjax.describe(policy) for policy in generator.policies],
        "sizes": {
            name: getattr(generator, name) for name in ("batch", "max_prompt_tokens", "max_new_tokens", "streaming")
        },
        "arrays": {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in _plain(state).items()},
    }


def _plain(tree: Any) -> dict[str, Any]:
    """Arrays by their path, random keys as their words. Orbax refuses empty ones, which say nothing."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): _words(leaf) for path, leaf in leaves if leaf.size}


def _words(leaf: Any) -> Any:
    if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)


def _abstract(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, types and places of `_plain`."""
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
        for name, leaf in _plain(tree).items()
    }


def _like(tree: Any, plain: Mapping[str, Array]) -> Any:
    """The tree with the arrays of `_plain`."""

    def typed(path: Any, leaf: Any) -> Array:
        if not leaf.size:
            return leaf
        found = plain[jax.tree_util.keystr(path, simple=True, separator=".")]
        if isinstance(leaf, jax.Array) and is_on_host(leaf):
            # It lies there, but what orbax makes does not say so in its type, by which programs go.
            found = jax.device_put(found, jax.memory.Space.Host)
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.wrap_key_data(found, impl=jax.random.key_impl(leaf)) if is_key else found

    return jax.tree_util.tree_map_with_path(typed, tree)


def _differing(found: Any, expected: Any) -> str:
    """Both, without the parts of mappings in which they agree."""
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        # Of layers: the first that differs.
        found, expected = next(pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1])
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        names = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
        found, expected = ({name: one.get(name) for name in names} for one in (found, expected))
    return f"{found}, not {expected}"
