"""The thread that owns the model: it reads documents and runs the engine; handlers queue jobs and await their outputs.

One engine answers prompts and questions to all documents. Each turn of the loop runs the handlers' commands, one step
of reading a document, and one step of the engine.
"""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import math
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax.numpy as jnp

import kvjax
from kvjax.budget import format_bytes
from kvjax_models.cache import CachedModel
from kvjax_models.document import Document
from kvjax_models.engine import Engine, Output, seed_of_prompt
from kvjax_models.prefix import Prefix
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.sampling import Sampling
from kvjax_models.server.conversations import Conversations, extend_digest
from kvjax_models.server.documents import Documents
from kvjax_models.server.errors import RequestError
from kvjax_models.server.log import logger, report
from kvjax_models.server.settings import Settings

_PROMPT_TOKENS = 8192  # of a prompt by default
# Lengths of prompts that are answered together for their programs; longer ones take too long to read.
_WARM_PROMPTS = ([64], [256], [512], [768], [1024], [1536], [2048], [64, 64], [64, 64, 64, 64])
_WARM_QUESTIONS = ([24], [24, 24])  # of questions to a document
_WARM_TOKENS = 33
_WARM_DOCUMENTS = 4  # stored ones, which are restored before the server is ready
_LIMITS = (
    "rows", "max_prompt_tokens", "max_new_tokens", "max_queue", "cache_bytes", "documents_bytes", "conversations"
)  # fmt: skip


