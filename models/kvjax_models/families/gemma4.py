"""Gemma 4 (text; 12B is a model type of its own) without per-layer embeddings and shared KV layers.

Layers without a sliding window have their own head dimension and number of KV heads, and may have one projection for
keys and values. In 26B-A4B, every layer has experts in parallel to its MLP.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax_models.families.config_values import FULL_ATTENTION, ConfigValues
from kvjax_models.families.family import ATTENTION_BIAS, EXPERTS, SANDWICH_NORMS, Family, every_nth_full


def _layer_types(values: ConfigValues) -> list[str]:
    """Returns full attention for every sixth and the last layer; the last one has it even if `layer_types` differs."""
    listed = values.per_layer("layer_types")
    values["layer_types"] = [*(every_nth_full(6)(values) if listed is None else listed)[:-1], FULL_ATTENTION]
    return values["layer_types"]


def _head_sizes(values: ConfigValues) -> dict[str, Any]:
    """Returns the scale of embeddings, the sizes of heads of both kinds of layers, and the fields of experts.

    Raises:
        ValueError: if a size is invalid.
    """
    sizes = ConfigValues({"num_key_value_heads": values["num_key_value_heads"], "head_dim": values["global_head_dim"]})
    if values.boolean("attention_k_eq_v") and values.get("num_global_key_value_heads") is not None:
        sizes["num_key_value_heads"] = values["num_global_key_value_heads"]
    if (listed := values.get("per_layer_config")) is not None:  # transformers 5.24 writes these instead
        sizes |= _listed_sizes(values, listed)
    return {
        **_expert_fields(values),
        "scales.embedding": values.integer("hidden_size") ** 0.5,
        "attention.window_kv_heads": values.integer("num_key_value_heads"),
        "attention.window_head_dim": values.integer("head_dim"),
        "kv_heads": sizes.integer("num_key_value_heads"),
        "head_dim": sizes.integer("head_dim"),
    }


def _expert_fields(values: ConfigValues) -> dict[str, Any]:
    """Returns the fields of experts, if the model has them; otherwise their keys may be null."""
    if not values.boolean("enable_moe_block"):
        return {}
    return {
        "experts.parallel": True,
        "experts.number": values.integer("num_experts"),
        "experts.per_token": values.integer("top_k_experts"),
        "experts.width": values.integer("moe_intermediate_size"),
    }


def _listed_sizes(values: ConfigValues, listed: Any) -> dict[str, Any]:
    """Returns the sizes of layers with full attention from the sizes by the number of the layer.

    Args:
        listed: value of `per_layer_config`.

    Raises:
        ValueError: if these layers differ, or others are listed.
    """
    full = {str(layer) for layer, kind in enumerate(values["layer_types"]) if kind == FULL_ATTENTION}
    sizes = list(listed.values()) if isinstance(listed, Mapping) else []
    is_valid = bool(sizes) and {str(key) for key in listed} == full and all(size == sizes[0] for size in sizes)
    if not is_valid or not isinstance(sizes[0], Mapping) or not {*sizes[0]} <= {"head_dim", "num_key_value_heads"}:
        raise ValueError(
            f"per_layer_config={listed!r} must give equal sizes of heads for layers {', '.join(sorted(full))}"
        )
    return dict(sizes[0])


GEMMA4 = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
    fields={
        "norms.position": "sandwich",
        "attention.query_key_norm": True,
        "attention.value_norm": True,
        "scales.layer": True,
        "attention.scale": 1.0,
    },
    keys={
        **ATTENTION_BIAS,
        "final_logit_softcapping": "scales.logit_cap",
        "attention_k_eq_v": "attention.keys_as_values",
    },
    more_fields=_head_sizes,
    supported={
        "hidden_size_per_layer_input": (0,),
        "num_kv_shared_layers": (0,),
        "use_bidirectional_attention": (None, "vision"),  # of images only
    },
    layer_types=_layer_types,
    reads_layer_types=True,
    other_keys=(
        "num_global_key_value_heads",
        "per_layer_config",
        "vocab_size_per_layer_input",
        "use_double_wide_mlp",
        "enable_moe_block",
        "num_experts",
        "top_k_experts",
        "moe_intermediate_size",
    ),
    modules={
        **SANDWICH_NORMS,
        ("parallel_experts", "after_mlp_norm"): "post_feedforward_layernorm_1",
        ("parallel_experts", "norm"): "pre_feedforward_layernorm_2",
        ("parallel_experts", "after_norm"): "post_feedforward_layernorm_2",
        ("parallel_experts", "router_norm", "scale"): "router.scale",
        ("parallel_experts", "experts", "router"): "router.proj",
        ("parallel_experts", "experts", "router", "expert_scale"): "router.per_expert_scale",
        **{path: name.removeprefix("mlp.") for path, name in EXPERTS.items()},
    },
)
GEMMA4_UNIFIED = dataclasses.replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    defaults={
        **GEMMA4.defaults,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
)
