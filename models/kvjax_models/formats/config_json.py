"""`LlamaConfig` from and to the `config.json` of a Hugging Face model.

`families` names the families. Both spellings are read, that of transformers 4 (`rope_theta`, `rope_scaling`,
`torch_dtype`) and that of transformers 5 (`rope_parameters`, `dtype`). What the model cannot compute is refused by
name, never approximated, and so is what no model can be: sizes below 1, texts for numbers, tokens outside the
vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax_models.formats import config_values as check
from kvjax_models.formats.families import FAMILIES, Family
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.rotary import RopeScaling

Values = Mapping[str, Any]

# Keys that change what a decoder computes, where the family does not name them.
_REFUSED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_experts",
    "num_local_experts",
    "use_bidirectional_attention",
    "use_mrope",
)
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_MOST_LAYERS = 10_000
_FULL, _SLIDING = "full_attention", "sliding_attention"


def text_config(values: Values) -> dict[str, Any]:
    """The values of the model of text: of a Gemma 3 that also sees pictures, those of its `text_config`."""
    if values.get("model_type") != "gemma3":
        return dict(values)
    inner = values.get("text_config")
    if not isinstance(inner, Mapping):
        raise ValueError(f"text_config={inner!r}: it must hold the values of the model of text")
    tokens = {key: values[key] for key in ("bos_token_id", "eos_token_id") if values.get(key) is not None}
    return {**inner, **tokens, "model_type": "gemma3_text", "architectures": None}


def parse_config(values: Values) -> LlamaConfig:
    """The configuration that a config.json means.

    Raises:
        ValueError: another architecture, missing keys, values that cannot be, or a feature that is not implemented; it
            names the key.

    Source: the configuration classes of transformers 5.2. Qwen's `max_window_layers` counts the first layers, which see
    everything; the rest slide (early transformers 4 with flash attention had it the other way round).
    """
    values = text_config(values)
    family = _family(values)
    values = {**family.defaults, **{family.aliases.get(key, key): value for key, value in values.items()}}
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if absent := [key for key in required if values.get(key) is None]:
        raise ValueError(f"missing keys: {', '.join(absent)}")
    _refuse(family, values)
    layers = check.count(values, "num_hidden_layers", most=_MOST_LAYERS)
    heads, width = check.count(values, "num_attention_heads"), check.count(values, "hidden_size")
    vocabulary, max_length = check.count(values, "vocab_size"), check.count(values, "max_position_embeddings")
    check.check_tokens(values, vocabulary)
    if values.get("head_dim") is None and width % heads:
        raise ValueError(
            f"hidden_size={width} is no multiple of num_attention_heads={heads}, and head_dim is not given"
        )
    head_dim = width // heads if values.get("head_dim") is None else check.count(values, "head_dim")
    bias = check.truth(values, "attention_bias")
    fields: dict[str, Any] = {
        "qkv_bias": bias and family.attention_bias != "none",
        "output_bias": bias and family.attention_bias == "all",
        "activation": _activation(values),
        **family.fields,
        **{field: check.count(values, key) for key, field in family.counts.items()},
        **{field: check.number(values, key) for key, field in family.numbers.items()},
        **{field: check.maybe_number(values, key) for key, field in family.caps.items()},
        **{field: check.truth(values, key) for key, field in family.truths.items()},
        **_parse_rope(family, values, head_dim),
    }
    if values.get("query_pre_attn_scalar") is not None and "query_pre_attn_scalar" in family.defaults:
        scalar = check.number(values, "query_pre_attn_scalar")
        fields["attention_scale"] = None if scalar == head_dim else scalar**-0.5
    if fields.get("experts"):
        fields["dense_layers"] = _dense_layers(values, layers)
    if values["model_type"] == "smollm3":
        fields["nope_layers"] = tuple(i for i, turns in enumerate(_turning(values, layers)) if not turns)
    return LlamaConfig(
        vocab_size=vocabulary,
        width=width,
        mlp_width=check.count(values, "intermediate_size"),
        layers=layers,
        query_heads=heads,
        kv_heads=heads if values.get("num_key_value_heads") is None else check.count(values, "num_key_value_heads"),
        head_dim=head_dim,
        max_length=max_length,
        norm_epsilon=check.number({"rms_norm_eps": values.get("rms_norm_eps", 1e-6)}, "rms_norm_eps"),
        tied_embeddings=check.truth(values, "tie_word_embeddings"),
        windows=_parse_windows(family, values, layers),
        **fields,
    )


def _family(values: Values) -> Family:
    model_type = values.get("model_type")
    if values.get("kv_lora_rank") is not None:
        raise ValueError(
            f"model_type={model_type!r} keeps latents in place of keys and values (multi-head latent attention, "
            f"kv_lora_rank={values['kv_lora_rank']!r}), which caches here do not hold; it is not implemented"
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type={model_type!r} is not implemented; known: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    architectures = values.get("architectures")
    if architectures is not None and (not isinstance(architectures, list) or family.architecture not in architectures):
        raise ValueError(f"architectures={architectures!r} is not implemented; for {model_type}: {family.architecture}")
    return family


def _refuse(family: Family, values: Values) -> None:
    known = {*family.counts, *family.caps, *family.defaults}
    refused = [f"{key}={values[key]!r}" for key in _REFUSED if key not in known and values.get(key)]
    quantized = values.get("quantization_config")
    if quantized and not (
        values["model_type"] == "gpt_oss"
        and isinstance(quantized, Mapping)
        and quantized.get("quant_method") == "mxfp4"
    ):
        refused.append(f"quantization_config={quantized!r}")
    if values["model_type"] == "gpt_oss" and values.get("swiglu_limit", 7.0) != 7:
        refused.append(f"swiglu_limit={values['swiglu_limit']!r} (known: 7)")
    if refused:
        raise ValueError(f"not implemented: {', '.join(refused)}")


def _activation(values: Values) -> str:
    key = "hidden_activation" if values.get("hidden_activation") is not None else "hidden_act"
    given = values.get(key, "silu")
    if not isinstance(given, str) or given not in _ACTIVATIONS:
        raise ValueError(f"{key}={given!r} is not implemented; known: {', '.join(map(repr, _ACTIVATIONS))}")
    return _ACTIVATIONS[given]


def _parse_rope(family: Family, values: Values, head_dim: int) -> dict[str, Any]:
    """The fields of the rotary embedding; transformers lets `rope_scaling` win where both spellings are there."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters={rope!r}: it must be an object")
    windowed: Values | None = None
    if rope and all(isinstance(value, Mapping) for value in rope.values()):
        if not family.slides == "by type" or not set(rope) <= {_FULL, _SLIDING}:
            raise ValueError(f"rope_parameters={dict(rope)!r} is not implemented: one rotary embedding per layer type")
        rope, windowed = rope.get(_FULL) or {}, rope.get(_SLIDING)
    elif any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"rope_parameters={dict(rope)!r}: it must be one rotary embedding, or one per layer type")
    turned = _turned(family, rope, values, head_dim)
    theta = check.number({"rope_theta": 10000.0, **values, **_given(rope, "rope_theta")}, "rope_theta")
    scaling = check.rope_scaling(rope, values, turned)
    windowed_theta = None
    if windowed is not None or "rope_local_base_freq" in family.defaults:
        local = {"rope_theta": values.get("rope_local_base_freq", theta), **(windowed or {})}
        if check.rope_scaling(local, values, turned) is not None:
            raise ValueError(f"rope_parameters={windowed!r} is not implemented for layers that slide; known: 'default'")
        windowed_theta = check.number(local, "rope_theta")
    elif values["model_type"] == "olmo3" and scaling is not None:
        # As its authors have it: only layers that see everything are scaled (transformers 5.2 scales all).
        windowed_theta = theta
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rotary_dim": None if turned == head_dim else turned,
        "window_rope_theta": windowed_theta,
    }


