"""`kvjax serve` over loopback: fields, documents, and kinds of requests that other servers answered wrongly."""

import concurrent.futures
import contextlib
import http.client
import json
import logging
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import traceback

import openai
import pytest

from kvjax_models.document import Document
from kvjax_models.runner.sampling import Sampling
from kvjax_models.server import app, documents, schema
from kvjax_models.server.answers import Format
from kvjax_models.server.app import _PAGE
from kvjax_models.server.documents import Documents
from kvjax_models.server.settings import Settings
from kvjax_models.server.worker import Worker, _Jobs
from tests.models import chain, tiny
from tests.models.serving import MODEL, Server, answers, run_command, wait_until
from tests.models.support import count_compilations, damage_bytes

# The last character of a prompt selects the answer.
EMOJI, FLAG, HAN = "😀", "🇩🇪", "漢字"
CHAINS = [
    [b"?", b"The", b" qu", b"ick", b" br", b"own", b" fox", None],
    [b"!", *(bytes([byte]) for byte in EMOJI.encode()), None],
    [b"#", b"\xf0\x9f", b"\x87\xa9\xf0", b"\x9f\x87", b"\xaa", None],
    [b"&", *(bytes([byte]) for byte in HAN.encode()), None],
    [b"~", b" w", b" x", b" w"],  # never ends
    [b"=", b" y", b" y"],  # ends at random
    [b" y", None],
    [b"%", b" n1", b" n2", b" n3", b" n4", b" n5", b" n6", b" n7"],
    [b"<", b"<img src=x onerror=alert(1)>", None],
]
FOX = "The quick brown fox"
TEMPLATE = (
    "{% if messages[0].role == 'system' and messages|length == 1 %}{{ raise_exception('no user message') }}{% endif %}"
    "{% for message in messages %}{% if not loop.first and message.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ message.role }}]{{ message.content }}{% endfor %}"
)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EACH = pytest.mark.parametrize(
    ("path", "stream"), [(path, stream) for path in (CHAT, TEXT) for stream in (True, False)]
)
TEXT_OF_DOCUMENT = "A long text about ships. " * 6


def make_llm(**options):
    return chain.make_llm(CHAINS, TEMPLATE, broken=[b" n6"], **options)


@pytest.fixture(scope="module")
def cache():
    return make_llm().cache()


@pytest.fixture(scope="module")
def server(cache):
    with Server(cache) as one:
        yield one


@pytest.fixture(scope="module")
def long_server():
    """Answers of up to 20,000 tokens, in two rows."""
    settings = {"rows": 2, "max_new_tokens": 20_000, "max_queue": 2}
    with Server(make_llm(max_length=40_000).cache(), settings) as one:
        yield one


@pytest.fixture(scope="module")
def random_llm():
    """Random text that depends on the prompt, through several layers."""
    return tiny.make_llm(tiny.TEMPLATE)


def body(path, prompt, **options):
    content = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    return {"model": MODEL, "temperature": 0, **content, **options}


def ask(server, path, stream, prompt, **options):
    """Returns the text, the finish reason and the log-probabilities of every choice, and the usage."""
    if not stream:
        status, answer = server.post(path, **body(path, prompt, **options))
        assert status == 200, answer
        choices = [
            (one["message"]["content"] if path == CHAT else one["text"], one["finish_reason"], one["logprobs"])
            for one in answer["choices"]
        ]
        return choices, answer["usage"]
    status, events = server.stream(path, **body(path, prompt, stream_options={"include_usage": True}, **options))
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


def refuse(server, path=CHAT, prompt="?", status=400, **options):
    """Returns the error of a request that must be refused."""
    actual, answer = server.post(path, **body(path, prompt, **options))
    assert actual == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return answer["error"]


# --- the twelve kinds ---


@EACH
def test_k1_characters_of_several_tokens(server, path, stream):
    for prompt, expected in (("!", EMOJI), ("#", FLAG), ("&", HAN)):
        [(text, reason, _)], _ = ask(server, path, stream, prompt)
        assert text == expected and reason == "stop"


@EACH
def test_k2_stop_strings(server, path, stream):
    for stop, expected in (
        (["own fox"], "The quick br"),
        ("ui", "The q"),  # inside a token
        (["quick brown", "ick"], "The qu"),  # the earliest that is complete
        (["The quick brown fox!", "fox"], "The quick brown "),
        (["brow", "brown"], "The quick "),
        (["absent"], FOX),
    ):
        [(text, reason, _)], _ = ask(server, path, stream, "?", stop=stop)
        assert (text, reason) == (expected, "stop")


@EACH
def test_k3_limits(server, path, stream):
    for limit in (1, 2, 5):
        [(_, reason, _)], usage = ask(server, path, stream, "?", max_tokens=limit)
        assert reason == "length" and usage["completion_tokens"] == limit
    [(text, reason, _)], usage = ask(server, path, stream, "?", max_tokens=7)  # the end token is the last one
    assert (text, reason, usage["completion_tokens"]) == (FOX, "stop", 7)
    [(text, _, _)], usage = ask(server, path, stream, "?", max_tokens=None)
    assert text == FOX and usage["total_tokens"] == usage["prompt_tokens"] + 7
    assert refuse(server, path, max_tokens=0, stream=stream)["param"] == "max_tokens"
    too_long = refuse(server, path, "?" * 600, stream=stream)["message"]
    assert re.search(r"\b6\d\d tokens of the prompt exceed max_prompt_tokens=256", too_long)
    assert re.search("1000 .*exceed", refuse(server, path, max_tokens=1000, stream=stream)["message"])


@EACH
def test_nothing_is_returned_for_tokens_after_a_stop_string(server, path, stream):
    fields = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    for stop, text, count in (("ick", "The qu", 3), ("ow", "The quick br", 5), (["absent", "The"], "", 1)):
        before = server.metric("kvjax_new_tokens_total")
        [(actual, reason, logprobs)], usage = ask(server, path, stream, "?", stop=stop, **fields)
        assert (actual, reason, usage["completion_tokens"]) == (text, "stop", count)
        tokens = [one["token"] for one in logprobs["content"]] if path == CHAT else logprobs["tokens"]
        assert tokens == ["The", " qu", "ick", " br", "own", " fox"][:count]
        wait_until(lambda: server.metric("kvjax_new_tokens_total") == before + count)  # noqa: B023


