"""What kvjax knows of a model family: its keys in config.json, and its tensors in both formats.

All families share one decoder. A family maps its files to that decoder: which keys of config.json set which fields of
`LlamaConfig`, which modules of its layers have other names than Llama's, and how llama.cpp stores it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvjax_models.families.config_values import FULL_ATTENTION, SLIDING_ATTENTION, ConfigValues

Path = tuple[str | int, ...]

# Hugging Face's names of modules by their path in a layer of `Llama`. Projections that `Llama` fuses have several
# names; a family that stores them fused has one. Experts are ("experts", "gate"), "up" and "down"; "{}" is replaced by
# the number of the expert, and one tensor of all experts is read, too (`weights`). Parameters that are neither a kernel
# nor a bias nor a scale have their full name.
MODULES: dict[Path, str | tuple[str, ...]] = {
    ("attention_norm",): "input_layernorm",
    ("attention", "qkv"): ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("attention", "output"): "self_attn.o_proj",
    ("attention", "query_norm"): "self_attn.q_norm",
    ("attention", "key_norm"): "self_attn.k_norm",
    ("attention", "sinks"): "self_attn.sinks",
    ("attention", "output_gate"): "self_attn.q_proj",  # the second half of every head
    ("mixer", "qkvz"): ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    ("mixer", "ba"): ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    ("mixer", "convolution"): "linear_attn.conv1d.weight",
    ("mixer", "log_rate"): "linear_attn.A_log",
    ("mixer", "decay_bias"): "linear_attn.dt_bias",
    ("mixer", "scale"): "linear_attn.norm.weight",
    ("mixer", "out"): "linear_attn.out_proj",
    ("mlp_norm",): "post_attention_layernorm",
    ("mlp", "router"): "mlp.gate",
    ("mlp", "router", "selection_bias"): "mlp.gate.e_score_correction_bias",
    ("mlp", "shared", "gate_up"): ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    ("mlp", "shared", "down"): "mlp.shared_experts.down_proj",
    ("mlp", "gate_up"): ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp", "down"): "mlp.down_proj",
    ("layer_scale",): "layer_scalar",
}
SANDWICH_NORMS: dict[Path, str | tuple[str, ...]] = {
    ("after_attention_norm",): "post_attention_layernorm",
    ("mlp_norm",): "pre_feedforward_layernorm",
    ("after_mlp_norm",): "post_feedforward_layernorm",
}
EXPERTS: dict[Path, str] = {
    ("experts", "gate"): "mlp.experts.{}.gate_proj",
    ("experts", "up"): "mlp.experts.{}.up_proj",
    ("experts", "down"): "mlp.experts.{}.down_proj",
}
EXPERT_KEYS: dict[str, str | tuple[str, ...]] = {
    "num_experts": "experts.number",
    "num_experts_per_tok": "experts.per_token",
    "moe_intermediate_size": "experts.width",
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
ATTENTION_BIAS: dict[str, str | tuple[str, ...]] = {"attention_bias": ("attention.qkv_bias", "attention.output_bias")}


@dataclasses.dataclass(frozen=True)
class Gguf:
    """How llama.cpp stores a family.

    Attributes:
        architecture: value of `general.architecture`.
        marker: key of the metadata that distinguishes the family from another one with the same architecture.
        interleaved_rope: whether the rows of query and key projections are permuted so that RoPE rotates the pairs
            (2i, 2i + 1) of a head.
        modules: ggml's names of modules that differ from `gguf_checkpoint.MODULES`, with their path in a layer.
        values: values of config.json that llama.cpp implies.
    """

    architecture: str
    marker: str | None = None
    interleaved_rope: bool = False
    modules: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def full_layers(values: ConfigValues) -> list[str]:
    """Returns full attention for all layers."""
    return [FULL_ATTENTION] * values.integer("num_hidden_layers")


def sliding_layers(values: ConfigValues) -> list[str]:
    """Returns sliding attention for all layers if `sliding_window` is a number."""
    return layer_types([values.get("sliding_window") is not None] * values.integer("num_hidden_layers"))


def every_nth_full(period: int | None) -> Callable[[ConfigValues], list[str]]:
    """Returns a function that gives every n-th layer full attention and the others a sliding window.

    Args:
        period: n; None: no layer has full attention.
    """

    def types(values: ConfigValues) -> list[str]:
        has_window, layers = values.get("sliding_window") is not None, values.integer("num_hidden_layers")
        return layer_types(has_window and not (period and (layer + 1) % period == 0) for layer in range(layers))

    return types


def later_layers(values: ConfigValues) -> list[str]:
    """Returns sliding attention for the layers from number `max_window_layers` on, if `sliding_window` is a number."""
    if values.get("sliding_window") is None:
        return full_layers(values)
    first = values.integer("max_window_layers", minimum=0)
    return layer_types(layer >= first for layer in range(values.integer("num_hidden_layers")))


def layer_types(slides: Iterable[bool]) -> list[str]:
    """Returns the attention types of layers, given whether each has a sliding window."""
    return [SLIDING_ATTENTION if layer_slides else FULL_ATTENTION for layer_slides in slides]


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        model_type: its name in config.json.
        architecture: the supported class in `architectures`.
        defaults: values that transformers assumes for missing keys.
        fields: fields of `LlamaConfig` that all models of the family share.
        keys: keys of config.json and the fields they set, whose types determine those of the values.
        activations: values of `hidden_act`, and those of `LlamaConfig.activation`.
        more_fields: computes further fields from the values, in which `layer_types` is complete.
        supported: values of keys for which the decoder has one implementation; a missing key means one of them.
        layer_types: computes the attention type of every layer from other keys than `layer_types`.
        recurrent_type: type of layers with a recurrence in place of attention; None without such layers.
        reads_layer_types: whether the key `layer_types` has precedence; transformers ignores it in the other families.
        partial_rotary: whether only a part of each head may be rotated.
        rope_keys: further keys of the rotary embedding that are understood, or that change nothing.
        rope_types: other names of `rope_type`, and the names that they replace.
        scaled_windows: whether a scaled rotary embedding applies to layers with a sliding window, too.
        aliases: alternative keys and the keys they replace.
        other_keys: further keys that are understood, or that change nothing.
        quantization: supported `quant_method` of weights.
        modules: names of modules that differ from `MODULES`.
        interleaved_rope: whether RoPE rotates the pairs (2i, 2i + 1) of a head.
        predicts_more_tokens: whether files may have further layers, which predict several tokens and are not read.
        gguf: how llama.cpp stores the family; None if it does not.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str | tuple[str, ...]] = dataclasses.field(default_factory=dict)
    activations: Mapping[str, str] = dataclasses.field(default_factory=lambda: ACTIVATIONS)
    more_fields: Callable[[ConfigValues], Mapping[str, Any]] = lambda values: {}
    supported: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    layer_types: Callable[[ConfigValues], list[str]] = full_layers
    recurrent_type: str | None = None
    reads_layer_types: bool = False
    partial_rotary: bool = False
    rope_keys: tuple[str, ...] = ()
    rope_types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scaled_windows: bool = True
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    other_keys: tuple[str, ...] = ()
    quantization: str | None = None
    modules: Mapping[Path, str | tuple[str, ...]] = dataclasses.field(default_factory=dict)
    interleaved_rope: bool = False
    predicts_more_tokens: bool = False
    gguf: Gguf | None = None

    def module_names(self, path: Path) -> tuple[str, ...]:
        """Returns Hugging Face's names of the module or parameter at a path in a layer of `Llama`; () without one."""
        names = self.modules.get(path, MODULES.get(path, ()))
        return (names,) if isinstance(names, str) else names

    @property
    def has_windows(self) -> bool:
        """Whether the metadata of a GGUF file determines the layers with a sliding window."""
        return self.layer_types is not full_layers and "use_sliding_window" not in self.other_keys
