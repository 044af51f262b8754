"""Small runs of the experiments with questions on the shipped checkpoints, one of them as a command."""

import json

import pytest

from experiments import decode_speed, needle_in_haystack, perplexity, ruler
from experiments.common.resuming import Finished
from tests.experiments.running import command, run


def test_line_retrieval_writes_rows_and_a_plot(tmp_path):
    done = command(
        "experiments.line_retrieval", "--quick", "--context_tokens=256", "--policy=exact",
        "--policy=streaming_llm", "--policy=chelsea@10", "--budget=50%", "--question=seen", "--question=unseen",
        "--batch=5", f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "chelsea @ 10 is left out: " in done.stdout + done.stderr
    rows = json.loads((tmp_path / "line_retrieval.json").read_text())
    assert (tmp_path / "line_retrieval.png").stat().st_size > 3_000
    accuracy = {(row["policy"], row["question_seen"]): row for row in rows if row["metric"] == "accuracy"}
    assert set(accuracy) == {(policy, seen) for policy in ("exact", "streaming_llm") for seen in (True, False)}
    assert all(row["n"] == 10 and row["ci95_low"] <= row["value"] <= row["ci95_high"] for row in accuracy.values())
    assert accuracy["exact", False]["value"] >= 0.9
    assert accuracy["streaming_llm", False]["device_bytes"] <= 0.5 * accuracy["exact", False]["device_bytes"]
    assert any(row["metric"] == "ms_per_token" for row in rows)


@pytest.mark.heavy
def test_decode_speed_runs_without_its_peer(tmp_path, capsys):
    policies = ("exact", "uniform:recent=8", "kvzip")
    given = {"context_tokens": (256,), "policy": policies, "budget": ("50%",), "transformers": False}
    rows = run(decode_speed, tmp_path, **given)
    assert "kvzip @ 50% is left out: KVzip needs the prompt read again" in "".join(capsys.readouterr())
    assert {row["policy"] for row in rows} == {"exact", "uniform"}
    assert all(row["value"] > 0 and row["parameter_bytes"] > 10**8 for row in rows)


@pytest.mark.heavy
def test_ruler_writes_rows_and_skips_finished_units(tmp_path):
    policies = ("exact", "uniform:recent=16")
    given = {"context_tokens": (800,), "task": ("niah_single_1",), "policy": policies, "budget": ("50%",)}
    rows = run(ruler, tmp_path, **given)
    assert (tmp_path / "ruler.png").stat().st_size > 3_000
    accuracy = {row["policy"]: row for row in rows if row["metric"] == "accuracy"}
    assert set(accuracy) == {"exact", "uniform"}
    assert all(row["n"] == 4 and 0 <= row["ci95_low"] <= row["ci95_high"] <= 1 for row in accuracy.values())
    assert accuracy["uniform"]["budget_fraction"] <= 0.5
    units = (tmp_path / "ruler.jsonl").read_text()
    exact, uniform = (json.loads(unit)["unit"] for unit in units.splitlines())
    assert (exact["policy"]["class"], exact["budget"]) == ("Exact", None)
    # Defaults are part of the identity of a unit.
    assert uniform["policy"].items() >= {"class": "Uniform", "recent": 16, "sinks": 4}.items()
    assert uniform["budget"] == "50%"
    # Finished units are not run again.
    finished = Finished(tmp_path / "ruler.jsonl")
    for unit in (exact, uniform):
        finished.add(unit, finished[unit] | {"scores": {"accuracy": [0.5, 0.0, 0.0, 0.0]}})
    del finished  # releases the file's lock
    again = run(ruler, tmp_path, **given)
    assert {row["value"] for row in again if row["metric"] == "accuracy"} == {0.125}


@pytest.mark.heavy
@pytest.mark.parametrize("module", [needle_in_haystack, perplexity])
def test_experiments_run_on_the_shipped_checkpoint(module, tmp_path):
    rows = run(module, tmp_path)
    assert {row["policy"] for row in rows} == {"exact", "uniform", "streaming_llm"}
    assert all(row["ci95_low"] <= row["value"] <= row["ci95_high"] for row in rows if row["metric"] != "ms_per_token")
    if module is perplexity:
        ratios = [row for row in rows if row["metric"] == "perplexity_ratio" and row["first_token"] == 1]
        # The first tokens of a text fit in every budget.
        assert ratios and all(row["value"] == pytest.approx(1, abs=1e-3) for row in ratios if row["end_token"] == 64)
