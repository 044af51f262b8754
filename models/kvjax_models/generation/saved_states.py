"""Generation states on disk, to resume interrupted runs and to reuse compressed prompts.

A state is saved with a manifest of its format, model, policies, sizes and run, without weights. A state with another
manifest is refused, and the error names the first difference.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import kvjax
from kvjax_models.fingerprint import model_fingerprint
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import GenerationState
from kvjax_models.saves import Saves, describe_difference

FORMAT = 9  # increased with every change of a state's fields or their meaning
_SIZES = ("batch", "max_prompt_tokens", "max_new_tokens", "streaming")


class RestoredState(NamedTuple):
    """A state from disk."""

    step: int
    state: GenerationState
    notes: dict[str, Any]  # as passed to `save`


class SavedStates:
    """The saved states of one run.

    Attributes:
        saves: the saves in the run's directory.
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 2):
        """Opens a directory.

        Args:
            directory: directory of the run, created when something is saved.
            keep: number of states to keep.
        """
        self.saves = Saves(directory, keep)
        self.directory = self.saves.directory
        self.lock = self.saves.lock

    def save(
        self,
        step: int,
        generator: Generator,
        state: GenerationState,
        run: Mapping[str, Any] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes a settled state; see `Saves.save` for errors.

        Args:
            step: number of the state within the run, such as the number of tokens so far.
            generator: the generator of the state.
            state: the state as `Generator` returns it.
            run: further values that must be equal when the state is used again, as JSON.
            notes: values to return with the state, as JSON, such as the tokens so far.
        """
        self.saves.save(step, state, _manifest(generator, run), dict(notes or {}))

    def restore(self, generator: Generator, run: Mapping[str, Any] | None = None) -> RestoredState:
        """Reads the newest intact state onto the generator's devices; see `Saves.newest` for errors.

        Args:
            generator: the generator that will continue the state.
            run: the values that were saved with the state.

        Returns:
            The state.

        Raises:
            ValueError: if the state has another format, model, policy, size or run, with the first difference.
        """
        step = self.saves.newest()
        if difference := describe_difference(_manifest(generator, run), self.saves.manifest(step)):
            raise ValueError(f"the state of step {step} in {self.directory} belongs to another run: {difference}")
        return RestoredState(step, self.saves.restore(step, generator.init_state()), self.saves.notes(step))

    def generator_sizes(self) -> dict[str, Any]:
        """Returns the sizes of the newest state's generator, as keyword arguments of `Generator`."""
        return self.saves.manifest(self.saves.newest())["sizes"]


def describe_generator(generator: Generator) -> dict[str, Any]:
    """Returns everything about a generator that its states depend on, as JSON, with the decisive values first."""
    state = jax.tree_util.tree_leaves_with_path(jax.eval_shape(generator.init_state))
    return {
        "model": {
            **dataclasses.asdict(generator.config),
            "weight_dtype": generator.model.weight_dtype or jnp.dtype(generator.model.embedding.param_dtype).name,
            "weights": model_fingerprint(generator.model),
        },
        "sizes": {name: getattr(generator, name) for name in _SIZES},
        "policy": [kvjax.describe(policy) for policy in generator.policies],
        "arrays": {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in state},
    }


def _manifest(generator: Generator, run: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"format": FORMAT, **describe_generator(generator), "run": dict(run or {})}
