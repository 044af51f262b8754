"""Loads models from GGUF files: configuration and weights in the names and layouts of Hugging Face.

    general.architecture                  family of `families.FAMILIES`
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

from kvjax_models.families import FAMILIES, FULL_ATTENTION, SLIDING_ATTENTION, ConfigValues, Family
from kvjax_models.families.family import Path
from kvjax_models.formats import config_json, config_keys, rope_config, weights
from kvjax_models.formats.checkpoint import Checkpoint, LoadOptions, StoredTensor, build_model
from kvjax_models.formats.gguf_file import GGUFFile, QuantizedTensor
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama

# ggml's names of modules with their path in a layer of `Llama`; the number counts fused projections.
MODULES: dict[str, Path] = {
    "attn_norm": ("attention_norm",),
    "attn_q": ("attention", "qkv", 0),
    "attn_k": ("attention", "qkv", 1),
    "attn_v": ("attention", "qkv", 2),
    "attn_qkv": ("attention", "qkv", 0),
    "attn_output": ("attention", "output"),
    "attn_q_norm": ("attention", "query_norm"),
    "attn_k_norm": ("attention", "key_norm"),
    "attn_sinks": ("attention", "sinks"),
    "post_attention_norm": ("after_attention_norm",),
    "ffn_norm": ("mlp_norm",),
    "post_ffw_norm": ("after_mlp_norm",),
    "ffn_gate": ("mlp", "gate_up", 0),
    "ffn_up": ("mlp", "gate_up", 1),
    "ffn_down": ("mlp", "down"),
    "ffn_gate_inp": ("mlp", "router"),
    "exp_probs_b": ("mlp", "router", "selection_bias"),
    "ffn_gate_shexp": ("mlp", "shared", "gate_up", 0),
    "ffn_up_shexp": ("mlp", "shared", "gate_up", 1),
    "ffn_down_shexp": ("mlp", "shared", "down"),
}
_PARAMETERS = ("attn_sinks", "exp_probs_b")  # their names in Hugging Face's files are complete

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
_DEEPSEEK_KEYS = {
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
_GATING_FUNCS = {1: "softmax", 2: "sigmoid"}
# Further keys that are understood, or that change nothing.
_OTHER_KEYS = [
    "attention.layer_norm_epsilon", "attention.value_length", "pooling_type", "rope.dimension_count",
    "rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.type", "rope.scaling.yarn_attn_factor", "tensor_data_layout", "vocab_size",
]  # fmt: skip
# Keys that change nothing if their value equals that of another key.
_EQUAL_KEYS = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.key_length",
    "embedding_length_out": "embedding_length",
    "expert_feed_forward_length": "feed_forward_length",
    "rope.dimension_count_swa": "rope.dimension_count",
    "rope.freq_base_swa": "rope.freq_base",
}
# Values of other keys that change nothing, beside false and 0; all further values are refused.
_NEUTRAL = {
    "attention.causal": True, "attention.output_scale": 1, "embedding_scale": 1, "expert_gating_func": 1,
    "expert_group_count": 1, "expert_group_used_count": 1, "expert_weights_norm": True, "expert_weights_scale": 1,
    "interleave_moe_layer_step": 1, "logit_scale": 1, "residual_scale": 1, "rope.scaling.finetuned": True,
    # llama.cpp computes with these in the supported architectures.
    "rope.scaling.yarn_beta_fast": 32, "rope.scaling.yarn_beta_slow": 1, "rope.scaling.yarn_ext_factor": 1,
}  # fmt: skip
# Keys whose value false changes the computation; Granite has no rotary embedding then.
_NOT_NEUTRAL = ("attention.causal", "expert_weights_norm", "granite.rope.scaling.finetuned")
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # these scale attention by the width per head instead of head_dim
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OPTIONAL_TENSORS = {
    "attention_bias": "attn_q.bias",
    "use_bias": "attn_q.bias",
    "attention_out_bias": "attn_output.bias",
    "mlp_bias": "ffn_up.bias",
    "use_qk_norm": "attn_q_norm.weight",
}
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


@dataclasses.dataclass(frozen=True)
class _Metadata:
    """The values of a file under the name of its architecture.

    Attributes:
        file: the file.
        name: name of the architecture, with which the keys begin.
    """

    file: GGUFFile
    name: str

    def __getitem__(self, suffix: str) -> Any:
        """Returns a value, None if it is missing; a value per layer must be equal in all layers.

        Raises:
            ValueError: if the values of layers differ or are missing.
        """
        key = f"{self.name}.{suffix}"
        value = self.file.metadata.get(key)
        if isinstance(value, np.ndarray):
            if not value.size:
                raise ValueError(f"{key} is an empty array")
            if (value != value[0]).any():
                raise ValueError(f"{key} differs between layers, which is not supported")
            value = value[0].item()
        return value

    def number(self, suffix: str) -> float | None:
        """Returns a number, None if it is missing."""
        return ConfigValues({f"{self.name}.{suffix}": self[suffix]}).optional_number(f"{self.name}.{suffix}")


def load_config(file: GGUFFile) -> LlamaConfig:
    """Returns the configuration in a GGUF file.

    Raises:
        ValueError: if the model has an unsupported architecture or feature.
    """
    return _parse(file)[2]


def load_model(file: GGUFFile, options: LoadOptions) -> Llama:
    """Loads a model from a GGUF file; reads and dequantizes one tensor at a time.

    Args:
        options: dtypes and mesh.

    Returns:
        The model.

    Raises:
        ValueError: if the model is not supported; lists all missing, superfluous and misshapen tensors.
    """
    return build_model(read_checkpoint(file)[1], options)


def read_checkpoint(file: GGUFFile) -> tuple[dict[str, Any], Checkpoint]:
    """Returns the values of a config.json and the unread tensors, as in a Hugging Face directory of the model."""
    family, values, config = _parse(file)
    tensors: dict[str, StoredTensor] = dict(_convert_tensors(file, family, config))
    return values, Checkpoint(file.path, family, config, tensors)


def _parse(file: GGUFFile) -> tuple[Family, dict[str, Any], LlamaConfig]:
    """Returns family, values of a config.json and configuration of a file.

    Raises:
        ValueError: if they are not supported, with the path of the file.
    """
    try:
        family = _family(file)
        values = _config_values(file, family)
        return family, values, config_json.parse_config(values)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error


def _family(file: GGUFFile) -> Family:
    """Returns the family of a file.

    Raises:
        ValueError: if its architecture is not supported.
    """
    name = str(file.metadata.get("general.architecture"))
    families = {(family.gguf.architecture, family.gguf.marker): family for family in FAMILIES.values() if family.gguf}
    for (architecture, marker), family in families.items():
        if architecture == name and marker is not None and file.metadata.get(f"{name}.{marker}"):
            return family
    if (name, None) not in families:
        supported = ", ".join(sorted({architecture for architecture, _ in families}))
        raise ValueError(f"general.architecture={name!r} is not supported; supported: {supported}")
    return families[name, None]


def _config_values(file: GGUFFile, family: Family) -> ConfigValues:
    """Returns the values of the config.json that describes the model of a file.

    Raises:
        ValueError: if a value differs between layers, or a key or a combination is not supported.
    """
    metadata, keys = _Metadata(file, file.metadata["general.architecture"]), _understood_keys(family)
    _check_keys(metadata, keys)
    found = {key: metadata[suffix] for suffix, key in keys.items() if suffix != "attention.sliding_window_pattern"}
    implied = {} if family.gguf is None else family.gguf.values
    values = ConfigValues({"model_type": family.model_type, "rope_theta": 10000.0, **implied})
    values |= {key: value for key, value in found.items() if value is not None}
    values["sliding_window"] = values.get("sliding_window") or None
    if "scoring_func" in values:
        values["scoring_func"] = _GATING_FUNCS.get(values["scoring_func"], values["scoring_func"])
    if "num_nextn_predict_layers" in values:  # which the number of layers includes
        predicting = values.integer("num_nextn_predict_layers", minimum=0)
        values["num_hidden_layers"] = values.integer("num_hidden_layers") - predicting
    width, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    values = ConfigValues({"num_key_value_heads": heads, "head_dim": width // heads, **values})
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        values["vocab_size"] = _vocab_size(file, embedding.shape[0])
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    for key, tensor in _OPTIONAL_TENSORS.items():
        if key in family.keys:
            values[key] = f"blk.0.{tensor}" in file.tensors
    head_dim = values.integer("head_dim")
    if metadata["attention.value_length"] not in (None, head_dim):
        raise ValueError(
            f"{metadata.name}.attention.value_length must equal {metadata.name}.attention.key_length={head_dim}"
        )
    if metadata.name in _LAYERS_OF_27B:
        is_27b = values.get("num_hidden_layers") == _LAYERS_OF_27B[metadata.name]
        values["query_pre_attn_scalar"] = width // heads if is_27b else head_dim
    if "attention.sliding_window_pattern" in keys:
        values |= _layer_types(metadata, values)
    return ConfigValues(values | _rope_values(metadata, values))


def _understood_keys(family: Family) -> dict[str, str]:
    """Returns the keys of the metadata that a family has, and their names in config.json."""
    if "n_routed_experts" in family.keys:
        moe_keys = _DEEPSEEK_KEYS
    else:
        moe_keys = _MOE_KEYS if "num_experts" in family.keys else {"expert_count": "num_local_experts"}
    keys = _KEYS | moe_keys | {"expert_gating_func": "scoring_func"}
    understood = config_keys.understood_keys(family)
    if not family.has_windows:
        understood -= {"sliding_window", "layer_types"}
    return {suffix: key for suffix, key in keys.items() if key in understood}


def _check_keys(metadata: _Metadata, understood: Mapping[str, str]) -> None:
    """Refuses keys of the architecture that may change the computation.

    Raises:
        ValueError: with all of them.
    """
    unsupported = []
    for key in metadata.file.metadata:
        suffix = key.removeprefix(f"{metadata.name}.")
        if suffix == key or suffix in understood or suffix in _OTHER_KEYS:
            continue
        value = metadata[suffix]
        is_neutral = value == _NEUTRAL.get(suffix) or (
            not value and suffix not in _NOT_NEUTRAL and key not in _NOT_NEUTRAL
        )
        if not is_neutral and value != metadata[_EQUAL_KEYS.get(suffix, "")]:
            unsupported.append(f"{key}={value!r}")
    if unsupported:
        raise ValueError(f"not supported: {', '.join(unsupported)}")


def _vocab_size(file: GGUFFile, rows: int) -> int:
    """Returns the size of the vocabulary.

    Args:
        rows: number of rows of the embedding.

    Raises:
        ValueError: if the tokenizer has another number of tokens.
    """
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != rows:
        raise ValueError(f"token_embd.weight has {rows} rows, but tokenizer.ggml.tokens has {len(tokens)} tokens")
    return rows


def _layer_types(metadata: _Metadata, values: ConfigValues) -> dict[str, Any]:
    """Returns `layer_types`, {} without a pattern.

    A pattern is booleans per layer, or n, where every n-th layer has full attention.
    """
    pattern = metadata.file.metadata.get(f"{metadata.name}.attention.sliding_window_pattern")
    if pattern is None or values["sliding_window"] is None:
        return {}
    if not isinstance(pattern, np.ndarray):
        period = ConfigValues(sliding_window_pattern=pattern).integer("sliding_window_pattern", minimum=0)
        layers = values.integer("num_hidden_layers")
        pattern = np.array([not period or (layer + 1) % period != 0 for layer in range(layers)])
    return {"layer_types": [SLIDING_ATTENTION if slides else FULL_ATTENTION for slides in pattern.tolist()]}


def _rope_values(metadata: _Metadata, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the rotary embedding.

    Raises:
        ValueError: if the scaling is not supported.
    """
    result: dict[str, Any] = {}
    rotary_dim = metadata["rope.dimension_count"]
    if isinstance(rotary_dim, int) and rotary_dim != values["head_dim"]:
        result["partial_rotary_factor"] = rotary_dim / values["head_dim"]
    original = metadata["rope.scaling.original_context_length"]
    if original is not None:
        result["original_max_position_embeddings"] = original
    return result | {"rope_scaling": _rope_scaling(metadata, values)}


