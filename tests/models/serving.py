"""A server on loopback in a thread of this process, the command in another one, and what clients send and receive."""

import contextlib
import http.client
import json
import os
import socket
import threading
import time

import pytest
import uvicorn

from kvjax_models.server.app import make_app
from kvjax_models.server.guard import Access
from kvjax_models.server.settings import Settings
from kvjax_models.server.worker import Worker
from tests.models.support import start_python

MODEL = "tiny"
CHAT, TEXT, DOCUMENTS = "/v1/chat/completions", "/v1/completions", "/v1/documents"
COMMAND = "import sys; from kvjax_models import cli; sys.argv[0] = 'kvjax'; cli.run()"


class Server:
    """A running server.

    Attributes:
        worker: its worker.
        port: its port.
        key: key that requests send; None for none.
    """

    key = None

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
            connection.request(method, path, data, self.headers_of() | (headers or {}))
            response = connection.getresponse()
            text = response.read().decode()
        self.headers = dict(response.getheaders())
        is_json = response.headers.get("content-type") == "application/json"
        return response.status, json.loads(text, parse_constant=_refuse) if is_json else text

    def headers_of(self):
        """Returns the headers of every request."""
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def post(self, path, **body):
        return self.request("POST", path, body)

    def chat(self, content="hi", **body):
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return self.post(CHAT, model=MODEL, messages=messages, **body)

    def complete(self, prompt, **body):
        return self.post(TEXT, model=MODEL, prompt=prompt, **body)

    def stream(self, path, headers=None, **body):
        """Returns the status and the values of all events; "[DONE]" stays text."""
        status, text = self.request("POST", path, {"model": MODEL, "stream": True} | body, headers)
        if status != 200:
            return status, text
        events = text.removesuffix("\n\n").split("\n\n")
        assert all(one.startswith("data: ") for one in events)
        values = [one.removeprefix("data: ") for one in events]
        return status, [one if one == "[DONE]" else json.loads(one, parse_constant=_refuse) for one in values]

    def metric(self, name):
        lines = self.request("GET", "/metrics")[1].splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def user(text):
    return {"role": "user", "content": text}


def body(path, prompt, **options):
    """Returns the fields of a request; a prompt is a text, or a list of messages of a chat."""
    messages = prompt if isinstance(prompt, list) else [user(prompt)]
    return {
        "model": MODEL,
        "temperature": 0,
        **({"messages": messages} if path == CHAT else {"prompt": prompt}),
    } | options


def ask(server, path, stream, prompt, headers=None, **options):
    """Returns the text, the finish reason and the log-probabilities of every choice, and the usage."""
    if not stream:
        status, answer = server.request("POST", path, body(path, prompt, **options), headers)
        assert status == 200, answer
        choices = [
            (one["message"]["content"] if path == CHAT else one["text"], one["finish_reason"], one["logprobs"])
            for one in answer["choices"]
        ]
        return choices, answer["usage"]
    fields = body(path, prompt, stream_options={"include_usage": True}, **options)
    status, events = server.stream(path, headers, **fields)
    assert status == 200, events
    assert events[-1] == "[DONE]" and events[-2]["choices"] == []
    texts, reasons, logprobs = {}, {}, {}
    for event in events[:-2]:
        assert event["usage"] is None
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in reasons  # nothing after the finish reason
            text = choice["delta"].get("content", "") if path == CHAT else choice["text"]
            if path == CHAT:
                assert ("role" in choice["delta"]) == (index not in texts)
            texts[index] = texts.get(index, "") + text
            for name, values in (choice["logprobs"] or {}).items():
                logprobs.setdefault(index, {}).setdefault(name, []).extend(values or [])
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
    assert len({(one["id"], one["created"]) for one in events[:-1]}) == 1
    return [(texts[i], reasons[i], logprobs.get(i)) for i in sorted(texts)], events[-2]["usage"]


def open_request(server, data, path=CHAT):
    """Sends a request and returns the socket."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    content = json.dumps(data).encode()
    headers = {"Host": "localhost", "Content-Length": len(content), **server.headers_of()}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    connection.sendall("\r\n".join(lines).encode() + content)
    return connection


def is_idle(server):
    return server.metric("kvjax_rows_running") == 0 and server.metric("kvjax_sequences_waiting") == 0


def _refuse(constant):
    raise ValueError(f"{constant} is not JSON")


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not fulfilled in time"
        time.sleep(0.01)


class Client(Server):
    """Requests to a server in another process."""

    def __init__(self, port, key=None):
        self.port, self.key = port, key


def answers(server):
    try:
        return server.request("GET", "/health")
    except (ConnectionError, http.client.HTTPException):
        return False


@contextlib.contextmanager
def run_command(*options, flags="", key=None):
    """Runs the command in another process; yields a client and the process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {flags}")
        process = start_python(COMMAND, "serve", f"--port={port}", f"--name={MODEL}", *options)
    try:
        client = Client(port, key)
        wait_until(lambda: (answers(client) or (0,))[0] == 200 or process.poll() is not None, 200)
        yield client, process
    finally:
        process.kill()
