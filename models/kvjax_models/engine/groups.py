"""The batch rows of an engine on the device: groups of rows of one size, and moving rows between states.

A state of rows is changed layer by layer, so that the old and the new entries of one layer exist at a time.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

import kvjax
from kvjax.distributed.sharding import shardings
from kvjax_models.prefix import Prefix
from kvjax_models.runner import decode
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.sampling import ANY_TOKEN, SampledTokens
from kvjax_models.runner.state import GenerationState, compact_layers, constrain_state, count_faults
from kvjax_models.sharding import replicate

P = TypeVar("P", kvjax.Cache, GenerationState)


class Group:
    """Rows of one size, with a common prefix or none.

    Rows are inserted between two blocks only, where no token is staged.

    Attributes:
        generator: sizes and policies of the rows, with one row.
        prefix: the shared prefix that the rows continue.
        kind: numbers that are equal for groups with equal plans of rows and prefix, which share programs.
        numbers: the request of every row; None for a free one.
        in_block: tokens of the current block.
    """

    def __init__(
        self,
        generator: Generator,
        prefix: Prefix | None,
        state: GenerationState,
        numbers: Sequence[int],
        width: int,
        kind: tuple[int, ...],
    ) -> None:
        """Creates a group of rows that are prefilled.

        Args:
            state: state of the rows, which the caller must not use again.
            numbers: the requests of its first rows; the others are free.
            width: number of rows.
        """
        self.generator, self.prefix, self.kind, self.in_block = generator, prefix, kind, 0
        self.numbers: list[int | None] = []
        self._state, self._mesh = state, generator.mesh
        self._set_rows(range(len(numbers)), numbers, width)

    @property
    def width(self) -> int:
        """Number of rows."""
        return len(self.numbers)

    @property
    def shape(self) -> tuple[int, ...]:
        """What the programs of the group depend on."""
        return (*self.kind, self.width)

    @property
    def used(self) -> dict[int, int]:
        """The requests by row."""
        return {row: number for row, number in enumerate(self.numbers) if number is not None}

    @property
    def steps_left(self) -> int:
        """Decode steps to the end of the block."""
        return self.generator.block_size - self.in_block

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of the caches of all rows; see `Generator.cache_sizes`."""
        return self.generator.cache_sizes(self._state)

    # --- rows ---

    def insert(self, state: GenerationState, numbers: Sequence[int], width: int) -> None:
        """Inserts rows.

        Args:
            numbers: the requests of its first rows; the others are dropped.
            width: the new number of rows, with room for them.
        """
        self.resize(width)
        free = [row for row, number in enumerate(self.numbers) if number is None]
        many = state.positions.shape[0] > 1
        for index, number in enumerate(numbers):
            one = take_rows(state, [index], self._mesh) if many else state
            self._state = _insert_row(self._state, one, free[index], self._mesh)
            self.numbers[free[index]] = number

    def remove(self, rows: Sequence[int]) -> GenerationState:
        """Removes rows.

        Returns:
            Their state, which may be inserted elsewhere.
        """
        if len(rows) == self.width:
            self.numbers = [None] * self.width
            return self._release()
        state = take_rows(self._state, rows, self._mesh)
        self.free(rows)
        return state

    def free(self, rows: Sequence[int]) -> None:
        """Ends rows."""
        for row in rows:
            self.numbers[row] = None
        if rows and self.used:
            self._finish([row in rows for row in range(self.width)])

    def resize(self, width: int) -> None:
        """Changes the number of rows."""
        used = self.used
        if width != self.width:
            self._set_rows([*used], [*used.values()], width)

    def _set_rows(self, rows: Sequence[int], numbers: Sequence[int], width: int) -> None:
        """Keeps some rows, as the first ones of another width."""
        if self._state.positions.shape[0] != width or [*rows] != [*range(len(rows))]:
            taken = [*rows, *[rows[0]] * (width - len(rows))]
            self._state = take_rows(self._release(), taken, self._mesh)
        self.numbers = [*numbers, *[None] * (width - len(numbers))]
        self._finish([number is None for number in self.numbers])

    def _release(self) -> GenerationState:
        """Returns the state, which the group no longer holds."""
        return self.__dict__.pop("_state")

    def _finish(self, rows: Sequence[bool]) -> None:
        if any(rows):
            state = dataclasses.replace(self._state, layers=())
            state = _finish_rows(state, replicate(np.array(rows), self._mesh), self._mesh)
            self._state = dataclasses.replace(state, layers=self._state.layers)

    # --- steps ---

    def allow(self, tokens: Mapping[int, Int[np.ndarray, "W"]]) -> None:
        """Sets the tokens that rows may choose next; the others may choose any.

        Args:
            tokens: tokens by row, a bit each.
        """
        before = self._state.sampling.allowed
        allowed = np.full(before.shape, ANY_TOKEN, np.int32)
        for row, mask in tokens.items():
            allowed[row] = mask
        sampling = dataclasses.replace(self._state.sampling, allowed=jax.device_put(allowed, before.sharding))
        self._state = dataclasses.replace(self._state, sampling=sampling)

    def finished(self) -> tuple[Bool[np.ndarray, "B"], Bool[np.ndarray, "B"]]:
        """Returns which rows are finished, and which have faults."""
        # Within a block, a fault can only show as logits that are not finite; compactions count the others.
        faults = self._state.not_finite if self.steps_left else count_faults(self._state, self._mesh)
        return np.asarray(self._state.done), np.asarray(faults) > 0

    def end_block(self) -> None:
        """Compacts the tokens of a complete block."""
        if not self.steps_left:
            self._state, self.in_block = compact_layers(self._state), 0

    def take_settled(self, row: int) -> GenerationState | None:
        """Returns a copy of a row without staged tokens; None if the compaction of its last ones has faults."""
        state = compact_layers(take_rows(self._state, [row], self._mesh))
        return None if np.asarray(count_faults(state, self._mesh)).any() else state

    def describe_faults(self, row: int) -> str:
        """Returns the faults of a row."""
        try:
            kvjax.raise_faults(kvjax.take_rows(self._state, jnp.array([row])))
        except ValueError as error:
            return str(error)
        raise AssertionError("the row has faults")

    def as_decoded(self) -> decode.Group:
        """Returns the group as a decode step takes it."""
        prefixes = None if self.prefix is None else self.prefix.entries
        return decode.Group(self.generator.split_model, self._state, prefixes)

    def after(self, state: GenerationState, steps: int) -> None:
        """Takes the state after decode steps."""
        self._state = state
        self.in_block += steps


