"""Maps the tensors of Hugging Face files to the parameters of `Llama`, family by family.

Most parameters are one transposed tensor. Some families fuse several projections into one tensor, store one tensor per
expert, or store experts as MXFP4.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import ml_dtypes
import numpy as np

from kvjax_models.model.config import LlamaConfig

Path = tuple[str | int, ...]
Shape = tuple[int, ...]
T = TypeVar("T")

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")

# Hugging Face's names of modules by their path in a layer of `Llama`, and the names that differ in some families.
_LAYER_MODULES: dict[Path, str] = {
    ("attention_norm",): "input_layernorm",
    ("attention", "output"): "self_attn.o_proj",
    ("attention", "query_norm"): "self_attn.q_norm",
    ("attention", "key_norm"): "self_attn.k_norm",
    ("attention",): "self_attn",  # its sinks
    ("mlp_norm",): "post_attention_layernorm",
    ("mlp", "router"): "mlp.gate",
    ("mlp", "down"): "mlp.down_proj",
}
_MODULES: dict[Path, str] = {("embedding",): "model.embed_tokens", ("norm",): "model.norm", ("head",): "lm_head"}
_SANDWICH_NORMS: dict[Path, str] = {
    ("after_attention_norm",): "post_attention_layernorm",
    ("mlp_norm",): "pre_feedforward_layernorm",
    ("after_mlp_norm",): "post_feedforward_layernorm",
}
_FAMILY_MODULES: dict[str, dict[Path, str]] = {
    "gemma2": _SANDWICH_NORMS,
    "gemma3_text": _SANDWICH_NORMS,
    "olmo2": _SANDWICH_NORMS,
    "olmo3": _SANDWICH_NORMS,
    "glm4": {("after_attention_norm",): "post_self_attn_layernorm", ("after_mlp_norm",): "post_mlp_layernorm"},
    "mixtral": {("mlp", "router"): "block_sparse_moe.gate"},
    "gpt_oss": {("mlp", "router"): "mlp.router"},
}
# Projections that `Llama` fuses: their names, and the single name in families that store them fused, too.
_PROJECTIONS: dict[Path, tuple[str, ...]] = {
    ("attention", "qkv"): ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp", "gate_up"): ("mlp.gate_proj", "mlp.up_proj"),
}
_FUSED: dict[str, dict[Path, str]] = {
    "phi3": {("attention", "qkv"): "self_attn.qkv_proj", ("mlp", "gate_up"): "mlp.gate_up_proj"},
    "glm": {("mlp", "gate_up"): "mlp.gate_up_proj"},
    "glm4": {("mlp", "gate_up"): "mlp.gate_up_proj"},
}
# Families with one tensor per expert.
EXPERTS = {
    "mixtral": ("block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("mlp.experts", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
_INTERLEAVED_ROPE = ("glm", "glm4")  # families that rotate pairs (2i, 2i + 1)
_VISION_TENSOR = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_FP4_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4_VALUES = np.concatenate([_FP4_MAGNITUDES, -_FP4_MAGNITUDES])


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """The conversion of some tensors of a file to some parameters of `Llama`.

    Attributes:
        paths: paths of the parameters in `Llama`.
        names: names of the tensors.
        shapes: shapes of the tensors.
        read: computes the parameters from the tensors.
        dtypes: allowed dtypes of the tensors.
    """

    paths: tuple[Path, ...]
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    read: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
    dtypes: tuple[str, ...] = FLOAT_DTYPES


def parameter_rules(
    model_type: str, config: LlamaConfig, shapes: Mapping[Path, Shape], stored: Collection[str] = ()
) -> list[TensorRule]:
    """Returns the rules of all parameters of a model.

    Args:
        model_type: key of `families.FAMILIES`.
        config: configuration of the model.
        shapes: shape of every parameter.
        stored: names of the tensors to read, which show whether experts are stored as MXFP4.
    """
    rules: list[TensorRule] = []
    covered: set[Path] = set()
    for path in shapes:
        if path not in covered:
            rules.append(_rule(model_type, config, path, shapes, stored))
            covered.update(rules[-1].paths)
    return rules


def select_text_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Returns the tensors of a multimodal model's text decoder (Gemma 3), named as in a text-only model."""
    if not any(_VISION_TENSOR.match(name) for name in tensors):
        return dict(tensors)
    return {_text_name(name): tensor for name, tensor in tensors.items() if not _VISION_TENSOR.match(name)}


