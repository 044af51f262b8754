"""`kvjax serve` over loopback: its interface, streams, errors, documents, and clients that leave."""

import concurrent.futures
import contextlib
import itertools
import json
import logging
import pathlib
import random
import re
import shutil
import socket
import subprocess
import threading
import time
import traceback
import weakref

import openai
import pytest

from kvjax_models.server import app, documents, schema
from kvjax_models.server.answers import Format
from kvjax_models.server.app import _PAGE
from kvjax_models.server.conversations import Conversations
from kvjax_models.server.documents import Documents
from kvjax_models.server.settings import Settings
from kvjax_models.server.worker import Worker, _Jobs
from tests.models import chain, tiny
from tests.models.serving import (
    CHAT,
    DOCUMENTS,
    MODEL,
    TEXT,
    Server,
    answers,
    ask,
    body,
    is_idle,
    open_request,
    run_command,
    user,
    wait_until,
)
from tests.models.support import count_compilations, damage_bytes, limit_file_size

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


def refuse(server, path=CHAT, prompt="?", status=400, **options):
    """Returns the error of a request that must be refused."""
    actual, answer = server.post(path, **(options if path == DOCUMENTS else body(path, prompt, **options)))
    assert actual == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return answer["error"]


# --- answers ---


@EACH
def test_limits(server, path, stream):
    for limit in (1, 2, 5):
        [(_, reason, _)], usage = ask(server, path, stream, "?", max_tokens=limit)
        assert reason == "length" and usage["completion_tokens"] == limit
    for limit in (7, None):  # the end token is the last one
        [(text, reason, _)], usage = ask(server, path, stream, "?", max_tokens=limit)
        assert (text, reason) == (FOX, "stop") and usage["total_tokens"] == usage["prompt_tokens"] + 7
    for fields, expected in (
        ({"max_completion_tokens": 2, "max_tokens": 5}, 2),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
    ):
        assert path == TEXT or ask(server, path, stream, "?", **fields)[1]["completion_tokens"] == expected


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_several_choices(server, path):
    options = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 40}
    streamed, usage = ask(server, path, True, "=", **options)  # checks indices, roles and ids
    entire, entire_usage = ask(server, path, False, "=", **options)
    assert streamed == entire and usage == entire_usage and len(streamed) == 3
    assert len({len(text) for text, _, _ in streamed}) > 1
    alone = [ask(server, path, False, "=", **options | {"n": 1, "seed": 5 + i})[0][0] for i in range(3)]
    assert alone == streamed


@EACH
def test_characters_of_several_tokens_and_their_log_probabilities(server, path, stream):
    for (prompt, expected), num_top in itertools.product({"!": EMOJI, "#": FLAG, "&": HAN, "?": FOX}.items(), (0, 5)):
        fields = {"logprobs": True, "top_logprobs": num_top} if path == CHAT else {"logprobs": num_top}
        [(text, reason, logprobs)], usage = ask(server, path, stream, prompt, **fields)
        assert (text, reason) == (expected, "stop")
        if path == CHAT:
            items = logprobs["content"]
            assert b"".join(bytes(one["bytes"] or []) for one in items) == expected.encode()
            assert all(-9999 <= one["logprob"] <= 0 and len(one["top_logprobs"]) == num_top for one in items)
        else:
            items = logprobs["tokens"]
            assert logprobs["text_offset"] == [0, *itertools.accumulate(map(len, items))][:-1]
            assert all(len(one) == max(num_top, 1) for one in logprobs["top_logprobs"])
            assert all(token in top for token, top in zip(items, logprobs["top_logprobs"], strict=True))
        assert len(items) == usage["completion_tokens"]
    assert ask(server, path, stream, "?")[0][0][2] is None


def test_contents_may_be_parts_and_fields_null(server):
    def num_tokens(messages):
        return ask(server, CHAT, False, messages)[1]["prompt_tokens"]

    parts = [{"type": "text", "text": text} for text in ("a", "b?")]
    assert num_tokens([user(parts)]) == num_tokens([user("a\nb?")]) == len("[user]a\nb?")
    empty = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None}
    assert num_tokens([user("x"), empty, user("?")]) == len("[user]x[assistant][user]?")
    assert num_tokens([user("x"), {"role": "system", "content": "?"}]) == len("[user]x[system]?")


def test_special_tokens_of_users_are_text(server):
    def num_tokens(path, text, **options):
        return ask(server, path, False, text, max_tokens=1, **options)[1]["prompt_tokens"]

    text, special = f"{chain.EOS}?", {"parse_special": True}
    sizes = [server.post(DOCUMENTS, text=text, **fields)[1] for fields in ({}, special)]
    assert sizes[0]["tokens"] - sizes[1]["tokens"] == len(chain.EOS) - 1
    for path, document in itertools.product((TEXT, CHAT), (None, sizes[0]["id"])):
        as_text = num_tokens(path, text, document=document)
        assert as_text - num_tokens(path, "?", document=document) == len(chain.EOS)
        assert as_text - num_tokens(path, text, document=document, **special) == len(chain.EOS) - 1


