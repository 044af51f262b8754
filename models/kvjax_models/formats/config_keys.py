"""Keys of config.json that are understood, that are known to be harmless, and that are refused.

A key that is neither understood nor harmless is refused if its name speaks of the computation, such as of attention or
norms, and its value enables something.

Reference:
    The configuration classes of transformers 5.24, for keys and their neutral values.
"""

import re

from kvjax_models.formats.config_values import Values
from kvjax_models.formats.families import Family

_UNDERSTOOD = {
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
    "vocab_size",
}
# Settings of training, of implementations and of outputs, and values that no layer of the families reads.
_HARMLESS = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_experts_implementation",
    "_experts_implementation_internal",
    "_flash_attn_2_enabled",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_dropout",
    "attn_implementation",
    "attn_pdrop",
    "experts_implementation",
    "ignore_keys_at_rope_validation",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "layernorm_epsilon",
    "lm_head_bias",  # a bias is a tensor; superfluous tensors are refused
    "output_attentions",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "router_z_loss_coef",
    "use_flash_attention",
    "use_flash_attention_2",
    "use_flash_attn",
}
# Values that change nothing, beside null. Other keys change nothing if they are null, false, 0 or empty.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "causal": (True,),
    "embedding_multiplier": (1,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "is_causal": (True,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "position_embedding_type": ("rope",),
    "residual_multiplier": (1,),
    "rope_ratio": (1,),
    "rotary_pct": (1,),
    "use_rope": (True,),
}
# Other names of a key; both must have the same value.
_SYNONYMS = {"experts_per_token": "num_experts_per_tok", "sliding_window_size": "sliding_window"}
_COMPUTATION = re.compile(
    "attention|attn|rope|rotary|position|norm|window|sliding|softcap|capping|_cap$|clip|clamp|limit|scal|multiplier|"
    "factor|expert|moe|router|gate|gating|sparse|sink|alibi|causal|bidirectional|layer|head|residual|logit|latent|"
    "nope|ntk|yarn|interpol",
    re.IGNORECASE,
)
_ROPE_KEYS = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",  # says how the model was trained
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "truncate",
    "type",
}
_NEUTRAL_ROPE: dict[str, tuple[object, ...]] = {"attn_factor": (1,), "extrapolation_factor": (1,)}


def understood_keys(family: Family) -> set[str]:
    """Returns the keys of config.json that determine the `LlamaConfig` of a family."""
    fields = (family.integers, family.numbers, family.optional_numbers, family.booleans)
    return _UNDERSTOOD.union(family.defaults, family.aliases, family.other_keys, *fields)


def unsupported_keys(family: Family, values: Values) -> list[str]:
    """Returns the keys that may change the computation in a way that is not supported, with their values.

    Args:
        family: family of the model.
        values: values of its config.json.
    """
    understood = understood_keys(family)
    return [
        f"{key}={value!r}"
        for key, value in values.items()
        if key not in understood
        and key not in _HARMLESS
        and _COMPUTATION.search(key)
        and not (key in _SYNONYMS and value == values.get(_SYNONYMS[key]))
        and not is_neutral(value, _NEUTRAL.get(key))
    ]


def unsupported_rope_keys(rope: Values) -> list[str]:
    """Returns the keys of a rotary embedding that are not supported, with their values.

    Args:
        rope: values of the rotary embedding.
    """
    return [
        f"{key}={value!r}"
        for key, value in rope.items()
        if key not in _ROPE_KEYS and not is_neutral(value, _NEUTRAL_ROPE.get(key))
    ]


def is_neutral(value: object, neutral: tuple[object, ...] | None = None) -> bool:
    """Returns whether a value of a key that is not understood changes nothing.

    Args:
        value: the value.
        neutral: values that change nothing, beside None; by default false, 0 and empty values.
    """
    return value is None or (not value if neutral is None else value in neutral)
