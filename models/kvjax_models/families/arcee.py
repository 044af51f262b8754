"""Arcee, whose MLPs have a squared ReLU and no gate."""

from kvjax_models.families.family import ATTENTION_BIAS, Family, Gguf

ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    activations={"relu2": "squared_relu"},
    keys=ATTENTION_BIAS | {"mlp_bias": "mlp_bias"},
    modules={("mlp", "gate_up"): "mlp.up_proj"},
    gguf=Gguf("arcee", interleaved_rope=True),
)
