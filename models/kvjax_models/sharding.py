"""Tensor parallelism of a model's parameters on a mesh (`kvjax.make_mesh`), as in Megatron-LM.

Every layer's projections are sharded along heads and along the MLP's width, so that attention and the MLP are each
followed by one all-reduce. `kvjax_models.runner.generator.Generator` generates on the mesh of its model.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from kvjax.distributed.collectives import SEQUENCE, TENSOR
from kvjax.distributed.sharding import DATA, ROWS, check_axes, shardings
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import DecoderLayer, Llama

KV_SPEC = PartitionSpec(DATA, TENSOR)  # [B, H_kv, ...]

# The sharded axis of each parameter, counted from the last axis, by the names of its module and of itself. Kernels
# [in, out] are sharded along `out` before attention or the activation and along `in` after it; qkv kernels
# [W, H_kv, G + 2, D] along KV heads. Parameters of the gated delta rule are sharded along key heads [..., H, C],
# those of short convolutions along channels. All other parameters are replicated.
_SHARDED_AXIS = {
    **{(module, "kernel"): -2 for module in ("qkvz", "ba", "out")},
    ("mixer", "convolution"): -2,
    **{(module, name): -1 for module in ("bcx", "mixer") for name in ("kernel", "bias")},
    **{("mixer", name): -1 for name in ("log_rate", "decay_bias")},
    **{("output_gate", name): -1 for name in ("kernel", "bias")},
    **{("qkv", name): -3 for name in ("kernel", "bias")},
    **{(module, name): -1 for module in ("gate_up", "gate", "up") for name in ("kernel", "bias")},
    ("head", "kernel"): -1,
    **{(module, "kernel"): -2 for module in ("output", "down")},
    ("embedding", "embedding"): -2,
}


def shard_model(model: Llama, mesh: Mesh) -> Llama:
    """Moves a model's parameters to a mesh.

    Args:
        mesh: mesh from `kvjax.make_mesh`.

    Returns:
        The sharded model; the same object if it has this sharding already.
    """
    shardings = parameter_shardings(model, model.config, mesh)
    if [x.sharding for x in jax.tree.leaves(model)] == jax.tree.leaves(shardings):
        return model
    return jax.tree.map(shard_array, model, shardings)


def shard_array(x: Any, sharding: jax.sharding.Sharding) -> Array:
    """Returns a sharded copy of an array that every process holds completely; no data moves between processes."""
    return jax.make_array_from_callback(np.shape(x), sharding, lambda index: np.asarray(x)[index])


def replicate(x: np.ndarray | np.generic, mesh: Mesh | None) -> Array:
    """Returns a replicated copy of an array that every process holds completely.

    Args:
        mesh: mesh of the copy; None for the default device.
    """
    return jnp.asarray(x) if mesh is None else shard_array(x, NamedSharding(mesh, PartitionSpec()))


def mesh_of(model: Llama) -> Mesh | None:
    """Returns the mesh of a model's parameters; None for a single device."""
    sharding = getattr(jax.tree.leaves(model)[0], "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None


def constrain_to_batch(x: Array, mesh: Mesh | None) -> Array:
    """Returns an array that is sharded along batch rows only.

    Without the constraint, compilers shard the residual stream like the next projection's weights and gather it again.

    Args:
        x: the array, with batch rows along its first axis.
        mesh: the mesh; None for a single device.
    """
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, ROWS))


def constrain_states(states: Any, mesh: Mesh | None) -> Any:
    """Returns states in the shardings of their annotations (`kvjax.distributed.sharding`).

    Args:
        states: states, such as `recurrent.RecurrentState`.
        mesh: the mesh; None for a single device.
    """
    return states if mesh is None else jax.lax.with_sharding_constraint(states, shardings(states, mesh))


