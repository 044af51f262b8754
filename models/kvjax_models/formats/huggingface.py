"""Loads and saves Hugging Face directories: `config.json` and one or several safetensors files."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx
from jax.sharding import Mesh

from kvjax_models import atomic_io
from kvjax_models.formats import config_json, replacing, untrusted_files, weights
from kvjax_models.formats.checkpoint import Checkpoint, LoadOptions, StoredTensor, build_model, cast, flatten_parameters
from kvjax_models.formats.replacing import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama

MAX_SHARD_BYTES = 5_000_000_000  # transformers' default

# Buffers that old versions of transformers saved; they follow from the configuration.
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")


@dataclasses.dataclass(frozen=True)
class _SafetensorsTensor:
    """A tensor of an open safetensors file; see `checkpoint.StoredTensor`."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        return self.file.get_slice(self.name).get_dtype()

    def read(self, dtype: np.typing.DTypeLike = np.float32) -> np.ndarray:
        return self.file.get_tensor(self.name)


def load_config(directory: str | os.PathLike) -> LlamaConfig:
    """Returns the configuration in the `config.json` of a Hugging Face directory.

    Raises:
        ValueError: if the file is invalid, or the model has an unsupported architecture or feature; the message names
            the file and the key.
    """
    return _read_config(replacing.weights_directory(pathlib.Path(directory)))[1]


def load_model(
    directory: str | os.PathLike,
    dtype: jax.typing.DTypeLike | None = None,
    mesh: Mesh | None = None,
    *,
    options: LoadOptions | None = None,
) -> Llama:
    """Loads a model from a Hugging Face directory.

    Missing files raise a FileNotFoundError; invalid files and unsupported models raise a ValueError, which lists all
    missing, superfluous and misshapen tensors.

    Args:
        directory: directory with `config.json` and safetensors files.
        dtype: dtype of parameters and activations; by default the stored embedding's.
        mesh: mesh to shard tensors on immediately after reading; a single device by default.
        options: all options instead of `dtype` and `mesh`.

    Returns:
        The model.
    """
    directory = replacing.weights_directory(pathlib.Path(directory))
    model_type, config = _read_config(directory)
    with contextlib.ExitStack() as stack:
        tensors: dict[str, StoredTensor] = {
            name: tensor
            for name, tensor in _open_tensors(_weight_files(directory), stack).items()
            if not _IGNORED.fullmatch(name)
        }
        checkpoint = Checkpoint(directory, model_type, config, weights.select_text_tensors(tensors))
        return build_model(checkpoint, options or LoadOptions(dtype, mesh=mesh))


