"""Plans for pods by the TPU compiler, without the pods."""

import json
import re

import jax
import pytest

from experiments.common.compiled import Collective, collectives
from tests.experiments.support import command, figures
from tests.experiments.test_compile import needs_compiler

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 2**22,
}  # fmt: skip


def planned(directory, *arguments, **changes):
    """Returns the figures of plans for four chips by setting and metric."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    sizes = f"--shape={directory}", "--topology=v5e:2x2", "--budget=4096 slots"
    done = command("experiments.pod_plan", *sizes, f"--output_dir={directory}", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return {(one["setting"], one["metric"]): one for one in figures(directory / "pod_plan.json")}


@pytest.mark.heavy
@needs_compiler
def test_a_plan_reports_programs_that_do_not_fit(tmp_path):
    """Sixteen texts of two million tokens: exact holds 1 GB of each of them on every chip."""
    sizes = ("--batch=16", f"--context_tokens={2**21}", "--prefill_chunk=1024")
    rows = planned(tmp_path, *sizes, "--policy=exact", "--policy=uniform")
    assert "exact" not in [policy for policy, metric in rows if metric == "bytes_per_device"]
    assert re.search("decoding: RESOURCE_EXHAUSTED", rows["exact", "ms_per_token_bound"]["problem"])
    fits = rows["uniform @ 4096", "bytes_per_device"]
    # Two layers of one kv head each per chip: 4096 slots and 64 staged, keys and values of 128 columns.
    least = 16 * 2 * 2 * (4096 + 64) * 128 * 2
    assert least <= fits["cache_bytes"] <= 1.1 * least
    assert fits["parameter_bytes"] + fits["cache_bytes"] <= fits["value"] < 16e9
    # Chips exchange activations of one token and logits.
    exchanged = [one["bytes"] for one in fits["collectives"]["decoding"]]
    assert exchanged and max(exchanged) <= 4 * 16 * CONFIG["vocab_size"]


@pytest.mark.heavy
@needs_compiler
@pytest.mark.parametrize("query_heads", [4, 6])  # two, and three for two chips
def test_chips_share_the_tokens_of_a_long_prompt(tmp_path, query_heads):
    sizes = ("--batch=1", "--context_tokens=131072", "--policy=exact")
    rows = planned(tmp_path, *sizes, num_attention_heads=query_heads)
    # Chips exchange no partial sums; the largest exchanges are queries of a chip's tokens and keys of its head.
    exchanged = rows["exact", "bytes_per_device"]["collectives"]["prefill"]
    query_bytes, key_bytes = 131072 // 4 * query_heads * 128 * 2, 131072 * 128 * 2
    # Two chips cannot divide three heads: they share the tokens in zigzag order, which permutes queries and outputs.
    permutes = [one["bytes"] for one in exchanged if one["kind"] == "collective-permute"]
    assert permutes == [query_bytes] * (2 if query_heads == 6 else 0)
    assert {one["kind"] for one in exchanged} - {"collective-permute"} == {"all-gather", "all-to-all"}
    assert max(one["bytes"] for one in exchanged) == max(query_bytes, key_bytes)


@needs_compiler
@pytest.mark.heavy
def test_many_layers_follow_from_few(tmp_path):
    options = ("--batch=4", "--context_tokens=65536", "--prefill=streaming", "--policy=exact", "--policy=clusterkv")
    whole, line = (
        planned(tmp_path / name, *options, *more, num_hidden_layers=8)
        for name, more in (("whole", ("--compiled_layers=0",)), ("line", ()))
    )
    for key, row in whole.items():
        # Temporaries of few layers fit in on-chip memory, which is not counted.
        assert row["value"] == pytest.approx(line[key]["value"], rel=0.03)
        for name in ("cache_bytes", "parameter_bytes", "read_bytes"):
            assert row[name] == line[key][name]
        exchanged = [
            sorted((one["kind"], one["bytes"]) for one in of[key]["collectives"]["decoding"]) for of in (whole, line)
        ]
        if jax.__version_info__ < (0, 12):
            assert exchanged[0] == exchanged[1]
        else:  # XLA exchanges other arrays in two layers than in four, from which the line follows
            total, expected = (sum(count for _, count in one) for one in exchanged)
            assert total == pytest.approx(expected, rel=0.15)


def test_collectives_are_found_in_a_program_s_text():
    text = """
  %all-reduce.1 = bf16[8,1,256]{2,1,0} all-reduce(%x), replica_groups={{0,1}}
  %start = (f32[4]{0}, f32[8]{0}) all-gather-start(f32[4]{0} %y), dimensions={0}
  %done = f32[8]{0} all-gather-done(%start)
  %fused = f32[8]{0} fusion(%done), calls=%all-reduce-like
"""
    assert collectives(text) == [Collective("all-reduce", 2 * 8 * 256), Collective("all-gather", 32)]
