"""Converts the `config.json` of a Hugging Face model to a `LlamaConfig`.

Invalid values and features that the decoder does not support are refused with the name of the key and never
approximated.
"""

from collections.abc import Mapping
from typing import Any

from kvjax.spec import MAX_TOKENS
from kvjax_models.formats import config_keys, config_values, rope_config
from kvjax_models.formats.config_values import Values, if_set
from kvjax_models.formats.families import FAMILIES, FULL_ATTENTION, SLIDING_ATTENTION, Family
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.rotary import RopeScaling

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_GELUS = ("gelu", "gelu_pytorch_tanh")  # Gemma's hidden_act, which means the second one in both cases
_GPT_OSS_SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def text_config(values: Values) -> dict[str, Any]:
    """Returns the values of the text decoder; for a multimodal Gemma 3, the values of its `text_config`.

    Raises:
        ValueError: if `text_config` is missing.
    """
    if values.get("model_type") != "gemma3":
        return dict(values)
    inner = values.get("text_config")
    if not isinstance(inner, Mapping):
        raise ValueError(f"text_config={inner!r} must be an object with the values of the text decoder")
    tokens = {key: values[key] for key in ("bos_token_id", "eos_token_id") if values.get(key) is not None}
    return {**inner, **tokens, "model_type": "gemma3_text", "architectures": None}


