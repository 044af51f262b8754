"""Errors of requests, written as OpenAI's error objects."""

from typing import Any


class RequestError(Exception):
    """An error that a client receives.

    Attributes:
        status: HTTP status.
        message: a sentence for the client.
        param: the field that is wrong.
        code: a constant for programs.
        headers: further headers of the response.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Creates an error.

        Args:
            param: the field.
            code: a constant.
        """
        super().__init__(message)
        self.message, self.status, self.param, self.code, self.headers = message, status, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_request_error(error: Exception) -> RequestError:
    """Returns the error that a client receives for one of the library: invalid values are the request's."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ValueError):
        return RequestError(str(error))
    return RequestError(f"the server failed: {type(error).__name__}", 500)
