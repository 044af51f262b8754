"""Hugging Face checkpoint directories to and from `Llama`: `config.json` and safetensors files, whole or sharded."""

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
from flax import nnx, traverse_util
from jax.sharding import Mesh

from kvjax_models import atomic_io
from kvjax_models.formats import config_json, untrusted_files, weights
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.sharding import parameter_shardings, shard_array

# What transformers writes per file when nothing is said.
MAX_SHARD_BYTES = 5_000_000_000

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_MOST_LAYERS_UNSEEN = 64  # so few are compared tensor by tensor, which says more
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Buffers that old versions of transformers saved and that follow from the configuration.
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")


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


def load_config(directory: str | os.PathLike) -> LlamaConfig:
    """Reads `config.json` of a Hugging Face directory.

    Raises:
        FileNotFoundError: no `config.json` there.
        ValueError: not JSON, another architecture, missing keys, or a feature that is not implemented; the message
            names the file and the key (see `config_json.parse_config`).
    """
    directory = untrusted_files.weights_directory(pathlib.Path(directory))
    values = untrusted_files.read_json_object(directory, "config.json")
    try:
        return config_json.parse_config(values)
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: {error}") from error


def load_model(
    directory: str | os.PathLike, dtype: jax.typing.DTypeLike | None = None, mesh: Mesh | None = None
) -> Llama:
    """Reads a model, tensor by tensor, from a Hugging Face directory.

    Args:
        dtype: of parameters and arithmetic; None for the one that the file's embedding has.
        mesh: where each tensor goes to, in parts, as soon as it is read (see `sharding`); None for one device.

    Raises:
        FileNotFoundError: `config.json`, the weights or a shard that the index names is not there.
        ValueError: see `load_config`; a file that is truncated or no safetensors file; missing, extra and misshapen
            tensors (one error lists them all); values that are not finite, in the file or once cast to `dtype`.
    """
    directory = untrusted_files.weights_directory(pathlib.Path(directory))
    config = load_config(directory)
    model_type = config_json.text_config(untrusted_files.read_json_object(directory, "config.json"))["model_type"]
    with contextlib.ExitStack() as stack:
        stored = weights.select_text_tensors(_without_ignored(_open_tensors(_weight_files(directory), stack)))
        _check_layers(directory, config, stored)
        dtype = _own_dtype(stored) if dtype is None else jnp.dtype(dtype)
        # Shapes only: random weights that are overwritten at once would double the memory.
        graph, state = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0))))
        shapes = {path: leaf.shape for path, leaf in _flat(state).items()}
        rules = weights.parameter_rules(model_type, config, shapes, stored)
        places = {} if mesh is None else _flat(parameter_shardings(state, config, mesh))
        if config.tied_embeddings:
            stored = _without_tied_head(directory, stored)
        if problems := _misfits(rules, stored):
            raise ValueError(f"{directory}: the tensors do not fit config.json:\n  " + "\n  ".join(problems))
        parameters: dict[weights.Path, jax.Array] = {}
        not_finite: list[str] = []
        for rule in rules:
            tensors = {name: stored[name].read() for name in rule.names}
            made = [_cast(part, dtype) for part in rule.read(list(tensors.values()))]
            if not all(np.isfinite(part).all() for part in made):
                wrong = [name for name, x in tensors.items() if not np.isfinite(_cast(x, dtype)).all()]
                not_finite.extend(wrong or tensors)  # in four bits none is wrong by itself
            for path, part in zip(rule.paths, made, strict=True):
                parameters[path] = jnp.asarray(part) if mesh is None else shard_array(part, places[path])
    if not_finite:
        names = ", ".join(not_finite)
        raise ValueError(f"{directory}: values that are not finite as {dtype.name} in {names}")
    nnx.replace_by_pure_dict(state, traverse_util.unflatten_dict(parameters))
    return nnx.merge(graph, state)