def _given(values: Values, key: str) -> dict[str, Any]:
    return {} if values.get(key) is None else {key: values[key]}


def _turned(family: Family, rope: Values, values: Values, head_dim: int) -> int:
    """How many dimensions of a head the position turns."""
    key = "partial_rotary_factor"
    given = {**_given(values, key), **_given(rope, key)}
    if not given:
        return head_dim
    factor = check.number(given, key)
    if factor > 1 or (factor != 1 and not family.partial):
        raise ValueError(f"{key}={given[key]} is not implemented for {values['model_type']}; known: 1")
    return int(head_dim * factor)


def _parse_windows(family: Family, values: Values, layers: int) -> tuple[int | None, ...]:
    """The sliding window of every layer, () where none slides."""
    kinds = check.words(values, "layer_types", layers)
    asked = check.truth(values, "use_sliding_window")
    slides = values.get("sliding_window") is not None
    if family.slides == "never":
        return ()
    if family.slides in ("all", "all if asked"):
        slides = slides and (asked or family.slides == "all")
        # transformers ignores layer_types here and treats all layers alike; a config that says otherwise is refused.
        expected = [_SLIDING if slides else _FULL] * layers
        if kinds is not None and kinds != expected:
            raise ValueError(f"layer_types={kinds} is not implemented for {values['model_type']}: all layers are alike")
        kinds = expected
    elif kinds is None and family.slides == "later if asked":
        first = check.count(values, "max_window_layers", least=0) if asked and slides else layers
        kinds = [_SLIDING if i >= first else _FULL for i in range(layers)]
    elif kinds is None and values["model_type"] == "smollm3":
        kinds = [_SLIDING if asked and slides and not turns else _FULL for turns in _turning(values, layers)]
    elif kinds is None:
        every = family.period
        kinds = [_FULL if not slides or (every and (i + 1) % every == 0) else _SLIDING for i in range(layers)]
    if unknown := {str(kind) for kind in kinds} - {_FULL, _SLIDING}:
        raise ValueError(f"layer_types={sorted(unknown)} is not implemented; known: {_FULL}, {_SLIDING}")
    if _SLIDING not in kinds:
        return ()
    if family.slides == "later if asked" and not asked:
        values = {**values, "sliding_window": None}
    window = check.count(values, "sliding_window")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _turning(values: Values, layers: int) -> list[bool]:
    """Which layers of a SmolLM3 turn queries and keys; its key `no_rope_layers` says just that, by ones."""
    given = check.words(values, "no_rope_layers", layers)
    if given is None:
        interval = check.count(values, "no_rope_layer_interval")
        return [(i + 1) % interval != 0 for i in range(layers)]
    if unknown := [entry for entry in given if entry not in (0, 1)]:
        raise ValueError(f"no_rope_layers holds {unknown[0]!r}: it must hold ones and zeros")
    return [bool(entry) for entry in given]


