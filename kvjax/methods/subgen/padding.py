"""Empty slots at the end of a structure, which make its number of slots a multiple of 8 (`spec.allocated_slots`)."""

from typing import TypeVar

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.state import ArrayField, map_fields

T = TypeVar("T")


def resize_slots(structure: T, axis: str, slots: int) -> T:
    """Cuts or pads one head's structure, so that its updates need not know about the empty slots.

    Args:
        structure: a state whose empty slots hold zeros.
        axis: name of the axis of slots, the first axis of all arrays that have it.
        slots: the new number of slots.

    Returns:
        The structure with this number of slots; new ones are zero.
    """

    def resize(field: ArrayField, x: Array) -> Array:
        if field.axes[:1] != (axis,):
            return x
        return jnp.pad(x[:slots], ((0, max(slots - x.shape[0], 0)), *((0, 0),) * (x.ndim - 1)))

    return map_fields(resize, structure)
