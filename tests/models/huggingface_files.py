"""Writes models as Hugging Face directories, for tests of the reader."""

import json
import math

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from kvjax_models.families import FAMILIES
from kvjax_models.formats import weights
from kvjax_models.formats.checkpoint import flatten_parameters
from kvjax_models.formats.config_json import parse_config


def config_values(config, **values):
    """Returns the config.json of a model: of a Llama by default, of another family with the given values."""
    result = {
        "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": config.width,
        "intermediate_size": config.mlp_width, "num_hidden_layers": config.layers,
        "num_attention_heads": config.query_heads, "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
        "max_position_embeddings": config.max_length, "rms_norm_eps": config.norms.epsilon,
        "rope_theta": config.rope.theta, "tie_word_embeddings": config.tied_embeddings, "pad_token_id": None,
        "bos_token_id": None, "eos_token_id": None,
    } | values  # fmt: skip
    assert parse_config(result) == config
    return result


def model_tensors(model, model_type="llama", dtype=None):
    """Returns the tensors of a file by name.

    Reading moves values without changing them, so reading the indices of a file's values shows where each one goes.
    """
    parameters = flatten_parameters(nnx.state(model, nnx.Param))
    shapes = {path: leaf.shape for path, leaf in parameters.items()}
    rules = weights.parameter_rules(FAMILIES[model_type], model.config, shapes)
    tensors = {}
    for rule in rules:
        ends = np.cumsum([math.prod(shape) for shape in rule.shapes])
        places = np.split(np.arange(ends[-1]), ends[:-1])
        values = np.empty(ends[-1], dtype or parameters[rule.paths[0]].dtype)
        read = rule.read([place.reshape(shape) for place, shape in zip(places, rule.shapes, strict=True)])
        for path, place in zip(rule.paths, read, strict=True):
            values[place] = np.asarray(parameters[path], values.dtype)
        arrays = zip(np.split(values, ends[:-1]), rule.shapes, strict=True)
        tensors |= dict(zip(rule.names, (array.reshape(shape) for array, shape in arrays), strict=True))
    return tensors


def save_model(directory, model, dtype=None, *, shards=1, **values):
    """Writes config.json and weights.

    Args:
        directory: created if it does not exist.
        model: model to write.
        dtype: dtype of the tensors; by default each parameter's.
        shards: number of files of weights.
        **values: values of config.json, as for `config_values`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = config_values(model.config, **values)
    tensors = model_tensors(model, config["model_type"], None if dtype is None else jnp.dtype(dtype))
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        return safetensors.numpy.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    weight_map = {name: names[number % shards] for number, name in enumerate(sorted(tensors))}
    for file in names:
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        safetensors.numpy.save_file(part, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
