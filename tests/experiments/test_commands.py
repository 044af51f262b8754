"""The commands as a user runs them, on the shipped checkpoint and in small."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments, text_input=None):
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        input=text_input,
        check=False,
    )


def test_line_retrieval_writes_rows_and_a_plot(tmp_path):
    done = run(
        "experiments.line_retrieval", "--quick", "--context_tokens=256", "--policy=exact",
        "--policy=streaming_llm", "--policy=chelsea@10", "--budget=50%", "--question=seen", "--question=unseen",
        "--batch=5", f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "chelsea @ 10 is left out: " in done.stdout + done.stderr
    rows = json.loads((tmp_path / "line_retrieval.json").read_text())
    assert (tmp_path / "line_retrieval.png").stat().st_size > 10_000
    accuracy = {(row["policy"], row["question_seen"]): row for row in rows if row["metric"] == "accuracy"}
    assert set(accuracy) == {(policy, seen) for policy in ("exact", "streaming_llm") for seen in (True, False)}
    assert all(row["n"] == 10 and row["ci95_low"] <= row["value"] <= row["ci95_high"] for row in accuracy.values())
    assert accuracy["exact", False]["value"] >= 0.9
    assert accuracy["streaming_llm", False]["device_bytes"] <= 0.5 * accuracy["exact", False]["device_bytes"]
    assert any(row["metric"] == "ms_per_token" for row in rows)


@pytest.mark.heavy
def test_decode_speed_runs_without_its_peer(tmp_path):
    done = run(
        "experiments.decode_speed", "--quick", "--context_tokens=256", "--policy=exact", "--policy=uniform:recent=8",
        "--policy=kvzip", "--budget=50%", "--notransformers", f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "kvzip @ 50% is left out: KVzip needs the prompt read again" in done.stdout + done.stderr
    rows = json.loads((tmp_path / "decode_speed.json").read_text())
    assert {row["policy"] for row in rows} == {"exact", "uniform"}
    assert all(row["value"] > 0 and row["weight_bytes"] > 10**8 for row in rows)


@pytest.mark.heavy
def test_ruler_writes_rows_and_skips_what_is_done(tmp_path):
    command = (
        "experiments.ruler", "--quick", "--context_tokens=800", "--task=niah_single_1", "--policy=exact",
        "--policy=uniform:recent=16", "--budget=50%", f"--output_dir={tmp_path}",
    )  # fmt: skip
    done = run(*command)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "ruler.json").read_text())
    assert (tmp_path / "ruler.png").stat().st_size > 10_000
    accuracy = {row["policy"]: row for row in rows if row["metric"] == "accuracy"}
    assert set(accuracy) == {"exact", "uniform"}
    assert all(row["n"] == 4 and 0 <= row["ci95_low"] <= row["ci95_high"] <= 1 for row in accuracy.values())
    assert accuracy["uniform"]["budget_fraction"] <= 0.5
    units = (tmp_path / "ruler.jsonl").read_text()
    exact, uniform = (json.loads(unit)["unit"] for unit in units.splitlines())
    assert (exact["policy"]["class"], exact["budget"]) == ("Exact", None)
    # Defaults, too, decide what a unit is.
    assert uniform["policy"].items() >= {"class": "Uniform", "recent": 16, "sinks": 4}.items()
    assert uniform["budget"] == "50%"
    # What is done is taken as it stands.
    (tmp_path / "ruler.jsonl").write_text(re.sub(r'"accuracy": \[[^]]*\]', '"accuracy": [0.5, 0.0, 0.0, 0.0]', units))
    assert run(*command).returncode == 0
    again = json.loads((tmp_path / "ruler.json").read_text())
    assert {row["value"] for row in again if row["metric"] == "accuracy"} == {0.125}