def test_k3_max_completion_tokens(server):
    for fields, expected in (
        ({"max_completion_tokens": 2}, 2),
        ({"max_completion_tokens": 2, "max_tokens": 5}, 2),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
        ({"max_completion_tokens": None, "max_tokens": None}, 7),
    ):
        assert ask(server, CHAT, False, "?", **fields)[1]["completion_tokens"] == expected
    refuse(server, max_completion_tokens=0)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_k4_several_choices(server, path):
    options = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 40}
    streamed, usage = ask(server, path, True, "=", **options)  # checks indices, roles and ids
    entire, entire_usage = ask(server, path, False, "=", **options)
    assert streamed == entire and usage == entire_usage and len(streamed) == 3
    assert len({len(text) for text, _, _ in streamed}) > 1
    alone = [ask(server, path, False, "=", **options | {"n": 1, "seed": 5 + i})[0][0] for i in range(3)]
    assert alone == streamed


@EACH
def test_k5_log_probabilities(server, path, stream):
    for prompt, expected in (("!", EMOJI), ("#", FLAG), ("?", FOX)):
        for num_top in (0, 5):
            fields = {"logprobs": True, "top_logprobs": num_top} if path == CHAT else {"logprobs": num_top}
            [(_, _, logprobs)], usage = ask(server, path, stream, prompt, **fields)
            if path == TEXT:
                assert len(logprobs["tokens"]) == usage["completion_tokens"]
                assert all(len(one) == max(num_top, 1) for one in logprobs["top_logprobs"])
                assert all(
                    token in top for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
                )
                continue
            items = logprobs["content"]
            assert len(items) == usage["completion_tokens"] and all(
                len(one["top_logprobs"]) == num_top for one in items
            )
            assert b"".join(bytes(one["bytes"] or []) for one in items) == expected.encode()
            assert all(-9999 <= one["logprob"] <= 0 for one in items)
    assert ask(server, path, stream, "?")[0][0][2] is None


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_k6_numbers(server, path):
    content = json.dumps(body(path, "?"))[:-1]
    for field, values in {
        "temperature": ("NaN", "Infinity", "-1", '"0.5"', "true", "1e999"),
        "top_p": ("NaN", "0", "1.5", "-1"),
        "min_p": ("-0.1", "2"),
        "top_k": ("-5", "1.5", "true"),
        "n": ("0", "129", "5000000", "true", '"2"'),
        "max_tokens": ("true", "3.7", '"16"', "-1", "99999999999999999999999"),
        "seed": ("-1", "1.5", "99999999999999999999999", '"x"'),
        "presence_penalty": ("3", "NaN", "[]"),
        "stop": ('""', "[1]", '["a", ""]', json.dumps(["a"] * 17)),
    }.items():
        for value in values:
            data = re.sub(r'"temperature": 0', "", content) + f', "{field}": {value}}}'
            status, answer = server.request("POST", path, data.replace(", ,", ",").replace("{,", "{").encode())
            assert status == 400, (field, value, answer)
            if value not in ("NaN", "Infinity", "1e999"):  # not JSON
                assert field in answer["error"]["message"] or answer["error"]["param"] == field, (value, answer)
    assert ask(server, path, False, "?", max_tokens=20)[0][0][0] == FOX
    sampled = [ask(server, path, False, "=", seed=0, temperature=1)[0] for _ in range(2)]
    assert sampled[0] == sampled[1]
    assert refuse(server, TEXT, ["?"] * 10_000)["param"] == "prompt"


@EACH
def test_k7_messages(server, path, stream):
    def chat(messages):
        return server.post(CHAT, model=MODEL, messages=messages, temperature=0, stream=stream)

    def message(role, content):
        return {"role": role, "content": content}

    if path == TEXT:
        for prompt in ([], [[]], ["?", 3], {"a": 1}, [[10**9]], [-1]):
            refuse(server, TEXT, prompt, stream=stream)
        return
    for messages, sentence in (
        ([], "length >= 1 - at `$.messages`"),
        ([message("system", "x")], "no user message"),
        ([message("user", "x"), message("user", "y")], "roles must alternate"),
        ([message("robot", "x")], "role"),
        ([message("user", None)], "content"),
        ([message("user", 3)], "content"),
        ([message("user", [{"type": "image_url", "image_url": {"url": "data:"}}])], "'image_url'"),
        ([message("user", [{"type": "text"}])], "field `text`"),
        ([{"content": "x"}], "role"),
    ):
        status, answer = chat(messages)
        assert status == 400 and sentence in answer["error"]["message"], answer
    answers = [
        server.chat(messages, temperature=0)[1]
        for messages in (
            [message("user", "a?")],
            [message("user", [{"type": "text", "text": "a?"}])],
        )
    ]
    assert answers[0]["usage"] == answers[1]["usage"]
    history = [
        message("user", "x"),
        {**message("assistant", None), "tool_calls": None, "refusal": None},
        message("user", "?"),
    ]
    tokens = server.chat(history, temperature=0)[1]["usage"]["prompt_tokens"]
    assert tokens == len("[user]x[assistant][user]?")
    assert server.chat([message("user", "x"), message("system", "?")], temperature=0)[0] == 200


