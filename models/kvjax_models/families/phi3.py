"""Phi-3 and Phi-4 mini."""

from kvjax_models.families.family import Family, Gguf, sliding_layers

PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    layer_types=sliding_layers,
    partial_rotary=True,
    rope_types={"su": "longrope", "yarn": "longrope"},  # in its first configs
    modules={("attention", "qkv"): "self_attn.qkv_proj", ("mlp", "gate_up"): "mlp.gate_up_proj"},
    gguf=Gguf("phi3"),
)
