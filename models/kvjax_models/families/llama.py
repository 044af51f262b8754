"""Llama 2 and 3, and models with its architecture."""

from kvjax_models.families.family import ATTENTION_BIAS, Family, Gguf

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    defaults={"max_position_embeddings": 2048},
    keys=ATTENTION_BIAS | {"mlp_bias": "mlp_bias"},
    gguf=Gguf("llama", interleaved_rope=True),
)
