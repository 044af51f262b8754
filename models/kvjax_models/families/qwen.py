"""Qwen2 and 2.5, Qwen3 and Qwen3-MoE."""

from typing import Any

from kvjax_models.families.config_values import ConfigValues
from kvjax_models.families.family import (
    ATTENTION_BIAS,
    EXPERT_KEYS,
    EXPERTS,
    Family,
    Gguf,
    full_layers,
    later_layers,
    sliding_layers,
)

_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _later_layers(values: ConfigValues) -> list[str]:
    """Returns a sliding window for the later layers, if windows are enabled."""
    if not values.boolean("use_sliding_window"):
        values["sliding_window"] = None  # as transformers, also for `layer_types`
    return later_layers(values)


def _all_layers(values: ConfigValues) -> list[str]:
    """Returns a sliding window for all layers, if windows are enabled."""
    return sliding_layers(values) if values.boolean("use_sliding_window") else full_layers(values)


def dense_layers(values: ConfigValues) -> dict[str, Any]:
    """Returns the layers that have a single MLP.

    Raises:
        ValueError: if `mlp_only_layers` is invalid.
    """
    layers, dense = values.integer("num_hidden_layers"), values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) and 0 <= i < layers for i in dense):
        raise ValueError(f"mlp_only_layers={dense!r} must be a list of layer numbers")
    period = values.integer("decoder_sparse_step")
    return {"experts.dense_layers": tuple(i for i in range(layers) if i in dense or (i + 1) % period)}


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    defaults=_DEFAULTS,
    fields={"attention.qkv_bias": True},
    layer_types=_later_layers,
    reads_layer_types=True,
    other_keys=("use_sliding_window",),
    gguf=Gguf("qwen2"),
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    defaults=_DEFAULTS | {"head_dim": 128},
    fields={"attention.query_key_norm": True},
    keys=ATTENTION_BIAS,
    layer_types=_later_layers,
    reads_layer_types=True,
    other_keys=("use_sliding_window",),
    gguf=Gguf("qwen3"),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "decoder_sparse_step": 1,
    },
    fields={"attention.query_key_norm": True},
    keys=ATTENTION_BIAS | EXPERT_KEYS | {"norm_topk_prob": "experts.normalize_weights"},
    more_fields=dense_layers,
    layer_types=_all_layers,
    aliases={"num_local_experts": "num_experts"},  # since transformers 5
    other_keys=("mlp_only_layers", "use_sliding_window"),
    modules=EXPERTS,
    gguf=Gguf("qwen3moe", values={"norm_topk_prob": True}),
)
