"""`LlamaConfig` from and to the `config.json` of a Hugging Face model.

Families: llama (2, 3, 3.1, 3.2), mistral, qwen2 (2.5 too) and qwen3, in the spelling of transformers 4 (`rope_theta`,
`rope_scaling`, `torch_dtype`) and of transformers 5 (`rope_parameters`, `dtype`). What the model cannot compute is
refused by name, never approximated.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax_models.llama import LlamaConfig, RopeScaling


@dataclasses.dataclass(frozen=True)
class _Family:
    """One `model_type`: its only supported architecture and what transformers assumes for keys a config leaves out."""

    architecture: str
    defaults: Mapping[str, Any]


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", {"max_position_embeddings": 2048}),
    "mistral": _Family(
        "MistralForCausalLM",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": _Family(
        "Qwen2ForCausalLM",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "head_dim": 128,
        },
    ),
}

# Keys that change what a decoder computes and that this one does not implement.
_REFUSED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_experts",
    "num_local_experts",
    "quantization_config",
    "use_mrope",
)


def parse(values: Mapping[str, Any]) -> LlamaConfig:
    """The configuration that a config.json means.

    Raises:
        ValueError: another architecture, missing keys, or a feature that is not implemented; it names the key.

    Source: the configuration classes of transformers 5.2. Qwen's `max_window_layers` counts the first layers, which see
    everything; the rest slide (early transformers 4 with flash attention had it the other way round).
    """
    model_type = values.get("model_type")
    if model_type not in _FAMILIES:
        raise ValueError(f"model_type={model_type!r} is not implemented; known: {', '.join(_FAMILIES)}")
    family = _FAMILIES[model_type]
    architectures = values.get("architectures") or [family.architecture]
    if family.architecture not in architectures:
        raise ValueError(f"architectures={architectures} is not implemented; for {model_type}: {family.architecture}")
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if absent := [key for key in required if values.get(key) is None]:
        raise ValueError(f"missing keys: {', '.join(absent)}")
    if refused := [f"{key}={values[key]!r}" for key in _REFUSED if values.get(key)]:
        raise ValueError(f"not implemented: {', '.join(refused)}")
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act={values['hidden_act']!r} is not implemented; known: 'silu'")

    values = {**family.defaults, **values}
    theta, scaling = _parse_rope(values)
    attention_bias = model_type in ("llama", "qwen3") and bool(values.get("attention_bias"))
    return LlamaConfig(
        vocab_size=values["vocab_size"],
        width=values["hidden_size"],
        mlp_width=values["intermediate_size"],
        layers=values["num_hidden_layers"],
        query_heads=values["num_attention_heads"],
        kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        head_dim=values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
        max_length=values["max_position_embeddings"],
        norm_epsilon=values.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=model_type == "llama" and bool(values.get("mlp_bias")),
        query_key_norm=model_type == "qwen3",
        windows=_parse_windows(model_type, values),
    )


def _parse_rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding; transformers lets `rope_scaling` win where both spellings are there."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"rope_parameters={rope!r} is not implemented: one rotary embedding per layer type")
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(f"partial_rotary_factor={partial} is not implemented; known: 1")
    theta = float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    keys = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    if kind not in keys:
        raise ValueError(f"rope_type={kind!r} is not implemented; known: {', '.join(keys)}")
    if absent := [key for key in keys[kind] if rope.get(key) is None]:
        raise ValueError(f"rope_type={kind!r} lacks {', '.join(absent)}")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind, float(rope["factor"]))
    return theta, RopeScaling(
        kind,
        float(rope["factor"]),
        low_frequency_factor=float(rope["low_freq_factor"]),
        high_frequency_factor=float(rope["high_freq_factor"]),
        original_length=rope.get("original_max_position_embeddings") or values["max_position_embeddings"],
    )


def _parse_windows(model_type: str, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The sliding window of every layer, () where none slides."""
    layers, kinds, window = values["num_hidden_layers"], values.get("layer_types"), values.get("sliding_window")
    if model_type == "llama":
        return ()
    if model_type == "mistral":
        # transformers ignores layer_types here and lets every layer slide; a config that says otherwise is refused.
        expected = ["full_attention" if window is None else "sliding_attention"] * layers
        if kinds is not None and kinds != expected:
            raise ValueError(f"layer_types={kinds} is not implemented for mistral: all layers are alike")
        kinds = expected
    else:
        window = window if values.get("use_sliding_window") else None
        if kinds is None:
            first = layers if window is None else values["max_window_layers"]
            kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(kinds) != layers:
        raise ValueError(f"layer_types names {len(kinds)} layers, num_hidden_layers={layers}")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types={sorted(unknown)} is not implemented; known: full_attention, sliding_attention")
    if "sliding_attention" not in kinds:
        return ()
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"sliding_window={window!r} must be a positive number of tokens: layers slide")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def spelled(config: LlamaConfig) -> dict[str, Any]:
    """A config.json in the spelling of transformers 4, which 5 reads too: of the first family that means `config`.

    Raises:
        ValueError: where no family can express it.
    """
    config = dataclasses.replace(config, windows=config.windows if any(config.windows) else ())
    for model_type in _FAMILIES:
        values = _family_values(config, model_type)
        if parse(values) == config:
            return values
    raise ValueError(f"no Hugging Face family ({', '.join(_FAMILIES)}) can express {config}")


def _family_values(config: LlamaConfig, model_type: str) -> dict[str, Any]:
    values = {
        "architectures": [_FAMILIES[model_type].architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_values(config.rope_scaling),
        "tie_word_embeddings": config.tied_embeddings,
    }
    window = next(filter(None, config.windows), None)
    if model_type == "mistral":
        values |= {"sliding_window": window}
    if model_type in ("qwen2", "qwen3") and window is not None:
        values |= {
            "use_sliding_window": True,
            "sliding_window": window,
            "max_window_layers": config.windows.index(window),
            "layer_types": ["full_attention" if w is None else "sliding_attention" for w in config.windows],
        }
    if model_type in ("llama", "qwen3"):
        values |= {"attention_bias": config.qkv_bias}
    if model_type == "llama":
        values |= {"mlp_bias": config.mlp_bias}
    return values


def _rope_values(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_length,
    }
