"""A server on loopback in a thread of this process."""

import contextlib
import http.client
import json
import os
import socket
import threading
import time

import pytest
import uvicorn

from kvjax_models.server.app import Access, make_app
from kvjax_models.server.settings import Settings
from kvjax_models.server.worker import Worker
from tests.models.support import start_python

MODEL = "tiny"


class Server:
    """A running server.

    Attributes:
        worker: its worker.
        port: its port.
    """

    def __init__(self, cache, settings=None, **access):
        sizes = {"rows": 3, "max_prompt_tokens": 256, "max_new_tokens": 64, "stream_interval": 4, "warm_up": False}
        self.worker = Worker(lambda: cache, Settings(**sizes | (settings or {})))
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        app = make_app(self.worker, MODEL, Access(**access))
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5, ws="none"))
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)

    def __enter__(self):
        self._thread.start()
        wait_until(lambda: self.worker.is_ready or self.worker.error)
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def request(self, method, path, body=None, headers=None):
        """Returns the status and the JSON, or the text, of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            text = response.read().decode()
        self.headers = dict(response.getheaders())
        is_json = response.headers.get("content-type") == "application/json"
        return response.status, json.loads(text, parse_constant=_refuse) if is_json else text

    def post(self, path, **body):
        return self.request("POST", path, body)

    def chat(self, content="hi", **body):
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", model=MODEL, messages=messages, **body)

    def complete(self, prompt, **body):
        return self.post("/v1/completions", model=MODEL, prompt=prompt, **body)

    def stream(self, path, **body):
        """Returns the status and the values of all events; "[DONE]" stays text."""
        status, text = self.post(path, **{"model": MODEL, "stream": True} | body)
        if status != 200:
            return status, text
        events = text.removesuffix("\n\n").split("\n\n")
        assert all(one.startswith("data: ") for one in events)
        values = [one.removeprefix("data: ") for one in events]
        return status, [one if one == "[DONE]" else json.loads(one, parse_constant=_refuse) for one in values]

    def metric(self, name):
        lines = self.request("GET", "/metrics")[1].splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def _refuse(constant):
    raise ValueError(f"{constant} is not JSON")


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not fulfilled in time"
        time.sleep(0.01)


class Client(Server):
    """Requests to a server in another process."""

    def __init__(self, port):
        self.port = port


def answers(server):
    try:
        return server.request("GET", "/health")
    except (ConnectionError, http.client.HTTPException):
        return False


@contextlib.contextmanager
def run_command(*options, flags=""):
    """Runs the command in another process; yields a client and the process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    code = "import sys; from kvjax_models import cli; sys.argv[0] = 'kvjax'; cli.run()"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {flags}")
        process = start_python(code, "serve", f"--port={port}", f"--name={MODEL}", *options)
    try:
        client = Client(port)
        wait_until(lambda: (answers(client) or (0,))[0] == 200 or process.poll() is not None, 200)
        yield client, process
    finally:
        process.kill()
