r"""Continuous batching: answers any number of requests with a fixed number of batch rows.

    engine = llm.cache("snapkv", "25%").engine(rows=8, max_prompt_tokens=8192, max_new_tokens=256)
    number = engine.add("Once upon a time", sampling=Sampling(temperature=0.7), stop="\n")
    while engine.has_unfinished:
        for output in engine.step():
            print(output.number, output.text, output.finish_reason)

A request waits until a row is free. Its prompt is prefilled in steps between blocks of decoding and then inserted
between two blocks. Every sequence therefore sees the same blocks as it would alone: its tokens depend on its own
prompt, parameters and seed only. A sequence that finishes within a block keeps its row until the end of the block;
policies with a smaller `compact_every` have shorter blocks.

The rows of an engine for documents continue texts that were compressed before. The entries of a text are held once, and
a step reads them once for all rows that ask about it; a row holds the tokens of its question and answer.
"""

import collections
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

import kvjax
from kvjax.distributed.sharding import DATA
from kvjax.spec import check_integer
from kvjax.state import count_row_faults
from kvjax_models import compile_cache
from kvjax_models.formats.tokenizer import CONTEXT_TOKENS, Tokenizer
from kvjax_models.generation.answer_text import AnswerText, check_stop
from kvjax_models.generation.decode import NO_TOKEN, Texts, decode_block
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.sampling import GREEDY, SampledTokens, Sampling, row_sampling
from kvjax_models.generation.state import GenerationState, check_seed, compact_layers, constrain_state
from kvjax_models.keywords import suggest_keywords
from kvjax_models.prompts import Prompt, TemplateOptions, encode_prompt, is_tokens
from kvjax_models.sharding import replicate
from kvjax_models.stopwatch import Stopwatch

if TYPE_CHECKING:
    from kvjax_models.document import Document

FinishReason = Literal["stop", "length", "error", "abort"]


class Turn(NamedTuple):
    """A finished sequence with its cache, which requests with further tokens can continue.

    Attributes:
        tokens: the prompt and all new tokens.
        text: text of the answer.
        num_first: tokens of the sequence's first prompt; 0 after a document.
        state: the settled state of its row.
    """

    tokens: tuple[int, ...]
    text: str
    num_first: int
    state: GenerationState


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one new token, before penalties and temperature.

    Attributes:
        token: the token.
        logprob: its natural log-probability.
        top: the most likely tokens and their log-probabilities, as many as `Sampling.logprobs`.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Output(NamedTuple):
    """The new tokens of a request after a step.

    Attributes:
        number: number of the request.
        text: new text; characters at its end that may be the start of a stop string come later. The last output of
            a request has all that were held back, also if it failed or was aborted.
        tokens: new tokens, including an end-of-text token and the tokens of a stop string.
        finish_reason: "stop" for an end-of-text token or a stop string, "length" for the maximum number of tokens,
            "error" for an invalid request, "abort" after `Engine.abort`; None if the request is not finished.
        logprobs: one item per new token, if the request asked for them.
        error: message of a failed request.
        turn: the finished sequence, if the request asked for it and it did not finish at a stop string.
    """

    number: int
    text: str
    tokens: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    turn: Turn | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """A sequence to generate.

    Attributes:
        number: number of the request.
        prompt: token ids; with a document, those after its text.
        document: the document that the sequence continues.
        sampling: parameters of sampling.
        stop: strings that finish the sequence.
        max_new_tokens: maximum number of new tokens.
        seed: seed of sampling.
        prompt_seed: seed of the policy's random numbers.
        turn: the sequence that it continues.
        keep: whether its last output has the sequence as a `Turn`.
    """

    number: int
    prompt: Sequence[int]
    document: "Document | None"
    sampling: Sampling
    stop: tuple[str, ...]
    max_new_tokens: int
    seed: int
    prompt_seed: int
    turn: Turn | None
    keep: bool

    def has_prompt_of(self, other: "Request") -> bool:
        """Returns whether the state after the prompt is the same, except for the seed of sampling."""
        return (
            self.prompt_seed == other.prompt_seed
            and self.document is other.document
            and self.turn is other.turn
            and self.sampling == other.sampling
            and self.prompt == other.prompt
        )

    @property
    def context(self) -> list[int]:
        """The last tokens before the answer."""
        before = () if self.document is None else self.document.tokens
        return [*before[-CONTEXT_TOKENS:], *self.prompt][-CONTEXT_TOKENS:]


