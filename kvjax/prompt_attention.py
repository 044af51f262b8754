"""Attention that a prompt's tokens receive from queries, by which policies score them."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.policy import Policy, Prompt

QUERY_BLOCK = 64  # queries whose probabilities over the entire prompt exist at a time
QUERY_PARTS = 8  # parts of the queries; each part reads the keys that its last query sees

_MASKED_LOGIT = -1e30


def check_prompt_queries(policy: Policy, prompt: Prompt) -> Float[Array, "B w H_q D"]:
    """Returns the prompt's queries after checking that they are those that the policy needs.

    Args:
        policy: the policy.
        prompt: the prompt.

    Returns:
        The queries.

    Raises:
        ValueError: if there are none, or their shape does not fit the policy or the keys.
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
    """The probability of causal attention that each token of a prompt draws from its last w queries, summed over them
    and over the query heads of a kv head's group; float32. What comes before a row's first token is ignored."""
    queries, tokens = check_prompt_queries(policy, prompt), prompt.keys.shape[2]
    count = queries.shape[1]
    # Each part of the queries meets the keys up to those of its last one: what is left of the half that no query sees
    # is 1 / QUERY_PARTS of it.
    part = -(-count // (QUERY_PARTS * QUERY_BLOCK)) * QUERY_BLOCK
    drawn = jnp.zeros(prompt.keys.shape[:3], jnp.float32)
    for begin in range(0, count, part):
        stop = tokens - count + min(begin + part, count)
        first = prompt.lengths[:, None] - count + begin
        sees = lambda number, first=first, stop=stop: jnp.arange(stop) <= (first + number)[..., None]  # noqa: E731
        own = attention_drawn(prompt, queries[:, begin : begin + part], prompt.keys[:, :, :stop], sees)
        drawn = drawn.at[:, :, :stop].add(own)
    return drawn


def attention_drawn(
    prompt: Prompt,
    queries: Float[Array, "B w H_q D"],
    keys: Float[Array, "B H_kv T D"],
    sees: Callable[[Int[Array, "n"]], Bool[Array, "#B n #T"]],
    largest: bool = False,
) -> Float[Array, "B H_kv T"]:
    """The probability of attention that keys draw from queries, summed over these and over the query heads of a kv
    head's group, or the largest of them; float32.

    Queries are taken a block at a time, so that memory grows with T and not with its square. Each costs what attending
    costs, but for the values.

    Args:
        prompt: whose model's soft cap and sinks attention has.
        sees: which keys the queries of these numbers see, row by row. One that sees none is ignored.
    """
    batch, kv_heads, tokens, head_dim = keys.shape
    count = queries.shape[1]
    block = min(QUERY_BLOCK, count)
    blocks = -(-count // block)
    padded = jnp.pad(queries, ((0, 0), (0, blocks * block - count), (0, 0), (0, 0)))
    rows = padded.reshape(batch, blocks, block, kv_heads, -1, head_dim).transpose(1, 0, 3, 2, 4, 5)
    keys = keys.astype(jnp.promote_types(queries.dtype, keys.dtype))

    def further(drawn, item):
        first, rows = item
        number = first + jnp.arange(block)
        visible = (sees(number) & (number < count)[:, None])[:, None, :, None]
        logits = jnp.einsum("bhngd,bhtd->bhngt", rows.astype(keys.dtype), keys, preferred_element_type=jnp.float32)
        probability = probabilities(prompt, logits / math.sqrt(head_dim), visible)
        if largest:
            return jnp.maximum(drawn, jnp.max(probability, axis=(2, 3))), None
        return drawn + jnp.sum(probability, axis=(2, 3)), None

    none = jnp.zeros((batch, kv_heads, tokens), jnp.float32)
    return jax.lax.scan(further, none, (block * jnp.arange(blocks), rows))[0]


def probabilities(
    prompt: Prompt, logits: Float[Array, "B H_kv n group T"], visible: Bool[Array, "#B #H_kv #n #group #T"]
) -> Float[Array, "B H_kv n group T"]:
    """The softmax of logits with the soft cap and sinks of a prompt's model; 0 for what is not visible."""
    tokens = logits.shape[4]
    if prompt.logit_cap is not None:
        logits = prompt.logit_cap * jnp.tanh(logits / prompt.logit_cap)
    logits = jnp.where(visible, logits, _MASKED_LOGIT)
    if prompt.sink_logits is not None:
        sinks = prompt.sink_logits.astype(logits.dtype).reshape(logits.shape[1], 1, logits.shape[3], 1)
        logits = jnp.concatenate([logits, jnp.broadcast_to(sinks, (*logits.shape[:4], 1))], axis=4)
    return jnp.where(visible, jax.nn.softmax(logits, axis=-1)[..., :tokens], 0.0)
