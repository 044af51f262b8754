"""Latency, throughput, and the steps of a run on a device."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest

from experiments import device, speed, throughput
from experiments.common import ROOT, shapes
from experiments.common.caches import Setting
from experiments.device import Step
from tests.experiments.support import command, figures
from tests.models import tiny


def test_latency_is_relative_to_the_full_cache(tmp_path, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "tiny", tiny.make_config())
    monkeypatch.setattr(speed.timing, "memory_bandwidth", lambda: 1e10)
    monkeypatch.setattr(speed.timing, "matmul_rate", lambda dtype: 1e10)
    policies = ("snapkv:window_size=16,compact_every=8", "clusterkv:compact_every=8", "kvzip:compact_every=8")
    options = {"shape": "tiny", "policy": policies, "budget": ("70%",), "context_tokens": (300,), "tokens": 2}
    speed.main(speed.Options(**options, repetitions=6, prefill_chunk=64, output_dir=str(tmp_path)))
    found = {(one["setting"], one["metric"]): one for one in figures(tmp_path / "latency.json")}
    assert {metric for _, metric in found} >= {"memory_bandwidth_gb_s", "matmul_gflops", "ms_per_token_of_weights"}
    for policy in policies:
        setting = f"{policy} @ 70%"
        for metric in ("ms_per_token", "ms_per_token_ratio", "compress_share_of_prefill", "time_to_first_token_ratio"):
            one = found[setting, metric]
            assert 0 < one["low"] <= one["value"] <= one["high"]
        assert found[setting, "compress_seconds"]["value"] > 0
    # Retrieval keeps everything and reads a part; the other policies hold their budget.
    assert found[f"{policies[1]} @ 70%", "ms_per_token"]["cache_fraction"] > 1
    assert found[f"{policies[0]} @ 70%", "ms_per_token"]["cache_fraction"] <= 0.7
    assert ("exact", "selection_share_of_step") not in found
    assert found[f"{policies[1]} @ 70%", "selection_share_of_step"]["value"] > 0
    assert found["exact", "ms_per_token_ratio"]["value"] == found["exact", "decode_memory_ratio"]["value"] == 1
    assert found["exact", "end_to_end_ratio"]["value"] == 1 and found[setting, "end_to_end_ratio"]["value"] > 0
    with pytest.raises(ValueError, match="repetitions=5 must be at least 6"):
        speed.Options(repetitions=5)


def test_bytes_need_no_weights(tmp_path, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "tiny", tiny.make_config())
    policies = ("snapkv:window_size=16,compact_every=8@100", "clusterkv:compact_every=8@70%")
    options = {"shape": "tiny", "policy": policies, "context_tokens": (300,), "tokens": 8}
    speed.main(speed.Options(measure=("bytes",), **options, output_dir=str(tmp_path)))
    found = {(one["setting"], one["metric"]): one["value"] for one in figures(tmp_path / "bytes.json")}
    assert 0.3 < found["snapkv:window_size=16,compact_every=8 @ 100", "read_fraction"] < 0.4
    assert found["clusterkv:compact_every=8 @ 70%", "read_fraction"] <= 0.7 < 1 < found["exact", "held_fraction"]


def test_no_token_ends_a_timed_text(monkeypatch):
    llm = tiny.make_llm()
    ending = dataclasses.replace(llm, tokenizer=dataclasses.replace(llm.tokenizer, eos_ids=(1,)))
    monkeypatch.setattr(speed, "load", lambda name, dtype: ending)
    assert speed.make_model(speed.Options(model="tiny")).tokenizer.eos_ids == ()


def test_prefill_includes_all_passes_of_a_policy(tmp_path, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "tiny", tiny.make_config())
    options = {"shape": "tiny", "policy": ("kvgrad", "kvzip:plus=True"), "budget": ("70%",), "context_tokens": (200,)}
    speed.main(speed.Options(measure=("prefill",), **options, repetitions=6, output_dir=str(tmp_path)))
    found = {(one["setting"], one["metric"]): one for one in figures(tmp_path / "prefill.json")}
    assert found["exact", "prefill_seconds_ratio"]["value"] == 1
    for setting in ("kvgrad @ 70%", "kvzip:plus=True @ 70%"):
        assert found[setting, "prefill_seconds_ratio"]["low"] > 0
        assert found[setting, "prefill_seconds"]["value"] > 0


def test_every_policy_uses_the_memory_of_the_full_cache(capsys):
    settings = [Setting("exact"), Setting("streaming_llm", "25%"), Setting("quest", "64"), Setting("kvzip", "2")]
    sizes = throughput.Sizes(192, 64, full_rows=2, repetitions=2, seed=0)
    found = {(one["metric"], one["setting"]): one for one in throughput.measure(tiny.make_llm(), settings, sizes)}
    assert "kvzip @ 2 is left out: " in capsys.readouterr().out
    rows = {setting: found["rows", setting]["value"] for metric, setting in found if metric == "rows"}
    # Retrieval keeps all tokens and the bounds of pages.
    assert rows["exact"] == 2 and rows["streaming_llm @ 25%"] >= 5 and rows["quest @ 64"] == 1
    ratio = found["requests_per_second_ratio", "streaming_llm @ 25%"]
    assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]
    assert found["requests_per_second_ratio", "exact"]["value"] == pytest.approx(1)


def test_shapes_are_found_by_name_and_directory():
    assert shapes.find_shape("llama-3.1-70b").layers == 80
    assert shapes.find_shape(str(tiny.directory())).kv_heads == 2
    assert shapes.first_layers(shapes.find_shape("llama-3.1-8b"), 4).layers == 4
    with pytest.raises(ValueError, match="--shape=x is neither a directory with a config.json nor one of small"):
        shapes.find_shape("x")


def python(text, name="step", minutes=1.0):
    """Returns a step that runs a program."""
    return Step(name, ("-c", text), minutes)


def test_finished_steps_are_skipped_and_failures_stop_no_other_step(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "MIN_SECONDS", 0.0)
    count = tmp_path / "count"
    add = f"open({str(count)!r}, 'a').write('x')"
    requested = [
        python(add, "first"),
        python(f"{add}; raise SystemExit(3)", "fails"),
        python(f"{add}; import time; time.sleep(60)", "slow", 0.05),
        python(add, "last"),
    ]
    messages = device.run_steps(requested, tmp_path / "run", minutes=2)
    assert messages["first"] == messages["last"] == "done" and messages["fails"].startswith("failed (3): see ")
    assert messages["slow"].startswith("exceeded its limit after ") and count.read_text() == "xxxx"
    device.run_steps(requested, tmp_path / "run", minutes=2)
    assert count.read_text() == "xxxxxx"
    assert device.run_steps([*requested, python(add, "more")], tmp_path / "run", minutes=-1)["more"] == "no time left"


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
    time.sleep(1)  # the step may run before its start has returned
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.heavy
def test_the_quick_script_runs(tmp_path):
    done = command("experiments.device", "--quick=true", f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": done") == len((tmp_path / "steps.jsonl").read_text().splitlines())
    assert (tmp_path / "throughput" / "throughput.json").stat().st_size > 100