def test_openai_client(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    assert [one.id for one in client.models.list()] == [MODEL] and client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    options = {"model": MODEL, "temperature": 0, "user": "someone", "max_completion_tokens": 20}
    answer = client.chat.completions.create(
        messages=[user("?")], top_p=0.9, seed=1, presence_penalty=0.5, frequency_penalty=0.5,
        logprobs=True, top_logprobs=1, stop=["fox"], extra_body={"top_k": 5, "min_p": 0.1}, **options,
    )  # fmt: skip
    message = answer.choices[0].message
    assert message.content == "The quick brown "
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content) == 6
    follow_up = [user("?"), message, user("!")]
    assert client.chat.completions.create(messages=follow_up, **options).choices[0].message.content == EMOJI
    with client.chat.completions.stream(messages=[user("?")], **options) as stream:
        assert stream.get_final_completion().choices[0].message.content == FOX
    texts = client.completions.create(model=MODEL, prompt=["?", "!"], temperature=0, n=2, logprobs=1)
    assert [one.text for one in texts.choices] == [FOX, FOX, EMOJI, EMOJI]
    tokens = server.worker.cache.llm.encode("?")
    assert client.completions.create(model=MODEL, prompt=tokens, temperature=0).choices[0].text == FOX
    document = client.post("/documents", body={"text": TEXT_OF_DOCUMENT}, cast_to=object)
    options["extra_body"] = {"document": document["id"]}
    answer = client.chat.completions.create(messages=[user("?")], **options)
    assert answer.choices[0].message.content == FOX
    assert answer.usage.prompt_tokens_details.cached_tokens == document["tokens"]


# --- refusals ---


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_numbers_of_other_types_and_sizes_are_refused(server, path):
    content = json.dumps(body(path, "?"))[:-1]
    for field, values in {
        "temperature": ("NaN", "Infinity", "-1", '"0.5"', "true", "1e999"),
        "top_p": ("NaN", "0", "1.5", "-1"),
        "min_p": ("-0.1", "2"),
        "top_k": ("-5", "1.5", "true"),
        "n": ("0", "129", "5000000", "true", '"2"'),
        "max_tokens": ("0", "true", "3.7", '"16"', "-1", "99999999999999999999999"),
        "seed": ("-1", "1.5", "99999999999999999999999", '"x"'),
        "presence_penalty": ("3", "NaN", "[]"),
        "stop": ('""', "[1]", '["a", ""]', json.dumps(["a"] * 17)),
    }.items():
        for value in values:
            status, answer = server.request("POST", path, f'{content}, "{field}": {value}}}'.encode())
            assert status == 400, (field, value, answer)
            if value not in ("NaN", "Infinity", "1e999"):  # not JSON
                assert field in answer["error"]["message"] or answer["error"]["param"] == field, (value, answer)


SYSTEM, ANSWER = {"role": "system", "content": "x"}, {"role": "assistant", "content": "x"}
REFUSED_FIELDS = {
    "tools": [{"type": "function"}], "functions": [{}], "reuse": True, "echo": True, "best_of": 2, "suffix": "x",
    "nonsense": 1, "reasoning_effort": "low", "x" * 1000: 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        *((TEXT, {name: value}, name[:100], name[:100]) for name, value in REFUSED_FIELDS.items()),
        *((TEXT, {"prompt": wrong}, "prompt", "prompt") for wrong in ([], ["?", 3], {"a": 1}, [[10**9]], [-1])),
        (TEXT, {"prompt": [[63], []]}, None, "the prompt is empty"),
        (TEXT, {"prompt": ["?"] * 10_000}, "prompt", "10000 prompts and n=1 exceed 128 sequences"),
        (TEXT, {"prompt": "?" * 600, "stream": True}, None, "600 tokens of the prompt exceed max_prompt_tokens=256"),
        (TEXT, {"max_tokens": 1000, "stream": True}, "max_tokens", "max_tokens=1000 exceeds"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", ">= 1"),
        (CHAT, {"messages": [user("?" * 600)]}, None, "606 tokens of the prompt exceed max_prompt_tokens=256"),
        (CHAT, {"messages": []}, "messages", "length >= 1 - at `$.messages`"),
        (CHAT, {"messages": [SYSTEM]}, None, "no user message"),
        (CHAT, {"messages": [user("x"), user("y")]}, None, "roles must alternate"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages", "role"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages", "role"),
        (CHAT, {"messages": [user(None)]}, "messages", "content of messages must be a text"),
        (CHAT, {"messages": [user(3)]}, "messages", "content"),
        (CHAT, {"messages": [user([{"type": "text"}])]}, "messages", "field `text`"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "requires logprobs"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "requires stream"),
        (CHAT, {"chat_template_kwargs": {"unknown": 1}}, None, "chat template does not use"),
        (CHAT, {"cite": True}, "cite", "name one"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "now"}}]}, "tools", "has no tools"),
        (DOCUMENTS, {}, "text", "either text or messages"),
        (DOCUMENTS, {"text": "x", "messages": [user("x")]}, "text", "either text or messages"),
        (DOCUMENTS, {"text": ""}, "text", "text is empty"),
        (DOCUMENTS, {"messages": []}, "messages", "length >= 1"),
        (DOCUMENTS, {"text": 3}, "text", "Expected `str"),
        (DOCUMENTS, {"text": "x", "full_cache": True}, "full_cache", "is a full cache"),
        (DOCUMENTS, {"text": "x", "policy": "exact"}, "policy", "not supported"),
        (DOCUMENTS, {"text": "x" * 300}, "text", "306 tokens exceed max_prompt_tokens=256"),
    ],
)
def test_requests_are_refused_with_the_field_and_the_reason(server, path, fields, param, message):
    error = refuse(server, path, **fields)
    assert error["param"] == param and message in error["message"]


