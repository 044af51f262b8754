"""The definition of the balanced walk: each sign is drawn against the sum of the earlier ones, in float32.

Exponents of some models' keys are in the thousands (Qwen2.5: keys of norm 240), and exp of 89 exceeds float32. A sum of
an infinite number and its opposite is not a number, against which every later sign of the block is -1. Each sum is
therefore computed relative to its largest term, as in a softmax.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_array import widened


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """t entries of one head with the kernel K_ij = exp(factor <k_i, k_j>) (<v_i, v_j> + offset).

    Attributes:
        keys: k, float32.
        values: v, float32. None replaces the second factor by 1.
        factor: The scale of the inner products of keys, float32.
        offset: Added to the inner products of values, float32.
    """

    keys: Float[Array, "t D"]
    values: Float[Array, "t D_v"] | None
    factor: Float[Array, ""]
    offset: Float[Array, ""]


def row_scale(largest: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns exp of the `largest` exponent of a sum, or e^80, with which a sum that is not zero decides the sign."""
    return jnp.exp(jnp.minimum(largest, 80.0))


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
        exponent = block.factor * jnp.sum(keys * keys[i], axis=1)
        earlier = signs != 0  # signs that are not drawn yet are 0
        largest = jnp.max(jnp.where(earlier, exponent, 0.0))
        kernel = jnp.exp(jnp.minimum(exponent - largest, 0.0))
        if values is not None:
            kernel *= jnp.sum(values * values[i], axis=1) + block.offset
        tilt = gain[i] * row_scale(largest) * jnp.sum(kernel * weight * signs)
        signs = signs.at[i].set(jnp.where(uniforms[i] < 0.5 - tilt, 1.0, -1.0))
        return signs, num_clipped + (jnp.abs(tilt) > 0.5)

    return Signs(*jax.lax.fori_loop(0, len(keys), decide, (signs, num_clipped)))