def decode_together(groups: Sequence[Group], steps: int) -> list[SampledTokens]:
    """Decodes tokens in the running rows of groups, by one program.

    Args:
        steps: maximum number of steps; they end with the first block that ends.

    Returns:
        The new tokens of every group.
    """
    steps = min(steps, *(group.steps_left for group in groups))
    generator, block_size = groups[0].generator, max(group.generator.block_size for group in groups)
    decoded = [group.as_decoded() for group in groups]
    states, sampled = decode.decode_groups(decoded, generator.eos, block_size, steps)
    for group, state in zip(groups, states, strict=True):
        group.after(state, steps)
    return sampled


# --- states of rows ---


def take_rows(state: GenerationState, rows: Sequence[int], mesh: Mesh | None) -> GenerationState:
    """Returns a copy of rows.

    Args:
        state: the state. If the caller holds it no longer, every layer is freed once it is copied.
        rows: the rows; one may appear several times.
    """
    index = replicate(np.array(rows, np.int32), mesh)
    layers, state = list(state.layers), dataclasses.replace(state, layers=())
    for number in range(len(layers)):
        layers[number] = _take(layers[number], index, mesh)
    return dataclasses.replace(_take(state, index, mesh), layers=tuple(layers))


def resize_rows(state: GenerationState, generator: Generator) -> GenerationState:
    """Returns rows of a full cache with the capacity of another size.

    Args:
        state: state of the rows, without staged tokens, which the caller must not hold; donated.
    """
    layers, state = list(state.layers), dataclasses.replace(state, layers=())
    for number, spec in enumerate(generator.specs):
        layers[number] = _resize(layers[number], spec.max_prompt_tokens, spec.max_new_tokens)
    return dataclasses.replace(state, layers=tuple(layers))


def _insert_row(state: GenerationState, row_state: GenerationState, row: int, mesh: Mesh | None) -> GenerationState:
    """Returns a state with a row of another one; the first state is donated."""
    index = replicate(np.array([row], np.int32), mesh)
    new = [_insert(*caches, index, mesh) for caches in zip(state.layers, row_state.layers, strict=True)]
    rests = [dataclasses.replace(one, layers=()) for one in (state, row_state)]
    return dataclasses.replace(_insert(*rests, index, mesh), layers=tuple(new))


# Of one layer, or of the rest of a state.


@functools.partial(jax.jit, static_argnames=("mesh",))
def _take(part: P, rows: Int[Array, "R"], mesh: Mesh | None) -> P:
    return _constrain(kvjax.take_rows(part, rows), mesh)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("part",))
def _insert(part: P, row_part: P, row: Int[Array, "1"], mesh: Mesh | None) -> P:
    return _constrain(kvjax.insert_rows(part, row_part, row), mesh)


_resize = jax.jit(kvjax.resize, static_argnums=(1, 2))


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def _finish_rows(state: GenerationState, rows: Array, mesh: Mesh | None) -> GenerationState:
    return constrain_state(dataclasses.replace(state, done=state.done | rows), mesh)


def _constrain(part: Any, mesh: Mesh | None) -> Any:
    """Returns a layer or a state in its sharding."""
    if mesh is None:
        return part
    if isinstance(part, GenerationState):
        return constrain_state(part, mesh)
    return jax.lax.with_sharding_constraint(part, shardings(part, mesh))
