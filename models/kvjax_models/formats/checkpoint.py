"""The contents of a checkpoint, independent of its file format, and the model that is built from them."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.sharding import Mesh

from kvjax_models.families import Family
from kvjax_models.formats import files, weights
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.model.quantized import SCALE, WeightDtype, quantize
from kvjax_models.sharding import parameter_shardings, shard_array

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class StoredTensor(Protocol):
    """A tensor of a checkpoint that has not been read yet."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""

    @property
    def dtype(self) -> str:
        """The dtype as safetensors names it, such as "BF16"."""

    def read(self, dtype: np.typing.DTypeLike = np.float32) -> np.ndarray:
        """Returns the values: of a quantized tensor in the given dtype, of others in the stored one."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model's configuration and its unread tensors.

    Attributes:
        source: path of the checkpoint, for error messages.
        family: family of the model, which determines names and layouts of the tensors.
        config: configuration of the model.
        tensors: tensors by their Hugging Face names.
    """

    source: pathlib.Path
    family: Family
    config: LlamaConfig
    tensors: Mapping[str, StoredTensor]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the embedding; float32 if it is missing or JAX lacks its dtype."""
        stored = self.tensors[_EMBEDDING].dtype if _EMBEDDING in self.tensors else "F32"
        return jnp.dtype({"F16": jnp.float16, "BF16": jnp.bfloat16}.get(stored, jnp.float32))


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How the parameters of a model are stored in memory.

    Attributes:
        dtype: dtype of parameters and activations; None for the dtype of the stored embedding, float32 if that is
            quantized.
        widen: whether a checkpoint in 16 bits is computed in float32 if `dtype` is None.
        weight_dtype: "int8" quantizes the embedding and all kernels (`model.quantized`), one tensor at a time.
        mesh: mesh to shard tensors on immediately after reading; None for a single device.
    """

    dtype: jax.typing.DTypeLike | None = None
    widen: bool = False
    weight_dtype: WeightDtype | None = None
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        """Checks the combination.

        Raises:
            ValueError: if quantized weights are requested on a mesh.
        """
        if self.weight_dtype is not None and self.mesh is not None:
            raise ValueError(f"weight_dtype={self.weight_dtype!r} needs a single device; remove it, or the mesh")

    def compute_dtype(self, stored: np.dtype) -> np.dtype:
        """Returns the dtype of activations, given the dtype of the stored embedding."""
        if self.dtype is not None:
            return jnp.dtype(self.dtype)
        return jnp.dtype(jnp.float32) if self.widen else stored


def build_model(checkpoint: Checkpoint, options: LoadOptions) -> Llama:
    """Reads the tensors of a checkpoint one by one into a model.

    Args:
        checkpoint: configuration and tensors.
        options: dtypes and mesh.

    Returns:
        The model.

    Raises:
        ValueError: if tensors are missing, superfluous or have other shapes or dtypes (one error lists all of them), or
            if values are not finite in the file or after the cast to `dtype`.
    """
    source, config, mesh = checkpoint.source, checkpoint.config, options.mesh
    dtype = options.compute_dtype(checkpoint.dtype)
    # Abstract parameters: random initial values would double the memory.
    weight_dtype = options.weight_dtype
    graph, state = nnx.split(
        nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0), weight_dtype=weight_dtype))
    )
    stored = {path: leaf for path, leaf in flatten_parameters(state).items() if path[-1] != SCALE}
    shapes = {path: leaf.shape for path, leaf in stored.items()}
    rules = weights.parameter_rules(checkpoint.family, config, shapes, checkpoint.tensors)
    shardings = {} if mesh is None else flatten_parameters(parameter_shardings(state, config, mesh))
    tensors = _merge_tied_head(checkpoint) if config.tied_embeddings else checkpoint.tensors
    if problems := _find_mismatches(rules, tensors):
        listed = files.join_some(problems, "\n  ")
        raise ValueError(f"{source}: the tensors do not match the configuration:\n  {listed}")
    parameters: dict[weights.Path, jax.Array] = {}
    not_finite: list[str] = []
    for rule in rules:
        values = {name: tensors[name].read(dtype) for name in rule.names}
        dtypes = (_read_dtype(stored[path].dtype, dtype) for path in rule.paths)
        arrays = [cast(array, to) for array, to in zip(rule.read(list(values.values())), dtypes, strict=True)]
        if not all(_is_finite(array) for array in arrays):
            names = [name for name, x in values.items() if not _is_finite(cast(x, dtype))]
            not_finite.extend(names or values)  # packed MXFP4 tensors are integers, which are always finite
        for path, array in zip(rule.paths, arrays, strict=True):
            if jnp.issubdtype(stored[path].dtype, jnp.integer):
                array, scale = quantize(array, axis=_input_axis(path, array.ndim))
                parameters[(*path[:-1], SCALE)] = jnp.asarray(scale, dtype)
            parameters[path] = jnp.asarray(array) if mesh is None else shard_array(array, shardings[path])
    if not_finite:
        raise ValueError(f"{source}: values are not finite as {dtype.name} in {files.join_some(not_finite)}")
    nnx.replace_by_pure_dict(state, traverse_util.unflatten_dict(parameters))
    return nnx.merge(graph, state)