def open_request(server, data, path=CHAT):
    """Sends a request and returns the socket."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    content = json.dumps(data).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def receive_until(connection, data):
    received = b""
    while data not in received:
        part = connection.recv(10_000)
        assert part, received
        received += part


def is_idle(server):
    return server.metric("kvjax_rows_running") == 0 and server.metric("kvjax_sequences_waiting") == 0


@EACH
def test_k8_disconnects(long_server, path, stream):
    data = body(path, "~", max_tokens=20_000, stream=stream)
    before = long_server.metric('kvjax_requests_total{outcome="cancelled"}')
    connections = []
    for count in range(3):  # one after the other: two run, one waits
        connections.append(open_request(long_server, data, path))
        wait_until(lambda: long_server.worker.num_rows + long_server.worker.num_waiting > count)  # noqa: B023
    if stream:
        receive_until(connections[0], b" w")
    connections[1].shutdown(socket.SHUT_WR)  # half-closed
    for connection in (connections[2], connections[0]):
        connection.close()
    wait_until(lambda: is_idle(long_server))
    connections[1].close()
    wait_until(lambda: long_server.metric('kvjax_requests_total{outcome="cancelled"}') == before + 3)
    assert ask(long_server, path, stream, "?")[0][0][0] == FOX


@pytest.mark.parametrize("stream", [True, False])
def test_k9_faults_end_one_request(server, stream):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        good = [pool.submit(ask, server, CHAT, stream, prompt) for prompt in "?!#"]
        if stream:
            status, events = server.stream(CHAT, **body(CHAT, "%"))
            assert status == 200 and "NaN" in events[-1]["error"]["message"]
            assert all(one["choices"][0]["finish_reason"] is None for one in events[:-1]) and events[:-1]
        else:
            assert "NaN" in refuse(server, prompt="%", status=500)["message"]
        assert [one.result()[0][0][0] for one in good] == [FOX, EMOJI, FLAG]
    with pytest.raises(openai.APIError, match="NaN"):
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        options = body(CHAT, "%", stream=stream)
        answer = client.chat.completions.create(**options)
        list(answer)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("end", ["fault", "engine", "worker"])
def test_text_that_was_held_back_precedes_an_error(cache, monkeypatch, path, end):
    """All text may be the start of the stop string, until the answer ends with an error."""
    steps, step = iter(range(1, 100)), _Jobs.step

    def fail_second(lane):
        if next(steps) > 2:  # one for the prefill, or a second one for tokens
            raise RuntimeError("out of memory") if end == "engine" else SystemExit
        step(lane)

    with Server(cache, {"max_prefill_tokens": 1}) as server:
        wait_until(lambda: server.worker.is_ready)
        if end != "fault":
            monkeypatch.setattr(_Jobs, "step", fail_second)
        options = {"stop": [" n1" + "x" * 60], "max_tokens": 60}
        status, events = server.stream(path, **body(path, "%", **options))
        assert status == 200 and "error" in events[-1], events
        text = "".join(
            choice["delta"].get("content", "") if path == CHAT else choice["text"]
            for event in events[:-1]
            for choice in event["choices"]
        )
        assert text == " n1 n2 n3 n4"
        assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])


def test_k9_a_dead_worker_fails_requests():
    with Server(make_llm(max_length=40_000).cache(), {"max_new_tokens": 20_000}) as server:
        client = concurrent.futures.ThreadPoolExecutor(4)
        data = body(CHAT, "~", max_tokens=20_000)
        entire = client.submit(server.post, CHAT, **data)
        streamed = open_request(server, data | {"stream": True})
        wait_until(lambda: server.worker.num_rows == 2)
        assert b"200 OK" in streamed.recv(10_000)

        def die():
            raise SystemExit

        server.worker._put(die)
        assert entire.result(30)[0] == 503
        rest = b""
        while part := streamed.recv(10_000):
            rest += part
            if b'"error"' in rest:
                break
        assert b'data: {"error"' in rest and b"[DONE]" not in rest and b'"finish_reason":"' not in rest
        wait_until(lambda: server.request("GET", "/health") == (503, {"status": "failed"}))
        refuse(server, status=503)
        assert server.post("/v1/documents", text="x")[0] == 503


def test_k9_the_end_of_the_worker_is_reported():
    is_reported = threading.Event()
    worker = Worker(lambda: exec("raise ValueError('no model')"), Settings(), on_failure=is_reported.set)
    worker.start()
    assert is_reported.wait(60) and str(worker.error) == "no model"
    is_reported.clear()
    worker = Worker(
        lambda: make_llm().cache(), Settings(rows=1, max_new_tokens=8, warm_up=False), on_failure=is_reported.set
    )
    worker.start()
    wait_until(lambda: worker.is_ready)
    worker.stop()
    assert worker.join(60) and not is_reported.is_set()  # no failure


def test_prompts_beyond_the_context_are_refused_at_the_start():
    worker = Worker(lambda: make_llm().cache(), Settings(max_prompt_tokens=513))
    worker.start()
    assert worker.join(60) and "max_prompt_tokens=513 exceeds the model's context length of 512" in str(worker.error)


def test_k9_a_failed_engine_is_replaced(cache, monkeypatch):
    with Server(cache) as server:
        step = _Jobs.step

        def fail(lane):
            monkeypatch.setattr(_Jobs, "step", step)
            raise RuntimeError("out of memory")

        monkeypatch.setattr(_Jobs, "step", fail)
        assert refuse(server, status=500)["type"] == "server_error"
        assert ask(server, CHAT, True, "?")[0][0][0] == FOX


def test_k10_answers_equal_those_of_the_library(random_llm):
    cache = random_llm.cache("streaming_llm", 24)
    prompts = [f"marker{number} " * (1 + number % 7) for number in range(40)]
    options = [{"temperature": number % 3 / 2, "top_k": 1 + number % 9, "seed": number} for number in range(40)]
    with Server(cache) as server:

        def expected(number):
            engine = cache.engine(rows=1)
            tokens = random_llm.encode([{"role": "user", "content": prompts[number]}])
            sampling = Sampling(temperature=options[number]["temperature"], top_k=options[number]["top_k"])
            engine.add(tokens, sampling=sampling, max_new_tokens=20, seed=number)
            return "".join(output.text for output in engine.run())

        def answer(number):
            fields = options[number] | {"max_tokens": 20}
            if number % 5 == 4:  # cancelled
                connection = open_request(
                    server, body(CHAT, prompts[number], stream=True, **fields | {"max_tokens": 60})
                )
                connection.recv(10)
                connection.close()
                return None
            return ask(server, CHAT, number % 2 == 0, prompts[number], **fields)[0][0][0]

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(answer, range(40)))
        wait_until(lambda: is_idle(server))
    for number, text in enumerate(answers):
        if text is not None:
            assert text == expected(number)


def largest_file(directory):
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_k11_names_and_damaged_files(cache, tmp_path, monkeypatch):
    directory, secret = tmp_path / "documents", tmp_path / "secret"
    settings = {"documents_dir": str(directory)}
    with Server(cache, settings) as server:
        for name in ("../x", "a/b", "", "a\0b", "x" * 300, ".hidden", "a b", "é"):
            status, answer = server.post("/v1/documents", id=name, text="x")
            assert status == 400 and answer["error"]["param"] == "id", name
            refuse(server, document=name)
        for name in ("..%2Fx", "%2e%2e", "a%2Fb", "a%00b"):
            assert server.request("GET", f"/v1/documents/{name}")[0] in (400, 404)
            assert server.request("DELETE", f"/v1/documents/{name}")[0] in (400, 404)
        for name in ("one", "two", "three", "four"):
            assert server.post("/v1/documents", id=name, text=TEXT_OF_DOCUMENT)[0] == 200
        assert server.post("/v1/documents", id="one", text="other")[0] == 409
        before = sorted(path.name for path in directory.iterdir())
        save = Document.save

        def fail(document, path):
            save(document, path)
            raise OSError(28, "No space left on device", str(path))

        monkeypatch.setattr(Document, "save", fail)
        status, answer = server.post("/v1/documents", id="full", text=TEXT_OF_DOCUMENT)
        assert status == 507 and str(tmp_path) not in json.dumps(answer)
        monkeypatch.undo()
        assert server.request("GET", "/v1/documents/full")[0] == 404
        assert sorted(path.name for path in directory.iterdir()) == before
    shutil.copytree(directory / "four", secret)
    (directory / "link").symlink_to(secret)
    (directory / ".partial-five").mkdir()  # as after kill -9
    largest = {
        name: max(
            (path for path in (directory / name).rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
        )
        for name in ("one", "two", "three")
    }
    largest["one"].write_bytes(b"")
    largest["two"].write_bytes(largest["two"].read_bytes()[:-3])
    data = largest["three"].read_bytes()
    largest["three"].write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    with Server(cache, settings) as server:
        assert not (directory / ".partial-five").exists()
        assert server.post(CHAT, **body(CHAT, "?", document="link"))[0] == 400
        for name in ("one", "two", "three"):
            error = refuse(server, document=name, status=409)
            assert name in error["message"] and error["code"] == "document_damaged"
        assert ask(server, CHAT, True, "?", document="four")[0][0][0] == FOX
        assert server.request("DELETE", "/v1/documents/one")[0] == 200
        assert server.post("/v1/documents", id="one", text=TEXT_OF_DOCUMENT)[0] == 200
        assert secret.is_dir()


def test_k12_hosts_origins_and_keys(cache, capfd):
    key = "secret-key-6174"
    with Server(cache, api_key=key, hosts=["example.org"], origins=["https://app.example"]) as server:
        authorized = {"Authorization": f"Bearer {key}"}
        for headers, expected in (
            ({"Host": "evil.example"}, 403),
            ({"Host": "localhost.evil.example:8080"}, 403),
            ({"Host": "["}, 403),
            ({"Host": ""}, 403),
            ({"Host": "localhost"}, 200),
            ({"Host": "[::1]:80"}, 200),
            ({"Host": "EXAMPLE.org"}, 200),
            ({"Origin": "null"}, 403),
            ({"Origin": "https://evil.example"}, 403),
            ({"Origin": server.url}, 200),
            ({"Origin": "https://app.example"}, 200),
        ):
            assert server.request("GET", "/v1/models", headers=authorized | headers)[0] == expected, headers
        for wrong in ({}, {"Authorization": key}, {"Authorization": f"Bearer {key}x"}, {"Authorization": "Bearer é"}):
            for method, path in (
                ("GET", "/v1/models"),
                ("GET", "/metrics"),
                ("POST", CHAT),
                ("GET", "/v1/documents/x"),
            ):
                status, answer = server.request(method, path, b"" if method == "POST" else None, wrong)
                assert status == 401 and key not in json.dumps(answer)
        for path in ("/", "/health", "/metrics", "/v1/models", "/nothing"):
            assert key not in json.dumps(server.request("GET", path, headers=authorized)[1])
        server.request("GET", "/v1/models", headers=authorized | {"Origin": "https://app.example"})
        assert server.headers["access-control-allow-origin"] == "https://app.example"
    output = capfd.readouterr()
    assert key not in output.out + output.err


def test_k12_the_page_shows_answers_as_text(server):
    assert ask(server, CHAT, False, "<")[0][0][0] == "<img src=x onerror=alert(1)>"
    page = _PAGE.read_text("utf-8")
    assert server.request("GET", "/") == (200, page)
    assert "default-src 'none'" in server.headers["content-security-policy"]
    assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write|eval", page)
    assert not re.search(r"(src|href)=.?https?:|@import|url\(", page) and page.count("\n") <= 800


# A browser of a few lines: reads a text, asks, continues an answer that was cut, and prints the texts of the page.
_RUN_PAGE = """
const elements = {}, requests = [], original = fetch;
const make = () => ({style: {}, classList: {add() {}, remove() {}, toggle() {}}, value: "", textContent: "",
  children: [], addEventListener() {}, append(...all) { this.children.push(...all); }, focus() {}, scrollTo() {},
  replaceChildren(...all) { this.children = all; }, getBoundingClientRect: () => ({bottom: 0})});
