"""Gemma 1 to 3, whose norms have the weight 1 + w."""

from typing import Any

from kvjax_models.families.config_values import ConfigValues
from kvjax_models.families.family import ATTENTION_BIAS, SANDWICH_NORMS, Family, Gguf, every_nth_full

_DEFAULTS = {
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
_SUPPORTED = {"hidden_act": ("gelu", "gelu_pytorch_tanh")}  # both mean the second one
_GGUF_VALUES = {"hidden_activation": "gelu_pytorch_tanh"}


def _scales(values: ConfigValues) -> dict[str, Any]:
    """Returns the scales of embeddings and attention logits."""
    fields: dict[str, Any] = {"scales.embedding": values.integer("hidden_size") ** 0.5}
    if values.get("query_pre_attn_scalar") is not None:
        scalar = values.number("query_pre_attn_scalar")
        fields["attention.scale"] = None if scalar == values.integer("head_dim") else scalar**-0.5
    return fields


def _every_nth_full(values: ConfigValues) -> list[str]:
    return every_nth_full(values.integer("sliding_window_pattern"))(values)


GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    defaults=_DEFAULTS | {"num_key_value_heads": 16},
    fields={"norms.offset": 1.0},
    keys=ATTENTION_BIAS,
    more_fields=_scales,
    supported=_SUPPORTED,
    gguf=Gguf("gemma", values=_GGUF_VALUES),
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    defaults=_DEFAULTS
    | {
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    fields={"norms.offset": 1.0, "norms.position": "sandwich"},
    keys=ATTENTION_BIAS
    | {"attn_logit_softcapping": "attention.logit_cap", "final_logit_softcapping": "scales.logit_cap"},
    more_fields=_scales,
    supported=_SUPPORTED,
    layer_types=every_nth_full(2),
    reads_layer_types=True,
    modules=SANDWICH_NORMS,
    gguf=Gguf("gemma2", values=_GGUF_VALUES | {"sliding_window": 4096}),  # the first converters wrote no window
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    defaults=_DEFAULTS
    | {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
    fields={"norms.offset": 1.0, "norms.position": "sandwich", "attention.query_key_norm": True},
    keys=ATTENTION_BIAS | {"final_logit_softcapping": "scales.logit_cap"},
    more_fields=_scales,
    supported=_SUPPORTED,
    layer_types=_every_nth_full,
    reads_layer_types=True,
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
    modules=SANDWICH_NORMS,
    gguf=Gguf("gemma3", values=_GGUF_VALUES),
)