def flatten_parameters(state: nnx.State) -> dict[weights.Path, Any]:
    """Returns arrays, shapes or shardings by their path in `Llama`."""
    return traverse_util.flatten_dict(nnx.to_pure_dict(state))


def cast(tensor: np.ndarray, dtype: jax.typing.DTypeLike) -> np.ndarray:
    """Returns a tensor in another dtype, without a warning if values overflow to infinity."""
    with np.errstate(over="ignore"):
        return tensor.astype(dtype, copy=False)


def _read_dtype(stored: np.dtype, dtype: np.dtype) -> np.dtype:
    """Returns the dtype to read a parameter in: `dtype` before it is quantized, or the one that its module needs."""
    return dtype if jnp.issubdtype(stored, jnp.integer) else stored


def _is_finite(array: np.ndarray) -> bool:
    """Returns whether all values are finite; NumPy's own function is slow for bfloat16."""
    if array.dtype == jnp.bfloat16:
        return (array.view(np.uint16) & np.uint16(0x7FFF)).max(initial=0) < 0x7F80
    return bool(np.isfinite(array).all())


def _input_axis(path: weights.Path, ndim: int) -> int:
    """Returns the axis of a parameter along which a product sums; experts and embeddings have another axis first."""
    return int(path[-1] == "embedding" or (path[-2] in ("gate", "up", "down") and ndim == 3))


def _find_mismatches(rules: Sequence[weights.TensorRule], tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Returns all differences between expected and stored tensors; reads no values."""
    expected = {
        name: (shape, rule.dtypes) for rule in rules for name, shape in zip(rule.names, rule.shapes, strict=True)
    }
    problems = [f"missing: {name}" for name in expected if name not in tensors]
    for name, tensor in tensors.items():
        if name not in expected:
            problems.append(f"not part of the model: {name}")
            continue
        shape, dtypes = expected[name]
        if tensor.shape != shape:
            problems.append(f"{name} has shape {list(tensor.shape)}, the configuration implies {list(shape)}")
        if tensor.dtype not in dtypes:
            problems.append(f"{name} has dtype {tensor.dtype}; supported: {', '.join(dtypes)}")
    return problems


def _merge_tied_head(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Returns the tensors with tied embeddings under the embedding's name only.

    If both are stored, transformers 4 drops the head and transformers 5 unties them, so they must be equal.

    Raises:
        ValueError: if they differ.
    """
    tensors = dict(checkpoint.tensors)
    head = tensors.pop(_HEAD, None)
    if head is None:
        return tensors
    embedding = tensors.setdefault(_EMBEDDING, head)
    if embedding is not head and not np.array_equal(embedding.read(), head.read()):
        raise ValueError(
            f"{checkpoint.source}: the config ties the embeddings (tie_word_embeddings), but {_HEAD} differs from "
            f"{_EMBEDDING}; set tie_word_embeddings to false to use both, or remove {_HEAD}"
        )
    return tensors