globalThis.window = {addEventListener() {}, scrollTo() {}, scrollBy() {}};
globalThis.document = {createElement: make, getElementById: (id) => elements[id] ??= make(),
  querySelectorAll: () => []};
globalThis.location = {hash: ""};
globalThis.history = {pushState() {}};
globalThis.matchMedia = () => ({matches: true});
globalThis.fetch = (path, options) => {
  if (options?.body) requests.push(JSON.parse(options.body));
  return original("URL" + path, options);
};
SCRIPT
(async () => {
  at("text").value = "A boat sails.";
  await readText();
  at("question").value = QUESTION;
  await ask();
  const {compressed} = turns[0].answers, {note, error, actions} = compressed.nodes;
  const shown = [note, error, ...actions.children].map((node) => node.textContent), first = compressed.text;
  if (shown.includes("Continue")) await generate(compressed);
  console.log(JSON.stringify({shown, first, text: compressed.text, request: requests.pop()}));
})();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in node")
@pytest.mark.parametrize(
    ("prompt", "capacity", "note", "error", "button"),
    [
        ("~", 1000, "256 tokens", "", "Continue"),
        ("?", 1000, "7 tokens", "", None),
        ("~", 64, "", "The conversation is full", "New conversation"),
    ],
)
def test_the_page_limits_an_answer_and_continues_it(prompt, capacity, note, error, button):
    with Server(make_llm(max_length=2000).cache(), {"max_new_tokens": capacity}) as server:
        page = _PAGE.read_text("utf-8")
        script = page.partition("<script>")[2].partition("</script>")[0]
        run = _RUN_PAGE.replace("URL", server.url).replace("QUESTION", json.dumps(prompt)).replace("SCRIPT", script)
        process = subprocess.run(["node", "-e", run], capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    page = json.loads(process.stdout)
    assert page["shown"][0].startswith(note) and page["shown"][1].startswith(error)
    assert page["first"] and page["shown"][2:] == ([] if button is None else [button])
    request = page["request"]
    if button == "Continue":
        assert page["text"].startswith(page["first"]) and len(page["text"]) > len(page["first"])
        assert request["messages"][-1] == {"role": "assistant", "content": page["first"]}
        assert request["chat_template_kwargs"] == {"continue_final_message": True} and request["max_tokens"] == 256
    assert ("max_tokens" in request) == (capacity > 256)


# --- documents ---


def test_documents_are_read_once(random_llm, tmp_path):
    cache = random_llm.cache("streaming_llm", "50%")
    settings = {"documents_dir": str(tmp_path), "max_new_tokens": 128}
    question = [{"role": "user", "content": "Which ships?"}]
    expected = cache.read(TEXT_OF_DOCUMENT, max_new_tokens=128).ask(
        ["Which ships?", "When?"], max_new_tokens=20, temperature=1.0, seed=3
    )
    with Server(cache, settings) as server:
        status, document = server.post("/v1/documents", text=TEXT_OF_DOCUMENT)
        assert status == 200 and re.fullmatch(r"doc_[\w-]{32}", document["id"])
        assert document["bytes"] > 0 and document["full_cache_bytes"] and document["seconds"] > 0
        assert document["tokens"] == cache.read(TEXT_OF_DOCUMENT).num_tokens
        options = {"document": document["id"], "max_tokens": 20, "temperature": 1.0}
        first, usage = ask(server, CHAT, False, "Which ships?", seed=3, **options)
        assert first[0][0] == expected[0]
        details = usage["prompt_tokens_details"]
        assert details["cached_tokens"] == document["tokens"] < usage["prompt_tokens"]
        assert ask(server, CHAT, True, "When?", seed=4, **options)[0][0][0] == expected[1]
        [listed] = server.request("GET", "/v1/documents")[1]["data"]
        assert listed["id"] == document["id"] and listed["in_memory"] and listed["bytes"] == document["bytes"]
        assert abs(listed["used"] - time.time()) < 3600
        heads = server.request("GET", f"/v1/documents/{document['id']}/kept")[1]["heads"]
        assert len(heads) == 2 and len(heads[0]) == 2 and all(0 < share < 1 for layer in heads for share in layer)
    with Server(cache, settings) as server:  # after a restart
        [listed] = server.request("GET", "/v1/documents")[1]["data"]
        assert listed["id"] == document["id"] and not listed["in_memory"] and listed["bytes"] > 0
        props = server.request("GET", "/props")[1]
        assert props["policy"] == "streaming_llm" and props["rows"] == 3 and props["row_bytes"] > 0
        described = server.request("GET", f"/v1/documents/{document['id']}")[1]
        assert described == {name: value for name, value in document.items() if name != "seconds"}
        messages = [*question, {"role": "assistant", "content": "x"}, {"role": "user", "content": "When?"}]
        assert server.chat(messages, **options)[0] == 200
        assert server.request("DELETE", f"/v1/documents/{document['id']}")[1]["deleted"]
        assert refuse(server, document=document["id"], status=404)["code"] == "document_not_found"
        assert not [path for path in tmp_path.iterdir() if path.name != ".lock"]


def test_answers_cite_the_document(monkeypatch):
    monkeypatch.setattr("kvjax_models.profile.MIN_HEADS", 1)
    cache = tiny.make_llm(tiny.TEMPLATE).cache("exact")
    document = cache.read(TEXT_OF_DOCUMENT, max_new_tokens=64)
    [expected], _ = document.ask(["Which ships?"], max_new_tokens=8, cite=True, return_details=True)
    with Server(cache) as server:
        assert refuse(server, cite=True)["param"] == "cite"
        described = server.post("/v1/documents", id="d", text=TEXT_OF_DOCUMENT)[1]
        assert described["can_cite"] and described["full_heads"] == described["heads"] == 4
        options = {"document": "d", "cite": True, "max_tokens": 8}
        choice = server.post(CHAT, **body(CHAT, "Which ships?", **options))[1]["choices"][0]
        assert choice["message"]["content"] == expected.text and len(choice["citations"]) == len(expected.citations) > 0
        for found, one in zip(choice["citations"], expected.citations, strict=True):
            assert found | {"weight": 0} == one._asdict() | {"weight": 0} and abs(found["weight"] - one.weight) < 1e-3
            assert found["text"] == TEXT_OF_DOCUMENT[found["start"] : found["end"]]
        events = server.stream(CHAT, **body(CHAT, "Which ships?", **options))[1]
        assert events[-2]["choices"][0]["citations"] == choice["citations"]
    with Server(tiny.make_llm(tiny.TEMPLATE).cache("streaming_llm", "50%")) as server:
        described = server.post("/v1/documents", id="d", text=TEXT_OF_DOCUMENT)[1]
        assert not described["can_cite"] and described["full_heads"] == 0
        assert "retrieving heads that keep every token" in refuse(server, document="d", cite=True)["message"]
        assert server.metric("kvjax_new_tokens_total") == 0  # refused before an answer


def test_documents_of_many_clients_and_prompts_run_together(random_llm):
    cache = random_llm.cache("streaming_llm", "50%")
    texts = {f"d{number}": f"Text {number}. " * (5 + number) for number in range(4)}
    with Server(cache) as server:
        for name, text in texts.items():
            assert server.post("/v1/documents", id=name, text=text)[0] == 200
        jobs = [(name, f"Question {number}?") for number in range(3) for name in (*texts, None)]
        with concurrent.futures.ThreadPoolExecutor(15) as pool:
            answers = [
                pool.submit(ask, server, CHAT, index % 2 == 0, question, max_tokens=12, document=name)
                for index, (name, question) in enumerate(jobs)
            ]
            texts_of_answers = [one.result()[0][0][0] for one in answers]
    for (name, question), text in zip(jobs, texts_of_answers, strict=True):
        if name is not None:
            assert text == cache.read(texts[name], max_new_tokens=64).ask(question, max_new_tokens=12)


def test_documents_beyond_the_limit_are_on_disk(random_llm, tmp_path):
    """Rows have a quarter of the memory."""
    cache = random_llm.cache("exact")
    size = cache.read(TEXT_OF_DOCUMENT).cache_bytes
    for directory in (str(tmp_path), None):
        with Server(cache, {"documents_dir": directory, "cache_bytes": 6 * size}) as server:
            names = ["a", "b", "c", "d", "e"]
            statuses = [server.post("/v1/documents", id=name, text=TEXT_OF_DOCUMENT)[0] for name in names]
            assert statuses == ([200] * 5 if directory else [200, 200, 200, 200, 507])
            assert server.metric("kvjax_documents_bytes") <= 6 * size
            answers = {
                ask(server, CHAT, False, "x", document=name, max_tokens=9)[0][0][0]
                for name in names[: statuses.count(200)]
            }
            assert len(answers) == 1 and server.metric("kvjax_documents ") == 4


def test_a_warm_server_compiles_nothing_for_usual_requests(random_llm):
    """Neither a prompt, nor a first question to a new document, nor two at a time."""
    with Server(random_llm.cache("streaming_llm", "50%"), {"warm_up": True}) as server:
        document = server.post("/v1/documents", text=TEXT_OF_DOCUMENT)[1]["id"]
        with count_compilations() as num_compiled:
            ask(server, CHAT, False, "x" * 40, max_tokens=64)
            ask(server, CHAT, False, "x" * 10, document=document)
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda question: ask(server, CHAT, False, question, document=document), ("Why?", "How?")))
        assert num_compiled() <= 4  # two rows joined one by one: a layer and the rest, taken and inserted