def _rope_scaling(metadata: _Metadata, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scaling of the rotary embedding.

    llama.cpp takes `rope.scale_linear` for a missing `rope.scaling.factor`, linear for a missing type, and 1 for 0.

    Raises:
        ValueError: if the scaling is not supported.
    """
    prefix, stored = f"{metadata.name}.rope.scaling", metadata.file.tensors
    factor = metadata["rope.scaling.factor"]
    factor = (metadata["rope.scale_linear"] if factor is None else factor) or None
    kind = metadata["rope.scaling.type"] or ("linear" if factor else "none")
    attention = metadata.number("rope.scaling.attn_factor")
    tensors = {tensor: stored[tensor].read().ravel().tolist() for tensor in _ROPE_TENSORS if tensor in stored}
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
        return _yarn_scaling(metadata, values, factor, attention)
    if attention not in (None, 1):
        raise ValueError(f"{prefix}.attn_factor={attention!r} is not supported with rope_type={kind!r}")
    if kind == "none" or (kind == "linear" and factor is None):
        # Families may have a scaled default (gpt-oss), so that "no scaling" must be explicit.
        return {"rope_type": "default"}
    return {"rope_type": kind, "factor": factor}


def _yarn_scaling(
    metadata: _Metadata, values: Mapping[str, Any], factor: Any, attention: float | None
) -> dict[str, Any]:
    """Returns YaRN's scaling.

    Args:
        attention: a factor of rotated queries and keys beside YaRN's.

    Raises:
        ValueError: if it is not supported.
    """
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if values["model_type"] == "gpt_oss":
        scaling["truncate"] = False
    # Converters write the total or an additional factor, and llama.cpp ignores it in the supported architectures.
    total = metadata.number("rope.scaling.yarn_attn_factor")
    if attention is None and total is None:
        return scaling
    default = rope_config.yarn_attention_factor(ConfigValues(scaling).number("factor"))
    if total is not None and not math.isclose(total, default, rel_tol=1e-4):
        raise ValueError(
            f"{metadata.name}.rope.scaling.yarn_attn_factor={total} is not supported; supported: YaRN's {default:.6g}"
        )
    return scaling | {"attention_factor": default * (1.0 if attention is None else attention)}


def _convert_tensors(file: GGUFFile, family: Family, config: LlamaConfig) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors under Hugging Face's names; unknown ones keep theirs, so that `build_model` lists them.

    Args:
        config: its configuration.
    """
    assert family.gguf is not None
    tensors = weights.select_layers(file.tensors, config.layers) if family.predicts_more_tokens else file.tensors
    for name, tensor in tensors.items():
        if name in _ROPE_TENSORS:
            continue
        converted: StoredTensor = tensor
        if config.norms.offset and name.endswith("_norm.weight"):
            converted = _Tensor((tensor,), tensor.shape, lambda scale: scale.astype(np.float32) - config.norms.offset)
        match = _BLOCK_TENSOR.fullmatch(name)
        if match is None:
            yield _TOP_LEVEL.get(name, name), converted
            continue
        prefix, module, suffix = f"model.layers.{match['layer']}", match["module"], match["suffix"]
        if expert := _EXPERT_MODULE.fullmatch(module):
            yield from _convert_experts(file, family, prefix, name, expert["projection"], suffix)
            continue
        if family.gguf.interleaved_rope and module in ("attn_q", "attn_k"):
            converted = _Tensor((tensor,), tensor.shape, _undo_interleaving(config.head_dim))
        path = {**MODULES, **family.gguf.modules}.get(module, ())
        is_projection = bool(path) and isinstance(path[-1], int)
        names = family.module_names(path[:-1] if is_projection else path)
        if not names:
            yield name, tensor
        elif module in _PARAMETERS:
            yield f"{prefix}.{names[0]}", tensor
        else:  # fused projections have a single name
            index = min(int(path[-1]), len(names) - 1) if is_projection else 0
            yield f"{prefix}.{names[index]}{suffix}", converted


def _convert_experts(
    file: GGUFFile, family: Family, prefix: str, name: str, projection: str, suffix: str
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors of experts, which GGUF files stack as [E, out, in].

    Args:
        prefix: name of the layer.
        name: name of the tensor in the file.
        projection: "gate", "up" or "down".
        suffix: ".weight" or ".bias".
    """
    tensor, names = file.tensors[name], family.module_names(("experts", projection))
    if not names:
        yield name, tensor
        return
    target = f"{prefix}.{names[0]}"
    if "{}" in target:
        for index in range(tensor.shape[0]):
            yield f"{target.format(index)}{suffix}", tensor.select(index)
        return
    target += "_bias" if suffix == ".bias" else ""
    matrix = tensor.shape if suffix == ".bias" else (*tensor.shape[:-2], *tensor.shape[:-3:-1])
    if projection == "down":
        yield target, _Tensor((tensor,), matrix, _transpose_experts)
    elif projection == "gate" and (up := file.tensors.get(name.replace("ffn_gate_exps", "ffn_up_exps"))) is not None:
        yield target, _Tensor((tensor, up), (*matrix[:-1], 2 * matrix[-1]), _interleave_experts)


def _undo_interleaving(head_dim: int) -> Callable[[np.ndarray], np.ndarray]:
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
