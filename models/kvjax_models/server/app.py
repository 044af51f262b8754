"""The routes of the server."""

import asyncio
import contextlib
import dataclasses
import pathlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from kvjax_models.citations import Citation
from kvjax_models.document import Document
from kvjax_models.engine import Collector, Output
from kvjax_models.runner.answer_text import check_stop
from kvjax_models.runner.constraints import constraint_of
from kvjax_models.runner.sampling import Sampling
from kvjax_models.server import schema
from kvjax_models.server.answers import Format, TokenBytes, citations_as_json, event
from kvjax_models.server.conversations import digests
from kvjax_models.server.errors import RequestError, as_request_error
from kvjax_models.server.guard import Guard
from kvjax_models.server.log import RequestLog, add_details, report
from kvjax_models.server.metrics import Metrics
from kvjax_models.server.responses import EventStream, error_response, json_response, unless_disconnected
from kvjax_models.server.worker import Job, Worker, unavailable
from kvjax_models.tokenized_model import TokenizedModel

_Cite = Callable[[Job, int, Sequence[int]], Awaitable[tuple[Citation, ...]]]  # of an answer by its number and tokens
_PAGE = pathlib.Path(__file__).with_name("page.html")
_BODY_SECONDS = 60  # to receive a body
STOP_SECONDS = 10  # to end a step of the worker


@dataclasses.dataclass(frozen=True)
class Access:
    """Who may send what.

    Attributes:
        hosts: names of the server in Host headers.
        origins: origins of web pages that may send requests.
        api_key: key of clients; None for no check.
        max_body_bytes: maximum size of a request's body.
    """

    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    api_key: str | None = dataclasses.field(default=None, repr=False)
    max_body_bytes: int = 4 * 2**20


def make_app(worker: Worker, model_name: str, access: Access) -> Starlette:
    """Returns the application, which starts and stops the worker.

    Args:
        access: who may send what.
    """
    handlers = _Handlers(worker, model_name, access.max_body_bytes)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop()
        await asyncio.to_thread(worker.join, STOP_SECONDS)

    middleware = [Middleware(RequestLog)]
    middleware.append(Middleware(Guard, hosts=access.hosts, origins=access.origins, api_key=access.api_key))
    if access.origins:
        any_of: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"]}
        middleware.append(Middleware(CORSMiddleware, allow_origins=access.origins, **any_of))
    errors: dict[Any, Callable[..., Any]] = {
        HTTPException: _describe_http_error,
        ClientDisconnect: lambda *_: Response(status_code=499),  # nobody receives it
    }
    for kind in (RequestError, ValueError):
        errors[kind] = lambda _, error: error_response(as_request_error(error))
    return Starlette(routes=handlers.routes(), middleware=middleware, lifespan=lifespan, exception_handlers=errors)


def _describe_http_error(request: Request, error: Any) -> Response:
    """Returns the response of an unknown path or method."""
    message = error.detail
    if error.status_code == 404:
        message = f"{request.url.path[:100]} does not exist here"
        if request.url.path.startswith("/v1/responses"):
            message += "; use /v1/chat/completions (openai-agents: set_default_openai_api('chat_completions'))"
    return error_response(RequestError(message, error.status_code))


