"""A model's parameters on a mesh (`kvjax.make_mesh`), in the manner of Megatron: every layer's products are cut along
heads and along the MLP's width, so that one sum over devices follows attention and one the MLP.

A model whose parameters lie on a mesh generates there: `kvjax_models.generation.generator.Generator` asks them.
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
from kvjax.distributed.sharding import DATA, ROWS, check_axes
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama

# Which axis of a parameter is cut, from its last one, by the names of its module and of itself: a kernel [in, out] (or
# one per expert) along what it gives, that of attention [W, H_kv, G + 2, D] along kv heads, and behind that, along what
# it takes. All others lie whole on every device.
_CUT = {
    **{("qkv", name): -3 for name in ("kernel", "bias")},
    **{(module, name): -1 for module in ("gate_up", "gate", "up") for name in ("kernel", "bias")},
    ("head", "kernel"): -1,
    **{(module, "kernel"): -2 for module in ("output", "down")},
    ("embedding", "embedding"): -2,
}


def shard_model(model: Llama, mesh: Mesh) -> Llama:
    """The model with its parameters on the mesh; the same object where they lie there already."""
    wanted = parameter_shardings(model, model.config, mesh)
    if [x.sharding for x in jax.tree.leaves(model)] == jax.tree.leaves(wanted):
        return model
    return jax.tree.map(shard_array, model, wanted)


def shard_array(x: Any, sharding: jax.sharding.Sharding) -> Array:
    """An array that every process holds alike, in its parts; no process sends any."""
    return jax.make_array_from_callback(np.shape(x), sharding, lambda part: np.asarray(x)[part])


def replicate(x: np.ndarray | np.generic, mesh: Mesh | None) -> Array:
    """What every process holds alike, whole on every device."""
    return jnp.asarray(x) if mesh is None else shard_array(x, NamedSharding(mesh, PartitionSpec()))


def mesh_of(model: Llama) -> Mesh | None:
    """The mesh that a model's parameters lie on; None for one device."""
    sharding = getattr(jax.tree.leaves(model)[0], "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None


def constrain_to_batch(x: Array, mesh: Mesh | None) -> Array:
    """What lies along its rows alone, such as the residual stream, which compilers would otherwise cut as the next
    product's weights are, and gather again."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, ROWS))


KV_SPEC = PartitionSpec(DATA, TENSOR)  # [B, H_kv, ...]


def shard_attention(
    attend: Callable[..., Array], mesh: Mesh, heads: tuple[int, int], *given: PartitionSpec
) -> Callable[..., Array]:
    """Attention of fresh queries [B, T, H_q, D] to what is given, which lies so, and to sinks [H_q]; every device for
    its own heads: kernels cannot be cut by the compiler.

    Args:
        heads: of queries, and of keys. Devices that share a kv head share its query heads, where these divide; where
            they do not, each attends with all.
    """
    axes = (TENSOR, SEQUENCE) if share_heads(mesh, heads) else TENSOR
    own = PartitionSpec(DATA, None, axes)
    specs = (own, *given, PartitionSpec(axes))
    return jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=own, check_vma=False)


def share_heads(mesh: Mesh, heads: tuple[int, int]) -> bool:
    """Whether devices that share a kv head can share its query heads: of queries there are so many, and of keys."""
    query_heads, kv_heads = heads
    return mesh.shape[TENSOR] == kv_heads and query_heads % (kv_heads * mesh.shape[SEQUENCE]) == 0


def parameter_shardings(parameters: Any, config: LlamaConfig, mesh: Mesh) -> Any:
    """Where every parameter lies, as a tree like theirs (arrays or abstract ones). What the devices do not divide lies
    whole on those that it cannot be divided among. Raises a ValueError for a mesh whose axes are named otherwise."""
    check_axes(mesh)
    place = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
    return jax.tree.map(place, parameter_specs(parameters, config.query_heads, mesh))


def parameter_specs(parameters: Any, query_heads: int, mesh: Mesh) -> Any:
    """As `parameter_shardings`, how every parameter is cut, of a part of a model, too."""

    def fitting(size: int, *ways: tuple[str, ...]) -> tuple[str, ...] | None:
        """The first way of dividing so much that leaves nothing over."""
        return next((names for names in ways if size % math.prod(mesh.shape[one] for one in names) == 0), None)

    def cut(path: Any, leaf: Any) -> PartitionSpec:
        *_, module, name, _ = (str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        axis = _CUT.get((module, name))
        if axis is None:
            return PartitionSpec()
        axis += leaf.ndim
        if module == "qkv":
            # Devices that share a kv head need all that is made of it: each takes a part of what goes in.
            inputs = (fitting(leaf.shape[0], (SEQUENCE,)),) if name == "kernel" else ()
            return PartitionSpec(*inputs, fitting(leaf.shape[axis], (TENSOR,)))
        parts = query_heads if module == "output" else leaf.shape[axis]  # heads stay whole
        return PartitionSpec(*[None] * axis, fitting(parts, (TENSOR, SEQUENCE), (TENSOR,)))

    return jax.tree_util.tree_map_with_path(cut, parameters)


def constrain_replicated(x: Array, mesh: Mesh | None) -> Array:
    """What every process must know."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))
