"""`soft_match` in XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.argmin import min_and_argmin
from pallas_kernels.soft_match.oracle import MIN_SQUARED_NORM, Partners


def soft_match(keys: Float[Array, "S D"], num_keys: Int[Array, ""], *, chunk_size: int) -> Partners:
    """Finds the most similar B key of every A key, see `pallas_kernels.soft_match.soft_match`.

    Args:
        keys: The keys of one head; those from `num_keys` on may be NaN.
        num_keys: The number of valid keys, int32.

    Returns:
        The partners of the A keys.
    """
    slots, pairs = keys.shape[0], chunk_size // 2
    padding = -slots % chunk_size
    keys = jnp.pad(keys.astype(jnp.float32), ((0, padding), (0, 0)))
    inverse_norm = jax.lax.rsqrt(jnp.maximum(jnp.sum(keys * keys, axis=1), MIN_SQUARED_NORM)).reshape(-1, pairs, 2)
    pairwise = keys.reshape(-1, pairs, 2, keys.shape[1])
    is_valid = (jnp.arange(slots + padding) < num_keys).reshape(-1, pairs, 2)
    # The norm of an A key does not affect which B key is best, so only the best cosine is divided by it.
    a_keys, b_keys = pairwise[:, :, 0], pairwise[:, :, 1] * -inverse_norm[:, :, 1, None]
    distance = jnp.einsum("nbd,nad->nba", b_keys, a_keys, precision=jax.lax.Precision.HIGHEST)
    minimum, partner = min_and_argmin(jnp.where(is_valid[:, :, None, 1], distance, jnp.inf), axis=-2)
    cosine = jnp.where(is_valid[:, :, 0], -minimum * inverse_norm[:, :, 0], -jnp.inf)
    return Partners(cosine.reshape(-1), partner.reshape(-1))
