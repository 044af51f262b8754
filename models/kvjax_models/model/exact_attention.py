"""Exact causal attention over a whole prompt, block by block, so that memory does not grow with the prompt's scores."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.attention import attend_segments
from kvjax.partials import merge, normalize
from kvjax.segment import Segment
from pallas_kernels.weighted_decode import Partials


def chunk_attention(
    query: Float[Array, "B C H_q D"],
    keys: Float[Array, "B H_kv N D"],
    values: Float[Array, "B H_kv N D"],
    chunk: Int[Array, ""] | int,
    sink_logits: Float[Array, "H_q"] | None = None,
    *,
    window: int | None,
    logit_cap: float | None = None,
) -> Float[Array, "B C H_q D"]:
    """What chunk number `chunk` of a prompt, of C tokens, sees: itself causally and every chunk before it.

    `window` limits how many tokens, itself included, a token sees; sinks are as for `kvjax.step`, the cap as for
    `kvjax.CacheSpec`. `jax.nn.dot_product_attention` with its residual could take the place of `attend_segments`, at
    half the speed on a CPU: it normalises every block, which merging undoes.
    """
    batch, tokens = query.shape[:2]
    # Each query's place in its chunk, and the first slot that it sees, relative to the chunk.
    place = jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
    start = None if window is None else place + 1 - window

    def against(
        other: Int[Array, ""] | int,
        stop: Int[Array, "B C"] | None = None,  # a chunk before is seen to its end, unmasked where there is no window
        sink_logits: Float[Array, "H_q"] | None = None,
    ) -> Partials:
        block_keys, block_values = (
            jax.lax.dynamic_slice_in_dim(x, other * tokens, tokens, axis=2) for x in (keys, values)
        )
        first = None if start is None else start + (chunk - other) * tokens
        block = Segment(block_keys, block_values, start=first, stop=stop)
        return attend_segments(query, (block,), logit_cap=logit_cap, sink_logits=sink_logits)

    def past(other, partials):
        return merge(partials, against(other))

    own = against(chunk, place + 1, sink_logits)
    first = 0 if window is None else jnp.maximum(chunk - (window + tokens - 2) // tokens, 0)
    return normalize(jax.lax.fori_loop(first, chunk, past, own), query.dtype)


def attend_in_chunks(
    query: Float[Array, "B T H_q D"],
    keys: Float[Array, "B H_kv N D"],
    values: Float[Array, "B H_kv N D"],
    first: Int[Array, ""] | int,
    sink_logits: Float[Array, "H_q"] | None = None,
    *,
    chunk: int,
    window: int | None,
    logit_cap: float | None = None,
) -> Float[Array, "B T H_q D"]:
    """`chunk_attention` of consecutive chunks of so many tokens, one by one, the first of which has that number."""
    settings: Mapping[str, Any] = {"window": window, "logit_cap": logit_cap}
    if query.shape[1] == chunk:
        return chunk_attention(query, keys, values, first, sink_logits, **settings)
    chunks = query.reshape(query.shape[0], -1, chunk, *query.shape[2:]).swapaxes(0, 1)
    attended = jax.lax.map(
        lambda given: chunk_attention(given[0], keys, values, first + given[1], sink_logits, **settings),
        (chunks, jnp.arange(len(chunks))),
    )
    return attended.swapaxes(0, 1).reshape(query.shape)


def attend_repetitions(
    query: Float[Array, "B T H_q D"],
    keys: Float[Array, "B H_kv N D"],
    values: Float[Array, "B H_kv N D"],
    own_keys: Float[Array, "B H_kv CR D"],
    own_values: Float[Array, "B H_kv CR D"],
    lengths: Int[Array, "B"],
    block: Int[Array, ""],
    sink_logits: Float[Array, "H_q"] | None = None,
    *,
    width: int,
    window: int | None,
    logit_cap: float | None = None,
) -> Float[Array, "B T H_q D"]:
    """What block number `block`, of T tokens, of several texts of `width` sees, each of which stands alone behind a
    prompt of so many tokens: the prompt, and its own text causally."""
    batch, tokens = query.shape[:2]
    text, first = (block * tokens) // width, (block * tokens) % width
    own_keys, own_values = (
        jax.lax.dynamic_slice_in_dim(x, text * width, width, axis=2) for x in (own_keys, own_values)
    )
    place = jnp.broadcast_to(first + jnp.arange(tokens), (batch, tokens))
    start = own_start = None
    if window is not None:
        start, own_start = lengths[:, None] + place + 1 - window, place + 1 - window
    prompt = Segment(keys, values, start=start, stop=lengths[:, None])
    own = Segment(own_keys, own_values, start=own_start, stop=place + 1)
    partials = attend_segments(query, (prompt, own), logit_cap=logit_cap, sink_logits=sink_logits)
    return normalize(partials, query.dtype)
