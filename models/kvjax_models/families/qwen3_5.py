"""Qwen3.5 (text) and Qwen3.5-MoE, hybrids of attention with an output gate and a gated delta rule in most layers."""

import dataclasses
from typing import Any

from kvjax_models.families.config_values import FULL_ATTENTION, LINEAR_ATTENTION, ConfigValues
from kvjax_models.families.family import ATTENTION_BIAS, EXPERT_KEYS, EXPERTS, Family, Path
from kvjax_models.model.gated_delta import GatedDeltaSizes


def _every_nth_attends(values: ConfigValues) -> list[str]:
    """Returns full attention for every n-th layer, by the key `full_attention_interval`, and linear for the others."""
    period, layers = values.integer("full_attention_interval"), values.integer("num_hidden_layers")
    return [LINEAR_ATTENTION if (layer + 1) % period else FULL_ATTENTION for layer in range(layers)]


def gated_delta(values: ConfigValues) -> dict[str, Any]:
    """Returns the sizes of layers with linear attention, if there are any."""
    if LINEAR_ATTENTION not in values["layer_types"]:
        return {}
    sizes = GatedDeltaSizes(
        key_heads=values.integer("linear_num_key_heads"),
        value_heads=values.integer("linear_num_value_heads"),
        key_dim=values.integer("linear_key_head_dim"),
        value_dim=values.integer("linear_value_head_dim"),
        kernel_size=values.integer("linear_conv_kernel_dim", minimum=2),
    )
    return {"recurrence.sizes": sizes}


QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    fields={"norms.offset": 1.0, "attention.query_key_norm": True, "attention.gate": True},
    keys=ATTENTION_BIAS,
    activations={"silu": "silu"},  # also of the convolutions
    more_fields=gated_delta,
    supported={"attn_output_gate": (True,)},
    layer_types=_every_nth_attends,
    recurrent_type=LINEAR_ATTENTION,
    reads_layer_types=True,
    partial_rotary=True,
    rope_keys=("mrope_section", "mrope_interleaved"),  # of images; equal for the positions of a text
    other_keys=("mtp_num_hidden_layers",),
)
GATED_SHARED_EXPERT: dict[Path, str | tuple[str, ...]] = {
    **EXPERTS,
    ("mlp", "shared", "gate_up"): ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    ("mlp", "shared", "down"): "mlp.shared_expert.down_proj",
    ("mlp", "shared_gate"): "mlp.shared_expert_gate",
}
QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    defaults={
        **QWEN3_5.defaults,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "intermediate_size": 512,  # of single MLPs, which no layer has
    },
    fields={**QWEN3_5.fields, "experts.shared_gate": True},
    keys={
        **QWEN3_5.keys,
        **EXPERT_KEYS,
        "shared_expert_intermediate_size": "experts.shared_width",
    },
    modules=GATED_SHARED_EXPERT,
)