def test_short_documents_hold_what_the_smallest_cache_holds(random_llm):
    with Server(random_llm.cache("snapkv", "50%"), {"max_prompt_tokens": 1024}) as server:
        for text in ("The code is 42.", "A boat."):
            status, document = server.post("/v1/documents", text=text)
            assert status == 200 and document["bytes"] > 0
            assert ask(server, CHAT, False, "Why?", document=document["id"], max_tokens=3)[0][0][0]
    with Server(random_llm.cache("snapkv", "10%")) as server:
        assert "budget=10% of 320 tokens is less than the smallest cache of policy=snapkv" in str(server.worker.error)


def test_documents_are_refused(server):
    for fields in (
        {},
        {"text": ""},
        {"text": "x", "messages": []},
        {"messages": []},
        {"text": 3},
        {"text": "x", "policy": "exact"},
    ):
        status, answer = server.post("/v1/documents", **fields)
        assert status == 400 and answer["error"]["param"] in {"text", "messages", "policy"}, answer
    status, answer = server.post("/v1/documents", text="x" * 300)
    assert status == 400 and "tokens exceed max_prompt_tokens=256" in answer["error"]["message"]
    assert server.post("/v1/documents", id="short", text="x")[0] == 200
    assert "exceed the capacity max_tokens=64" in refuse(server, prompt="x" * 100, document="short")["message"]
    refuse(server, prompt="?", document="short", chat_template_kwargs={"x": 1})


