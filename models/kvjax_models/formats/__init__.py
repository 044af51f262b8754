"""Checkpoint formats: reads configurations, weights and tokenizers.

Two formats are read: Hugging Face directories (`huggingface`, `huggingface_tokenizer`) and GGUF files
(`gguf_checkpoint`, `gguf_tokenizer`). Both give a `checkpoint.Checkpoint`, which is a `LlamaConfig` and tensors by
their Hugging Face names, and a `tokenizer.Tokenizer`. The functions of this module choose the format by the path.
"""

import os
import pathlib

import jax
from jax.sharding import Mesh

from kvjax_models.formats import gguf_checkpoint, gguf_tokenizer, huggingface, huggingface_tokenizer
from kvjax_models.formats.checkpoint import LoadOptions
from kvjax_models.formats.gguf_file import read_gguf
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.model.quantized import WeightDtype


def is_gguf(path: str | os.PathLike) -> bool:
    """Returns whether a path, or the target of its links, has the suffix of a GGUF file."""
    path = pathlib.Path(path)
    target = pathlib.Path(os.path.realpath(path)) if path.is_symlink() else path
    return ".gguf" in (path.suffix.lower(), target.suffix.lower())


def load_config(path: str | os.PathLike) -> LlamaConfig:
    """Returns the configuration of a model.

    Args:
        path: a Hugging Face directory or a GGUF file.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file is invalid, or the model has an unsupported architecture or feature.
    """
    return gguf_checkpoint.load_config(read_gguf(path)) if is_gguf(path) else huggingface.load_config(path)


def load_model(
    path: str | os.PathLike,
    dtype: jax.typing.DTypeLike | None = None,
    mesh: Mesh | None = None,
    *,
    weight_dtype: WeightDtype | None = None,
) -> Llama:
    """Loads a model.

    Args:
        path: a Hugging Face directory or a GGUF file.
        dtype: dtype of parameters and activations; by default the stored embedding's, float32 if it is quantized.
        mesh: mesh to shard tensors on immediately after reading; a single device by default.
        weight_dtype: "int8" stores the embedding and all kernels in int8, with one scale per output channel.

    Returns:
        The model.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file is invalid, or the model is not supported.
    """
    options = LoadOptions(dtype, weight_dtype=weight_dtype, mesh=mesh)
    if is_gguf(path):
        return gguf_checkpoint.load_model(read_gguf(path), options)
    return huggingface.load_model(path, options=options)


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Loads the tokenizer of a model.

    Args:
        path: a Hugging Face directory or a GGUF file.

    Returns:
        The tokenizer.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file is invalid, or the tokenizer is not supported.
    """
    if is_gguf(path):
        return gguf_tokenizer.load_tokenizer(read_gguf(path))
    return huggingface_tokenizer.load_tokenizer(path)


def load(path: str | os.PathLike, options: LoadOptions | None = None) -> tuple[Llama, Tokenizer]:
    """Loads a model and its tokenizer; parses the header of a GGUF file once.

    Args:
        path: a Hugging Face directory or a GGUF file.

    Returns:
        The model and the tokenizer.
    """
    options = options or LoadOptions()
    if is_gguf(path):
        file = read_gguf(path)
        return gguf_checkpoint.load_model(file, options), gguf_tokenizer.load_tokenizer(file)
    return huggingface.load_model(path, options=options), huggingface_tokenizer.load_tokenizer(path)
