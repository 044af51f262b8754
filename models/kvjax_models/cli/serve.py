"""`kvjax serve`: an HTTP server with OpenAI's interface, for prompts and for documents that are compressed once."""

import asyncio
import dataclasses
import importlib.util
import os
import pathlib
import signal
import socket

import simple_parsing

from kvjax.budget import Budget
from kvjax_models.cache import CachedModel
from kvjax_models.cli import interrupts
from kvjax_models.cli.options import ModelOptions, repeatable
from kvjax_models.cli.output import write_status

_KEY_VARIABLE = "KVJAX_API_KEY"


@dataclasses.dataclass(frozen=True)
class Serve(ModelOptions):
    """Serves a model at OpenAI's interface; documents are compressed once and answer many questions."""

    policy: str = "auto"  # As for `generate`, of all prompts and documents.
    budget: str | None = None  # As for `generate`.
    rows: str = "4"  # Batch rows of prompts (4), or bytes for their caches (2GiB).
    documents: int = 4  # Documents that are asked at a time.
    document_rows: int = 4  # Questions to one document that run at a time.
    max_prompt_tokens: int = 8192  # Maximum length of a prompt or of a document.
    max_new_tokens: int = 1024  # Maximum length of an answer; for documents of a question and its answer.
    max_queue: int = 64  # Maximum number of sequences that wait for a row, and of texts that wait to be read.
    max_body_bytes: str = "4MiB"  # Maximum size of a request.
    cache_bytes: str = "4GiB"  # Maximum bytes of the documents in memory; further ones are on disk, or refused.
    conversations: int = 16  # Answers whose caches are kept for the next turn, in the memory that documents leave.
    documents_dir: str | None = None  # Directory in which documents are saved; they survive a restart.
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
        choice = self.parse_policy(self.policy, self.budget)
        for name in ("documents", "document_rows", "max_prompt_tokens", "max_new_tokens", "shutdown_seconds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}={getattr(self, name)} must be at least 1")
        # Imported here, because the libraries of the extra may be missing.
        import uvicorn

        from kvjax_models.server.app import STOP_SECONDS, Access, make_app
        from kvjax_models.server.worker import Settings, Worker

        settings = Settings(
            rows=self.rows,
            document_rows=self.document_rows,
            documents=self.documents,
            max_prompt_tokens=self.max_prompt_tokens,
            max_new_tokens=self.max_new_tokens,
            max_queue=self.max_queue,
            conversations=self.conversations,
            documents_dir=self.documents_dir,
            cache_bytes=_parse_bytes("cache_bytes", self.cache_bytes),
        )
        access = Access(
            hosts=[self.host, *self.allow_host],
            origins=self.allow_origin,
            api_key=self.api_key or os.environ.get(_KEY_VARIABLE) or None,
            max_body_bytes=_parse_bytes("max_body_bytes", self.max_body_bytes),
        )

        def load() -> CachedModel:
            try:
                return self.load().cache(choice, kv_dtype=self.kv_formats)
            except BaseException:
                server.should_exit = True
                raise

        worker = Worker(load, settings)
        config = uvicorn.Config(
            make_app(worker, self.name or pathlib.Path(self.model).name, access),
            host=self.host,
            port=self.port,
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

        server, seconds = Server(config), self.shutdown_seconds
        # uvicorn raises the signal again after its shutdown; the process then ends with status 0.
        signal.signal(signal.SIGTERM, lambda *_: None)
        write_status(f"serving on http://{self.host}:{self.port}")
        with interrupts.deferred():
            server.run()
        if worker.error is not None:
            raise ValueError(f"the worker has failed: {worker.error}") from worker.error
        if not worker.join(0):  # a step takes long; the interpreter must not destroy XLA's client meanwhile
            interrupts.exit_now(0)


_LIBRARIES = ("starlette", "uvicorn", "msgspec", "prometheus_client")


def _parse_bytes(name: str, text: str) -> int:
    """Returns a number of bytes.

    Raises:
        ValueError: if the text is none.
    """
    size = Budget.parse(text).bytes
    if size is None:
        raise ValueError(f"--{name}={text} must be a number of bytes, such as 4GiB")
    return size
