"""Hugging Face checkpoint directories to and from `Llama`: `config.json` and safetensors files, whole or sharded.

Families: llama (2, 3, 3.1, 3.2), mistral, qwen2 (2.5 too) and qwen3, in the spelling of transformers 4 (`rope_theta`,
`rope_scaling`, `torch_dtype`) and of transformers 5 (`rope_parameters`, `dtype`). What the model cannot compute is
refused by name, never approximated.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx, traverse_util
from jax.sharding import Mesh

from kvjax_models.llama import Llama, LlamaConfig, RopeScaling
from kvjax_models.sharding import parameter_shardings, put

# What transformers writes per file when nothing is said.
MAX_SHARD_BYTES = 5_000_000_000

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Buffers that old versions of transformers saved and that follow from the configuration.
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")

_Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class _StoredTensor:
    """A tensor of an open safetensors file, unread."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        return self.file.get_slice(self.name).get_dtype()

    def read(self) -> np.ndarray:
        return self.file.get_tensor(self.name)


@dataclasses.dataclass(frozen=True)
class _Family:
    """One `model_type`: its only supported architecture and what transformers assumes for keys a config leaves out."""

    architecture: str
    defaults: Mapping[str, Any]


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", {"max_position_embeddings": 2048}),
    "mistral": _Family(
        "MistralForCausalLM",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": _Family(
        "Qwen2ForCausalLM",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "head_dim": 128,
        },
    ),
}

# Keys that change what a decoder computes and that this one does not implement.
_REFUSED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_experts",
    "num_local_experts",
    "quantization_config",
    "use_mrope",
)

# Hugging Face's name of every module against its path in `Llama`, inside a layer and outside.
_LAYER_MODULES: dict[_Path, str] = {
    ("attention_norm",): "input_layernorm",
    ("attention", "query"): "self_attn.q_proj",
    ("attention", "key"): "self_attn.k_proj",
    ("attention", "value"): "self_attn.v_proj",
    ("attention", "output"): "self_attn.o_proj",
    ("attention", "query_norm"): "self_attn.q_norm",
    ("attention", "key_norm"): "self_attn.k_norm",
    ("mlp_norm",): "post_attention_layernorm",
    ("mlp", "gate"): "mlp.gate_proj",
    ("mlp", "up"): "mlp.up_proj",
    ("mlp", "down"): "mlp.down_proj",
}
_MODULES: dict[_Path, str] = {("embedding",): "model.embed_tokens", ("norm",): "model.norm", ("head",): "lm_head"}


def load_config(directory: str | os.PathLike) -> LlamaConfig:
    """Reads `config.json` of a Hugging Face directory.

    Raises:
        FileNotFoundError: no `config.json` there.
        ValueError: not JSON, another architecture, missing keys, or a feature that is not implemented; the message
            names the file and the key.

    Source: the configuration classes of transformers 5.2. Qwen's `max_window_layers` counts the first layers, which see
    everything; the rest slide (early transformers 4 with flash attention had it the other way round).
    """
    path = pathlib.Path(directory) / "config.json"
    values = _read_json(path)
    try:
        return _parse_config(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load(directory: str | os.PathLike, dtype: jax.typing.DTypeLike | None = None, mesh: Mesh | None = None) -> Llama:
    """Reads a model, tensor by tensor, from a Hugging Face directory.

    Args:
        dtype: of parameters and arithmetic; None for the one that the file's embedding has.
        mesh: where each tensor goes to, in parts, as soon as it is read (see `sharding`); None for one device.

    Raises:
        FileNotFoundError: `config.json`, the weights or a shard that the index names is not there.
        ValueError: see `load_config`; a file that is truncated or no safetensors file; missing, extra and misshapen
            tensors (one error lists them all); values that are not finite, in the file or once cast to `dtype`.
    """
    directory = pathlib.Path(directory)
    config = load_config(directory)
    with contextlib.ExitStack() as stack:
        stored = _without_ignored(_open_tensors(_weight_files(directory), stack))
        dtype = _own_dtype(stored) if dtype is None else jnp.dtype(dtype)
        # Shapes only: random weights that are overwritten at once would double the memory.
        graph, state = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0))))
        wanted = {_tensor_name(path): (path, leaf.shape) for path, leaf in _flat(state).items()}
        places = {} if mesh is None else _flat(parameter_shardings(state, config, mesh))
        if config.tied_embeddings:
            stored = _without_tied_head(directory, stored)
        if problems := _misfits({name: _file_shape(*where) for name, where in wanted.items()}, stored):
            raise ValueError(f"{directory}: the tensors do not fit config.json:\n  " + "\n  ".join(problems))
        parameters, not_finite = {}, []
        for name, (path, _) in wanted.items():
            tensor = _cast(_turned(path, stored[name].read()), dtype)
            if not np.isfinite(tensor).all():
                not_finite.append(name)
            parameters[path] = jnp.asarray(tensor) if mesh is None else put(tensor, places[path])
    if not_finite:
        names = ", ".join(not_finite)
        raise ValueError(f"{directory}: values that are not finite as {dtype.name} in {names}")
    nnx.replace_by_pure_dict(state, traverse_util.unflatten_dict(parameters))
    return nnx.merge(graph, state)


