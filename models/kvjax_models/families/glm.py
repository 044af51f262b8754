"""GLM-4 and GLM-4 0414, which rotate half of each head in interleaved pairs, and GLM-4.5 and later with experts."""

from typing import Any

from kvjax_models.families import deepseek_experts
from kvjax_models.families.family import EXPERTS, Family, Gguf, Path

_GLM: dict[str, Any] = {
    "defaults": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "keys": {"attention_bias": "attention.qkv_bias"},
    "partial_rotary": True,
    "interleaved_rope": True,
}
_MODULES: dict[Path, str | tuple[str, ...]] = {("mlp", "gate_up"): "mlp.gate_up_proj"}

GLM = Family("glm", "GlmForCausalLM", modules=_MODULES, **_GLM)
GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    fields={"norms.position": "sandwich"},
    modules={
        **_MODULES,
        ("after_attention_norm",): "post_self_attn_layernorm",
        ("after_mlp_norm",): "post_mlp_layernorm",
    },
    gguf=Gguf("glm4"),
    **_GLM,
)
GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    defaults={
        **deepseek_experts.DEFAULTS,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    keys={**deepseek_experts.KEYS, "attention_bias": "attention.qkv_bias", "use_qk_norm": "attention.query_key_norm"},
    more_fields=deepseek_experts.expert_fields,
    supported=deepseek_experts.SUPPORTED,
    partial_rotary=True,
    aliases=deepseek_experts.ALIASES,
    other_keys=(*deepseek_experts.OTHER_KEYS, "num_nextn_predict_layers", "num_mtp_layers"),
    modules=EXPERTS,
    predicts_more_tokens=True,
    gguf=Gguf(
        "glm4moe",
        modules={"post_attention_norm": ("mlp_norm",)},
        values={"norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
)
