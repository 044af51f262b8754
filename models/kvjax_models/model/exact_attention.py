"""Exact causal attention over prompts in blocks, so that memory does not grow with the square of the length."""

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
    """Computes attention of one chunk of a prompt to itself and to all chunks before it.

    `jax.nn.dot_product_attention` with its residual could replace `attend_segments`, but takes twice the time on a CPU:
    it normalizes every block, which merging has to undo.

    Args:
        query: queries of the chunk.
        keys: keys of the prompt.
        values: values of the prompt.
        chunk: index of the chunk; all chunks have C tokens.
        sink_logits: attention sink logits.
        window: maximum number of visible tokens including the token itself; None: all.
        logit_cap: cap of the logits.

    Returns:
        The attention output.
    """
    batch, tokens = query.shape[:2]
    position = jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))  # in the chunk
    window_start = None if window is None else position + 1 - window

    def attend_to_chunk(
        other: Int[Array, ""] | int,
        stop: Int[Array, "B C"] | None = None,  # None: visible to its end
        sink_logits: Float[Array, "H_q"] | None = None,
    ) -> Partials:
        """Attends to chunk `other`, up to position `stop` of each query in it."""
        block_keys, block_values = (
            jax.lax.dynamic_slice_in_dim(x, other * tokens, tokens, axis=2) for x in (keys, values)
        )
        start = None if window_start is None else window_start + (chunk - other) * tokens
        block = Segment(block_keys, block_values, start=start, stop=stop)
        return attend_segments(query, (block,), logit_cap=logit_cap, sink_logits=sink_logits)

    def merge_chunk(other, partials):
        return merge(partials, attend_to_chunk(other))

    partials = attend_to_chunk(chunk, position + 1, sink_logits)
    first = 0 if window is None else jnp.maximum(chunk - (window + tokens - 2) // tokens, 0)
    return normalize(jax.lax.fori_loop(first, chunk, merge_chunk, partials), query.dtype)


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
    """Computes attention of consecutive chunks of a prompt, one by one.

    Args:
        query: queries of the chunks.
        keys: keys of the prompt.
        values: values of the prompt.
        first: index of the first chunk.
        sink_logits: attention sink logits.
        chunk: tokens per chunk.
        window: as for `chunk_attention`.
        logit_cap: as for `chunk_attention`.

    Returns:
        The attention output.
    """
    options: Mapping[str, Any] = {"window": window, "logit_cap": logit_cap}
    if query.shape[1] == chunk:
        return chunk_attention(query, keys, values, first, sink_logits, **options)

    def attend(query_and_index):
        """Attends with one chunk of queries; `query_and_index` also holds the index of the chunk."""
        chunk_query, index = query_and_index
        return chunk_attention(chunk_query, keys, values, first + index, sink_logits, **options)

    chunks = query.reshape(query.shape[0], -1, chunk, *query.shape[2:]).swapaxes(0, 1)
    return jax.lax.map(attend, (chunks, jnp.arange(len(chunks)))).swapaxes(0, 1).reshape(query.shape)


def attend_repetitions(
    query: Float[Array, "B T H_q D"],
    keys: Float[Array, "B H_kv N D"],
    values: Float[Array, "B H_kv N D"],
    text_keys: Float[Array, "B H_kv CR D"],
    text_values: Float[Array, "B H_kv CR D"],
    lengths: Int[Array, "B"],
    block: Int[Array, ""],
    sink_logits: Float[Array, "H_q"] | None = None,
    *,
    width: int,
    window: int | None,
    logit_cap: float | None = None,
) -> Float[Array, "B T H_q D"]:
    """Computes attention of texts that each follow the same prompt independently: to the prompt and causally to itself.

    Args:
        query: queries of a block of T tokens within one text.
        keys: keys of the prompt.
        values: values of the prompt.
        text_keys: keys of all texts.
        text_values: values of all texts.
        lengths: lengths of the prompts.
        block: index of the block among the blocks of all texts.
        sink_logits: attention sink logits.
        width: padded length of each text.
        window: as for `chunk_attention`.
        logit_cap: as for `chunk_attention`.

    Returns:
        The attention output.
    """
    batch, tokens = query.shape[:2]
    text, first = (block * tokens) // width, (block * tokens) % width
    text_keys, text_values = (
        jax.lax.dynamic_slice_in_dim(x, text * width, width, axis=2) for x in (text_keys, text_values)
    )
    position = jnp.broadcast_to(first + jnp.arange(tokens), (batch, tokens))  # in the text
    prompt_start = text_start = None
    if window is not None:
        prompt_start, text_start = lengths[:, None] + position + 1 - window, position + 1 - window
    segments = (
        Segment(keys, values, start=prompt_start, stop=lengths[:, None]),
        Segment(text_keys, text_values, start=text_start, stop=position + 1),
    )
    return normalize(attend_segments(query, segments, logit_cap=logit_cap, sink_logits=sink_logits), query.dtype)
