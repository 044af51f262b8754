"""Caches on many devices: which part of a state lies where, and policies that run where their part lies.

A mesh has three axes. Rows of a batch lie along `DATA`, kv heads along `TENSOR`; where more devices share a layer than
it has kv heads, each head's cache lies, whole, on every device along `REPLICA`. Nothing that policies do to one row's
head needs another, so `sharded` runs them under `jax.shard_map`: no device ever asks another for keys or values, and
kernels see the part of a cache that is theirs. The few sums over all heads of a row go through `kvjax.shards`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.attention import QUERY_HEADS, Partials
from kvjax.policies.choice import Group
from kvjax.policy import CachePolicy
from kvjax.shards import TENSOR
from kvjax.state import BATCH, KV_HEADS, map_fields

T = TypeVar("T")

DATA, REPLICA = "data", "replica"
# Which mesh axis the arrays of a state are cut along, by their own axes. All others lie whole on every device.
RULES = {BATCH: DATA, KV_HEADS: TENSOR, QUERY_HEADS: TENSOR}
# Of what is not a state: arrays [B, ...] by row, fresh queries, keys and values [B, T, H, D] also by head.
ROWS, HEADS = PartitionSpec(DATA), PartitionSpec(DATA, None, TENSOR)


def make_mesh(kv_heads: int, *, data: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a model whose layers have so many kv heads.

    Args:
        data: groups of devices that share the rows of a batch.
        tensor: devices that share a layer.
        devices: data * tensor of them, neighbours in `tensor` side by side; all that there are by default.

    Raises:
        ValueError: for another number of devices, or one of `tensor` and `kv_heads` that does not divide the other.
    """
    devices = jax.devices() if devices is None else list(devices)
    if data * tensor != len(devices):
        raise ValueError(f"data={data} x tensor={tensor} devices are called for; there are {len(devices)}")
    heads = math.gcd(tensor, kv_heads)
    if heads != min(tensor, kv_heads):
        raise ValueError(f"tensor={tensor}: it must divide kv_heads={kv_heads}, or be a multiple of it")
    return Mesh(np.array(devices).reshape(data, heads, tensor // heads), (DATA, TENSOR, REPLICA))


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
        ValueError: when a cache is made, for rows or kv heads that the mesh does not divide, and for `by_head`, which
            goes around sharded policies, so that every group of heads is divided by itself.
    """
    heads: Any = HEADS
    partials = Partials(heads, heads, heads)
    specs = lambda state: jax.tree.map(lambda one: one.spec, shardings(state, mesh))  # noqa: E731

    def on_parts(function: Any, given: Any, gives: Any) -> Any:
        return jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=gives, check_vma=False)

    def init(spec, row_keys):
        state = policy.init(spec, row_keys)
        if any(isinstance(one, Group) for one in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Group))):
            # It picks heads by their number among all heads of the layer.
            raise ValueError("by_head: put it around sharded policies, one for every group of heads")
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
