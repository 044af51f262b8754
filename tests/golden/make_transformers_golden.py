"""Writes tests/golden/transformers: a small checkpoint per family with what transformers computes from it.

Needs torch and transformers: `python -m tests.golden.make_transformers_golden` from the repository root, for all
families or those that are named behind it. Each family's directory is a Hugging Face checkpoint (bfloat16) and
`golden.npz`:

    tokens    [2, 48] int64      random input
    logits    [2, 48, 64] float32
    prompt    [2, 8] int64       the first tokens of `tokens`
    greedy    [2, 64] int64      greedy continuation of the prompt
    margin    float32            least gap between the best two logits along it: a port nearer than that must agree
    versions  str                of transformers and torch
"""

import pathlib
import sys

import numpy as np
import torch
import transformers

from tests.models import families

ROOT = pathlib.Path(__file__).parent / "transformers"
PROMPT, CONTINUATION, LEAST_MARGIN = 8, 64, 2e-3
LEAST_DIFFERENCE = 4e-3  # 20 times the tolerance of tests
YARN = families.YARN | {"truncate": False}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
# Changes of a configuration that a wrong implementation could make; the golden logits must detect all of them.
WRONG_FEATURES = {
    "llama31": [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}},
    ],
    "mistral": [{"sliding_window": None}, {"sliding_window": 9}],
    "qwen2": [{"layer_types": ["sliding_attention", "full_attention"]}],
    "qwen3": [{"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}],
    "llama2": [{"rms_norm_eps": 1e-2}],
    "gemma2": [
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"query_pre_attn_scalar": 16},
        {"hidden_activation": "gelu"},
    ],
    "gemma3": [
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ],
    "qwen3_moe": [{"norm_topk_prob": False}, {"num_experts_per_tok": 3}],
    "gpt_oss": [
        {"sliding_window": 9},
        {"rope_parameters": YARN | {"attention_factor": 1.0}},
        {"rope_parameters": YARN | {"truncate": True}},
    ],
    "glm4": [{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}],
    "phi3": [{"original_max_position_embeddings": 128}],
    "smollm3": [{"no_rope_layers": [1, 1]}],
    "ministral3": [
        {"sliding_window": None},
        {"rope_parameters": families.BY_NAME["ministral3"].values["rope_parameters"] | {"llama_4_scaling_beta": 0.0}},
    ],
    "exaone4": [{"sliding_window": None, "layer_types": ["full_attention"] * 2}, {"sliding_window": 9}],
    "hunyuan_v1_dense": [{"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}],
    "granite_swa": [{"layer_rope_theta": [10000.0, 100.0, 10000.0]}, {"layer_rope_theta": [0, 100.0, 100.0]}],
    "seed_oss": [{"attention_bias": False}],
    "qwen3_5": [
        {"rope_parameters": families.BY_NAME["qwen3_5"].values["rope_parameters"] | {"partial_rotary_factor": 0.5}},
        {"rms_norm_eps": 1e-2},
    ],
    "lfm2": [{"rope_parameters": {"rope_type": "default", "rope_theta": 200.0}}, {"norm_eps": 1e-2}],
    "granite": [{"residual_multiplier": 0.6}, {"logits_scaling": 1.6}],
    "gemma4": [
        {"sliding_window": 9},
        {"final_logit_softcapping": None},
        {"rope_parameters": families.BY_NAME["gemma4"].values["rope_parameters"] | {"full_attention": PARTIAL}},
    ],
    "gemma4_experts": [{"top_k_experts": 2}],
    "glm4_moe": [
        {"n_group": 1, "topk_group": 1},
        {"routed_scaling_factor": 1.0},
        {"norm_topk_prob": False},
        {"rope_parameters": PARTIAL | {"partial_rotary_factor": 1.0}},
    ],
    "dots1": [
        {"n_group": 1, "topk_group": 1},
        {"norm_topk_prob": False},
        {"sliding_window": 9},
        {"max_window_layers": 1},
    ],
    "minimax_m2": [
        {"num_experts_per_tok": 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}},
    ],
}


def greedy(model, prompt: np.ndarray, steps: int) -> tuple[np.ndarray, float]:
    """Greedy tokens [B, steps] by whole forward passes (no cache whose own rules could differ), and the margin."""
    tokens, margin = prompt, np.inf
    for _ in range(steps):
        last = families.hf_logits(model, tokens)[:, -1]
        best = np.sort(last, axis=-1)
        margin = min(margin, float((best[:, -1] - best[:, -2]).min()))
        tokens = np.concatenate([tokens, last.argmax(-1)[:, None]], axis=1)
    return tokens[:, prompt.shape[1] :], margin


def check_features(family: families.Family, tokens: np.ndarray, logits: np.ndarray) -> None:
    """Checks that the logits detect a wrong implementation of every feature.

    Args:
        family: family whose checkpoint has been written.
        tokens: input.
        logits: what transformers computes from it.

    Raises:
        RuntimeError: if a feature has no effect.
    """
    for changes in WRONG_FEATURES.get(family.name, ()):
        config = getattr(transformers, family.config_class)(**family.values | changes)
        model = getattr(transformers, family.model_class).from_pretrained(
            ROOT / family.name, config=config, dtype=torch.float32, attn_implementation="eager"
        )
        difference = np.abs(families.hf_logits(model.eval(), tokens) - logits).max()
        if difference < LEAST_DIFFERENCE:
            raise RuntimeError(f"{family.name}: logits differ by {difference:.1e} with {changes}")


def write(family: families.Family) -> None:
    directory = ROOT / family.name
    tokens = np.random.default_rng(0).integers(0, families.VOCAB, (2, families.SEQUENCE))
    for seed in range(100):  # until no choice of the continuation is close
        model = families.write(family, directory, seed=seed, bfloat16=True)
        continuation, margin = greedy(model, tokens[:, :PROMPT], CONTINUATION)
        if margin > LEAST_MARGIN and len(np.unique(continuation)) > 8:
            break
    else:
        raise RuntimeError(f"{family.name}: no seed with a margin over {LEAST_MARGIN}")
    (directory / "generation_config.json").unlink(missing_ok=True)
    check_features(family, tokens, families.hf_logits(model, tokens))
    np.savez_compressed(
        directory / "golden.npz",
        tokens=tokens,
        logits=families.hf_logits(model, tokens),
        prompt=tokens[:, :PROMPT],
        greedy=continuation,
        margin=np.float32(margin),
        versions=f"transformers {transformers.__version__}, torch {torch.__version__}",
    )
    print(f"{family.name}: seed {seed}, margin {margin:.4f}, {len(np.unique(continuation))} distinct tokens")


if __name__ == "__main__":
    for each in families.GOLDEN:
        if each.name in (sys.argv[1:] or [each.name]):
            write(each)
