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
        "embedding_multiplier": "scales.embedding",
        "residual_multiplier": "scales.residual",
        "logits_scaling": "scales.logit_divisor",
        "attention_multiplier": "attention.scale",
    },
    gguf=Gguf("granite", interleaved_rope=True),
)
