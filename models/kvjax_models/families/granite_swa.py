"""Granite with sliding windows, attention sink logits and a rotary embedding per layer."""

import dataclasses
from typing import Any

from kvjax_models.families.config_values import ConfigValues
from kvjax_models.families.family import layer_types
from kvjax_models.families.granite import GRANITE


def _layer_types(values: ConfigValues) -> list[str]:
    return layer_types(layer % 4 != 0 for layer in range(values.integer("num_hidden_layers")))


def _rotary_bases(values: ConfigValues) -> dict[str, Any]:
    """Returns the base of the rotary embedding of every layer; 0 marks layers without one."""
    bases = values.per_layer("layer_rope_theta")
    if bases is None:
        return {}
    without = tuple(layer for layer, base in enumerate(bases) if base == 0)
    used = [1.0 if base == 0 else ConfigValues(layer_rope_theta=base).number("layer_rope_theta") for base in bases]
    return {"rope.layer_theta": tuple(used), "rope.nope_layers": without}


GRANITE_SWA = dataclasses.replace(
    GRANITE,
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    defaults={
        **GRANITE.defaults,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 128,
    },
    fields={"attention.sinks": True},
    more_fields=_rotary_bases,
    layer_types=_layer_types,
    reads_layer_types=True,
    other_keys=("layer_rope_theta",),
    gguf=None,
)
