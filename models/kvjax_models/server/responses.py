"""Responses that handlers share, and the end of a request whose client has gone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvjax_models.server.errors import RequestError

T = TypeVar("T")


def json_response(values: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a response with JSON.

    Args:
        values: the values, or JSON as bytes.
    """
    body = values if isinstance(values, bytes) else msgspec.json.encode(values)
    return Response(body, status, headers, media_type="application/json")


def error_response(error: RequestError) -> Response:
    """Returns a response with an error object."""
    return json_response(error.body, error.status, error.headers)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits work, which is cancelled if the client disconnects.

    Args:
        request: a request whose body was read.

    Returns:
        Its result.

    Raises:
        ClientDisconnect: if the client disconnects.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # an error that nobody awaits would be logged


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events, with a function that runs at their end, however they end."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        """Creates a response.

        Args:
            close: called at the end.
        """
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._request, self._close = request, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; a client that leaves ends them."""
        try:
            # The response has started: raising the error would only log it.
            with contextlib.suppress(ClientDisconnect):
                await unless_disconnected(self._request, self.stream_response(send))
        finally:
            self._close()
