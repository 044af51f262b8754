"""The routes of the server."""

import asyncio
import contextlib
import pathlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
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

from kvjax_models.cache import CachedModel
from kvjax_models.document import Document
from kvjax_models.runner.answer_text import check_stop
from kvjax_models.runner.constraints import constraint_of
from kvjax_models.runner.sampling import Sampling
from kvjax_models.server import schema
from kvjax_models.server.answers import Format, TokenBytes
from kvjax_models.server.conversations import digests
from kvjax_models.server.documents import Documents
from kvjax_models.server.errors import RequestError, as_request_error
from kvjax_models.server.guard import Access, Guard
from kvjax_models.server.log import RequestLog, add_details
from kvjax_models.server.metrics import Metrics
from kvjax_models.server.reply import Reply
from kvjax_models.server.responses import error_response, json_response, unless_disconnected
from kvjax_models.server.settings import Settings
from kvjax_models.server.worker import Job, Worker, unavailable
from kvjax_models.tokenized_model import TokenizedModel

_Handler = Callable[[Request], Awaitable[Response]]
_PAGE = pathlib.Path(__file__).with_name("page.html")
_BODY_SECONDS = 60  # to receive a body
STOP_SECONDS = 10  # to end a step of the worker


def make_app(worker: Worker, model_name: str, access: Access) -> Starlette:
    """Returns the application, which starts and stops the worker."""
    handlers = _Handlers(worker, model_name, access.max_body_bytes)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop()
        await asyncio.to_thread(worker.join, STOP_SECONDS)

    middleware = [Middleware(RequestLog), Middleware(Guard, access=access)]
    if access.origins:
        cors: dict[str, Any] = {"allow_origins": access.origins, "allow_methods": ["*"], "allow_headers": ["*"]}
        middleware.append(Middleware(CORSMiddleware, **cors))
    errors: dict[Any, Callable[..., Any]] = {
        HTTPException: _describe_http_error,
        ClientDisconnect: lambda *_: Response(status_code=499),  # nobody receives it
        RequestError: _describe_error,
        ValueError: _describe_error,
    }
    return Starlette(routes=handlers.routes(), middleware=middleware, lifespan=lifespan, exception_handlers=errors)


def _describe_error(request: Request, error: Exception) -> Response:
    """Returns the response of a request that is refused."""
    return error_response(as_request_error(error))


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
            Route("/v1/documents/{name}/kept", self._about_document(Documents.kept)),
            Route("/v1/documents/{name}/text", self._about_document(Documents.text)),
            Route("/v1/documents/{name:path}", self._about_document(Documents.describe)),
            Route("/v1/documents/{name:path}", self._about_document(Documents.delete), methods=["DELETE"]),
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
        self._documents()
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
        documents = self._documents()
        body = await self._parse_document(request)
        with self._worker.queue_text():
            await asyncio.to_thread(documents.check_text, body)
            values = await unless_disconnected(request, self._worker.read(documents.read(body)))
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
        data = await self._worker.call(self._documents().describe_all)
        return json_response({"object": "list", "data": data})

    def _about_document(self, method: Callable[[Documents, str], dict[str, Any]]) -> _Handler:
        """Returns a handler that calls a method of the documents with the id in the path."""

        async def handle(request: Request) -> Response:
            return json_response(await self._worker.call(method, self._documents(), request.path_params["name"]))

        return handle

    # --- completions ---

    async def _generate(self, request: Request, kind: type[schema.ChatRequest | schema.CompletionRequest]) -> Response:
        start, documents = time.monotonic(), self._documents()
        body = await asyncio.to_thread(schema.parse, kind, await self._read_body(request))
        self._check_model(body.model)
        if self._token_bytes is None:
            self._token_bytes = TokenBytes(documents.cache.llm.tokenizer)
        form = Format(self._token_bytes, self._model_name, body)
        async with contextlib.AsyncExitStack() as opened:
            job = await self._make_job(documents, body, request, opened)
            reply = Reply(self._worker, self._metrics, body, job, form)
        return await reply.respond(request, start)

    async def _make_job(
        self,
        documents: Documents,
        body: schema.GenerationRequest,
        request: Request,
        opened: contextlib.AsyncExitStack,
    ) -> Job:
        """Checks the fields of a request and encodes its prompts; `opened` holds its document until it is submitted."""
        if body.stream_options is not None and not body.stream:
            raise RequestError("stream_options requires stream=true", param="stream_options")
        if body.cite and body.document is None:
            raise RequestError("citations refer to a document; name one", param="cite")
        worker, document = self._worker, None
        sampling, stop = await asyncio.to_thread(_sampling, body, documents.cache.llm), check_stop(body.stop)
        if body.document is not None:
            opening = opened.enter_async_context(worker.open_document(body.document))
            document = await unless_disconnected(request, opening)
            if body.cite:
                await worker.call(document.check_citable)  # before the answer, which would be lost
        authorization = request.headers.get("authorization", "")
        prompts, conversation = await asyncio.to_thread(self._encode, documents.cache, body, document, authorization)
        if document is None:
            _check_lengths(body, prompts, worker.settings)
        prompts = [prompt for prompt in prompts for _ in range(body.n)]
        seed = secrets.randbits(32) if body.seed is None else body.seed
        return Job(prompts, document, sampling, stop, body.limit(), seed, conversation)

    def _encode(
        self,
        cache: CachedModel,
        body: schema.GenerationRequest,
        document: Document | None,
        authorization: str,
    ) -> tuple[list[list[int]], list[bytes] | None]:
        """Returns the tokens of the prompts, and the digests of a chat that continues earlier answers."""
        llm = schema.with_special(cache, body.parse_special).llm
        prompts = body.prompts(llm, None if document is None else document.with_tokenizer(llm.tokenizer))
        if not isinstance(body, schema.ChatRequest) or not self._worker.settings.conversations:
            return prompts, None
        # With compression, an answer that continues another one differs from the answer to a new request.
        reuse = self._worker.is_exact(document) if body.reuse is None else body.reuse
        return prompts, digests(authorization, body.as_messages()) if reuse else None

    # --- checks ---

    def _documents(self) -> Documents:
        """Returns the documents of a worker that is ready."""
        documents = self._worker.documents
        if documents is None or not self._worker.is_ready:
            raise unavailable()
        return documents

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


def _sampling(body: schema.GenerationRequest, llm: TokenizedModel) -> Sampling:
    """Returns the sampling parameters; compiles the grammar of a constrained answer, which may take a second."""
    sampling = body.sampling(llm.tokenizer)
    constraint_of(sampling, llm.tokenizer, llm.model.config.vocab_size)
    return sampling


def _check_lengths(body: schema.GenerationRequest, prompts: list[list[int]], settings: Settings) -> None:
    """Checks the lengths of prompts and answers without a document, whose own limits the engine checks."""
    longest, max_prompt_tokens = max(map(len, prompts)), settings.max_prompt_tokens
    if max_prompt_tokens is not None and longest > max_prompt_tokens:
        raise RequestError(
            f"{longest} tokens of the prompt exceed max_prompt_tokens={max_prompt_tokens}; shorten it",
            code="context_length_exceeded",
        )
    if (limit := body.limit()) is not None and limit > settings.max_new_tokens:
        raise RequestError(
            f"max_tokens={limit} exceeds the server's max_new_tokens={settings.max_new_tokens}", param="max_tokens"
        )
