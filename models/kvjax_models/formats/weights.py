"""Which tensors of a Hugging Face file which parameters of `Llama` are made of, family by family, and back.

Most parameters are one tensor, turned. Some families keep several in one (fused projections), one per expert, or
experts' weights in four bits (MXFP4, which are read and never written).
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from kvjax_models.model.config import LlamaConfig

Path = tuple[str | int, ...]

T = TypeVar("T")

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")

# Hugging Face's name of every module against its path in a layer of `Llama`, and what families call otherwise.
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
_NORMS_AROUND: dict[Path, str] = {
    ("after_attention_norm",): "post_attention_layernorm",
    ("mlp_norm",): "pre_feedforward_layernorm",
    ("after_mlp_norm",): "post_feedforward_layernorm",
}
_OTHERWISE: dict[str, dict[Path, str]] = {
    "gemma2": _NORMS_AROUND,
    "gemma3_text": _NORMS_AROUND,
    "olmo2": _NORMS_AROUND,
    "olmo3": _NORMS_AROUND,
    "glm4": {("after_attention_norm",): "post_self_attn_layernorm", ("after_mlp_norm",): "post_mlp_layernorm"},
    "mixtral": {("mlp", "router"): "block_sparse_moe.gate"},
    "gpt_oss": {("mlp", "router"): "mlp.router"},
}
# Of what is one product here, the products in a file, and what families call them that have one tensor of all.
_PRODUCTS: dict[Path, tuple[str, ...]] = {
    ("attention", "qkv"): ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp", "gate_up"): ("mlp.gate_proj", "mlp.up_proj"),
}
_FUSED: dict[str, dict[Path, str]] = {
    "phi3": {("attention", "qkv"): "self_attn.qkv_proj", ("mlp", "gate_up"): "mlp.gate_up_proj"},
    "glm": {("mlp", "gate_up"): "mlp.gate_up_proj"},
    "glm4": {("mlp", "gate_up"): "mlp.gate_up_proj"},
}
# One tensor per expert.
_EXPERT = {
    "mixtral": ("block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("mlp.experts", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
# Families whose rotary embedding turns neighbours (2i, 2i + 1).
_NEIGHBOURS = ("glm", "glm4")
_BESIDE_TEXT = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_FOUR_BITS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FOUR_BIT_VALUES = np.concatenate([_FOUR_BITS, -_FOUR_BITS])


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """What some parameters are made of, and what is made of them.

    Attributes:
        paths: of the parameters, in `Llama`.
        names: of the tensors of the file.
        shapes: of these.
        read: gives the parameters of the tensors.
        write: gives the tensors of the parameters; None for what is only read.
        dtypes: that the tensors may have.
    """

    paths: tuple[Path, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    read: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
    write: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]] | None
    dtypes: tuple[str, ...] = FLOAT_DTYPES


def parameter_rules(
    model_type: str, config: LlamaConfig, shapes: Mapping[Path, tuple[int, ...]], stored: Collection[str] = ()
) -> list[TensorRule]:
    """The rules of all parameters of a model, in their order.

    Args:
        shapes: of every parameter.
        stored: the names in the file to read; those of weights in four bits tell that they are such.
    """
    made: list[TensorRule] = []
    done: set[Path] = set()
    for path in shapes:
        if path in done:
            continue
        made.append(_rule(model_type, config, path, shapes, stored))
        done.update(made[-1].paths)
    return made


def _rule(
    model_type: str, config: LlamaConfig, path: Path, shapes: Mapping[Path, tuple[int, ...]], stored: Collection[str]
) -> TensorRule:
    shape, leaf = shapes[path], str(path[-1])
    if path[0] == "layers" and path[2:-1] in _PRODUCTS:
        return _product_rule(model_type, config, path, shape)
    of_expert = path[0] == "layers" and path[2] == "mlp" and len(shape) == (2 if leaf == "bias" else 3)
    if of_expert and model_type == "gpt_oss":
        return _gpt_oss_rule(path, shapes, stored)
    if of_expert:
        return _stacked_rule(model_type, path, shape)
    normed = path[0] == "layers" and path[2:-1] in [("attention", "query_norm"), ("attention", "key_norm")]
    order = _order(model_type, config, shape[-1]) if normed else None
    turned = leaf == "kernel"
    kept = np.argsort(order) if order is not None else None

    def read(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        tensor = tensors[0].T if turned else tensors[0]
        return [tensor if order is None else tensor[..., order]]

    def write(parameters: Sequence[np.ndarray]) -> list[np.ndarray]:
        tensor = parameters[0] if kept is None else parameters[0][..., kept]
        return [tensor.T if turned else tensor]

    return TensorRule((path,), (_name(model_type, path),), (shape[::-1] if turned else shape,), read, write)


def _name(model_type: str, path: Path) -> str:
    """Hugging Face's name of a parameter that is one tensor."""
    leaf = {"sinks": "sinks", "bias": "bias"}.get(str(path[-1]), "weight")
    if path[0] != "layers":
        return f"{_MODULES[path[:-1]]}.{leaf}"
    modules = _LAYER_MODULES | _OTHERWISE.get(model_type, {})
    return f"model.layers.{path[1]}.{modules[path[2:-1]]}.{leaf}"