@dataclasses.dataclass(eq=False)
class Job:
    """The sequences of a request.

    Attributes:
        prompts: token ids of every sequence.
        document: the document that they continue.
        sampling: parameters of sampling.
        stop: stop strings.
        max_new_tokens: maximum number of new tokens of each; None for the server's.
        seed: seed of the first sequence.
        conversation: digests of the messages of a chat that continues earlier turns; None for other requests.
        num_reused: tokens of the conversation that the sequences continue.
        texts: text of every sequence up to now.
        outputs: outputs, whose number is the index of the sequence, or an exception that ends the job.
    """

    prompts: list[list[int]]
    document: Document | None
    sampling: Sampling
    stop: tuple[str, ...]
    max_new_tokens: int | None
    seed: int
    conversation: list[bytes] | None = None
    num_reused: int = 0
    texts: dict[int, str] = dataclasses.field(default_factory=lambda: collections.defaultdict(str))
    outputs: asyncio.Queue[Output | Exception] = dataclasses.field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = dataclasses.field(default_factory=asyncio.get_running_loop)

    def send(self, item: Output | Exception) -> None:
        """Passes an item to the handler."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.outputs.put_nowait, item)


class _Jobs:
    """The jobs whose sequences are requests of an engine."""

    def __init__(self, engine: Engine, conversations: Conversations, default_limit: int) -> None:
        self.engine, self._conversations, self._default_limit = engine, conversations, default_limit
        self.jobs: dict[int, tuple[Job, int]] = {}  # and the index of the sequence, by number of the request
        self.probes: dict[int, int] = {}  # tokens after which requests end that are answered for their programs

    def add(self, job: Job) -> None:
        """Adds all sequences of a job, or none if one is invalid."""
        prefix, default_limit = self._find_prefix(job), self._default_limit
        job.num_reused = 0 if prefix is None else len(prefix.tokens)
        try:
            for index, prompt in enumerate(job.prompts):
                suffix, limit = prompt[job.num_reused :], job.max_new_tokens
                if limit is None and job.document is None:
                    limit = default_limit
                    if prefix is not None:
                        limit = self.engine.num_left(prefix, len(suffix), default_limit)
                number = self.engine.add(
                    suffix,
                    job.document if prefix is None else prefix,
                    sampling=job.sampling,
                    stop=job.stop,
                    max_new_tokens=limit,
                    seed=seed_of_prompt(job.seed, index),
                    # The `n` answers to one prompt share its prefill.
                    prompt_seed=seed_of_prompt(job.seed, job.prompts.index(prompt)),
                    keep=job.conversation is not None,
                    room=None if job.conversation is None else default_limit,
                    fit_context=job.max_new_tokens is None,
                )
                self.jobs[number] = job, index
        except BaseException:
            self.abort(job)
            raise

    def _find_prefix(self, job: Job) -> Prefix | None:
        """Returns the conversation that a job continues, if its row has capacity for the answer."""
        if job.conversation is None:
            return None
        prompt = job.prompts[0]  # all sequences of a chat have the same
        if (prefix := self._conversations.find(job.document, job.conversation, prompt)) is None:
            return None
        # Without a limit, a short answer is not worth the time that a continued row saves.
        needed = job.max_new_tokens or max(self._default_limit // 2, 1)
        if job.document is not None and job.max_new_tokens is None:
            needed = max(job.document.max_new_tokens - len(prompt), 1)  # the default of the engine
        num_tokens = len(prompt) - len(prefix.tokens)
        return prefix if self.engine.num_left(prefix, num_tokens, needed) >= needed else None

    def abort(self, job: Job, error: Exception | None = None) -> None:
        """Ends all sequences of a job, with an error after the text that was held back."""
        for number, index in [(number, index) for number, (other, index) in self.jobs.items() if other is job]:
            if error is not None:
                self._send_held_text(number, job, index)
            self.engine.abort(number)
            del self.jobs[number]
        if error is not None:
            job.send(error)

    def step(self) -> None:
        """Runs a step of the engine and passes its outputs to the jobs."""
        for output in self.engine.step():
            if output.number in self.probes:
                self.probes[output.number] -= len(output.tokens)
                if self.probes[output.number] <= 0 or output.finish_reason is not None:
                    del self.probes[output.number]
                    self.engine.abort(output.number)
            if output.number not in self.jobs:  # of a job that was ended
                continue
            job, index = self.jobs[output.number]
            job.texts[index] += output.text
            if output.prefix is not None and job.conversation is not None:
                answer = {"role": "assistant", "content": job.texts[index]}
                self._conversations.add(job.document, extend_digest(job.conversation[-1], answer), output.prefix)
            if output.finish_reason is not None:
                del self.jobs[output.number]
            if output.error is not None:
                logger.error("a request has failed: %s", output.error)
                if output.text:
                    job.send(Output(index, output.text, [], None))
                self.abort(job, RequestError(output.error, 500))
            else:
                job.send(output._replace(number=index, prefix=None))  # which the handler must not keep

    def probe(
        self, lengths: Sequence[int], document: Document | None, max_new_tokens: int | None, num_tokens: int
    ) -> None:
        """Adds requests that compile programs.

        Args:
            document: the document that they continue.
            max_new_tokens: maximum number of new tokens, which decides the sizes of their rows.
            num_tokens: tokens after which they end.
        """
        for token, length in enumerate(lengths, 1):  # prompts that differ, because equal ones are read once
            prompt = [token] * length
            with contextlib.suppress(ValueError):  # too long for the model or the memory
                number = self.engine.add(prompt, document, max_new_tokens=max_new_tokens, fit_context=True)
                self.probes[number] = num_tokens

    def fail(self, error: Exception) -> None:
        """Ends all jobs with an error, without the engine, which may have failed."""
        for number, (job, index) in self.jobs.items():
            self._send_held_text(number, job, index)
        for job in {job for job, _ in self.jobs.values()}:
            job.send(error)
        self.jobs.clear()

    def _send_held_text(self, number: int, job: Job, index: int) -> None:
        if text := self.engine.take_held_text(number):
            job.send(Output(index, text, [], None))


class Worker:
    """The thread and its queues. Methods may be called from any thread.

    Attributes:
        settings: sizes of the server.
        cache: the model; None until it is loaded.
        error: why the thread ended; None while it runs or after `stop`.
    """

    def __init__(
        self,
        load: Callable[[], CachedModel],
        settings: Settings,
        name: str = "the model",
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """Creates a worker, which `start` starts.

        Args:
            load: loads the model, in the thread.
            name: name of the model in the log.
            on_failure: called in the thread after an error has ended it.
        """
        self.settings, self._load, self._name, self._on_failure = settings, load, name, on_failure
        self.cache: CachedModel | None = None
        self.documents: Documents | None = None
        self._longest: Generator | None = None  # the row of the longest prompt and answer
        self.conversations = Conversations(settings.conversations, self._conversation_bytes)
        self.error: BaseException | None = None
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._readings: collections.deque[tuple[Future[Any], collections.abc.Generator[Any]]] = collections.deque()
        self._openings: collections.deque[tuple[Future[Any], str]] = collections.deque()
        self._opened: dict[Future[Any], Document] = {}  # of requests that are not submitted yet
        self._jobs: _Jobs | None = None
        self._num_sequences = 0  # of all submitted jobs; of the handlers' thread
        self._num_openings = 0  # of requests that are not submitted yet; of the handlers' thread
        self._num_readings = 0  # texts that are read or wait for that; of the handlers' thread
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._is_stopping = self._is_warm = False
        self._lock, self._is_closed = threading.Lock(), False  # closed: nobody runs commands any more

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Makes the thread end after its current step; requests that are not finished get an error."""
        self._is_stopping = True
        self._commands.put(lambda: None)

    def join(self, timeout: float) -> bool:
        """Waits for the end of the thread; returns whether it ended within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded, its programs are compiled and the thread runs."""
        return self._is_warm and self._thread.is_alive()

    @property
    def is_warming_up(self) -> bool:
        """Whether the model is loaded and programs are compiled."""
        return self.documents is not None and not self._is_warm

    @property
    def num_rows(self) -> int:
        """Batch rows that requests occupy."""
        return 0 if self._jobs is None else self.settings.rows - self._jobs.engine.num_free_rows

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row."""
        return 0 if self._jobs is None else self._jobs.engine.num_waiting

    @property
    def held_bytes(self) -> int:
        """Bytes of the documents in memory."""
        return 0 if self.documents is None else self.documents.held_bytes

    def _conversation_bytes(self) -> float:
        """Returns the bytes that documents and rows, also of waiting requests, leave for conversations."""
        if self.settings.cache_bytes is None:
            return math.inf
        return self.settings.cache_bytes - self.held_bytes - self._row_bytes()

    def _row_bytes(self) -> int:
        """Returns the bytes that rows need; documents leave a quarter of the memory, or the longest row, to them."""
        assert self._longest is not None
        reserve = min(self._longest.row_bytes, (self.settings.cache_bytes or 0) // 4)
        return max(reserve, 0 if self._jobs is None else self._jobs.engine.needed_bytes)

    def _limit_rows(self, held_bytes: int) -> None:
        """Gives rows the memory that the `held_bytes` of other caches leave."""
        if self.settings.cache_bytes is not None and self._jobs is not None:
            self._jobs.engine.max_bytes = max(self.settings.cache_bytes - held_bytes, 1)

    def props(self) -> dict[str, Any]:
        """Returns policy, budget and limits, as JSON; `row_bytes` is the cache of the longest prompt and answer."""
        assert self.cache is not None and self._longest is not None
        cache, formats = self.cache, self._longest.kv_dtype
        limits = {name: getattr(self.settings, name) for name in _LIMITS}
        return {
            "policy": str(cache.policy),
            "budget": None if cache.budget is None else str(cache.budget),
            "kv_dtype": None if formats is None else str(formats),
            "has_head_budgets": cache.heads is not None,
            **limits,
            "row_bytes": self._longest.row_bytes,
        }

    def _describe(self) -> str:
        """Returns policy, budget and limits for the log."""
        props = self.props()
        heads = ", budgets by head" if props["has_head_budgets"] else ""
        formats = f" in {props['kv_dtype']}" if props["kv_dtype"] else ""
        return (
            f"policy {props['policy']}, budget {props['budget'] or 'none'}{heads}{formats}, "
            f"up to {props['rows']} rows, each with {format_bytes(props['row_bytes'])} for "
            f"{props['max_prompt_tokens']} + {props['max_new_tokens']} tokens, and less for fewer"
        )

    def is_exact(self, document: Document | None) -> bool:
        """Returns whether caches hold every token without quantization, so that no answer depends on earlier ones.

        Args:
            document: the document of a request; None for a plain prompt.
        """
        generator = self._longest if document is None else document.prefix.generator
        assert generator is not None
        stored = jnp.dtype(generator.model.embedding.param_dtype).name
        is_full = all(isinstance(policy, kvjax.Exact | kvjax.SlidingWindow) for policy in generator.policies)
        return is_full and generator.kv_dtype in (None, stored)

    # --- called by handlers ---

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function in the thread and returns its result."""
        future: Future[Any] = Future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                _settle(future, function(*args))
            except Exception as error:
                _settle(future, report(error, "a request has failed"))

        self._put(run)
        return await asyncio.wrap_future(future)

    @contextlib.contextmanager
    def queue_text(self) -> Iterator[None]:
        """Counts a text that is read within the context; refuses it if too many wait."""
        if self._num_readings >= self.settings.max_queue:
            raise full_queue("texts wait to be read")
        self._num_readings += 1
        try:
            yield
        finally:
            self._num_readings -= 1

    async def read(self, steps: collections.abc.Generator[Any]) -> Any:
        """Runs an iterator in the thread, between the steps of engines, and returns its last item."""
        future: Future[Any] = Future()
        self._put(lambda: self._readings.append((future, steps)))
        return await asyncio.wrap_future(future)

    @contextlib.asynccontextmanager
    async def open_document(self, name: str) -> AsyncIterator[Document]:
        """Returns a document for a job that is submitted within the context, once earlier ones leave memory for it."""
        if (count := self._num_sequences + self._num_openings) >= self.settings.max_queue + self.settings.rows:
            raise full_queue(f"{count} sequences run or wait")
        future: Future[Any] = Future()
        self._put(lambda: self._openings.append((future, name)))
        self._num_openings += 1
        try:
            yield await asyncio.wrap_future(future)
        finally:
            self._num_openings -= 1
            with contextlib.suppress(RequestError):
                self._put(lambda: self._opened.pop(future, None))

    def submit(self, job: Job) -> None:
        """Starts a job, whose outputs arrive in its queue, until `abort`; refuses it if too many sequences wait."""
        count, limit = len(job.prompts), self.settings.max_queue + self.settings.rows
        if count > limit:
            raise RequestError(f"{count} sequences exceed the {limit} that this server runs and queues", param="n")
        if self._num_sequences + count > limit:
            raise full_queue(f"{self._num_sequences} sequences run or wait")
        self._put(lambda: self._start(job))
        self._num_sequences += count

    def abort(self, job: Job) -> None:
        """Ends a submitted job, which may be finished."""
        self._num_sequences -= len(job.prompts)

        def run() -> None:
            if self._jobs is not None:
                self._jobs.abort(job)

        with contextlib.suppress(RequestError):
            self._put(run)

    def _put(self, command: Callable[[], object]) -> None:
        with self._lock:
            if self._is_closed:
                raise unavailable()
            self._commands.put(command)

    # --- in the thread ---

    def _run(self) -> None:
        try:
            cache = self._load()
            self.settings = _with_limits(self.settings, cache.llm.model.config.max_length)
            self.cache = cache
            lengths: Any = (self.settings.max_prompt_tokens, self.settings.max_new_tokens)
            self._longest = cache.rows(*lengths)[-1]
            _check_share(cache, self._longest)
            self._jobs = self._make_jobs()
            self.documents = Documents(
                cache, self.settings, self.conversations, self._row_bytes, self._warm_up, self._documents_in_use
            )
            logger.info("%s is loaded: %s", self._name, self._describe())
            for _ in itertools.chain(self._warm_up(None), self._warm_up_stored()):
                if self._is_stopping:
                    return
                self._jobs.step()
            self._is_warm = True
            while not self._is_stopping:
                self._run_commands()
                self._open_documents()
                self._read_step()
                self._step()
        except BaseException as error:
            self.error = error
            # The command prints invalid options and missing files as one line.
            if self.documents is not None or not isinstance(error, ValueError | OSError):
                logger.exception("the worker has failed")
        finally:
            self._fail_all()
            if self.error is not None and self._on_failure is not None:
                self._on_failure()

    def _run_commands(self) -> None:
        """Runs all commands; waits for one if nothing else is to be done."""
        assert self._jobs is not None
        while not self._is_stopping:
            # An opened document is followed by a command.
            can_open = self._openings and not self._opened
            try:
                command = self._commands.get(block=not (self._readings or can_open or self._jobs.engine.has_unfinished))
            except queue.Empty:
                return
            command()

    def _make_jobs(self) -> _Jobs:
        assert self.cache is not None
        engine = self.cache.engine(
            rows=self.settings.rows,
            max_prefill_tokens=self.settings.max_prefill_tokens,
            stream_interval=self.settings.stream_interval,
        )
        return _Jobs(engine, self.conversations, self.settings.max_new_tokens)

    def _warm_up(self, document: Document | None) -> Iterator[None]:
        """Compiles programs of usual requests, by answering some.

        Args:
            document: the document that they continue; None for plain prompts.

        Yields:
            None before every step of the engine.
        """
        if not self.settings.warm_up:
            return
        limit = self.settings.max_prompt_tokens
        assert limit is not None and self._jobs is not None
        for number, batch in enumerate(_WARM_PROMPTS if document is None else _WARM_QUESTIONS):
            # The first one runs to the end of a block, and into the next one.
            max_new_tokens = self.settings.max_new_tokens if document is None else None
            lengths = [length for length in batch if length <= limit]
            self._jobs.probe(lengths, document, max_new_tokens, 1 if number else _WARM_TOKENS)
            while self._jobs.probes:
                yield

    def _warm_up_stored(self) -> Iterator[None]:
        """Restores the documents that were used last, and compiles programs of questions to them."""
        assert self.documents is not None
        if self.settings.warm_up:
            for document in self.documents.restore_last(_WARM_DOCUMENTS):
                yield from self._warm_up(document)

    def _start(self, job: Job) -> None:
        """Adds a job to the engine."""
        if self._jobs is None or self.documents is None:  # at the end of the thread
            job.send(unavailable())
            return
        self._limit_rows(self.documents.fixed_bytes(job.document))  # the others make room
        try:
            self._jobs.add(job)
        except ValueError as error:
            job.send(RequestError(str(error).replace("max_new_tokens=", "max_tokens=")))
        except Exception as error:
            job.send(report(error, "a request could not be started"))

    def _step(self) -> None:
        """Runs a step of the engine; an unexpected error ends its requests, and the next ones get a new engine."""
        assert self._jobs is not None and self.documents is not None
        if not self._jobs.engine.has_unfinished:
            return
        self.documents.make_room()
        self._limit_rows(self.held_bytes + self.conversations.held_bytes)
        if self._jobs.engine.is_blocked:  # by the document that was used last
            self.documents.free_saved()
            self._limit_rows(self.held_bytes + self.conversations.held_bytes)
        try:
            self._jobs.step()
        except Exception as error:
            logger.exception("the engine has failed")
            self._jobs.fail(RequestError(f"the engine failed: {type(error).__name__}", 500))
            self._jobs = self._make_jobs()

    def _documents_in_use(self) -> set[Document]:
        """Returns the documents of requests that are not finished."""
        jobs = {} if self._jobs is None else self._jobs.jobs
        return {*self._opened.values(), *(job.document for job, _ in jobs.values() if job.document is not None)}

    def _open_documents(self) -> None:
        """Passes documents to the requests that wait for them, in the order of their arrival, as far as they fit."""
        assert self.documents is not None
        while self._openings:
            future, name = self._openings[0]
            if not future.cancelled():
                try:
                    if not self.documents.fits(name):
                        return
                    document = self._opened[future] = self.documents.get(name)
                    _settle(future, document)
                except Exception as error:
                    _settle(future, report(error, "a document could not be opened"))
            self._openings.popleft()

    def _read_step(self) -> None:
        """Runs a step of the first reading, which ends it also if its handler has gone."""
        if not self._readings:
            return
        future, steps = self._readings[0]
        if not future.cancelled():
            try:
                result = next(steps)
            except Exception as error:
                result = report(error, "a document could not be read")
            if result is None:
                return
            _settle(future, result)
        steps.close()
        self._readings.popleft()

    def _fail_all(self) -> None:
        """Ends everything that handlers wait for."""
        with self._lock:
            self._is_closed = True
        jobs, self._jobs = self._jobs, None
        if jobs is not None:
            jobs.fail(unavailable())
        while not self._commands.empty():
            self._commands.get()()
        for future, _ in (*self._readings, *self._openings):
            _settle(future, unavailable())
        if self.documents is not None:
            self.documents.close()


