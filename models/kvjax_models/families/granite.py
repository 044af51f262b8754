"""Granite, which scales embeddings, residuals and logits."""

from kvjax_models.families.family import ATTENTION_BIAS, Family, Gguf

GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "attention_multiplier": 1.0,
    },
    keys=ATTENTION_BIAS
    | {
        "mlp_bias": "mlp_bias",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_divisor",
        "attention_multiplier": "attention_scale",
    },
    gguf=Gguf("granite", interleaved_rope=True),
)