def constrain_replicated(x: Array, mesh: Mesh | None) -> Array:
    """Returns a replicated array, which every process can read.

    Args:
        mesh: the mesh; None for a single device.
    """
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def shard_attention(
    attend: Callable[..., Any],
    mesh: Mesh,
    heads: tuple[int, int],
    *specs: Any,
    results: tuple[PartitionSpec, ...] = (),
) -> Callable[..., Any]:
    """Wraps an attention function in `shard_map`, because the compiler cannot partition kernels.

    Args:
        attend: takes queries [B, T, H_q, D], further arguments, and attention sink logits [H_q].
        heads: numbers of query heads and of KV heads. Devices that share a KV head share its query heads if they
            divide evenly; otherwise each attends with all of them.
        *specs: partition specs of the arguments between queries and sinks.
        results: partition specs of the results after the attention output.

    Returns:
        A function of the same arguments; every device computes its own heads.
    """
    axes = (TENSOR, SEQUENCE) if share_heads(mesh, heads) else TENSOR
    query_spec = PartitionSpec(DATA, None, axes)
    in_specs = (query_spec, *specs, PartitionSpec(axes))
    out_specs = (query_spec, *results) if results else query_spec
    return jax.shard_map(attend, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def share_heads(mesh: Mesh, heads: tuple[int, int]) -> bool:
    """Returns whether the devices that share a KV head can divide its query heads evenly.

    Args:
        heads: numbers of query heads and of KV heads.
    """
    query_heads, kv_heads = heads
    return mesh.shape[TENSOR] == kv_heads and query_heads % (kv_heads * mesh.shape[SEQUENCE]) == 0


def head_counts(layer: DecoderLayer) -> tuple[int, int]:
    """Returns the numbers of query heads and of KV heads of a layer."""
    return layer.attention.query_heads, layer.attention.kv_heads


def parameter_shardings(parameters: Any, config: LlamaConfig, mesh: Mesh) -> Any:
    """Computes the sharding of every parameter; axes that the devices do not divide evenly are replicated.

    Args:
        parameters: pytree of a model's parameters or of their shapes.
        config: the model's configuration.
        mesh: mesh with the axis names of `kvjax.make_mesh`; other names raise a ValueError.

    Returns:
        A pytree of shardings with the structure of `parameters`.
    """
    check_axes(mesh)
    specs = parameter_specs(parameters, config.query_heads, mesh)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def parameter_specs(parameters: Any, query_heads: int, mesh: Mesh) -> Any:
    """Computes partition specs like `parameter_shardings`, also for a part of a model such as one layer.

    Args:
        parameters: pytree of parameters or of their shapes.
        query_heads: query heads of the model; they are never split.
        mesh: mesh from `kvjax.make_mesh`.

    Returns:
        A pytree of partition specs with the structure of `parameters`.
    """

    def dividing_axes(size: int, *candidates: tuple[str, ...]) -> tuple[str, ...] | None:
        """Returns the first candidate whose number of devices divides `size`."""
        return next((axes for axes in candidates if size % math.prod(mesh.shape[axis] for axis in axes) == 0), None)

    def parameter_spec(path: Any, leaf: Any) -> PartitionSpec:
        """Returns the partition spec of the parameter `leaf` at `path`."""
        *_, module, name, _ = (str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        axis = _SHARDED_AXIS.get((module, name))
        if axis is None:
            return PartitionSpec()
        axis += leaf.ndim
        if module == "qkv":
            # Devices that share a KV head need all of its projection: each takes a part of the input axis.
            inputs = (dividing_axes(leaf.shape[0], (SEQUENCE,)),) if name == "kernel" else ()
            return PartitionSpec(*inputs, dividing_axes(leaf.shape[axis], (TENSOR,)))
        if module in ("qkvz", "ba", "bcx", "mixer", "out"):
            return PartitionSpec(*[None] * axis, dividing_axes(leaf.shape[axis], (TENSOR,)))
        size = query_heads if module in ("output", "output_gate") else leaf.shape[axis]
        return PartitionSpec(*[None] * axis, dividing_axes(size, (TENSOR, SEQUENCE), (TENSOR,)))

    return jax.tree_util.tree_map_with_path(parameter_spec, parameters)
