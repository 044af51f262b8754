"""LFM2 (dense), a hybrid of attention and gated short convolutions in most layers."""

from typing import Any

from kvjax_models.families.config_values import CONVOLUTION, FULL_ATTENTION, ConfigValues
from kvjax_models.families.family import Family
from kvjax_models.model.short_convolution import ShortConvolutionSizes


def _layer_types(values: ConfigValues) -> list[str]:
    """Returns full attention for the layers of `full_attn_idxs`, all by default, and a convolution for the others."""
    layers, attention = range(values.integer("num_hidden_layers")), values.get("full_attn_idxs")
    if attention is not None and not isinstance(attention, list):
        raise ValueError(f"full_attn_idxs={attention!r} must be a list")
    return [FULL_ATTENTION if attention is None or layer in attention else CONVOLUTION for layer in layers]


def _fields(values: ConfigValues) -> dict[str, Any]:
    """Returns the width of MLPs, whether embeddings are tied, and the sizes of convolutions, if there are any."""
    fields: dict[str, Any] = {"mlp_width": _mlp_width(values)}
    if values.get("tie_embedding") is not None:
        fields["tied_embeddings"] = values.boolean("tie_embedding")
    if CONVOLUTION in values["layer_types"]:
        fields["recurrence.sizes"] = ShortConvolutionSizes(
            channels=values.integer("hidden_size"),
            kernel_size=values.integer("conv_L_cache", minimum=2),
            use_bias=values.boolean("conv_bias"),
        )
    return fields


def _mlp_width(values: ConfigValues) -> int:
    """Returns two thirds of the size in the file, scaled and rounded up to a multiple, as LFM2's MLPs adjust it."""
    width = values.integer("intermediate_size" if values.get("block_ff_dim") is None else "block_ff_dim")
    if not values.boolean("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if (multiplier := values.optional_number("block_ffn_dim_multiplier")) is None:
        return width
    multiple = values.integer("block_multiple_of")
    return -(-int(multiplier * width) // multiple) * multiple


LFM2 = Family(
    "lfm2",
    "Lfm2ForCausalLM",
    defaults={
        "intermediate_size": 12288,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    fields={"attention.query_key_norm": True},
    keys={"norm_eps": "norms.epsilon"},
    activations={"silu": "silu"},
    more_fields=_fields,
    layer_types=_layer_types,
    recurrent_type=CONVOLUTION,
    reads_layer_types=True,
    other_keys=(
        "full_attn_idxs", "block_ff_dim", "tie_embedding", "num_heads", "block_norm_eps", "block_mlp_init_scale",
        "block_out_init_scale",
    ),
    modules={
        ("norm",): "model.embedding_norm",
        ("attention_norm",): "operator_norm",
        ("attention", "output"): "self_attn.out_proj",
        ("attention", "query_norm"): "self_attn.q_layernorm",
        ("attention", "key_norm"): "self_attn.k_layernorm",
        ("mixer", "bcx"): "conv.in_proj",
        ("mixer", "kernel"): "conv.conv.weight",
        ("mixer", "bias"): "conv.conv.bias",
        ("mixer", "out"): "conv.out_proj",
        ("mlp_norm",): "ffn_norm",
        ("mlp", "gate_up"): ("feed_forward.w1", "feed_forward.w3"),
        ("mlp", "down"): "feed_forward.w2",
    },
)  # fmt: skip
