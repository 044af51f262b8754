"""Every command as printed in README and on the site runs, with a tiny model, or is listed here with the reason."""

import contextlib
import json
import os
import pathlib
import re
import shlex
import socket
import subprocess
import sys
import time

import pytest

from tests.models import tiny

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "experiments" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("kvjax", "python", "curl", "make", "pip", "pre-commit", "git")
NOT_RUN = {
    "pip install": "changes the environment; tests/models/test_wheel.py installs the package",
    "kvjax download": "loads files from the network; `make demo` and `make docs` run it",
    "git clone": "loads files from the network",
    "make demo": "loads files from the network; tests/experiments/test_demo.py runs the program",
    "make test": "runs all quick tests",
    "make aot": "a target of the Makefile, which installs compilers of several GB",
    "make rehearse": "a part of `make test-all`",
    "make measure": "needs a device",
    "make device": "needs a device",
    "python -m kvjax_models.lm_eval": "needs the harness; `make harness` runs it",
    "python -m experiments.peers": "needs kvpress; `make parity` runs it",
}
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
WORDS = {"smollm2-135m": str(tiny.directory(tiny.TEMPLATE)), "DIR": str(tiny.directory(tiny.TEMPLATE))}


def commands(path):
    """Returns the commands of a page: indented lines that begin with a program, up to the end of quoted arguments."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = []
    for start in re.finditer(rf"^    (?={'|'.join(PROGRAMS)})", text, flags=re.MULTILINE):
        lines = text[start.end() :].splitlines()
        length = next(n for n in range(1, len(lines) + 1) if is_complete("\n".join(lines[:n])))
        found.append("\n".join(lines[:length]))
    return found


def is_complete(command):
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


WITH_COMMANDS = {path.relative_to(ROOT).as_posix(): commands(path) for path in PAGES if commands(path)}


def test_exceptions_are_needed():
    everything = [command for found in WITH_COMMANDS.values() for command in found]
    assert [name for name in NOT_RUN if not any(command.startswith(name) for command in everything)] == []


@pytest.fixture
def directory(tmp_path):
    """Returns a directory with the files that commands name."""
    for name in ("FILE", "TEXT"):
        (tmp_path / name).write_text("The keeper lit the lamp. " * 60)
    (tmp_path / "IN.jsonl").write_text("".join(json.dumps(f"Number {n} is") + "\n" for n in range(3)))
    [policy] = re.findall(
        r"^```{code-cell} ipython3\n(.*?register.*?)^```", (ROOT / "docs/write_a_policy.md").read_text(), re.M | re.S
    )
    (tmp_path / "mine.py").write_text(policy)
    return tmp_path


@pytest.mark.heavy
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_run(page, directory):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with contextlib.ExitStack() as servers:
        for command in WITH_COMMANDS[page]:
            if command.startswith(tuple(NOT_RUN)):
                continue
            arguments = [fill_in(word, port) for word in shlex.split(command, comments=True)]
            if arguments[:2] == ["kvjax", "serve"]:
                servers.enter_context(
                    serving([*arguments, "--port", str(port), "--max_prompt_tokens", "512"], directory)
                )
                continue
            result = subprocess.run(arguments, cwd=directory, env=environment(), input="Hello\n", text=True, **PIPES)
            assert result.returncode == 0 and "error" not in result.stdout[:100], f"{command}\n{result.stdout}"


def fill_in(word, port):
    for name, value in WORDS.items():
        word = re.sub(rf"\b{name}\b", value, word)
    return word.replace(":8080", f":{port}")


def environment():
    """Returns the environment of a user who works in a checkout, with this Python first on the path."""
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'models'}", "PAGER": "cat"}


@contextlib.contextmanager
def serving(arguments, directory):
    """Runs a server until the block ends."""
    process = subprocess.Popen(arguments, cwd=directory, env=environment(), text=True, **PIPES)
    try:
        url = f"http://127.0.0.1:{arguments[arguments.index('--port') + 1]}/health"
        for _ in range(600):
            if subprocess.run(["curl", "--silent", "--fail", url], capture_output=True).returncode == 0:
                break
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
