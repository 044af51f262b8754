"""Mistral, Ministral and Mixtral."""

from kvjax_models.families.family import Family, Gguf, every_nth_full, sliding_layers

_DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8}

MISTRAL = Family(
    "mistral", "MistralForCausalLM", defaults=_DEFAULTS | {"sliding_window": 4096}, layer_types=sliding_layers
)
MINISTRAL = Family(
    "ministral",
    "MinistralForCausalLM",
    defaults=_DEFAULTS | {"sliding_window": 4096},
    layer_types=every_nth_full(None),
    reads_layer_types=True,
)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    defaults=_DEFAULTS | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
    keys={
        "num_local_experts": "experts.number",
        "num_experts_per_tok": "experts.per_token",
        "intermediate_size": "experts.width",
    },
    layer_types=sliding_layers,
    aliases={"num_experts": "num_local_experts"},  # transformers' other name
    modules={
        ("mlp", "router"): "block_sparse_moe.gate",
        ("experts", "gate"): "block_sparse_moe.experts.{}.w1",
        ("experts", "up"): "block_sparse_moe.experts.{}.w3",
        ("experts", "down"): "block_sparse_moe.experts.{}.w2",
    },
    gguf=Gguf("llama", marker="expert_count", interleaved_rope=True),
)
