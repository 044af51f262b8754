"""The walk in XLA: its meaning, on every platform."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.balanced_walk.base import Block, Pairs, Signs

# Farther than any entry, nearer than one already taken.
FAR = 3e38


def matrix(block: Block) -> Float[Array, "t t"]:
    """K of `Block`."""
    product = lambda x: jnp.matmul(x, x.T, precision=jax.lax.Precision.HIGHEST)  # noqa: E731
    kernel = jnp.exp(block.factor * product(block.keys) - block.shift)
    return kernel if block.values is None else kernel * (product(block.values) + block.offset)


def diagonal(block: Block) -> Float[Array, "t"]:
    """Of `matrix`, without making it."""
    square = lambda x: jnp.sum(x * x, axis=1)  # noqa: E731
    own = jnp.exp(block.factor * square(block.keys) - block.shift)
    return own if block.values is None else own * (square(block.values) + block.offset)


def signs(block: Block, uniforms: Float[Array, "t"], gain: Float[Array, "t"], weight: Float[Array, "t"]) -> Signs:
    """Signs s_i = +1 where u_i < 1/2 - gain_i y_i, else -1, with y_i = sum over j < i of K_ij weight_j s_j.

    The self-balancing walk of Alweiss, Liu and Sawhney (2021) on vectors that are known by their inner products.

    Args:
        uniforms: one draw in [0, 1) a sign. A draw of 0 makes the first sign +1.
        gain: how strongly a sign counters what has piled up.

    Returns:
        The signs, and how often |gain_i y_i| was above 1/2, where the probability is clipped.
    """
    return signs_by_matrix(matrix(block), uniforms, gain, weight)


def signs_by_matrix(
    kernel: Float[Array, "t t"],
    uniforms: Float[Array, "t"],
    gain: Float[Array, "t"] | float,
    weight: Float[Array, "t"] | float = 1.0,
    start: Float[Array, "t"] | float = 0.0,
) -> Signs:
    """`signs` where the matrix is at hand.

    Args:
        start: what signs decided before bring to each sum.
    """
    gain, weight, sums = (jnp.broadcast_to(x, uniforms.shape).astype(jnp.float32) for x in (gain, weight, start))

    def decide(carry, place):
        sums, clipped = carry
        tilt = gain[place] * sums[place]
        sign = jnp.where(uniforms[place] < 0.5 - tilt, 1.0, -1.0)
        return (sums + sign * weight[place] * kernel[place], clipped + (jnp.abs(tilt) > 0.5)), sign

    (_, clipped), sign = jax.lax.scan(decide, (sums, jnp.int32(0)), jnp.arange(uniforms.shape[0]))
    return Signs(sign, clipped)


def relative(weights: Float[Array, "*b t"]) -> Float[Array, "*b t"]:
    """To the largest of a block."""
    return weights / jnp.maximum(jnp.max(weights, axis=-1, keepdims=True), 1e-30)


def least_distance(own: Float[Array, "*b t"]) -> Float[Array, "*b"]:
    """What counts as the squared distance of two entries at least, by the diagonal of their matrix: distances within
    rounding of zero would make any quotient of them, and such a pair's choice does not matter."""
    return 1e-6 * jnp.max(own, axis=-1) + 1e-30


def pairs(block: Block, uniforms: Float[Array, "h"], weights: Float[Array, "t"], gamma: Float[Array, ""]) -> Pairs:
    """Pairs each entry in order with the nearest one that is left, |k_i - k_j|^2 = K_ii + K_jj - 2 K_ij, and keeps one
    of the two with the weight of both: the first with probability w_1 / (w_1 + w_2) - tilt.

    The tilt counters what earlier pairs changed in the direction of this one, as the self-balancing walk does. Entries
    of weight zero are empty places: they come last, and a partner of one of them stays.

    Args:
        uniforms: one draw in [0, 1) a pair, t // 2 of them.
        gamma: strength of the tilt, relative to the pair's squared distance.
    """
    kernel = matrix(block)
    own = jnp.diagonal(kernel)
    present = weights > 0
    scale, least = relative(weights), least_distance(own)
    tokens = weights.shape[0]
    places = jnp.arange(tokens, dtype=jnp.int32)
    turn = jnp.where(present, places, places + tokens)  # empty places come last

    def decide(carry, uniform):
        free, sums, clipped = carry
        first = jnp.min(jnp.where(free, turn, 2 * tokens)) % tokens
        free &= places != first
        away = jnp.where(present, own - 2 * kernel[first], FAR)
        away = jnp.where(free, away, jnp.inf)
        # Two plain minima, where XLA:CPU takes ten times as long for one argmin.
        second = jnp.min(jnp.where(away == jnp.min(away), places, tokens))
        total = weights[first] + weights[second]
        share = jnp.where(total > 0, weights[first] / jnp.maximum(total, 1e-30), 0.5)
        apart = own[first] + own[second] - 2 * kernel[first, second]
        # No tilt where one of the two must stay.
        tilt = 4 * share * (1 - share) * gamma * (sums[first] - sums[second]) / jnp.maximum(apart, least)
        stays_first = uniform < share - tilt
        change = jnp.where(stays_first, scale[second], -scale[first])
        sums = sums + change * (kernel[first] - kernel[second])
        clipped += jnp.abs(share - tilt - 0.5) > 0.5
        return (free & (places != second), sums, clipped), (jnp.where(stays_first, first, second), total)

    start = (jnp.ones(tokens, bool), jnp.zeros(tokens), jnp.int32(0))
    (_, _, clipped), (kept, weight) = jax.lax.scan(decide, start, uniforms)
    return Pairs(kept, weight, clipped)