def _check_share(cache: CachedModel, longest: Generator) -> None:
    """Checks that the longest row has the size of the budget; shorter ones may exceed it."""
    if longest.is_short:
        tokens = longest.max_prompt_tokens + longest.max_new_tokens
        raise ValueError(
            f"budget={cache.budget} of {tokens} tokens is less than the smallest cache of policy={cache.policy}; pass "
            "a larger budget or a larger max_prompt_tokens"
        )


def _with_limits(settings: Settings, context_length: int) -> Settings:
    """Returns settings with the maximum length of prompts, which must not exceed the model's context length."""
    limit = settings.max_prompt_tokens
    if limit is not None and limit > context_length:
        raise ValueError(
            f"max_prompt_tokens={limit} exceeds the model's context length of {context_length}; pass at most that"
        )
    return dataclasses.replace(settings, max_prompt_tokens=limit or min(_PROMPT_TOKENS, context_length))


def _settle(future: Future[Any], result: Any) -> None:
    """Sets the result or the error of a future, unless its handler has gone."""
    if future.set_running_or_notify_cancel():
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def unavailable() -> RequestError:
    """Returns the error of requests without a worker."""
    return RequestError("the server is loading, has failed or ends", 503, code="unavailable")


def full_queue(state: str) -> RequestError:
    """Returns the error of requests for which there is no place in a queue, with the state of the server."""
    return RequestError(f"{state}; try again later", 429, code="queue_full", headers={"Retry-After": "1"})
