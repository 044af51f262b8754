"""gpt-oss."""

from kvjax_models.families.family import Family, Gguf, every_nth_full
from kvjax_models.families.mistral import MIXTRAL

GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    defaults={
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
    fields={
        "attention.qkv_bias": True,
        "attention.output_bias": True,
        "mlp_bias": True,
        "attention.sinks": True,
        "activation": "clipped_swiglu",
    },
    keys=MIXTRAL.keys,
    supported={"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
    layer_types=every_nth_full(2),
    reads_layer_types=True,
    aliases=MIXTRAL.aliases,
    other_keys=("attention_bias",),
    quantization="mxfp4",
    modules={
        ("mlp", "router"): "mlp.router",
        # All experts in one tensor, in which the columns of gate and up alternate.
        ("experts", "gate"): "mlp.experts.gate_up_proj",
        ("experts", "up"): "mlp.experts.gate_up_proj",
        ("experts", "down"): "mlp.experts.down_proj",
    },
    gguf=Gguf("gpt-oss", modules={"post_attention_norm": ("mlp_norm",)}),
)
