"""What all forms of the walk take and give."""

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """t entries of one head, known to a walk by K_ij = exp(factor <k_i, k_j> - shift) (<v_i, v_j> + offset)."""

    keys: Float[Array, "t D"]  # float32
    values: Float[Array, "t D_v"] | None  # float32; None: the second factor is 1, and there is no offset
    factor: Float[Array, ""]  # float32
    shift: Float[Array, ""]
    offset: Float[Array, ""]


class Signs(NamedTuple):
    sign: Float[Array, "t"]  # float32, +1 or -1
    clipped: Int[Array, ""]  # int32, decisions whose probability had to be clipped into [0, 1]


class Pairs(NamedTuple):
    """Of every two entries one, in the order in which pairs were made."""

    kept: Int[Array, "h"]  # int32 places in the block, t // 2 of them
    weight: Float[Array, "h"]  # float32, that of both
    clipped: Int[Array, ""]  # int32, decisions whose probability had to be clipped into [0, 1]
