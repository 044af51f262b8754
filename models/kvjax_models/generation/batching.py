"""Continuous batching: any number of prompts through a fixed number of rows.

A row that has ended gives its place to the next prompt. That prompt is read by itself, in max_prefill_steps between blocks of
decoding (a layer at a time, where it is read exactly), and put in where a block ends. So every row stands in its blocks
as it would alone: its tokens are those of its prompt alone in a cache of the same size, whatever the policy, and
what it samples follows from its own seed. A row that ends within a block waits for the block's end: policies with a
smaller `compact_every` have shorter blocks.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

import kvjax
from kvjax.budget import Budget, format_bytes
from kvjax.distributed.sharding import DATA
from kvjax_models import compile_cache
from kvjax_models.generation.decode import NO_TOKEN, decode_block
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import GenerationState, check_faults, check_finite, compact_layers, constrain_state
from kvjax_models.sharding import replicate

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and what is asked for.

    Attributes:
        prompt: token ids.
        max_new_tokens: most tokens to write.
        question: token ids that are read behind the prompt through the compressed cache: a question about it.
        seed: of sampling and of the policy's randomness, as `Generator.start` takes it.
        number: what results and errors call it by; None for its place among the requests.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    question: Sequence[int] = ()
    seed: int = 0
    number: int | None = None


class RequestOutput(NamedTuple):
    """What a block added to a request."""

    number: int  # of the request
    tokens: list[int]
    finish_reason: FinishReason | None  # "stop": an end-of-text token, or what `should_stop` said; None: there is more


class _Running(NamedTuple):
    """A request that has a row."""

    number: int
    end: int  # tokens of its row with which it ends at the latest


class _Read(NamedTuple):
    """A request that has been read, and its row's state."""

    request: _Running
    state: GenerationState


def run_requests(
    generator: Generator,
    requests: Iterable[Request],
    *,
    max_prefill_steps: int | None = None,
    should_stop: Callable[[int, list[int]], bool] | None = None,
) -> Iterator[RequestOutput]:
    """Writes what follows each of many prompts, through as many rows as the generator has.

    Args:
        requests: taken one by one, as rows fall free.
        max_prefill_steps: most max_prefill_steps of prompts (layers, or blocks of a streamed one) that are read between two blocks of
            decoding while rows run. None reads until every row has a prompt: the most requests per second, where nobody
            waits for single tokens.
        should_stop: of a request's number and the tokens that a block added to it, whether they end it.

    Yields:
        New tokens of a request after every block that it took part in; of several requests in the order of their rows.

    Raises:
        ValueError: for rows that lie on several devices' parts of a batch, and for a request that cannot be, with its
            number.
    """
    compile_cache.free_compiled_programs(_PROGRAMS)
    if generator.mesh is not None and generator.mesh.shape[DATA] > 1:
        raise ValueError(
            f"rows are read one at a time and cannot be divided among {generator.mesh.shape[DATA]} groups of devices: "
            f"make a mesh with data=1 (--mesh_data), whose devices share layers (--mesh_tensor)"
        )
    if max_prefill_steps is not None and max_prefill_steps < 1:
        raise ValueError(
            f"max_prefill_steps={max_prefill_steps}; it must be at least 1, or None for all that rows are free for"
        )
    mesh, steps = generator.mesh, replicate(np.int32(generator.block_size), generator.mesh)
    state = _all_done(generator.init_state(), mesh)
    reading = _read_each(generator.with_batch(1), requests)
    running: dict[int, _Running] = {}  # by row
    while True:
        taken = 0
        while len(running) < generator.batch and (
            max_prefill_steps is None or not running or taken < max_prefill_steps
        ):
            try:
                read = next(reading)
            except StopIteration:
                break
            taken += 1
            if read is not None:
                row = next(row for row in range(generator.batch) if row not in running)
                state = _with_row(state, read.state, replicate(np.array([row], np.int32), mesh), mesh)
                running[row] = read.request
                del read
        if not running:
            return
        ends = np.zeros(generator.batch, np.int32)
        for row, one in running.items():
            ends[row] = one.end
        state, blocks, count = decode_block(
            generator.model,
            mesh,
            generator.sampling,
            generator.eos,
            generator.block_size,
            state,
            steps,
            replicate(ends, mesh),
        )
        state = compact_layers(state)
        _check(state, mesh, running)
        tokens, done = np.asarray(blocks)[:, : int(count)], np.asarray(state.done)
        stopped = np.zeros(generator.batch, bool)
        for row, one in sorted(running.items()):
            new = tokens[row][tokens[row] != NO_TOKEN].tolist()
            stopped[row] = should_stop is not None and should_stop(one.number, new)
            reason: FinishReason | None = None
            if stopped[row] or (done[row] and new[-1] in generator.eos):
                reason = "stop"
            elif done[row]:
                reason = "length"
            if reason is not None:
                del running[row]
            yield RequestOutput(one.number, new, reason)
        if stopped.any():
            state = _ended(state, replicate(stopped, mesh), mesh)


