"""Writes GGUF files from Hugging Face directories as llama.cpp's convert_hf_to_gguf.py does, for tests of the reader.

Tensors are named by ggml's own table, so that the reader's table is checked against it.
"""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

from kvjax_models.formats.config_json import parse_config

# Families in tests/golden/transformers with their architectures in GGUF.
ARCHITECTURES = {name: name for name in ("gemma", "gemma2", "gemma3", "glm4", "granite", "olmo2", "phi3", "qwen2")} | {
    "gpt_oss": "gpt-oss", "llama2": "llama", "llama31": "llama", "mixtral": "llama", "olmo3": "olmo2",
    "arcee": "arcee", "ernie4_5": "ernie4_5", "exaone4": "exaone4", "hunyuan_v1_dense": "hunyuan-dense",
    "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "seed_oss": "seed_oss", "smollm3": "smollm3",
    "glm4_moe": "glm4moe", "dots1": "dots1", "minimax_m2": "minimax-m2",
}  # fmt: skip
INTERLEAVED = ("llama", "arcee", "granite", "smollm3")
KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def write_gguf(
    directory: pathlib.Path,
    path: pathlib.Path,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Converts a directory; matrices whose rows consist of complete blocks are quantized."""
    config = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[directory.name]
    writer = gguf.GGUFWriter(path, architecture, **options)
    for key, value in (_metadata(architecture, config) | (metadata or {})).items():
        add_value(writer, key, value)
    for name, tensor in _tensors(architecture, config, safetensors.numpy.load_file(directory / "model.safetensors")):
        kind = quantization if tensor.ndim > 1 and tensor.shape[-1] % gguf.GGML_QUANT_SIZES[quantization][0] == 0 else 0
        kind = gguf.GGMLQuantizationType(kind)
        writer.add_tensor(name, gguf.quants.quantize(tensor.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds metadata, with integers as uint32 like llama.cpp."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if is_integer else gguf.GGUFValueType.get_type(value))


def _metadata(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    values = {name: config[key] for key, name in KEYS.items() if config.get(key) is not None}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = _rope(config)
    if rope.get("alpha"):  # the converter of Hunyuan scales the base
        rope["rope_theta"] *= rope["alpha"] ** (head_dim / (head_dim - 2))
    values |= {
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": rope["rope_theta"],
    }
    values["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1))
    if architecture in ("glm4moe", "dots1", "minimax-m2"):
        values["expert_gating_func"] = 2  # sigmoid
    if architecture in ("qwen2", "dots1") or (architecture == "phi3" and not config.get("sliding_window")):
        values.pop("attention.sliding_window", None)
    if architecture in ("olmo2", "gemma3", "exaone4") and "sliding_window" in config:
        values["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    sliding = (config.get("rope_parameters") or {}).get("sliding_attention")
    if sliding is not None:
        values["rope.freq_base_swa"] = float(sliding["rope_theta"])
    if (kind := rope.get("rope_type")) in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if "original_max_position_embeddings" in rope:
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if kind == "longrope" and "attention_factor" in rope:
        values["rope.scaling.attn_factor"] = float(rope["attention_factor"])
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding of layers with full attention."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    defaults = {"rope_theta": config.get("rope_theta", 10000.0)}
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if config.get(key) is not None:
            defaults[key] = config[key]
    return defaults | {key: value for key, value in rope.items() if value is not None}


def _tensors(
    architecture: str, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    layers = config["num_hidden_layers"]
    kinds = {name: kind for kind, name in gguf.constants.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], layers)
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    yield from _rope_tensors(config)
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor.astype(np.float32) + 1
        for projection, count in (("q_proj.", heads), ("k_proj.", kv_heads)):
            if projection in name and architecture in INTERLEAVED:
                tensor = tensor.reshape(count, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if ".experts." in name:
            layer, rest = name.removeprefix("model.layers.").split(".", 1)
            if architecture == "gpt-oss":
                yield from _gpt_oss_experts(f"blk.{layer}", rest.rpartition(".")[2], tensor)
            else:
                number, module = rest.partition("experts.")[2].removesuffix(".weight").split(".")
                kind = {"w1": "gate", "w2": "down", "w3": "up"}.get(module, module.removesuffix("_proj"))
                experts.setdefault(f"blk.{layer}.ffn_{kind}_exps.weight", {})[int(number)] = tensor
            continue
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        converted = names.get_name(name, try_suffixes=(".weight", ".bias"))
        yield f"{converted}.weight" if converted.endswith("sinks") else converted, tensor
    for name, stack in experts.items():
        yield name, np.stack([stack[number] for number in sorted(stack)])


def _gpt_oss_experts(prefix: str, module: str, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    suffix = "bias" if module.endswith("_bias") else "weight"
    tensor = tensor if suffix == "bias" else tensor.swapaxes(1, 2)
    if module.startswith("down"):
        yield f"{prefix}.ffn_down_exps.{suffix}", tensor
    else:
        yield f"{prefix}.ffn_gate_exps.{suffix}", tensor[:, 0::2]
        yield f"{prefix}.ffn_up_exps.{suffix}", tensor[:, 1::2]


def _rope_tensors(config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", np.array(rope["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.array(rope["short_factor"], np.float32)
    if rope.get("rope_type") == "llama3":
        # The file holds the divisors of the frequencies; the golden logits test the frequencies.
        frequencies = np.array(parse_config(config).rotary(0).frequencies)
        plain = rope["rope_theta"] ** -(np.arange(len(frequencies)) / len(frequencies))
        yield "rope_freqs.weight", (plain / frequencies).astype(np.float32)
