r"""Continuous batching: answers any number of requests with a fixed number of batch rows.

    engine = llm.cache("snapkv", "25%").engine(rows=8, max_prompt_tokens=8192, max_new_tokens=256)
    number = engine.add("Once upon a time", sampling=Sampling(temperature=0.7), stop="\n")
    while engine.has_unfinished:
        for output in engine.step():
            print(output.number, output.text, output.finish_reason)

A request waits until a row is free (`scheduler`). Its prompt is prefilled in steps between blocks of decoding and then
inserted between two blocks (`rows`). Every sequence therefore sees the same blocks as it would alone: its tokens depend
on its own prompt, parameters and seed only. A sequence that finishes within a block keeps its row until the end of the
block; policies with a smaller `compact_every` have shorter blocks.

A request can continue a `Prefix`. The rows of an engine for documents share frozen prefixes: the entries of a text are
held once, and a step reads them once for all rows that ask about it. Any other prefix, such as the one of an output of
`add(keep=True)`, is copied into the row.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np

from kvjax.distributed.sharding import DATA
from kvjax.spec import check_integer
from kvjax_models.engine.outputs import Collector, Completion, FinishReason, Output, TokenLogprobs, Usage
from kvjax_models.engine.rows import Rows
from kvjax_models.engine.scheduler import Scheduler, Waiting
from kvjax_models.formats.tokenizer import CONTEXT_TOKENS, Tokenizer
from kvjax_models.keywords import suggest_keywords
from kvjax_models.prefix import Prefix, check_frozen
from kvjax_models.prompts import Prompt, TemplateOptions, encode_prompt, is_tokens
from kvjax_models.runner.answer_text import AnswerText, check_stop
from kvjax_models.runner.decode import NO_TOKEN
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.sampling import GREEDY, SampledTokens, Sampling
from kvjax_models.runner.state import GenerationState, check_seed
from kvjax_models.sharding import replicate
from kvjax_models.stopwatch import Stopwatch


class HasPrefix(Protocol):
    """A text with a prefix, such as a document, which encodes the questions about it."""

    @property
    def prefix(self) -> Prefix:
        """The processed text."""

    def encode(self, question: Prompt) -> list[int]:
        """Returns the tokens that follow the text."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A sequence to generate.

    Attributes:
        number: number of the request.
        prompt: token ids; with a prefix, those after it.
        prefix: the prefix that the sequence continues.
        sampling: parameters of sampling.
        stop: strings that finish the sequence.
        max_new_tokens: maximum number of new tokens.
        seed: seed of sampling.
        prompt_seed: seed of the policy's random numbers.
        keep: whether its last output has the sequence as a `Prefix`.
    """

    number: int
    prompt: tuple[int, ...]
    prefix: Prefix | None
    sampling: Sampling
    stop: tuple[str, ...]
    max_new_tokens: int
    seed: int
    prompt_seed: int
    keep: bool

    @property
    def shared(self) -> Prefix | None:
        """The frozen prefix that the row shares with others."""
        if self.prefix is None or self.prefix.is_frozen:
            return self.prefix
        return self.prefix.after

    @property
    def own_tokens(self) -> tuple[int, ...]:
        """The tokens before the answer that the row holds."""
        return self.prompt if self.prefix is self.shared else (*cast(Prefix, self.prefix).tokens, *self.prompt)

    @property
    def num_first(self) -> int:
        """`Prefix.num_first` of the sequence."""
        if self.prefix is None:
            return len(self.prompt)
        return 0 if self.prefix.is_frozen else self.prefix.num_first

    @property
    def num_tokens(self) -> int:
        """Number of all tokens before the answer."""
        return len(self.prompt) + (0 if self.prefix is None else self.prefix.num_tokens)

    @property
    def context(self) -> list[int]:
        """The last tokens before the answer."""
        before = () if self.shared is None else self.shared.tokens
        return [*before[-CONTEXT_TOKENS:], *self.own_tokens[-CONTEXT_TOKENS:]][-CONTEXT_TOKENS:]


class _Running(NamedTuple):
    """A request that occupies a row."""

    request: Request
    answer: AnswerText


class Engine:
    """Batch rows, and the requests that occupy them or wait; `CachedModel.engine` makes one.

    Attributes:
        generator: model, policy and sizes of the rows' caches.
        num_documents: number of frozen prefixes that rows may continue at a time; 0 if requests are plain prompts.
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
            reader: sizes and policies of the frozen prefixes; required for documents.
            max_prefill_steps: maximum number of prefill steps (layers, or blocks of a suffix) between two blocks of
                decoding. By default all free rows are filled first, which maximizes throughput.
            stream_interval: tokens after which a step returns within a block; by default a step is an entire block.

        Raises:
            ValueError: if batch rows are sharded or an argument is invalid.
        """
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
        self._reader, self._row_generator = reader, generator.with_batch(1)
        self._max_prefill_steps, self._stream_interval = max_prefill_steps, stream_interval
        self._scheduler = Scheduler(generator.batch, documents, generator.block_size)
        self._rows = Rows(generator, documents)
        self._requests: dict[int, Request] = {}  # that wait or are being prefilled, by number
        self._running: dict[int, _Running] = {}  # by row
        self._steps: Iterator[GenerationState | None] | None = None  # that are left of the current prefill
        self._prefilled: tuple[Waiting, Prefix] | None = None  # the last prompt, if other requests have it
        self._finished: list[Output] = []  # that the next step returns
        self._next_number = self._prompt_tokens = self._new_tokens = 0
        self._watch = Stopwatch()
        self.prefill_seconds = self.decode_seconds = 0.0
        self.cache_sizes = dict.fromkeys(("cache_bytes", "host_bytes", "read_bytes", "full_cache_bytes"), 0)

    @property
    def has_unfinished(self) -> bool:
        """Whether requests wait or run, or outputs were not returned yet."""
        return bool(self._requests or self._running or self._finished)

    @property
    def num_free_rows(self) -> int:
        """Rows that no request occupies."""
        return self._scheduler.num_free_rows

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._scheduler.waiting)

    @suggest_keywords()
    def add(
        self,
        prompt: Prompt | Sequence[int],
        prefix: Prefix | HasPrefix | None = None,
        *,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] = (),
        max_new_tokens: int | None = None,
        seed: int = 0,
        prompt_seed: int | None = None,
        template_options: TemplateOptions = None,
        keep: bool = False,
    ) -> int:
        """Adds a request.

        Args:
            prompt: a text, a conversation, or token ids. With a prefix, the token ids that follow it, which may be
                none; with a document, also a question as for `Document.ask`.
            prefix: a prefix that the request continues: a document or its prefix, in an engine for documents, or the
                prefix of an output of an equal engine.
            sampling: parameters of sampling.
            stop: strings that finish the sequence and are not part of its text; they may contain special tokens.
            max_new_tokens: maximum number of new tokens; by default the capacity of the caches.
            seed: seed of sampling.
            prompt_seed: seed of the policy's random numbers, by default `seed`. Several answers to one prompt have the
                same one: with equal `sampling` and different `seed`, waiting requests share the prefill of the prompt.
            template_options: variables of the chat template, for a conversation.
            keep: whether the last output has the sequence as a `Prefix`, with a copy of its cache.

        Returns:
            The number of the request.

        Raises:
            ValueError: if an argument is invalid, the sequence is too long, or the prefix does not fit.
            TypeError: if the prompt has another type.
        """
        tokens = self._encode(prompt, prefix, template_options)
        prefix = prefix if prefix is None or isinstance(prefix, Prefix) else prefix.prefix
        limit = self._limit(tokens, prefix, max_new_tokens)
        check_seed(seed)
        prompt_seed = seed if prompt_seed is None else int(check_seed(prompt_seed))
        number, stops = self._next_number, check_stop(stop)
        request = Request(number, tokens, prefix, sampling, stops, limit, seed, prompt_seed, keep)
        self.generator.check_context(request.num_tokens + limit)
        self._next_number += 1
        self._prompt_tokens += len(tokens)
        self._requests[number] = request
        self._scheduler.add(
            Waiting(
                number,
                prompt=(prefix, prompt_seed, sampling, tokens),
                num_tokens=len(tokens),
                prefix=request.shared,
                can_batch=prefix is not None and prefix.is_frozen and len(tokens) > 0,
            )
        )
        return number

    def _encode(
        self, prompt: Prompt | Sequence[int], prefix: Prefix | HasPrefix | None, template_options: TemplateOptions
    ) -> tuple[int, ...]:
        """Returns the tokens of a prompt."""
        if template_options and (prefix is not None or is_tokens(prompt)):
            raise ValueError("template_options apply to conversations only, and those of a document to its text")
        if is_tokens(prompt):
            return tuple(int(token) for token in prompt)
        if prefix is None:
            return tuple(encode_prompt(self._tokenizer, cast(Prompt, prompt), template_options))
        if isinstance(prefix, Prefix):
            raise TypeError(f"a prompt after a prefix must be token ids, got {type(prompt).__name__}")
        return tuple(prefix.encode(cast(Prompt, prompt)))

    def _limit(self, tokens: Sequence[int], prefix: Prefix | None, max_new_tokens: int | None) -> int:
        """Returns the maximum number of new tokens; by default the capacity after the prompt."""
        capacity = self._capacity(prefix) - len(tokens)
        limit = max(capacity, 1) if max_new_tokens is None else check_integer("max_new_tokens", max_new_tokens, 1)
        if prefix is None and not tokens:
            raise ValueError("the prompt is empty; it must have at least one token")
        if prefix is None and len(tokens) > self.generator.max_prompt_tokens:
            raise ValueError(
                f"{len(tokens)} tokens exceed max_prompt_tokens={self.generator.max_prompt_tokens}; shorten the "
                "prompt or pass a larger number"
            )
        if capacity < limit:
            raise ValueError(
                f"{len(tokens)} tokens of the prompt and max_new_tokens={limit} exceed the "
                f"{capacity + len(tokens)} tokens that the caches have capacity for"
            )
        return limit

    def _capacity(self, prefix: Prefix | None) -> int:
        """Returns how many tokens after a prefix a row holds."""
        shared = prefix if prefix is None or prefix.is_frozen else prefix.after
        if shared is None and self.num_documents:
            raise ValueError("the rows of this engine continue documents; pass the document of the request")
        if shared is not None:
            if self._reader is None:
                raise ValueError("this engine takes plain prompts; pass documents= to CachedModel.engine for documents")
            check_frozen(shared, self._reader, self.generator)
        if prefix is None:
            return self.generator.max_prompt_tokens + self.generator.max_new_tokens
        if prefix is shared:
            return self.generator.max_new_tokens
        row = self._row_generator
        if prefix.generator.policies != row.policies or prefix.generator.specs != row.specs:
            raise ValueError("the prefix has caches of another policy or size; pass one of an equal engine")
        return prefix.num_first + self.generator.max_new_tokens - len(prefix.tokens)

    def abort(self, number: int) -> None:
        """Ends a request, whose last output has the finish reason "abort"; does nothing if it is finished.

        The output of a running request that was added with `keep` has the sequence up to now as a prefix.
        """
        if self._scheduler.cancel(number):
            del self._requests[number]
            if not self._scheduler.prefilling:
                self._steps = None
            self._finished.append(Output(number, "", [], "abort"))
            return
        for row, (request, answer) in self._running.items():
            if request.number == number:
                answer.finish()
                prefix = self._take_prefix(row) if request.keep else None
                self._finished.append(Output(number, answer.take(is_finished=True), [], "abort", prefix=prefix))
                self._free([row])
                return

    def abort_all(self) -> None:
        """Ends all requests; see `abort`."""
        for number in [*self._requests, *(running.request.number for running in self._running.values())]:
            self.abort(number)

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
        while self._rows.in_block == 0 and (self._max_prefill_steps is None or steps < self._max_prefill_steps):
            if self._steps is None and not self._start_prefill():
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

    def completions(self, numbers: Mapping[int, int] | None = None) -> Iterator[Completion]:
        """Runs until all requests are finished, which may be added meanwhile.

        Args:
            numbers: numbers of the prompts by request; by default those of the requests.

        Yields:
            Completions as they finish.

        Raises:
            ValueError: if a request failed, with the number of its prompt.
        """
        collector = Collector(numbers)
        for output in self.run():
            if (completion := collector.add(output)) is not None:
                yield completion

    def complete(self) -> tuple[list[Completion], Usage]:
        """Runs until all requests are finished.

        Returns:
            The completions in the order of the requests, and the usage.

        Raises:
            ValueError: if a request failed.
        """
        finished = sorted(self.completions(), key=lambda one: one.number)
        return finished, self.usage

    @property
    def usage(self) -> Usage:
        """Tokens, seconds and bytes of all requests since the creation of the engine."""
        sizes, shared = dict(self.cache_sizes), self._rows.prefixes
        sizes["read_bytes"] += sum(prefix.read_bytes for prefix in shared)
        sizes["full_cache_bytes"] += sum(prefix.full_cache_bytes for prefix in shared)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            new_tokens=self._new_tokens,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            compile_seconds=self._watch.compile_seconds,
            **sizes,
            document_bytes=sum(prefix.held_bytes for prefix in shared),
            is_short=any(one.is_short for one in (self.generator, *(prefix.generator for prefix in shared))),
        )

    # --- prefill ---

    def _start_prefill(self) -> bool:
        """Starts to prefill waiting requests that have a free row; returns whether there are any."""
        items = self._scheduler.start(None if self._prefilled is None else self._prefilled[0].prompt)
        for group, prefix in enumerate(self._scheduler.prefixes):
            if isinstance(prefix, Prefix):
                self._rows.place(group, prefix)
        requests = {row: self._requests[item.number] for row, item in items.items()}
        if len(requests) > 1:
            self._steps = self._prefill_together(requests)
        else:
            for row, request in requests.items():
                self._steps = self._prefill(items[row], request)
        return bool(requests)

    def _prefill_together(self, requests: Mapping[int, Request]) -> Iterator[GenerationState | None]:
        """Yields None after every step of the prefill of several suffixes, and the state of all rows at its end."""
        states = {
            row: self._with_limit(self._start_row(cast(Prefix, request.shared), request), request)
            for row, request in requests.items()
        }
        # A row without a request processes a token that nobody reads.
        prompts = [requests[row].prompt if row in requests else (0,) for row in range(self.generator.batch)]
        yield from self.generator.prefill_steps(self._rows.with_rows(states), prompts, self._rows.entries)

    def _prefill(self, item: Waiting, request: Request) -> Iterator[GenerationState | None]:
        """Yields None after every step of prefill, and the state of the row at its end."""
        generator, prefix, shared = self._row_generator, request.prefix, request.shared
        if self._prefilled is not None and self._prefilled[0].prompt == item.prompt:
            yield generator.reseed(self._prefilled[1].state, request.seed)
            return
        if prefix is None:
            state = generator.init_state(request.prompt_seed, request.sampling)
            yield from generator.prefill_steps(state, [request.prompt], shared_lengths=True)
            return
        state = self._start_row(prefix, request)
        if not request.prompt:
            yield state
            return
        yield from generator.prefill_steps(state, [request.prompt], None if shared is None else shared.entries)

    def _start_row(self, prefix: Prefix, request: Request) -> GenerationState:
        """Returns the state of a row after a prefix."""
        if prefix.is_frozen:
            return prefix.start_rows(self._row_generator, request.prompt_seed, request.sampling)
        return prefix.copy_row(request.prompt_seed, request.sampling)

    def _continue_prefill(self) -> None:
        """Runs a step of the current prefill; inserts its rows after the last one."""
        assert self._steps is not None
        try:
            state = next(self._steps)
        except ValueError as error:
            self._steps = None
            for number in self._scheduler.retry():
                del self._requests[number]
                self._finished.append(Output(number, "", [], "error", error=str(error)))
            return
        if state is None:
            return
        self._steps = None
        items = dict(self._scheduler.prefilling)
        requests = {row: self._requests.pop(item.number) for row, item in items.items()}
        if state.positions.shape[0] == 1:
            [(item, request)] = zip(items.values(), requests.values(), strict=True)
            # The only row's state is donated to decoding.
            is_shared = self.generator.batch > 1 and any(
                item.prompt == other.prompt for other in self._scheduler.waiting
            )
            prefix = Prefix(self._row_generator, request.own_tokens, state, request.shared, request.num_first)
            self._prefilled = (item, prefix) if is_shared else None
            state = self._with_limit(state, request)
        self._rows.insert(state, requests)
        if not self._running:  # the sizes of all rows, which do not change
            self.cache_sizes = self._rows.sizes()
        self._scheduler.run()
        for row, request in requests.items():
            self._running[row] = _Running(request, AnswerText(self._tokenizer, request.context, request.stop))

    def _with_limit(self, state: GenerationState, request: Request) -> GenerationState:
        """Returns the state of a row with the maximum length and the seed of a request."""
        limit = np.array([request.num_tokens + request.max_new_tokens], np.int32)
        state = dataclasses.replace(state, max_positions=replicate(limit, self.generator.mesh))
        is_seeded = request.seed == request.prompt_seed
        return state if is_seeded else self._row_generator.reseed(state, request.seed)

    # --- decoding ---

    def _decode(self) -> list[Output]:
        """Decodes a block, or a part of it with `stream_interval`, in all rows."""
        sampled = self._rows.decode(self._stream_interval or self.generator.block_size)
        done, faults = self._rows.finished()
        rows = sorted(self._running)
        outputs = [self._output(row, sampled, bool(done[row]), bool(faults[row])) for row in rows]
        self._free([row for row, output in zip(rows, outputs, strict=True) if output.finish_reason is not None])
        self._rows.end_block()
        return outputs

    def _output(self, row: int, sampled: SampledTokens, is_done: bool, is_faulty: bool) -> Output:
        """Returns the output of a row's request after a block."""
        request, answer = self._running[row]
        if is_faulty:
            answer.finish()  # the text before this block, which is valid
            return Output(request.number, answer.take(True), [], "error", error=self._rows.describe_faults(row))
        count = int(np.sum(sampled.token[row] != NO_TOKEN))
        num_before = len(answer.tokens)
        answer.push(sampled.token[row, :count].tolist())
        tokens = answer.tokens[num_before:]
        self._new_tokens += len(tokens)
        reason: FinishReason | None = None
        if answer.is_stopped or (is_done and answer.tokens[-1] in self.generator.eos):
            reason = "stop"
        elif is_done:
            reason = "length"
        prefix = None
        if reason is not None:
            answer.finish()
            prefix = self._take_prefix(row) if request.keep and not answer.is_stopped else None
        logprobs = None
        if (top := request.sampling.logprobs) is not None:
            logprobs = [_token_logprobs(sampled, row, step, top) for step in range(len(tokens))]
        return Output(request.number, answer.take(reason is not None), tokens, reason, logprobs, prefix=prefix)

    def _take_prefix(self, row: int) -> Prefix | None:
        """Returns the sequence of a row; None if the compaction of its last tokens has faults."""
        request, answer = self._running[row]
        if (state := self._rows.take(row)) is None:
            return None
        tokens = (*request.own_tokens, *answer.tokens)
        return Prefix(self._row_generator, tokens, state, request.shared, request.num_first)

    def _free(self, rows: Sequence[int]) -> None:
        """Ends the requests of rows."""
        for row in rows:
            del self._running[row]
        self._scheduler.free(rows)
        self._rows.finish(rows, is_last=not self._running)


def seed_of_prompt(seed: int, number: int) -> int:
    """Returns the seed of a prompt by its number; seeds after the largest one continue with 0."""
    return (int(check_seed(seed)) + number) % 2**32


def _token_logprobs(sampled: SampledTokens, row: int, step: int, count: int) -> TokenLogprobs:
    """Returns the log-probabilities of one token of a block."""
    place = row, step, slice(count)
    top = zip(sampled.top_tokens[place].tolist(), sampled.top_logprobs[place].tolist(), strict=True)
    return TokenLogprobs(int(sampled.token[row, step]), float(sampled.logprob[row, step]), tuple(top))
