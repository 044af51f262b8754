"""Requests per second, and the script for half an hour on a device."""

import os
import signal
import subprocess
import sys
import time

import pytest

from experiments import device, throughput
from experiments.common import ROOT
from experiments.device import Step
from tests.experiments.running import command, run


def test_every_policy_uses_the_memory_of_exact(tmp_path, capsys):
    found = run(
        throughput,
        tmp_path,
        policy=("streaming_llm", "quest@64", "kvzip@2"),
        context_tokens=(192,),
        answer_tokens=64,
        layers=1,
        exact_rows=(2,),
    )
    assert "kvzip @ 2 is left out: " in "".join(capsys.readouterr())
    rows = {(row["metric"], row["policy"]): row for row in found}
    count = {policy: rows["rows", policy]["value"] for policy in ("exact", "streaming_llm", "quest")}
    # Retrieval keeps all tokens and the bounds of pages.
    assert count["exact"] == 2 and count["streaming_llm"] >= 6 and count["quest"] == 1
    held = {policy: rows["rows", policy]["device_bytes"] for policy in count}
    assert max(held.values()) == held["exact"] and held["streaming_llm"] > 0.8 * held["exact"]
    ratio = rows["requests_per_second_over_exact", "streaming_llm"]
    per_second = [rows["requests_per_second", policy]["value"] for policy in ("streaming_llm", "exact")]
    assert ratio["n"] == 2 and 0.3 < ratio["value"] / (per_second[0] / per_second[1]) < 3
    assert 0 < ratio["ci95_low"] < ratio["value"] < ratio["ci95_high"]
    assert rows["requests_per_second_over_exact", "exact"]["value"] == 1
    assert 0.5 < rows["memory_over_exact", "streaming_llm"]["value"] < 1.5
    assert (tmp_path / "throughput.png").stat().st_size > 3_000


def python(text, name="step", minutes=1.0):
    """A step that runs a program of this text."""
    return Step(name, ("-c", text), minutes)


def test_finished_steps_are_skipped_and_failures_stop_no_other_step(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "LEAST", 0.0)
    count = tmp_path / "count"
    add = f"open({str(count)!r}, 'a').write('x')"
    asked = [
        python(add, "first"),
        python(f"{add}; raise SystemExit(3)", "fails"),
        python(f"{add}; import time; time.sleep(60)", "slow", 0.05),
        python(add, "last"),
    ]
    found = device.run_steps(asked, tmp_path / "run", minutes=2)
    assert found["first"] == found["last"] == "done" and found["fails"].startswith("failed (3): see ")
    assert found["slow"].startswith("cut off after ") and count.read_text() == "xxxx"
    device.run_steps(asked, tmp_path / "run", minutes=2)
    assert count.read_text() == "xxxxxx"
    assert device.run_steps([*asked, python(add, "more")], tmp_path / "run", minutes=-1)["more"] == "no time left"


def test_sigterm_ends_the_running_step(tmp_path):
    pid = tmp_path / "pid"
    sleeps = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    program = f"""
import pathlib, signal
from experiments import device
signal.signal(signal.SIGTERM, device._stop)
device.run_steps([device.Step("slow", ("-c", {sleeps!r}), 1.0)], pathlib.Path({str(tmp_path)!r}), 1)
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while process.poll() is None and not (pid.exists() and pid.read_text()):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_steps_have_the_expected_names(tmp_path):
    for quick in (True, False):
        names = [step.name for step in device.steps(tmp_path, quick)]
        assert names[0] == "kernels" and names[1].startswith("benchmark_")
        assert names[-3:] == ["latency_best", "latency_best_long", "throughput"]


@pytest.mark.heavy
def test_the_quick_script_runs(tmp_path):
    done = command("experiments.device", "--quick", f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": done") == len((tmp_path / "steps.jsonl").read_text().splitlines())
    assert (tmp_path / "throughput" / "throughput.json").stat().st_size > 100
