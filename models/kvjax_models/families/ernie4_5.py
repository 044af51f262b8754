"""ERNIE 4.5, a Llama that rotates interleaved pairs."""

from kvjax_models.families.family import Family, Gguf

ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    keys={"use_bias": ("attention.qkv_bias", "attention.output_bias", "mlp_bias")},
    interleaved_rope=True,
    gguf=Gguf("ernie4_5"),
)
