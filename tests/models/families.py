"""Small random checkpoints of every family, written by transformers, for comparison with it.

`hf_checkpoint` is a fixture over `LIVE` (all families and variants); it skips without torch and
transformers. `python -m tests.golden.make_transformers_golden` writes `GOLDEN` to disk for runs without them.
"""

import copy
import dataclasses
import pathlib
from typing import Any

import pytest

VOCAB, LAYERS = 64, 2

# Longer than the original context of the scaled RoPE and than the sliding windows, so that both have an effect.
SEQUENCE = 48

_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16}
_HYBRIDS = ("qwen3_5", "qwen3_next")


@dataclasses.dataclass(frozen=True)
class Family:
    """The transformers classes of a family and the configuration of its small checkpoint."""

    name: str
    config_class: str
    model_class: str
    values: dict[str, Any]

    def but(self, variant: str, values: dict[str, Any]) -> "Family":
        return dataclasses.replace(self, name=f"{self.name}-{variant}", values=self.values | values)


def _family(name: str, prefix: str, text: str = "", without: str = "", **values: Any) -> Family:
    """Returns a family whose classes begin with `prefix`; `text` is part of the name of its configuration class."""
    values = {key: value for key, value in (_SIZES | values).items() if key != without}
    return Family(name, f"{prefix}{text}Config", f"{prefix}ForCausalLM", values)


_GEMMA4 = {
    "num_hidden_layers": 3, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 8, "final_logit_softcapping": 40.0,
    "tie_word_embeddings": False,  # tied ones repeat a token
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0},
    },
}  # fmt: skip
_DEEPSEEK_EXPERTS = {
    "num_hidden_layers": 3, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1, "tie_word_embeddings": False, "head_dim": 16, "attention_bias": True,
}  # fmt: skip
_QWEN3_5 = {
    "num_hidden_layers": 4, "full_attention_interval": 2, "head_dim": 16, "attention_bias": True,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 20,
}  # fmt: skip
_GRANITE = {
    "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 1.5, "attention_multiplier": 0.6,
    "tie_word_embeddings": False,
}  # fmt: skip

