"""The search for partners in XLA: its meaning, on every platform."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.first_least import first_least
from pallas_kernels.soft_match.base import Partners

# A key of norm zero is like no other: its cosine is taken as zero.
LEAST_SQUARE = 1e-30


def soft_match(keys: Float[Array, "S D"], count: Int[Array, ""], chunk: int) -> Partners:
    """For every A entry the most similar B entry (odd places) of its chunk by cosine, the first of equal ones.

    Only the first `count` keys are there; what follows them does not matter, be it NaN.

    Source: Chelsea, section 5.2 (chunked soft matching).
    """
    slots, pairs = keys.shape[0], chunk // 2
    padding = -slots % chunk
    keys = jnp.pad(keys.astype(jnp.float32), ((0, padding), (0, 0)))
    one_over_norm = jax.lax.rsqrt(jnp.maximum(jnp.sum(keys * keys, axis=1), LEAST_SQUARE)).reshape(-1, pairs, 2)
    pairwise = keys.reshape(-1, pairs, 2, keys.shape[1])
    there = (jnp.arange(slots + padding) < count).reshape(-1, pairs, 2)
    # An A entry's norm changes nothing about which B entry is best, so only the best is divided by it.
    sought, offered = pairwise[:, :, 0], pairwise[:, :, 1] * -one_over_norm[:, :, 1, None]
    distance = jnp.einsum("nbd,nad->nba", offered, sought, precision=jax.lax.Precision.HIGHEST)
    least, place = first_least(jnp.where(there[:, :, None, 1], distance, jnp.inf), axis=-2)
    cosine = jnp.where(there[:, :, 0], -least * one_over_norm[:, :, 0], -jnp.inf)
    return Partners(cosine.reshape(-1), place.reshape(-1))