# --- interface ---


def test_openai_client(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    assert [one.id for one in client.models.list()] == [MODEL] and client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    options = {"model": MODEL, "temperature": 0, "user": "someone", "max_completion_tokens": 20}
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": "?"}], top_p=0.9, seed=1, presence_penalty=0.5, frequency_penalty=0.5,
        logprobs=True, top_logprobs=1, stop=["fox"], extra_body={"top_k": 5, "min_p": 0.1}, **options,
    )  # fmt: skip
    message = answer.choices[0].message
    assert message.content == "The quick brown " and answer.usage.completion_tokens == 6
    follow_up = [{"role": "user", "content": "?"}, message, {"role": "user", "content": "!"}]
    assert client.chat.completions.create(messages=follow_up, **options).choices[0].message.content == EMOJI
    streamed = client.chat.completions.create(
        messages=[{"role": "user", "content": "?"}], stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = list(streamed)
    assert "".join(one.choices[0].delta.content or "" for one in chunks[:-1]) == FOX
    assert chunks[-1].usage.completion_tokens == 7
    with client.chat.completions.stream(messages=[{"role": "user", "content": "?"}], **options) as stream:
        assert stream.get_final_completion().choices[0].message.content == FOX
    texts = client.completions.create(model=MODEL, prompt=["?", "!"], temperature=0, n=2, logprobs=1)
    assert [one.text for one in texts.choices] == [FOX, FOX, EMOJI, EMOJI]
    tokens = server.worker.cache.llm.encode("?")
    assert client.completions.create(model=MODEL, prompt=tokens, temperature=0).choices[0].text == FOX
    document = client.post("/documents", body={"text": TEXT_OF_DOCUMENT}, cast_to=object)
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": "?"}], extra_body={"document": document["id"]}, **options
    )
    assert answer.choices[0].message.content == FOX
    assert answer.usage.prompt_tokens_details.cached_tokens == document["tokens"]


def test_fields_that_change_the_answer_are_refused_by_name(server):
    for name, value in {
        "tools": [{"type": "function"}], "functions": [{}], "reuse": True, "echo": True, "best_of": 2, "suffix": "x",
        "nonsense": 1, "reasoning_effort": "low", "x" * 1000: 1,
    }.items():  # fmt: skip
        assert refuse(server, TEXT, **{name: value})["param"] == name[:100]
    for name, value in {"tools": [], "logit_bias": {}, "store": True, "reuse": False, "echo": None}.items():
        assert server.post(TEXT, **body(TEXT, "?", **{name: value}))[0] == 200, name
    assert refuse(server, model="other", status=404)["code"] == "model_not_found"
    assert "/v1/chat/completions" in refuse(server, "/v1/responses", status=404)["message"]
    assert refuse(server, top_logprobs=2)["param"] == "top_logprobs"
    assert refuse(server, stream_options={"include_usage": True})["param"] == "stream_options"
    assert "chat template does not use" in refuse(server, chat_template_kwargs={"unknown": 1})["message"]


