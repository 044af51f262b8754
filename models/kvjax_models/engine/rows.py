"""The batch rows of an engine on the device: inserting, decoding and freeing rows of one generation state."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

import kvjax
from kvjax.state import count_row_faults
from kvjax_models.prefix import Prefix
from kvjax_models.runner.decode import Prefixes, decode_block
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.sampling import SampledTokens
from kvjax_models.runner.state import GenerationState, compact_layers, constrain_state
from kvjax_models.sharding import replicate


class Rows:
    """The state of all rows, which exists while a row runs.

    Rows are inserted between two blocks only, where no token is staged.

    Attributes:
        generator: sizes and policies of the rows.
        state: the state; None while no row runs.
        in_block: tokens of the current block.
        entries: entries of the frozen prefixes of all groups of rows.
    """

    def __init__(self, generator: Generator, groups: int = 0) -> None:
        """Creates rows without requests.

        Args:
            generator: sizes and policies; its batch size is the number of rows.
            groups: number of groups whose rows share a prefix.
        """
        self.generator, self._mesh = generator, generator.mesh
        self.state: GenerationState | None = None
        self.in_block = 0
        self.entries: Prefixes = None
        self._prefixes: list[Prefix | None] = [None] * groups

    @property
    def prefixes(self) -> list[Prefix]:
        """The frozen prefixes of the groups."""
        return [prefix for prefix in self._prefixes if prefix is not None]

    def place(self, group: int, prefix: Prefix) -> None:
        """Lets the rows of a group share a frozen prefix."""
        if self._prefixes[group] is prefix:
            return
        self._prefixes[group] = prefix
        if len(self._prefixes) == 1:
            self.entries = prefix.entries
        elif self.entries is None:  # the first one fills all places
            self.entries = tuple(kvjax.repeat_rows(layer, len(self._prefixes)) for layer in prefix.entries)
        else:
            layers = zip(self.entries, prefix.entries, strict=True)
            self.entries = tuple(_write_prefix(layer, new, np.int32(group)) for layer, new in layers)

    def with_rows(self, states: Mapping[int, GenerationState]) -> GenerationState:
        """Returns an empty state of all rows with the states of some."""
        state = self.generator.init_state()
        for row, one in states.items():
            state = self._insert(state, one, row)
        return state

    def insert(self, state: GenerationState, rows: Collection[int]) -> None:
        """Inserts rows that were prefilled.

        Args:
            state: state of one row, or of all rows; donated.
            rows: where the one row is inserted, or which of all rows are.
        """
        batch, num_new = self.generator.batch, state.positions.shape[0]
        if num_new == batch and self.state is None:
            unused = [row not in rows for row in range(batch)]
            self.state = self._finish(state, np.array(unused)) if any(unused) else state
            return
        if self.state is None:
            self.state = self._finish(self.generator.init_state(), np.ones(batch, bool))
        for row in rows:
            self.state = self._insert(self.state, state if num_new == 1 else self._copy(state, row), row)

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of the caches of all rows; see `Generator.cache_sizes`."""
        assert self.state is not None
        return self.generator.cache_sizes(self.state)

    def decode(self, steps: int) -> SampledTokens:
        """Decodes tokens in all running rows, at most to the end of the block.

        Args:
            steps: number of decode steps.

        Returns:
            The new tokens.
        """
        assert self.state is not None
        generator = self.generator
        steps = min(steps, generator.block_size - self.in_block)
        self.state, sampled = decode_block(
            generator.split_model, self._mesh, generator.eos, generator.block_size, self.state, steps, self.entries
        )
        self.in_block += steps
        return sampled

    def finished(self) -> tuple[Bool[np.ndarray, "B"], Bool[np.ndarray, "B"]]:
        """Returns which rows are finished, and which have faults."""
        assert self.state is not None
        # Within a block, a fault can only show as logits that are not finite; compactions count the others.
        faults = _count_faults(self.state, self._mesh) if self._ends_block else self.state.not_finite
        return np.asarray(self.state.done), np.asarray(faults) > 0

    def end_block(self) -> None:
        """Compacts the tokens of a complete block."""
        if self.state is not None and self._ends_block:
            self.state, self.in_block = compact_layers(self.state), 0

    @property
    def _ends_block(self) -> bool:
        return self.in_block == self.generator.block_size

    def take(self, row: int) -> GenerationState | None:
        """Returns the settled state of a row; None if the compaction of its last tokens has faults."""
        assert self.state is not None
        state = compact_layers(self._copy(self.state, row))
        return None if np.asarray(_count_faults(state, self._mesh)).any() else state

    def describe_faults(self, row: int) -> str:
        """Returns the faults of a row."""
        try:
            kvjax.raise_faults(kvjax.take_rows(self.state, jnp.array([row])))
        except ValueError as error:
            return str(error)
        raise AssertionError("the row has faults")

    def finish(self, rows: Collection[int], *, is_last: bool) -> None:
        """Ends rows.

        Args:
            rows: the rows.
            is_last: whether no other row runs.
        """
        if is_last:  # without a compaction that nobody needs
            self.state, self.in_block = None, 0
        elif self.state is not None and rows:
            self.state = self._finish(self.state, np.isin(np.arange(self.generator.batch), [*rows]))

    def _copy(self, state: GenerationState, row: int) -> GenerationState:
        return _take_row(state, replicate(np.array([row], np.int32), self._mesh), self._mesh)

    def _insert(self, state: GenerationState, row_state: GenerationState, row: int) -> GenerationState:
        return _insert_row(state, row_state, replicate(np.array([row], np.int32), self._mesh), self._mesh)

    def _finish(self, state: GenerationState, rows: Bool[np.ndarray, "B"]) -> GenerationState:
        return _finish_rows(state, replicate(rows, self._mesh), self._mesh)


@functools.partial(jax.jit, donate_argnames=("entries",))
def _write_prefix(entries: kvjax.FrozenCache, new: kvjax.FrozenCache, group: Int[Array, ""]) -> kvjax.FrozenCache:
    return kvjax.insert_rows(entries, new, jnp.asarray(group, jnp.int32)[None])


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def _insert_row(
    state: GenerationState, row_state: GenerationState, row: Int[Array, "1"], mesh: Mesh | None
) -> GenerationState:
    return constrain_state(kvjax.insert_rows(state, row_state, row), mesh)


@functools.partial(jax.jit, static_argnames=("mesh",))
def _take_row(state: GenerationState, row: Int[Array, "1"], mesh: Mesh | None) -> GenerationState:
    return constrain_state(kvjax.take_rows(state, row), mesh)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def _finish_rows(state: GenerationState, rows: Array, mesh: Mesh | None) -> GenerationState:
    return constrain_state(dataclasses.replace(state, done=state.done | rows), mesh)


@functools.partial(jax.jit, static_argnames=("mesh",))
def _count_faults(state: GenerationState, mesh: Mesh | None) -> Int[Array, "B"]:
    """Returns the number of faults of every row."""
    faults: Any = count_row_faults(state)
    return faults