def test_neutral_values_are_ignored_and_unknown_names_refused(server):
    for name, value in {"tools": [], "logit_bias": {}, "store": True, "reuse": False, "echo": None}.items():
        assert server.post(TEXT, **body(TEXT, "?", **{name: value}))[0] == 200, name
    assert refuse(server, model="other", status=404)["code"] == "model_not_found"
    assert "/v1/chat/completions" in refuse(server, "/v1/responses", status=404)["message"]
    assert server.post(DOCUMENTS, id="short", text="x")[0] == 200
    assert "exceed the capacity max_tokens=64" in refuse(server, prompt="x" * 100, document="short")["message"]


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
    for _ in range(300):
        damaged, kind = damage_bytes(data, rng)
        status, answer = server.request("POST", CHAT, damaged)
        assert status == 200 or (400 <= status < 500 and answer["error"]["message"]), (kind, damaged, answer)
    assert ask(server, CHAT, False, "?")[0][0][0] == FOX and is_idle(server)


def test_hosts_origins_and_keys(cache, capfd):
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
        assert server.headers["access-control-allow-origin"] == "https://app.example"
        for wrong in ({}, {"Authorization": key}, {"Authorization": f"Bearer {key}x"}, {"Authorization": "Bearer é"}):
            for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", CHAT), ("GET", f"{DOCUMENTS}/x")):
                status, answer = server.request(method, path, b"" if method == "POST" else None, wrong)
                assert status == 401 and key not in json.dumps(answer)
        for path in ("/", "/health", "/metrics", "/v1/models", "/nothing"):
            assert key not in json.dumps(server.request("GET", path, headers=authorized)[1])
    output = capfd.readouterr()
    assert key not in output.out + output.err


# --- many clients ---


def test_answers_equal_those_of_the_library(random_llm):
    """Of many clients at a time, some of which leave, about documents and without one."""
    cache = random_llm.cache("streaming_llm", 24)
    texts = {f"d{number}": f"Text {number}. " * (5 + number) for number in range(2)}
    names = [*texts, None, None, None]
    prompts = [f"marker{number} " * (1 + number % 3) for number in range(20)]
    options = [{"temperature": number % 3 / 2, "top_k": 1 + number % 9, "seed": number} for number in range(20)]
    with Server(cache) as server, concurrent.futures.ThreadPoolExecutor(12) as pool:
        for name, text in texts.items():
            assert server.post(DOCUMENTS, id=name, text=text)[0] == 200

        def answer(number):
            fields = options[number] | {"document": names[number % 5]}
            if number % 5 == 4:
                data = body(CHAT, prompts[number], stream=True, max_tokens=60, **fields)
                with contextlib.closing(open_request(server, data)) as connection:
                    connection.recv(10)
                return None
            return ask(server, CHAT, number % 2 == 0, prompts[number], max_tokens=20, **fields)[0][0][0]

        texts_of_answers = list(pool.map(answer, range(20)))
        wait_until(lambda: is_idle(server))
    read = {name: cache.read(text, max_new_tokens=64) for name, text in texts.items()}
    for number, text in enumerate(texts_of_answers):
        fields = options[number] | {"max_new_tokens": 20}
        if number % 5 < 2:
            assert text == read[names[number % 5]].ask(prompts[number], **fields)
        elif number % 5 < 4:
            assert text == cache.generate([user(prompts[number])], **fields)


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_free_their_rows_and_are_a_line_in_the_log(long_server, caplog, stream):
    caplog.set_level(logging.INFO)
    before = long_server.metric('kvjax_requests_total{outcome="cancelled"}')
    connections = []
    for count in range(3):  # one after the other: two run, one waits
        connections.append(open_request(long_server, body(CHAT, "~", max_tokens=20_000, stream=stream)))
        wait_until(lambda: long_server.worker.num_rows + long_server.worker.num_waiting > count)  # noqa: B023
    unfinished = socket.create_connection(("127.0.0.1", long_server.port))  # leaves while it sends its body
    unfinished.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    if stream:
        for connection in connections[:2]:
            assert connection.recv(10).startswith(b"HTTP/1.1")
    connections[1].shutdown(socket.SHUT_WR)  # half-closed
    for connection in (unfinished, connections[2], connections[0]):
        connection.close()
    wait_until(lambda: is_idle(long_server) and len(caplog.records) >= 4)
    connections[1].close()
    assert long_server.metric('kvjax_requests_total{outcome="cancelled"}') == before + 3
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("INFO", None)] * 4
    lines = [record.getMessage() for record in caplog.records]
    assert sum("cancelled" in line for line in lines) == 3
    assert sum(" 499 in " in line for line in lines) == (2 if stream else 4)
    assert ask(long_server, CHAT, stream, "?")[0][0][0] == FOX