class _Handlers:
    def __init__(self, worker: Worker, model_name: str, max_body_bytes: int) -> None:
        self._worker, self._model_name, self._max_body_bytes = worker, model_name, max_body_bytes
        self._metrics, self._start = Metrics(worker), int(time.time())
        self._token_bytes: TokenBytes | None = None
        self._num_sequences = 0  # of all requests that are not finished

    def routes(self) -> list[Route]:
        return [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/props", self.props),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/documents", self.post_document, methods=["POST"]),
            Route("/v1/documents", self.documents),
            Route("/v1/documents/{name}/kept", self.document_part),
            Route("/v1/documents/{name}/text", self.document_part),
            Route("/v1/documents/{name:path}", self.document, methods=["GET", "DELETE"]),
        ]

    async def page(self, request: Request) -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return FileResponse(_PAGE, headers={"Content-Security-Policy": policy, "X-Frame-Options": "DENY"})

    async def health(self, request: Request) -> Response:
        worker = self._worker
        status = "warming up" if worker.is_warming_up else "loading"
        if worker.is_ready:
            status = "ok"
        elif worker.error:
            status = "failed"
        return json_response({"status": status}, 200 if status == "ok" else 503)

    async def props(self, request: Request) -> Response:
        self._check_ready()
        return json_response(self._worker.props() | {"max_body_bytes": self._max_body_bytes})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._describe_model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return json_response(self._describe_model())

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, schema.ChatRequest)

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, schema.CompletionRequest)

    async def post_document(self, request: Request) -> Response:
        self._check_ready()
        body = await self._parse_document(request)
        documents = self._worker.documents
        assert documents is not None
        if self._worker.num_readings >= self._worker.settings.max_queue:
            raise _full_queue("texts wait to be read")
        content = await asyncio.to_thread(body.content)
        arguments = content, body.chat_template_kwargs, body.parse_special
        await asyncio.to_thread(documents.check_text, *arguments)
        steps = documents.read(body.id, *arguments, full_cache=body.full_cache)
        values = await unless_disconnected(request, self._worker.read(steps))
        add_details(request.scope, f"{values['tokens']} tokens read")
        return json_response(values)

    async def _parse_document(self, request: Request) -> schema.DocumentRequest:
        """Returns a text that is sent as JSON, as text/plain, or as a file of a form."""
        data = await self._read_body(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # The time to parse and to encode grows with the size of a body; streams and /health must not wait for it.
        if kind == "text/plain":
            return await asyncio.to_thread(schema.text_document, data, dict(request.query_params))
        if kind == "multipart/form-data":
            return await _parse_form(request, data)
        return await asyncio.to_thread(schema.parse, schema.DocumentRequest, data)

    async def documents(self, request: Request) -> Response:
        self._check_ready()
        assert self._worker.documents is not None
        data = await self._worker.call(self._worker.documents.describe_all)
        return json_response({"object": "list", "data": data})

    async def document(self, request: Request) -> Response:
        self._check_ready()
        documents = self._worker.documents
        assert documents is not None
        function = documents.delete if request.method == "DELETE" else documents.describe
        return json_response(await self._worker.call(function, request.path_params["name"]))

    async def document_part(self, request: Request) -> Response:
        self._check_ready()
        documents = self._worker.documents
        assert documents is not None
        function = documents.kept if request.url.path.endswith("/kept") else documents.text
        return json_response(await self._worker.call(function, request.path_params["name"]))

    # --- completions ---

    async def _generate(
        self, request: Request, kind: type[schema.ChatRequest] | type[schema.CompletionRequest]
    ) -> Response:
        start = time.monotonic()
        self._check_ready()
        body = await asyncio.to_thread(schema.parse, kind, await self._read_body(request))
        self._check_model(body.model)
        job = await self._make_job(body, request.headers.get("authorization", ""))
        usage = _Usage(job, body.n)
        self._reserve(len(job.prompts))
        outcome = "cancelled"

        def close() -> None:
            self._num_sequences -= len(job.prompts)
            self._worker.abort(job)
            self._metrics.requests.labels(usage.outcome or outcome).inc()
            add_details(request.scope, f"{usage.outcome or outcome}; {usage.describe()}")
            self._metrics.prompt_tokens.inc(sum(len(prompt) - job.num_reused for prompt in job.prompts))
            self._metrics.cached_tokens.inc(usage.cached_tokens)
            self._metrics.new_tokens.inc(usage.completion_tokens)
            self._metrics.duration.observe(time.monotonic() - start)

        is_streamed = False
        try:
            self._worker.submit(job)
            first = await unless_disconnected(request, _next_output(job, usage))
            self._metrics.first_token.observe(time.monotonic() - start)
            is_chat = kind is schema.ChatRequest
            assert self._token_bytes is not None
            assert self._worker.cache is not None
            calls = body.calls(self._worker.cache.llm.tokenizer) if isinstance(body, schema.ChatRequest) else None
            num_top = body.num_top_logprobs
            form = Format(self._token_bytes, self._model_name, is_chat=is_chat, num_top=num_top, calls=calls)
            cite = self._cite if body.cite else None
            if body.stream:
                has_usage = body.stream_options is not None and body.stream_options.include_usage
                response = EventStream(request, _events(job, form, first, usage, bool(has_usage), cite), close)
                is_streamed = True
                return response
            return json_response(await unless_disconnected(request, _answer(job, form, first, usage, cite)))
        finally:
            if not is_streamed:
                close()

    async def _cite(self, job: Job, number: int, tokens: Sequence[int]) -> tuple[Citation, ...]:
        """Returns the citations of an answer, for which the model processes question and answer once more."""
        assert job.document is not None
        return await self._worker.call(job.document.cite, job.prompts[number], tokens)

    async def _make_job(self, body: schema.ChatRequest | schema.CompletionRequest, authorization: str) -> Job:
        """Checks the fields of a request and encodes its prompts; `authorization` is the client's key."""
        if body.stream_options is not None and not body.stream:
            raise RequestError("stream_options requires stream=true", param="stream_options")
        if body.cite and body.document is None:
            raise RequestError("citations refer to a document; name one", param="cite")
        worker = self._worker
        assert worker.cache is not None and worker.documents is not None
        sampling, stop = await asyncio.to_thread(_sampling, body, worker.cache.llm), check_stop(body.stop)
        document = None if body.document is None else await worker.call(worker.documents.get, body.document)
        if document is not None and body.cite:
            await worker.call(document.check_citable)  # before the answer, which would be lost
        if self._token_bytes is None:
            self._token_bytes = TokenBytes(worker.cache.llm.tokenizer)
        prompts, conversation = await asyncio.to_thread(self._encode, body, document, authorization)
        longest, limit_of_prompts = max(map(len, prompts)), worker.settings.max_prompt_tokens
        assert limit_of_prompts is not None  # of a worker that is ready
        if document is None and longest > limit_of_prompts:
            raise RequestError(
                f"{longest} tokens of the prompt exceed max_prompt_tokens={limit_of_prompts}; shorten it",
                code="context_length_exceeded",
            )
        limit_of_answers = worker.settings.max_new_tokens
        if document is None and (body.limit() or 1) > limit_of_answers:
            raise RequestError(
                f"max_tokens={body.limit()} exceeds the server's max_new_tokens={limit_of_answers}", param="max_tokens"
            )
        prompts = [prompt for prompt in prompts for _ in range(body.n)]
        seed = secrets.randbits(32) if body.seed is None else body.seed
        return Job(prompts, document, sampling, stop, body.limit(), seed, conversation)

    def _encode(
        self, body: schema.ChatRequest | schema.CompletionRequest, document: Document | None, authorization: str
    ) -> tuple[list[list[int]], list[bytes] | None]:
        """Returns the tokens of the prompts, and the digests of a chat that continues earlier answers."""
        worker = self._worker
        assert worker.cache is not None
        llm, text = schema.with_special(worker.cache, body.parse_special).llm, document
        if document is not None:
            text = document.with_tokenizer(llm.tokenizer)
        prompts = body.prompts(llm, text)
        if not isinstance(body, schema.ChatRequest) or not worker.settings.conversations:
            return prompts, None
        # With compression, an answer that continues another one differs from the answer to a new request.
        reuse = worker.is_exact(document) if body.reuse is None else body.reuse
        return prompts, digests(authorization, body.as_messages()) if reuse else None

    def _reserve(self, count: int) -> None:
        """Counts the sequences of a request, or refuses it if too many wait."""
        limit = self._worker.num_max_sequences
        if count > limit:
            raise RequestError(f"{count} sequences exceed the {limit} that this server runs and queues", param="n")
        if self._num_sequences + count > limit:
            raise _full_queue(f"{self._num_sequences} sequences run or wait")
        self._num_sequences += count

    # --- checks ---

    def _check_ready(self) -> None:
        if not self._worker.is_ready:
            raise unavailable()

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            raise RequestError(
                f"model {name[:100]!r} does not exist; this server has {self._model_name!r}", 404, param="model",
                code="model_not_found",
            )  # fmt: skip

    def _describe_model(self) -> dict[str, Any]:
        return {"id": self._model_name, "object": "model", "created": self._start, "owned_by": "kvjax"}

    async def _read_body(self, request: Request) -> bytes:
        """Returns the body of a request; refuses large and slow ones."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > self._max_body_bytes:
                        raise RequestError(f"the body exceeds {self._max_body_bytes} bytes", 413)
                    parts.append(part)
        except TimeoutError:
            raise RequestError(f"the body did not arrive within {_BODY_SECONDS} seconds", 408) from None
        return b"".join(parts)


async def _parse_form(request: Request, data: bytes) -> schema.DocumentRequest:
    """Returns the text of the field `file` of a form, with the other fields of a document."""

    async def parts() -> AsyncGenerator[bytes]:
        yield data

    try:
        form = await MultiPartParser(request.headers, parts(), max_files=1).parse()
    except MultiPartException as error:
        raise RequestError(f"the form cannot be read: {error.message}") from None
    fields = {name: value for name, value in form.items() if isinstance(value, str)}
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise RequestError("the form has no file in its field 'file'", param="file")
    return await asyncio.to_thread(schema.text_document, await file.read(), fields)


def _sampling(body: schema.ChatRequest | schema.CompletionRequest, llm: TokenizedModel) -> Sampling:
    """Returns the sampling parameters; compiles the grammar of a constrained answer, which may take a second."""
    sampling = body.sampling(llm.tokenizer)
    constraint_of(sampling, llm.tokenizer, llm.model.config.vocab_size)
    return sampling


def _full_queue(state: str) -> RequestError:
    return RequestError(f"{state}; try again later", 429, code="queue_full", headers={"Retry-After": "1"})


@dataclasses.dataclass
class _Usage:
    """The tokens of a request, and how it ended."""

    job: Job
    n: int
    completion_tokens: int = 0
    num_unfinished: int = dataclasses.field(init=False)
    outcome: str | None = None  # None until the end

    def __post_init__(self) -> None:
        self.num_unfinished = len(self.job.prompts)

    def _prompt_tokens(self, *counts: int) -> int:
        """Returns tokens of the document and others, each prompt counted once for all its choices."""
        before = 0 if self.job.document is None else self.job.document.num_tokens
        return (before * len(self.job.prompts) + sum(counts)) // self.n

    @property
    def cached_tokens(self) -> int:
        return self._prompt_tokens(self.job.num_reused * len(self.job.prompts))

    def describe(self) -> str:
        """Returns the numbers of tokens for the log."""
        prompt = self._prompt_tokens(*map(len, self.job.prompts))
        return f"{prompt} prompt tokens ({self.cached_tokens} cached), {self.completion_tokens} new tokens"

    def as_json(self) -> dict[str, Any]:
        prompt = self._prompt_tokens(*map(len, self.job.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


async def _next_output(job: Job, usage: _Usage) -> Output:
    """Returns the next output of a job, or raises its error."""
    item = await job.outputs.get()
    if isinstance(item, Exception):
        usage.outcome = "error"
        raise item
    usage.completion_tokens += len(item.tokens)
    if item.finish_reason is not None:
        usage.num_unfinished -= 1
        if not usage.num_unfinished:
            usage.outcome = item.finish_reason
    return item


async def _outputs(job: Job, first: Output, usage: _Usage) -> AsyncIterator[Output]:
    """Yields all outputs of a job."""
    yield first
    while usage.num_unfinished:
        yield await _next_output(job, usage)


async def _answer(job: Job, form: Format, first: Output, usage: _Usage, cite: _Cite | None) -> bytes:
    """Returns an entire answer."""
    collector = Collector()
    completions = [collector.add(output) async for output in _outputs(job, first, usage)]
    finished = sorted((one for one in completions if one is not None), key=lambda one: one.number)
    if cite is not None:
        cited = [await cite(job, one.number, one.tokens) for one in finished]
        finished = [dataclasses.replace(one, citations=of) for one, of in zip(finished, cited, strict=True)]
    # The log-probabilities of long answers are millions of values.
    choices = await asyncio.to_thread(lambda: [form.choice(one) for one in finished])
    return await asyncio.to_thread(form.answer, choices, usage.as_json())


async def _events(
    job: Job, form: Format, first: Output, usage: _Usage, has_usage: bool, cite: _Cite | None
) -> AsyncIterator[bytes]:
    """Yields the events of a streamed answer; an error is the last one."""
    tokens: dict[int, list[int]] = {}
    try:
        async for output in _outputs(job, first, usage):
            tokens.setdefault(output.number, []).extend(output.tokens)
            if (part := form.delta(output)) is not None:
                if output.finish_reason is not None and cite is not None:
                    part["citations"] = citations_as_json(await cite(job, output.number, tokens[output.number]))
                yield form.chunk([part], None)
        if has_usage:
            yield form.chunk([], usage.as_json())
        yield b"data: [DONE]\n\n"
    except Exception as error:
        yield event(report(error, "a streamed answer has failed").body)
