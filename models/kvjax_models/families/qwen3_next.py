"""Qwen3-Next, a hybrid like Qwen3.5-MoE with other names of tensors."""

import dataclasses
from typing import Any

from kvjax_models.families.config_values import ConfigValues
from kvjax_models.families.qwen import dense_layers
from kvjax_models.families.qwen3_5 import QWEN3_5_MOE, gated_delta


def _fields(values: ConfigValues) -> dict[str, Any]:
    return {**gated_delta(values), **dense_layers(values)}


QWEN3_NEXT = dataclasses.replace(
    QWEN3_5_MOE,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    defaults={
        **QWEN3_5_MOE.defaults,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "intermediate_size": 5632,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    keys={**QWEN3_5_MOE.keys, "norm_topk_prob": "experts.normalize_weights"},
    more_fields=_fields,
    other_keys=(*QWEN3_5_MOE.other_keys, "mlp_only_layers"),
    modules={
        **QWEN3_5_MOE.modules,
        ("mixer", "qkvz"): "linear_attn.in_proj_qkvz",
        ("mixer", "ba"): "linear_attn.in_proj_ba",
    },
)
