"""The supported Hugging Face model families and how their config.json maps to `LlamaConfig`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"  # entries of `layer_types`


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        architecture: the supported class in `architectures`.
        defaults: values that transformers assumes for missing keys.
        fields: fields of `LlamaConfig` that all models of the family share.
        integers: keys of integers and the fields they set.
        numbers: keys of numbers and the fields they set.
        optional_numbers: keys of numbers that may be null and the fields they set.
        booleans: keys of booleans and the fields they set.
        attention_bias: the projections that get a bias if the key `attention_bias` is true.
        sliding: the layers with a sliding window: none; all if `sliding_window` is a number; those in `layer_types`;
            or, if `use_sliding_window` is true, all or the layers from number `max_window_layers` on.
        full_attention_period: if `layer_types` and the key `sliding_window_pattern` are missing, every n-th layer has
            full attention; None: no layer.
        partial_rotary: whether only a part of each head may be rotated.
        aliases: alternative keys and the keys they replace.
        other_keys: keys without a default that are understood, beside those of all families and of the fields above.
    """

    architecture: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    integers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optional_numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    booleans: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attention_bias: Literal["none", "qkv", "all"] = "none"
    sliding: Literal["never", "all", "all_if_enabled", "later_layers_if_enabled", "by_layer_type"] = "never"
    full_attention_period: int | None = None
    partial_rotary: bool = False
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    other_keys: tuple[str, ...] = ()


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
    "partial_rotary": True,
}
_OLMO_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
_OLMO_FIELDS = {"norms": "post", "query_key_norm": True, "joint_query_key_norm": True}

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", {"max_position_embeddings": 2048}, booleans={"mlp_bias": "mlp_bias"}, attention_bias="all"
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        sliding="all",
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        sliding="by_layer_type",
    ),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN_DEFAULTS, {"qkv_bias": True}, sliding="later_layers_if_enabled"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _QWEN_DEFAULTS | {"head_dim": 128},
        {"query_key_norm": True},
        attention_bias="all",
        sliding="later_layers_if_enabled",
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
        integers={
            "num_experts": "experts",
            "num_experts_per_tok": "experts_per_token",
            "moe_intermediate_size": "expert_width",
        },
        booleans={"norm_topk_prob": "normalize_expert_weights"},
        attention_bias="all",
        sliding="all_if_enabled",
        aliases={"num_local_experts": "num_experts"},  # since transformers 5
        other_keys=("decoder_sparse_step", "mlp_only_layers"),
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
        integers={
            "num_local_experts": "experts",
            "num_experts_per_tok": "experts_per_token",
            "intermediate_size": "expert_width",
        },
        sliding="all",
        aliases={"num_experts": "num_local_experts"},  # transformers' other name
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
        integers={
            "num_local_experts": "experts",
            "num_experts_per_tok": "experts_per_token",
            "intermediate_size": "expert_width",
        },
        sliding="by_layer_type",
        full_attention_period=2,
        aliases={"num_experts": "num_local_experts"},
        other_keys=("swiglu_alpha", "swiglu_limit"),
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
        optional_numbers={"attn_logit_softcapping": "attention_logit_cap", "final_logit_softcapping": "logit_cap"},
        attention_bias="all",
        sliding="by_layer_type",
        full_attention_period=2,
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
            "sliding_window_pattern": 6,
        },
        _GEMMA_FIELDS | {"norms": "sandwich", "query_key_norm": True},
        optional_numbers={"final_logit_softcapping": "logit_cap"},
        attention_bias="all",
        sliding="by_layer_type",
        aliases={"_sliding_window_pattern": "sliding_window_pattern"},
    ),
    "glm": Family("GlmForCausalLM", **_GLM),
    "glm4": Family("Glm4ForCausalLM", fields={"norms": "sandwich"}, **_GLM),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        sliding="all",
        partial_rotary=True,
    ),
    "olmo2": Family("Olmo2ForCausalLM", _OLMO_DEFAULTS, _OLMO_FIELDS, attention_bias="all"),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _OLMO_DEFAULTS | {"sliding_window": 4096},
        _OLMO_FIELDS,
        attention_bias="all",
        sliding="by_layer_type",
        full_attention_period=4,
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
        booleans={"mlp_bias": "mlp_bias"},
        attention_bias="all",
        sliding="by_layer_type",
        other_keys=("no_rope_layers",),
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
        booleans={"mlp_bias": "mlp_bias"},
        attention_bias="all",
    ),
}
