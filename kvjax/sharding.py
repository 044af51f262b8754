"""Caches on many devices: which part of a state lies where, and policies that run where their part lies.

A mesh has three axes. Rows of a batch lie along `DATA`, kv heads along `TENSOR`; where more devices share a layer than
it has kv heads, those of one head lie along `PARTS`: they share what grows with the context (the stores of `exact` and
of policies that recall), and each has all else. Nothing that policies do to one row's head needs another, so `sharded`
runs them under `jax.shard_map`: no device ever asks another for keys or values, and kernels see the part of a cache
that is theirs. What crosses between devices goes through `kvjax.shards`: a few sums over all heads of a row, and the
partials of attention over a store that is shared.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.attention import QUERY_HEADS, Partials
from kvjax.policies.host_memory import READING_HEADS
from kvjax.policy import CachePolicy
from kvjax.shards import PARTS, TENSOR
from kvjax.state import BATCH, KV_HEADS, SEQUENCE, map_fields

T = TypeVar("T")

DATA = "data"
# Which mesh axis the arrays of a state are cut along, by their own axes. All others lie whole on every device.
RULES = {BATCH: DATA, KV_HEADS: TENSOR, QUERY_HEADS: TENSOR, READING_HEADS: TENSOR, SEQUENCE: PARTS}
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


def shardings(tree: T, mesh: Mesh) -> T:
    """Where the arrays of a state (or of `Partials`) lie, by their axes' names; see `RULES`.

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


@functools.cache
def sharded(policy: CachePolicy, mesh: Mesh) -> CachePolicy:
    """The policy on a mesh: the same results from states, keys, values and queries that lie on many devices.

    Raises:
        ValueError: when a cache is made, for rows, kv heads or groups of heads (`by_head`) that the mesh does not
            divide.
    """
    if policy.over is not None:
        return policy.over(functools.partial(sharded, mesh=mesh))
    heads: Any = HEADS
    partials = Partials(heads, heads, heads)
    specs = lambda state: jax.tree.map(lambda one: one.spec, shardings(state, mesh))  # noqa: E731

    def on_parts(function: Any, given: Any, gives: Any) -> Any:
        return jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=gives, check_vma=False)

    def init(spec, row_keys):
        state = policy.init(dataclasses.replace(spec, parts=mesh.shape[PARTS]), row_keys)
        return jax.lax.with_sharding_constraint(state, shardings(state, mesh))

    def prefill(state, keys, values, lengths, query_tail=None, shared=None):
        # What layers tell each other is by row and kv head.
        own, told = specs(state), PartitionSpec(DATA, TENSOR)
        run = on_parts(policy.prefill, (own, HEADS, HEADS, ROWS, HEADS, told), (own, told))
        return run(state, keys, values, lengths, query_tail, shared)

    def attend(state, query, causal=False):
        own = specs(state)
        run = on_parts(functools.partial(policy.attend, causal=causal), (own, HEADS), (partials, own))
        return run(state, query)

    def extend(state, keys, values, lengths=None):
        own = specs(state)
        return on_parts(policy.extend, (own, HEADS, HEADS, ROWS), own)(state, keys, values, lengths)

    def compact(state):
        own = specs(state)
        return on_parts(policy.compact, (own,), own)(state)

    return policy._replace(
        init=init, prefill=prefill, attend=attend, extend=extend, compact=compact, segments=None, plan=None
    )