def select_text_tensors(stored: Mapping[str, T]) -> dict[str, T]:
    """The tensors of a model that also sees pictures (Gemma 3), as a model of text has them: under its names, and no
    others."""
    if not any(_BESIDE_TEXT.match(name) for name in stored):
        return dict(stored)
    # Before transformers 5, and since.
    ours = lambda name: name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)  # noqa: E731
    return {ours(name): tensor for name, tensor in stored.items() if not _BESIDE_TEXT.match(name)}


# --- rotary embedding ---


def head_dim_order(head_dim: int, rotary_dim: int | None, neighbours: bool) -> np.ndarray | None:
    """Which dimension of a head in the file every dimension of ours is, so that pairs are (i, i + D/2); None where they
    are so already.

    Args:
        rotary_dim: the first dimensions, which are turned; None: all.
        neighbours: whether pairs in the file are (2i, 2i + 1); else they are (i, i + rotary_dim / 2).
    """
    turned = rotary_dim or head_dim
    if turned == head_dim and not neighbours:
        return None
    pairs = np.arange(turned).reshape(-1, 2) if neighbours else np.arange(turned).reshape(2, -1).T
    still = np.arange(turned, head_dim).reshape(2, -1).T
    return np.concatenate([pairs, still]).T.reshape(-1)


def _order(model_type: str, config: LlamaConfig, width: int) -> np.ndarray | None:
    """The order of the last axis of what makes queries and keys, of so many dimensions."""
    order = head_dim_order(config.head_dim, config.rotary_dim, model_type in _NEIGHBOURS)
    if order is None:
        return None
    first = np.arange(0, width, config.head_dim)  # of every head
    return (first[:, None] + order).reshape(-1)


# --- several parameters in one tensor, several tensors in one parameter ---


