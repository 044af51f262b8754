"""Loads models from GGUF files: configuration and weights in the names and layouts of Hugging Face.

    general.architecture                  family of `families.FAMILIES` and traits of its tensors
    llama.embedding_length, ...           the values of a config.json, which `config_json` checks
    blk.0.attn_q.weight, ...              model.layers.0.self_attn.q_proj.weight, ...

Reference:
    convert_hf_to_gguf.py and llama-model.cpp of llama.cpp, for names, layouts and defaults.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from kvjax_models.formats import config_json, config_keys, config_values, rope_config
from kvjax_models.formats.checkpoint import Checkpoint, LoadOptions, StoredTensor, build_model
from kvjax_models.formats.families import FAMILIES, FULL_ATTENTION, SLIDING_ATTENTION
from kvjax_models.formats.gguf_file import GGUFFile, QuantizedTensor
from kvjax_models.formats.weights import EXPERTS
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """How llama.cpp stores a family of models.

    Attributes:
        family: key of `families.FAMILIES`.
        interleaved_rope: whether the rows of query and key projections are permuted so that RoPE rotates the pairs
            (2i, 2i + 1) of a head.
        norm_offset: added to the stored scales of norms.
        modules: Hugging Face's names of modules in a layer that differ from `_MODULES`.
        values: values of config.json that llama.cpp implies.
    """

    family: str
    interleaved_rope: bool = False
    norm_offset: float = 0.0
    modules: dict[str, str] = dataclasses.field(default_factory=dict)
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj"}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}

ARCHITECTURES = {
    "llama": _Architecture("llama", interleaved_rope=True),
    "mixtral": _Architecture(  # llama with experts
        "mixtral", interleaved_rope=True, modules={"ffn_gate_inp": "block_sparse_moe.gate"}
    ),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "qwen3moe": _Architecture("qwen3_moe", values={"norm_topk_prob": True}),
    "gemma": _Architecture("gemma", norm_offset=1.0, values=_GEMMA),
    "gemma2": _Architecture(  # the first converters wrote no window
        "gemma2", norm_offset=1.0, modules=_SANDWICH_NORMS, values=_GEMMA | {"sliding_window": 4096}
    ),
    "gemma3": _Architecture("gemma3_text", norm_offset=1.0, modules=_SANDWICH_NORMS, values=_GEMMA),
    "phi3": _Architecture("phi3", modules=_FUSED_MLP),
    "granite": _Architecture("granite", interleaved_rope=True),
    "olmo2": _Architecture("olmo2", modules=_SANDWICH_NORMS),
    "olmo3": _Architecture("olmo3", modules=_SANDWICH_NORMS),  # olmo2 with a sliding window
    "smollm3": _Architecture("smollm3", interleaved_rope=True),
    "glm4": _Architecture(
        "glm4",
        modules=_FUSED_MLP | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    ),
    "gpt-oss": _Architecture(
        "gpt_oss",
        modules={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
    ),
}

# Keys of the metadata after the architecture's name, and the keys of config.json.
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "layer_types",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_MOE_KEYS = {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
# Further keys that are understood.
_OTHER_KEYS = {
    "attention.value_length",
    "rope.dimension_count",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "vocab_size",
}
_HARMLESS = {"attention.layer_norm_epsilon", "pooling_type"}  # the models have RMS norms, and give no sentence vectors
# Keys whose value must equal that of another key, if both are set.
_EQUAL_KEYS = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.key_length",
    "embedding_length_out": "embedding_length",
    "expert_feed_forward_length": "feed_forward_length",
    "rope.dimension_count_swa": "rope.dimension_count",
    "rope.freq_base_swa": "rope.freq_base",
}
# Values of other keys that change nothing; all further keys are refused.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.sliding_window_pattern": (False,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_gating_func": (0, 1),  # unspecified, softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (0,),
    "rope.scaling.alpha": (0,),
    "rope.scaling.finetuned": (True,),
    "rope.scaling.yarn_beta_fast": (32,),  # llama.cpp computes with these in the supported architectures
    "rope.scaling.yarn_beta_slow": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "swiglu_clamp_exp": (0,),
    "swiglu_clamp_shexp": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # these scale attention by the width per head instead of head_dim
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_Conversion = Callable[[np.ndarray], np.ndarray]

_BLOCK_TENSOR = re.compile(r"blk\.(?P<layer>\d{1,6})\.(?P<module>\w+)(?P<suffix>\.weight|\.bias|)")
_EXPERT_MODULE = re.compile(r"ffn_(?P<projection>gate|up|down)_exps")


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor in the layout of Hugging Face; see `checkpoint.StoredTensor`.

    Attributes:
        sources: tensors of the file.
        shape: shape of the converted tensor.
        convert: converts their values.
    """

    sources: tuple[QuantizedTensor, ...]
    shape: tuple[int, ...]
    convert: Callable[..., np.ndarray]

    @property
    def dtype(self) -> str:
        return self.sources[0].dtype

    def read(self, dtype: np.typing.DTypeLike = np.float32) -> np.ndarray:
        return self.convert(*(source.read(dtype) for source in self.sources))


