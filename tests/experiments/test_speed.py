"""Latency, throughput, and the steps of a run on a device."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from experiments import device, speed
from experiments.common import ROOT, answers, flags, shapes
from experiments.device import Step
from pallas_kernels import benchmarking
from tests.experiments.support import command, figures
from tests.models import tiny


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Returns a function that measures a tiny model and returns the figures by setting and metric."""
    monkeypatch.setitem(shapes.SHAPES, "tiny", tiny.make_config())
    monkeypatch.setattr(benchmarking, "memory_bandwidth", lambda: 1e10)
    monkeypatch.setattr(benchmarking, "product_rate", lambda dtype: 1e10)
    defaults = {"shape": "tiny", "repetitions": 6, "output_dir": tmp_path, "results": tmp_path / "results.jsonl"}

    def run(name, **options):
        speed.main(speed.Options(measure=(name,), **defaults | options))
        return {(one["setting"], one["metric"]): one for one in figures(tmp_path / f"{name}.json")}

    return run


@pytest.mark.heavy
def test_latency_is_relative_to_the_full_cache(measure, tmp_path):
    policies = ("snapkv:window_size=16,compact_every=8", "clusterkv:compact_every=8", "kvzip:compact_every=8")
    found = measure("latency", policy=policies, budget=("70%",), context_tokens=(200,), tokens=2, prefill_chunk=64)
    snapkv, clusterkv, kvzip = settings = [f"{policy} @ 70%" for policy in policies]
    for setting in settings:
        for metric in ("ms_per_token", "ms_per_token_ratio", "compress_share_of_prefill", "time_to_first_token_ratio"):
            one = found[setting, metric]
            assert 0 < one["low"] <= one["value"] <= one["high"]
        assert found[setting, "compress_seconds"]["value"] > 0
    # Retrieval keeps everything and reads a part; the other policies hold their budget.
    held = {setting: found[setting, "ms_per_token"]["cache_fraction"] for setting in settings}
    assert held[snapkv] <= 0.7 < 1 < held[clusterkv]
    for metric in ("ms_per_token_ratio", "decode_memory_ratio", "end_to_end_ratio"):
        assert found["exact", metric]["value"] == 1 and found[kvzip, metric]["value"] > 0
    limits, *rows = device.read_rows(tmp_path / "results.jsonl")
    assert limits["memory_bandwidth_gb_s"] == 10 and [row["setting"] for row in rows] == ["exact", *settings]
    assert all(row["rows"] == 1 and row["launches_per_layer"] > 0 for row in rows)


def test_copies_of_one_sequence_decode_together_and_a_failure_ends_no_other_setting(measure, tmp_path, monkeypatch):
    compress = speed.timing.TimedPrefill._compress

    def fails(self, setting, *args):
        if setting.policy == "tova":
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")
        return compress(self, setting, *args)

    monkeypatch.setattr(speed.timing.TimedPrefill, "_compress", fails)
    options = {"policy": ("tova", "streaming_llm"), "budget": ("40%",), "context_tokens": (200,), "tokens": 8}
    measure("latency", **options, batch=2, equal_memory=True)
    _, exact, streaming, tova = device.read_rows(tmp_path / "results.jsonl")
    assert tova["problem"] == "RuntimeError: RESOURCE_EXHAUSTED: out of memory" and tova["setting"] == "tova @ 40%"
    assert exact["rows"] == 2 and streaming["rows"] >= 4
    assert streaming["tokens_per_second"][0] > 0 and "ms_per_token_ratio" in streaming


def test_bytes_need_no_weights(measure):
    policies = ("snapkv:window_size=16,compact_every=8@100 slots", "clusterkv:compact_every=8@70%")
    found = measure("bytes", policy=policies, context_tokens=(300,), tokens=8)
    assert 0.3 < found["snapkv:window_size=16,compact_every=8 @ 100", "read_fraction"]["value"] < 0.4
    read, full = found["clusterkv:compact_every=8 @ 70%", "read_fraction"], found["exact", "held_fraction"]
    assert read["value"] <= 0.7 < 1 < full["value"]


def test_no_token_ends_a_timed_text(monkeypatch):
    llm = tiny.make_llm()
    ending = dataclasses.replace(llm, tokenizer=dataclasses.replace(llm.tokenizer, eos_ids=(1,)))
    monkeypatch.setattr(speed, "load", lambda name, dtype: ending)
    assert speed.make_model(speed.Options(model="tiny")).tokenizer.eos_ids == ()


@pytest.mark.parametrize(
    "name, policies, metric",
    [
        ("prefill", ("kvgrad", "kvzip:plus=True", "kvzap"), "prefill_seconds"),  # with all passes of a policy
        ("questions", ("streaming_llm",), "seconds"),
    ],
)
def test_seconds_are_relative_to_the_full_cache(measure, name, policies, metric):
    found = measure(name, policy=policies, budget=("70%",), context_tokens=(200,), tokens=3, questions=2)
    assert found["exact", f"{metric}_ratio"]["value"] == 1
    for setting in (f"{policy} @ 70%" for policy in policies):
        ratio = found[setting, f"{metric}_ratio"]
        assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"] and found[setting, metric]["value"] > 0
    if name == "questions":
        full, held = (found[one, "document_bytes"]["value"] for one in ("exact", setting))
        assert 0 < held < full
        assert found["exact", "rows_in_2_gib"]["value"] == (2**31 - full) // found["exact", "row_bytes"]["value"]


