"""What policies must know of other devices: heads of the same row that lie there.

Everywhere else all heads are here, and these functions change nothing.
"""

import jax
from jaxtyping import Array, Num, Shaped

TENSOR = "tensor"  # the mesh axis along which kv heads lie; see `kvjax.sharding`


def heads_in_all(own: int) -> int:
    """How many heads a layer has where this device has so many."""
    return own * (jax.lax.axis_size(TENSOR) if _in_parts() else 1)


def own_heads(x: Shaped[Array, "H_all *N"], own: int) -> Shaped[Array, "H *N"]:
    """Of what all heads of a layer have, the part of this device's heads."""
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSOR) * own, own) if _in_parts() else x


def summed_over_heads(x: Num[Array, "*N"]) -> Num[Array, "*N"]:
    """The sum of what every device has summed over its own heads."""
    return jax.lax.psum(x, TENSOR) if _in_parts() else x


def largest_over_heads(x: Num[Array, "*N"]) -> Num[Array, "*N"]:
    """The largest of what every device found among its own heads."""
    return jax.lax.pmax(x, TENSOR) if _in_parts() else x


def _in_parts() -> bool:
    """Whether this is traced for the part of a device, by `sharded`."""
    try:
        jax.lax.axis_size(TENSOR)
    except NameError:
        return False
    return True