class _Prefill(NamedTuple):
    """Requests that are being prefilled, by row, and the steps that are left."""

    requests: dict[int, Request]
    steps: Iterator[GenerationState | None]


class _Running(NamedTuple):
    """A request that occupies a row."""

    request: Request
    answer: AnswerText


class Engine:
    """Batch rows, and the requests that occupy them or wait; `CachedModel.engine` makes one.

    Attributes:
        generator: model, policy and sizes of the rows' caches.
        num_documents: number of documents that rows may continue at a time; 0 if requests are plain prompts.
        prefill_seconds: seconds of prefill so far, without compilation.
        decode_seconds: seconds of decoding so far, without compilation.
        cache_sizes: bytes of the rows' caches (`Generator.cache_sizes`); zeros before the first row.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        generator: Generator,
        *,
        documents: int = 0,
        reader: Generator | None = None,
        max_prefill_steps: int | None = None,
        stream_interval: int | None = None,
    ):
        """Creates an engine without requests.

        Args:
            tokenizer: tokenizer of the model.
            generator: its batch size is the number of rows; with documents a multiple of their number.
            documents: see `num_documents`.
            reader: sizes and policies of the documents' texts; required for documents.
            max_prefill_steps: maximum number of prefill steps (layers, or blocks of a question) between two blocks of
                decoding. By default all free rows are filled first, which maximizes throughput.
            stream_interval: tokens after which a step returns within a block; by default a step is an entire block.

        Raises:
            ValueError: if batch rows are sharded or an argument is invalid.
        """
        compile_cache.free_compiled_programs(_PROGRAMS)
        if generator.mesh is not None and generator.mesh.shape[DATA] > 1:
            raise ValueError(
                f"batch rows are sharded over {generator.mesh.shape[DATA]} groups of devices, but continuous batching "
                "prefills single rows; use a mesh with data=1 (--mesh_data 1) and more devices per layer "
                "(--mesh_tensor)"
            )
        for name, value in (("max_prefill_steps", max_prefill_steps), ("stream_interval", stream_interval)):
            if value is not None:
                check_integer(name, value, minimum=1)
        self.generator, self.num_documents, self._tokenizer = generator, documents, tokenizer
        self._reader = reader
        self._row_generator, self._mesh = generator.with_batch(1), generator.mesh
        self._max_prefill_steps, self._stream_interval = max_prefill_steps, stream_interval
        self._waiting: collections.deque[Request] = collections.deque()
        self._prefill: _Prefill | None = None
        self._alone: set[int] = set()  # waiting requests that were in a group of which one failed
        self._prefilled: tuple[Request, GenerationState] | None = None  # the last one, if others have its prompt
        self._running: dict[int, _Running] = {}  # by row
        self._finished: list[Output] = []  # that the next step returns
        self._documents: list[Document | None] = [None] * documents  # of every group of rows
        self._texts: Texts = None  # the frozen texts of all groups
        self._next_number, self._in_block = 0, 0
        self._state: GenerationState | None = None  # of all rows; None while none runs
        self.prefill_seconds = self.decode_seconds = 0.0
        self.cache_sizes = dict.fromkeys(("cache_bytes", "host_bytes", "read_bytes", "full_cache_bytes"), 0)

    @property
    def has_unfinished(self) -> bool:
        """Whether requests wait or run, or outputs were not returned yet."""
        return bool(self._waiting or self._running or self._finished or self._prefill is not None)

    @property
    def num_free_rows(self) -> int:
        """Rows that no request occupies."""
        prefilling = 0 if self._prefill is None else len(self._prefill.requests)
        return self.generator.batch - len(self._running) - prefilling

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._waiting)

    @suggest_keywords()
    def add(
        self,
        prompt: Prompt | Sequence[int],
        document: "Document | None" = None,
        *,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] = (),
        max_new_tokens: int | None = None,
        seed: int = 0,
        prompt_seed: int | None = None,
        template_options: TemplateOptions = None,
        turn: Turn | None = None,
        keep: bool = False,
    ) -> int:
        """Adds a request.

        Args:
            prompt: a text, a conversation, or token ids; with a document, a question as for `Document.ask`, or token
                ids that follow the document.
            document: the document that the request continues, in an engine for documents.
            sampling: parameters of sampling.
            stop: strings that finish the sequence and are not part of its text; they may contain special tokens.
            max_new_tokens: maximum number of new tokens; by default the capacity of the caches.
            seed: seed of sampling.
            prompt_seed: seed of the policy's random numbers, by default `seed`. Several answers to one prompt have the
                same one: with equal `sampling` and different `seed`, the prompt is processed once for those that wait.
            template_options: variables of the chat template, for a conversation.
            turn: an earlier sequence of an equal engine, with the same document, with whose tokens the prompt begins;
                only the tokens after them are processed. All tokens after the first prompt count as new ones.
            keep: whether the last output has the sequence as a `Turn`, with a copy of its cache.

        Returns:
            The number of the request.

        Raises:
            ValueError: if an argument is invalid, the sequence is too long, or the document does not fit.
            TypeError: if the prompt has another type.
        """
        if template_options and (document is not None or is_tokens(prompt)):
            raise ValueError("template_options apply to conversations only, and those of a document to its text")
        if is_tokens(prompt):
            tokens: Sequence[int] = prompt
        elif document is None:
            tokens = encode_prompt(self._tokenizer, cast(Prompt, prompt), template_options)
        else:
            tokens = document.encode(cast(Prompt, prompt))
        if turn is not None and (len(tokens) <= len(turn.tokens) or tuple(tokens[: len(turn.tokens)]) != turn.tokens):
            raise ValueError(f"the prompt must continue the {len(turn.tokens)} tokens of the turn")
        capacity = self._capacity(document, turn) - len(tokens)
        limit = max(capacity, 1) if max_new_tokens is None else check_integer("max_new_tokens", max_new_tokens, 1)
        if document is None:
            if not len(tokens):
                raise ValueError("the prompt is empty; it must have at least one token")
            if turn is None and len(tokens) > self.generator.max_prompt_tokens:
                raise ValueError(
                    f"{len(tokens)} tokens exceed max_prompt_tokens={self.generator.max_prompt_tokens}; shorten the "
                    "prompt or pass a larger number"
                )
        if capacity < limit:
            raise ValueError(
                f"{len(tokens)} tokens of the prompt and max_new_tokens={limit} exceed the "
                f"{capacity + len(tokens)} tokens that the caches have capacity for"
            )
        before = 0 if document is None else document.num_tokens
        self.generator.check_context(before + len(tokens) + limit)
        check_seed(seed)
        prompt_seed = seed if prompt_seed is None else int(check_seed(prompt_seed))
        stops = check_stop(stop)
        seeds = seed, prompt_seed
        request = Request(self._next_number, list(tokens), document, sampling, stops, limit, *seeds, turn, keep)
        self._next_number += 1
        self._waiting.append(request)
        return request.number

    def _capacity(self, document: "Document | None", turn: Turn | None) -> int:
        """Returns how many tokens of prompt and answer a row holds."""
        if document is None:
            if self.num_documents:
                raise ValueError("the rows of this engine continue documents; pass the document of the request")
            first = self.generator.max_prompt_tokens if turn is None else turn.num_first
            return first + self.generator.max_new_tokens
        if not self.num_documents:
            raise ValueError("this engine takes plain prompts; pass documents= to CachedModel.engine for documents")
        document.check_engine(self.generator, self._reader)
        return self.generator.max_new_tokens

    def abort(self, number: int) -> None:
        """Ends a request, whose last output has the finish reason "abort"; does nothing if it is finished."""
        for request in self._waiting:
            if request.number == number:
                self._waiting.remove(request)
                self._finished.append(Output(number, "", [], "abort"))
                return
        for row, request in () if self._prefill is None else self._prefill.requests.items():
            if request.number == number:
                assert self._prefill is not None
                del self._prefill.requests[row]
                self._prefill = self._prefill if self._prefill.requests else None
                self._finished.append(Output(number, "", [], "abort"))
                return
        for row, (request, answer) in self._running.items():
            if request.number == number:
                answer.finish()
                self._finished.append(Output(number, answer.take(is_finished=True), [], "abort"))
                self._free_rows([row])
                return

    def take_held_text(self, number: int) -> str:
        """Returns the text of a running request that was held back, for a caller that ends it.

        It may be the start of a stop string, or the bytes of an incomplete character.

        Args:
            number: number of the request.
        """
        for request, answer in self._running.values():
            if request.number == number:
                answer.finish()
                return answer.take(is_finished=True)
        return ""

    def step(self) -> list[Output]:
        """Prefills waiting requests while rows are free, and decodes one block of tokens in all rows.

        Returns:
            The new tokens of every running request, and requests that finished without any.
        """
        watch = Stopwatch()
        # Rows are inserted between two blocks only, where no tokens are staged.
        steps = 0
        while self._in_block == 0 and (self._max_prefill_steps is None or steps < self._max_prefill_steps):
            if self._prefill is None and not self._start_prefill():
                break
            self._continue_prefill()
            steps += 1
        self.prefill_seconds += watch.seconds
        watch = Stopwatch()
        outputs, self._finished = self._finished, []
        if self._running:
            outputs += self._decode()
        self.decode_seconds += watch.seconds
        return outputs

    def run(self) -> Iterator[Output]:
        """Yields outputs until all requests are finished."""
        while self.has_unfinished:
            yield from self.step()

    # --- prefill ---

    def _start_prefill(self) -> bool:
        """Starts to prefill waiting requests that have a free row; returns whether there are any."""
        requests = self._questions() or self._first_request()
        for request in requests.values():
            self._waiting.remove(request)
            self._alone.discard(request.number)
        if requests:
            [request, *others] = requests.values()
            steps = self._prefill_questions(requests) if others else self._prefill_steps(request)
            self._prefill = _Prefill(requests, steps)
        return bool(requests)

    def _first_request(self) -> dict[int, Request]:
        """Returns the first waiting request that has a free row, by that row."""
        for request in self._waiting:
            if (row := self._find_row(request.document)) is not None:
                return {row: request}
        return {}

    def _questions(self) -> dict[int, Request]:
        """Returns the waiting questions about documents that are prefilled together, by row, if that saves time.

        Together they are padded to the longest one and take all rows; alone, a row needs two to three times the time.
        """
        found: dict[int, Request] = {}
        for request in self._waiting:
            is_question = request.document is not None and request.turn is None and len(request.prompt)
            others = [*found.values(), *([] if self._prefilled is None else [self._prefilled[0]])]
            if not is_question or request.number in self._alone or any(one.has_prompt_of(request) for one in others):
                break
            if (row := self._find_row(request.document, found)) is not None:
                found[row] = request
        blocks = [-(-len(request.prompt) // self.generator.block_size) for request in found.values()]
        together = max(blocks, default=0) * self.generator.batch
        return found if len(found) > 1 and together <= 2 * sum(blocks) else {}

    def _find_row(self, document: "Document | None", taken: Collection[int] = ()) -> int | None:
        """Returns a free row; for a document a row of its group, which takes the place of one that no row asks.

        Args:
            document: the document of a request.
            taken: rows that are not free although no request runs in them.
        """
        free = [row for row in range(self.generator.batch) if row not in self._running and row not in taken]
        if document is None:
            return next(iter(free), None)
        if document in self._documents:
            return next((row for row in self._group(self._documents.index(document)) if row in free), None)
        # Empty places first, so that documents stay as long as possible.
        unused = [slot for slot in range(self.num_documents) if set(self._group(slot)) <= set(free)]
        slot = min(unused, key=lambda slot: self._documents[slot] is not None, default=None)
        if slot is None:
            return None
        self._texts = _insert_text(self._texts, document.texts, slot, self.num_documents)
        self._documents[slot] = document
        return self._group(slot)[0]

    def _group(self, slot: int) -> range:
        """Returns the rows of a document's place."""
        size = self.generator.batch // self.num_documents
        return range(slot * size, (slot + 1) * size)

    def _prefill_questions(self, requests: Mapping[int, Request]) -> Iterator[GenerationState | None]:
        """Yields None after every step of the prefill of several questions, and the state of all rows at its end."""
        state = self.generator.init_state()
        for row, request in requests.items():
            assert request.document is not None
            own = request.document.tail_state(self._row_generator, request.prompt_seed, request.sampling)
            state = self._insert(state, self._with_limit(own, request), row)
        # A row without a request processes a token that nobody reads.
        prompts = [requests[row].prompt if row in requests else [0] for row in range(self.generator.batch)]
        yield from self.generator.prefill_steps(state, prompts, self._texts)

    def _prefill_steps(self, request: Request) -> Iterator[GenerationState | None]:
        """Yields None after every step of prefill, and the state of the row at its end."""
        generator, document = self._row_generator, request.document
        if self._prefilled is not None and self._prefilled[0].has_prompt_of(request):
            yield generator.reseed(self._prefilled[1], request.seed)
            return
        if request.turn is not None:
            state = self._continue_turn(request.turn.state, request)
            rest = request.prompt[len(request.turn.tokens) :]
            yield from generator.prefill_steps(state, [rest], None if document is None else document.texts)
            return
        if document is None:
            state = generator.init_state(request.prompt_seed, request.sampling)
            yield from generator.prefill_steps(state, [request.prompt], shared_lengths=True)
            return
        state = document.tail_state(generator, request.prompt_seed, request.sampling)
        if not len(request.prompt):
            yield state
            return
        yield from generator.prefill_steps(state, [request.prompt], document.texts)

    def _continue_turn(self, state: GenerationState, request: Request) -> GenerationState:
        """Returns a copy of a turn's state with seed and sampling of a request."""
        old, vocab_size = state.sampling, self.generator.config.vocab_size
        sampling = row_sampling([request.sampling], vocab_size, self._mesh)
        sampling = dataclasses.replace(sampling, in_prompt=old.in_prompt | (old.counts > 0))
        copy = dataclasses.replace(self._copy_row(state, 0), sampling=sampling)
        return self._row_generator.reseed(copy, request.seed)

    def _copy_row(self, state: GenerationState, row: int) -> GenerationState:
        return _take_row(state, replicate(np.array([row], np.int32), self._mesh), self._mesh)

    def _continue_prefill(self) -> None:
        """Runs a step of the current prefill; inserts its rows after the last one."""
        assert self._prefill is not None
        requests, steps = self._prefill
        try:
            state = next(steps)
        except ValueError as error:
            self._prefill = None
            if len(requests) > 1:
                self._alone.update(request.number for request in requests.values())
                self._waiting.extendleft(reversed(requests.values()))
            else:
                self._finished += [Output(one.number, "", [], "error", error=str(error)) for one in requests.values()]
            return
        if state is None:
            return
        self._prefill = None
        is_single = state.positions.shape[0] == 1
        if is_single:
            [(row, request)] = requests.items()
            # The only row's state is donated to decoding.
            is_shared = self.generator.batch > 1 and any(request.has_prompt_of(other) for other in self._waiting)
            self._prefilled = (request, state) if is_shared else None
            state = self._with_limit(state, request)
        if state.positions.shape[0] == self.generator.batch and self._state is None:
            unused = [row not in requests for row in range(self.generator.batch)]
            self._state = self._finish(state, np.array(unused)) if any(unused) else state
        else:
            if self._state is None:
                self._state = self._finish(self.generator.init_state(), np.ones(self.generator.batch, bool))
            for row in requests:
                self._state = self._insert(self._state, state if is_single else self._copy_row(state, row), row)
        if not self._running:  # the sizes of all rows, which do not change
            self.cache_sizes = self.generator.cache_sizes(self._state)
        for row, request in requests.items():
            self._running[row] = _Running(request, AnswerText(self._tokenizer, request.context, request.stop))

    def _with_limit(self, state: GenerationState, request: Request) -> GenerationState:
        """Returns the state of a row with the maximum length and the seed of a request."""
        limit = len(request.prompt) + request.max_new_tokens
        limit += 0 if request.document is None else request.document.num_tokens
        state = dataclasses.replace(state, max_positions=replicate(np.array([limit], np.int32), self._mesh))
        is_seeded = request.seed == request.prompt_seed
        return state if is_seeded else self._row_generator.reseed(state, request.seed)

    def _insert(self, state: GenerationState, row_state: GenerationState, row: int) -> GenerationState:
        return _insert_row(state, row_state, replicate(np.array([row], np.int32), self._mesh), self._mesh)

    # --- decoding ---

    def _decode(self) -> list[Output]:
        """Decodes a block, or a part of it with `stream_interval`, in all rows."""
        assert self._state is not None
        generator, block_size = self.generator, self.generator.block_size
        steps = min(self._stream_interval or block_size, block_size - self._in_block)
        self._state, sampled = decode_block(
            generator.split_model,
            self._mesh,
            generator.eos,
            block_size,
            self._state,
            steps,
            self._texts,
        )
        self._in_block += steps
        # Within a block, a fault can only show as logits that are not finite; compactions count the others.
        ends_block = self._in_block == block_size
        faults = np.asarray(_count_faults(self._state, self._mesh) if ends_block else self._state.not_finite)
        done = np.asarray(self._state.done)
        rows = sorted(self._running)
        outputs = [self._output(row, sampled, bool(done[row]), faults[row] > 0) for row in rows]
        self._free_rows([row for row, output in zip(rows, outputs, strict=True) if output.finish_reason is not None])
        if self._state is not None and ends_block:
            self._state, self._in_block = compact_layers(self._state), 0
        return outputs

    def _output(self, row: int, sampled: SampledTokens, is_done: bool, is_faulty: bool) -> Output:
        """Returns the output of a row's request after a block."""
        request, answer = self._running[row]
        count = int(np.sum(sampled.token[row] != NO_TOKEN))
        if is_faulty:
            answer.finish()  # the text before this block, which is valid
            return Output(request.number, answer.take(True), [], "error", error=self._describe_faults(row))
        num_before = len(answer.tokens)
        answer.push(sampled.token[row, :count].tolist())
        tokens = answer.tokens[num_before:]
        reason: FinishReason | None = None
        if answer.is_stopped or (is_done and answer.tokens[-1] in self.generator.eos):
            reason = "stop"
        elif is_done:
            reason = "length"
        turn = None
        if reason is not None:
            answer.finish()
            turn = self._take_turn(row) if request.keep and not answer.is_stopped else None
        logprobs = None
        if (top := request.sampling.logprobs) is not None:
            logprobs = [_token_logprobs(sampled, row, step, top) for step in range(len(tokens))]
        return Output(request.number, answer.take(reason is not None), tokens, reason, logprobs, turn=turn)

    def _take_turn(self, row: int) -> Turn | None:
        """Returns the finished sequence of a row; None if the compaction of its last tokens has faults."""
        assert self._state is not None
        request, answer = self._running[row]
        state = compact_layers(self._copy_row(self._state, row))
        if np.asarray(_count_faults(state, self._mesh)).any():
            return None
        first = 0 if request.document is not None else len(request.prompt)
        first = first if request.turn is None else request.turn.num_first
        return Turn((*request.prompt, *answer.tokens), answer.text, first, state)

    def _describe_faults(self, row: int) -> str:
        """Returns the faults of a row."""
        try:
            kvjax.raise_faults(kvjax.take_rows(self._state, jnp.array([row])))
        except ValueError as error:
            return str(error)
        raise AssertionError("the row has faults")

    def _free_rows(self, rows: Sequence[int]) -> None:
        """Ends the requests of rows."""
        is_freed = np.zeros(self.generator.batch, bool)
        for row in rows:
            del self._running[row]
            is_freed[row] = True
        if not self._running:  # without a compaction that nobody needs
            self._state, self._in_block = None, 0
        elif self._state is not None and rows:
            self._state = self._finish(self._state, is_freed)

    def _finish(self, state: GenerationState, rows: Bool[np.ndarray, "B"]) -> GenerationState:
        return _finish_rows(state, replicate(rows, self._mesh), self._mesh)


