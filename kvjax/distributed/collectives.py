"""Collectives over the devices that share a layer.

Without a mesh, and outside `shard_map`, these functions return their argument.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num, Shaped

# Mesh axes of KV heads and of the stores that grow with the context; see `kvjax.distributed.sharding`.
TENSOR, SEQUENCE = "tensor", "sequence"


def global_heads(local: int) -> int:
    """Returns the number of heads of a layer, from the number on this device."""
    return local * _num_devices(TENSOR)


def local_heads(x: Shaped[Array, "H_all *N"], count: int) -> Shaped[Array, "H *N"]:
    """Selects this device's heads of an array over all heads of a layer.

    Args:
        x: the array, replicated on all devices.
        count: number of heads on this device.

    Returns:
        The part of the array for this device's heads.
    """
    if _num_devices(TENSOR) == 1:
        return x
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSOR) * count, count)


def sum_over_heads(x: Num[Array, "*N"]) -> Num[Array, "*N"]:
    """Sums over the devices that hold different heads."""
    return x if _num_devices(TENSOR) == 1 else jax.lax.psum(x, TENSOR)


def is_sequence_sharded() -> bool:
    """Whether devices share the stores that grow with the context."""
    return _num_devices(SEQUENCE) > 1


def global_slots(local: int) -> int:
    """Returns the number of slots of a shared store, from the number on this device."""
    return local * _num_devices(SEQUENCE)


def local_slot(slot: Int[Array, "*N"], count: int) -> Int[Array, "*N"]:
    """Maps slots of a shared store to slots on this device.

    Args:
        slot: indices among the slots of all devices.
        count: number of slots on this device.

    Returns:
        Indices among this device's slots; `count` for slots of other devices, so that writes to them are dropped.
    """
    if not is_sequence_sharded():
        return slot
    local = slot - jax.lax.axis_index(SEQUENCE) * count
    return jnp.where((local >= 0) & (local < count), local, count)


def local_stop(stop: Int[Array, "*N"], count: int) -> Int[Array, "*N"]:
    """Maps the end of the occupied slots of a shared store to this device.

    Args:
        stop: number of occupied slots on all devices, which are filled in order.
        count: number of slots on this device.

    Returns:
        The number of occupied slots on this device.
    """
    return jnp.clip(stop - jax.lax.axis_index(SEQUENCE) * count, 0, count) if is_sequence_sharded() else stop


def local_tokens(x: Shaped[Array, "B H T *N"], count: int) -> Shaped[Array, "B H S *N"]:
    """Selects the tokens for this device's slots, if tokens fill a shared store from its first slot.

    Args:
        x: an array over all tokens, replicated on all devices.
        count: number of slots on this device.

    Returns:
        The array for at most `count` tokens; padded with zeros if the store is shared.
    """
    if not is_sequence_sharded():
        return x[:, :, :count]
    missing = max(global_slots(count) - x.shape[2], 0)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, missing), *[(0, 0)] * (x.ndim - 3)])
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(SEQUENCE) * count, count, axis=2)


def sum_over_sequence(x: Num[Array, "*N"]) -> Num[Array, "*N"]:
    """Sums over the devices that share a store."""
    return jax.lax.psum(x, SEQUENCE) if is_sequence_sharded() else x


def max_over_sequence(x: Num[Array, "*N"]) -> Num[Array, "*N"]:
    """Takes the maximum over the devices that share a store."""
    return jax.lax.pmax(x, SEQUENCE) if is_sequence_sharded() else x


def _num_devices(axis: str) -> int:
    """Returns the devices along a mesh axis inside `shard_map`, otherwise 1."""
    try:
        return jax.lax.axis_size(axis)
    except NameError:
        return 1
