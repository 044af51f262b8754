"""SHA-256 fingerprints of models, tokenizers and arrays, independent of paths and sharding."""

import dataclasses
import functools
import hashlib
import json
import pathlib
import weakref
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from kvjax_models.atomic_io import sha256_of_bytes, sha256_of_file
from kvjax_models.formats import replacing
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.model.llama import Llama

# The files of a directory that determine a loaded model and its tokenizer.
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "*.safetensors",
)

# Fingerprints with weak references to the arrays they were computed from: a model's arrays may be replaced.
_CACHE: weakref.WeakKeyDictionary[Llama, tuple[list[weakref.ref], str]] = weakref.WeakKeyDictionary()


def model_fingerprint(model: Llama) -> str:
    """Returns the SHA-256 of a model's configuration and of all its tensors in memory.

    A cast to another dtype changes the fingerprint; the sharding does not. If the tensors span several processes, all
    of them must call this.
    """
    leaves = jax.tree.leaves(model)
    arrays, cached = _CACHE.get(model, ([], ""))
    if len(arrays) == len(leaves) and all(array() is leaf for array, leaf in zip(arrays, leaves, strict=True)):
        return cached
    config = canonical_json(dataclasses.asdict(model.config))
    result = sha256_of_bytes(f"{config} {array_fingerprint(model)}".encode())
    _CACHE[model] = [weakref.ref(leaf) for leaf in leaves], result
    return result


def directory_fingerprint(directory: pathlib.Path) -> str:
    """Returns the SHA-256 of all files of a Hugging Face directory that a model and its tokenizer are loaded from."""
    digests = {}
    for home in (directory, replacing.weights_directory(directory)):
        for path in sorted({path for pattern in _FILES for path in home.glob(pattern)}):
            stat = path.stat()
            # The time of the last change of the inode: a file that replaces another may copy its modification time.
            times = stat.st_mtime_ns, stat.st_ctime_ns
            digests[path.name] = _file_fingerprint(path.resolve(), times, stat.st_size, stat.st_ino)
    return sha256_of_bytes(canonical_json(digests).encode())


@functools.cache
def _file_fingerprint(path: pathlib.Path, times: tuple[int, int], size: int, inode: int) -> str:
    """Returns the digest of a file; cached by times, size and inode, because sweeps request it many times."""
    return sha256_of_file(path)


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Returns the SHA-256 of everything that determines how a tokenizer encodes texts and conversations."""
    fields = {field.name: getattr(tokenizer, field.name) for field in dataclasses.fields(tokenizer)}
    return sha256_of_bytes(canonical_json(fields | {"backend": tokenizer.backend.to_str()}).encode())


def array_fingerprint(tree: Any) -> str:
    """Returns the SHA-256 of the arrays of a pytree.

    Args:
        tree: a pytree of arrays, which may be sharded over processes; every process must call this function.

    Returns:
        A hexadecimal digest of all paths, dtypes, shapes and values.
    """
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        total.update(f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}\n".encode())
        total.update(np.ascontiguousarray(_global_array(leaf)).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def canonical_json(values: Any) -> str:
    """Returns JSON with sorted keys, so that equal values give equal text."""
    return json.dumps(values, sort_keys=True, default=dict)


def _global_array(leaf: Any) -> np.ndarray:
    """Returns the global array, with the shards of other processes."""
    if not getattr(leaf, "is_fully_addressable", True) and not leaf.is_fully_replicated:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)
