"""What something is by its content, wherever it lies: SHA-256 of a model's tensors and of its tokenizer."""

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
from kvjax_models.formats import untrusted_files
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.model.llama import Llama

# What of a directory a loaded model follows from.
_READ = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "*.safetensors",
)

# Digests of models with the arrays that they are of: arrays do not change, but a model's may be put in others' place.
_KNOWN: weakref.WeakKeyDictionary[Llama, tuple[list[weakref.ref], str]] = weakref.WeakKeyDictionary()


def model_fingerprint(model: Llama) -> str:
    """SHA-256 of the configuration and of all tensors, as they are in memory: another dtype is another model. The same
    however they are sharded; where they lie on several processes, all of them must ask."""
    leaves = jax.tree.leaves(model)
    arrays, known = _KNOWN.get(model, ([], ""))
    if len(arrays) == len(leaves) and all(array() is leaf for array, leaf in zip(arrays, leaves, strict=True)):
        return known
    found = sha256_of_bytes(f"{canonical_json(dataclasses.asdict(model.config))} {array_fingerprint(model)}".encode())
    _KNOWN[model] = [weakref.ref(leaf) for leaf in leaves], found
    return found


def directory_fingerprint(directory: pathlib.Path) -> str:
    """SHA-256 of all files of a Hugging Face directory that a model and its tokenizer are loaded from."""
    found = {}
    for home in (directory, untrusted_files.weights_directory(directory)):
        for path in sorted({path for pattern in _READ for path in home.glob(pattern)}):
            stat = path.stat()
            found[path.name] = _of_file(path.resolve(), stat.st_mtime_ns, stat.st_size)
    return sha256_of_bytes(canonical_json(found).encode())


@functools.cache
def _of_file(path: pathlib.Path, modified: int, size: int) -> str:
    """SHA-256 of a file as it is now: sweeps ask for the same many times."""
    return sha256_of_file(path)


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 of all that a tokenizer does with texts and conversations."""
    others = {field.name: getattr(tokenizer, field.name) for field in dataclasses.fields(tokenizer)}
    return sha256_of_bytes(canonical_json(others | {"backend": tokenizer.backend.to_str()}).encode())


def array_fingerprint(tree: Any) -> str:
    """SHA-256 of the arrays of a pytree: of their places in it, types, shapes and values."""
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        total.update(f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}\n".encode())
        total.update(np.ascontiguousarray(_whole(leaf)).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def canonical_json(values: Any) -> str:
    """Values in terms of JSON, as one text for equal ones."""
    return json.dumps(values, sort_keys=True, default=dict)


def _whole(leaf: Any) -> np.ndarray:
    """An array with the parts of it that other processes hold."""
    if not getattr(leaf, "is_fully_addressable", True) and not leaf.is_fully_replicated:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)
