"""The self-balancing walk in jax.numpy: the definition that the kernels are tested against."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Larger than the distance of any two entries, and less than infinity, the distance of entries that are already paired.
EMPTY_DISTANCE = 3e38


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


class ThinnedPairs(NamedTuple):
    """The result of `thin_pairs`: one entry of every pair, in the order of the pairs.

    Attributes:
        indices: The indices of the kept entries, int32; t // 2 of them.
        weights: The sum of the weights of each pair, float32.
        num_clipped: The decisions whose probability was clipped to [0, 1], int32.
    """

    indices: Int[Array, "h"]
    weights: Float[Array, "h"]
    num_clipped: Int[Array, ""]


def kernel_matrix(block: Block) -> Float[Array, "t t"]:
    """Returns K of a block."""

    def gram(x: Float[Array, "t D"]) -> Float[Array, "t t"]:
        return jnp.matmul(x, x.T, precision=jax.lax.Precision.HIGHEST)

    kernel = jnp.exp(block.factor * gram(block.keys) - block.shift)
    return kernel if block.values is None else kernel * (gram(block.values) + block.offset)


def kernel_diagonal(block: Block) -> Float[Array, "t"]:
    """Returns the diagonal of K of a block, without computing the matrix."""

    def squared_norm(x: Float[Array, "t D"]) -> Float[Array, "t"]:
        return jnp.sum(x * x, axis=1)

    diagonal = jnp.exp(block.factor * squared_norm(block.keys) - block.shift)
    return diagonal if block.values is None else diagonal * (squared_norm(block.values) + block.offset)


def assign_signs(
    block: Block, uniforms: Float[Array, "t"], gain: Float[Array, "t"], weight: Float[Array, "t"]
) -> Signs:
    """Assigns signs by the self-balancing walk, see `pallas_kernels.balanced_walk.assign_signs`.

    Args:
        block: The entries.
        uniforms: One draw from [0, 1) per entry.
        gain: The gain of each entry.
        weight: The weight of each entry.

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
        kernel: K.
        uniforms: One draw from [0, 1) per entry.
        gain: The gain of each entry, or of all.
        weight: The weight of each entry, or of all.
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


def relative_weights(weights: Float[Array, "*b t"]) -> Float[Array, "*b t"]:
    """Returns weights divided by the largest weight of their block."""
    return weights / jnp.maximum(jnp.max(weights, axis=-1, keepdims=True), 1e-30)


def min_squared_distance(max_diagonal: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns a lower bound for squared distances in divisions, from the largest diagonal element of the matrix.

    Distances within rounding of zero would make quotients arbitrary; which entry of such a pair is kept is irrelevant.
    """
    return 1e-6 * max_diagonal + 1e-30


def pair_tilt(share: Array, gamma: Array, difference: Array, squared_distance: Array, min_distance: Array) -> Array:
    """Returns the tilt of the probability that the first entry of a pair is kept.

    Args:
        share: w_1 / (w_1 + w_2). If it is 0 or 1, so is the probability: the tilt is 0.
        gamma: The strength of the tilt.
        difference: The difference of the sums of both entries.
        squared_distance: The squared distance of both entries.
        min_distance: Its lower bound.

    Returns:
        The tilt, of the shape of `share`.
    """
    return 4 * share * (1 - share) * gamma * difference / jnp.maximum(squared_distance, min_distance)


def thin_pairs(
    block: Block, uniforms: Float[Array, "h"], weights: Float[Array, "t"], gamma: Float[Array, ""]
) -> ThinnedPairs:
    """Keeps one entry of every pair, see `pallas_kernels.balanced_walk.thin_pairs`.

    Args:
        block: The entries.
        uniforms: One draw from [0, 1) per pair.
        weights: The weights of the entries.
        gamma: The strength of the tilt.

    Returns:
        The kept entries.
    """
    kernel = kernel_matrix(block)
    diagonal = jnp.diagonal(kernel)
    is_present = weights > 0
    scale, min_distance = relative_weights(weights), min_squared_distance(jnp.max(diagonal))
    entries = weights.shape[0]
    index = jnp.arange(entries, dtype=jnp.int32)
    order = jnp.where(is_present, index, index + entries)  # empty entries come last

    def decide(carry, uniform):
        """Returns `carry` after the next pair, decided by `uniform`, and the pair's result."""
        is_free, sums, num_clipped = carry
        first = jnp.min(jnp.where(is_free, order, 2 * entries)) % entries
        is_free &= index != first
        distance = jnp.where(is_present, diagonal - 2 * kernel[first], EMPTY_DISTANCE)
        distance = jnp.where(is_free, distance, jnp.inf)
        # On XLA:CPU, an argmin takes ten times as long as two minima.
        second = jnp.min(jnp.where(distance == jnp.min(distance), index, entries))
        total = weights[first] + weights[second]
        share = jnp.where(total > 0, weights[first] / jnp.maximum(total, 1e-30), 0.5)
        squared_distance = diagonal[first] + diagonal[second] - 2 * kernel[first, second]
        tilt = pair_tilt(share, gamma, sums[first] - sums[second], squared_distance, min_distance)
        keeps_first = uniform < share - tilt
        change = jnp.where(keeps_first, scale[second], -scale[first])
        sums = sums + change * (kernel[first] - kernel[second])
        num_clipped += jnp.abs(share - tilt - 0.5) > 0.5
        kept = jnp.where(keeps_first, first, second)
        return (is_free & (index != second), sums, num_clipped), (kept, total)

    start = (jnp.ones(entries, bool), jnp.zeros(entries), jnp.int32(0))
    (_, _, num_clipped), (indices, pair_weights) = jax.lax.scan(decide, start, uniforms)
    return ThinnedPairs(indices, pair_weights, num_clipped)
