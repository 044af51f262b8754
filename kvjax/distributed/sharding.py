"""Caches on many devices: meshes, and where each array of a state is placed.

A mesh has three axes. Batch rows are sharded over `DATA`, KV heads over `TENSOR`. If more devices share a layer than
it has KV heads, the devices of one head are neighbours along `SEQUENCE`: they share the stores that grow with the
context, and replicate everything else.

Operations on one row's head need no other head, so `kvjax.cache` runs them under `jax.shard_map` (`per_device`), and
kernels see one device's shard. Devices exchange only sums over the heads of a row and partial softmaxes over shared
stores (`kvjax.distributed.collectives`), never keys or values.
"""

import functools
import inspect
import math
import typing
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.distributed.collectives import SEQUENCE, TENSOR
from kvjax.jax_flags import default_flags
from kvjax.state import annotated_axes, map_fields

T = TypeVar("T")
P = ParamSpec("P")

DATA = "data"
# Mesh axis of each array axis, by its dimension name. Axes with other names are replicated.
RULES = {"B": DATA, "H_kv": TENSOR, "H_q": TENSOR, "H": TENSOR, "N": SEQUENCE}
# Of arrays that are not part of a state: [B, ...] by row; queries, keys and values [B, T, H, D] by row and head.
ROWS, HEADS = PartitionSpec(DATA), PartitionSpec(DATA, None, TENSOR)


