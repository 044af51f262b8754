"""EXAONE 4, with norms after the blocks, and without rotary embedding where other layers have a sliding window."""

from typing import Any

from kvjax_models.families.config_values import SLIDING_ATTENTION, ConfigValues
from kvjax_models.families.family import SANDWICH_NORMS, Family, Gguf, every_nth_full


def _every_nth_full(values: ConfigValues) -> list[str]:
    """Returns the attention types by `sliding_window_pattern`, a period or a string such as "LLLG".

    Raises:
        ValueError: if the string has another form.
    """
    pattern = values.get("sliding_window_pattern")
    if isinstance(pattern, str):
        if pattern != "L" * (len(pattern) - 1) + "G":
            raise ValueError(f"sliding_window_pattern={pattern!r} must be 'L's followed by one 'G'")
        pattern = len(pattern)
    elif values.get("sliding_window") is not None:
        pattern = values.integer("sliding_window_pattern")
    return every_nth_full(pattern)(values)


def _layers_without_rope(values: ConfigValues) -> dict[str, Any]:
    """Returns the layers without rotary embedding: those without a window, if the model has windows."""
    if values.get("sliding_window") is None:
        return {}
    types = enumerate(values["layer_types"])
    return {"rope.nope_layers": tuple(layer for layer, kind in types if kind != SLIDING_ATTENTION)}


EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    fields={"norms.position": "post", "attention.query_key_norm": True},
    more_fields=_layers_without_rope,
    layer_types=_every_nth_full,
    reads_layer_types=True,
    modules=SANDWICH_NORMS,
    gguf=Gguf("exaone4"),
)
