"""Needles: tokens whose keys differ from the keys of their block; BalanceKV's needle augmentation always keeps them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

NEEDLE_REACH = 25  # tokens that are marked on either side of a needle


def needle_marks(keys: Float[Array, "T D"], inside: Bool[Array, "T"], block_size: int) -> Bool[Array, "T"]:
    """Marks tokens whose key has a negative mean inner product with the keys of its block, and their neighbors.

    A key of zeros is not marked. The released code adds 1e-8 to products and tests for <= 0.

    Args:
        inside: tokens that count, the first ones without gaps.

    Returns:
        The needles and `NEEDLE_REACH` tokens on either side.

    Reference:
        BalanceKV, section 4.3, and the released code.
    """
    tokens = keys.shape[0]
    blocks = -(-tokens // block_size)
    keys = jnp.where(inside[:, None], keys.astype(jnp.float32), 0.0)
    split = jnp.pad(keys, ((0, blocks * block_size - tokens), (0, 0))).reshape(blocks, block_size, -1)
    products = jnp.einsum("btd,bd->bt", split, jnp.sum(split, axis=1), precision=jax.lax.Precision.HIGHEST)
    products = products.reshape(-1)[:tokens]
    count = jnp.cumsum(inside & (products < 0))
    index = jnp.arange(tokens)
    before = jnp.where(index > NEEDLE_REACH, count[jnp.maximum(index - NEEDLE_REACH - 1, 0)], 0)
    return inside & (count[jnp.minimum(index + NEEDLE_REACH, tokens - 1)] > before)
