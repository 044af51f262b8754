"""Halving weighted tokens so that sums over them change little: the self-balancing walk of BalanceKV, three ways.

Every way takes one block of one head's tokens and keeps at most half of them with larger weights. `softmax_balance` is
the paper's Algorithm 2, `reference_halving` and `exact_halving` are what its authors run, and `halve_by_pairs` is a
better variant: every two neighbours become one of them, so exactly half stay and the total weight is conserved.
"""

import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from pallas_kernels import balanced_walk
from pallas_kernels.balanced_walk import Block


class Halved(NamedTuple):
    """The entries kept of a block of t, in t // 2 places."""

    kept: Int[Array, "h"]  # int32, the entry's place in the block; any place where the weight is zero
    weight: Float[Array, "h"]  # float32, 0 in places that stayed empty
    clipped: Int[Array, ""]  # int32, decisions whose probability had to be clipped into [0, 1]


class Halve(Protocol):
    """A way to halve t entries of one stream. Entries of weight zero are empty places: nothing may depend on them."""

    def __call__(
        self,
        rng: Key[Array, ""],
        keys: Float[Array, "t D"],
        values: Float[Array, "t D_v"] | None,
        weights: Float[Array, "t"],
    ) -> Halved: ...


# --- Algorithm 2 ---


def walk_constant(tokens: int, delta: float) -> float:
    """c = 30 log(n / delta) of Algorithm 2: with it the walk of n tokens fails with probability at most delta."""
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
    """The signs of SoftmaxBalance and how many probabilities were clipped; O(n^2 D) time, O(n block) memory.

    p_i = 1/2 - y_i / (2 c R^2) with y_i = sum over j < i of exp(<k_i, k_j> / sqrt(D)) <v_i, v_j> eta_j and
    R = exp(key_norm^2 / (2 sqrt(D))) value_norm. The paper fails where p leaves [0, 1] (printed for one side only);
    here p is clipped.

    Args:
        values: None balances the denominator: every value is 1.
        weights: tokens of different weights enter as multiples of the largest; those of weight zero do not enter.
        block: tokens whose rows of the kernel are held at a time.

    Source: BalanceKV, Algorithm 2.
    """
    tokens, head_dim = keys.shape
    blocks = -(-tokens // block)
    pad = blocks * block - tokens
    keys = jnp.pad(keys.astype(jnp.float32), ((0, pad), (0, 0)))
    scale = jnp.pad(weights / jnp.maximum(jnp.max(weights), 1e-30), (0, pad))
    values = None if values is None else jnp.pad(values.astype(jnp.float32), ((0, pad), (0, 0)))
    uniforms = jnp.pad(uniforms, (0, pad))
    gain = 1 / (2 * c)

    def decide(signs, first):
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, block)  # noqa: E731
        # Relative to R^2, so that nothing overflows at large norms.
        kernel = jnp.exp((cut(keys) @ keys.T - key_norm**2) / math.sqrt(head_dim)) * cut(scale)[:, None] * scale
        if values is not None:
            kernel = kernel * (cut(values) @ values.T) / value_norm**2
        own = jax.lax.dynamic_slice_in_dim(kernel, first, block, axis=1)
        fresh, clipped = balanced_walk.assign_signs_from_matrix(own, cut(uniforms), gain, start=kernel @ signs)
        return jax.lax.dynamic_update_slice_in_dim(signs, fresh, first, axis=0), clipped

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
    """Keeps the smaller class of signs (that of -1 where both are equal), each entry with twice its weight.

    The class may be well under half, and so may the total weight: see `MergeReduceTree` for its correction. For the
    arguments see `softmax_signs`.

    Source: BalanceKV, Algorithm 2 (SoftmaxBalance).
    """
    uniforms = jax.random.uniform(rng, weights.shape)
    signs, clipped = softmax_signs(uniforms, keys, values, weights, c=c, key_norm=key_norm, value_norm=value_norm)
    present = weights > 0
    plus, minus = present & (signs > 0), present & (signs < 0)
    kept = jnp.where(jnp.sum(plus) < jnp.sum(minus), plus, minus)
    index = jnp.nonzero(kept, size=weights.shape[0] // 2, fill_value=0)[0].astype(jnp.int32)
    filled = jnp.arange(index.shape[0]) < jnp.sum(kept)
    return Halved(index, jnp.where(filled, 2 * weights[index], 0.0), clipped)


# --- the released code ---


def reference_block(
    keys: Float[Array, "n D"], values: Float[Array, "n D_v"], temperature: float, shift: float = 0.0
) -> Block:
    """K_ij = exp(temperature <k~_i, k~_j> / sqrt(D) - shift) (1e-8 + <v_i, v_j> + 0.025), k~ the keys less their mean.

    Source: the code released with BalanceKV.
    """
    keys = keys.astype(jnp.float32)
    return Block(
        keys=keys - jnp.mean(keys, axis=0),
        values=values.astype(jnp.float32),
        factor=jnp.float32(temperature / math.sqrt(keys.shape[1])),
        shift=jnp.float32(shift),
        offset=jnp.float32(1e-8 + 0.025),
    )


def exact_halving(signs: Float[Array, "n"], count: Int[Array, ""]) -> tuple[Int[Array, "h"], Float[Array, "h"]]:
    """Which floor(count / 2) of the first `count` tokens stay, in which order, and with weights of 2, 1 or (none) 0.

    Let c be the later of the two places at which the counts of -1 and of +1 first reach floor(count / 2). Of the
    tokens up to c those of the sign opposite to c's stay with weight 2, those of the same sign go; later tokens stay
    with weight 1. The order is that of a stable descending sort by weight. The total weight is c + 1, not `count`, and
    for an odd count one token too many qualifies and is lost.

    Returns:
        index [n // 2] int32 and weight [n // 2] float32; places from floor(count / 2) on have weight 0.

    Source: the code released with BalanceKV.
    """
    places = jnp.arange(signs.shape[0])
    inside, half = places < count, count // 2
    reached = lambda chosen: jnp.argmax(jnp.cumsum(chosen & inside) >= half)  # noqa: E731  (0 where it never is)
    last = jnp.maximum(reached(signs < 0), reached(signs > 0))
    weight = jnp.where(places > last, 1.0, jnp.where(signs != signs[last], 2.0, 0.0))
    order = jnp.argsort(jnp.where(inside, weight, -1.0), descending=True, stable=True)[: signs.shape[0] // 2]
    return order.astype(jnp.int32), jnp.where(places[: order.shape[0]] < half, weight[order], 0.0)


def reference_halving(
    uniforms: Float[Array, "n_blocks block"],
    keys: Float[Array, "n D"],
    values: Float[Array, "n D_v"],
    weights: Float[Array, "n"],
    count: Int[Array, ""],
    *,
    gamma: float,
    temperature: float,
    shift: float = 0.0,
) -> tuple[Int[Array, "h"], Float[Array, "h"]]:
    """One halving of one head's first `count` tokens as the released code does it.

    Blocks walk independently, values times the weights so far; the first sign of a block is +1. The last block is
    padded with zeros, which shift the mean that its keys are centred by.

    Args:
        uniforms: draw j of a block decides its sign j. There must be blocks enough for n tokens.

    Returns:
        index [n // 2] and the new total weights [n // 2] of what `exact_halving` keeps of the head's signs.
    """
    blocks, block = uniforms.shape
    tokens = keys.shape[0]
    inside = (jnp.arange(tokens) < count)[:, None]

    def split(x):
        x = jnp.where(inside, x.astype(jnp.float32), 0.0)
        return jnp.pad(x, ((0, blocks * block - tokens), (0, 0))).reshape(blocks, block, -1)

    def walk(uniforms, keys, values):
        return balanced_walk.assign_signs(reference_block(keys, values, temperature, shift), uniforms, gamma).signs

    signs = jax.vmap(walk)(uniforms.at[:, 0].set(0.0), split(keys), split(values * weights[:, None]))
    index, factor = exact_halving(signs.reshape(-1)[:tokens], count)
    return index, factor * weights[index]


def halve_exactly(
    rng: Key[Array, ""],
    keys: Float[Array, "t D"],
    values: Float[Array, "t D_v"],
    weights: Float[Array, "t"],
    *,
    gamma: float,
    temperature: float,
) -> Halved:
    """The released code's walk and exact halving on one block, with a random first sign.

    Entries of different weights walk as multiples of the largest; empty places must come last, and are padding. The
    kernel is divided by its mean diagonal, so that gamma means the same at all norms.

    """
    present = weights > 0
    count = jnp.sum(present, dtype=jnp.int32)
    scale = weights / jnp.maximum(jnp.max(weights), 1e-30)
    padded = lambda x: in_range(jnp.where(present[:, None], x.astype(jnp.float32), 0.0))  # noqa: E731
    uniforms = jax.random.uniform(rng, weights.shape)
    block = reference_block(padded(keys), padded(values), temperature)
    gain = gamma * count / jnp.maximum(jnp.sum(balanced_walk.kernel_diagonal(block) * scale * scale), 1e-30)
    # An entry's fraction of the largest weight enters where it adds to sums and where sums change its own sign.
    signs, clipped = balanced_walk.assign_signs(block, uniforms, gain * scale, scale)
    kept, factor = exact_halving(signs, count)
    return Halved(kept, factor * weights[kept], clipped)


LARGEST = 1e12


def in_range(x: Float[Array, "t F"]) -> Float[Array, "t F"]:
    """Vectors whose squares float32 holds: those that are larger come by a common factor. It is none of a kernel's to
    values, and to keys as large every other key is as far as can be, with it and without."""
    peak = jnp.max(jnp.abs(x))
    return jnp.where(peak > LARGEST, x * (LARGEST / peak), x)


# --- halving by pairs ---


def pair_block(
    keys: Float[Array, "t D"],
    values: Float[Array, "t D_v"] | None,
    weights: Float[Array, "t"],
    temperature: float,
    floor: float,
) -> Block:
    """K_ij = exp(temperature <k~_i, k~_j> / sqrt(D)) (<v_i, v_j> + floor mean|v|^2) up to a factor; k~ less their mean.

    Means are over the entries that have weight. Without values the second factor is 1.
    """
    present = (weights > 0).astype(jnp.float32)
    count = jnp.maximum(jnp.sum(present), 1.0)
    there = lambda x: in_range(jnp.where(present[:, None] > 0, x.astype(jnp.float32), 0.0))  # noqa: E731
    keys = there(keys)
    mean = jnp.matmul(present, keys, precision=jax.lax.Precision.HIGHEST) / count
    centred = (keys - mean) * present[:, None]
    values = None if values is None else there(values)
    factor = jnp.float32(temperature / math.sqrt(keys.shape[1]))
    return Block(
        keys=centred,
        values=values,
        factor=factor,
        # The largest of the exponents on the diagonal, so that none overflows.
        shift=factor * jnp.max(jnp.sum(centred * centred, axis=1)),
        offset=jnp.float32(0.0) if values is None else floor * jnp.sum(values * values) / count,
    )


def halve_by_pairs(
    rng: Key[Array, ""],
    keys: Float[Array, "t D"],
    values: Float[Array, "t D_v"] | None,
    weights: Float[Array, "t"],
    *,
    gamma: float = 4.0,
    temperature: float = 0.1,
    floor: float = 0.1,
) -> Halved:
    """Makes one entry of every two: exactly t // 2 stay and the total weight is conserved.

    Each entry in order is paired with the nearest one that is left, by the distance of the kernel of `pair_block`.
    Of a pair of weights w_1, w_2 one stays with weight w_1 + w_2: the first with probability
    w_1 / (w_1 + w_2) - tilt, where the tilt counters what earlier pairs changed in the direction of this one, as the
    self-balancing walk does. With tilts of 0 every sum over entries is unbiased; with equal weights it is in any case,
    since the reverse of every sequence of choices is as probable. An entry whose partner is an empty place stays.

    Args:
        gamma: strength of the tilt, relative to the pair's squared distance.
        temperature, floor: see `pair_block`.

    Source: BalanceKV's walk on differences of features; pairing by nearness is kvjax's own.
    """
    uniforms = jax.random.uniform(rng, (weights.shape[0] // 2,))
    block = pair_block(keys, values, weights, temperature, floor)
    kept, weight, clipped = balanced_walk.thin_pairs(block, uniforms, weights, gamma)
    order = jnp.argsort(kept)
    return Halved(kept[order], weight[order], clipped)
