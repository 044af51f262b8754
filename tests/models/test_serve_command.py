"""The command `kvjax serve`: options that cannot work end it with a message, its log, and its end by a signal."""

import concurrent.futures
import contextlib
import re
import signal
import socket
import threading

import pytest

from kvjax_models import cli
from tests.models import tiny
from tests.models.serving import COMMAND, DOCUMENTS, TEXT, ask, body, open_request, run_command, wait_until
from tests.models.support import start_python

KEY = "key-3141"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port=65536"], "--port=65536 must be from 0 to 65535"),
        (["--host=256.0.0.1"], "cannot listen on --host=256.0.0.1 --port=8080"),
        (["--policy=snapvk"], "policy 'snapvk' is unknown"),
        (["--kv_dtype=int9"], "kv_dtype='int9' is not a quantization format"),
        (["--max_queue=0"], "--max_queue=0 must be at least 1"),
        (["--rows=0"], "--rows=0 must be at least 1"),
        (["--conversations=-1"], "--conversations=-1 must be at least 0"),
        (["--cache_bytes=7"], "--cache_bytes=7 must be a number of bytes"),
        (["--documents_bytes=1GiB"], "--documents_bytes requires --documents_dir"),
        (["--max_body_bytes=0B"], "--max_body_bytes=0B must be a number of bytes"),
        (["--seed=3"], "--seed=3 has no effect on a server"),
        (["--allow_host=https://a.example"], "--allow_host=https://a.example must be a name without a scheme"),
        (["--allow_host=a.example:80"], "--allow_host=a.example:80 must be a name without a scheme and a port"),
        (["--allow_origin=a.example"], "--allow_origin=a.example must be a scheme with a host"),
        (["--allow_origin=https://a.example/"], "--allow_origin=https://a.example/ must be a scheme with a host"),
        (["--api_key="], "--api_key must be a text that is not empty"),
        (["--api_key= x"], "--api_key must be a text that is not empty, without spaces around it"),
    ],
)
def test_options_that_cannot_work_are_errors_before_the_model_is_loaded(options, message, caplog):
    with pytest.raises(SystemExit) as error:
        cli.main(cli.parse(["kvjax", "serve", "--model=absent", *options]))
    assert str(error.value).startswith(f"kvjax: {message}")
    assert not caplog.records  # nothing about an address


def test_an_address_in_use_and_an_empty_key_in_the_environment_are_errors(caplog, monkeypatch):
    def serve(port):
        cli.main(cli.parse(["kvjax", "serve", "--model=absent", f"--port={port}"]))

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SystemExit, match=f"--port={port}: Address already in use; pass another address"):
            serve(port)
    monkeypatch.setenv("KVJAX_API_KEY", "")
    with pytest.raises(SystemExit, match="KVJAX_API_KEY must be a text that is not empty"):
        serve(port)
    assert not caplog.records


def test_a_server_that_cannot_start_ends_with_a_message(tmp_path):
    (tmp_path / "file").write_text("x")
    processes = {
        message: start_python(COMMAND, "serve", "--port=0", f"--model={tiny.directory()}", *options)
        for message, options in {
            "budget=0.1%": ["--policy=snapkv", "--budget=0.1%"],
            "cannot be written to": ["--policy=exact", f"--documents_dir={tmp_path / 'file'}"],
            "needs 2 devices": ["--mesh_tensor=2"],
        }.items()
    }
    for message, process in processes.items():
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 1, (message, error)
        [last] = [line for line in error.splitlines() if line.startswith("kvjax: ")]
        assert message in last and "Traceback" not in error, error


