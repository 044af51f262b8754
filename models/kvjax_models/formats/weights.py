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

from kvjax_models.families.family import Family, Path
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.gated_delta import GatedDeltaSizes

Shape = tuple[int, ...]
T = TypeVar("T")

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")

_MODULES: dict[Path, str] = {("embedding",): "model.embed_tokens", ("norm",): "model.norm", ("head",): "lm_head"}
_VISION_TENSOR = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector|embed_vision|audio_tower|embed_audio|visual)\."
)
_LAYER_NUMBER = re.compile(r"(?:model\.layers|blk)\.(\d+)\.")
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
    family: Family, config: LlamaConfig, shapes: Mapping[Path, Shape], stored: Collection[str] = ()
) -> list[TensorRule]:
    """Returns the rules of all parameters of a model.

    Args:
        config: configuration of the model.
        shapes: shape of every parameter.
        stored: names of the tensors to read, which show how experts are stored.
    """
    rules: list[TensorRule] = []
    covered: set[Path] = set()
    for path in shapes:
        if path not in covered:
            rules.append(_rule(family, config, path, shapes, stored))
            covered.update(rules[-1].paths)
    return rules


def select_text_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Returns the tensors of a multimodal model's text decoder (Gemma 3), named as in a text-only model."""
    if not any(_VISION_TENSOR.match(name) or name.startswith("model.language_model.") for name in tensors):
        return dict(tensors)
    return {_text_name(name): tensor for name, tensor in tensors.items() if not _VISION_TENSOR.match(name)}


def select_layers(tensors: Mapping[str, T], layers: int) -> dict[str, T]:
    """Returns the tensors, except of layers from a number on, which predict several tokens.

    Args:
        tensors: tensors by their name in a Hugging Face or GGUF file.
    """
    numbers = {name: _LAYER_NUMBER.match(name) for name in tensors}
    return {name: tensors[name] for name, match in numbers.items() if match is None or int(match[1]) < layers}


def head_dim_order(head_dim: int, rotary_dim: int | None, interleaved: bool) -> np.ndarray | None:
    """Returns the permutation of a head's dimensions that makes rotated pairs (i, i + D/2).

    Args:
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
    family: Family, config: LlamaConfig, path: Path, shapes: Mapping[Path, Shape], stored: Collection[str]
) -> TensorRule:
    """Returns the rule of one parameter."""
    shape, leaf = shapes[path], str(path[-1])
    suffix = "bias" if leaf == "bias" else "weight"
    if path[0] != "layers":
        return _transposed_rule(path, f"{family.modules.get(path[:-1], _MODULES[path[:-1]])}.{suffix}", shape)
    config, prefix, inner = config.of_layer(int(path[1])), f"model.layers.{path[1]}.", path[2:]
    if names := family.module_names(inner):
        return _parameter_rule(config, path, prefix + names[0], shape)
    module = inner[-2]
    if module in ("gate", "up", "down") and len(shape) == (2 if leaf == "bias" else 3):
        [name] = family.module_names(("experts", module))
        return _experts_rule(prefix + name, path, shapes, stored)
    names = tuple(f"{prefix}{name}.{suffix}" for name in family.module_names(inner[:-1]))
    if module in ("qkvz", "ba"):
        return _delta_projection_rule(config, path, names, shape)
    if module == "output_gate":  # a part of the query projection
        stored_shape = (2 * shape[-1], *shape[:-1])
        return _single_rule(path, names[0], stored_shape, lambda tensor: _split_gate(tensor, config)[1].T)
    if module in ("qkv", "gate_up", "bcx"):
        return _projection_rule(family, config, path, names, shape)
    if module in ("query_norm", "key_norm"):
        order = _heads_order(family, config, shape[-1])
        return _single_rule(path, names[0], shape, lambda tensor: _permute(tensor, order))
    return _transposed_rule(path, names[0], shape)


def _single_rule(path: Path, name: str, shape: Shape, convert: Callable[[np.ndarray], np.ndarray]) -> TensorRule:
    """Returns the rule of a parameter that follows from one tensor of a shape."""
    return TensorRule((path,), (name,), (shape,), lambda tensors: [convert(tensors[0])])


def _transposed_rule(path: Path, name: str, shape: Shape) -> TensorRule:
    """Returns the rule of a parameter whose kernel [in, out] is stored as [out, in]."""
    return (
        _single_rule(path, name, shape[::-1], np.transpose) if path[-1] == "kernel" else _same_rule(path, name, shape)
    )


def _same_rule(path: Path, name: str, shape: Shape) -> TensorRule:
    return _single_rule(path, name, shape, lambda tensor: tensor)


def _parameter_rule(config: LlamaConfig, path: Path, name: str, shape: Shape) -> TensorRule:
    """Returns the rule of a parameter whose full name the family gives."""
    if path[-1] == "convolution":
        return _convolution_rule(_delta_sizes(config), path, name, shape)
    if path[-1] == "kernel":  # of a short convolution [k, C], stored as [C, 1, k]
        return _single_rule(path, name, (shape[1], 1, shape[0]), lambda tensor: tensor[:, 0].T)
    return _same_rule(path, name, shape)


def _text_name(name: str) -> str:
    """Returns a text-only model's name of a tensor, from the names before and since transformers 5."""
    return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)


