"""Checks of requests before any handler: the key, and that no foreign web page sends them."""

import dataclasses
import hmac
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvjax_models.server.errors import RequestError
from kvjax_models.server.responses import error_response

_OPEN_PATHS = ("/", "/health")  # without a key


@dataclasses.dataclass(frozen=True)
class Access:
    """Who may send what.

    Attributes:
        hosts: names of the server in Host headers; localhost and IP addresses are always allowed.
        origins: further origins of web pages that may send requests; "*" allows all.
        api_key: key that clients send as a bearer token; None for no check.
        max_body_bytes: maximum size of a request's body.
    """

    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    api_key: str | None = dataclasses.field(default=None, repr=False)
    max_body_bytes: int = 4 * 2**20


class Guard:
    """ASGI middleware that refuses foreign Host and Origin headers, and wrong keys.

    A page on the web can make a browser send requests to this machine, also under a host name whose address
    it changes to this machine's. The Host header is then a foreign name, or the Origin header is another page's.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        """Creates the middleware."""
        self._app, self._origins = app, set(access.origins)
        self._hosts = {"localhost", *map(str.lower, access.hosts)}
        self._key = None if access.api_key is None else access.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        if scope["type"] == "http" and (error := self._check(Headers(scope=scope), scope["method"], scope["path"])):
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, headers: Headers, method: str, path: str) -> RequestError | None:
        host = headers.get("host", "")
        if not self._is_allowed_host(host):
            return RequestError("the Host header is not a name of this server; --allow_host adds names", 403)
        origin = headers.get("origin")
        is_allowed = bool({origin, "*"} & self._origins)
        if origin is not None and not is_allowed and origin not in (f"http://{host}", f"https://{host}"):
            return RequestError("the Origin header is another site's; --allow_origin adds origins", 403)
        if self._key is None or path in _OPEN_PATHS or method == "OPTIONS":
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1", "replace"), self._key):
            return None
        return RequestError(
            "the key is missing or wrong", 401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )

    def _is_allowed_host(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
