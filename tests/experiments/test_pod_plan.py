"""Plans for pods that are not here, by the real TPU compiler."""

import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp

from experiments.common.compiled import Collective, collectives
from tests.experiments.test_ahead_of_time import needs_compiler

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2**22,
}


@needs_compiler
def test_a_plan_says_what_fits_and_what_does_not(tmp_path):
    """Eight texts of two million tokens: exact holds 4 GB of each of them on every chip."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = subprocess.run(
        [
            sys.executable, "-m", "experiments.pod_plan", f"--shape={tmp_path}", "--topology=v5e:2x2", "--batch=8",
            f"--context_tokens={2**21}", "--prefill_chunk=1024", "--policy=exact", "--policy=uniform",
            "--budget=4096", f"--output_dir={tmp_path}",
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {(row["policy"], row["metric"]): row for row in json.loads((tmp_path / "pod_plan.json").read_text())}
    assert "exact" not in [policy for policy, metric in rows if metric == "bytes_per_device"]
    assert re.search("decoding: RESOURCE_EXHAUSTED", rows["exact", "ms_per_token_bound"]["problem"])
    fits = rows["uniform", "bytes_per_device"]
    # Two layers of one kv head each per chip: 4096 slots and 64 staged, keys and values of 128 columns.
    least = 8 * 2 * 2 * (4096 + 64) * 128 * 2
    assert least <= fits["device_bytes"] <= 1.1 * least
    assert fits["weight_bytes"] + fits["device_bytes"] <= fits["value"] < 16e9
    assert (tmp_path / "pod_plan.png").stat().st_size > 10_000
    # What crosses between chips are activations of one token and logits.
    sizes = [one["bytes"] for one in fits["collectives"]]
    assert sizes and max(sizes) <= 4 * 8 * CONFIG["vocab_size"]


def test_collectives_are_found_in_a_program_s_text():
    text = """
  %all-reduce.1 = bf16[8,1,256]{2,1,0} all-reduce(%x), replica_groups={{0,1}}
  %start = (f32[4]{0}, f32[8]{0}) all-gather-start(f32[4]{0} %y), dimensions={0}
  %done = f32[8]{0} all-gather-done(%start)
  %fused = f32[8]{0} fusion(%done), calls=%all-reduce-like
"""
    assert collectives(text) == [Collective("all-reduce", 2 * 8 * 256), Collective("all-gather", 32)]


def test_a_program_without_exchanges_has_none():
    assert collectives(jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile().as_text()) == []