def _own_dtype(stored: Mapping[str, _StoredTensor]) -> np.dtype:
    """What a file keeps its embedding in; float32 where JAX has nothing like it, and where it is absent."""
    kept = stored[_EMBEDDING].dtype if _EMBEDDING in stored else "F32"
    return jnp.dtype({"F16": jnp.float16, "BF16": jnp.bfloat16}.get(kept, jnp.float32))


def save_model(
    directory: str | os.PathLike,
    model: Llama,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a model as a directory that `load` and transformers (4.43 and later) read.

    Configuration and weights are written aside, and count as one from the moment when all of them are on the disk. A
    save that is stopped before it leaves what was there; after it, `load` reads the new ones from where they are, and
    the next save puts them in their place.

    Args:
        directory: made if needed; a model already there is replaced.
        model: any model whose configuration a family can express.
        dtype: of the stored tensors; None keeps each parameter's own.
        bos_token_id, eos_token_id: written to `config.json`, null where None: transformers reads an absent key as its
            own default, 2 for Llama's end of text.
        max_shard_bytes: above this the weights go to several files with an index. One tensor is never cut.

    Raises:
        ValueError: no family has this combination of features, or values are not finite (once cast to `dtype`).
        OSError: where it cannot be written, or another process writes there; what was there is as it was.
    """
    directory = pathlib.Path(directory)
    parameters = _flat(nnx.state(model, nnx.Param))
    values = config_json.to_config_json(model.config)
    rules = weights.parameter_rules(
        values["model_type"], model.config, {path: leaf.shape for path, leaf in parameters.items()}
    )
    values |= {
        "torch_dtype": jnp.dtype(dtype or model.embedding.embedding[...].dtype).name,
        "bos_token_id": bos_token_id,
        "eos_token_id": list(eos_token_id) if isinstance(eos_token_id, Sequence) else eos_token_id,
    }
    lock = atomic_io.lock_directory(directory)
    aside = directory / f"{untrusted_files.COMPLETE}.partial"
    try:
        _put_in_place(directory)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        _write_weights(aside, weights.output_tensors(rules, parameters), dtype, max_shard_bytes)
        atomic_io.write_text(aside / "config.json", json.dumps(values, indent=2) + "\n")
        aside.rename(directory / untrusted_files.COMPLETE)
        atomic_io.fsync(directory)
        _put_in_place(directory)
    except OSError as error:
        raise OSError(f"{directory}: the model could not be saved: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        lock.release()


def _put_in_place(directory: pathlib.Path) -> None:
    """Puts what a save completed aside in the place of what was there; again from the start, where that was stopped."""
    complete = directory / untrusted_files.COMPLETE
    if not complete.is_dir():
        return
    names = {path.name for path in complete.iterdir()}
    for name in sorted(names):
        with atomic_io.atomic_replace(directory / name) as partial:
            try:
                os.link(complete / name, partial)
            except OSError:  # a file system without links
                shutil.copyfile(complete / name, partial)
    # A single file left from an earlier save would hide new shards, and old shards would be orphans.
    for stale in [directory / _SINGLE_FILE, directory / _INDEX_FILE, *directory.glob("model-*-of-*.safetensors")]:
        if stale.name not in names:
            stale.unlink(missing_ok=True)
    atomic_io.fsync(directory)
    # Its name goes first: what is half removed must not be read.
    left = complete.rename(directory / f"{untrusted_files.COMPLETE}.partial")
    shutil.rmtree(left)


def _flat(state: nnx.State) -> dict[weights.Path, Any]:
    """Arrays, or their shapes, by path in `Llama`."""
    return traverse_util.flatten_dict(nnx.to_pure_dict(state))


def _cast(tensor: np.ndarray, dtype: jax.typing.DTypeLike) -> np.ndarray:
    with np.errstate(over="ignore"):  # what becomes infinite is an error, and the caller's to name
        return tensor.astype(dtype, copy=False)


def _write_weights(
    directory: pathlib.Path,
    tensors: Mapping[str, weights.OutputTensor],
    dtype: jax.typing.DTypeLike | None,
    max_shard_bytes: int,
) -> None:
    """Writes safetensors files, and their index where there are several."""
    bytes_of = {name: math.prod(x.shape) * jnp.dtype(dtype or x.dtype).itemsize for name, x in tensors.items()}
    shards = _shards(bytes_of, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = _SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        stored = {name: _stored(name, tensors[name], dtype) for name in names}
        weight_map |= dict.fromkeys(names, file)
        try:
            # transformers refuses files that do not say whose layout of linear weights ([out, in]) they have.
            safetensors.numpy.save_file(stored, directory / file, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:
            raise OSError(f"{file}: {error}") from error
        atomic_io.fsync(directory / file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(bytes_of.values())}, "weight_map": weight_map}
        atomic_io.write_text(directory / _INDEX_FILE, json.dumps(index, indent=2) + "\n")


def _stored(name: str, written: weights.OutputTensor, dtype: jax.typing.DTypeLike | None) -> np.ndarray:
    """A tensor as it goes to the file: safetensors writes the buffer, so a turned one must be made contiguous."""
    tensor = np.ascontiguousarray(_cast(written.make(), dtype or written.dtype))
    if not np.isfinite(tensor).all():
        raise ValueError(f"{name} has values that are not finite as {tensor.dtype.name}; nothing was replaced")
    return tensor


def _weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a directory, the single one first, as in transformers."""
    if untrusted_files.has_entry(directory, _SINGLE_FILE):
        return [untrusted_files.resolve_file(directory, _SINGLE_FILE)]
    if not untrusted_files.has_entry(directory, _INDEX_FILE):
        raise FileNotFoundError(
            f"{directory} holds neither {_SINGLE_FILE} nor {_INDEX_FILE}; other formats (.bin, .pth, .gguf) must be "
            "converted to safetensors first"
        )
    weight_map = untrusted_files.read_json_object(directory, _INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ValueError(f"{directory / _INDEX_FILE} has no weight_map")
    if strange := [name for name in weight_map.values() if not isinstance(name, str)]:
        raise ValueError(f"{directory / _INDEX_FILE}: {strange[0]!r} is no name of a file")
    names = sorted(set(weight_map.values()))
    if absent := [
        name for name in names if pathlib.PurePath(name).name == name and not untrusted_files.has_entry(directory, name)
    ]:
        raise FileNotFoundError(f"{directory / _INDEX_FILE} names shards that are not there: {', '.join(absent)}")
    return [untrusted_files.resolve_file(directory, name) for name in names]


def _check_layers(directory: pathlib.Path, config: LlamaConfig, stored: Mapping[str, _StoredTensor]) -> None:
    """Raises a ValueError for layers that there cannot be, before their shapes are made: every one has tensors."""
    if config.layers > max(len(stored), _MOST_LAYERS_UNSEEN):
        raise ValueError(
            f"{directory}: num_hidden_layers={config.layers}, but the files hold {len(stored)} tensors in all"
        )


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


def _misfits(rules: Sequence[weights.TensorRule], stored: Mapping[str, _StoredTensor]) -> list[str]:
    """All that is wrong with the set of tensors, from the headers alone."""
    wanted = {name: (shape, rule.dtypes) for rule in rules for name, shape in zip(rule.names, rule.shapes, strict=True)}
    problems = [f"missing: {name}" for name in wanted if name not in stored]
    for name, tensor in stored.items():
        if name not in wanted:
            problems.append(f"not part of the model: {name}")
            continue
        shape, dtypes = wanted[name]
        if tensor.shape != shape:
            problems.append(f"{name} is {list(tensor.shape)}, the config means {list(shape)}")
        if tensor.dtype not in dtypes:
            problems.append(f"{name} is {tensor.dtype}; known: {', '.join(dtypes)}")
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