def head_dim_order(head_dim: int, rotary_dim: int | None, interleaved: bool) -> np.ndarray | None:
    """Returns the permutation of a head's dimensions that makes rotated pairs (i, i + D/2).

    Args:
        head_dim: dimension of a head.
        rotary_dim: number of rotated dimensions, which are the first ones in the file; None: all.
        interleaved: whether pairs in the file are (2i, 2i + 1) instead of (i, i + rotary_dim / 2).

    Returns:
        For every dimension of ours, the one in the file; None if the order is the same.
    """
    rotated = rotary_dim or head_dim
    if rotated == head_dim and not interleaved:
        return None
    pairs = np.arange(rotated).reshape(-1, 2) if interleaved else np.arange(rotated).reshape(2, -1).T
    unrotated = np.arange(rotated, head_dim).reshape(2, -1).T
    return np.concatenate([pairs, unrotated]).T.reshape(-1)


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantizes MXFP4 weights to bfloat16, which represents them exactly.

    Args:
        blocks: uint8 [E, out, in / 32, 16]; each byte holds two E2M1 numbers, the first in its lower half.
        scales: uint8 [E, out, in / 32]; E8M0 exponents with a bias of 127.

    Returns:
        bfloat16 [E, out, in].

    Reference:
        OCP Microscaling Formats (MX) Specification 1.0.
    """
    experts, outputs, groups, _ = blocks.shape
    weights = np.empty((experts, outputs, groups * 32), ml_dtypes.bfloat16)
    for expert in range(experts):  # float32 values of all experts would need twice the memory of the result
        nibbles = np.stack([blocks[expert] & 15, blocks[expert] >> 4], axis=-1)
        values = FP4_VALUES[nibbles].reshape(outputs, groups, 32)
        with np.errstate(over="ignore"):  # the loader reports infinite values
            weights[expert] = np.ldexp(values, scales[expert][..., None].astype(np.int32) - 127).reshape(outputs, -1)
    return weights


def _rule(
    model_type: str, config: LlamaConfig, path: Path, shapes: Mapping[Path, Shape], stored: Collection[str]
) -> TensorRule:
    """Returns the rule of one parameter."""
    shape, leaf, in_layer = shapes[path], str(path[-1]), path[0] == "layers"
    if in_layer and path[2:-1] in _PROJECTIONS:
        return _projection_rule(model_type, config, path, shape)
    is_expert = in_layer and path[2] == "mlp" and len(shape) == (2 if leaf == "bias" else 3)
    if is_expert and model_type == "gpt_oss":
        return _gpt_oss_rule(path, shapes, stored)
    if is_expert:
        return _expert_rule(model_type, path, shape)
    is_head_norm = in_layer and path[2:-1] in [("attention", "query_norm"), ("attention", "key_norm")]
    order = _heads_order(model_type, config, shape[-1]) if is_head_norm else None
    is_kernel = leaf == "kernel"

    def read(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [_permute(tensors[0].T if is_kernel else tensors[0], order)]

    name = _tensor_name(model_type, path)
    return TensorRule((path,), (name,), (shape[::-1] if is_kernel else shape,), read)


def _tensor_name(model_type: str, path: Path) -> str:
    """Returns Hugging Face's name of a parameter that is a single tensor."""
    leaf = {"sinks": "sinks", "bias": "bias"}.get(str(path[-1]), "weight")
    if path[0] != "layers":
        return f"{_MODULES[path[:-1]]}.{leaf}"
    modules = _LAYER_MODULES | _FAMILY_MODULES.get(model_type, {})
    return f"model.layers.{path[1]}.{modules[path[2:-1]]}.{leaf}"


def _text_name(name: str) -> str:
    """Returns a text-only model's name of a tensor, from the names before and since transformers 5."""
    return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)


