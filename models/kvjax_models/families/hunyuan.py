"""Hunyuan V1 (dense), which normalizes queries and keys after the rotary embedding."""

from typing import Any

from kvjax_models.families.config_values import ConfigValues
from kvjax_models.families.family import ATTENTION_BIAS, Family, Gguf


def _scaled_theta(values: ConfigValues) -> dict[str, Any]:
    """Returns the base of a rotary embedding that a constant `alpha` scales.

    Raises:
        ValueError: if `attention_head_dim` or `alpha` is invalid.
    """
    head_dim = values.integer("head_dim")
    if values.get("attention_head_dim", head_dim) != head_dim:
        raise ValueError(f"attention_head_dim={values['attention_head_dim']!r} must equal head_dim={head_dim}")
    rope = values.rope
    if rope.get("rope_type", rope.get("type")) != "dynamic" or not rope.get("alpha"):
        return {}
    theta = ConfigValues({"rope_theta": 10000.0} | values | rope).number("rope_theta")
    return {"rope.theta": theta * rope.number("alpha") ** (head_dim / (head_dim - 2)), "rope.scaling": None}


HUNYUAN_V1_DENSE = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    fields={"attention.query_key_norm": True, "attention.query_key_norm_after_rope": True},
    keys=ATTENTION_BIAS,
    more_fields=_scaled_theta,
    supported={"use_qk_norm": (True,), "use_rotary_pos_emb": (True,), "use_cla": (False,), "norm_type": ("rms",)},
    rope_keys=("alpha",),
    other_keys=("attention_head_dim", "cla_share_factor", "add_classification_head"),
    modules={
        ("attention", "query_norm"): "self_attn.query_layernorm",
        ("attention", "key_norm"): "self_attn.key_layernorm",
    },
    gguf=Gguf("hunyuan-dense"),
)