def test_documents_take_variables_of_the_template():
    template = TEMPLATE + "{% if thinks is defined and not thinks %}[silent]{% endif %}"
    changing = "{% if style is defined %}{{ style }}{% endif %}" + template
    with Server(chain.make_llm(CHAINS, changing).cache()) as server:
        silent = {"chat_template_kwargs": {"thinks": False}}

        def num_tokens(document, **fields):
            usage = ask(server, CHAT, False, "?", document=document, max_tokens=2, **fields)[1]
            return usage["prompt_tokens"]

        assert server.post("/v1/documents", id="plain", text="A boat.")[0] == 200
        assert server.post("/v1/documents", id="silent", text="A boat.", **silent)[0] == 200
        expected = num_tokens("plain") + len("[silent]")
        assert num_tokens("silent") == num_tokens("plain", **silent) == expected
        assert num_tokens("silent", chat_template_kwargs={"thinks": True}) == num_tokens("plain")
        error = refuse(server, document="plain", chat_template_kwargs={"style": "Rhyme."})
        assert "change how the chat template renders the document" in error["message"]
        assert (
            "does not use 'unknown'" in refuse(server, document="plain", chat_template_kwargs={"unknown": 1})["message"]
        )
        status, answer = server.post("/v1/documents", text="x", chat_template_kwargs={"unknown": 1})
        assert status == 400 and "does not use 'unknown'" in answer["error"]["message"]
        assert (
            server.post("/v1/documents", id="styled", text="A boat.", chat_template_kwargs={"style": "Rhyme."})[0]
            == 200
        )
        assert num_tokens("styled") == num_tokens("plain") + len("Rhyme.")


def test_special_tokens_of_users_are_text(server):
    def num_tokens(answer):
        assert answer[0] == 200, answer
        return answer[1]["usage"]["prompt_tokens"]

    text, special = f"{chain.EOS}?", {"parse_special": True}
    for send in (server.complete, server.chat):
        difference = num_tokens(send(text, max_tokens=1)) - num_tokens(send("?", max_tokens=1))
        assert difference == len(chain.EOS)
        assert num_tokens(send(text, max_tokens=1)) - num_tokens(send(text, max_tokens=1, **special)) == difference - 1
    sizes = [server.post("/v1/documents", text=text, **fields)[1] for fields in ({}, special)]
    assert sizes[0]["tokens"] - sizes[1]["tokens"] == len(chain.EOS) - 1
    for document in (sizes[0]["id"], sizes[1]["id"]):
        for send in (server.complete, server.chat):
            options = {"max_tokens": 1, "document": document}
            difference = num_tokens(send(text, **options)) - num_tokens(send(text, **options, **special))
            assert difference == len(chain.EOS) - 1


@pytest.mark.parametrize(
    "function", ["schema.parse", "Documents.check_text", "ChatRequest.prompts", "digests", "Format.answer"]
)
def test_health_and_streams_do_not_wait_for_the_work_of_a_request(server, monkeypatch, function):
    """The time of this work grows with the size of a body or of an answer."""
    owner, name = {
        "schema.parse": (schema, "parse"),
        "Documents.check_text": (Documents, "check_text"),
        "ChatRequest.prompts": (schema.ChatRequest, "prompts"),
        "digests": (app, "digests"),
        "Format.answer": (Format, "answer"),
    }[function]
    original, is_called, may_go_on = getattr(owner, name), threading.Event(), threading.Event()

    def wait(*args):
        if not is_called.is_set():
            is_called.set()
            assert may_go_on.wait(60)
        return original(*args)

    monkeypatch.setattr(owner, name, wait)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        if function == "Documents.check_text":
            slow = pool.submit(server.post, "/v1/documents", text=TEXT_OF_DOCUMENT)
        else:
            slow = pool.submit(server.chat, "?", temperature=0)
        try:
            assert is_called.wait(60)
            assert server.request("GET", "/health")[0] == 200
            assert ask(server, TEXT, True, "?")[0][0][0] == FOX
            assert not slow.done()
        finally:
            may_go_on.set()
        assert slow.result(60)[0] == 200


def test_the_log_has_a_line_per_request_without_its_text(server, caplog):
    caplog.set_level(logging.INFO, "kvjax_models.server")
    secret = "secretword"
    document = server.post("/v1/documents", id="secretid", text=f"{secret} ? " * 3)[1]
    ask(server, CHAT, True, "?", document="secretid", max_tokens=3)
    ask(server, TEXT, False, f"{secret} ?", max_tokens=3)
    refuse(server, prompt=secret, temperature=-1)
    refuse(server, document=f"{secret}2", status=404)
    assert server.request("GET", f"/v1/documents/{secret}")[0] == 404
    assert server.request("GET", "/nothing%0Ahere")[0] == 404
    assert server.request("GET", "/v1/models", headers={"Host": "evil.example"})[0] == 403
    server.request("GET", "/health"), server.request("GET", "/metrics")
    wait_until(lambda: len(caplog.records) >= 8)
    lines = [record.getMessage() for record in caplog.records]
    patterns = [
        rf"POST /v1/documents 200 in \d+\.\d+ s; {document['tokens']} tokens read",
        rf"POST {CHAT} 200 in \S+ s; length; \d+ prompt tokens \({document['tokens']} cached\), 3 new tokens",
        rf"POST {TEXT} 200 in \S+ s; length; {len(secret) + 2} prompt tokens \(0 cached\), 3 new tokens",
        rf"POST {CHAT} 400 in \S+ s",
        rf"POST {CHAT} 404 in \S+ s",
        r"GET /v1/documents/ID 404 in \S+ s",
        r"GET /nothing\\nhere 404 in \S+ s",
        r"GET /v1/models 403 in \S+ s",
    ]
    assert len(lines) == len(patterns)
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line) and secret not in line and "secretid" not in line, line


