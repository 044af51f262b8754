"""The self-balancing walk in XLA: a scan over the entries."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.balanced_walk.oracle import Block, Signs


def kernel_matrix(block: Block) -> Float[Array, "t t"]:
    """Returns K of a block."""

    def gram(x: Float[Array, "t D"]) -> Float[Array, "t t"]:
        return jnp.matmul(x, x.T, precision=jax.lax.Precision.HIGHEST)

    kernel = jnp.exp(block.factor * gram(block.keys) - block.shift)
    return kernel if block.values is None else kernel * (gram(block.values) + block.offset)


def assign_signs(
    block: Block, uniforms: Float[Array, "t"], gain: Float[Array, "t"], weight: Float[Array, "t"]
) -> Signs:
    """Assigns signs by the self-balancing walk, see `pallas_kernels.balanced_walk.assign_signs`.

    Args:
        uniforms: One draw from [0, 1) per entry.

    Returns:
        The signs and the number of clipped decisions.
    """
    return assign_signs_from_matrix(kernel_matrix(block), uniforms, gain, weight)


def assign_signs_from_matrix(
    kernel: Float[Array, "t t"],
    uniforms: Float[Array, "t"],
    gain: Float[Array, "t"] | float,
    weight: Float[Array, "t"] | float = 1.0,
    start: Float[Array, "t"] | float = 0.0,
) -> Signs:
    """Assigns signs by the self-balancing walk on a given kernel matrix.

    Args:
        uniforms: One draw from [0, 1) per entry.
        start: The contribution of earlier signs to each sum y_i.

    Returns:
        The signs and the number of clipped decisions.
    """
    gain, weight, sums = (jnp.broadcast_to(x, uniforms.shape).astype(jnp.float32) for x in (gain, weight, start))

    def decide(carry, i):
        """Returns the sums and clipped decisions, `carry`, after decision i, and its sign."""
        sums, num_clipped = carry
        tilt = gain[i] * sums[i]
        sign = jnp.where(uniforms[i] < 0.5 - tilt, 1.0, -1.0)
        return (sums + sign * weight[i] * kernel[i], num_clipped + (jnp.abs(tilt) > 0.5)), sign

    (_, num_clipped), signs = jax.lax.scan(decide, (sums, jnp.int32(0)), jnp.arange(uniforms.shape[0]))
    return Signs(signs, num_clipped)
