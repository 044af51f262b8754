"""SmolLM3, some of whose layers have no rotary embedding."""

from typing import Any

from kvjax_models.families.config_values import ConfigValues
from kvjax_models.families.family import ATTENTION_BIAS, Family, Gguf, layer_types


def _rotates(values: ConfigValues) -> list[bool]:
    """Returns which layers rotate queries and keys; the key `no_rope_layers` marks them by ones.

    Raises:
        ValueError: if the key holds other values.
    """
    flags = values.per_layer("no_rope_layers")
    if flags is None:
        interval = values.integer("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(values.integer("num_hidden_layers"))]
    if invalid := [flag for flag in flags if flag not in (0, 1)]:
        raise ValueError(f"no_rope_layers must be a list of ones and zeros, got {invalid[0]!r}")
    return [bool(flag) for flag in flags]


def _layers_without_rope(values: ConfigValues) -> dict[str, Any]:
    return {"rope.nope_layers": tuple(layer for layer, rotates in enumerate(_rotates(values)) if not rotates)}


def _layer_types(values: ConfigValues) -> list[str]:
    """Returns a sliding window for layers without rotary embedding, if windows are enabled."""
    has_windows = values.boolean("use_sliding_window") and values.get("sliding_window") is not None
    return layer_types(has_windows and not rotates for rotates in _rotates(values))


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    keys=ATTENTION_BIAS | {"mlp_bias": "mlp_bias"},
    more_fields=_layers_without_rope,
    layer_types=_layer_types,
    reads_layer_types=True,
    other_keys=("no_rope_layers", "use_sliding_window"),
    gguf=Gguf("smollm3", interleaved_rope=True),
)
