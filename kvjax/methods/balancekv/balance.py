"""Halving of weighted tokens so that sums over them change little: BalanceKV's self-balancing walk in two forms.

Both forms take one block of one head's tokens and keep at most half of them with larger weights. `softmax_balance` is
the paper's Algorithm 2. `reference_halving` and `exact_halving` are the released code.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from pallas_kernels import balanced_walk
from pallas_kernels.balanced_walk import Block


class Halved(NamedTuple):
    """The entries that remain of a block of t, in t // 2 slots.

    Attributes:
        indices: int32, index of each entry in the block; arbitrary where the weight is zero.
        weight: float32; 0 in empty slots.
        clipped: int32, decisions whose probability was clipped to [0, 1].
    """

    indices: Int[Array, "h"]
    weight: Float[Array, "h"]
    clipped: Int[Array, ""]


# Halves t entries of one stream, given a PRNG key, keys, values and weights. Entries of weight zero are empty and must
# not affect it.
Halve = Callable[[Key[Array, ""], Float[Array, "t D"], Float[Array, "t D_v"] | None, Float[Array, "t"]], Halved]


# --- Algorithm 2 ---


def walk_constant(tokens: int, delta: float) -> float:
    """Returns c = 30 log(n / delta), with which the walk of n tokens fails with probability at most delta.

    Returns:
        The constant.

    Reference:
        BalanceKV, Algorithm 2.
    """
    return 30 * math.log(tokens / delta)


def softmax_signs(
    uniforms: Float[Array, "n"],
    keys: Float[Array, "n D"],
    values: Float[Array, "n D_v"] | None,
    weights: Float[Array, "n"],
    *,
    c: float,
    key_norm: Float[Array, ""] | float,
    value_norm: Float[Array, ""] | float = 1.0,
    block: int = 64,
) -> tuple[Float[Array, "n"], Int[Array, ""]]:
    """Assigns the signs of SoftmaxBalance in O(n^2 D) time and O(n block) memory.

    p_i = 1/2 - y_i / (2 c R^2) with y_i = sum over j < i of exp(<k_i, k_j> / sqrt(D)) <v_i, v_j> eta_j and
    R = exp(key_norm^2 / (2 sqrt(D))) value_norm. The paper fails where p is outside [0, 1]; here p is clipped.

    Args:
        uniforms: one draw from [0, 1) per token.
        values: values of the tokens; None to balance the denominator, where every value is 1.
        weights: weights of the tokens, used relative to the largest; tokens of weight zero have no effect.
        c: the walk's constant (`walk_constant`).
        block: tokens whose rows of the kernel matrix are in memory at a time.

    Returns:
        The signs, and the number of clipped probabilities.

    Reference:
        BalanceKV, Algorithm 2.
    """
    tokens, head_dim = keys.shape
    blocks = -(-tokens // block)
    pad = blocks * block - tokens
    # `key_norm` need not bound the keys of empty entries, and infinity times a weight of zero is NaN.
    keys = jnp.where(weights[:, None] > 0, keys.astype(jnp.float32), 0.0)
    keys = jnp.pad(keys, ((0, pad), (0, 0)))
    scale = jnp.pad(weights / jnp.maximum(jnp.max(weights), 1e-30), (0, pad))
    values = None if values is None else jnp.pad(values.astype(jnp.float32) / value_norm, ((0, pad), (0, 0)))
    uniforms = jnp.pad(uniforms, (0, pad))
    gain = 1 / (2 * c)
    multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

    def decide(signs: Float[Array, "n"], first: Int[Array, ""]) -> tuple[Float[Array, "n"], Int[Array, ""]]:
        """Assigns the signs of the block that starts at token `first`, given the `signs` of the tokens before it."""

        def rows(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, first, block)

        # Relative to R^2, so that large norms do not overflow.
        exponent = (multiply(rows(keys), keys.T) - key_norm**2) / math.sqrt(head_dim)
        kernel = jnp.exp(exponent) * rows(scale)[:, None] * scale
        if values is not None:
            kernel = kernel * multiply(rows(values), values.T)
        within = jax.lax.dynamic_slice_in_dim(kernel, first, block, axis=1)
        start = multiply(kernel, signs)
        new, clipped = balanced_walk.assign_signs_from_matrix(within, rows(uniforms), gain, start=start)
        return jax.lax.dynamic_update_slice_in_dim(signs, new, first, axis=0), clipped

    signs, clipped = jax.lax.scan(decide, jnp.zeros(blocks * block), block * jnp.arange(blocks))
    return signs[:tokens], jnp.sum(clipped)


def softmax_balance(
    rng: Key[Array, ""],
    keys: Float[Array, "t D"],
    values: Float[Array, "t D_v"] | None,
    weights: Float[Array, "t"],
    *,
    c: float,
    key_norm: Float[Array, ""] | float,
    value_norm: Float[Array, ""] | float = 1.0,
) -> Halved:
    """Keeps the smaller class of signs (-1 if both are equal), each entry with twice its weight.

    The class can be much smaller than half, and so can the total weight.

    Args:
        values: values of the entries; None to balance the denominator.
        c: the walk's constant (`walk_constant`).

    Returns:
        The entries that remain.

    Reference:
        BalanceKV, Algorithm 2 (SoftmaxBalance).
    """
    uniforms = jax.random.uniform(rng, weights.shape)
    signs, clipped = softmax_signs(uniforms, keys, values, weights, c=c, key_norm=key_norm, value_norm=value_norm)
    present = weights > 0
    plus, minus = present & (signs > 0), present & (signs < 0)
    smaller = jnp.where(jnp.sum(plus) < jnp.sum(minus), plus, minus)
    index = jnp.nonzero(smaller, size=weights.shape[0] // 2, fill_value=0)[0].astype(jnp.int32)
    occupied = jnp.arange(index.shape[0]) < jnp.sum(smaller)
    return Halved(index, jnp.where(occupied, 2 * weights[index], 0.0), clipped)


# --- the released code ---


def reference_block(keys: Float[Array, "n D"], values: Float[Array, "n D_v"], temperature: float) -> Block:
    """Returns the kernel exp(temperature <k~_i, k~_j> / sqrt(D)) (1e-8 + <v_i, v_j> + 0.025), k~ the centered keys.

    Returns:
        The block.

    Reference:
        The released code of BalanceKV.
    """
    keys = keys.astype(jnp.float32)
    return Block(
        keys=keys - jnp.mean(keys, axis=0),
        values=values.astype(jnp.float32),
        factor=jnp.float32(temperature / math.sqrt(keys.shape[1])),
        offset=jnp.float32(1e-8 + 0.025),
    )


def exact_halving(signs: Float[Array, "n"], count: Int[Array, ""]) -> tuple[Int[Array, "h"], Float[Array, "h"]]:
    """Selects exactly floor(count / 2) of the first `count` tokens by their signs.

    Let c be the later of the two indices at which the counts of -1 and of +1 first reach floor(count / 2). Up to c,
    tokens of the sign opposite to c's remain with weight 2 and tokens of the same sign are dropped. Later tokens remain
    with weight 1. The order is a stable descending sort by weight. The total weight is c + 1, not `count`. If `count`
    is odd, one token too many qualifies and is lost.

    Returns:
        int32 indices and float32 weights; slots from floor(count / 2) on have weight 0.

    Reference:
        The released code of BalanceKV.
    """
    index = jnp.arange(signs.shape[0])
    inside, half = index < count, count // 2
    # 0 where the count is never reached.
    reached = [jnp.argmax(jnp.cumsum(is_sign & inside) >= half) for is_sign in (signs < 0, signs > 0)]
    last = jnp.maximum(*reached)
    weight = jnp.where(index > last, 1.0, jnp.where(signs != signs[last], 2.0, 0.0))
    order = jnp.argsort(jnp.where(inside, weight, -1.0), descending=True, stable=True)[: signs.shape[0] // 2]
    return order.astype(jnp.int32), jnp.where(index[: order.shape[0]] < half, weight[order], 0.0)


def reference_halving(
    uniforms: Float[Array, "n_blocks block"],
    keys: Float[Array, "n D"],
    values: Float[Array, "n D_v"],
    weights: Float[Array, "n"],
    count: Int[Array, ""],
    *,
    gamma: float,
    temperature: float,
) -> tuple[Int[Array, "h"], Float[Array, "h"]]:
    """Halves one head's first `count` tokens once, as the released code does.

    Blocks walk independently, with values multiplied by the weights so far; the first sign of a block is +1. The last
    block is padded with zeros, which shift the mean by which its keys are centered. Where exp of the product of
    two keys overflows float32, the released code gives all later tokens of the block the sign -1; here they are
    balanced.

    Args:
        uniforms: one draw per sign, in enough blocks for n tokens.
        temperature: factor of the kernel's exponent.

    Returns:
        Indices of the tokens that `exact_halving` selects, and their new weights.
    """
    blocks, block = uniforms.shape
    tokens = keys.shape[0]
    inside = (jnp.arange(tokens) < count)[:, None]

    def split(x: Float[Array, "n D"]) -> Float[Array, "n_blocks block D"]:
        """Returns the vectors `x` in padded blocks, with zeros for tokens that do not count."""
        x = jnp.where(inside, x.astype(jnp.float32), 0.0)
        return jnp.pad(x, ((0, blocks * block - tokens), (0, 0))).reshape(blocks, block, -1)

    def walk(uniforms: Array, keys: Array, values: Array) -> Float[Array, "block"]:
        return balanced_walk.assign_signs(reference_block(keys, values, temperature), uniforms, gamma).signs

    signs = jax.vmap(walk)(uniforms.at[:, 0].set(0.0), split(keys), split(values * weights[:, None]))
    index, factor = exact_halving(signs.reshape(-1)[:tokens], count)
    return index, factor * weights[index]
