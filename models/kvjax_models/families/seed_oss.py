"""Seed-OSS, a Llama with biases of queries, keys and values."""

from kvjax_models.families.family import Family, Gguf

SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    defaults={
        "max_position_embeddings": 524288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
    },
    keys={
        "attention_bias": "attention.qkv_bias",
        "attention_out_bias": "attention.output_bias",
        "mlp_bias": "mlp_bias",
    },
    other_keys=("residual_dropout",),
    gguf=Gguf("seed_oss", modules={"post_attention_norm": ("mlp_norm",)}),
)
