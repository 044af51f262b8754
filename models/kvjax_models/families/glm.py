"""GLM-4 and GLM-4 0414, which rotate half of each head in interleaved pairs."""

from typing import Any

from kvjax_models.families.family import Family, Gguf, Path

_GLM: dict[str, Any] = {
    "defaults": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "keys": {"attention_bias": "qkv_bias"},
    "partial_rotary": True,
    "interleaved_rope": True,
}
_MODULES: dict[Path, str | tuple[str, ...]] = {("mlp", "gate_up"): "mlp.gate_up_proj"}

GLM = Family("glm", "GlmForCausalLM", modules=_MODULES, **_GLM)
GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    fields={"norms": "sandwich"},
    modules={
        **_MODULES,
        ("after_attention_norm",): "post_self_attn_layernorm",
        ("after_mlp_norm",): "post_mlp_layernorm",
    },
    gguf=Gguf("glm4"),
    **_GLM,
)
