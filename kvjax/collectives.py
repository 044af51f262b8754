"""What policies must know of other devices: heads of the same row, and tokens of the same head, that lie there.

Everywhere else all of it is here, and these functions change nothing.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num, Shaped

# The mesh axes along which kv heads lie, and what grows with the context; see `kvjax.sharding`.
TENSOR, PARTS = "tensor", "sequence"


def heads_in_all(own: int) -> int:
    """How many heads a layer has where this device has so many."""
    return own * _devices(TENSOR)


def heads_here(heads: int) -> int:
    """How many of so many heads of a layer, evenly divided, are this device's."""
    return heads // _devices(TENSOR)


def own_heads(x: Shaped[Array, "H_all *N"], own: int) -> Shaped[Array, "H *N"]:
    """Of what all heads of a layer have, the part of this device's heads."""
    if _devices(TENSOR) == 1:
        return x
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSOR) * own, own)


def summed_over_heads(x: Num[Array, "*N"]) -> Num[Array, "*N"]:
    """The sum of what every device has summed over its own heads."""
    return x if _devices(TENSOR) == 1 else jax.lax.psum(x, TENSOR)


def largest_over_heads(x: Num[Array, "*N"]) -> Num[Array, "*N"]:
    """The largest of what every device found among its own heads."""
    return x if _devices(TENSOR) == 1 else jax.lax.pmax(x, TENSOR)


def are_shared() -> bool:
    """Whether devices share what grows with the context."""
    return _devices(PARTS) > 1


def slots_in_all(own: int) -> int:
    """How many slots a store that devices share has where this device has so many."""
    return own * _devices(PARTS)


def own_slot(slot: Int[Array, "*N"], own: int) -> Int[Array, "*N"]:
    """Numbers of slots of a store that devices share as numbers of this device's `own` slots; those that lie elsewhere
    become `own`, past the end."""
    if not are_shared():
        return slot
    here = slot - jax.lax.axis_index(PARTS) * own
    return jnp.where((here >= 0) & (here < own), here, own)


def own_stop(stop: Int[Array, "*N"], own: int) -> Int[Array, "*N"]:
    """Where the range of occupied slots [0, stop) of a store that devices share ends among this device's."""
    return jnp.clip(stop - jax.lax.axis_index(PARTS) * own, 0, own) if are_shared() else stop


def own_tokens(x: Shaped[Array, "B H T *N"], own: int) -> Shaped[Array, "B H S *N"]:
    """Of tokens that fill a store that devices share from its first slot on, those of this device's `own` slots; what
    finds no slot is left out."""
    if not are_shared():
        return x[:, :, :own]
    missing = max(slots_in_all(own) - x.shape[2], 0)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, missing), *[(0, 0)] * (x.ndim - 3)])
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(PARTS) * own, own, axis=2)


def summed_over_parts(x: Num[Array, "*N"]) -> Num[Array, "*N"]:
    """The sum of what every device has summed over its own slots."""
    return jax.lax.psum(x, PARTS) if are_shared() else x


def largest_over_parts(x: Num[Array, "*N"]) -> Num[Array, "*N"]:
    """The largest of what every device found among its own slots."""
    return jax.lax.pmax(x, PARTS) if are_shared() else x


def _devices(axis: str) -> int:
    """Devices along a mesh axis, where this is traced for the part of one of them, by `kvjax.cache`; else one."""
    try:
        return jax.lax.axis_size(axis)
    except NameError:
        return 1
