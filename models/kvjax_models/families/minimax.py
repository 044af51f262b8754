"""MiniMax-M2, with sigmoid routing, and norms of queries and keys over all heads."""

from typing import Any

from kvjax_models.families.config_values import ConfigValues
from kvjax_models.families.family import Family, Gguf
from kvjax_models.families.mistral import MIXTRAL

# Keys of MiniMax-Text-01, whose attention is linear in some layers, and of layers that predict several tokens.
_UNUSED = (
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_beta",
    "mlp_intermediate_size",
    "shared_moe_mode",
    "mtp_transformer_layers",
    "num_mtp_modules",
    "use_mtp",
)


def _rotary_dim(values: ConfigValues) -> dict[str, Any]:
    """Returns the number of rotated dimensions per head if the key `rotary_dim` gives it.

    Raises:
        ValueError: if a layer has linear attention or the number is invalid.
    """
    if any(kind != 1 for kind in values.per_layer("attn_type_list") or []):
        raise ValueError(f"not supported: attn_type_list={values['attn_type_list']}; supported: 1 in every layer")
    return {} if values.get("rotary_dim") is None else {"rope.rotary_dim": values.integer("rotary_dim")}


MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    defaults={
        "max_position_embeddings": 196608,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5e6,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
    },
    fields={
        "attention.query_key_norm": True,
        "attention.joint_query_key_norm": True,
        "experts.scoring_func": "sigmoid",
    },
    keys=MIXTRAL.keys,
    more_fields=_rotary_dim,
    supported={
        "scoring_func": ("sigmoid",),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (True,),
        "shared_intermediate_size": (0,),
    },
    partial_rotary=True,
    aliases=MIXTRAL.aliases,
    other_keys=(*_UNUSED, "attn_type_list", "rotary_dim"),
    modules={
        **MIXTRAL.modules,
        ("mlp", "router", "selection_bias"): "block_sparse_moe.e_score_correction_bias",
    },
    gguf=Gguf("minimax-m2"),
)