@EACH
def test_a_client_that_leaves_is_a_line_in_the_log(long_server, caplog, path, stream):
    caplog.set_level(logging.INFO)
    connection = open_request(long_server, body(path, "~", max_tokens=20_000, stream=stream), path)
    wait_until(lambda: long_server.worker.num_rows == 1)
    if stream:
        receive_until(connection, b" w")
    connection.close()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
    unfinished = socket.create_connection(("127.0.0.1", long_server.port))  # leaves while it sends its body
    unfinished.sendall(head)
    unfinished.close()
    wait_until(lambda: is_idle(long_server) and len(caplog.records) >= 2)
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("INFO", None)] * 2
    lines = sorted(record.getMessage() for record in caplog.records)
    assert sum("cancelled" in line for line in lines) == 1 and sum(" 499 in " in line for line in lines) == 2 - stream


@pytest.mark.parametrize("place", ["engine", "start", "document", "call", "handler"])
def test_what_fails_inside_is_logged_with_its_traceback(cache, monkeypatch, caplog, place):
    def fail(*_, **__):
        raise RuntimeError("out of memory")

    owner, name = {
        "engine": (_Jobs, "step"),
        "start": (_Jobs, "add"),
        "document": (documents, "read_steps"),
        "call": (Documents, "describe"),
        "handler": (Format, "answer"),
    }[place]
    with Server(cache) as server:
        monkeypatch.setattr(owner, name, fail)
        if place == "document":
            status, answer = server.post("/v1/documents", text="x")
        elif place == "call":
            status, answer = server.request("GET", "/v1/documents/x")
        else:
            status, answer = server.chat("?")
        assert status == 500 and "out of memory" not in json.dumps(answer)
        errors = [record for record in caplog.records if record.exc_info]
        assert len(errors) == 1 and errors[0].levelname == "ERROR", errors
        assert "out of memory" in str(errors[0].exc_info[1])
        assert any(entry.name == "fail" for entry in traceback.extract_tb(errors[0].exc_info[2]))


def test_a_full_queue_is_refused(long_server):
    data = body(TEXT, "~", max_tokens=20_000)
    connections = [open_request(long_server, data, TEXT) for _ in range(4)]
    wait_until(lambda: long_server.worker.num_rows == 2 and long_server.worker.num_waiting == 2)
    assert refuse(long_server, TEXT, status=429)["code"] == "queue_full"
    assert int(long_server.headers["retry-after"]) >= 1
    assert refuse(long_server, TEXT, n=5)["param"] == "n"
    for connection in connections:
        connection.close()
    wait_until(lambda: is_idle(long_server), 20)
    assert ask(long_server, TEXT, False, "?")[0][0][0] == FOX


def test_bodies_are_bounded_and_checked(server):
    status, answer = server.request("POST", CHAT, b'{"a": "' + b"x" * 5 * 2**20 + b'"}')
    assert status == 413 and "bytes" in answer["error"]["message"]
    for data in (b"", b"null", b"[]", b"[" * 100_000, b'{"messages":' + b"[" * 100_000, b"\xff", b'"\\ud800"', b"{}"):
        status, answer = server.request("POST", CHAT, data)
        assert status == 400 and answer["error"]["message"], data[:20]
    for method, path, expected in (("GET", "/nothing", 404), ("GET", CHAT, 405), ("PUT", "/v1/models", 405)):
        status, answer = server.request(method, path)
        assert status == expected and answer["error"]["type"] == "invalid_request_error"


def test_damaged_bodies(server):
    rng = random.Random(0)
    data = json.dumps(body(CHAT, "?", max_tokens=3, stop=["a"], n=1, seed=0, logprobs=True, top_logprobs=2)).encode()
    for _ in range(500):
        damaged, kind = damage_bytes(data, rng)
        status, answer = server.request("POST", CHAT, damaged)
        assert status == 200 or (400 <= status < 500 and answer["error"]["message"]), (kind, damaged, answer)
    assert ask(server, CHAT, False, "?")[0][0][0] == FOX and is_idle(server)


def test_health_while_loading(cache):
    is_loaded = threading.Event()
    server = Server(cache)
    server.worker._load = lambda: is_loaded.wait(60) and cache
    with contextlib.suppress(AssertionError):
        server._thread.start()
    wait_until(lambda: answers(server))
    assert server.request("GET", "/health") == (503, {"status": "loading"})
    refuse(server, status=503)
    is_loaded.set()
    wait_until(lambda: server.request("GET", "/health") == (200, {"status": "ok"}))
    server.__exit__()


def test_the_command_ends_at_sigterm(tmp_path):
    options = ["--max_prompt_tokens=128", "--max_new_tokens=4096", "--api_key=key-3141", "--policy=exact"]
    options += [f"--model={tiny.directory()}", f"--documents_dir={tmp_path}", "--shutdown_seconds=2"]
    with run_command(*options) as (client, process):
        headers = {"Authorization": "Bearer key-3141"}
        data = {"model": MODEL, "prompt": "x", "max_tokens": 4096, "temperature": 1.0, "stream": True, "logprobs": 3}
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=120)
        connection.request("POST", TEXT, json.dumps(data), headers)
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        rest = response.read()  # finished, or ended with an error
        assert b"[DONE]" in rest or b'data: {"error"' in rest
        output = "".join(process.communicate())
        assert "key-3141" not in output and "Traceback" not in output, output


@pytest.mark.heavy
def test_a_mesh_of_eight_devices(tmp_path):
    model = tiny.write(tmp_path, kv_heads=4, query_heads=8)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": tiny.TEMPLATE}))
    options = [f"--model={model}", "--policy=streaming_llm", "--max_prompt_tokens=256", "--max_new_tokens=64"]
    answers = []
    for mesh in (1, 8):
        flags = "--xla_force_host_platform_device_count=8"
        with run_command(*options, f"--mesh_tensor={mesh}", flags=flags) as (client, _):
            assert client.post("/v1/documents", id="ships", text=TEXT_OF_DOCUMENT)[0] == 200
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                jobs = [pool.submit(ask, client, CHAT, False, q, max_tokens=9, document="ships") for q in "abc"]
                answers.append([*(job.result() for job in jobs), ask(client, TEXT, True, "hello", max_tokens=9)])
    assert answers[0] == answers[1]
