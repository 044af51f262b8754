"""Rotary embedding settings of a config.json: from its values to `LlamaConfig` fields.

transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 writes `rope_parameters`; both are read.
"""

import math
from collections.abc import Mapping
from typing import Any

from kvjax_models.families import FULL_ATTENTION, SLIDING_ATTENTION, ConfigValues, Family
from kvjax_models.formats import config_keys
from kvjax_models.model.rotary import KINDS, RopeScaling

_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


def parse_rope(family: Family, values: ConfigValues) -> dict[str, Any]:
    """Returns the rotary embedding fields of `LlamaConfig`.

    Args:
        values: values of its config.json.

    Raises:
        ValueError: if the settings are invalid or not supported.
    """
    rope: Mapping[str, Any] = values.rope
    sliding_rope: Mapping[str, Any] | None = None
    if rope and all(isinstance(value, Mapping) for value in rope.values()):
        if not set(rope) <= {FULL_ATTENTION, SLIDING_ATTENTION}:
            raise ValueError(f"rope_parameters={dict(rope)!r} is not supported: one rotary embedding per layer type")
        rope, sliding_rope = rope.get(FULL_ATTENTION) or {}, rope.get(SLIDING_ATTENTION)
    elif any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"rope_parameters={dict(rope)!r} must be one rotary embedding, or one per layer type")
    rotary_dim = _rotary_dim(family, rope, values)
    theta = ConfigValues({"rope_theta": 10000.0} | values | _if_set(rope, "rope_theta")).number("rope_theta")
    scaling = _scaling(family, ConfigValues(rope), values, rotary_dim)
    window_theta = None
    if sliding_rope is not None or "rope_local_base_freq" in family.defaults:
        local = ConfigValues({"rope_theta": values.get("rope_local_base_freq", theta), **(sliding_rope or {})})
        _rotary_dim(family, local, values)  # refuses a partial rotation
        if _scaling(family, local, values, rotary_dim) is not None:
            raise ValueError(
                f"rope_parameters={sliding_rope!r} is not supported for sliding attention; supported: 'default'"
            )
        window_theta = local.number("rope_theta")
    elif not family.scaled_windows and scaling is not None:
        window_theta = theta
    return {
        "rope.theta": theta,
        "rope.scaling": scaling,
        "rope.rotary_dim": None if rotary_dim == values.integer("head_dim") else rotary_dim,
        "rope.window_theta": window_theta,
    }


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """Returns YaRN's factor of rotated queries and keys, which sharpens attention in longer contexts.

    Args:
        factor: how many times the original context the new one has.
        scale: strength of the sharpening.
    """
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _scaling(family: Family, rope: ConfigValues, values: ConfigValues, rotary_dim: int) -> RopeScaling | None:
    """Returns the scaling of a rotary embedding; None if it is not scaled.

    Args:
        rope: values of the rotary embedding.
        rotary_dim: rotated dimensions of a head.

    Raises:
        ValueError: if the scaling is invalid or not supported.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = family.rope_types.get(kind, kind) if isinstance(kind, str) else kind
    if unsupported := config_keys.unsupported_rope_keys(family, rope):
        raise ValueError(f"the rotary embedding's {', '.join(unsupported)} is not supported")
    if kind is None or kind == "default":
        return None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"rope_type={kind!r} is not supported; supported: default, {', '.join(KINDS)}")
    if missing := [key for key in _REQUIRED.get(kind, ()) if rope.get(key) is None]:
        raise ValueError(f"rope_type={kind!r} requires {', '.join(missing)}")
    max_length = values.integer("max_position_embeddings")
    if kind == "linear":
        return RopeScaling(kind, rope.number("factor"))
    if kind == "dynamic":
        return RopeScaling(kind, rope.number("factor"), original_length=max_length)
    if kind == "proportional":
        return _proportional(rope)
    original = _original_length(rope, values)
    if kind == "llama3":
        return _llama3(rope, original)
    factor = rope.optional_number("factor") or max_length / original
    if kind == "yarn":
        return _yarn(rope, factor, original)
    return _longrope(rope, factor, original, rotary_dim // 2)


def _proportional(rope: ConfigValues) -> RopeScaling:
    share = rope.optional_number("partial_rotary_factor") or 1.0
    if share > 1:
        raise ValueError(f"partial_rotary_factor={share} must be at most 1")
    return RopeScaling("proportional", rope.optional_number("factor") or 1.0, rotated_share=share)


def _llama3(rope: ConfigValues, original: int) -> RopeScaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not low < high:
        raise ValueError(f"low_freq_factor={low} must be less than high_freq_factor={high}")
    return RopeScaling(
        "llama3",
        rope.number("factor"),
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_length=original,
    )


def _yarn(rope: ConfigValues, factor: float, original: int) -> RopeScaling:
    attention = rope.optional_number("attention_factor")
    if attention is None:
        scale, scale_all = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
        attention = yarn_attention_factor(factor)
        if scale and scale_all:
            attention = yarn_attention_factor(factor, scale) / yarn_attention_factor(factor, scale_all)
    fast, slow = rope.optional_number("beta_fast") or 32.0, rope.optional_number("beta_slow") or 1.0
    if not slow < fast:
        raise ValueError(f"beta_slow={slow} must be less than beta_fast={fast}")
    return RopeScaling(
        "yarn",
        factor,
        original_length=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.get("truncate") is None or rope.boolean("truncate"),
        attention_factor=attention,
    )


def _longrope(rope: ConfigValues, factor: float, original: int, pairs: int) -> RopeScaling:
    attention = rope.optional_number("attention_factor")
    if attention is None:
        if factor > 1 and original < 2:
            raise ValueError(f"original_max_position_embeddings={original} must be at least 2 for rope_type='longrope'")
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        "longrope",
        factor,
        original_length=original,
        attention_factor=attention,
        short_factors=_factors(rope, "short_factor", pairs),
        long_factors=_factors(rope, "long_factor", pairs),
    )


def _factors(rope: ConfigValues, key: str, pairs: int) -> tuple[float, ...]:
    """Returns one factor per rotated pair of dimensions.

    Raises:
        ValueError: if the value is not a list of this length.
    """
    value = rope[key]
    if not isinstance(value, list) or len(value) != pairs:
        actual = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
        raise ValueError(f"{key} must be a list of {pairs} numbers, one per rotated pair of dimensions, got {actual}")
    return tuple(ConfigValues({key: factor}).number(key) for factor in value)


def _original_length(rope: ConfigValues, values: ConfigValues) -> int:
    """Returns the context length of the first training phase; the model's own value (Phi-3) has precedence."""
    key = "original_max_position_embeddings"
    for source in (values, rope):
        if source.get(key) is not None:
            return source.integer(key)
    return values.integer("max_position_embeddings")


def _rotary_dim(family: Family, rope: Mapping[str, Any], values: ConfigValues) -> int:
    """Returns the number of rotated dimensions per head.

    Raises:
        ValueError: if the family does not support partial rotation.
    """
    key = "partial_rotary_factor"
    factors, head_dim = ConfigValues(_if_set(values, key) | _if_set(rope, key)), values.integer("head_dim")
    if not factors or rope.get("rope_type") == "proportional":  # which does not rotate some pairs of the whole head
        return head_dim
    factor = factors.number(key)
    if factor > 1 or (factor != 1 and not family.partial_rotary):
        raise ValueError(f"{key}={factors[key]} is not supported for {family.model_type}; supported: 1")
    return int(head_dim * factor)


def _if_set(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the key with its value, or {} if it is null or missing."""
    return {} if values.get(key) is None else {key: values[key]}
