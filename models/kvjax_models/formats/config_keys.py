"""Keys of a model's configuration that are understood, that are known to be harmless, and that are refused.

A key that is neither understood nor harmless is refused if its name speaks of the computation, such as of attention or
norms, and its value enables something.

Reference:
    The configuration classes of transformers 5.24, for keys and their neutral values.
"""

import re
from collections.abc import Mapping
from typing import Any

from kvjax_models.families import Family

_UNDERSTOOD = [
    "head_dim", "hidden_act", "hidden_activation", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "max_window_layers", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "original_max_position_embeddings", "partial_rotary_factor", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "vocab_size",
]  # fmt: skip
# Settings of training, of implementations and of outputs, values that no layer of the families reads, and biases, which
# are tensors: superfluous tensors are refused.
_HARMLESS = [
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "_experts_implementation", "_experts_implementation_internal", "_flash_attn_2_enabled", "attention_bias",
    "attention_dropout", "attention_probs_dropout_prob", "attn_dropout", "attn_implementation", "attn_pdrop",
    "experts_implementation", "ignore_keys_at_rope_validation", "layer_norm_eps", "layer_norm_epsilon",
    "layernorm_epsilon", "lm_head_bias", "output_attentions", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "router_z_loss_coef", "use_flash_attention", "use_flash_attention_2",
    "use_flash_attn",
]  # fmt: skip
_ROPE_KEYS = [
    "attention_factor", "beta_fast", "beta_slow", "factor", "finetuned", "high_freq_factor", "long_factor",
    "low_freq_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings", "partial_rotary_factor",
    "rope_theta", "rope_type", "short_factor", "truncate", "type",
]  # fmt: skip
# Values that change nothing, where these are not null, false, 0 and empty.
_NEUTRAL: dict[str, Any] = {
    "causal": True, "embedding_multiplier": 1, "full_attn_mod": 1, "interpolate_factor": 1, "is_causal": True,
    "logit_scale": 1, "logits_scaling": 1, "position_embedding_type": "rope", "residual_multiplier": 1, "rope_ratio": 1,
    "rotary_pct": 1, "use_rope": True, "attn_factor": 1, "extrapolation_factor": 1,
}  # fmt: skip
# Other names of a key; both must have the same value.
_SYNONYMS = {"experts_per_token": "num_experts_per_tok", "sliding_window_size": "sliding_window"}
_COMPUTATION = re.compile(
    "attention|attn|rope|rotary|position|norm|window|sliding|softcap|capping|_cap$|clip|clamp|limit|scal|multiplier|"
    "factor|expert|moe|router|gate|gating|sparse|sink|alibi|causal|bidirectional|layer|head|residual|logit|latent|"
    "nope|ntk|yarn|interpol",
    re.IGNORECASE,
)


def understood_keys(family: Family) -> set[str]:
    """Returns the keys of config.json that determine the `LlamaConfig` of a family."""
    return {*_UNDERSTOOD, *family.defaults, *family.keys, *family.aliases, *family.supported, *family.other_keys}


def unsupported_keys(family: Family, values: Mapping[str, Any]) -> list[str]:
    """Returns the keys that may change the computation in a way that is not supported, with their values.

    Args:
        values: values of its config.json.
    """
    known = {*understood_keys(family), *_HARMLESS}
    known |= {key for key, synonym in _SYNONYMS.items() if values.get(key) == values.get(synonym)}
    return [
        f"{key}={value!r}"
        for key, value in values.items()
        if key not in known and _COMPUTATION.search(key) and not _is_neutral(key, value)
    ]


def unsupported_rope_keys(family: Family, rope: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a rotary embedding that are not supported, with their values.

    Args:
        rope: values of the rotary embedding.
    """
    known = (*_ROPE_KEYS, *family.rope_keys)
    return [f"{key}={value!r}" for key, value in rope.items() if key not in known and not _is_neutral(key, value)]


def _is_neutral(key: str, value: Any) -> bool:
    """Returns whether a value of a key that is not understood changes nothing."""
    return value is None or (value == _NEUTRAL[key] if key in _NEUTRAL else not value)