def load_config(file: GGUFFile) -> LlamaConfig:
    """Returns the configuration in a GGUF file.

    Args:
        file: the file.

    Raises:
        ValueError: if the model has an unsupported architecture or feature.
    """
    return _parse(file)[2]


def load_model(file: GGUFFile, options: LoadOptions) -> Llama:
    """Loads a model from a GGUF file; reads and dequantizes one tensor at a time.

    Args:
        file: the file.
        options: dtypes and mesh.

    Returns:
        The model.

    Raises:
        ValueError: if the model is not supported; lists all missing, superfluous and misshapen tensors.
    """
    return build_model(read_checkpoint(file)[1], options)


def read_checkpoint(file: GGUFFile) -> tuple[dict[str, Any], Checkpoint]:
    """Returns the values of a config.json and the unread tensors, as in a Hugging Face directory of the model.

    Args:
        file: the file.
    """
    architecture, values, config = _parse(file)
    tensors: dict[str, StoredTensor] = dict(_convert_tensors(file, architecture, config))
    return values, Checkpoint(file.path, architecture.family, config, tensors)


def _parse(file: GGUFFile) -> tuple[_Architecture, dict[str, Any], LlamaConfig]:
    """Returns architecture, values of a config.json and configuration of a file.

    Raises:
        ValueError: if they are not supported, with the path of the file.
    """
    try:
        name = file.metadata.get("general.architecture")
        architecture = _architecture(file)
        values = _config_values(file, str(name), architecture)
        return architecture, values, config_json.parse_config(values)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error


def _architecture(file: GGUFFile) -> _Architecture:
    """Returns the architecture of a file.

    Raises:
        ValueError: if it is not supported.
    """
    name = file.metadata.get("general.architecture")
    if name == "llama" and file.metadata.get("llama.expert_count"):
        name = "mixtral"
    if name == "olmo2" and file.metadata.get("olmo2.attention.sliding_window"):
        name = "olmo3"
    if not isinstance(name, str) or name not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES.keys() - {"mixtral", "olmo3"}))
        raise ValueError(f"general.architecture={name!r} is not supported; supported: {supported}")
    return ARCHITECTURES[name]