def _dense_layers(values: Values, layers: int) -> tuple[int, ...]:
    """The layers of a mixture of experts that have one MLP."""
    dense = values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) and 0 <= i < layers for i in dense):
        raise ValueError(f"mlp_only_layers={dense!r}: it must be a list of layers")
    every = check.count({"decoder_sparse_step": values.get("decoder_sparse_step", 1)}, "decoder_sparse_step")
    return tuple(i for i in range(layers) if i in dense or (i + 1) % every)


# --- and back ---


def to_config_json(config: LlamaConfig) -> dict[str, Any]:
    """A config.json in the spelling of transformers 4, which 5 reads too: of the first family that means `config`.

    Raises:
        ValueError: where no family can express it.
    """
    config = dataclasses.replace(config, windows=config.windows if any(config.windows) else ())
    for model_type in FAMILIES:
        values = _family_values(config, model_type)
        try:
            if parse_config(values) == config:
                return values
        except ValueError:  # values that the family cannot have
            continue
    raise ValueError(f"no Hugging Face family ({', '.join(FAMILIES)}) can express {config}")


def _family_values(config: LlamaConfig, model_type: str) -> dict[str, Any]:
    family = FAMILIES[model_type]
    window = next(filter(None, config.windows), None)
    activation = next((name for name, ours in _ACTIVATIONS.items() if ours == config.activation), "silu")
    given = {**family.counts, **family.numbers, **family.caps, **family.truths}
    values = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act": activation,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_values(config.rope_scaling),
        "tie_word_embeddings": config.tied_embeddings,
        "pad_token_id": None,  # what is not there transformers takes for its own, in any vocabulary
        **{key: getattr(config, field) for key, field in given.items() if key != "intermediate_size"},
    }
    if config.rope_scaling is None and "rope_parameters" in family.defaults:
        values["rope_scaling"] = {"rope_type": "default"}
    if family.attention_bias != "none":
        values["attention_bias"] = config.qkv_bias
    if family.partial:
        values["partial_rotary_factor"] = (config.rotary_dim or config.head_dim) / config.head_dim
    if "rope_local_base_freq" in family.defaults:
        values["rope_local_base_freq"] = config.window_rope_theta
    if "query_pre_attn_scalar" in family.defaults:
        scale = config.attention_scale
        values["query_pre_attn_scalar"] = config.head_dim if scale is None else round(scale**-2, 6)
    if "original_max_position_embeddings" in family.defaults and config.rope_scaling is not None:
        values["original_max_position_embeddings"] = config.rope_scaling.original_length
    if model_type == "granite" and config.attention_scale is None:
        values["attention_multiplier"] = config.head_dim**-0.5
    if model_type == "qwen3_moe":
        values["mlp_only_layers"] = list(config.dense_layers)
    if model_type == "smollm3":
        values["no_rope_layers"] = [int(i not in config.nope_layers) for i in range(config.layers)]
    return values | _window_values(config, family, window)


def _window_values(config: LlamaConfig, family: Family, window: int | None) -> dict[str, Any]:
    if family.slides == "never" or (window is None and family.slides.endswith("if asked")):
        return {}
    kinds = [_FULL if config.window(i) is None else _SLIDING for i in range(config.layers)]
    if family.slides in ("all", "all if asked"):
        return {"sliding_window": window} | ({"use_sliding_window": True} if family.slides != "all" else {})
    values: dict[str, Any] = {"layer_types": kinds}
    if window is not None:
        values |= {"sliding_window": window, "use_sliding_window": True}
    if window is not None and family.slides == "later if asked":
        values["max_window_layers"] = config.windows.index(window)
    return values


def _rope_values(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        values |= {"low_freq_factor": scaling.low_frequency_factor, "high_freq_factor": scaling.high_frequency_factor}
    if scaling.kind == "yarn":
        values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    if scaling.kind == "longrope":
        values |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    if scaling.kind in ("yarn", "longrope"):
        values["attention_factor"] = scaling.attention_factor
    if scaling.kind in ("llama3", "yarn", "longrope"):
        values["original_max_position_embeddings"] = scaling.original_length
    return values
