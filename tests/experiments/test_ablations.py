"""Ablations as the command measures them, in small."""

import json

from experiments import ablations
from tests.experiments.running import run


def test_settings_of_an_ablation_are_measured_and_kept(tmp_path):
    rows = run(ablations, tmp_path, ablation=("streaming_llm_sinks",), measure=("attention_error",))
    assert (tmp_path / "ablations.png").stat().st_size > 3_000
    errors = [row for row in rows if row["metric"] == "relative_error"]
    assert {(row["variant"], row["layer"]) for row in errors} == {
        (f"sinks={sinks}", layer) for sinks in (0, 4) for layer in (0, 1)
    }
    assert {row["ablation"] for row in rows} == {"streaming_llm_sinks"}
    assert {row["experiment"] for row in rows} == {"ablations"}
    [unit] = (tmp_path / "ablations.jsonl").read_text().splitlines()
    assert json.loads(unit)["unit"]["experiment"] == "attention_error"
