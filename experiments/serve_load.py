"""Sends requests to `kvjax serve`, and compares answers with the library and times with another server.

    python -m experiments.serve_load --policy exact auto --requests 1000
    python -m experiments.serve_load --workload chat prompts questions texts --requests 16 --max_new_tokens 48

- `mixed`: prompts of mixed lengths and sampling; half of the answers are streamed, and a tenth of the requests is
  cancelled at random moments. Answers are compared with the library's: equal texts, or two nearly equal logits at the
  first token that differs.
- `chat`: one request after the other with a prompt of 78 tokens, and the same in the library.
- `prompts`: prompts of 650 tokens.
- `questions`: questions to four documents of 2,000 tokens, which are read first.
- `texts`: the same questions with the text in each prompt.
- `bodies`: the longest time that /health takes while bodies of 4 and 5 MB arrive.
- `json`: answers to random JSON schemas that get deeper; how many end, parse and validate, also without the schema.

Each line has the seconds until the server was ready, the requests per second, the time to the first token and between
two parts of an answer, and the resident memory of the server after each fifth of the requests. kvjax answers prompts
and questions twice, because the first time compiles programs: `first_requests_per_second` is of that time. A row that
stays occupied is an error.
`--other` sends the same requests to another server with the same interface:

    --other "transformers serve --force-model DIR --port {port}"
"""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import itertools
import json
import pathlib
import random
import re
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema

from experiments.common.flags import Flags, repeatable, run_command
from experiments.common.rounding import NEAR, answer_alone, gap_at
from kvjax_models import language_model
from kvjax_models.cache import CachedModel
from kvjax_models.cli.serve import default_dtype
from kvjax_models.runner.sampling import Sampling

