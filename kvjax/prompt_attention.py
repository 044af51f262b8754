"""Attention that a prompt's tokens draw from its last queries: what prompts are scored by."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policy import ALL_QUERIES, Policy, Prompt

QUERY_BLOCK = 64  # queries whose probabilities over a whole prompt exist at a time

_EMPTY = -1e30  # stands for -inf in logits; far below any


def asked_queries(policy: Policy, prompt: Prompt) -> Float[Array, "B w H_q D"]:
    """The prompt's queries that the policy's prefill was given, checked.

    Raises:
        ValueError: where there are none, or not as many as `prompt_queries` asks for, or their shape does not fit the
            keys.
    """
    name, queries, wanted = type(policy).__name__, prompt.queries, policy.prompt_queries
    batch, kv_heads, tokens, head_dim = prompt.keys.shape
    count = tokens if wanted == ALL_QUERIES else min(wanted, tokens)
    if queries is None:
        raise ValueError(f"queries=None; {name} needs the queries of the prompt's last {count} tokens")
    fits = queries.ndim == 4 and queries.shape[2] % kv_heads == 0
    if not fits or (queries.shape[0], queries.shape[1], queries.shape[3]) != (batch, count, head_dim):
        raise ValueError(
            f"queries have shape {queries.shape}; {name} needs [B, w, H_q, D] with B, w, D = "
            f"{(batch, count, head_dim)} and H_q a multiple of {kv_heads}"
        )
    return queries


def attention_received(policy: Policy, prompt: Prompt) -> Float[Array, "B H_kv T"]:
    """The probability of causal attention that each token of a prompt draws from its last w queries, summed over them
    and over the query heads of a kv head's group; float32.

    Queries are taken a block at a time, so that memory grows with T and not with its square. Each costs what attending
    costs, but for the values. What comes before a row's first token is ignored.
    """
    queries = asked_queries(policy, prompt)
    batch, count, query_heads, head_dim = queries.shape
    kv_heads, tokens = prompt.keys.shape[1:3]
    group = query_heads // kv_heads
    block = min(QUERY_BLOCK, count)
    blocks = -(-count // block)
    padded = jnp.pad(queries, ((0, 0), (blocks * block - count, 0), (0, 0), (0, 0)))
    rows = padded.reshape(batch, blocks, block, kv_heads, group, head_dim).transpose(1, 0, 3, 2, 4, 5)
    rows = rows.reshape(blocks, batch, kv_heads, block * group, head_dim)
    stored = prompt.keys.astype(jnp.promote_types(queries.dtype, prompt.keys.dtype))
    sinks = None
    if prompt.sink_logits is not None:
        sinks = jnp.tile(prompt.sink_logits.astype(jnp.float32).reshape(kv_heads, group), (1, block))[..., None]

    def add(total, item):
        number, rows = item
        position = (prompt.lengths - (blocks - number) * block)[:, None] + jnp.arange(block)
        position = jnp.repeat(position, group, axis=1)[:, None, :, None]  # each row's
        logits = jnp.einsum("bhrd,bhtd->bhrt", rows.astype(stored.dtype), stored, preferred_element_type=jnp.float32)
        logits = logits / math.sqrt(head_dim)
        if prompt.logit_cap is not None:
            logits = prompt.logit_cap * jnp.tanh(logits / prompt.logit_cap)
        logits = jnp.where(jnp.arange(tokens) <= position, logits, _EMPTY)
        if sinks is not None:
            logits = jnp.concatenate([logits, jnp.broadcast_to(sinks, (*logits.shape[:3], 1))], axis=3)
        probability = jnp.where(position >= 0, jax.nn.softmax(logits, axis=-1), 0.0)
        return total + jnp.sum(probability[..., :tokens], axis=2), None

    total = jnp.zeros((batch, kv_heads, tokens), jnp.float32)
    return jax.lax.scan(add, total, (jnp.arange(blocks), rows))[0]