def save_model(
    directory: str | os.PathLike,
    model: Llama,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Saves a model as a directory that `load_model` and transformers (4.43 and later) read.

    Saving is atomic. All files are written to a subdirectory first and replace the previous ones together (see
    `replacing`): if a save fails or is interrupted, `load_model` returns the previous model. A configuration that no
    family can express and values that are not finite raise a ValueError.

    Args:
        directory: created if it does not exist; a model in it is replaced.
        model: model to save.
        dtype: dtype of the stored tensors; by default each parameter's.
        bos_token_id: written to `config.json`; None writes null, because transformers reads a missing key as its own
            default.
        eos_token_id: written to `config.json` likewise.
        max_shard_bytes: weights of more bytes are split into several files with an index; a tensor is never split.

    Raises:
        ValueError: if the weights are quantized.
        OSError: if the directory is not writable or another process writes to it; the previous model is unchanged.
    """
    if model.weight_dtype is not None:
        raise ValueError(f"a model with {model.weight_dtype} weights cannot be saved; load it without weight_dtype")
    directory = pathlib.Path(directory)
    parameters = flatten_parameters(nnx.state(model, nnx.Param))
    config = config_json.to_config_json(model.config)
    shapes = {path: leaf.shape for path, leaf in parameters.items()}
    rules = weights.parameter_rules(config["model_type"], model.config, shapes)
    config |= {
        "torch_dtype": jnp.dtype(dtype or model.embedding.embedding[...].dtype).name,
        "bos_token_id": bos_token_id,
        "eos_token_id": list(eos_token_id) if isinstance(eos_token_id, Sequence) else eos_token_id,
    }
    lock = atomic_io.lock_directory(directory)
    partial = directory / ".new.partial"
    try:
        replacing.restore_files(directory)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _write_weights(partial, weights.output_tensors(rules, parameters), dtype, max_shard_bytes)
        atomic_io.write_text(partial / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        replacing.replace_files(directory, partial)
    except OSError as error:
        raise OSError(f"{directory}: the model could not be saved: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.release()


def _write_weights(
    directory: pathlib.Path,
    tensors: Mapping[str, weights.OutputTensor],
    dtype: jax.typing.DTypeLike | None,
    max_shard_bytes: int,
) -> None:
    """Writes safetensors files, and an index if there are several.

    Raises:
        OSError: if a file cannot be written.
    """
    sizes = {name: math.prod(x.shape) * jnp.dtype(dtype or x.dtype).itemsize for name, x in tensors.items()}
    shards = _split_into_shards(sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        arrays = {name: _output_array(name, tensors[name], dtype) for name in names}
        weight_map |= dict.fromkeys(names, file)
        try:
            # transformers refuses files without the framework whose linear layout ([out, in]) they use.
            safetensors.numpy.save_file(arrays, directory / file, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:
            raise OSError(f"{file}: {error}") from error
        atomic_io.fsync(directory / file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        atomic_io.write_text(directory / INDEX_FILE, json.dumps(index, indent=2) + "\n")


def _output_array(name: str, tensor: weights.OutputTensor, dtype: jax.typing.DTypeLike | None) -> np.ndarray:
    """Returns a tensor to store, contiguous because safetensors writes its buffer.

    Raises:
        ValueError: if values are not finite.
    """
    array = np.ascontiguousarray(cast(tensor.compute(), dtype or tensor.dtype))
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has values that are not finite as {array.dtype.name}; no file was changed")
    return array


def _read_config(directory: pathlib.Path) -> tuple[str, LlamaConfig]:
    """Returns the model type and the configuration of a directory.

    Raises:
        ValueError: if `config.json` is invalid or not supported.
    """
    values = untrusted_files.read_json_object(directory, CONFIG_FILE)
    try:
        return config_json.text_config(values).get("model_type", ""), config_json.parse_config(values)
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG_FILE}: {untrusted_files.shorten(error)}") from error


def _weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the safetensors files of a directory; a single file has precedence over shards, as in transformers.

    Raises:
        FileNotFoundError: if weights are missing, or a shard of the index is missing.
        ValueError: if the index is invalid.
    """
    if untrusted_files.has_entry(directory, SINGLE_FILE):
        return [untrusted_files.resolve_file(directory, SINGLE_FILE)]
    if not untrusted_files.has_entry(directory, INDEX_FILE):
        raise FileNotFoundError(
            f"{directory} contains neither {SINGLE_FILE} nor {INDEX_FILE}; convert other formats (.bin, .pth) "
            "to safetensors first"
        )
    weight_map = untrusted_files.read_json_object(directory, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ValueError(f"{directory / INDEX_FILE} has no weight_map")
    if invalid := [name for name in weight_map.values() if not isinstance(name, str)]:
        raise ValueError(f"{directory / INDEX_FILE}: {untrusted_files.shorten(repr(invalid[0]))} is not a file name")
    names = sorted(set(weight_map.values()))
    is_missing = [
        pathlib.PurePath(name).name == name and not untrusted_files.has_entry(directory, name) for name in names
    ]
    if missing := [name for name, absent in zip(names, is_missing, strict=True) if absent]:
        raise FileNotFoundError(f"shards in {directory / INDEX_FILE} are missing: {untrusted_files.join_some(missing)}")
    return [untrusted_files.resolve_file(directory, name) for name in names]


def _open_tensors(files: Sequence[pathlib.Path], stack: contextlib.ExitStack) -> dict[str, _SafetensorsTensor]:
    """Returns the tensors of all files by name; opening a file reads its header and checks its length.

    Raises:
        ValueError: if a file is truncated or repeats tensors of another one.
    """
    tensors: dict[str, _SafetensorsTensor] = {}
    for path in files:
        try:
            file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from error
        names = list(file.keys())
        if repeated := sorted(tensors.keys() & set(names)):
            raise ValueError(f"{path} repeats tensors of another shard: {untrusted_files.join_some(repeated)}")
        tensors |= {name: _SafetensorsTensor(file, name) for name in names}
    return tensors


def _split_into_shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Returns names in order, with a new shard whenever the next tensor would exceed the limit."""
    shards: list[list[str]] = [[]]
    free = max_bytes
    for name, size in sizes.items():
        if shards[-1] and size > free:
            shards.append([])
            free = max_bytes
        shards[-1].append(name)
        free -= size
    return shards