def test_a_full_queue_is_refused(long_server):
    data = body(TEXT, "~", max_tokens=20_000)
    connections = [open_request(long_server, data, TEXT) for _ in range(4)]
    wait_until(lambda: long_server.worker.num_rows == 2 and long_server.worker.num_waiting == 2)
    assert refuse(long_server, TEXT, status=429)["code"] == "queue_full"
    assert int(long_server.headers["retry-after"]) >= 1
    assert refuse(long_server, TEXT, n=5)["param"] == "n"
    for connection in connections:
        connection.close()
    wait_until(lambda: is_idle(long_server))
    assert ask(long_server, TEXT, False, "?")[0][0][0] == FOX


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (schema, "parse"),
        (Documents, "check_text"),
        (schema.ChatRequest, "prompts"),
        (app, "digests"),
        (Format, "answer"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_health_and_streams_do_not_wait_for_the_work_of_a_request(server, monkeypatch, owner, name):
    """The time of this work grows with the size of a body or of an answer."""
    original, is_called, may_go_on = getattr(owner, name), threading.Event(), threading.Event()

    def wait(*args):
        if not is_called.is_set():
            is_called.set()
            assert may_go_on.wait(60)
        return original(*args)

    monkeypatch.setattr(owner, name, wait)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        if owner is Documents:
            slow = pool.submit(server.post, DOCUMENTS, text=TEXT_OF_DOCUMENT)
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


# --- failures ---


@pytest.mark.parametrize("stream", [True, False])
def test_faults_end_one_request(server, stream):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        good = [pool.submit(ask, server, CHAT, stream, prompt) for prompt in "?!#"]
        with pytest.raises(openai.APIError, match="NaN") as error:
            list(client.chat.completions.create(**body(CHAT, "%", stream=stream)))
        assert [one.result()[0][0][0] for one in good] == [FOX, EMOJI, FLAG]
    assert stream or error.value.status_code == 500


def test_text_that_was_held_back_precedes_an_error(cache, monkeypatch):
    """All text may be the start of the stop string, until the answer ends with an error."""
    step = _Jobs.step
    with Server(cache, {"max_prefill_tokens": 1}) as server:
        for end in (None, RuntimeError("out of memory"), SystemExit):  # of the request, the engine and the worker
            steps = itertools.count()

            def fail_later(jobs, end=end, steps=steps):
                if next(steps) > 1 and end is not None:  # one for the prefill, or a second one for tokens
                    raise end
                step(jobs)

            monkeypatch.setattr(_Jobs, "step", fail_later)
            for path in (CHAT, TEXT) if end is None else (CHAT,):
                options = {"stop": [" n1" + "x" * 60], "max_tokens": 60}
                status, events = server.stream(path, **body(path, "%", **options))
                choices = [choice for event in events[:-1] for choice in event["choices"]]
                texts = [one["delta"].get("content", "") if path == CHAT else one["text"] for one in choices]
                assert status == 200 and "error" in events[-1] and "".join(texts) == " n1 n2 n3 n4"
                assert all(choice["finish_reason"] is None for choice in choices)


def test_a_dead_worker_fails_all_requests():
    settings = {"rows": 1, "max_new_tokens": 20_000}
    with (
        Server(make_llm(max_length=40_000).cache(), settings) as server,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        jobs = [pool.submit(refuse, server, prompt="~", max_tokens=20_000, status=503) for _ in range(2)]
        wait_until(lambda: server.worker.num_rows == 1 and server.worker.num_waiting == 1)

        def die():
            raise SystemExit

        server.worker._put(die)
        assert all(job.result(60)["code"] == "unavailable" for job in jobs)
        wait_until(lambda: server.request("GET", "/health") == (503, {"status": "failed"}))
        refuse(server, status=503)
        refuse(server, DOCUMENTS, text="x", status=503)


def test_the_end_of_the_worker_is_reported(random_llm):
    is_reported = threading.Event()

    def start(cache, **settings):
        worker = Worker(lambda: cache, Settings(**settings), on_failure=is_reported.set)
        worker.start()
        return worker

    for cache, settings, message in (
        (random_llm.cache(), {"max_prompt_tokens": 8193}, "8193 exceeds the model's context length of 8192"),
        (
            random_llm.cache("snapkv", "10%"),
            {"max_prompt_tokens": 256, "max_new_tokens": 64},
            "budget=10% of 320 tokens is less than the smallest cache of policy=snapkv",
        ),
    ):
        worker = start(cache, **settings)
        assert is_reported.wait(60) and worker.join(60) and message in str(worker.error)
        is_reported.clear()
    worker = start(random_llm.cache(), rows=1, max_new_tokens=8, warm_up=False)
    wait_until(lambda: worker.is_ready)
    worker.stop()
    assert worker.join(60) and not is_reported.is_set()  # no failure


def test_what_fails_inside_is_logged_with_its_traceback(server, monkeypatch, caplog):
    def fail(*_, **__):
        raise RuntimeError("out of memory")

    for owner, name, request in (
        (_Jobs, "step", (CHAT, body(CHAT, "?"))),
        (_Jobs, "add", (CHAT, body(CHAT, "?"))),
        (Format, "answer", (CHAT, body(CHAT, "?"))),
        (documents, "read_steps", (DOCUMENTS, {"text": "x"})),
        (Documents, "describe_all", (DOCUMENTS, None)),
    ):
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            path, fields = request
            status, answer = server.request("GET" if fields is None else "POST", path, fields)
        assert status == 500 and answer["error"]["type"] == "server_error", name
        assert "out of memory" not in answer["error"]["message"]
        [error] = [record for record in caplog.records if record.exc_info]
        assert error.levelname == "ERROR" and "out of memory" in str(error.exc_info[1])
        assert any(entry.name == "fail" for entry in traceback.extract_tb(error.exc_info[2]))
        assert ask(server, CHAT, True, "?")[0][0][0] == FOX  # also after the engine was replaced


def test_health_while_loading(cache):
    is_loaded = threading.Event()
    server = Server(cache)
    server.worker._load = lambda: is_loaded.wait(60) and cache
    server._thread.start()
    wait_until(lambda: answers(server))
    assert server.request("GET", "/health") == (503, {"status": "loading"})
    refuse(server, status=503)
    is_loaded.set()
    wait_until(lambda: server.request("GET", "/health") == (200, {"status": "ok"}))
    server.__exit__()


def test_the_log_has_a_line_per_request_without_its_text_and_metrics_count_it(server, caplog):
    def metrics():
        names = ("new_tokens_total", "cached_tokens_total", "request_seconds_count", "first_token_seconds_count")
        return [server.metric(f"kvjax_{name}") for name in names]

    before = metrics()
    caplog.set_level(logging.INFO, "kvjax_models.server")
    secret = "secretword"
    document = server.post(DOCUMENTS, id="secretid", text=f"{secret} ? " * 3)[1]
    ask(server, CHAT, True, "?", document="secretid", max_tokens=3)
    ask(server, TEXT, False, f"{secret} ?", max_tokens=3)
    refuse(server, prompt=secret, temperature=-1)
    refuse(server, document=f"{secret}2", status=404)
    assert server.request("GET", f"{DOCUMENTS}/{secret}")[0] == 404
    assert server.request("GET", "/nothing%0Ahere")[0] == 404
    assert server.request("GET", "/v1/models", headers={"Host": "evil.example"})[0] == 403
    server.request("GET", "/health")
    wait_until(lambda: len(caplog.records) >= 8)
    differences = [after - number for number, after in zip(before, metrics(), strict=True)]
    assert differences == [6, document["tokens"], 2, 2]
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


# --- documents ---


def test_documents_are_read_once_and_survive_a_restart(random_llm, tmp_path):
    cache = random_llm.cache("streaming_llm", "50%")
    settings = {"documents_dir": str(tmp_path), "max_new_tokens": 128}
    read = cache.read(TEXT_OF_DOCUMENT, max_new_tokens=128)
    expected = read.ask("Which ships?", max_new_tokens=20, temperature=1.0, seed=3)
    with Server(cache, settings) as server:
        status, document = server.post(DOCUMENTS, text=TEXT_OF_DOCUMENT)
        assert status == 200 and re.fullmatch(r"doc_[\w-]{32}", document["id"])
        assert document["bytes"] > 0 and document["full_cache_bytes"] and document["seconds"] > 0
        assert document["tokens"] == read.num_tokens and not document["can_cite"] and document["full_heads"] == 0
        assert "retrieving heads that keep" in refuse(server, document=document["id"], cite=True)["message"]
        assert server.metric("kvjax_new_tokens_total") == 0  # refused before an answer
        options = {"document": document["id"], "max_tokens": 20, "temperature": 1.0, "seed": 3}
        [(text, _, _)], usage = ask(server, CHAT, False, "Which ships?", **options)
        assert text == expected
        assert usage["prompt_tokens_details"]["cached_tokens"] == document["tokens"] < usage["prompt_tokens"]
        [listed] = server.request("GET", DOCUMENTS)[1]["data"]
        assert listed["id"] == document["id"] and listed["in_memory"] and listed["bytes"] == document["bytes"]
        assert abs(listed["used"] - time.time()) < 3600
        heads = server.request("GET", f"{DOCUMENTS}/{document['id']}/kept")[1]["heads"]
        assert len(heads) == 2 and len(heads[0]) == 2 and all(0 < share < 1 for layer in heads for share in layer)
    with Server(cache, settings) as server:
        [listed] = server.request("GET", DOCUMENTS)[1]["data"]
        assert listed["id"] == document["id"] and not listed["in_memory"] and listed["bytes"] > 0
        props = server.request("GET", "/props")[1]
        assert props["policy"] == "streaming_llm" and props["rows"] == 3 and props["row_bytes"] > 0
        described = server.request("GET", f"{DOCUMENTS}/{document['id']}")[1]
        assert described == {name: value for name, value in document.items() if name != "seconds"}
        assert ask(server, CHAT, True, "Which ships?", **options)[0][0][0] == expected
        assert ask(server, CHAT, False, [user("Which ships?"), ANSWER, user("When?")], **options)[0][0][0]
        assert server.request("DELETE", f"{DOCUMENTS}/{document['id']}")[1]["deleted"]
        assert refuse(server, document=document["id"], status=404)["code"] == "document_not_found"
        assert not [path for path in tmp_path.iterdir() if path.name != ".lock"]


def test_answers_cite_the_document(monkeypatch):
    monkeypatch.setattr("kvjax_models.profile.MIN_HEADS", 1)
    cache = tiny.make_llm(tiny.TEMPLATE).cache("exact")
    document = cache.read(TEXT_OF_DOCUMENT, max_new_tokens=64)
    [expected], _ = document.ask(["Which ships?"], max_new_tokens=8, cite=True, return_details=True)
    with Server(cache) as server:
        described = server.post(DOCUMENTS, id="d", text=TEXT_OF_DOCUMENT)[1]
        assert described["can_cite"] and described["full_heads"] == described["heads"] == 4
        options = {"document": "d", "cite": True, "max_tokens": 8}
        choice = server.post(CHAT, **body(CHAT, "Which ships?", **options))[1]["choices"][0]
        assert choice["message"]["content"] == expected.text and len(choice["citations"]) == len(expected.citations) > 0
        for found, one in zip(choice["citations"], expected.citations, strict=True):
            assert found == one._asdict() | {"weight": pytest.approx(one.weight, abs=1e-3)}
        events = server.stream(CHAT, **body(CHAT, "Which ships?", **options))[1]
        assert events[-2]["choices"][0]["citations"] == choice["citations"]


def test_documents_take_variables_of_the_template():
    template = TEMPLATE + "{% if thinks is defined and not thinks %}[silent]{% endif %}"
    silent = {"chat_template_kwargs": {"thinks": False}}
    with Server(chain.make_llm(CHAINS, template).cache()) as server:

        def num_tokens(document, **options):
            return ask(server, CHAT, False, "?", document=document, max_tokens=2, **options)[1]["prompt_tokens"]

        for name, options in (("plain", {}), ("silent", silent)):
            assert server.post(DOCUMENTS, id=name, text="A boat.", **options)[0] == 200
        plain = num_tokens("plain")
        assert num_tokens("silent") == num_tokens("plain", **silent) == plain + len("[silent]")
        assert num_tokens("silent", chat_template_kwargs={"thinks": True}) == plain
        unknown = {"chat_template_kwargs": {"unknown": 1}}
        for path, fields in ((CHAT, {"document": "plain"}), (DOCUMENTS, {"text": "x"})):
            assert "does not use 'unknown'" in refuse(server, path, **fields, **unknown)["message"]


def test_documents_beyond_the_limit_are_on_disk(random_llm, tmp_path):
    """Rows have a quarter of the memory."""
    cache = random_llm.cache("exact")
    size = cache.read(TEXT_OF_DOCUMENT).cache_bytes
    for directory in (str(tmp_path), None):
        with Server(cache, {"documents_dir": directory, "cache_bytes": 6 * size}) as server:
            names = ["a", "b", "c", "d", "e"]
            statuses = [server.post(DOCUMENTS, id=name, text=TEXT_OF_DOCUMENT)[0] for name in names]
            assert statuses == ([200] * 5 if directory else [200, 200, 200, 200, 507])
            assert server.metric("kvjax_documents_bytes") <= 6 * size
            answers = {
                ask(server, CHAT, False, "x", document=name, max_tokens=9)[0][0][0]
                for name in names[: statuses.count(200)]
            }
            assert len(answers) == 1 and server.metric("kvjax_documents ") == 4


def test_questions_to_one_document_hold_one_copy(random_llm, tmp_path):
    """Also if another document has taken its place in memory while they run."""
    sizes = Settings(documents_dir=str(tmp_path), cache_bytes=2**20)  # of which rows need all
    arguments = Conversations(0, lambda: 0), lambda: 2**20, lambda document: iter(()), set
    with contextlib.closing(Documents(random_llm.cache("exact"), sizes, *arguments)) as held:

        def read(name):
            return [*held.read(schema.DocumentRequest(id=name, text=TEXT_OF_DOCUMENT))]

        read("a")
        first = held.get("a")
        read("b")
        assert len(held) == 1 and held.get("a") is first
        held.delete("a")
        read("a")
        assert held.get("a") is not first
        second = weakref.ref(held.get("a"))
        held.get("b")
        assert second() is None


def test_questions_wait_for_the_memory_of_other_documents(random_llm, tmp_path, monkeypatch):
    """Questions to two of three documents at a time."""
    cache, names, in_memory = random_llm.cache("exact"), ["a", "b", "c"], []
    size = cache.read(TEXT_OF_DOCUMENT).prefix.held_bytes
    open_one = Documents._open

    def count(self, *args):
        in_memory.append(len({*self._in_memory.values(), *self._in_use()}) + 1)
        return open_one(self, *args)

    monkeypatch.setattr(Documents, "_open", count)
    sizes = {"documents_dir": str(tmp_path), "cache_bytes": 7 * size // 2, "rows": 6, "max_new_tokens": 256}
    with Server(cache, sizes) as server:
        for name in names:
            assert server.post(DOCUMENTS, id=name, text=TEXT_OF_DOCUMENT)[0] == 200

        def answer(name):
            return ask(server, CHAT, False, "x", document=name, max_tokens=200)[0][0][0]

        expected = {name: answer(name) for name in names}
        in_memory.clear()
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            assert [*pool.map(answer, names * 4)] == [*expected.values()] * 4
        assert max(in_memory) <= 2
        # A question that waits for a document may end, and the others go on.
        connections = [
            open_request(server, body(CHAT, "~", document=name, max_tokens=200, n=2)) for name in (*names, *names)
        ]
        connections[-1].close()
        connections[2].close()
        assert answer("b") == expected["b"]
        for connection in connections:
            connection.close()
        wait_until(lambda: is_idle(server) and not server.worker._opened and not server.worker._openings)
    with Server(cache, sizes | {"cache_bytes": size // 2}) as server:  # a document that is larger than the limit
        assert refuse(server, document="a")["message"].startswith("the row of the request takes up to")


def test_a_client_that_leaves_leaves_no_document_without_an_id(random_llm, tmp_path):
    """Programs are compiled after the document was saved, which may take a minute."""
    arguments = Conversations(0, lambda: 0), lambda: 0, lambda document: iter([None]), set
    with contextlib.closing(Documents(random_llm.cache("exact"), Settings(documents_dir=tmp_path), *arguments)) as held:
        for name, count in ((None, 0), ("named", 1)):
            steps = held.read(schema.DocumentRequest(id=name, text=TEXT_OF_DOCUMENT))
            while not len(held):
                assert next(steps) is None
            steps.close()
            assert len(held) == len(held.describe_all()) == count


def test_texts_that_are_encoded_count_as_waiting(random_llm, monkeypatch):
    is_free = threading.Event()
    check_text = Documents.check_text

    def wait(*args):
        assert is_free.wait(60)
        check_text(*args)

    monkeypatch.setattr(Documents, "check_text", wait)
    with Server(random_llm.cache("exact"), {"max_queue": 2}) as server:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            posts = [pool.submit(server.post, DOCUMENTS, text=TEXT_OF_DOCUMENT) for _ in range(2)]
            wait_until(lambda: server.worker._num_readings == 2)
            assert refuse(server, DOCUMENTS, text=TEXT_OF_DOCUMENT, status=429)["code"] == "queue_full"
            is_free.set()
            assert [one.result()[0] for one in posts] == [200, 200]
        assert server.post(DOCUMENTS, text=TEXT_OF_DOCUMENT)[0] == 200


def test_the_last_document_leaves_its_memory_to_rows(random_llm, tmp_path):
    """A prompt, or a question to another document, would otherwise wait forever."""
    cache, text = random_llm.cache("exact"), TEXT_OF_DOCUMENT * 4
    size, row_bytes = cache.read(text).prefix.held_bytes, cache.rows(200, 50)[0].row_bytes
    sizes = {"documents_dir": str(tmp_path), "cache_bytes": size + row_bytes // 2, "max_prompt_tokens": 4096}
    with Server(cache, sizes) as server:
        assert server.post(DOCUMENTS, id="a", text=text)[0] == 200
        assert server.metric("kvjax_documents ") == 1
        ask(server, CHAT, False, "x" * 200, max_tokens=9)
        assert server.metric("kvjax_documents ") == 0


def test_a_warm_server_compiles_nothing_for_usual_requests(random_llm):
    """Neither a prompt, nor a first question to a new document, nor two at a time."""
    with Server(random_llm.cache("streaming_llm", "50%"), {"warm_up": True}) as server:
        document = server.post(DOCUMENTS, text=TEXT_OF_DOCUMENT)[1]["id"]
        with count_compilations() as num_compiled:
            ask(server, CHAT, False, "x" * 40, max_tokens=64)
            ask(server, CHAT, False, "x" * 10, document=document)
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda question: ask(server, CHAT, False, question, document=document), ("Why?", "How?")))
        assert num_compiled() <= 4  # two rows joined one by one: a layer and the rest, taken and inserted


def test_stored_documents_are_restored_at_the_start(random_llm, tmp_path):
    settings = {"documents_dir": str(tmp_path), "warm_up": True}
    with Server(random_llm.cache("streaming_llm", "50%"), settings) as server:
        assert server.post(DOCUMENTS, id="one", text=TEXT_OF_DOCUMENT)[0] == 200
    with Server(random_llm.cache("streaming_llm", "50%"), settings) as server:
        assert server.request("GET", DOCUMENTS)[1]["data"][0]["in_memory"]


def largest_file(directory):
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_names_a_full_disk_and_damaged_files(cache, tmp_path):
    directory, secret = tmp_path / "documents", tmp_path / "secret"
    settings = {"documents_dir": str(directory)}
    with Server(cache, settings) as server:
        for name in ("../x", "a/b", "", "a\0b", "x" * 300, ".hidden", "a b", "é"):
            assert refuse(server, DOCUMENTS, id=name, text="x")["param"] == "id", name
            refuse(server, document=name)
        for name in ("..%2Fx", "%2e%2e", "a%2Fb", "a%00b"):
            for method in ("GET", "DELETE"):
                assert server.request(method, f"{DOCUMENTS}/{name}")[0] in (400, 404)
        for name in ("one", "two", "three", "four"):
            assert server.post(DOCUMENTS, id=name, text=TEXT_OF_DOCUMENT)[0] == 200
        assert refuse(server, DOCUMENTS, id="one", text="other", status=409)["code"] == "document_exists"
        before = sorted(path.name for path in directory.iterdir())
        with limit_file_size(1000):
            error = refuse(server, DOCUMENTS, id="full", text=TEXT_OF_DOCUMENT, status=507)
        assert str(tmp_path) not in json.dumps(error)
        assert server.request("GET", f"{DOCUMENTS}/full")[0] == 404
        assert sorted(path.name for path in directory.iterdir()) == before
    shutil.copytree(directory / "four", secret)
    (directory / "link").symlink_to(secret)
    (directory / ".partial-five").mkdir()  # as after kill -9
    for name, damage in {
        "one": lambda data: b"",
        "two": lambda data: data[:-3],
        "three": lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:],
    }.items():
        file = largest_file(directory / name)
        file.write_bytes(damage(file.read_bytes()))
    with Server(cache, settings) as server:
        assert not (directory / ".partial-five").exists()
        assert "symbolic link" in refuse(server, document="link")["message"]
        for name in ("one", "two", "three"):
            error = refuse(server, document=name, status=409)
            assert name in error["message"] and error["code"] == "document_damaged"
        assert ask(server, CHAT, True, "?", document="four")[0][0][0] == FOX
        assert server.request("DELETE", f"{DOCUMENTS}/one")[0] == 200
        assert server.post(DOCUMENTS, id="one", text=TEXT_OF_DOCUMENT)[0] == 200
        assert secret.is_dir()
    with Server(make_llm(max_length=500).cache(), settings) as server:
        error = refuse(server, document="four", status=409)
        assert (
            error["code"] == "other_model" and "512, not 500" in error["message"] and "damaged" not in error["message"]
        )


# --- the page ---


def test_the_page_shows_answers_as_text(server):
    assert ask(server, CHAT, False, "<")[0][0][0] == "<img src=x onerror=alert(1)>"
    page = _PAGE.read_text("utf-8")
    assert server.request("GET", "/") == (200, page)
    assert "default-src 'none'" in server.headers["content-security-policy"]
    assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write|eval", page)
    assert not re.search(r"(src|href)=.?https?:|@import|url\(", page) and page.count("\n") <= 800


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in node")
@pytest.mark.parametrize(
    ("prompt", "capacity", "note", "error", "button"),
    [
        pytest.param("~", 1000, "256 tokens", "", "Continue", marks=pytest.mark.heavy),
        ("?", 1000, "7 tokens", "", None),
        ("~", 64, "", "The conversation is full", "New conversation"),
    ],
)
def test_the_page_limits_an_answer_and_continues_it(prompt, capacity, note, error, button):
    script = str(pathlib.Path(__file__).with_name("run_page.js"))
    with Server(make_llm(max_length=2000).cache(), {"max_new_tokens": capacity}) as server:
        command = ["node", script, str(_PAGE), server.url, prompt]
        process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
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


@pytest.mark.heavy
def test_a_mesh_of_eight_devices(tmp_path):
    model = tiny.write(tmp_path, kv_heads=4, query_heads=8, template=tiny.TEMPLATE)
    options = [f"--model={model}", "--policy=streaming_llm", "--max_prompt_tokens=256", "--max_new_tokens=64"]
    answers = []
    for mesh in (1, 8):
        flags = "--xla_force_host_platform_device_count=8"
        with run_command(*options, f"--mesh_tensor={mesh}", flags=flags) as (client, _):
            assert client.post(DOCUMENTS, id="ships", text=TEXT_OF_DOCUMENT)[0] == 200
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                jobs = [pool.submit(ask, client, CHAT, False, q, max_tokens=9, document="ships") for q in "abc"]
                answers.append([*(job.result() for job in jobs), ask(client, TEXT, True, "hello", max_tokens=9)])
    assert answers[0] == answers[1]