GOLDEN = (
    _family("llama2", "Llama", num_key_value_heads=4, rms_norm_eps=1e-5, tie_word_embeddings=False),
    _family("llama31", "Llama", rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=True),
    _family("mistral", "Mistral", sliding_window=8, head_dim=16, tie_word_embeddings=False),
    _family("qwen2", "Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1, tie_word_embeddings=True),
    _family("qwen3", "Qwen3", head_dim=16, tie_word_embeddings=False),
    _family("gemma", "Gemma", head_dim=16),
    _family("gemma2", "Gemma2", head_dim=16, sliding_window=8, query_pre_attn_scalar=24, attn_logit_softcapping=6.0,
            final_logit_softcapping=12.0),
    _family("gemma3", "Gemma3", "Text", head_dim=16, sliding_window=8, query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                             "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    _family("qwen3_moe", "Qwen3Moe", head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12,
            norm_topk_prob=True, tie_word_embeddings=False),
    _family("mixtral", "Mixtral", intermediate_size=16, num_local_experts=4, num_experts_per_tok=2,
            tie_word_embeddings=False),
    _family("gpt_oss", "GptOss", head_dim=16, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2,
            sliding_window=8, rope_parameters=YARN | {"truncate": False}, tie_word_embeddings=False),
    _family("glm", "Glm", head_dim=16, tie_word_embeddings=False),
    _family("glm4", "Glm4", head_dim=16, tie_word_embeddings=False),
    # Every prompt exceeds the original context; otherwise transformers would switch factors during generation.
    _family("phi3", "Phi3", partial_rotary_factor=0.75, original_max_position_embeddings=4, tie_word_embeddings=False,
            sliding_window=24, rope_parameters={"rope_type": "longrope", "rope_theta": 500.0,
                                                "short_factor": [1.0] * 3, "long_factor": [1.5, 2.0, 4.0]}),
    _family("olmo2", "Olmo2", tie_word_embeddings=False),
    _family("olmo3", "Olmo3", sliding_window=8, layer_types=["sliding_attention", "full_attention"],
            tie_word_embeddings=False),
    _family("smollm3", "SmolLM3", no_rope_layers=[1, 0], rope_parameters=YARN),
    _family("granite", "Granite", **_GRANITE),
    _family("ministral", "Ministral", head_dim=16, sliding_window=8,
            layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=False),
    _family("seed_oss", "SeedOss", head_dim=16, tie_word_embeddings=False),
    _family("ministral3", "Ministral3", head_dim=16, sliding_window=24, tie_word_embeddings=False,
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.2}),
    _family("exaone4", "Exaone4", sliding_window=8, sliding_window_pattern=2, tie_word_embeddings=False),
    _family("ernie4_5", "Ernie4_5", head_dim=16, use_bias=True),
    _family("hunyuan_v1_dense", "HunYuanDenseV1", head_dim=16, attention_bias=True, tie_word_embeddings=False,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0}),
    _family("arcee", "Arcee", mlp_bias=True, attention_bias=True, tie_word_embeddings=False),
    _family("granite_swa", "GraniteSWA", sliding_window=8, num_hidden_layers=3, layer_rope_theta=[0, 100.0, 10000.0],
            layer_types=["full_attention", "sliding_attention", "sliding_attention"], **_GRANITE),
    _family("gemma4", "Gemma4", "Text", **_GEMMA4),
    _family("gemma4_experts", "Gemma4", "Text", enable_moe_block=True, num_experts=8, top_k_experts=3,
            moe_intermediate_size=16, **_GEMMA4),
    _family("glm4_moe", "Glm4Moe", use_qk_norm=True, **_DEEPSEEK_EXPERTS),
    _family("dots1", "Dots1", norm_topk_prob=True, sliding_window=8, max_window_layers=2, **_DEEPSEEK_EXPERTS),
    _family("minimax_m2", "MiniMaxM2", head_dim=16, intermediate_size=16, num_local_experts=8, num_experts_per_tok=3,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}),
    _family("qwen3_5", "Qwen3_5", "Text", **_QWEN3_5),
    _family("qwen3_5_moe", "Qwen3_5Moe", "Text", "intermediate_size", **_QWEN3_5 | _EXPERTS),
    _family("qwen3_next", "Qwen3Next", mlp_only_layers=[1], **_QWEN3_5 | _EXPERTS),
    _family("lfm2", "Lfm2", num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "full_attention"],
            conv_bias=True, block_multiple_of=16, block_ffn_dim_multiplier=1.1, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
)  # fmt: skip
BY_NAME = {family.name: family for family in GOLDEN}
LLAMA31 = BY_NAME["llama31"]

