"""Sends many requests to `kvjax serve` and compares every answer with the library's.

    python -m experiments.serve_load --model smollm2-135m --policy exact --policy auto --rows 8

Prompts have mixed lengths and sampling, half of the answers are streamed, and a tenth of the requests is cancelled at
random moments. For each policy the command prints the requests per second, the time to the first token, the occupied
rows at the end, and the resident memory of the server after each quarter of the requests. An answer that differs from
`generate_many` with its seed, or a row that stays occupied, is an error.

`--other` sends the same requests to another server with the same interface, for example `transformers serve`:

    --other "transformers serve --force-model DIR --port {port}"
"""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import pathlib
import random
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from experiments.common.flags import Flags, repeatable, run_command
from kvjax_models import language_model
from kvjax_models.engine import Engine
from kvjax_models.runner.sampling import Sampling

_WORDS = ("the", "ship", "left", "harbor", "before", "dawn", "while", "rain", "fell", "on", "quiet", "streets")


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of a load test."""

    model: str = "smollm2-135m"  # Name of `kvjax models`, GGUF file or Hugging Face directory.
    policy: tuple[str, ...] = repeatable("exact", "auto")  # Repeatable.
    rows: int = 8  # Maximum number of sequences that run at a time.
    requests: int = 200  # Number of requests.
    clients: int = 32  # Requests at a time.
    max_prompt_tokens: int = 1024  # Maximum length of a prompt.
    max_new_tokens: int = 24  # Maximum length of an answer.
    check: int = 20  # Number of answers that are compared with the library's.
    seed: int = 0  # Seed of the requests.
    other: tuple[str, ...] = repeatable()  # Command of another server, with {port}; repeatable.


def main(options: Options) -> None:
    """Runs the test for every policy.

    Args:
        options: the options.
    """
    for policy in options.policy:
        print(json.dumps({"policy": policy, **measure(options, policy)}), flush=True)
    for command in options.other:
        requests = [_make_request(options, number) for number in range(options.requests)]
        with _server(command) as (port, process):
            result = _send_all(options, requests, port, process)[1]
        print(json.dumps({"server": command, **result}), flush=True)


def measure(options: Options, policy: str) -> dict[str, Any]:
    """Sends all requests to a server with a policy, and compares answers with the library's.

    Args:
        options: the options.
        policy: policy as on the command line.

    Returns:
        The measures.

    Raises:
        AssertionError: if an answer differs from the library's, or a row stays occupied.
    """
    requests = [_make_request(options, number) for number in range(options.requests)]
    command = shlex.join([
        sys.executable, "-m", "kvjax_models.cli", "serve", f"--model={options.model}", f"--policy={policy}",
        f"--rows={options.rows}", f"--max_prompt_tokens={options.max_prompt_tokens}", "--name=model",
        f"--max_new_tokens={options.max_new_tokens}", f"--max_queue={options.clients}", "--port={port}",
    ])  # fmt: skip
    with _server(command) as (port, process):
        answers, result = _send_all(options, requests, port, process)
        time.sleep(2)
        metrics = _metrics(port)
    assert process.returncode == 0, "the server has failed"
    assert metrics["kvjax_rows_running"] == metrics["kvjax_sequences_waiting"] == 0, metrics
    complete = [number for number, answer in enumerate(answers) if answer["text"] is not None]
    engine, llm = _engine(options, policy)
    checked = random.Random(options.seed).sample(complete, min(options.check, len(complete)))
    differing = [n for n in checked if _alone(engine, llm, requests[n]["body"]) != answers[n]["text"]]
    assert not differing, f"the answers of requests {differing} differ from the library's"
    return {"rows": options.rows, **result, "compared_and_equal": len(checked)}


def _send_all(
    options: Options, requests: list[dict[str, Any]], port: int, process: subprocess.Popen[bytes]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Sends all requests; returns the answers and the measures."""
    memory: list[int] = []
    _send(port, requests[0] | {"cancel_after": None})  # compiles
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(options.clients) as pool:
        jobs = [pool.submit(_send, port, request) for request in requests]
        for number, job in enumerate(jobs, 1):
            job.result()
            if number % max(options.requests // 4, 1) == 0:
                memory.append(_resident_mebibytes(process.pid))
    seconds = time.monotonic() - start
    answers = [job.result() for job in jobs]
    first = [answer["first"] for answer in answers if answer["first"] is not None]
    return answers, {
        "requests": options.requests,
        "cancelled": sum(answer["text"] is None for answer in answers),
        "seconds": round(seconds, 1),
        "requests_per_second": round(options.requests / seconds, 2),
        "first_token_median": round(statistics.median(first), 2),
        "first_token_p90": round(statistics.quantiles(first, n=10)[-1], 2),
        "resident_mebibytes": memory,
    }


def _make_request(options: Options, number: int) -> dict[str, Any]:
    """Returns a request, and the seconds after which it is cancelled."""
    rng = random.Random(f"{options.seed} {number}")
    prompt = f"Note {number}: " + " ".join(rng.choices(_WORDS, k=rng.choice([8, 40, 150, 400])))
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "seed": number,
        "max_tokens": rng.randint(4, options.max_new_tokens),
        "stream": number % 2 == 0,
        **rng.choice([{"temperature": 0}, {"temperature": 0.8, "top_p": 0.8}, {"temperature": 1.0, "top_p": 0.9}]),
    }
    return {"body": body, "cancel_after": rng.uniform(0.05, 5) if rng.random() < 0.1 else None}


def _send(port: int, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the text of an answer, None if it was cancelled, and the seconds to its first part."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=request["cancel_after"] or 3600)
    start, first, text = time.monotonic(), None, ""
    body = request["body"]
    with contextlib.closing(connection):
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps({"model": "model", **body}), headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            if not body["stream"]:
                answer = json.loads(response.read())
                return {"text": answer["choices"][0]["message"]["content"], "first": None}
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                text += "".join(choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"])
                if text:
                    first = first or time.monotonic() - start
        except TimeoutError:
            return {"text": None, "first": first}
    return {"text": text, "first": first}


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


def _get(port: int, path: str) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


def _is_ready(port: int) -> bool:
    try:
        return _get(port, "/health")[0] == 200
    except OSError:
        return False


def _metrics(port: int) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in _get(port, "/metrics")[1].splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def _resident_mebibytes(process: int) -> int:
    status = pathlib.Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


def _engine(options: Options, policy: str) -> tuple[Engine, language_model.LanguageModel]:
    """Returns an engine as the server has it."""
    llm = language_model.load(options.model)
    budget = None if policy == "exact" else "25%"
    return llm.cache(policy, budget).engine(rows=1), llm


def _alone(engine: Engine, llm: language_model.LanguageModel, body: dict[str, Any]) -> str:
    """Returns the library's answer to a request."""
    options = {name: body[name] for name in ("temperature", "top_p") if name in body}
    engine.add(
        llm.encode(body["messages"]), sampling=Sampling(**options), max_new_tokens=body["max_tokens"], seed=body["seed"]
    )
    return "".join(output.text for output in engine.run())


if __name__ == "__main__":
    run_command(main, Options)