def _product_rule(model_type: str, config: LlamaConfig, path: Path, shape: tuple[int, ...]) -> TensorRule:
    """Products [out, in] in tensors of their own, or one below the other in one, that are one product here: kernel
    [in, H_kv, G + 2, D] or [in, 2, F], where they stand side by side on the last axis but one; biases without in."""
    attention, leaf = path[2] == "attention", "bias" if path[-1] == "bias" else "weight"
    fused = _FUSED.get(model_type, {}).get(path[2:-1])
    names = tuple(f"model.layers.{path[1]}.{name}.{leaf}" for name in ((fused,) if fused else _PRODUCTS[path[2:-1]]))
    inputs = shape[:1] if leaf == "weight" else ()
    heads = (config.kv_heads,) if attention else ()
    counts = (config.query_heads // config.kv_heads, 1, 1) if attention else (1, 1)
    widths = [math.prod(heads) * count * shape[-1] for count in counts]
    turns = (True, True, False) if attention else (False, False)
    orders = [_order(model_type, config, width) if turn else None for width, turn in zip(widths, turns, strict=True)]

    def read(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        parts = np.split(tensors[0], np.cumsum(widths)[:-1]) if fused else tensors
        placed = [
            (part.T if order is None else part.T[..., order]).reshape(*inputs, *heads, count, shape[-1])
            for part, order, count in zip(parts, orders, counts, strict=True)
        ]
        return [np.concatenate(placed, axis=-2)]

    def write(parameters: Sequence[np.ndarray]) -> list[np.ndarray]:
        parts = [part.reshape(*inputs, -1) for part in np.split(parameters[0], np.cumsum(counts)[:-1], axis=-2)]
        tensors = [
            (part if order is None else part[..., np.argsort(order)]).T
            for part, order in zip(parts, orders, strict=True)
        ]
        return [np.concatenate(tensors)] if fused else tensors

    sizes = [(width, *inputs) for width in ([sum(widths)] if fused else widths)]
    return TensorRule((path,), names, tuple(sizes), read, write)


def _stacked_rule(model_type: str, path: Path, shape: tuple[int, ...]) -> TensorRule:
    """One tensor [out, in] per expert."""
    prefix, modules = _EXPERT[model_type]
    module = modules[str(path[3])]
    names = tuple(f"model.layers.{path[1]}.{prefix}.{expert}.{module}.weight" for expert in range(shape[0]))
    return TensorRule(
        (path,),
        names,
        (shape[:0:-1],) * shape[0],
        lambda tensors: [np.stack([tensor.T for tensor in tensors])],
        lambda parameters: [expert.T for expert in parameters[0]],
    )


def _gpt_oss_rule(path: Path, shapes: Mapping[Path, tuple[int, ...]], stored: Collection[str]) -> TensorRule:
    """All experts in one tensor [E, in, out], those of gate and up alternating, and maybe in four bits."""
    module, leaf = str(path[3]), str(path[-1])
    modules = ("down",) if module == "down" else ("gate", "up")
    paths = tuple((*path[:3], one, leaf) for one in modules)
    name = f"model.layers.{path[1]}.mlp.experts.{'down_proj' if module == 'down' else 'gate_up_proj'}"
    name += "_bias" if leaf == "bias" else ""
    shape = (*shapes[path][:-1], len(modules) * shapes[path][-1])

    def apart(tensor: np.ndarray) -> list[np.ndarray]:
        return [tensor[..., number :: len(modules)] for number in range(len(modules))]

    def together(parameters: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.stack(parameters, axis=-1).reshape(shape)]

    if leaf == "bias" or f"{name}_blocks" not in stored:
        return TensorRule(paths, (name,), (shape,), lambda tensors: apart(tensors[0]), together)
    experts, inputs, outputs = shape
    blocks, scales = (experts, outputs, inputs // 32, 16), (experts, outputs, inputs // 32)
    names = (f"{name}_blocks", f"{name}_scales")
    return TensorRule(
        paths, names, (blocks, scales), lambda tensors: apart(dequantize_mxfp4(*tensors).swapaxes(1, 2)), None, ("U8",)
    )


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Weights in four bits as bfloat16, which holds all that they can be.

    Args:
        blocks: uint8 [E, out, in / 32, 16], two numbers in a byte, the first in its lower half.
        scales: uint8 [E, out, in / 32], powers of two, 127 for 1.

    Returns:
        bfloat16 [E, out, in].

    Source: OCP Microscaling Formats 1.0, E2M1 elements under an E8M0 scale.
    """
    experts, outputs, groups, _ = blocks.shape
    made = np.empty((experts, outputs, groups * 32), ml_dtypes.bfloat16)
    for expert in range(experts):  # one at a time: float32 of all would be twice what is kept
        halves = np.stack([blocks[expert] & 15, blocks[expert] >> 4], axis=-1)
        values = FOUR_BIT_VALUES[halves].reshape(outputs, groups, 32)
        with np.errstate(over="ignore"):  # what becomes infinite is named where it is loaded
            made[expert] = np.ldexp(values, scales[expert][..., None].astype(np.int32) - 127).reshape(outputs, -1)
    return made


@dataclasses.dataclass(frozen=True)
class OutputTensor:
    """A tensor of a file to be, made when it is asked for."""

    rule: TensorRule
    number: int  # among those of its rule
    parameters: Mapping[Path, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rule.shapes[self.number]

    @property
    def dtype(self) -> Any:
        return self.parameters[self.rule.paths[0]].dtype

    def make(self) -> np.ndarray:
        assert self.rule.write is not None, "weights in four bits are not written"
        return self.rule.write([np.asarray(self.parameters[path]) for path in self.rule.paths])[self.number]


def output_tensors(made: Sequence[TensorRule], parameters: Mapping[Path, Any]) -> dict[str, OutputTensor]:
    """Every tensor of a file, by name."""
    return {name: OutputTensor(rule, number, parameters) for rule in made for number, name in enumerate(rule.names)}
