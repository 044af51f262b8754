r"""Continuous batching: answers any number of requests, each in a row of the size that it needs.

    engine = llm.cache("snapkv", "25%").engine(rows=8)
    number = engine.add("Once upon a time", sampling=Sampling(temperature=0.7), stop="\n")
    while engine.has_unfinished:
        for output in engine.step():
            print(output.number, output.text, output.finish_reason)

A request waits until its row fits (`scheduler`). Prompts are prefilled in steps between blocks of decoding, and their
rows join the group of their size (`groups`). A step computes the rows of all groups: it reads the weights once, and
the entries of a prefix, such as a document, once for all rows that continue it. A row of a full cache moves to a larger
size before its slots are used up.

Every sequence sees the same blocks as it would alone: its tokens depend on its own prompt, parameters and seed only,
but for the rounding of products whose shapes depend on the rows in use.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from kvjax.distributed.sharding import DATA
from kvjax.spec import check_integer
from kvjax_models.engine.groups import Group, decode_together, resize_rows, take_rows
from kvjax_models.engine.outputs import Collector, Completion, FinishReason, Output, TokenLogprobs, Usage
from kvjax_models.engine.requests import HasPrefix, Request, RequestChecks, RunningSequence, waiting
from kvjax_models.engine.scheduler import MAX_PROGRAMS, MAX_WAIT, Mixes, Scheduler, Waiting, width_for
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.keywords import suggest_keywords
from kvjax_models.model.llama import Llama
from kvjax_models.prefix import Prefix, RowSizes
from kvjax_models.prompts import Prompt, TemplateOptions
from kvjax_models.runner.answer_text import AnswerText, check_stop
from kvjax_models.runner.decode import NO_TOKEN, runs_by_layer
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.plan import Plan
from kvjax_models.runner.sampling import GREEDY, SampledTokens, Sampling
from kvjax_models.runner.state import GenerationState, check_seed, commit_to_device
from kvjax_models.sharding import mesh_of, replicate
from kvjax_models.stopwatch import Stopwatch

MIN_STEPS = 8  # decode steps of running rows between two turns of prefill, if `max_prefill_tokens` limits these
_MAX_WAITING = 64  # requests that are added ahead, so that similar prompts are prefilled together
_BLOCK = 2**20  # decode steps of a call that ends with a block


class _Prefill(NamedTuple):
    """A batch of prompts that is being prefilled.

    Attributes:
        items: the requests of every row, which have the same prompt.
        steps: yields None after every step, and the state of the rows at its end.
        step_tokens: tokens of a step, relative to all layers.
    """

    items: list[list[Waiting]]
    steps: Iterator[GenerationState | None]
    step_tokens: float


@dataclasses.dataclass(eq=False)
class _Ready:
    """Rows that wait for a place in a group: their size, prefix and state, and the requests of the first ones."""

    size: Generator
    prefix: Prefix | None
    state: GenerationState
    numbers: list[int]


class Engine:
    """Groups of batch rows, and the requests that occupy them or wait; `CachedModel.engine` makes one.

    Attributes:
        prefill_seconds: seconds of prefill so far, without compilation.
        decode_seconds: seconds of decoding so far, without compilation.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        sizes: RowSizes | None,
        *,
        rows: int = 8,
        max_bytes: int | None = None,
        max_prefill_tokens: int | None = None,
        stream_interval: int | None = None,
    ):
        """Creates an engine without requests.

        Args:
            sizes: sizes of the rows of plain prompts; None for an engine whose requests all continue shared prefixes.
            rows: maximum number of rows in use.
            max_bytes: maximum bytes of all rows' caches: a request waits until the bytes that its row may come to take
                fit. None for no limit.
            max_prefill_tokens: tokens that are prefilled between at least `MIN_STEPS` decode steps of running rows, at
                least one layer of a batch. By default all rows that fit are filled first, which maximizes throughput.
            stream_interval: tokens after which a step returns within a block; by default a step is an entire block.
                While a row has a constraint (`Sampling.json_schema`), a step is one token.

        Raises:
            ValueError: if batch rows are sharded or an argument is invalid.
        """
        mesh = mesh_of(model)
        if mesh is not None and mesh.shape[DATA] > 1:
            raise ValueError(
                f"batch rows are sharded over {mesh.shape[DATA]} groups of devices, but continuous batching "
                "prefills single rows; use a mesh with data=1 (--mesh_data 1) and more devices per layer "
                "(--mesh_tensor)"
            )
        options = {"max_bytes": max_bytes, "max_prefill_tokens": max_prefill_tokens, "stream_interval": stream_interval}
        for name, value in {"rows": rows, **options}.items():
            if value is not None:
                check_integer(name, value, minimum=1)
        self._model, self._mesh, self._tokenizer = model, mesh, tokenizer
        self._checks = RequestChecks(model, tokenizer, sizes)
        self._max_prefill_tokens, self._stream_interval = max_prefill_tokens, stream_interval
        self._scheduler = Scheduler(rows, max_bytes)
        # A program of all layers is compiled for every mix of groups; the one of a layer is small.
        by_layer = runs_by_layer(model, mesh)
        self._mixes = Mixes(8 if by_layer else 2)
        # On a CPU, prompts of more than some tokens take their own time in a batch, too, and every batch is a program.
        self._batches_prompts = not by_layer
        self._groups: list[Group] = []
        self._programs: set[tuple[Any, ...]] = set()  # by the shapes of their groups
        self._sequences: dict[int, RunningSequence] = {}  # that are not finished, by number
        self._prefill: _Prefill | None = None
        self._ready: list[_Ready] = []
        self._finished: list[Output] = []  # that the next step returns
        self._next_number = self._prompt_tokens = self._new_tokens = 0
        self._watch = Stopwatch()
        self.prefill_seconds = self.decode_seconds = 0.0
        self._peak: dict[str, int] = {}
        self._is_short = False
        self._steps_since_prefill = MIN_STEPS
        self._plans: dict[Plan | None, int] = {}  # by the order of their first use

    @property
    def has_unfinished(self) -> bool:
        """Whether requests wait or run, or outputs were not returned yet."""
        return bool(self._sequences or self._finished)

    @property
    def num_free_rows(self) -> int:
        """Rows that no request occupies."""
        return self._scheduler.num_free_rows

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._scheduler.waiting)

    @property
    def num_programs(self) -> int:
        """Decode programs that the groups of rows, or mixes of them, have had so far."""
        return len(self._programs)

    @property
    def max_bytes(self) -> int | None:
        """Maximum bytes of all rows' caches."""
        return self._scheduler.max_bytes

    @max_bytes.setter
    def max_bytes(self, value: int | None) -> None:
        self._scheduler.max_bytes = value

    @property
    def is_blocked(self) -> bool:
        """Whether requests wait that only a larger `max_bytes` lets start."""
        return self._scheduler.is_blocked

    @property
    def needed_bytes(self) -> int:
        """Bytes that all rows in use may come to take, and the largest row of a request that waits."""
        waiting = max((request.row_bytes for request in self._scheduler.waiting), default=0)
        return self._scheduler.reserved_bytes + waiting

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches of all rows, on the device and in host memory."""
        sizes = self._row_sizes()
        return sizes["cache_bytes"] + sizes["host_bytes"]

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
        room: int | None = None,
        fit_context: bool = False,
    ) -> int:
        """Adds a request.

        Args:
            prompt: a text, a conversation, or token ids. With a prefix, the token ids that follow it, which may be
                none; with a document, also a question as for `Document.ask`.
            prefix: a prefix that the request continues: a document, its prefix, or the prefix of an output.
            stop: strings that finish the sequence and are not part of its text; they may contain special tokens.
            max_new_tokens: maximum number of new tokens; by default what a document was read with, otherwise 256, or
                what the model's context length leaves.
            prompt_seed: seed of the policy's random numbers, by default `seed`. Several answers to one prompt have the
                same one: with equal `sampling` and different `seed`, waiting requests share the prefill of the prompt.
            template_options: variables of the chat template, for a conversation.
            keep: whether the last output has the sequence as a `Prefix`, with a copy of its cache.
            room: tokens after the prompt that the row of a compressed cache has room for, if later turns continue
                it; by default `max_new_tokens`.
            fit_context: whether `max_new_tokens` is reduced to what the model's context length leaves.

        Returns:
            The number of the request.

        Raises:
            ValueError: if an argument is invalid, the sequence is too long, or its row can never fit.
            TypeError: if the prompt has another type.
        """
        tokens = self._checks.encode(prompt, prefix, template_options)
        prefix = prefix if prefix is None or isinstance(prefix, Prefix) else prefix.prefix
        limit = self._checks.limit(tokens, prefix, max_new_tokens, fit_context=fit_context)
        check_seed(seed)
        prompt_seed = seed if prompt_seed is None else int(check_seed(prompt_seed))
        number, stops, constraint = self._next_number, check_stop(stop), self._checks.constraint(sampling)
        request = Request(number, tokens, prefix, sampling, stops, limit, seed, prompt_seed, keep)
        sizes = self._checks.sizes_of(request, room)
        sizes[-1].check_context(request.num_tokens + limit)
        self._scheduler.add(waiting(request, sizes, batches_prompts=self._batches_prompts))
        self._next_number += 1
        self._prompt_tokens += len(tokens)
        answer = AnswerText(self._tokenizer, request.context, stops)
        self._sequences[number] = RunningSequence(request, sizes, answer, constraint)
        return number

    def num_left(self, prefix: Prefix, num_tokens: int, max_new_tokens: int) -> int:
        """Returns how many of `max_new_tokens` fit into a row that continues a prefix; negative if the prompt does not.

        Args:
            prefix: a prefix that is not shared. Its row grows if longer rows are full caches of the same kind.
            num_tokens: tokens after it and before the answer.
        """
        return self._checks.num_left(prefix, num_tokens, max_new_tokens)

    def abort(self, number: int) -> None:
        """Ends a request, whose last output has the finish reason "abort"; does nothing if it is finished.

        The output of a running request that was added with `keep` has the sequence up to now as a prefix.
        """
        if (sequence := self._sequences.get(number)) is None:
            return
        prefix = self._take_prefix(number) if sequence.request.keep else None
        self._finished.append(Output(number, sequence.answer.take(is_finished=True), [], "abort", prefix=prefix))
        self._end(number)

    def _place_of(self, number: int) -> tuple[Group, int] | None:
        """Returns the group and the row of a request; None if it has none yet."""
        for group in self._groups:
            for row, other in group.used.items():
                if other == number:
                    return group, row
        return None

    def _end(self, number: int) -> None:
        """Frees the row of a request, which may wait or be prefilled."""
        place = self._place_of(number)
        del self._sequences[number]
        self._scheduler.finish(number)
        if place is not None:
            group, row = place
            group.free([row])
            if not group.used:
                self._groups.remove(group)

    def abort_all(self) -> None:
        """Ends all requests; see `abort`."""
        for number in [*self._sequences]:
            self.abort(number)

    def take_held_text(self, number: int) -> str:
        """Returns the text of a running request that was held back, for a caller that ends it.

        It may be the start of a stop string, or the bytes of an incomplete character.
        """
        sequence = self._sequences.get(number)
        return "" if sequence is None else sequence.answer.take(is_finished=True)

    def step(self) -> list[Output]:
        """Prefills waiting requests that fit, and decodes up to a block of tokens in all rows.

        Returns:
            The new tokens of every running request, and requests that finished without any.
        """
        watch = Stopwatch()
        tokens = 0.0
        self._place_rows()
        limit = math.inf if self._max_prefill_tokens is None else self._max_prefill_tokens
        if self._groups and self._steps_since_prefill < MIN_STEPS and self._max_prefill_tokens is not None:
            limit = 0
        while tokens < limit:
            if self._prefill is None and not self._start_prefill():
                break
            tokens += self._continue_prefill()
            self._steps_since_prefill = 0
        self.prefill_seconds += watch.seconds
        watch = Stopwatch()
        outputs, self._finished = self._finished, []
        outputs += self._decode()
        self.decode_seconds += watch.seconds
        return outputs

    def run(self) -> Iterator[Output]:
        """Yields outputs until all requests are finished."""
        while self.has_unfinished:
            yield from self.step()

    def completions(
        self, numbers: Mapping[int, int] | None = None, requests: Iterable[object] = ()
    ) -> Iterator[Completion]:
        """Runs until all requests are finished, which may be added meanwhile.

        Args:
            numbers: numbers of the prompts by request; by default the numbers of the requests.
            requests: adds a request whenever it is advanced, which happens when a row is free.

        Yields:
            Completions as they finish.

        Raises:
            ValueError: if a request failed, with the number of its prompt.
        """
        collector, requests = Collector(numbers), iter(requests)
        while True:
            while self.num_waiting < min(self.num_free_rows, _MAX_WAITING) and next(requests, None) is not None:
                pass
            if not self.has_unfinished:
                return
            for output in self.step():
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
        """Tokens and seconds of all requests since the creation of the engine, and the bytes of the most rows."""
        sizes = self._peak or self._row_sizes()
        return Usage(
            prompt_tokens=self._prompt_tokens,
            new_tokens=self._new_tokens,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            compile_seconds=self._watch.compile_seconds,
            is_short=self._is_short,
            **sizes,
        )

    def _row_sizes(self) -> dict[str, int]:
        """Returns the bytes of all groups and of the prefixes that their rows share, as `Usage` has them."""
        names = "cache_bytes", "host_bytes", "read_bytes", "full_cache_bytes", "document_bytes"
        sizes = dict.fromkeys(names, 0)
        for group in self._groups:
            for name, value in group.sizes().items():
                sizes[name] += value
        for prefix in {id(group.prefix): group.prefix for group in self._groups}.values():
            if prefix is not None:
                sizes["read_bytes"] += prefix.read_bytes
                sizes["full_cache_bytes"] += prefix.full_cache_bytes
                sizes["document_bytes"] += prefix.held_bytes
        return sizes

    # --- prefill ---

    def _start_prefill(self) -> bool:
        """Starts to prefill waiting requests that fit; returns whether there are any."""
        by_prompt: dict[Any, list[Waiting]] = {}
        for item in self._scheduler.start():
            by_prompt.setdefault(item.prompt, []).append(item)
        if not by_prompt:
            return False
        items = [*by_prompt.values()]
        sequences = [self._sequences[one[0].number] for one in items]
        requests, size = [one.request for one in sequences], sequences[0].size
        seeds, samplings = [one.prompt_seed for one in requests], [one.sampling for one in requests]
        prompts: list[Sequence[int]] = [one.prompt for one in requests]
        prefix, shared = requests[0].prefix, requests[0].shared
        padding = width_for(len(items)) - len(items) if items[0][0].pads else 0
        if padding:  # rows without a request process a token that nobody reads
            seeds, samplings = [*seeds, *[0] * padding], [*samplings, *[GREEDY] * padding]
            prompts += [(0,)] * padding
        generator, longest = size.with_batch(len(prompts)), max(map(len, prompts))
        if prefix is None:
            state = generator.init_state(seeds, samplings)
        elif prefix is shared:
            state = prefix.start_rows(generator, seeds, samplings)
        else:
            state = prefix.copy_row(generator, seeds[0], samplings[0])
        if not longest:
            self._prefill = _Prefill(items, iter([state]), 0)
            return True
        entries = None if shared is None else shared.entries
        steps = generator.prefill_steps(state, prompts, entries, shared_lengths=True)
        tokens: float = len(prompts) * min(longest, size.block_size)
        if prefix is None and not size.streaming:
            tokens = len(prompts) * longest / len(size.specs)  # a step is a layer
        self._prefill = _Prefill(items, steps, tokens)
        return True

    def _continue_prefill(self) -> float:
        """Runs a step of the current prefill; its rows wait for a group after the last one. Returns the tokens."""
        assert self._prefill is not None
        prefill = self._prefill
        is_needed = any(item.number in self._sequences for row in prefill.items for item in row)
        try:
            state = next(prefill.steps) if is_needed else None
        except ValueError as error:
            self._prefill = None
            self._fail([item for row in prefill.items for item in row], error)
            return prefill.step_tokens
        if is_needed and state is None:
            return prefill.step_tokens
        self._prefill = None
        if state is not None:
            self._make_ready(prefill.items, state)
            self._place_rows()
        return prefill.step_tokens

    def _fail(self, items: Sequence[Waiting], error: ValueError) -> None:
        """Ends a request whose prefill failed; several are prefilled alone."""
        items = [item for item in items if item.number in self._sequences]
        if len({item.prompt for item in items}) > 1:
            self._scheduler.retry(items)
            return
        for item in items:
            self._end(item.number)
            self._finished.append(Output(item.number, "", [], "error", error=str(error)))

    def _make_ready(self, items: Sequence[Sequence[Waiting]], state: GenerationState) -> None:
        numbers = [[item.number for item in row if item.number in self._sequences] for row in items]
        size = self._sequences[next(number for row in numbers for number in row)].size
        if all(len(row) == 1 for row in numbers):
            self._add_ready(size, state, [row[0] for row in numbers])
            return
        for index, row in enumerate(numbers):
            for number in row:  # every answer to one prompt has a copy
                self._add_ready(size, take_rows(state, [index], self._mesh), [number])

    def _add_ready(self, size: Generator, state: GenerationState, numbers: list[int]) -> None:
        """Lets rows wait for a group, with the limits and the seeds of their requests."""
        requests = [self._sequences[number].request for number in numbers]
        batch = state.positions.shape[0]
        limits, seeds = np.zeros(batch, np.int32), [0] * batch
        for row, request in enumerate(requests):
            limits[row], seeds[row] = request.num_tokens + request.max_new_tokens, request.seed
        state = dataclasses.replace(state, max_positions=replicate(limits, self._mesh))
        if any(request.seed != request.prompt_seed for request in requests):
            state = size.with_batch(batch).reseed(state, seeds)
        # Committed or not, arrays are arguments of different programs.
        self._ready.append(_Ready(size, requests[0].shared, commit_to_device(state, self._mesh), numbers))

    # --- places in groups ---

    def _place_rows(self) -> None:
        """Moves rows to their groups, as far as these are between two blocks."""
        self._grow_rows()
        if not self._ready:
            return
        for ready in [*self._ready]:
            numbers = [number for number in ready.numbers if number in self._sequences]
            if len(numbers) < len(ready.numbers):  # a request was aborted
                if not numbers:
                    self._ready.remove(ready)
                    continue
                rows = [row for row, number in enumerate(ready.numbers) if number in self._sequences]
                ready.state, ready.numbers = take_rows(ready.state, rows, self._mesh), numbers
            groups = [one for one in self._groups if one.generator is ready.size and one.prefix is ready.prefix]
            free = next((group for group in groups if not group.in_block), None)
            if free is None and any(group.steps_left <= MAX_WAIT for group in groups):
                continue
            self._make_room(ready)
            # Room for all rows that will join the group, so that its state is copied once.
            others = [one for one in self._ready if one.size is ready.size and one.prefix is ready.prefix]
            num_rows = sum(len(one.numbers) for one in others) + (0 if free is None else len(free.used))
            kind = self._kind(ready.size, ready.prefix) if free is None else free.kind
            width = self._width(ready.size, kind, num_rows, free)
            self._ready.remove(ready)
            if free is None:
                self._groups.append(Group(ready.size, ready.prefix, ready.state, numbers, width, kind))
            else:
                free.insert(ready.state, numbers, width)
            generators = (ready.size,) if ready.prefix is None else (ready.size, ready.prefix.generator)
            self._is_short |= any(one.is_short for one in generators)
        self._groups.sort(key=lambda group: group.shape)
        sizes = self._row_sizes()
        if not self._peak or sizes["cache_bytes"] > self._peak["cache_bytes"]:
            self._peak = sizes

    def _grow_rows(self) -> None:
        """Takes rows without capacity for another block out of their groups, with the next size."""
        for group in [*self._groups]:
            if group.in_block:
                continue
            rows = [row for row, number in group.used.items() if self._sequences[number].must_grow]
            if rows:
                numbers = [number for row, number in group.used.items() if row in rows]
                for number in numbers:
                    self._sequences[number].level += 1
                size = self._sequences[numbers[0]].size
                self._ready.append(_Ready(size, group.prefix, resize_rows(group.remove(rows), size), numbers))
            if group.used:
                group.resize(self._width(group.generator, group.kind, len(group.used), group))
            else:
                self._groups.remove(group)

    def _make_room(self, ready: _Ready) -> None:
        """Gives up free rows if memory is short."""
        if self.max_bytes is None:
            return
        width = width_for(len(ready.numbers))
        if self._scheduler.reserved_bytes + width * ready.size.row_bytes > self.max_bytes:
            for group in self._groups:
                group.resize(len(group.used))

    def _width(self, size: Generator, kind: tuple[int, ...], rows: int, group: Group | None = None) -> int:
        """Returns the width that a group should have.

        Args:
            group: the group, if it exists.
        """
        width = width_for(rows, 0 if group is None else group.width)
        if self.num_programs >= MAX_PROGRAMS:  # rather free rows than another program
            known = [one[0][-1] for one in self._programs if len(one) == 1 and one[0][:-1] == kind]
            width = min((one for one in known if one >= width), default=width)
        if self.max_bytes is None:
            return width
        others = sum(one.width * one.generator.row_bytes for one in self._groups if one is not group)
        return max(min(width, (self.max_bytes - others) // size.row_bytes), rows)

    def _kind(self, size: Generator, prefix: Prefix | None) -> tuple[int, ...]:
        """Returns `Group.kind`: a number for the plan of the rows, and one for the plan of the prefix."""
        plans = size.plan, None if prefix is None else prefix.generator.plan
        return tuple(self._plans.setdefault(plan, len(self._plans)) for plan in plans)

    # --- decoding ---

    def _decode(self) -> list[Output]:
        """Decodes up to a block in all rows, or one token if the next ones of a row depend on it."""
        outputs = self._constrain()
        if not self._groups:
            return outputs
        running = [number for group in self._groups for number in group.used.values()]
        is_constrained = any(self._sequences[number].constraint is not None for number in running)
        steps = 1 if is_constrained else self._stream_interval or _BLOCK
        shapes = [group.shape for group in self._groups]
        num_steps = min(steps, *(group.steps_left for group in self._groups))
        for indices in self._mixes.split(shapes):
            outputs += self._decode_together([self._groups[index] for index in indices], steps)
        if self.num_programs < MAX_PROGRAMS:
            self._mixes.count(shapes, num_steps)
        self._steps_since_prefill += num_steps
        self._groups = [group for group in self._groups if group.used]
        return outputs

    def _constrain(self) -> list[Output]:
        """Sets the tokens that rows with a constraint may choose; returns outputs of rows whose parser failed."""
        outputs: list[Output] = []
        for group in [*self._groups]:
            allowed: dict[int, np.ndarray] = {}
            for row, number in group.used.items():
                sequence = self._sequences[number]
                if sequence.constraint is None:
                    continue
                try:
                    allowed[row] = sequence.constraint.allowed()
                except ValueError as error:
                    outputs.append(Output(number, sequence.answer.take(True), [], "error", error=str(error)))
                    self._end(number)
            if allowed and group.used:
                group.allow(allowed)
        return outputs

    def _decode_together(self, groups: Sequence[Group], steps: int) -> list[Output]:
        """Decodes up to some tokens in the rows of groups by one program."""
        self._programs.add(tuple(group.shape for group in groups))
        sampled = decode_together(groups, steps)
        outputs: list[Output] = []
        for group, tokens in zip(groups, sampled, strict=True):
            done, faults = group.finished()
            new = [self._output(group, row, tokens, bool(done[row]), bool(faults[row])) for row in group.used]
            ended = {output.number for output in new if output.finish_reason is not None}
            rows = [row for row, number in group.used.items() if number in ended]
            for number in ended:
                del self._sequences[number]
                self._scheduler.finish(number)
            group.free(rows)
            if group.used:
                group.end_block()
            outputs += new
        return outputs

    def _output(self, group: Group, row: int, sampled: SampledTokens, is_done: bool, is_faulty: bool) -> Output:
        """Returns the output of a row's request after decode steps."""
        sequence = self._sequences[cast(int, group.numbers[row])]
        request, answer = sequence.request, sequence.answer
        if is_faulty:
            return Output(  # with the text before this block, which is valid
                request.number, answer.take(True), [], "error", error=group.describe_faults(row)
            )
        count = int(np.sum(sampled.token[row] != NO_TOKEN))
        num_before = len(answer.tokens)
        answer.push(sampled.token[row, :count].tolist())
        tokens = answer.tokens[num_before:]
        self._new_tokens += len(tokens)
        reason: FinishReason | None = None
        if answer.is_stopped or (is_done and answer.tokens[-1] in group.generator.eos):
            reason = "stop"
        elif is_done:
            reason = "length"
        if (constraint := sequence.constraint) is not None:
            constraint.push(tokens)
            reason = "stop" if constraint.is_complete else reason
        text, prefix, logprobs = answer.take(reason is not None), None, None
        if reason is not None and request.keep and not answer.is_stopped:
            prefix = self._take_prefix(request.number)
        if (top := request.sampling.logprobs) is not None:
            logprobs = [_token_logprobs(sampled, row, step, top) for step in range(len(tokens))]
        return Output(request.number, text, tokens, reason, logprobs, prefix=prefix)

    def _take_prefix(self, number: int) -> Prefix | None:
        """Returns the sequence of a request; None without a row, or if the compaction of its tokens has faults."""
        sequence, state = self._sequences[number], None
        if (place := self._place_of(number)) is not None:
            state = place[0].take_settled(place[1])
        for ready in self._ready:
            if number in ready.numbers:
                state = take_rows(ready.state, [ready.numbers.index(number)], self._mesh)
        if state is None:
            return None
        request, tokens = sequence.request, (*sequence.request.own_tokens, *sequence.answer.tokens)
        return Prefix.of(sequence.size, tokens, state, after=request.shared, num_first=request.num_first)


def seed_of_prompt(seed: int, number: int) -> int:
    """Returns the seed of a prompt by its number; seeds after the largest one continue with 0."""
    return (int(check_seed(seed)) + number) % 2**32


def _token_logprobs(sampled: SampledTokens, row: int, step: int, count: int) -> TokenLogprobs:
    """Returns the log-probabilities of one token of a block."""
    place = row, step, slice(count)
    top = zip(sampled.top_tokens[place].tolist(), sampled.top_logprobs[place].tolist(), strict=True)
    return TokenLogprobs(int(sampled.token[row, step]), float(sampled.logprob[row, step]), tuple(top))