def _heads_order(model_type: str, config: LlamaConfig, width: int) -> np.ndarray | None:
    """Returns the permutation of the last axis of a query or key projection of this width."""
    order = head_dim_order(config.head_dim, config.rotary_dim, model_type in _INTERLEAVED_ROPE)
    if order is None:
        return None
    return (np.arange(0, width, config.head_dim)[:, None] + order).reshape(-1)


def _permute(tensor: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    return tensor if order is None else tensor[..., order]


def _projection_rule(model_type: str, config: LlamaConfig, path: Path, shape: Shape) -> TensorRule:
    """Returns the rule of fused projections.

    The file has one tensor [out, in] per projection, or one that concatenates them along `out`. The parameter is
    [in, H_kv, G + 2, D] or [in, 2, F], with the projections along its last axis but one; biases have no `in`.
    """
    is_attention, leaf = path[2] == "attention", "bias" if path[-1] == "bias" else "weight"
    fused = _FUSED.get(model_type, {}).get(path[2:-1])
    names = tuple(f"model.layers.{path[1]}.{name}.{leaf}" for name in ((fused,) if fused else _PROJECTIONS[path[2:-1]]))
    inputs = shape[:1] if leaf == "weight" else ()
    heads = (config.kv_heads,) if is_attention else ()
    counts = (config.query_heads // config.kv_heads, 1, 1) if is_attention else (1, 1)
    widths = [math.prod(heads) * count * shape[-1] for count in counts]
    rotated = (True, True, False) if is_attention else (False, False)
    orders = [_heads_order(model_type, config, width) if r else None for width, r in zip(widths, rotated, strict=True)]

    def read(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Concatenates the projections in the `tensors` of a file into one parameter."""
        parts = np.split(tensors[0], np.cumsum(widths)[:-1]) if fused else tensors
        arrays = [
            _permute(part.T, order).reshape(*inputs, *heads, count, shape[-1])
            for part, order, count in zip(parts, orders, counts, strict=True)
        ]
        return [np.concatenate(arrays, axis=-2)]

    sizes = [(width, *inputs) for width in ([sum(widths)] if fused else widths)]
    return TensorRule((path,), names, tuple(sizes), read)


def _expert_rule(model_type: str, path: Path, shape: Shape) -> TensorRule:
    """Returns the rule of experts with one tensor [out, in] per expert."""
    prefix, modules = EXPERTS[model_type]
    module = modules[str(path[3])]
    names = tuple(f"model.layers.{path[1]}.{prefix}.{expert}.{module}.weight" for expert in range(shape[0]))

    def read(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.stack([tensor.T for tensor in tensors])]

    return TensorRule((path,), names, (shape[:0:-1],) * shape[0], read)


def _gpt_oss_rule(path: Path, shapes: Mapping[Path, Shape], stored: Collection[str]) -> TensorRule:
    """Returns the rule of gpt-oss experts: one tensor [E, in, out], with gate and up interleaved, maybe as MXFP4."""
    module, leaf = str(path[3]), str(path[-1])
    modules = ("down",) if module == "down" else ("gate", "up")
    paths = tuple((*path[:3], name, leaf) for name in modules)
    name = f"model.layers.{path[1]}.mlp.experts.{'down_proj' if module == 'down' else 'gate_up_proj'}"
    name += "_bias" if leaf == "bias" else ""
    shape = (*shapes[path][:-1], len(modules) * shapes[path][-1])

    def read(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [tensors[0][..., index :: len(modules)] for index in range(len(modules))]

    def read_mxfp4(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        return read([dequantize_mxfp4(*tensors).swapaxes(1, 2)])

    if leaf == "bias" or f"{name}_blocks" not in stored:
        return TensorRule(paths, (name,), (shape,), read)
    experts, inputs, outputs = shape
    block_shapes = (experts, outputs, inputs // 32, 16), (experts, outputs, inputs // 32)
    return TensorRule(paths, (f"{name}_blocks", f"{name}_scales"), block_shapes, read_mxfp4, ("U8",))
