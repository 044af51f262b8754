"""Attention that tokens were observed to draw: of a prompt's queries, and of a decoding step's."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

QUERY_BLOCK = 64  # queries whose probabilities over a whole prompt exist at a time

_EMPTY = -1e30  # stands for -inf in logits; far below any


def attention_received(
    queries: Float[Array, "B w H_q D"], keys: Float[Array, "B T H_kv D"], lengths: Int[Array, "B"]
) -> Float[Array, "B H_kv T"]:
    """The probability of causal attention that each token of a prompt draws from its last w queries, summed over them
    and over the query heads of a kv head's group; float32.

    Queries are taken a block at a time, so that memory grows with T and not with its square. Each costs what attending
    costs, but for the values.

    Args:
        queries: right-aligned, the last one is that of the row's last token; what comes before a row's first token is
            ignored.
        keys: left-aligned, `lengths[b]` of them in row b.
    """
    batch, count, query_heads, head_dim = queries.shape
    tokens, kv_heads = keys.shape[1:3]
    group = query_heads // kv_heads
    block = min(QUERY_BLOCK, count)
    blocks = -(-count // block)
    padded = jnp.pad(queries, ((0, 0), (blocks * block - count, 0), (0, 0), (0, 0)))
    rows = padded.reshape(batch, blocks, block, kv_heads, group, head_dim).transpose(1, 0, 3, 2, 4, 5)
    rows = rows.reshape(blocks, batch, kv_heads, block * group, head_dim)
    stored = keys.swapaxes(1, 2).astype(jnp.promote_types(queries.dtype, keys.dtype))

    def add(total, item):
        number, rows = item
        own = (lengths - (blocks - number) * block)[:, None] + jnp.arange(block)
        own = jnp.repeat(own, group, axis=1)[:, None, :, None]  # each row's position
        logits = jnp.einsum("bhrd,bhtd->bhrt", rows.astype(stored.dtype), stored, preferred_element_type=jnp.float32)
        logits = jnp.where(jnp.arange(tokens) <= own, logits / math.sqrt(head_dim), _EMPTY)
        probability = jnp.where(own >= 0, jax.nn.softmax(logits, axis=-1), 0.0)
        return total + jnp.sum(probability, axis=2), None

    total = jnp.zeros((batch, kv_heads, tokens), jnp.float32)
    return jax.lax.scan(add, total, (jnp.arange(blocks), rows))[0]