def max_batch_size(generator: Generator, memory: int) -> int:
    """How many rows' caches fit into so many bytes. Weights, the caches of the row that is being read, and what
    programs hold while they run come on top. The generator's own batch does not matter.

    Raises:
        ValueError: where not even one does.
    """
    if memory < generator.row_bytes:
        raise ValueError(
            f"{format_bytes(memory)} hold no row: the caches of one take {format_bytes(generator.row_bytes)}"
        )
    return memory // generator.row_bytes


def parse_batch_size(batch_size: int | str, generator: Generator) -> int:
    """A number of rows as people write it: 8, or bytes for all caches ("2GiB")."""
    given = Budget.of(batch_size)
    if given.fraction is not None:
        raise ValueError(f"batch_size={batch_size!r}: give a number of rows (8) or bytes for all caches (2GiB)")
    if given.bytes is not None:
        return max_batch_size(generator, given.bytes)
    assert given.slots is not None
    return given.slots


def _read_each(reader: Generator, requests: Iterable[Request]) -> Iterator[_Read | None]:
    """Requests as they are read, one row each, and None after every piece before."""
    for place, request in enumerate(requests):
        number = place if request.number is None else request.number
        try:
            end = _checked_end(reader, request)
            state = reader.init_state(request.seed)
            for text in (request.prompt, request.question):
                for piece in reader.prefill_steps(state, [text], shared_lengths=True) if len(text) else ():
                    if piece is None:
                        yield None
                    else:
                        state = piece
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from error
        yield _Read(_Running(number, end), state)
        del state  # before the next one's is made


def _checked_end(reader: Generator, request: Request) -> int:
    """Tokens of a row with which a request ends at the latest."""
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={request.max_new_tokens}; it must be at least 1")
    if not len(request.prompt):
        raise ValueError("it is empty; a prompt needs at least one token")
    read = len(request.prompt) + len(request.question)
    reader.check_capacity(np.array([read]), np.array([request.max_new_tokens]))
    return read + request.max_new_tokens


def _check(state: GenerationState, mesh: Mesh | None, running: dict[int, _Running]) -> None:
    """Raises a ValueError where logits or caches are not sound, with the numbers of the prompts in their rows."""
    try:
        check_finite(state)
        check_faults(state, mesh)
    except ValueError as error:
        rows = ", ".join(f"{row}: prompt {one.number}" for row, one in sorted(running.items()))
        raise ValueError(f"{error}; rows are {rows}") from error


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def _with_row(
    state: GenerationState, other: GenerationState, row: Int[Array, "1"], mesh: Mesh | None
) -> GenerationState:
    """The state with a row of another; both stand where a block ends."""
    return constrain_state(kvjax.insert_rows(state, other, row), mesh)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def _ended(state: GenerationState, rows: Array, mesh: Mesh | None) -> GenerationState:
    """The state with these rows' turns ended."""
    return constrain_state(dataclasses.replace(state, done=state.done | rows), mesh)


def _all_done(state: GenerationState, mesh: Mesh | None) -> GenerationState:
    return _ended(state, replicate(np.ones(state.done.shape, bool), mesh), mesh)


_PROGRAMS = (_with_row, _ended)
