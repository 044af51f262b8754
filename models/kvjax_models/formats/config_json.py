"""Converts the `config.json` of a Hugging Face model to a `LlamaConfig`.

Invalid values and features that the decoder does not support are refused with the name of the key and never
approximated.
"""

from collections.abc import Mapping
from typing import Any

from kvjax.spec import MAX_TOKENS
from kvjax_models.families import FAMILIES, FULL_ATTENTION, SLIDING_ATTENTION, ConfigValues, Family
from kvjax_models.formats import config_keys, rope_config
from kvjax_models.model.config import LlamaConfig, field_type, make_config
from kvjax_models.model.rotary import RopeScaling

# Multimodal models, and the model types of their text decoders.
_MULTIMODAL = {name: f"{name}_text" for name in ("gemma3", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe")}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# The types of fields decide how the values of their keys are read.
_READERS: dict[Any, Any] = {
    int: ConfigValues.integer,
    float: ConfigValues.number,
    float | None: ConfigValues.optional_number,
    bool: ConfigValues.boolean,
}


def text_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the text decoder; for a multimodal model, the values of its `text_config`.

    Raises:
        ValueError: if `text_config` is missing.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in _MULTIMODAL:
        return dict(values)
    inner = values.get("text_config")
    if not isinstance(inner, Mapping):
        raise ValueError(f"text_config={inner!r} must be an object with the values of the text decoder")
    tokens = {key: values[key] for key in ("bos_token_id", "eos_token_id") if values.get(key) is not None}
    return {**inner, **tokens, "model_type": _MULTIMODAL[model_type], "architectures": None}


def parse_config(values: Mapping[str, Any]) -> LlamaConfig:
    """Converts the values of a config.json.

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
    values = ConfigValues(
        {**family.defaults, **aliased, **{key: values[key] for key in values if key not in family.aliases}}
    )
    if missing := [key for key in _REQUIRED if values.get(key) is None]:
        raise ValueError(f"missing keys: {', '.join(missing)}")
    _check_supported(family, values)
    heads, width = values.integer("num_attention_heads"), values.integer("hidden_size")
    if values.get("head_dim") is None:
        if width % heads:
            raise ValueError(f"hidden_size={width} must be a multiple of num_attention_heads={heads}, or set head_dim")
        values["head_dim"] = width // heads
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = heads
    values.setdefault("rms_norm_eps", 1e-6)
    values["layer_types"] = _layer_types(family, values)
    fields: dict[str, Any] = {"activation": _activation(family, values), **family.fields}
    for key, names in family.keys.items():
        for name in (names,) if isinstance(names, str) else names:
            fields[name] = _READERS[field_type(name)](values, key)
    fields |= {**rope_config.parse_rope(family, values), **family.more_fields(values)}
    sizes: dict[str, Any] = {
        "vocab_size": values.integer("vocab_size"),
        "width": width,
        "mlp_width": values.integer("intermediate_size"),
        "layers": values.integer("num_hidden_layers"),
        "query_heads": heads,
        "kv_heads": values.integer("num_key_value_heads"),
        "head_dim": values.integer("head_dim"),
        "max_length": _max_length(values, fields["rope.scaling"]),
        "norms.epsilon": values.number("rms_norm_eps"),
        "tied_embeddings": values.boolean("tie_word_embeddings"),
        **_layer_kinds(family.recurrent_type, values),
    }
    return make_config(sizes | fields)


def _family(values: Mapping[str, Any]) -> Family:
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


def _check_supported(family: Family, values: ConfigValues) -> None:
    """Refuses features that the decoder does not support.

    Raises:
        ValueError: with all of them.
    """
    unsupported = config_keys.unsupported_keys(family, values)
    for key, supported in family.supported.items():
        if key in values and values[key] not in supported:
            unsupported.append(f"{key}={values[key]!r}; supported: {', '.join(map(repr, supported))}")
    quantization = values.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if quantization and (method is None or method != family.quantization):
        unsupported.append(f"quantization_config={quantization!r}")
    if unsupported:
        raise ValueError(f"not supported: {', '.join(unsupported)}")


def _activation(family: Family, values: ConfigValues) -> str:
    """Returns the activation.

    Raises:
        ValueError: if it is not supported.
    """
    key = "hidden_activation" if values.get("hidden_activation") is not None else "hidden_act"
    name = values.get(key, "silu")
    if not isinstance(name, str) or name not in family.activations:
        raise ValueError(f"{key}={name!r} is not supported; supported: {', '.join(map(repr, family.activations))}")
    return family.activations[name]


def _max_length(values: ConfigValues, scaling: RopeScaling | None) -> int:
    """Returns the context length; YaRN extends it to `factor` times the original one, if that is larger.

    Qwen's model cards enable YaRN by `rope_scaling` alone and leave `max_position_embeddings` at the original length.

    Args:
        scaling: scaling of the rotary embedding.
    """
    max_length = values.integer("max_position_embeddings")
    if scaling is None or scaling.kind != "yarn":
        return max_length
    return max(max_length, int(scaling.factor * scaling.original_length))


def _layer_types(family: Family, values: ConfigValues) -> list[str]:
    """Returns the attention type of every layer.

    Raises:
        ValueError: if the layer types are not supported.
    """
    kinds, listed = family.layer_types(values), values.per_layer("layer_types")
    if listed is not None and family.reads_layer_types:
        kinds = listed
    elif listed is not None and listed != kinds:
        raise ValueError(f"layer_types={listed} is not supported for {family.model_type}: its layers are equal")
    supported = (FULL_ATTENTION, family.recurrent_type or SLIDING_ATTENTION)
    if unknown := {str(kind) for kind in kinds} - {*supported}:
        raise ValueError(f"layer_types={sorted(unknown)} is not supported; supported: {', '.join(supported)}")
    return kinds


def _layer_kinds(recurrent_type: str | None, values: ConfigValues) -> dict[str, tuple[Any, ...]]:
    """Returns the layers with a recurrence or the sliding window of every layer, if there are any."""
    kinds = values["layer_types"]
    if recurrent_type in kinds:
        return {"recurrence.layers": tuple(layer for layer, kind in enumerate(kinds) if kind == recurrent_type)}
    if SLIDING_ATTENTION not in kinds:
        return {}
    window = min(values.integer("sliding_window"), MAX_TOKENS)
    return {"attention.windows": tuple(window if kind == SLIDING_ATTENTION else None for kind in kinds)}
