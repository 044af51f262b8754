"""Exact causal attention over a whole prompt, by the library, in blocks where the library would keep all scores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.attention import Partials, merge, output


def chunk_attention(
    query: Float[Array, "B C H_q D"],
    keys: Float[Array, "B N H_kv D"],
    values: Float[Array, "B N H_kv D"],
    chunk: Int[Array, ""],
    window: int | None,
) -> Float[Array, "B C H_q D"]:
    """What chunk number `chunk` of a prompt, of C tokens, sees: itself causally and every chunk before it.

    Scores exist for one pair of chunks at a time, so memory does not grow with the prompt. `window` limits how many
    tokens, itself included, a token sees.
    """
    tokens = query.shape[1]

    def against(other: Int[Array, ""], mask) -> Partials:
        begin = other * tokens
        block_keys = jax.lax.dynamic_slice_in_dim(keys, begin, tokens, axis=1)
        block_values = jax.lax.dynamic_slice_in_dim(values, begin, tokens, axis=1)
        attended, log_sum = jax.nn.dot_product_attention(
            query, block_keys, block_values, mask=mask, return_residual=True
        )
        log_sum = log_sum.astype(jnp.float32)
        if mask is None:
            return Partials(log_sum, attended.astype(jnp.float32), jnp.ones_like(log_sum))
        # A row that sees nothing of the block must not count, whatever the library makes of it.
        seen = jnp.any(mask, axis=-1).swapaxes(1, 2)
        return Partials(
            jnp.where(seen, log_sum, -jnp.inf),
            jnp.where(seen[..., None], attended.astype(jnp.float32), 0.0),
            jnp.broadcast_to(seen, log_sum.shape).astype(jnp.float32),
        )

    def visible(other: Int[Array, ""]):
        distance = (chunk - other) * tokens + jnp.arange(tokens)[:, None] - jnp.arange(tokens)[None, :]
        mask = distance >= 0
        if window is not None:
            mask &= distance < window
        return mask[None, None]

    def past(other, partials):
        return merge(partials, against(other, None if window is None else visible(other)))

    first = 0 if window is None else jnp.maximum(chunk - (window + tokens - 2) // tokens, 0)
    own = against(chunk, visible(chunk))
    return output(jax.lax.fori_loop(first, chunk, past, own), query.dtype)