def make_mesh(
    kv_heads: int,
    *,
    data: int = 1,
    tensor: int = 1,
    sequence: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Returns a mesh for the caches of a model.

    Args:
        data: groups of devices that share the rows of a batch.
        tensor: devices that share a layer.
        sequence: devices that share a KV head; by default as few as possible.
        devices: data * tensor devices, the `tensor` ones next to each other; by default all.

    Returns:
        A mesh with axes "data", "tensor" and "sequence".

    Raises:
        ValueError: if the number of devices is not data * tensor, or KV heads cannot be divided among `tensor`.

    Example:
        >>> import jax, kvjax
        >>> dict(kvjax.make_mesh(kv_heads=8, devices=jax.devices()[:1]).shape)
        {'data': 1, 'tensor': 1, 'sequence': 1}
    """
    devices = jax.devices() if devices is None else list(devices)
    if data * tensor != len(devices):
        raise ValueError(f"data={data} x tensor={tensor} needs {data * tensor} devices, got {len(devices)}")
    if sequence is None:
        if kv_heads % tensor and tensor % kv_heads:
            raise ValueError(f"tensor={tensor} must divide kv_heads={kv_heads} or be a multiple of it")
        sequence = max(tensor // kv_heads, 1)
    if tensor % sequence or kv_heads % (tensor // sequence):
        raise ValueError(
            f"sequence={sequence} must divide tensor={tensor}, and tensor / sequence must divide kv_heads={kv_heads}"
        )
    return Mesh(np.array(devices).reshape(data, tensor // sequence, sequence), (DATA, TENSOR, SEQUENCE))


def rename_axes(mesh: Mesh, kv_heads: int, *, data: str | None = None, tensor: str | None = None) -> Mesh:
    """Returns a mesh of the same devices whose axes have the names that kvjax uses.

    If devices along `tensor` are a multiple of the KV heads, neighbours share a head, as in `make_mesh`. Caches are
    replicated along axes that are not named.

    Args:
        data: name of the axis over which rows are sharded, such as "fsdp".
        tensor: name of the axis over which heads are sharded, such as "tp".

    Returns:
        The mesh.

    Raises:
        ValueError: if an axis does not exist, or KV heads cannot be divided among the devices along `tensor`.
    """
    names: list[str] = []
    shape: list[int] = []
    for axis, size in mesh.shape.items():
        if axis == tensor:
            heads = math.gcd(size, kv_heads)
            if heads not in (size, kv_heads):
                raise ValueError(
                    f"{size} devices along {axis!r} must divide kv_heads={kv_heads} or be a multiple of it"
                )
            names, shape = [*names, TENSOR, SEQUENCE], [*shape, heads, size // heads]
        else:
            other = f"other_{axis}" if axis in (DATA, TENSOR, SEQUENCE) else axis
            names, shape = [*names, DATA if axis == data else other], [*shape, size]
    for axis in (data, tensor):
        if axis is not None and axis not in mesh.shape:
            raise ValueError(f"the mesh has no axis {axis!r}; it has {', '.join(map(repr, mesh.shape))}")
    absent = [axis for axis in (DATA, TENSOR, SEQUENCE) if axis not in names]
    return Mesh(mesh.devices.reshape(*shape, *(1 for _ in absent)), (*names, *absent))


def check_axes(mesh: Mesh) -> None:
    """Raises a ValueError for a mesh without the axes "data", "tensor" and "sequence"."""
    if absent := [axis for axis in (DATA, TENSOR, SEQUENCE) if axis not in mesh.shape]:
        raise ValueError(
            f"the mesh has axes {', '.join(map(repr, mesh.shape))} and lacks {', '.join(map(repr, absent))}; pass "
            "kvjax.distributed.sharding.rename_axes(mesh, kv_heads, data=..., tensor=...)"
        )


def shardings(tree: T, mesh: Mesh) -> T:
    """Returns the `NamedSharding` of every array of a state.

    Args:
        tree: a state, possibly abstract.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: if an axis cannot be divided among the devices; names the field.
    """

    def place(field: Any, leaf: Any) -> NamedSharding:
        """Returns the `NamedSharding` of one array `leaf` from the axes of its `field`."""
        spec = _partition_spec(field.axes)
        for axis, name, size in zip(field.axes, spec, leaf.shape, strict=False):
            if name is not None and size % mesh.shape[name]:
                devices = f"{mesh.shape[name]} devices along {name!r}"
                raise ValueError(f"{field.name}: {size} along {axis!r} cannot be divided among {devices}")
        return NamedSharding(mesh, spec)

    return map_fields(place, tree)


def _partition_spec(axes: Sequence[str]) -> PartitionSpec:
    return PartitionSpec(*(RULES.get(axis.lstrip("#")) for axis in axes if not axis.startswith("*")))


def per_device(function: Callable[P, T]) -> Callable[P, T]:
    """Compiles a function of a cache, and runs it on every device's shard if the cache has a mesh.

    Shards follow from annotations: a parameter or result that is annotated with a jaxtyping array is sharded by the
    names of its axes, a state by the annotations of its fields. A result that is annotated with the class of an
    argument is sharded as that argument is.

    Args:
        function: its first parameter is a cache with an attribute `mesh`.

    Returns:
        The function; inside a trace it is inlined.
    """
    hints, signature = typing.get_type_hints(function), inspect.getfullargspec(function)

    @functools.wraps(function)
    def sharded(*arguments: P.args, **options: P.kwargs) -> T:
        in_specs = tuple(
            _argument_specs(argument, hints[name]) for name, argument in zip(signature.args, arguments, strict=False)
        )
        state_specs = {type(argument): specs for argument, specs in zip(arguments, in_specs, strict=True)}
        cache: Any = arguments[0]
        run = jax.shard_map(
            functools.partial(function, **options),
            mesh=cache.mesh,
            in_specs=in_specs,
            out_specs=_result_specs(hints["return"], state_specs),
            check_vma=False,
        )
        return run(*arguments)

    on_one_device, on_mesh = (
        jax.jit(one, inline=True, static_argnames=signature.kwonlyargs) for one in (function, sharded)
    )

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        cache: Any = arguments[0]
        with default_flags():
            return (on_one_device if cache.mesh is None else on_mesh)(*arguments, **options)

    return call


def _argument_specs(argument: Any, hint: Any) -> Any:
    """Returns the partition specs of an argument: by its annotation, or by its fields if it is a state."""
    axes = annotated_axes(hint)
    if argument is None or axes is not None:
        return PartitionSpec() if axes is None else _partition_spec(axes)
    return map_fields(lambda field, _: _partition_spec(field.axes), argument)


def _result_specs(hint: Any, state_specs: dict[type, Any]) -> Any:
    """Returns the partition specs of a result by its annotation, given the specs of the arguments by their classes."""
    if typing.get_origin(hint) is tuple:
        return tuple(_result_specs(inner, state_specs) for inner in typing.get_args(hint))
    axes = annotated_axes(hint)
    return state_specs[typing.get_origin(hint) or hint] if axes is None else _partition_spec(axes)
