"""Runners on several devices and in several processes, simulated."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from tests.kvjax import support

ROOT = pathlib.Path(__file__).parents[2]
RUN = (
    "experiments.line_retrieval", "--quick", "--context_tokens=256", "--policy=exact", "--policy=uniform:recent=16",
    "--budget=50%", "--documents=4", "--batch=4",
)  # fmt: skip


def start(devices, *arguments):
    flags = {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        **support.THREADS,
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, env=os.environ | flags, **pipes)


def finish(*processes):
    """What each printed."""
    told = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), told[0][1][-3000:]
    return [out for out, _ in told]


def coordinator():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"--coordinator=localhost:{free.getsockname()[1]}"


def answers(directory):
    rows = json.loads((directory / "line_retrieval.json").read_text())
    return {row["policy"]: (row["value"], row["first_answer"]) for row in rows if row["metric"] == "accuracy"}


@pytest.mark.heavy
def test_two_processes_answer_as_one_and_write_once(tmp_path):
    """The shipped checkpoint has two kv heads: two groups of two devices."""
    one, two = tmp_path / "one", tmp_path / "two"
    at = coordinator()
    mesh = ("--mesh_data=2", "--mesh_tensor=2", "--processes=2", at, f"--output_dir={two}")
    finish(start(1, *RUN, f"--output_dir={one}"))
    first, second = finish(start(2, *RUN, *mesh, "--process=0"), start(2, *RUN, *mesh, "--process=1"))
    assert answers(one) == answers(two)
    assert "Results:" in first and "Results:" not in second
    units = (two / "line_retrieval.jsonl").read_text().splitlines()
    assert len(set(units)) == len(units) == len(answers(two))  # one for each setting


def test_processes_with_other_flags_are_refused(tmp_path):
    at = coordinator()
    shared = (*RUN, "--processes=2", at, f"--output_dir={tmp_path}")
    processes = [start(1, *shared, "--process=0"), start(1, *shared, "--process=1", "--seed=1", "--context_tokens=300")]
    for process in processes:
        _, error = process.communicate(timeout=600)
        assert process.returncode != 0
        assert "processes were started with different values of --context_tokens, --seed" in error


@pytest.mark.heavy
def test_generation_on_a_mesh_equals_one_device(tmp_path):
    (tmp_path / "prompt.txt").write_text("line careless-cat: REGISTER_CONTENT is <12345>\n" * 8)
    run = (
        "kvjax_models.cli",
        "generate",
        "--model=models/checkpoints/line-retrieval-2l-4k",
        f"--prompt_file={tmp_path / 'prompt.txt'}",
        "--max_new_tokens=24",
    )
    [alone], [together] = finish(start(1, *run)), finish(start(2, *run, "--mesh_tensor=2"))
    assert alone == together
