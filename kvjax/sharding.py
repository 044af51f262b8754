"""Caches on many devices: which part of a state lies where.

A mesh has three axes. Rows of a batch lie along `DATA`, kv heads along `TENSOR`; where more devices share a layer than
it has kv heads, those of one head lie along `PARTS`: they share what grows with the context (the stores of `Exact` and
of policies that recall), and each has all else. Nothing that policies do to one row's head needs another, so
`kvjax.cache` runs every function under `jax.shard_map`: no device ever asks another for keys or values, and kernels see
the part of a cache that is theirs. What crosses between devices goes through `kvjax.collectives`: a few sums over all
heads of a row, and the partials of attention over a store that is shared.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.collectives import PARTS, TENSOR
from kvjax.state import map_fields

T = TypeVar("T")

DATA = "data"
# Which mesh axis the arrays of a state are cut along, by the names of their dimensions. All others lie whole on every
# device.
RULES = {"B": DATA, "H_kv": TENSOR, "H_q": TENSOR, "H": TENSOR, "N": PARTS}
# Of what is not a state: arrays [B, ...] by row, fresh queries, keys and values [B, T, H, D] also by head.
ROWS, HEADS = PartitionSpec(DATA), PartitionSpec(DATA, None, TENSOR)


def make_mesh(
    kv_heads: int,
    *,
    data: int = 1,
    tensor: int = 1,
    sequence: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """The mesh of a model whose layers have so many kv heads.

    Args:
        data: groups of devices that share the rows of a batch.
        tensor: devices that share a layer.
        sequence: those of them that share each kv head; by default as few as there are heads for.
        devices: data * tensor of them, neighbours in `tensor` side by side; all that there are by default.

    Raises:
        ValueError: for another number of devices, or kv heads that those of `tensor` cannot share.
    """
    devices = jax.devices() if devices is None else list(devices)
    if data * tensor != len(devices):
        raise ValueError(f"data={data} x tensor={tensor} devices are called for; there are {len(devices)}")
    if sequence is None:
        if kv_heads % tensor and tensor % kv_heads:
            raise ValueError(f"tensor={tensor}: it must divide kv_heads={kv_heads}, or be a multiple of it")
        sequence = max(tensor // kv_heads, 1)
    if tensor % sequence or kv_heads % (tensor // sequence):
        raise ValueError(f"sequence={sequence}: it must divide tensor={tensor} into a divisor of kv_heads={kv_heads}")
    return Mesh(np.array(devices).reshape(data, tensor // sequence, sequence), (DATA, TENSOR, PARTS))


def rename_axes(mesh: Mesh, kv_heads: int, *, data: str | None = None, tensor: str | None = None) -> Mesh:
    """A mesh of one's own, for caches of layers that have so many kv heads: the same devices in the same order.

    Where devices along `tensor` are a multiple of the kv heads, neighbours share a head, as in `make_mesh`. Along axes
    that are not named caches are repeated.

    Args:
        data, tensor: the mesh's own names (such as "fsdp" and "tp") of the axes along which rows and heads lie.

    Raises:
        ValueError: for an axis that the mesh does not have, or kv heads that those of `tensor` cannot share.
    """
    names: list[str] = []
    shape: list[int] = []
    for axis, size in mesh.shape.items():
        if axis == tensor:
            heads = math.gcd(size, kv_heads)
            if heads not in (size, kv_heads):
                raise ValueError(
                    f"{size} devices along {axis!r}: they must divide kv_heads={kv_heads}, or be a multiple of it"
                )
            names, shape = [*names, TENSOR, PARTS], [*shape, heads, size // heads]
        else:
            kept = f"other_{axis}" if axis in (DATA, TENSOR, PARTS) else axis
            names, shape = [*names, DATA if axis == data else kept], [*shape, size]
    for given in (data, tensor):
        if given is not None and given not in mesh.shape:
            raise ValueError(f"the mesh has no axis {given!r}; it has {', '.join(map(repr, mesh.shape))}")
    absent = [axis for axis in (DATA, TENSOR, PARTS) if axis not in names]
    return Mesh(mesh.devices.reshape(*shape, *(1 for _ in absent)), (*names, *absent))


def check_axes(mesh: Mesh) -> None:
    """Raises a ValueError for a mesh whose axes are none of ours."""
    if absent := [axis for axis in (DATA, TENSOR, PARTS) if axis not in mesh.shape]:
        raise ValueError(
            f"the mesh has axes {', '.join(map(repr, mesh.shape))} and lacks {', '.join(map(repr, absent))}: say which "
            "of them is which by kvjax.sharding.rename_axes(mesh, kv_heads, data=..., tensor=...)"
        )


def shardings(tree: T, mesh: Mesh) -> T:
    """Where the arrays of a state lie, by their dimensions' names; see `RULES`.

    Raises:
        ValueError: for an axis that the mesh does not divide, with the field's name.
    """

    def place(field: Any, leaf: Any) -> NamedSharding:
        names = [RULES.get(axis) for axis in field.axes]
        for axis, name, size in zip(field.axes, names, leaf.shape, strict=True):
            if name is not None and size % mesh.shape[name]:
                among = f"{mesh.shape[name]} devices along {name!r}"
                raise ValueError(f"{field.name}: {size} along {axis!r} cannot be divided among {among}")
        return NamedSharding(mesh, PartitionSpec(*names))

    return map_fields(place, tree)
