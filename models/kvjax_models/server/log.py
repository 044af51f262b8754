"""The server's log: a line per request without its text, and the tracebacks of internal errors."""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvjax_models.server.errors import RequestError, as_request_error
from kvjax_models.server.responses import error_response

logger = logging.getLogger(__package__)
_DETAILS = "kvjax.details"  # in the scope of a request
_POLLED = {"/health": (200, 503), "/metrics": (200,)}  # statuses of requests whose lines would hide the others
_MAX_PATH = 100  # characters


def report(error: Exception, what: str) -> RequestError:
    """Returns the error that a client receives; logs the traceback of one that is not the request's.

    Args:
        what: what failed, for the log.
    """
    result = as_request_error(error)
    if result.status >= 500 and not isinstance(error, RequestError):
        logger.error(what, exc_info=error)
    return result


class RequestLog:
    """ASGI middleware that logs one line at the end of every request, however it ends, and answers unexpected errors.

    The line has the method, the path, the status and the seconds. Handlers add further parts with `add_details`. Ids of
    documents are secrets and do not appear.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Creates the middleware.

        Args:
            app: the application.
        """
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), 0  # 0: the request ended without a response

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope[_DETAILS] = []
        try:
            await self._app(scope, receive, note_status)
        except Exception as error:
            response = error_response(report(error, "a request has failed"))
            if not status:
                await response(scope, receive, note_status)
        finally:
            if status not in _POLLED.get(scope["path"], ()):
                parts = [f"{status or 'no response'} in {time.monotonic() - start:.3f} s", *scope[_DETAILS]]
                logger.info("%s %s %s", scope["method"], _describe_path(scope["path"]), "; ".join(parts))


def add_details(scope: Scope, details: str) -> None:
    """Adds a part to the line of a request in the log; it must not contain the request's text."""
    scope[_DETAILS].append(details)


def _describe_path(path: str) -> str:
    """Returns a path without the id of a document and without characters that start another line."""
    prefix, suffix = "/v1/documents/", "/kept"
    if path.startswith(prefix):
        return f"{prefix}ID{suffix if path.endswith(suffix) else ''}"
    return ascii(path)[1:-1][:_MAX_PATH]