def seed_of_prompt(seed: int, number: int) -> int:
    """Returns the seed of a prompt by its number; seeds after the largest one continue with 0."""
    return (int(check_seed(seed)) + number) % 2**32


def _token_logprobs(sampled: SampledTokens, row: int, step: int, count: int) -> TokenLogprobs:
    """Returns the log-probabilities of one token of a block."""
    place = row, step, slice(count)
    top = zip(sampled.top_tokens[place].tolist(), sampled.top_logprobs[place].tolist(), strict=True)
    return TokenLogprobs(int(sampled.token[row, step]), float(sampled.logprob[row, step]), tuple(top))


def _insert_text(texts: Texts, new: tuple[kvjax.FrozenCache, ...], slot: int, documents: int) -> Texts:
    """Returns the texts of all places with a new one; the first text fills all places."""
    if documents == 1:
        return new
    if texts is None:
        return tuple(kvjax.repeat_rows(layer, documents) for layer in new)
    return tuple(_write_text(layer, own, slot) for layer, own in zip(texts, new, strict=True))


@functools.partial(jax.jit, donate_argnames=("texts",))
def _write_text(texts: kvjax.FrozenCache, new: kvjax.FrozenCache, slot: Int[Array, ""]) -> kvjax.FrozenCache:
    return kvjax.insert_rows(texts, new, jnp.asarray(slot, jnp.int32)[None])


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


_PROGRAMS = (_insert_row, _take_row, _finish_rows, _write_text, _count_faults)