def _config_values(file: GGUFFile, name: str, architecture: _Architecture) -> dict[str, Any]:
    """Returns the values of the config.json that describes the model of a file.

    Args:
        file: the file.
        name: its `general.architecture`, the prefix of its keys.
        architecture: its architecture.

    Raises:
        ValueError: if a value differs between layers, or a key or a combination is not supported.
    """
    family = architecture.family
    keys = _understood_keys(family)
    _check_keys(file, name, family, keys)
    found = {
        key: _metadata_value(file, f"{name}.{suffix}")
        for suffix, key in keys.items()
        if suffix != "attention.sliding_window_pattern"
    }
    values = {key: value for key, value in found.items() if value is not None}
    values = {"model_type": family, "rope_theta": 10000.0, **architecture.values, **values}
    values["sliding_window"] = values.get("sliding_window") or None
    width, heads = (config_values.integer(values, key) for key in ("hidden_size", "num_attention_heads"))
    values = {"num_key_value_heads": heads, "head_dim": width // heads, **values}
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        values["vocab_size"] = _vocab_size(file, embedding.shape[0])
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    head_dim = config_values.integer(values, "head_dim")
    if _metadata_value(file, f"{name}.attention.value_length") not in (None, head_dim):
        raise ValueError(f"{name}.attention.value_length must equal {name}.attention.key_length={head_dim}")
    if name in _LAYERS_OF_27B:
        is_27b = values.get("num_hidden_layers") == _LAYERS_OF_27B[name]
        values["query_pre_attn_scalar"] = width // heads if is_27b else head_dim
    if "attention.sliding_window_pattern" in keys:
        values |= _layer_types(file, name, values)
    return values | _rope_values(file, name, values)


def _understood_keys(family: str) -> dict[str, str]:
    """Returns the keys of the metadata that a family has, and their names in config.json."""
    keys = _KEYS | (_MOE_KEYS if family == "qwen3_moe" else {"expert_count": "num_local_experts"})
    understood = config_keys.understood_keys(FAMILIES[family])
    if family == "smollm3" or FAMILIES[family].sliding not in ("all", "by_layer_type"):
        understood -= {"sliding_window", "layer_types"}  # a window needs a switch that the metadata does not have
    return {suffix: key for suffix, key in keys.items() if key in understood}


def _check_keys(file: GGUFFile, name: str, family: str, understood: Mapping[str, str]) -> None:
    """Refuses keys of the architecture that may change the computation.

    Args:
        file: the file.
        name: prefix of its keys.
        family: family of the model.
        understood: keys that are understood.

    Raises:
        ValueError: with all of them.
    """
    unsupported = []
    for key in file.metadata:
        suffix = key.removeprefix(f"{name}.")
        if suffix == key or suffix in understood or suffix in _OTHER_KEYS or suffix in _HARMLESS:
            continue
        value, neutral = _metadata_value(file, key), [*_NEUTRAL.get(suffix, ())]
        if suffix in _EQUAL_KEYS:
            neutral.append(_metadata_value(file, f"{name}.{_EQUAL_KEYS[suffix]}"))
        if suffix == "rope.scaling.finetuned" and family != "granite":
            neutral.append(False)  # only Granite has no rotary embedding then
        if value not in neutral:
            unsupported.append(f"{key}={value!r}")
    if unsupported:
        raise ValueError(f"not supported: {', '.join(unsupported)}")


def _vocab_size(file: GGUFFile, rows: int) -> int:
    """Returns the size of the vocabulary.

    Args:
        file: the file.
        rows: number of rows of the embedding.

    Raises:
        ValueError: if the tokenizer has another number of tokens.
    """
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != rows:
        raise ValueError(f"token_embd.weight has {rows} rows, but tokenizer.ggml.tokens has {len(tokens)} tokens")
    return rows


def _layer_types(file: GGUFFile, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `layer_types`, {} without a pattern: booleans per layer, or n, where every n-th layer has full attention.

    Args:
        file: the file.
        name: prefix of its keys.
        values: the other values.
    """
    pattern = file.metadata.get(f"{name}.attention.sliding_window_pattern")
    if pattern is None or values["sliding_window"] is None:
        return {}
    if not isinstance(pattern, np.ndarray):
        period = config_values.integer({"sliding_window_pattern": pattern}, "sliding_window_pattern", minimum=0)
        layers = config_values.integer(values, "num_hidden_layers")
        pattern = np.array([not period or (layer + 1) % period != 0 for layer in range(layers)])
    return {"layer_types": [SLIDING_ATTENTION if slides else FULL_ATTENTION for slides in pattern.tolist()]}


def _rope_values(file: GGUFFile, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the rotary embedding.

    Args:
        file: the file.
        name: prefix of its keys.
        values: the other values.

    Raises:
        ValueError: if the scaling is not supported.
    """
    result: dict[str, Any] = {}
    rotary_dim = _metadata_value(file, f"{name}.rope.dimension_count")
    if isinstance(rotary_dim, int) and rotary_dim != values["head_dim"]:
        result["partial_rotary_factor"] = rotary_dim / values["head_dim"]
    original = _metadata_value(file, f"{name}.rope.scaling.original_context_length")
    if original is not None:
        result["original_max_position_embeddings"] = original
    return result | {"rope_scaling": _rope_scaling(file, name, values)}


def _rope_scaling(file: GGUFFile, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scaling of the rotary embedding.

    llama.cpp takes `rope.scale_linear` for a missing `rope.scaling.factor`, linear for a missing type, and 1 for 0.

    Args:
        file: the file.
        name: prefix of its keys.
        values: the other values.

    Raises:
        ValueError: if the scaling is not supported.
    """
    prefix = f"{name}.rope.scaling"
    factor = _metadata_value(file, f"{prefix}.factor")
    factor = (_metadata_value(file, f"{name}.rope.scale_linear") if factor is None else factor) or None
    kind = _metadata_value(file, f"{prefix}.type") or ("linear" if factor else "none")
    attention = _metadata_number(file, f"{prefix}.attn_factor")
    tensors = {
        tensor: file.tensors[tensor].read().ravel().tolist() for tensor in _ROPE_TENSORS if tensor in file.tensors
    }
    if tensors:
        if kind in ("linear", "yarn") and factor not in (None, 1):
            raise ValueError(f"{prefix}.factor={factor!r} is not supported together with {', '.join(tensors)}")
        # Llama 3.1 stores the divisor of every frequency.
        short = long = tensors.get("rope_freqs.weight")
        if short is None:
            short, long = tensors.get("rope_factors_short.weight"), tensors.get("rope_factors_long.weight")
        elif attention is None:
            attention = 1.0
        return {"rope_type": "longrope", "attention_factor": attention, "short_factor": short, "long_factor": long}
    if kind == "yarn":
        return _yarn_scaling(file, prefix, values, factor, attention)
    if attention not in (None, 1):
        raise ValueError(f"{prefix}.attn_factor={attention!r} is not supported with rope_type={kind!r}")
    if kind == "none" or (kind == "linear" and factor is None):
        # Families may have a scaled default (gpt-oss), so that "no scaling" must be explicit.
        return {"rope_type": "default"}
    return {"rope_type": kind, "factor": factor}


def _yarn_scaling(
    file: GGUFFile, prefix: str, values: Mapping[str, Any], factor: Any, attention: float | None
) -> dict[str, Any]:
    """Returns YaRN's scaling.

    Args:
        file: the file.
        prefix: prefix of its keys.
        values: the other values.
        factor: the factor of positions.
        attention: a factor of rotated queries and keys beside YaRN's.

    Raises:
        ValueError: if it is not supported.
    """
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if values["model_type"] == "gpt_oss":
        scaling["truncate"] = False
    # Converters write the total or an additional factor, and llama.cpp ignores it in the supported architectures.
    total = _metadata_number(file, f"{prefix}.yarn_attn_factor")
    if attention is None and total is None:
        return scaling
    default = rope_config.yarn_attention_factor(config_values.number(scaling, "factor"))
    if total is not None and not math.isclose(total, default, rel_tol=1e-4):
        raise ValueError(f"{prefix}.yarn_attn_factor={total} is not supported; supported: YaRN's {default:.6g}")
    return scaling | {"attention_factor": default * (1.0 if attention is None else attention)}


def _metadata_number(file: GGUFFile, key: str) -> float | None:
    """Returns a number of the metadata, None if it is missing."""
    return config_values.optional_number({key: _metadata_value(file, key)}, key)


def _metadata_value(file: GGUFFile, key: str) -> Any:
    """Returns a value of the metadata, None if it is missing; a value per layer must be equal in all layers.

    Raises:
        ValueError: if the values of layers differ or are missing.
    """
    value = file.metadata.get(key)
    if isinstance(value, np.ndarray):
        if not value.size:
            raise ValueError(f"{key} is an empty array")
        if (value != value[0]).any():
            raise ValueError(f"{key} differs between layers, which is not supported")
        value = value[0].item()
    return value


def _convert_tensors(
    file: GGUFFile, architecture: _Architecture, config: LlamaConfig
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors under Hugging Face's names; unknown ones keep theirs, so that `build_model` lists them.

    Args:
        file: the file.
        architecture: its architecture.
        config: its configuration.
    """
    modules = _MODULES | architecture.modules
    for name, tensor in file.tensors.items():
        if name in _ROPE_TENSORS:
            continue
        match = _BLOCK_TENSOR.fullmatch(name)
        if match is None:
            is_norm = name == "output_norm.weight"
            yield _TOP_LEVEL.get(name, name), _convert(tensor, _offset(architecture) if is_norm else _identity)
            continue
        prefix, module, suffix = f"model.layers.{match['layer']}", match["module"], match["suffix"]
        if expert := _EXPERT_MODULE.fullmatch(module):
            yield from _convert_experts(file, architecture, prefix, name, expert["projection"], suffix)
        elif module not in modules:
            yield name, tensor
        else:
            if module == "attn_sinks":
                suffix = ""  # a parameter of attention itself
            convert: _Conversion = _identity
            if module.endswith("_norm"):
                convert = _offset(architecture)
            elif module in ("attn_q", "attn_k") and architecture.interleaved_rope:
                convert = _undo_interleaving(config.head_dim)
            yield f"{prefix}.{modules[module]}{suffix}", _convert(tensor, convert)


def _convert_experts(
    file: GGUFFile, architecture: _Architecture, prefix: str, name: str, projection: str, suffix: str
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors of experts, which GGUF files stack as [E, out, in].

    Args:
        file: the file.
        architecture: its architecture.
        prefix: name of the layer.
        name: name of the tensor in the file.
        projection: "gate", "up" or "down".
        suffix: ".weight" or ".bias".
    """
    tensor = file.tensors[name]
    if architecture.family != "gpt_oss":
        experts, projections = EXPERTS.get(architecture.family, ("", {}))
        for index in range(tensor.shape[0] if projections and len(tensor.shape) == 3 else 0):
            yield f"{prefix}.{experts}.{index}.{projections[projection]}{suffix}", tensor.select(index)
        return
    target = suffix.replace(".weight", "").replace(".bias", "_bias")
    if projection == "down":
        shape = tensor.shape if suffix == ".bias" else tensor.shape[:-2] + tensor.shape[:-3:-1]
        yield f"{prefix}.mlp.experts.down_proj{target}", _Tensor((tensor,), shape, _transpose_experts)
    elif projection == "gate" and (up := file.tensors.get(name.replace("ffn_gate_exps", "ffn_up_exps"))) is not None:
        if up.shape != tensor.shape:
            yield name, tensor
            return
        matrix = tensor.shape if suffix == ".bias" else tensor.shape[:-2] + tensor.shape[:-3:-1]
        shape = (*matrix[:-1], 2 * matrix[-1])
        yield f"{prefix}.mlp.experts.gate_up_proj{target}", _Tensor((tensor, up), shape, _interleave_experts)


def _convert(tensor: QuantizedTensor, convert: _Conversion) -> StoredTensor:
    return tensor if convert is _identity else _Tensor((tensor,), tensor.shape, convert)


def _identity(values: np.ndarray) -> np.ndarray:
    return values


def _offset(architecture: _Architecture) -> _Conversion:
    """Returns the conversion of a norm's scale."""
    if not architecture.norm_offset:
        return _identity

    def subtract(values: np.ndarray) -> np.ndarray:
        return values.astype(np.float32) - np.float32(architecture.norm_offset)

    return subtract


def _undo_interleaving(head_dim: int) -> _Conversion:
    """Returns the conversion from rotated pairs (2i, 2i + 1) of rows to (i, i + head_dim / 2)."""

    def convert(values: np.ndarray) -> np.ndarray:
        rows = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
        return rows.swapaxes(1, 2).reshape(values.shape)

    return convert


def _transpose_experts(values: np.ndarray) -> np.ndarray:
    return values.swapaxes(1, 2) if values.ndim == 3 else values


def _interleave_experts(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Returns gate and up projections in alternating columns."""
    pairs = np.stack([_transpose_experts(gate), _transpose_experts(up)], axis=-1)
    return pairs.reshape(*pairs.shape[:-2], -1)
