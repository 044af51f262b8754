"""Continuous batching: processes any number of prompts with a fixed number of batch rows.

Finished sequences free their row for the next request. A new prompt is prefilled separately, in steps between blocks of
decoding, and inserted between two blocks. Every sequence therefore sees the same blocks as it would alone: a
single-row generator with caches of the same size generates the same tokens, for every policy, and samples depend only
on the seed of the sequence. A sequence that is finished within a block keeps its row until the end of the block;
policies with a smaller `compact_every` have shorter blocks.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

import kvjax
from kvjax.budget import Budget, format_bytes
from kvjax.distributed.sharding import DATA
from kvjax.messages import shorten
from kvjax_models import compile_cache
from kvjax_models.generation.decode import NO_TOKEN, decode_block
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import (
    GenerationState,
    check_faults,
    check_finite,
    check_seed,
    compact_layers,
    constrain_state,
)
from kvjax_models.sharding import replicate

MAX_ROWS = 2**16  # of a batch; far above what any device holds
FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        prompt: token ids.
        max_new_tokens: maximum number of new tokens.
        question: token ids that are appended to the compressed cache after the prompt.
        seed: seed of sampling and of the policy's randomness, as for `Generator.init_state`.
        number: number of the request in results and errors; by default its index.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    question: Sequence[int] = ()
    seed: int = 0
    number: int | None = None


class RequestOutput(NamedTuple):
    """The tokens that a block added to a request."""

    number: int  # of the request
    tokens: list[int]
    finish_reason: FinishReason | None  # "stop": an end-of-text token or `should_stop`; None: not finished


class _RunningRequest(NamedTuple):
    """A request that occupies a row."""

    number: int
    max_position: int  # number of tokens, including the prompt, with which it is finished


def run_requests(
    generator: Generator,
    requests: Iterable[Request],
    *,
    max_prefill_steps: int | None = None,
    should_stop: Callable[[int, list[int]], bool] | None = None,
) -> Iterator[RequestOutput]:
    """Generates continuations of many prompts.

    Invalid requests raise a ValueError with their number.

    Args:
        generator: its batch size is the number of rows.
        requests: read one by one when a row is free.
        max_prefill_steps: maximum number of prefill steps (layers, or blocks of a streaming prefill) between two blocks
            of decoding. By default all free rows are filled first, which maximizes throughput.
        should_stop: called with the number of a request and its new tokens; returns whether it is finished.

    Yields:
        The new tokens of every running request after each block, in the order of rows.

    Raises:
        ValueError: if batch rows are sharded or `max_prefill_steps` is invalid.
    """
    compile_cache.free_compiled_programs(_PROGRAMS)
    if generator.mesh is not None and generator.mesh.shape[DATA] > 1:
        raise ValueError(
            f"batch rows are sharded over {generator.mesh.shape[DATA]} groups of devices, but continuous batching "
            "prefills single rows; use a mesh with data=1 (--mesh_data 1) and more devices per layer (--mesh_tensor)"
        )
    if max_prefill_steps is not None and max_prefill_steps < 1:
        raise ValueError(f"max_prefill_steps={max_prefill_steps} must be at least 1, or None for no limit")
    rows = _Rows(generator)
    prefills = _prefill_requests(generator.with_batch(1), requests)
    while True:
        steps = 0
        while rows.has_free() and (max_prefill_steps is None or not rows.running or steps < max_prefill_steps):
            try:
                prefilled = next(prefills)
            except StopIteration:
                break
            steps += 1
            if prefilled is not None:
                rows.insert(*prefilled)
                del prefilled
        if not rows.running:
            return
        yield from rows.decode_block(should_stop)


def max_batch_size(generator: Generator, memory_bytes: int) -> int:
    """Returns how many rows' caches fit into an amount of memory.

    Weights, the caches of the prompt that is being prefilled, and temporaries need additional memory.

    Args:
        generator: determines the caches; its own batch size is ignored.
        memory_bytes: bytes for the caches.

    Raises:
        ValueError: if the caches of a single row do not fit.
    """
    if memory_bytes < generator.row_bytes:
        raise ValueError(
            f"{format_bytes(memory_bytes)} are less than the {format_bytes(generator.row_bytes)} of one row's caches; "
            "allow more memory or use a smaller budget"
        )
    return memory_bytes // generator.row_bytes


def parse_batch_size(batch_size: int | str, generator: Generator) -> int:
    """Returns a number of rows.

    Args:
        batch_size: number of rows (8), or bytes for their caches ("2GiB").
        generator: determines the caches.

    Raises:
        ValueError: if it is neither.
    """
    try:
        size = Budget.of(batch_size)
    except ValueError:
        size = None
    if size is not None and size.bytes is not None:
        return min(max_batch_size(generator, size.bytes), MAX_ROWS)
    if size is None or size.slots is None or size.slots > MAX_ROWS:
        raise ValueError(
            f"batch_size={shorten(batch_size)} must be from 1 to {MAX_ROWS} rows (8), or bytes for their caches (2GiB)"
        )
    return size.slots


def seed_of_prompt(seed: int, number: int) -> int:
    """Returns the seed of a prompt by its number; seeds after the largest one continue with 0."""
    return (int(check_seed(seed)) + number) % 2**32


class _Rows:
    """The batch rows and the requests that occupy them."""

    def __init__(self, generator: Generator):
        self.generator, self.mesh = generator, generator.mesh
        self.running: dict[int, _RunningRequest] = {}  # by row
        self.state = self._finish(generator.init_state(), np.ones(generator.batch, bool))

    def has_free(self) -> bool:
        return len(self.running) < self.generator.batch

    def insert(self, request: _RunningRequest, state: GenerationState) -> None:
        """Puts a `request` into a free row, given its `state` after prefill."""
        row = next(row for row in range(self.generator.batch) if row not in self.running)
        self.state = _insert_row(self.state, state, replicate(np.array([row], np.int32), self.mesh), self.mesh)
        self.running[row] = request

    def decode_block(self, should_stop: Callable[[int, list[int]], bool] | None) -> Iterator[RequestOutput]:
        """Decodes one block of tokens in all rows.

        Args:
            should_stop: receives the number of a request and its new tokens; returns whether to finish the request.

        Yields:
            The new tokens of every running request.
        """
        generator = self.generator
        max_positions = np.zeros(generator.batch, np.int32)
        for row, request in self.running.items():
            max_positions[row] = request.max_position
        state, tokens = decode_block(
            generator.model,
            self.mesh,
            generator.sampling,
            generator.eos,
            generator.block_size,
            self.state,
            generator.block_size,
            max_positions,
            generator.scorer,
        )
        self.state = compact_layers(state)
        self._check()
        done = np.asarray(self.state.done)
        stopped = np.zeros(generator.batch, bool)
        for row, request in sorted(self.running.items()):
            new_tokens = tokens[row][tokens[row] != NO_TOKEN].tolist()
            stopped[row] = should_stop is not None and should_stop(request.number, new_tokens)
            reason: FinishReason | None = None
            if stopped[row] or (done[row] and new_tokens[-1] in generator.eos):
                reason = "stop"
            elif done[row]:
                reason = "length"
            if reason is not None:
                del self.running[row]
            yield RequestOutput(request.number, new_tokens, reason)
        if stopped.any():
            self.state = self._finish(self.state, stopped)

    def _finish(self, state: GenerationState, rows: Bool[np.ndarray, "B"]) -> GenerationState:
        return _finish_rows(state, replicate(rows, self.mesh), self.mesh)

    def _check(self) -> None:
        """Checks the state.

        Raises:
            ValueError: if logits or caches have faults, with the numbers of the prompts in the rows.
        """
        try:
            check_finite(self.state)
            check_faults(self.state, self.mesh)
        except ValueError as error:
            rows = ", ".join(f"{row}: prompt {request.number}" for row, request in sorted(self.running.items()))
            raise ValueError(f"{error}; the rows contain {rows}") from error


def _prefill_requests(
    generator: Generator, requests: Iterable[Request]
) -> Iterator[tuple[_RunningRequest, GenerationState] | None]:
    """Prefills requests one by one.

    Yields:
        None after every step, and each request with its state at its end.

    Raises:
        ValueError: if a request is invalid, with its number.
    """
    for index, request in enumerate(requests):
        number = index if request.number is None else request.number
        try:
            max_position = _max_position(generator, request)
            state = generator.init_state(request.seed)
            for text in (request.prompt, request.question):
                for new_state in generator.prefill_steps(state, [text], shared_lengths=True) if len(text) else ():
                    if new_state is None:
                        yield None
                    else:
                        state = new_state
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from error
        yield _RunningRequest(number, max_position), state
        del state  # its memory is free before the next one is created


def _max_position(generator: Generator, request: Request) -> int:
    """Returns the maximum number of tokens of a request, including the prompt.

    Raises:
        ValueError: if the request is invalid.
    """
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={request.max_new_tokens} must be at least 1")
    if not len(request.prompt):
        raise ValueError("the prompt is empty; it must have at least one token")
    prompt_tokens = len(request.prompt) + len(request.question)
    generator.check_capacity(np.array([prompt_tokens]), np.array([request.max_new_tokens]))
    return prompt_tokens + request.max_new_tokens


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def _insert_row(
    state: GenerationState, row_state: GenerationState, row: Int[Array, "1"], mesh: Mesh | None
) -> GenerationState:
    return constrain_state(kvjax.insert_rows(state, row_state, row), mesh)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def _finish_rows(state: GenerationState, rows: Array, mesh: Mesh | None) -> GenerationState:
    return constrain_state(dataclasses.replace(state, done=state.done | rows), mesh)


_PROGRAMS = (_insert_row, _finish_rows)
