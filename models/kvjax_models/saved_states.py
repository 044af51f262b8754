"""Generations on disk: a run that is killed goes on where its last save stands, and a compressed prefix is read once
and continued many times.

A directory holds one run: `states/STEP` for every save that is kept, and `parameters` of the model, written once. Orbax
writes beside what is there and renames at the end: a save that is cut off leaves the one before it. What a state
belongs to is saved with it, and a state of another format, model, policy, size or run is refused, with what differs.
"""

import dataclasses
import functools
import json
import pathlib
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jaxtyping import Array, Int

import kvjax
from kvjax.memory import on_host
from kvjax_models.generate import GenerationState, Generator
from kvjax_models.llama import Llama

# Of what is written: raised with every change of a state's fields or their meaning.
FORMAT = 3
# What parameters, which do not change, came to: they need not be read at every save.
_CHECKSUMS: weakref.WeakKeyDictionary[Llama, int] = weakref.WeakKeyDictionary()


class Saved(NamedTuple):
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
        self.keep = keep

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
            step: orders the states of a run, such as the tokens written so far.
            run: what else must be the same where the state is used again, in terms of JSON.
            notes: what goes with the state, in terms of JSON, such as the tokens written so far.
        """
        # All processes write their parts, or none: the first one says which.
        if not multihost_utils.broadcast_one_to_all(np.asarray(self._parameters.exists())):
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(self._parameters, _plain(generator.model))
        items = {
            "state": ocp.args.StandardSave(_plain(state)),
            "belongs": ocp.args.JsonSave(_belonging(generator, run)),
            "notes": ocp.args.JsonSave(dict(notes or {})),
        }
        self._states.save(step, args=ocp.args.Composite(**items))

    def restore(self, generator: Generator, run: Mapping[str, Any] | None = None) -> Saved:
        """The newest state, in the places where a fresh one of the generator would lie.

        Raises:
            FileNotFoundError: where nothing is saved.
            ValueError: for a state of another format, model, policy, size or run, with what differs.
        """
        step = self._newest()
        self._check(_belonging(generator, run), self._belongs(step), step)
        fresh = generator.start()
        items = {"state": ocp.args.StandardRestore(_abstract(fresh)), "notes": ocp.args.JsonRestore()}
        restored = self._states.restore(step, args=ocp.args.Composite(**items))
        return Saved(step, _like(fresh, restored.state), restored.notes)

    def sizes(self) -> dict[str, Any]:
        """Of the newest state: the arguments of `Generator` of these names.

        Raises:
            FileNotFoundError: where nothing is saved.
        """
        return self._belongs(self._newest())["sizes"]

    def restore_parameters(self, model: Llama) -> Llama:
        """The model with the parameters of the run, where `model` has its own, which may be abstract.

        Raises:
            FileNotFoundError: where none are saved.
        """
        if not self._parameters.exists():
            raise FileNotFoundError(f"{self.directory} holds no parameters")
        with ocp.StandardCheckpointer() as checkpointer:
            return _like(model, checkpointer.restore(self._parameters, _abstract(model)))

    @functools.cached_property
    def _states(self) -> ocp.CheckpointManager:
        # Decoding donates a state's buffers: they must be on disk before it goes on.
        options = ocp.CheckpointManagerOptions(max_to_keep=self.keep, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self.directory / "states", options=options)

    @property
    def _parameters(self) -> pathlib.Path:
        return self.directory / "parameters"

    def _newest(self) -> int:
        step = self._states.latest_step() if self.directory.exists() else None
        if step is None:
            raise FileNotFoundError(f"{self.directory} holds no saved state")
        return step

    def _belongs(self, step: int) -> dict[str, Any]:
        return self._states.restore(step, args=ocp.args.Composite(belongs=ocp.args.JsonRestore())).belongs

    def _check(self, expected: Mapping[str, Any], found: Mapping[str, Any], step: int) -> None:
        expected = json.loads(json.dumps(expected))  # tuples are lists there
        # Nothing else can be compared between formats.
        names = ["format"] if expected["format"] != found.get("format") else list(expected)
        if wrong := [name for name in names if expected[name] != found.get(name)]:
            differences = "; ".join(f"{name} is {_differing(found.get(name), expected[name])}" for name in wrong)
            raise ValueError(f"the state of step {step} in {self.directory} is not of this run: {differences}")


def _belonging(generator: Generator, run: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is saved beside a state, and must be the same where it is used again."""
    return {"format": FORMAT, **describe(generator), "run": dict(run or {})}


def describe(generator: Generator) -> dict[str, Any]:
    """What a state of the generator belongs to, in terms of JSON."""
    state = jax.eval_shape(generator.start)
    if generator.model not in _CHECKSUMS:
        _CHECKSUMS[generator.model] = checksum(generator.model)
    return {
        "model": {**dataclasses.asdict(generator.config), "parameters": _CHECKSUMS[generator.model]},
        "policy": [kvjax.describe(policy) for policy in generator.policies],
        "sizes": {name: getattr(generator, name) for name in ("batch", "max_prompt", "max_new", "streaming")},
        "arrays": {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in _plain(state).items()},
    }


def checksum(parameters: Any) -> int:
    """A number that parameters of other values hardly share; the same however they are sharded."""
    return int(_checksum(_plain(parameters)))


@jax.jit
def _checksum(arrays: dict[str, Array]) -> Int[Array, ""]:
    # Whole numbers, of which a sum is the same in any order.
    total = jnp.uint32(0)
    for x in arrays.values():
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
        place = sum(
            jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(2654435761 + 2 * axis)
            for axis in range(x.ndim)
        )
        total = total * jnp.uint32(31) + jnp.sum(bits * (place + 1), dtype=jnp.uint32)
    return total


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
        if isinstance(leaf, jax.Array) and on_host(leaf):
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