def test_the_log_of_the_command_and_its_end_at_sigterm(tmp_path):
    """One line at the start and per request, tracebacks of errors inside, and none of clients that leave."""
    module = tmp_path / "module.py"
    module.write_text(
        "from kvjax_models.engine import Engine\n"
        "step = Engine.step\n"
        "def broken(engine):\n"
        "    if any(len(one.request.prompt) == 7 for one in engine._sequences.values()):\n"
        "        raise RuntimeError('out of memory')\n"
        "    return step(engine)\n"
        "Engine.step = broken\n"
    )
    options = [f"--model={tiny.directory()}", "--policy=streaming_llm", "--budget=50%", "--rows=2", "--warm_up=false"]
    options += ["--max_prompt_tokens=256", "--max_new_tokens=4096", f"--documents_dir={tmp_path / 'documents'}"]
    options += [f"--policy_module={module}", f"--api_key={KEY}", "--shutdown_seconds=2"]
    with run_command(*options, key=KEY) as (client, process):
        lines, reader = [], threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
        reader.start()
        assert client.complete("secretword", max_tokens=3)[0] == 200
        assert client.complete("x" * 6, max_tokens=3)[0] == 500  # and BOS
        data = body(TEXT, "x", max_tokens=4096, stream=True, temperature=1.0, logprobs=3)
        with contextlib.closing(open_request(client, data, TEXT)) as connection:
            connection.recv(10)
        wait_until(lambda: client.metric("kvjax_rows_running") == 0)
        assert client.complete("y", max_tokens=3)[0] == 200
        with contextlib.closing(open_request(client, data, TEXT)) as connection:
            assert connection.recv(10).startswith(b"HTTP/1.1")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            end = b"".join(iter(lambda: connection.recv(10_000), b""))  # finished, or ended with an error
        assert b"[DONE]" in end or b'data: {"error"' in end
        reader.join(60)
        assert KEY not in process.stdout.read()
    log = "".join(lines)
    assert log.count("Traceback") == 1 and log.count("RuntimeError: out of memory") == 1
    assert "secretword" not in log and KEY not in log
    lines = [line.partition("] ")[2] for line in log.splitlines() if re.match(r"[IWE]\d{4} ", line)]
    assert re.fullmatch(rf"listening on http://127\.0\.0\.1:{client.port}; the model is loading", lines[0])
    pattern = r"tiny is loaded: policy streaming_llm, budget 50%, up to 2 rows, each with [\d.]+ KiB for 256 \+ 4096"
    assert re.match(pattern, lines[1])
    requests = [line for line in lines if line.startswith("POST ")]
    assert [line.split()[2] for line in requests] == ["200", "500", "200", "200", "200"]
    assert re.search("(cancelled|length|stop); 2 prompt tokens", requests[2])  # a short answer may have ended before
    assert lines[2:].count("the engine has failed") == 1 and len(lines) == 3 + len(requests)


@pytest.mark.heavy
def test_documents_survive_kill_9(tmp_path):
    directory = tmp_path / "documents"
    options = [f"--model={tiny.directory()}", f"--documents_dir={directory}", "--policy=exact", "--warm_up=false"]
    options += ["--max_prompt_tokens=256", "--max_new_tokens=64"]
    text, names, answers = "A long text about ships. " * 6, ["first"], set()
    for run in range(3):
        with run_command(*options) as (client, process):
            assert run > 0 or client.post(DOCUMENTS, id="first", text=text)[0] == 200
            for name in names:
                answers.add(ask(client, TEXT, False, "Which ships?", document=name, max_tokens=12)[0][0][0])
            assert len(answers) == 1 and not [*directory.glob(".partial-*")]
            posted = concurrent.futures.ThreadPoolExecutor(1).submit(client.post, DOCUMENTS, id=f"d{run}", text=text)
            wait_until(lambda: [*directory.glob(".partial-*")] or posted.done())  # noqa: B023
            process.kill()
            process.wait()
            # The rename is the moment from which the document exists.
            if (directory / f"d{run}").exists():
                names.append(f"d{run}")
            assert names[-1] == f"d{run}" or posted.exception(60) is not None


def test_errors_of_threads_are_printed_except_those_of_saves(capsys):
    def fail_in(module):
        scope = {"__name__": module}
        exec("def fail():\n    raise RuntimeError('lost')", scope)
        return scope["fail"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", cli._print_thread_error)
        for module, is_printed in (
            ("orbax.checkpoint.writer", False),
            ("tensorstore", False),
            ("kvjax_models.x", True),
        ):
            thread = threading.Thread(target=fail_in(module))
            thread.start()
            thread.join()
            assert ("RuntimeError: lost" in capsys.readouterr().err) == is_printed, module