_WORDS = ("the", "ship", "left", "harbor", "before", "dawn", "while", "rain", "fell", "on", "quiet", "streets")
_TEMPLATE_TOKENS = 35  # of the chat template; each word is a token
_DOCUMENTS, _DOCUMENT_WORDS = 4, 2000
_WORKLOADS = ("mixed", "chat", "prompts", "questions", "texts", "bodies", "json")
_HEADERS = {"Content-Type": "application/json"}
_NUM_DEPTHS = 4  # of schemas: 0 to 3 levels below the object


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of a load test."""

    model: str = "smollm2-135m"  # Name of `kvjax models`, GGUF file or Hugging Face directory.
    workload: tuple[str, ...] = repeatable("mixed", choices=_WORKLOADS)  # Repeatable.
    policy: tuple[str, ...] = repeatable("exact", "auto")  # Repeatable.
    dtype: str | None = None  # Dtype of the model; the server's default.
    rows: int = 8  # Maximum number of sequences that run at a time.
    requests: int = 200  # Number of requests.
    clients: int = 8  # Requests at a time.
    max_new_tokens: int = 24  # Maximum length of an answer.
    check: int = 20  # Number of answers of `mixed` that are compared with the library's.
    seed: int = 0  # Seed of the requests.
    other: tuple[str, ...] = repeatable()  # Command of another server, with {port}; repeatable.


def main(options: Options) -> None:
    """Prints a line of JSON for every server and workload.

    Args:
        options: the options.
    """
    for policy in options.policy:
        command = shlex.join([
            sys.executable, "-m", "kvjax_models.cli", "serve", f"--model={options.model}", f"--policy={policy}",
            f"--rows={options.rows}", "--name=model", f"--max_queue={options.clients}", "--port={port}",
            *(() if options.dtype is None else (f"--dtype={options.dtype}",)),
        ])  # fmt: skip
        measure(options, command, policy)
    for command in options.other:
        measure(options, command, None)


def measure(options: Options, command: str, policy: str | None) -> None:
    """Sends the requests of all workloads to a server, and prints the measures.

    Args:
        options: the options.
        command: command of the server.
        policy: policy of kvjax; None for another server.

    Raises:
        AssertionError: if the server fails, a row stays occupied, or an answer differs from the library's.
    """
    answers: dict[str, list[dict[str, Any]]] = {}
    lines: dict[str, dict[str, Any]] = {}
    begin = time.monotonic()
    with _server(command) as (port, process):
        ready = round(time.monotonic() - begin, 1)
        for workload in options.workload:
            if workload == "bodies":
                lines[workload] = {"health_seconds": _health_beside_bodies(port)}
            elif workload == "json":
                lines[workload] = _measure_json(options, port, process)
            elif workload != "questions" or policy is not None:
                requests, values = _prepare(options, workload, port)
                if workload in ("prompts", "questions", "texts") and policy is not None:
                    compiling = _send_all(options, workload, requests, port, process)[1]
                    values["first_requests_per_second"] = compiling["requests_per_second"]
                answers[workload], measured = _send_all(options, workload, requests, port, process)
                lines[workload] = {**values, **measured}
        if policy is not None:
            time.sleep(2)
            _, metrics = _exchange(port, "GET", "/metrics")
            for name in ("kvjax_rows_running", "kvjax_sequences_waiting"):
                assert re.search(rf"^{name} 0(\.0)?$", metrics, re.MULTILINE), metrics
    if policy is not None:
        assert process.returncode == 0, "the server has failed"
        llm = language_model.load(options.model, dtype=options.dtype or default_dtype())
        cache = llm.cache(policy, None if policy == "exact" else "25%")
        if "mixed" in lines:
            lines["mixed"] |= _compare(options, cache, answers["mixed"])
        if "chat" in lines:
            seconds = _library_seconds(options, cache)
            lines["chat"] |= {"library_seconds": seconds, "ratio": _round(lines["chat"]["median_seconds"] / seconds)}
    for workload, values in lines.items():
        print(json.dumps({"server": policy or command, "workload": workload, "ready": ready, **values}), flush=True)


def _prepare(options: Options, workload: str, port: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Compiles the programs of a workload by its first requests; returns all requests and measures of the first."""
    requests = [_make_request(options, workload, number) for number in range(options.requests)]
    values: dict[str, Any] = {}
    if workload == "questions":
        begin = time.monotonic()
        for number in range(_DOCUMENTS):
            body = {"id": f"{options.seed}-{number}", "text": _document(options, number)}
            _exchange(port, "POST", "/v1/documents", body)
        values["reading_seconds"] = _round((time.monotonic() - begin) / _DOCUMENTS)
        first, second = (_send(port, _make_request(options, workload, _DOCUMENTS * i))["seconds"] for i in range(2))
        values |= {"first_question": first, "second_question": second, "first_to_second": _round(first / second)}
    else:
        values["first_request"] = _send(port, requests[0] | {"cancel_after": None})["seconds"]
    return requests, values


