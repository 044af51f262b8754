"""The self-balancing walk in XLA: a scan over the entries."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.balanced_walk.oracle import Block, Signs, row_scale


def kernel_matrix(block: Block) -> tuple[Float[Array, "t t"], Float[Array, "t"]]:
    """Returns K of a block, of which column j is relative to the largest exponent in rows before j, and `row_scale`.

    Entries on and below the diagonal are finite and have no meaning.
    """

    def gram(x: Float[Array, "t D"]) -> Float[Array, "t t"]:
        return jnp.matmul(x, x.T, precision=jax.lax.Precision.HIGHEST)

    exponent = block.factor * gram(block.keys)
    largest = jnp.max(jnp.triu(exponent, 1), axis=0)
    kernel = jnp.exp(jnp.minimum(exponent - largest, 0.0))
    if block.values is not None:
        kernel *= gram(block.values) + block.offset
    return kernel, row_scale(largest)


def assign_signs(
    block: Block, uniforms: Float[Array, "t"], gain: Float[Array, "t"], weight: Float[Array, "t"]
) -> Signs:
    """Assigns signs by the self-balancing walk, see `pallas_kernels.balanced_walk.assign_signs`.

    Args:
        uniforms: One draw from [0, 1) per entry.

    Returns:
        The signs and the number of clipped decisions.
    """
    kernel, scale = kernel_matrix(block)
    return assign_signs_from_matrix(kernel, uniforms, gain * scale, weight)


def assign_signs_from_matrix(
    kernel: Float[Array, "t t"],
    uniforms: Float[Array, "t"],
    gain: Float[Array, "t"] | float,
    weight: Float[Array, "t"] | float = 1.0,
    start: Float[Array, "t"] | float = 0.0,
) -> Signs:
    """Assigns signs by the self-balancing walk on the entries above the diagonal of a kernel matrix.

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
