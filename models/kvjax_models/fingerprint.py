"""SHA-256 fingerprints of models, tokenizers and arrays, independent of paths and sharding."""

import contextlib
import dataclasses
import hashlib
import json
import os
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from kvjax_models.atomic_io import sha256_of_bytes
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.model.config import GROUPS, LlamaConfig
from kvjax_models.model.llama import Llama

# Fields of groups have these names in saves, or their own; a change would make all saves unreadable.
_SAVED_NAMES = {
    "attention.scale": "attention_scale", "attention.logit_cap": "attention_logit_cap",
    "attention.sinks": "attention_sinks", "attention.gate": "attention_gate",
    "rope.theta": "rope_theta", "rope.layer_theta": "layer_rope_theta", "rope.window_theta": "window_rope_theta",
    "rope.scaling": "rope_scaling",
    "norms.position": "norms", "norms.epsilon": "norm_epsilon", "norms.offset": "norm_offset",
    "scales.embedding": "embedding_scale", "scales.residual": "residual_scale", "scales.layer": "layer_scale",
    "experts.number": "experts", "experts.per_token": "experts_per_token", "experts.width": "expert_width",
    "experts.normalize_weights": "normalize_expert_weights", "experts.scaling_factor": "routed_scaling_factor",
    "experts.groups": "expert_groups", "experts.groups_per_token": "expert_groups_per_token",
    "experts.shared_width": "shared_expert_width", "experts.shared_gate": "shared_expert_gate",
    "experts.parallel": "parallel_experts",
    "recurrence.layers": "recurrent_layers", "recurrence.sizes": "recurrence",
}  # fmt: skip
# Required fields of groups that a model may not have.
_ABSENT = {"number": 0, "per_token": 0, "width": 0, "layers": (), "sizes": None}
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
    config = canonical_json(_saved_config(model.config))
    result = sha256_of_bytes(f"{config} {array_fingerprint(model)}".encode())
    _CACHE[model] = [weakref.ref(leaf) for leaf in leaves], result
    return result


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Returns the SHA-256 of everything that determines how a tokenizer encodes texts and conversations.

    Whether it parses special tokens of users is not part of it: saves contain tokens.
    """
    names = (field.name for field in dataclasses.fields(tokenizer) if field.name != "parse_special")
    fields = {name: getattr(tokenizer, name) for name in names}
    with _without_stdout():  # the library prints a warning about vocabularies with holes there
        backend = tokenizer.backend.to_str()
    return sha256_of_bytes(canonical_json(fields | {"backend": backend}).encode())


def describe_model(model: Llama) -> dict[str, Any]:
    """Returns the sizes, the dtype and the fingerprint of a model, as JSON."""
    return {
        **_saved_config(model.config),
        "weight_dtype": model.weight_dtype or jnp.dtype(model.embedding.param_dtype).name,
        "weights": model_fingerprint(model),
    }


def _saved_config(config: LlamaConfig) -> dict[str, Any]:
    """Returns all fields of a configuration without groups, as saves have them."""
    values = dataclasses.asdict(config)
    for group, kind in GROUPS.items():
        fields, members = dataclasses.fields(kind), values.pop(group)
        members = members or {field.name: _ABSENT.get(field.name, field.default) for field in fields}
        values |= {_SAVED_NAMES.get(f"{group}.{name}", name): value for name, value in members.items()}
    return values


@contextlib.contextmanager
def _without_stdout() -> Iterator[None]:
    """Discards output of other libraries to standard output, unless it is closed."""
    try:
        stdout = os.dup(1)
    except OSError:
        yield
        return
    try:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


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