def _send_all(
    options: Options, workload: str, requests: list[dict[str, Any]], port: int, process: subprocess.Popen[bytes]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Sends all requests; returns the answers and the measures."""
    memory: list[int] = []
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1 if workload == "chat" else options.clients) as pool:
        jobs = [pool.submit(_send, port, request) for request in requests]
        for number, job in enumerate(jobs, 1):
            job.result()
            if number % max(options.requests // 5, 1) == 0:
                memory.append(_resident_mebibytes(process.pid))
    seconds = time.monotonic() - start
    answers = [job.result() for job in jobs]
    first = [answer["first"] for answer in answers if answer["first"] is not None]
    gaps = sorted(gap for answer in answers for gap in answer["gaps"]) or [0.0]
    return answers, {
        "requests": options.requests,
        "cancelled": sum(answer["text"] is None for answer in answers),
        "seconds": round(seconds, 1),
        "requests_per_second": _round(options.requests / seconds),
        "median_seconds": _round(statistics.median(answer["seconds"] for answer in answers)),
        "first_token_median": _round(statistics.median(first)),
        "first_token_maximum": _round(max(first)),
        "between_parts_median": _round(statistics.median(gaps)),
        "between_parts_99_percent": _round(gaps[int(0.99 * len(gaps))]),
        "characters": sum(len(answer["text"] or "") for answer in answers),
        "resident_mebibytes": memory,
    }


# --- requests ---


def _make_request(options: Options, workload: str, number: int) -> dict[str, Any]:
    """Returns a request, and the seconds after which it is cancelled."""
    rng = random.Random(f"{options.seed} {number}")
    limit: dict[str, Any] = {"seed": number, "max_tokens": options.max_new_tokens, "temperature": 0, "stream": True}
    if workload == "mixed":
        content = f"Note {number}: {_text(rng, rng.choice([8, 40, 150, 400]))}"
        limit |= {"max_tokens": rng.randint(4, options.max_new_tokens), "stream": number % 2 == 0}
        limit |= rng.choice([{}, {"temperature": 0.8, "top_p": 0.8}, {"temperature": 1.0, "top_p": 0.9}])
        cancel_after = rng.uniform(0.05, 5) if rng.random() < 0.1 else None
        return {"body": _chat(content) | limit, "cancel_after": cancel_after}
    if workload in ("chat", "prompts"):
        content = f"{number} {_text(rng, (78 if workload == 'chat' else 650) - _TEMPLATE_TOKENS)}"
    else:
        content = f"Write a story about {_text(rng, 12)}"
        if workload == "questions":
            limit["document"] = f"{options.seed}-{number % _DOCUMENTS}"
        else:
            content = f"{_document(options, number % _DOCUMENTS)}\n\n{content}"
    return {"body": _chat(content) | limit, "cancel_after": None}


def _document(options: Options, number: int) -> str:
    rng = random.Random(f"document {options.seed} {number}")
    return f"Document {number}: {_text(rng, _DOCUMENT_WORDS)}"


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


def _chat(content: str) -> dict[str, Any]:
    return {"model": "model", "messages": [{"role": "user", "content": content}]}


def _send(port: int, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the text of an answer, None if it was cancelled, how it ended, and its times."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=request["cancel_after"] or 3600)
    start, times, text = time.monotonic(), list[float](), ""
    reason: str | None = None
    is_complete = True
    body = request["body"]
    with contextlib.closing(connection):
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), _HEADERS)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            if not body["stream"]:
                text = json.loads(response.read())["choices"][0]["message"]["content"]
            else:
                for line in response:
                    if not line.startswith(b"data: {"):
                        continue
                    choices = json.loads(line[6:])["choices"]
                    part = "".join(choice["delta"].get("content") or "" for choice in choices)
                    reason = next((choice["finish_reason"] for choice in choices), reason)
                    if part:
                        times.append(time.monotonic())
                    text += part
        except TimeoutError:
            is_complete = False
    return {
        "text": text if is_complete else None,
        "reason": reason,
        "first": times[0] - start if times else None,
        "gaps": [end - begin for begin, end in itertools.pairwise(times)],
        "seconds": _round(time.monotonic() - start),
    }


def _measure_json(options: Options, port: int, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Returns how many answers are complete JSON of their schemas, with the schema as a constraint and without."""
    schemas = [_schema(random.Random(f"{options.seed} {n}"), n % _NUM_DEPTHS) for n in range(options.requests)]
    values: dict[str, Any] = {}
    for name in ("constrained", "free"):
        requests = []
        for number, schema in enumerate(schemas):
            content = f"Invent something and describe it as JSON of this schema: {json.dumps(schema)}"
            body = _chat(content) | {"seed": number, "max_tokens": 512, "temperature": 0, "stream": True}
            if name == "constrained":
                body["response_format"] = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
            requests.append({"body": body, "cancel_after": None})
        answers, measured = _send_all(options, "json", requests, port, process)
        valid = sum(_is_valid(answer["text"], schema) for answer, schema in zip(answers, schemas, strict=True))
        ended = sum(answer["reason"] == "stop" for answer in answers)
        values[name] = {"valid": valid, "ended": ended, "between_parts": measured["between_parts_median"]}
    return {"requests": options.requests, **values}


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Returns a random schema of an object, whose strings and arrays are bounded."""

    def value(depth: int) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = [
            {"type": "string", "maxLength": 20},
            {"type": "integer", "minimum": 0, "maximum": 999},
            {"type": "boolean"},
            {"enum": rng.sample(_WORDS, 3)},
        ]
        if not depth:
            return rng.choice(kinds)
        return rng.choice([_schema(rng, depth - 1), {"type": "array", "items": value(depth - 1), "maxItems": 3}])

    names = rng.sample(_WORDS, rng.randint(1, 3))
    properties = {name: value(depth if name == names[0] else 0) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _health_beside_bodies(port: int) -> dict[str, float]:
    """Returns the longest time of /health while a body of a size arrives and is checked."""
    longest = {}
    words = _text(random.Random(0), 2**20)
    for megabytes in (4, 5):
        body = _chat(words[: megabytes * 1_000_000]) | {"max_tokens": 1}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            job = pool.submit(_exchange, port, "POST", "/v1/chat/completions", body)
            seconds = []
            while not job.done():
                begin = time.monotonic()
                _exchange(port, "GET", "/health")
                seconds.append(time.monotonic() - begin)
                time.sleep(0.005)
            job.result()
        longest[f"{megabytes} MB"] = _round(max(seconds))
    return longest


# --- the server ---


@contextlib.contextmanager
def _server(command: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Runs a server by a command with `{port}`; yields its port and its process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen(shlex.split(command.format(port=port)))
    try:
        while not _is_ready(port):
            assert process.poll() is None, "the server has ended"
            time.sleep(0.5)
        yield port, process
        process.terminate()
        process.wait(60)
    finally:
        process.kill()


def _exchange(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Returns status and text of a response; a server may answer before all of the body has arrived."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=3600)) as connection:
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, path, None if body is None else json.dumps(body), _HEADERS)
            response = connection.getresponse()
            return response.status, response.read().decode()
        except ConnectionResetError:
            return 413, ""


def _is_ready(port: int) -> bool:
    try:
        return _exchange(port, "GET", "/health")[0] == 200
    except OSError:
        return False


def _resident_mebibytes(process: int) -> int:
    status = pathlib.Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


# --- the library ---


def _compare(options: Options, cache: CachedModel, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts answers that differ from the library's by rounding; larger differences raise an AssertionError."""
    complete = [number for number, answer in enumerate(answers) if answer["text"] is not None]
    checked = random.Random(options.seed).sample(complete, min(options.check, len(complete)))
    gaps = {n: _gap(cache, _make_request(options, "mixed", n)["body"], answers[n]["text"]) for n in checked}
    differing = {number: gap for number, gap in gaps.items() if gap is not None}
    too_large = [number for number, gap in differing.items() if gap > NEAR]
    assert not too_large, f"the answers of requests {too_large} differ from the library's"
    return {"compared": len(checked), "differ_by_rounding": len(differing)}


def _gap(cache: CachedModel, body: dict[str, Any], text: str) -> float | None:
    """Returns the difference of the two best logits at the first token that differs; None if texts are equal."""
    sampling, prompt = Sampling(body["temperature"], top_p=body.get("top_p")), cache.llm.encode(body["messages"])
    outputs = answer_alone(cache, sampling, prompt=prompt, max_new_tokens=body["max_tokens"], seed=body["seed"])
    if (alone := "".join(output.text for output in outputs)) == text:
        return None
    tokens = [token for output in outputs for token in output.tokens]
    pairs = enumerate(zip(alone, text, strict=False))
    same = next((i for i, pair in pairs if pair[0] != pair[1]), min(len(alone), len(text)))
    ends = (len(cache.llm.tokenizer.decode(tokens[: count + 1])) for count in range(len(tokens)))
    # Where one text ends first, the token that ends the other one differs.
    first = next((place for place, end in enumerate(ends) if end > same), len(tokens) - 1)
    return gap_at(outputs, sampling, first)


def _library_seconds(options: Options, cache: CachedModel) -> float:
    """Returns the median seconds of the requests of `chat` in an engine with one row; the first is answered twice."""
    engine, seconds = cache.engine(rows=1), []
    for number in (0, *range(options.requests)):
        body = _make_request(options, "chat", number)["body"]
        begin = time.monotonic()
        engine.add(cache.llm.encode(body["messages"]), max_new_tokens=body["max_tokens"])
        engine.complete()
        seconds.append(time.monotonic() - begin)
    return _round(statistics.median(seconds[1:]))


def _round(value: float) -> float:
    return float(f"{value:.3g}")


if __name__ == "__main__":
    run_command(main, Options)