def _heads_order(family: Family, config: LlamaConfig, width: int) -> np.ndarray | None:
    """Returns the permutation of the last axis of a query or key projection of this width."""
    order = head_dim_order(config.head_dim, config.rope.rotary_dim, family.interleaved_rope)
    if order is None:
        return None
    return (np.arange(0, width, config.head_dim)[:, None] + order).reshape(-1)


def _permute(tensor: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    return tensor if order is None else tensor[..., order]


def _projection_rule(family: Family, config: LlamaConfig, path: Path, names: Sequence[str], shape: Shape) -> TensorRule:
    """Returns the rule of fused projections.

    The file has one tensor [out, in] per projection, or one that concatenates them along `out`. The parameter is
    [in, H_kv, G + 2, D], [in, 2, F] or [in, 1, F], with the projections along its last axis but one; biases have no
    `in`.
    """
    is_attention, has_window = path[2] == "attention", config.window(int(path[1])) is not None
    fused, keys_as_values = len(names) == 1, is_attention and config.attention.keys_as_values and not has_window
    names = tuple(names[:2] if keys_as_values else names)
    inputs = () if path[-1] == "bias" else shape[:1]
    heads = (config.kv_heads,) if is_attention else ()
    has_gate = is_attention and config.attention.gate
    counts = (config.query_heads // config.kv_heads, 1, 1) if is_attention else (1,) * shape[-2]
    widths = [math.prod(heads) * count * shape[-1] for count in counts]
    rotated = (True, True, False) if is_attention else (False,) * shape[-2]
    orders = [_heads_order(family, config, width) if r else None for width, r in zip(widths, rotated, strict=True)]

    def read(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Concatenates the projections in the `tensors` of a file into one parameter."""
        parts = np.split(tensors[0], np.cumsum(widths)[:-1]) if fused else tensors
        parts = [*parts, parts[1]] if keys_as_values else parts
        if has_gate:
            parts = [_split_gate(parts[0], config)[0], *parts[1:]]
        arrays = [
            _permute(part.T, order).reshape(*inputs, *heads, count, shape[-1])
            for part, order, count in zip(parts, orders, counts, strict=True)
        ]
        return [np.concatenate(arrays, axis=-2)]

    widths = [2 * widths[0], *widths[1:]] if has_gate else widths
    sizes = [(width, *inputs) for width in ([sum(widths)] if fused else widths[: len(names)])]
    return TensorRule((path,), names, tuple(sizes), read)


def _split_gate(tensor: np.ndarray, config: LlamaConfig) -> list[np.ndarray]:
    """Returns queries and output gates of a projection [H_q * 2D, ...] that has both of each head in turn."""
    heads = tensor.reshape(config.query_heads, 2, config.head_dim, *tensor.shape[1:])
    return [heads[:, part].reshape(-1, *tensor.shape[1:]) for part in range(2)]


def _delta_projection_rule(config: LlamaConfig, path: Path, names: Sequence[str], shape: Shape) -> TensorRule:
    """Returns the rule of a fused projection [in, H, out] of the gated delta rule.

    The file has one tensor, in which every key head has its outputs in turn, or several, in which every kind of output
    has its heads in turn: queries, keys and values in one tensor, and gates in another one.
    """
    sizes, (inputs, heads, outputs) = _delta_sizes(config), shape
    if len(names) == 1:
        return _single_rule(path, names[0], (heads * outputs, inputs), lambda tensor: tensor.T.reshape(shape))
    gates = sizes.group_size * sizes.value_dim
    kinds = ((outputs - gates, gates), (sizes.group_size,) * 2)[path[3] == "ba"]

    def read(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Arranges the outputs in the `tensors` of a file by key head."""
        parts = tensors if path[3] == "ba" else [*_split_by_kind(tensors[0], sizes), tensors[1]]
        return [np.concatenate([part.T.reshape(inputs, heads, -1) for part in parts], axis=-1)]

    return TensorRule((path,), tuple(names), tuple((heads * width, inputs) for width in kinds), read)


def _convolution_rule(sizes: GatedDeltaSizes, path: Path, name: str, shape: Shape) -> TensorRule:
    """Returns the rule of the convolution [k, H, C], stored as [H * C, 1, k] for queries, keys and values."""
    kernel_size, heads, channels = shape

    def convert(tensor: np.ndarray) -> np.ndarray:
        parts = [part.reshape(heads, -1, kernel_size) for part in _split_by_kind(tensor[:, 0], sizes)]
        return np.concatenate(parts, axis=1).transpose(2, 0, 1)

    return _single_rule(path, name, (heads * channels, 1, kernel_size), convert)


def _split_by_kind(tensor: np.ndarray, sizes: GatedDeltaSizes) -> list[np.ndarray]:
    """Returns the rows of queries, keys and values of the gated delta rule."""
    keys = sizes.key_heads * sizes.key_dim
    return np.split(tensor, [keys, 2 * keys])


def _delta_sizes(config: LlamaConfig) -> GatedDeltaSizes:
    assert config.recurrence is not None and isinstance(config.recurrence.sizes, GatedDeltaSizes)
    return config.recurrence.sizes


def _experts_rule(name: str, path: Path, shapes: Mapping[Path, Shape], stored: Collection[str]) -> TensorRule:
    """Returns the rule of experts, which files store in one of three forms.

    Args:
        name: name of the tensor without suffix; "{}" stands for the number of an expert.
    """
    if "{}" not in name:
        return _stacked_expert_rule(name, path, shapes, stored)
    concatenated = name.partition("{}")[0] + ("down_proj" if path[-2] == "down" else "gate_up_proj")
    if concatenated in stored:
        return _concatenated_expert_rule(concatenated, path, shapes[path])
    return _expert_rule(f"{name}.weight", path, shapes[path])


def _expert_rule(name: str, path: Path, shape: Shape) -> TensorRule:
    """Returns the rule of experts with one tensor [out, in] per expert, whose number replaces "{}" in the name."""
    names = tuple(name.format(expert) for expert in range(shape[0]))

    def read(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.stack([tensor.T for tensor in tensors])]

    return TensorRule((path,), names, (shape[:0:-1],) * shape[0], read)


def _concatenated_expert_rule(name: str, path: Path, shape: Shape) -> TensorRule:
    """Returns the rule of experts in one tensor [E, out, in], with gate before up along `out`, as in transformers 5.

    Some published files have this form (Qwen3.5, Gemma 4), while transformers writes one tensor per expert of Qwen3.5.
    """
    modules = _expert_modules(path)
    paths = tuple((*path[:-2], module, "kernel") for module in modules)
    experts, inputs, outputs = shape

    def read(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        return np.split(tensors[0].swapaxes(1, 2), len(modules), axis=2)

    return TensorRule(paths, (name,), ((experts, len(modules) * outputs, inputs),), read)


def _expert_modules(path: Path) -> tuple[str, ...]:
    """Returns the projections of experts that files store in the same tensor as the one at a path."""
    return ("down",) if path[-2] == "down" else ("gate", "up")


def _stacked_expert_rule(name: str, path: Path, shapes: Mapping[Path, Shape], stored: Collection[str]) -> TensorRule:
    """Returns the rule of experts in one tensor [E, in, out], with gate and up interleaved, or in MXFP4."""
    leaf, modules = str(path[-1]), _expert_modules(path)
    paths = tuple((*path[:-2], module, leaf) for module in modules)
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
