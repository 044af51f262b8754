"""Loads Hugging Face directories: `config.json` and one or several safetensors files."""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import safetensors
from jax.sharding import Mesh

from kvjax_models.families import FAMILIES, Family
from kvjax_models.formats import config_json, files, weights
from kvjax_models.formats.checkpoint import Checkpoint, LoadOptions, StoredTensor, build_model
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama

CONFIG_FILE, SINGLE_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"

# Buffers that old versions of transformers saved, which follow from the configuration, and layers that predict several
# tokens, which transformers ignores, too.
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq|mtp\..*")


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
    return _read_config(pathlib.Path(directory))[1]


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
    directory = pathlib.Path(directory)
    family, config = _read_config(directory)
    with contextlib.ExitStack() as stack:
        tensors: dict[str, StoredTensor] = {
            name: tensor
            for name, tensor in _open_tensors(_weight_files(directory), stack).items()
            if not _IGNORED.fullmatch(name)
        }
        tensors = weights.select_text_tensors(tensors)
        if family.predicts_more_tokens:
            tensors = weights.select_layers(tensors, config.layers)
        checkpoint = Checkpoint(directory, family, config, tensors)
        return build_model(checkpoint, options or LoadOptions(dtype, mesh=mesh))


def _read_config(directory: pathlib.Path) -> tuple[Family, LlamaConfig]:
    """Returns the family and the configuration of a directory.

    Raises:
        ValueError: if `config.json` is invalid or not supported.
    """
    values = files.read_json_object(directory / CONFIG_FILE)
    try:
        config = config_json.parse_config(values)
        return FAMILIES[config_json.text_config(values)["model_type"]], config
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG_FILE}: {files.shorten(error)}") from error


def _weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the safetensors files of a directory; a single file has precedence over shards, as in transformers.

    Raises:
        FileNotFoundError: if weights are missing, or a shard of the index is missing.
        ValueError: if the index is invalid.
    """
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    if not (directory / INDEX_FILE).exists():
        raise FileNotFoundError(
            f"{directory} contains neither {SINGLE_FILE} nor {INDEX_FILE}; convert other formats (.bin, .pth) "
            "to safetensors first"
        )
    weight_map = files.read_json_object(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ValueError(f"{directory / INDEX_FILE} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    if missing := [name for name in names if not (directory / name).exists()]:
        raise FileNotFoundError(f"shards in {directory / INDEX_FILE} are missing: {files.join_some(missing)}")
    return [directory / name for name in names]


def _open_tensors(paths: Sequence[pathlib.Path], stack: contextlib.ExitStack) -> dict[str, _SafetensorsTensor]:
    """Returns the tensors of all files by name; opening a file reads its header and checks its length.

    Raises:
        ValueError: if a file is truncated or repeats tensors of another one.
    """
    tensors: dict[str, _SafetensorsTensor] = {}
    for path in paths:
        try:
            file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from error
        names = list(file.keys())
        if repeated := sorted(tensors.keys() & set(names)):
            raise ValueError(f"{path} repeats tensors of another shard: {files.join_some(repeated)}")
        tensors |= {name: _SafetensorsTensor(file, name) for name in names}
    return tensors
