"""Needles: tokens unlike the others, which BalanceKV's needle augmentation keeps whatever the walk says."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

NEEDLE_REACH = 25  # marks reach so many tokens to either side


def needle_marks(keys: Float[Array, "T D"], inside: Bool[Array, "T"], block_size: int) -> Bool[Array, "T"]:
    """Tokens whose key has mean inner product < 0 with the keys of its block, and `NEEDLE_REACH` on either side. (A key
    of zeros has none, and is unlike nothing: the released code adds 1e-8 before it asks for <= 0.)

    Args:
        inside: which tokens count, from the first on without gaps.

    Source: BalanceKV, section 4.3, and the code released with it.
    """
    tokens = keys.shape[0]
    blocks = -(-tokens // block_size)
    keys = jnp.where(inside[:, None], keys.astype(jnp.float32), 0.0)
    split = jnp.pad(keys, ((0, blocks * block_size - tokens), (0, 0))).reshape(blocks, block_size, -1)
    products = jnp.einsum("btd,bd->bt", split, jnp.sum(split, axis=1)).reshape(-1)[:tokens]
    marked = jnp.cumsum(inside & (products < 0))
    places = jnp.arange(tokens)
    before = jnp.where(places > NEEDLE_REACH, marked[jnp.maximum(places - NEEDLE_REACH - 1, 0)], 0)
    return inside & (marked[jnp.minimum(places + NEEDLE_REACH, tokens - 1)] > before)
