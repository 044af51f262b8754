"""Latency as the command measures it, on a model of a few thousand weights."""

import json

import pytest

from experiments import latency
from experiments.common import speed
from tests.experiments.running import run

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shape")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def test_ratios_are_to_exact_and_bytes_are_counted(shape, tmp_path, capsys):
    found = run(
        latency,
        tmp_path,
        quick=False,
        shape=str(shape),
        policy=("kvzip", "quest:compact_every=8,host_steps=1", "chelsea@10"),
        budget=("64",),
        context_tokens=(256,),
        prefill_chunk=64,
        tokens=4,
        turns=6,
        answer_tokens=(10,),
    )
    assert (tmp_path / "latency.png").stat().st_size > 3_000
    assert "chelsea @ 10 is left out: " in "".join(capsys.readouterr())
    rows = {(row["metric"], row["policy"]): row for row in found}
    value = {place: row["value"] for place, row in rows.items()}
    for metric in ("time_to_first_token_over_exact", "ms_per_token_over_exact", "end_to_end_over_exact"):
        assert value[metric, "exact"] == 1  # it is among the policies, asked for or not
        assert value[metric, "quest"] > 0
    # Reading the prompt again is what KVzip costs.
    assert value["compress_share_of_prefill", "kvzip"] > 0.5 > value["compress_share_of_prefill", "exact"]
    # Two layers, read three times: six samples, the fewest that have an interval.
    share = rows["compress_share_of_prefill", "quest"]
    assert share["n"] == 6 and 0 < share["ci95_low"] <= share["value"] <= share["ci95_high"]
    first = value["time_to_first_token_seconds", "quest"]
    assert first == pytest.approx(value["prefill_seconds", "exact"] + value["compress_seconds", "quest"])
    assert value["end_to_end_seconds", "quest"] == pytest.approx(first + 10e-3 * value["ms_per_token", "quest"])
    assert 0 < value["hit_rate", "quest"] < 1
    exact, quest = (rows["memory_bytes", name] for name in ("exact", "quest"))
    assert quest["host_bytes"] > 0 == exact["host_bytes"]
    assert quest["read_bytes_per_token"] < exact["read_bytes_per_token"]
    # Layers share the counters, and each reads them.
    assert exact["read_bytes_per_token"] <= 1.01 * exact["device_bytes"]
    assert exact["value"] > exact["device_bytes"] + exact["parameter_bytes"]


def test_shapes():
    assert speed.shape("llama-3.1-8b").layers == 32
    with pytest.raises(
        ValueError, match="--shape=llama-9 is neither a directory with a config.json nor one of small, "
    ):
        speed.shape("llama-9")


def test_a_shape_may_be_a_file_or_its_directory(shape):
    assert speed.shape(str(shape)) == speed.shape(str(shape / "config.json"))
    assert speed.shape(str(shape)).kv_heads == 2


def test_operations_of_a_prompt():
    # One layer, width 4, one head of 4, MLP of 8: 4 * 4 * 4 + 3 * 4 * 8 products per token, 2 * 4 per pair of tokens.
    config = speed.LlamaConfig(
        vocab_size=2, width=4, mlp_width=8, layers=1, query_heads=1, kv_heads=1, head_dim=4, max_length=8
    )
    assert speed.prefill_operations(config, 3) == 2 * ((64 + 96) * 3 + 8 * 6)