@pytest.mark.heavy
def test_first_answers_are_of_new_processes(measure, monkeypatch):
    monkeypatch.setattr(answers, "STORED_RUNS", 1)
    measured = measure("first_answer", model=str(tiny.directory()), policy=(), context_tokens=(100,), tokens=2)
    found = {metric: one["value"] for (_, metric), one in measured.items()}
    assert 0 < found["warm_seconds"] < found["cold_seconds"] and found["stored_seconds"] > 0


@pytest.mark.heavy
def test_every_policy_uses_the_memory_of_the_full_cache(measure, capsys):
    policies = ("streaming_llm@25%", "quest@64slots", "kvzip@2slots")
    found = measure("throughput", policy=policies, context_tokens=(192,), answer_tokens=64, full_rows=(2,))
    assert "kvzip @ 2 is left out: " in capsys.readouterr().out
    rows = {setting: one["value"] for (setting, metric), one in found.items() if metric == "rows"}
    # Retrieval keeps all tokens and the bounds of pages.
    assert rows["exact"] == 2 and rows["streaming_llm @ 25%"] >= 5 and rows["quest @ 64"] == 1
    ratio = found["streaming_llm @ 25%", "requests_per_second_ratio"]
    assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]
    assert found["exact", "requests_per_second_ratio"]["value"] == pytest.approx(1)


def test_shapes_are_found_by_name_and_directory():
    assert shapes.first_layers(shapes.find_shape("llama-3.1-70b"), 4).layers == 4
    assert shapes.find_shape(str(tiny.directory())).kv_heads == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: speed.Options(repetitions=5), "repetitions=5 must be at least 6"),
        (lambda: speed.main(speed.Options(measure=("first_answer",), shape="small", layers=1)), "pass --model"),
        (lambda: shapes.find_shape("x"), "--shape=x is neither a directory with a config.json nor one of small"),
        (lambda: device.main(device.Options(step=("x",))), "--step=x is not one of tests, kernels, decode_128k"),
    ],
)
def test_invalid_options_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def python(tmp_path, text, name="step", seconds=60.0):
    """Returns a step that runs a program."""
    (tmp_path / f"{name}_program.py").write_text(text)
    return Step(name, f"{name}_program", (), seconds, {"PYTHONPATH": str(tmp_path)})


def test_failures_of_steps_stop_no_other_step(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "MIN_SECONDS", 0.0)
    written = json.dumps({"measure": "throughput", "setting": "a|b"})
    row = f"import sys; open(sys.argv[2], 'a').write({written!r} + chr(10))"
    requested = [
        python(tmp_path, row, "first"),
        python(tmp_path, "raise SystemExit(3)", "fails"),
        python(tmp_path, "import time; time.sleep(60)", "slow", 1.0),
        python(tmp_path, row, "last"),
    ]
    device.run_steps(requested, tmp_path / "run", seconds=60)
    rows = device.read_rows(tmp_path / "run" / "results.jsonl")
    assert [one["measure"] for one in rows] == ["throughput", "step", "step", "step", "throughput", "step"]
    problems = {one["step"]: one["problem"] for one in rows if one["measure"] == "step"}
    assert problems == {"first": None, "fails": "exit code 3; see log.txt", "slow": "stopped after 1 s", "last": None}
    summary = (tmp_path / "run" / "summary.md").read_text()
    assert summary.count("a/b") == 2 and "stopped after 1 s" in summary
    device.run_steps(requested[:1], tmp_path / "other", seconds=-1)
    (skipped,) = device.read_rows(tmp_path / "other" / "results.jsonl")
    assert skipped["problem"] == "no time left"


def test_sigterm_ends_the_running_step(tmp_path):
    pid = tmp_path / "pid"
    python(tmp_path, f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)", "slow")
    program = f"""
import pathlib, signal
from experiments import device
signal.signal(signal.SIGTERM, device._stop)
step = device.Step("slow", "slow_program", (), 60.0, {{"PYTHONPATH": {str(tmp_path)!r}}})
device.run_steps([step], pathlib.Path({str(tmp_path)!r}), 60)
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while process.poll() is None and not (pid.exists() and pid.read_text()):
        time.sleep(0.1)
    time.sleep(1)  # the step may run before its start has returned
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_the_plan_has_the_flags_of_its_modules():
    for quick in (False, True):
        for step in device.steps(quick):
            if step.module == "experiments.speed":
                options = flags.parse(speed.Options, step.flags)
                assert options.settings[0].policy == "exact" and len(options.context_tokens) == 1


@pytest.mark.heavy
def test_the_quick_plan_runs(tmp_path):
    done = command("experiments.device", "--quick=true", "--seconds=1000", f"--output_dir={tmp_path}")
    rows = device.read_rows(tmp_path / "results.jsonl")
    problems = [row for row in rows if row.get("measure") == "step" and row["problem"]]
    assert done.returncode == 0 and not problems, done.stdout + done.stderr
    settings = {row["setting"] for row in rows if row.get("measure") == "latency"}
    assert settings >= {"exact", "auto @ 25%", "exact, int8"}
