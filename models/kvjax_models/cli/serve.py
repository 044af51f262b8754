"""`kvjax serve`: an HTTP server with OpenAI's interface, for prompts and for documents that are compressed once."""

import asyncio
import contextlib
import dataclasses
import gc
import importlib.util
import logging as stdlib_logging
import os
import pathlib
import re
import signal
import socket
from urllib.parse import urlsplit

import jax
import simple_parsing

from kvjax_models.cache import CachedModel, parse_bytes
from kvjax_models.cli import interrupts
from kvjax_models.cli.options import ModelOptions, repeatable

_KEY_VARIABLE = "KVJAX_API_KEY"
_LIBRARIES = ("starlette", "uvicorn", "msgspec", "prometheus_client", "python_multipart", "llguidance")
_CPU_INFO = pathlib.Path("/proc/cpuinfo")
_BFLOAT16_FLAG = re.compile(r"\b(avx512_bf16|amx_bf16|bf16)\b")  # of x86 and Arm


@dataclasses.dataclass(frozen=True)
class Serve(ModelOptions):
    """Serves a model at OpenAI's interface; documents are compressed once and answer many questions."""

    policy: str = "auto"  # As for `generate`, of all prompts and documents.
    budget: str | None = None  # As for `generate`.
    rows: int = 16  # Maximum number of sequences that run at a time.
    max_prompt_tokens: int | None = None  # Maximum length of a prompt or document; 8192 or the model's limit.
    max_new_tokens: int = 1024  # Maximum length of an answer; for documents of a question and its answer.
    max_queue: int = 64  # Maximum number of sequences that wait for a row, and of texts that wait to be read.
    max_body_bytes: str = "4MiB"  # Maximum size of a request.
    # Maximum bytes of all caches. Requests wait for memory; further documents are on disk, or refused.
    cache_bytes: str = "4GiB"
    warm_up: bool = True  # Compile the programs of usual requests before the server is ready.
    conversations: int = 16  # Answers whose caches are kept for the next turn, in the memory that others leave.
    documents_dir: str | None = None  # Directory in which documents are saved; they survive a restart.
    documents_bytes: str | None = None  # Maximum size of that directory (16GiB); further documents are refused.
    stream_interval: int = 1  # Tokens of a part of a streamed answer; more are a little faster.
    name: str | None = None  # Name of the model in requests; by default the last part of --model.
    host: str = "127.0.0.1"  # Address to listen on.
    port: int = 8080  # Port to listen on.
    # Key that clients must send; by default the environment variable KVJAX_API_KEY, which other users cannot see.
    api_key: str | None = simple_parsing.field(default=None, repr=False)
    allow_host: list[str] = repeatable("NAME")  # Further name of this server in Host headers; repeatable.
    allow_origin: list[str] = repeatable("ORIGIN")  # Origin of web pages that may send requests; repeatable.
    shutdown_seconds: int = 30  # Seconds that running requests have after SIGTERM.

    def run(self) -> None:
        """Runs the server until SIGTERM or Ctrl-C.

        Raises:
            ValueError: if an option is invalid, or the model cannot be loaded.
        """
        if missing := [one for one in _LIBRARIES if importlib.util.find_spec(one) is None]:
            raise ValueError(f"serve needs {', '.join(missing)}; install kvjax[server]")
        choice, kv_formats = self.parse_policy(self.policy, self.budget), self.kv_formats
        self._check_options()
        # Imported here, because the libraries of the extra may be missing.
        import uvicorn

        from kvjax_models.server.app import STOP_SECONDS, make_app
        from kvjax_models.server.guard import Access
        from kvjax_models.server.log import logger
        from kvjax_models.server.settings import Settings
        from kvjax_models.server.worker import Worker

        sizes = {one.name: getattr(self, one.name) for one in dataclasses.fields(Settings) if hasattr(self, one.name)}
        sizes["cache_bytes"] = _parse_bytes("cache_bytes", self.cache_bytes)
        if self.documents_bytes is not None:
            sizes["documents_bytes"] = _parse_bytes("documents_bytes", self.documents_bytes)
        max_body_bytes = _parse_bytes("max_body_bytes", self.max_body_bytes)
        access = Access([self.host, *self.allow_host], self.allow_origin, self._find_key(), max_body_bytes)

        def load() -> CachedModel:
            cache = self.load(default_dtype).cache(choice, kv_dtype=kv_formats)
            gc.freeze()  # later collections leave out the objects up to now, and stop the event loop for a shorter time
            return cache

        def end() -> None:
            server.should_exit = True

        model_name = self.name or pathlib.Path(self.model).name
        worker = Worker(load, Settings(**sizes), model_name, end)
        config = uvicorn.Config(
            make_app(worker, model_name, access),
            log_config=None,  # its records have the format of the others
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=self.shutdown_seconds + STOP_SECONDS,
            server_header=False,
            ws="none",
        )

        class Server(uvicorn.Server):
            """Gives running requests some time at the end, then an error."""

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                asyncio.get_running_loop().call_later(seconds, worker.stop)
                await super().shutdown(sockets)

        logger.setLevel(stdlib_logging.INFO)
        listener = _listen(self.host, self.port)
        logger.info("listening on %s; the model is loading", _describe_address(listener))
        server, seconds = Server(config), self.shutdown_seconds
        # uvicorn raises the signal again after its shutdown; the process then ends with status 0.
        signal.signal(signal.SIGTERM, lambda *_: None)
        with interrupts.deferred():
            server.run([listener])
        if isinstance(worker.error, ValueError | OSError):
            raise worker.error
        if worker.error is not None:
            raise ValueError(f"the server has failed: {worker.error!r}") from worker.error
        if not worker.join(0):  # a step takes long; the interpreter must not destroy XLA's client meanwhile
            interrupts.exit_now(0)

    def _check_options(self) -> None:
        """Checks the options with which no request could be answered.

        Raises:
            ValueError: if one is invalid.
        """
        positive = ("rows", "max_prompt_tokens", "max_new_tokens", "max_queue", "stream_interval", "shutdown_seconds")
        for name, minimum in (*((name, 1) for name in positive), ("conversations", 0)):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"--{name}={value} must be at least {minimum}")
        if self.documents_bytes is not None and self.documents_dir is None:
            raise ValueError("--documents_bytes requires --documents_dir")
        if self.seed:
            raise ValueError(f"--seed={self.seed} has no effect on a server; requests have the field seed")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port={self.port} must be from 0 to 65535")
        for host in self.allow_host:
            if urlsplit(f"//{host}").hostname != host.lower():
                raise ValueError(f"--allow_host={host} must be a name without a scheme and a port, such as example.org")
        for origin in self.allow_origin:
            parts = urlsplit(origin)
            if origin not in ("*", "null") and origin != f"{parts.scheme}://{parts.netloc}":
                raise ValueError(
                    f"--allow_origin={origin} must be a scheme with a host, such as https://app.example, or *"
                )

    def _find_key(self) -> str | None:
        """Returns the key that clients must send; None for no check.

        Raises:
            ValueError: if no client could send it.
        """
        key = os.environ.get(_KEY_VARIABLE) if self.api_key is None else self.api_key
        if key is not None and (not key or key != key.strip() or not key.isprintable()):
            source = _KEY_VARIABLE if self.api_key is None else "--api_key"
            raise ValueError(
                f"{source} must be a text that is not empty, without spaces around it and without line breaks"
            )
        return key


def default_dtype() -> str | None:
    """Returns the dtype of a model that is served, if no option names one.

    CPUs that multiply bfloat16 numbers take less time with them than with float32, as docs/serve.md shows. Elsewhere it
    is the default of `load`.
    """
    if jax.default_backend() != "cpu" or not _CPU_INFO.exists():
        return None
    return "bfloat16" if _BFLOAT16_FLAG.search(_CPU_INFO.read_text()) else None


def _listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on an address.

    Raises:
        OSError: if that is not possible.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]
        raise OSError(f"cannot listen on --host={host} --port={port}: {reason}; pass another address") from error


def _describe_address(listener: socket.socket) -> str:
    """Returns the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _parse_bytes(name: str, text: str) -> int:
    """Returns a number of bytes.

    Raises:
        ValueError: if the text is none.
    """
    with contextlib.suppress(ValueError):
        return parse_bytes(text)
    raise ValueError(f"--{name}={text} must be a number of bytes, such as 4GiB")
