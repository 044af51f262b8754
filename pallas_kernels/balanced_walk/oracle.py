"""The definition of the balanced walk: each sign is drawn against the sum of the earlier ones, in float32."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_array import widened


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """t entries of one head with the kernel K_ij = exp(factor <k_i, k_j> - shift) (<v_i, v_j> + offset).

    Attributes:
        keys: k, float32.
        values: v, float32. None replaces the second factor by 1.
        factor: The scale of the inner products of keys, float32.
        shift: Subtracted in the exponent, float32.
        offset: Added to the inner products of values, float32.
    """

    keys: Float[Array, "t D"]
    values: Float[Array, "t D_v"] | None
    factor: Float[Array, ""]
    shift: Float[Array, ""]
    offset: Float[Array, ""]


class Signs(NamedTuple):
    """The result of `assign_signs`.

    Attributes:
        signs: +1 or -1, float32.
        num_clipped: The decisions whose probability was clipped to [0, 1], int32.
    """

    signs: Float[Array, "t"]
    num_clipped: Int[Array, ""]


def assign_signs(
    block: Block, uniforms: Float[Array, "t"], gain: Float[Array, "t"], weight: Float[Array, "t"]
) -> Signs:
    """Computes `assign_signs`, with one row of the kernel matrix after the other."""
    keys, values = widened(block.keys), None if block.values is None else widened(block.values)
    signs, num_clipped = jnp.zeros_like(keys[:, 0]), jnp.int32(0)

    def decide(i: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        signs, num_clipped = carry
        kernel = jnp.exp(block.factor * jnp.sum(keys * keys[i], axis=1) - block.shift)
        if values is not None:
            kernel *= jnp.sum(values * values[i], axis=1) + block.offset
        tilt = gain[i] * jnp.sum(kernel * weight * signs)  # signs that are not drawn yet are 0
        signs = signs.at[i].set(jnp.where(uniforms[i] < 0.5 - tilt, 1.0, -1.0))
        return signs, num_clipped + (jnp.abs(tilt) > 0.5)

    return Signs(*jax.lax.fori_loop(0, len(keys), decide, (signs, num_clipped)))