def parse_config(values: Values) -> LlamaConfig:
    """Converts the values of a config.json.

    Qwen's `max_window_layers` counts the first layers, which have full attention.

    Args:
        values: content of the file.

    Returns:
        The configuration.

    Raises:
        ValueError: if the architecture or a feature is not supported, or a value is missing or invalid.

    Reference:
        The configuration classes of transformers 5.2.
    """
    values = text_config(values)
    family = _family(values)
    aliased = {family.aliases[key]: value for key, value in values.items() if key in family.aliases}
    values = {**family.defaults, **aliased, **{key: values[key] for key in values if key not in family.aliases}}
    if missing := [key for key in _REQUIRED if values.get(key) is None]:
        raise ValueError(f"missing keys: {', '.join(missing)}")
    _check_supported(family, values)
    layers = config_values.integer(values, "num_hidden_layers")
    heads, width, vocab_size = (
        config_values.integer(values, key) for key in ("num_attention_heads", "hidden_size", "vocab_size")
    )
    config_values.integer(values, "max_position_embeddings")
    if values.get("head_dim") is None and width % heads:
        raise ValueError(f"hidden_size={width} must be a multiple of num_attention_heads={heads}, or set head_dim")
    head_dim = config_values.integer({"head_dim": width // heads, **if_set(values, "head_dim")}, "head_dim")
    fields = _family_fields(family, values, layers, head_dim)
    return LlamaConfig(
        vocab_size=vocab_size,
        width=width,
        mlp_width=config_values.integer(values, "intermediate_size"),
        layers=layers,
        query_heads=heads,
        kv_heads=heads
        if values.get("num_key_value_heads") is None
        else config_values.integer(values, "num_key_value_heads"),
        head_dim=head_dim,
        max_length=_max_length(values, fields["rope_scaling"]),
        norm_epsilon=config_values.number({"rms_norm_eps": 1e-6, **values}, "rms_norm_eps"),
        tied_embeddings=config_values.boolean(values, "tie_word_embeddings"),
        windows=_parse_windows(family, values, layers),
        **fields,
    )


def _family(values: Values) -> Family:
    """Returns the family of a model.

    Raises:
        ValueError: if the model type or the architecture is not supported.
    """
    model_type = values.get("model_type")
    if values.get("kv_lora_rank") is not None:
        raise ValueError(
            f"model_type={model_type!r} with kv_lora_rank={values['kv_lora_rank']!r} is not supported: multi-head "
            "latent attention caches latents instead of keys and values"
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type={model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    architectures = values.get("architectures")
    if architectures is not None and (not isinstance(architectures, list) or family.architecture not in architectures):
        raise ValueError(
            f"architectures={architectures!r} is not supported; supported for {model_type}: {family.architecture}"
        )
    return family


def _family_fields(family: Family, values: Values, layers: int, head_dim: int) -> dict[str, Any]:
    """Returns the fields of `LlamaConfig` in which families differ."""
    bias = config_values.boolean(values, "attention_bias")
    fields: dict[str, Any] = {
        "qkv_bias": bias and family.attention_bias != "none",
        "output_bias": bias and family.attention_bias == "all",
        "activation": _activation(values),
        **family.fields,
        **{field: config_values.integer(values, key) for key, field in family.integers.items()},
        **{field: config_values.number(values, key) for key, field in family.numbers.items()},
        **{field: config_values.optional_number(values, key) for key, field in family.optional_numbers.items()},
        **{field: config_values.boolean(values, key) for key, field in family.booleans.items()},
        **rope_config.parse_rope(family, values, head_dim),
    }
    if values.get("query_pre_attn_scalar") is not None and "query_pre_attn_scalar" in family.defaults:
        scalar = config_values.number(values, "query_pre_attn_scalar")
        fields["attention_scale"] = None if scalar == head_dim else scalar**-0.5
    if fields.get("experts"):
        fields["dense_layers"] = _dense_layers(values, layers)
    if values["model_type"] == "smollm3":
        fields["nope_layers"] = tuple(i for i, rotates in enumerate(_layers_with_rope(values, layers)) if not rotates)
    return fields


def _max_length(values: Values, scaling: RopeScaling | None) -> int:
    """Returns the context length; YaRN extends it to `factor` times the original one, if that is larger.

    Qwen's model cards enable YaRN by `rope_scaling` alone and leave `max_position_embeddings` at the original length.

    Args:
        values: values of the file.
        scaling: scaling of the rotary embedding.
    """
    max_length = config_values.integer(values, "max_position_embeddings")
    if scaling is None or scaling.kind != "yarn":
        return max_length
    return max(max_length, int(scaling.factor * scaling.original_length))


def _check_supported(family: Family, values: Values) -> None:
    """Refuses features that the decoder does not support.

    Raises:
        ValueError: with all of them.
    """
    unsupported = config_keys.unsupported_keys(family, values)
    quantization = values.get("quantization_config")
    is_mxfp4 = isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"
    if quantization and not (values["model_type"] == "gpt_oss" and is_mxfp4):
        unsupported.append(f"quantization_config={quantization!r}")
    if values["model_type"] == "gpt_oss":
        unsupported += [
            f"{key}={values[key]!r} (supported: {supported})"
            for key, supported in _GPT_OSS_SWIGLU.items()
            if values.get(key, supported) != supported
        ]
    if "hidden_activation" in family.defaults and values.get("hidden_act", "gelu") not in _GELUS:
        unsupported.append(f"hidden_act={values['hidden_act']!r} (supported: {', '.join(_GELUS)})")
    if unsupported:
        raise ValueError(f"not supported: {', '.join(unsupported)}")


def _activation(values: Values) -> str:
    """Returns the activation.

    Raises:
        ValueError: if it is not supported.
    """
    key = "hidden_activation" if values.get("hidden_activation") is not None else "hidden_act"
    name = values.get(key, "silu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(f"{key}={name!r} is not supported; supported: {', '.join(map(repr, _ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _parse_windows(family: Family, values: Values, layers: int) -> tuple[int | None, ...]:
    """Returns the sliding window of every layer, () if all layers have full attention.

    Raises:
        ValueError: if the layer types are not supported.
    """
    kinds = _layer_types(family, values, layers)
    if unknown := {str(kind) for kind in kinds} - {FULL_ATTENTION, SLIDING_ATTENTION}:
        raise ValueError(
            f"layer_types={sorted(unknown)} is not supported; supported: {FULL_ATTENTION}, {SLIDING_ATTENTION}"
        )
    if SLIDING_ATTENTION not in kinds:
        return ()
    if family.sliding == "later_layers_if_enabled" and not config_values.boolean(values, "use_sliding_window"):
        values = {**values, "sliding_window": None}
    window = min(config_values.integer(values, "sliding_window"), MAX_TOKENS)
    return tuple(window if kind == SLIDING_ATTENTION else None for kind in kinds)


def _layer_types(family: Family, values: Values, layers: int) -> list[Any]:
    """Returns the attention type of every layer.

    Raises:
        ValueError: if `layer_types` contradicts a family whose layers are all equal.
    """
    kinds = config_values.per_layer_list(values, "layer_types", layers)
    enabled = config_values.boolean(values, "use_sliding_window")
    has_window = values.get("sliding_window") is not None
    if family.sliding in ("never", "all", "all_if_enabled"):
        # transformers ignores layer_types in these families, so only a consistent list is accepted.
        if family.sliding == "never" and enabled and has_window:
            raise ValueError(f"use_sliding_window=True is not supported for {values['model_type']}")
        uses_window = has_window and (enabled or family.sliding == "all") and family.sliding != "never"
        expected = [SLIDING_ATTENTION if uses_window else FULL_ATTENTION] * layers
        if kinds is not None and kinds != expected:
            raise ValueError(f"layer_types={kinds} is not supported for {values['model_type']}: its layers are equal")
        return expected
    if kinds is not None:
        return kinds
    if family.sliding == "later_layers_if_enabled":
        first = config_values.integer(values, "max_window_layers", minimum=0) if enabled and has_window else layers
        slides = [i >= first for i in range(layers)]
    elif values["model_type"] == "smollm3":
        slides = [enabled and has_window and not rotates for rotates in _layers_with_rope(values, layers)]
    else:
        period = family.full_attention_period
        if "sliding_window_pattern" in family.defaults:
            period = config_values.integer(values, "sliding_window_pattern")
        slides = [has_window and not (period and (i + 1) % period == 0) for i in range(layers)]
    return [SLIDING_ATTENTION if layer_slides else FULL_ATTENTION for layer_slides in slides]


def _layers_with_rope(values: Values, layers: int) -> list[bool]:
    """Returns which layers of a SmolLM3 rotate queries and keys; its key `no_rope_layers` marks them by ones.

    Raises:
        ValueError: if the key holds other values.
    """
    flags = config_values.per_layer_list(values, "no_rope_layers", layers)
    if flags is None:
        interval = config_values.integer(values, "no_rope_layer_interval")
        return [(i + 1) % interval != 0 for i in range(layers)]
    if invalid := [flag for flag in flags if flag not in (0, 1)]:
        raise ValueError(f"no_rope_layers must be a list of ones and zeros, got {invalid[0]!r}")
    return [bool(flag) for flag in flags]


def _dense_layers(values: Values, layers: int) -> tuple[int, ...]:
    """Returns the layers of a mixture of experts that have a single MLP.

    Raises:
        ValueError: if `mlp_only_layers` is invalid.
    """
    dense = values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) and 0 <= i < layers for i in dense):
        raise ValueError(f"mlp_only_layers={dense!r} must be a list of layer numbers")
    period = config_values.integer({"decoder_sparse_step": 1, **values}, "decoder_sparse_step")
    return tuple(i for i in range(layers) if i in dense or (i + 1) % period)