# Changed values of a family by the name of the variant.
_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama2": {
        "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        "yarn": {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}},
        "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
        "biases": {"attention_bias": True, "mlp_bias": True},
    },
    "mistral": {"full": {"sliding_window": None}, "tied": {"tie_word_embeddings": True}},
    "qwen2": {
        "full": {"use_sliding_window": False},
        "layer-types": {"layer_types": ["sliding_attention", "full_attention"]},
    },
    "qwen3": {
        "biases-window": {
            "attention_bias": True, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
        },
    },
    "gemma2": {"biases": {"attention_bias": True, "sliding_window": 3}},
    "qwen3_moe": {
        "dense-layer": {"norm_topk_prob": False, "mlp_only_layers": [0], "attention_bias": True},
        "window": {"use_sliding_window": True, "sliding_window": 8, "decoder_sparse_step": 2},
    },
    "mixtral": {"window": {"sliding_window": 8}},
    "gpt_oss": {"all-experts": {"num_experts_per_tok": 4}},
    "phi3": {"short": {"original_max_position_embeddings": 128, "sliding_window": None}},
    "olmo2": {"biases": {"attention_bias": True}},
    "seed_oss": {"biases": {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}},
    "smollm3": {"window": {"use_sliding_window": True, "sliding_window": 8}},
    "ministral3": {"full": {"sliding_window": None}},
    "exaone4": {"full": {"sliding_window": None, "layer_types": ["full_attention"] * 2}},
    "hunyuan_v1_dense": {"default": {"rope_parameters": None, "attention_bias": False}},
    "granite_swa": {"equal-bases": {"layer_rope_theta": None}},
    "gemma4": {
        "tied": {"tie_word_embeddings": True},
        "two-projections": {"attention_k_eq_v": False, "attention_bias": True},
    },
    "glm4_moe": {
        "defaults": {
            "use_qk_norm": False, "attention_bias": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
        },
    },
    "dots1": {"defaults": {"norm_topk_prob": False, "sliding_window": None, "attention_bias": False}},
    "minimax_m2": {"rotary-dim": {"rotary_dim": 4, "rope_parameters": None}},
    "qwen3_5": {
        "recurrent-last": {
            "attention_bias": False, "tie_word_embeddings": True, "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2, "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    },
    "lfm2": {
        "convolution-last": {
            "conv_bias": False, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True,
            "num_hidden_layers": 3, "layer_types": ["full_attention", "conv", "conv"],
        },
    },
}  # fmt: skip
LIVE = (
    *GOLDEN,
    *(BY_NAME[name].but(*variant) for name, variants in _VARIANTS.items() for variant in variants.items()),
    _family("gemma4_unified", "Gemma4Unified", "Text", "hidden_size_per_layer_input", **_GEMMA4),
)


def write(family: Family, directory: pathlib.Path, seed: int = 0, bfloat16: bool = False):
    """Writes a random checkpoint with `save_pretrained`; returns the transformers model in float32.

    Weights are scaled so that attention is peaked and logits have a standard deviation over 1: with initial weights of
    .02, a wrong mask or rotation would be below any tolerance. With `bfloat16` they are rounded and stored as such.
    """
    import torch
    import transformers

    config = getattr(transformers, family.config_class)(**family.values)
    # The only implementation with logit caps and sinks; the others omit them silently.
    config._attn_implementation = "eager"
    model = getattr(transformers, family.model_class)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                values = 0.5 * noise if name.endswith("bias") else 1 + 0.3 * noise
                if name.endswith("A_log"):  # states that forget slowly
                    values = noise - 2
                elif family.name.startswith(_HYBRIDS) and name.endswith("norm.weight") and "linear_attn" not in name:
                    values = 0.3 * noise  # the weight is 1 + w
            else:
                gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                is_convolution = "conv1d" in name or "conv.conv" in name
                values = gain * noise / (parameter.shape[2] if is_convolution else parameter.shape[1]) ** 0.5
                if "embed_tokens" in name or "lm_head" in name:
                    values = 2 * values
            parameter.copy_(values.to(torch.bfloat16).float() if bfloat16 else values)
        for name, buffer in model.named_buffers():
            if name.endswith(("layer_scalar", "e_score_correction_bias")):
                values = torch.rand(buffer.shape, generator=generator)
                buffer.copy_((0.5 + values).to(torch.bfloat16).float() if bfloat16 else 0.5 + values)
    # A copy: casting the model itself would also round its rotary frequencies.
    (copy.deepcopy(model).bfloat16() if bfloat16 else model).save_pretrained(directory)
    return model


def hf_logits(model, tokens):
    """Logits [B, T, V] float32 of a transformers model for tokens [B, T], as numpy."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


@pytest.fixture(params=LIVE, ids=lambda family: family.name)
def hf_checkpoint(request, tmp_path):
    """(directory, transformers model in float32) of one family, written by transformers."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return tmp_path, write(request.param, tmp_path)
