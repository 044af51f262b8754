"""Ministral 3, whose queries grow with their position."""

from typing import Any

from kvjax_models.families.config_values import ConfigValues
from kvjax_models.families.family import Family, sliding_layers


def _query_growth(values: ConfigValues) -> dict[str, Any]:
    """Returns the growth of queries from the settings of the rotary embedding.

    Raises:
        ValueError: if these are invalid.
    """
    rope = values.rope
    if not rope.get("llama_4_scaling_beta"):
        return {}
    period = ConfigValues(values | rope).integer("original_max_position_embeddings")
    return {"rope.query_growth": rope.number("llama_4_scaling_beta"), "rope.query_period": period}


MINISTRAL3 = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    defaults={
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    more_fields=_query_growth,
    layer_types=sliding_layers,
    rope_keys=("llama_4_scaling_beta", "max_position_embeddings"),
)
