"""The definition of `soft_match`: the most similar B key of every A key of a chunk, in float32."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_array import widened

# Keys of norm zero have cosine zero with every key.
MIN_SQUARED_NORM = 1e-30


class Partners(NamedTuple):
    """The most similar B key of every A key; A = ceil(S / chunk_size) * chunk_size / 2.

    Attributes:
        cosine: The cosine of the pair, float32; -inf if the A key or all B keys of the chunk are missing.
        partner: The partner's index among the chunk's B keys, int32; arbitrary if `cosine` is -inf.
    """

    cosine: Float[Array, "A"]
    partner: Int[Array, "A"]


def soft_match(keys: Float[Array, "S D"], num_keys: Int[Array, ""], *, chunk_size: int) -> Partners:
    """Computes `soft_match`, with the cosines of all pairs in memory."""
    is_valid = jnp.arange(len(keys)) < num_keys
    keys = jnp.where(is_valid[:, None], widened(keys), 0.0)
    keys /= jnp.sqrt(jnp.maximum(jnp.sum(keys**2, axis=1, keepdims=True), MIN_SQUARED_NORM))
    padding = -len(keys) % chunk_size
    chunks = jnp.pad(keys, ((0, padding), (0, 0))).reshape(-1, chunk_size, keys.shape[1])
    is_valid = jnp.pad(is_valid, (0, padding)).reshape(-1, chunk_size)
    cosine = jnp.einsum("nad,nbd->nab", chunks[:, ::2], chunks[:, 1::2], precision="highest")
    cosine = jnp.where(is_valid[:, ::2, None] & is_valid[:, None, 1::2], cosine, -jnp.inf)
    return Partners(jnp.max(cosine, axis=2).reshape(-1), jnp.argmax(cosine, axis=2).reshape(-1))