def _own_dtype(stored: Mapping[str, _StoredTensor]) -> np.dtype:
    """What a file keeps its embedding in; float32 where JAX has nothing like it, and where it is absent."""
    kept = stored[_EMBEDDING].dtype if _EMBEDDING in stored else "F32"
    return jnp.dtype({"F16": jnp.float16, "BF16": jnp.bfloat16}.get(kept, jnp.float32))


def save(
    directory: str | os.PathLike,
    model: Llama,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a model as a directory that `load` and transformers (4.43 and later) read.

    Args:
        directory: made if needed; weights already there are replaced once the new ones are complete.
        model: any model whose configuration one of the four families can express.
        dtype: of the stored tensors; None keeps each parameter's own.
        bos_token_id, eos_token_id: written to `config.json`, null where None: transformers reads an absent key as its
            own default, 2 for Llama's end of text.
        max_shard_bytes: above this the weights go to several files with an index. One tensor is never cut.

    Raises:
        ValueError: no family has this combination of features, or values are not finite (once cast to `dtype`).
    """
    directory = pathlib.Path(directory)
    parameters = {_tensor_name(path): (path, leaf) for path, leaf in _flat(nnx.state(model, nnx.Param)).items()}
    values = _config_values(model.config) | {
        "torch_dtype": jnp.dtype(dtype or model.embedding.embedding[...].dtype).name,
        "bos_token_id": bos_token_id,
        "eos_token_id": list(eos_token_id) if isinstance(eos_token_id, Sequence) else eos_token_id,
    }
    directory.mkdir(parents=True, exist_ok=True)
    _write_weights(directory, parameters, dtype, max_shard_bytes)
    _write_json(directory / "config.json", values)


def _parse_config(values: Mapping[str, Any]) -> LlamaConfig:
    """The configuration that a config.json means; a ValueError names the key at fault."""
    model_type = values.get("model_type")
    if model_type not in _FAMILIES:
        raise ValueError(f"model_type={model_type!r} is not implemented; known: {', '.join(_FAMILIES)}")
    family = _FAMILIES[model_type]
    architectures = values.get("architectures") or [family.architecture]
    if family.architecture not in architectures:
        raise ValueError(f"architectures={architectures} is not implemented; for {model_type}: {family.architecture}")
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if absent := [key for key in required if values.get(key) is None]:
        raise ValueError(f"missing keys: {', '.join(absent)}")
    if refused := [f"{key}={values[key]!r}" for key in _REFUSED if values.get(key)]:
        raise ValueError(f"not implemented: {', '.join(refused)}")
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act={values['hidden_act']!r} is not implemented; known: 'silu'")

    values = {**family.defaults, **values}
    theta, scaling = _parse_rope(values)
    attention_bias = model_type in ("llama", "qwen3") and bool(values.get("attention_bias"))
    return LlamaConfig(
        vocab_size=values["vocab_size"],
        width=values["hidden_size"],
        mlp_width=values["intermediate_size"],
        layers=values["num_hidden_layers"],
        query_heads=values["num_attention_heads"],
        kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        head_dim=values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
        max_length=values["max_position_embeddings"],
        norm_epsilon=values.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=model_type == "llama" and bool(values.get("mlp_bias")),
        query_key_norm=model_type == "qwen3",
        windows=_parse_windows(model_type, values),
    )


def _parse_rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding; transformers lets `rope_scaling` win where both spellings are there."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"rope_parameters={rope!r} is not implemented: one rotary embedding per layer type")
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(f"partial_rotary_factor={partial} is not implemented; known: 1")
    theta = float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    keys = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    if kind not in keys:
        raise ValueError(f"rope_type={kind!r} is not implemented; known: {', '.join(keys)}")
    if absent := [key for key in keys[kind] if rope.get(key) is None]:
        raise ValueError(f"rope_type={kind!r} lacks {', '.join(absent)}")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind, float(rope["factor"]))
    return theta, RopeScaling(
        kind,
        float(rope["factor"]),
        low_frequency_factor=float(rope["low_freq_factor"]),
        high_frequency_factor=float(rope["high_freq_factor"]),
        original_length=rope.get("original_max_position_embeddings") or values["max_position_embeddings"],
    )


def _parse_windows(model_type: str, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The sliding window of every layer, () where none slides."""
    layers, kinds, window = values["num_hidden_layers"], values.get("layer_types"), values.get("sliding_window")
    if model_type == "llama":
        return ()
    if model_type == "mistral":
        # transformers ignores layer_types here and lets every layer slide; a config that says otherwise is refused.
        expected = ["full_attention" if window is None else "sliding_attention"] * layers
        if kinds is not None and kinds != expected:
            raise ValueError(f"layer_types={kinds} is not implemented for mistral: all layers are alike")
        kinds = expected
    else:
        window = window if values.get("use_sliding_window") else None
        if kinds is None:
            first = layers if window is None else values["max_window_layers"]
            kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(kinds) != layers:
        raise ValueError(f"layer_types names {len(kinds)} layers, num_hidden_layers={layers}")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types={sorted(unknown)} is not implemented; known: full_attention, sliding_attention")
    if "sliding_attention" not in kinds:
        return ()
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"sliding_window={window!r} must be a positive number of tokens: layers slide")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _config_values(config: LlamaConfig) -> dict[str, Any]:
    """A config.json in the spelling of transformers 4, which 5 reads too: the first family that means `config`."""
    config = dataclasses.replace(config, windows=config.windows if any(config.windows) else ())
    for model_type in _FAMILIES:
        values = _family_values(config, model_type)
        if _parse_config(values) == config:
            return values
    raise ValueError(f"no Hugging Face family ({', '.join(_FAMILIES)}) can express {config}")


