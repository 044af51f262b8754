"""Attention that the tokens of a prompt receive from queries; policies use it as a score."""

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.policy import Policy, Prompt

QUERY_BLOCK = 64  # queries whose probabilities over the entire prompt exist at a time
QUERY_PARTS = 8  # parts of the queries; each part reads the keys that its last query sees, not all keys

_MASKED_LOGIT = -1e30


def check_prompt_queries(policy: Policy, prompt: Prompt) -> Float[Array, "B w H_q D"]:
    """Checks the prompt's queries against the needs of a policy, and returns them.

    Returns:
        The queries.

    Raises:
        ValueError: if queries are missing, or their shape does not fit the policy or the keys.
    """
    name, queries = type(policy).__name__, prompt.queries
    batch, kv_heads, tokens, head_dim = prompt.keys.shape
    count = policy.requires.num_prompt_queries(tokens)
    if queries is None:
        raise ValueError(
            f"queries=None, but {name} needs the queries of the prompt's last {count} tokens; pass "
            "kvjax.prompt_queries(cache.policy, queries)"
        )
    fits = queries.ndim == 4 and queries.shape[2] % kv_heads == 0
    if not fits or (queries.shape[0], queries.shape[1], queries.shape[3]) != (batch, count, head_dim):
        raise ValueError(
            f"queries have shape {queries.shape}, but {name} needs [B, w, H_q, D] with B, w, D = "
            f"{(batch, count, head_dim)} and H_q a multiple of {kv_heads}; pass kvjax.prompt_queries(cache.policy, "
            "queries)"
        )
    return queries


def attention_received(policy: Policy, prompt: Prompt) -> Float[Array, "B H_kv T"]:
    """Returns the causal attention that each token receives from the queries that a policy needs.

    Returns:
        Attention probabilities, summed over the queries and over the query heads of a group, float32. Queries before
        a row's first token are ignored.

    Raises:
        ValueError: if `check_prompt_queries` refuses the queries.
    """
    queries, tokens = check_prompt_queries(policy, prompt), prompt.keys.shape[2]
    count = queries.shape[1]
    part = -(-count // (QUERY_PARTS * QUERY_BLOCK)) * QUERY_BLOCK
    received = jnp.zeros(prompt.keys.shape[:3], jnp.float32)

    def visible(first: Int[Array, "B 1"], stop: int, index: Int[Array, "n"]) -> Bool[Array, "B n t"]:
        return jnp.arange(stop) <= (first + index)[..., None]

    for begin in range(0, count, part):
        stop = tokens - count + min(begin + part, count)
        is_visible = functools.partial(visible, prompt.lengths[:, None] - count + begin, stop)
        attention = key_attention(prompt, queries[:, begin : begin + part], prompt.keys[:, :, :stop], is_visible)
        received = received.at[:, :, :stop].add(attention)
    return received


def key_attention(
    prompt: Prompt,
    queries: Float[Array, "B w H_q D"],
    keys: Float[Array, "B H_kv T D"],
    is_visible: Callable[[Int[Array, "n"]], Bool[Array, "#B n #T"]],
    *,
    reduce: Literal["sum", "max"] = "sum",
    query_weights: Float[Array, "B w"] | None = None,
    key_weights: Float[Array, "B H_q T"] | None = None,
) -> Float[Array, "B H_kv T"]:
    """Returns the attention probability that each key receives from the queries of its group.

    Queries are processed in blocks, so that memory is linear in T. A query costs as much as attention without values.

    Args:
        prompt: has the logit cap and the attention sink logits of the model.
        is_visible: maps indices of queries to the keys that they see. A query without visible keys is ignored.
        reduce: whether probabilities are summed over queries and query heads, or the largest is returned.
        query_weights: factors of each query's probabilities; 1 by default.
        key_weights: factors of each key's probabilities for each query head; 1 by default.

    Returns:
        Sums or maxima, float32.
    """
    batch, kv_heads, tokens, head_dim = keys.shape
    count = queries.shape[1]
    block = min(QUERY_BLOCK, count)
    blocks = -(-count // block)
    padded = jnp.pad(queries, ((0, 0), (0, blocks * block - count), (0, 0), (0, 0)))
    rows = padded.reshape(batch, blocks, block, kv_heads, -1, head_dim).transpose(1, 0, 3, 2, 4, 5)
    if query_weights is None:
        query_weights = jnp.ones((batch, count), jnp.float32)
    row_weights = jnp.pad(query_weights, ((0, 0), (0, blocks * block - count))).reshape(batch, blocks, block)
    if key_weights is not None:
        key_weights = key_weights.reshape(batch, kv_heads, 1, -1, tokens)
    keys = keys.astype(jnp.promote_types(queries.dtype, keys.dtype))

    def add_block(
        received: Float[Array, "B H_kv T"], item: tuple[Int[Array, ""], Array, Array]
    ) -> tuple[Float[Array, "B H_kv T"], None]:
        """Adds one block of queries, `item` = (first index, queries, weights), to the sum or maximum `received`."""
        first, rows, weights = item
        index = first + jnp.arange(block)
        visible = (is_visible(index) & (index < count)[:, None])[:, None, :, None]
        logits = jnp.einsum("bhngd,bhtd->bhngt", rows.astype(keys.dtype), keys, preferred_element_type=jnp.float32)
        probability = masked_softmax(prompt, logits / math.sqrt(head_dim), visible) * weights[:, None, :, None, None]
        if key_weights is not None:
            probability = probability * key_weights
        if reduce == "max":
            return jnp.maximum(received, jnp.max(probability, axis=(2, 3))), None
        return received + jnp.sum(probability, axis=(2, 3)), None

    start = jnp.zeros((batch, kv_heads, tokens), jnp.float32)
    return jax.lax.scan(add_block, start, (block * jnp.arange(blocks), rows, row_weights.swapaxes(0, 1)))[0]


def masked_softmax(
    prompt: Prompt, logits: Float[Array, "B H_kv n group T"], visible: Bool[Array, "#B #H_kv #n #group #T"]
) -> Float[Array, "B H_kv n group T"]:
    """Computes the softmax of logits with the logit cap and the attention sink logits of a prompt's model.

    Args:
        visible: keys that count.

    Returns:
        Probabilities; 0 for keys that are not visible.
    """
    tokens = logits.shape[4]
    if prompt.logit_cap is not None:
        logits = prompt.logit_cap * jnp.tanh(logits / prompt.logit_cap)
    logits = jnp.where(visible, logits, _MASKED_LOGIT)
    if prompt.sink_logits is not None:
        sinks = prompt.sink_logits.astype(logits.dtype).reshape(logits.shape[1], 1, logits.shape[3], 1)
        logits = jnp.concatenate([logits, jnp.broadcast_to(sinks, (*logits.shape[:4], 1))], axis=4)
    return jnp.where(visible, jax.nn.softmax(logits, axis=-1)[..., :tokens], 0.0)
