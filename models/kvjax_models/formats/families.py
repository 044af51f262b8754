"""What every family of Hugging Face models is, against `LlamaConfig`: a table, read by `configuration`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        architecture: the only one supported.
        defaults: what transformers assumes for keys that a config leaves out.
        fields: of `LlamaConfig`, as all models of the family have them.
        counts, numbers, caps, truths: keys of whole numbers, of numbers, of numbers that may be null, and of yes and
            no, against the fields that they give.
        attention_bias: which projections the key of that name gives a bias.
        slides: which layers have a window: none, all where `sliding_window` is a number, those of `layer_types`, or,
            where `use_sliding_window` says so, all or those after the first `max_window_layers`.
        period: of `layer_types` that are not there, every so-manieth sees everything; None: none does.
        partial: whether the rotary embedding may turn a part of a head only.
        aliases: keys against those that they stand for.
    """

    architecture: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    caps: Mapping[str, str] = dataclasses.field(default_factory=dict)
    truths: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attention_bias: Literal["none", "qkv", "all"] = "none"
    slides: Literal["never", "all", "all if asked", "later if asked", "by type"] = "never"
    period: int | None = None
    partial: bool = False
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)


_GEMMA_FIELDS = {"norm_offset": 1.0, "embedding_scale": None}
_GEMMA_DEFAULTS = {
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
_QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GLM: Mapping[str, Any] = {
    "defaults": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "attention_bias": "qkv",
    "partial": True,
}
_OLMO_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
_OLMO_FIELDS = {"norms": "post", "query_key_norm": True, "joint_query_key_norm": True}

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        {"max_position_embeddings": 2048},
        truths={"mlp_bias": "mlp_bias"},
        attention_bias="all",
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        slides="all",
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        slides="by type",
    ),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN_DEFAULTS, {"qkv_bias": True}, slides="later if asked"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _QWEN_DEFAULTS | {"head_dim": 128},
        {"query_key_norm": True},
        attention_bias="all",
        slides="later if asked",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        {"query_key_norm": True},
        counts={
            "num_experts": "experts",
            "num_experts_per_tok": "experts_per_token",
            "moe_intermediate_size": "expert_width",
        },
        truths={"norm_topk_prob": "normalize_expert_weights"},
        attention_bias="all",
        slides="all if asked",
        aliases={"num_local_experts": "num_experts"},  # since transformers 5
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        counts={
            "num_local_experts": "experts",
            "num_experts_per_tok": "experts_per_token",
            "intermediate_size": "expert_width",
        },
        slides="all",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        {
            "qkv_bias": True,
            "output_bias": True,
            "mlp_bias": True,
            "attention_sinks": True,
            "activation": "clipped_swiglu",
        },
        counts={
            "num_local_experts": "experts",
            "num_experts_per_tok": "experts_per_token",
            "intermediate_size": "expert_width",
        },
        slides="by type",
        period=2,
    ),
    "gemma": Family(
        "GemmaForCausalLM", _GEMMA_DEFAULTS | {"num_key_value_heads": 16}, _GEMMA_FIELDS, attention_bias="all"
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        _GEMMA_FIELDS | {"norms": "sandwich"},
        caps={"attn_logit_softcapping": "attention_logit_cap", "final_logit_softcapping": "logit_cap"},
        attention_bias="all",
        slides="by type",
        period=2,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA_DEFAULTS
        | {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        _GEMMA_FIELDS | {"norms": "sandwich", "query_key_norm": True},
        caps={"final_logit_softcapping": "logit_cap"},
        attention_bias="all",
        slides="by type",
        period=6,
    ),
    "glm": Family("GlmForCausalLM", **_GLM),
    "glm4": Family("Glm4ForCausalLM", fields={"norms": "sandwich"}, **_GLM),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        slides="all",
        partial=True,
    ),
    "olmo2": Family("Olmo2ForCausalLM", _OLMO_DEFAULTS, _OLMO_FIELDS, attention_bias="all"),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _OLMO_DEFAULTS | {"sliding_window": 4096},
        _OLMO_FIELDS,
        attention_bias="all",
        slides="by type",
        period=4,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        truths={"mlp_bias": "mlp_bias"},
        attention_bias="all",
        slides="by type",
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "attention_multiplier": 1.0,
        },
        numbers={
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_divisor",
            "attention_multiplier": "attention_scale",
        },
        truths={"mlp_bias": "mlp_bias"},
        attention_bias="all",
    ),
}