def _family_values(config: LlamaConfig, model_type: str) -> dict[str, Any]:
    values = {
        "architectures": [_FAMILIES[model_type].architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_values(config.rope_scaling),
        "tie_word_embeddings": config.tied_embeddings,
    }
    window = next(filter(None, config.windows), None)
    if model_type == "mistral":
        values |= {"sliding_window": window}
    if model_type in ("qwen2", "qwen3") and window is not None:
        values |= {
            "use_sliding_window": True,
            "sliding_window": window,
            "max_window_layers": config.windows.index(window),
            "layer_types": ["full_attention" if w is None else "sliding_attention" for w in config.windows],
        }
    if model_type in ("llama", "qwen3"):
        values |= {"attention_bias": config.qkv_bias}
    if model_type == "llama":
        values |= {"mlp_bias": config.mlp_bias}
    return values


def _rope_values(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_length,
    }


def _flat(state: nnx.State) -> dict[_Path, Any]:
    """Arrays, or their shapes, by path in `Llama`."""
    return traverse_util.flatten_dict(nnx.to_pure_dict(state))


def _tensor_name(path: _Path) -> str:
    """Hugging Face's name of a parameter."""
    leaf = "bias" if path[-1] == "bias" else "weight"
    if path[0] == "layers":
        return f"model.layers.{path[1]}.{_LAYER_MODULES[path[2:-1]]}.{leaf}"
    return f"{_MODULES[path[:-1]]}.{leaf}"


def _turned(path: _Path, tensor: np.ndarray) -> np.ndarray:
    """Linear weights are [out, in] in files and [in, out] in `nnx.Linear`; the rest is stored as it is."""
    return tensor.T if path[-1] == "kernel" else tensor


def _file_shape(path: _Path, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[::-1] if path[-1] == "kernel" else shape


def _cast(tensor: np.ndarray, dtype: jax.typing.DTypeLike) -> np.ndarray:
    with np.errstate(over="ignore"):  # what becomes infinite is an error, and the caller's to name
        return tensor.astype(dtype, copy=False)


def _write_weights(
    directory: pathlib.Path,
    parameters: Mapping[str, tuple[_Path, jax.Array]],
    dtype: jax.typing.DTypeLike | None,
    max_shard_bytes: int,
) -> None:
    """Writes safetensors files beside those that are there, and only then puts them in their place."""
    bytes_of = {name: leaf.size * jnp.dtype(dtype or leaf.dtype).itemsize for name, (_, leaf) in parameters.items()}
    shards = _shards(bytes_of, max_shard_bytes)
    written: list[pathlib.Path] = []
    try:
        for number, names in enumerate(shards, start=1):
            file = _SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            written.append(directory / file)
            tensors = {name: _stored(name, *parameters[name], dtype) for name in names}
            # transformers refuses files that do not say whose layout of linear weights ([out, in]) they have.
            safetensors.numpy.save_file(tensors, _partial(written[-1]), metadata={"format": "pt"})
        # A single file left from an earlier save would hide new shards, and old shards would be orphans.
        for stale in [directory / _SINGLE_FILE, directory / _INDEX_FILE, *directory.glob("model-*-of-*.safetensors")]:
            stale.unlink(missing_ok=True)
        for path in written:
            _partial(path).replace(path)
    finally:
        for path in written:
            _partial(path).unlink(missing_ok=True)
    if len(shards) > 1:
        weight_map = {name: path.name for path, names in zip(written, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(bytes_of.values())}, "weight_map": weight_map}
        _write_json(directory / _INDEX_FILE, index)


def _stored(name: str, path: _Path, parameter: jax.Array, dtype: jax.typing.DTypeLike | None) -> np.ndarray:
    """A parameter as it goes to the file: safetensors writes the buffer, so the turned copy must be contiguous."""
    tensor = np.ascontiguousarray(_turned(path, _cast(np.asarray(parameter), dtype or parameter.dtype)))
    if not np.isfinite(tensor).all():
        raise ValueError(f"{name} has values that are not finite as {tensor.dtype.name}; nothing was replaced")
    return tensor


def _weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a directory, the single one first, as in transformers."""
    if (directory / _SINGLE_FILE).exists():
        return [directory / _SINGLE_FILE]
    if not (directory / _INDEX_FILE).exists():
        raise FileNotFoundError(
            f"{directory} holds neither {_SINGLE_FILE} nor {_INDEX_FILE}; other formats (.bin, .pth, .gguf) must be "
            "converted to safetensors first"
        )
    weight_map = _read_json(directory / _INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ValueError(f"{directory / _INDEX_FILE} has no weight_map")
    files = sorted({directory / name for name in weight_map.values()})
    if absent := [path.name for path in files if not path.exists()]:
        raise FileNotFoundError(f"{directory / _INDEX_FILE} names shards that are not there: {', '.join(absent)}")
    return files


def _open_tensors(files: Sequence[pathlib.Path], stack: contextlib.ExitStack) -> dict[str, _StoredTensor]:
    """All tensors by name; opening a file reads its header and checks that the file is as long as that says."""
    stored: dict[str, _StoredTensor] = {}
    for path in files:
        try:
            file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from error
        tensors = {name: _StoredTensor(file, name) for name in file.keys()}  # noqa: SIM118 (a file is no dict)
        if twice := sorted(stored.keys() & tensors.keys()):
            raise ValueError(f"{path} repeats tensors of another shard: {', '.join(twice)}")
        stored |= tensors
    return stored


def _misfits(shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, _StoredTensor]) -> list[str]:
    """All that is wrong with the set of tensors, from the headers alone. `shapes` are as stored, [out, in]."""
    problems = [f"missing: {name}" for name in shapes if name not in stored]
    for name, tensor in stored.items():
        if name not in shapes:
            problems.append(f"not part of the model: {name}")
            continue
        if tensor.shape != shapes[name]:
            problems.append(f"{name} is {list(tensor.shape)}, the config means {list(shapes[name])}")
        if tensor.dtype not in _FLOAT_DTYPES:
            problems.append(f"{name} is {tensor.dtype}; known: {', '.join(_FLOAT_DTYPES)}")
    return problems


def _without_ignored(stored: Mapping[str, _StoredTensor]) -> dict[str, _StoredTensor]:
    return {name: tensor for name, tensor in stored.items() if not _IGNORED.fullmatch(name)}


def _without_tied_head(directory: pathlib.Path, stored: Mapping[str, _StoredTensor]) -> dict[str, _StoredTensor]:
    """Tied embeddings under the embedding's name alone, whichever of the two names the writer kept.

    Where both are there, transformers 4 drops the head and transformers 5 unties: so they must agree.
    """
    stored = dict(stored)
    head = stored.pop(_HEAD, None)
    if head is None:
        return stored
    embedding = stored.setdefault(_EMBEDDING, head)
    if embedding is not head and not np.array_equal(embedding.read(), head.read()):
        raise ValueError(
            f"{directory}: the config ties the embeddings (tie_word_embeddings), but {_HEAD} differs from "
            f"{_EMBEDDING}; set tie_word_embeddings to false to use both, or remove {_HEAD}"
        )
    return stored


def _shards(bytes_of: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, a new shard whenever the next tensor would pass the limit."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, size in bytes_of.items():
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _partial(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".partial")


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def _write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
