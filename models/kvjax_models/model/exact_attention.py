"""Exact causal attention over prompts in blocks, so that memory does not grow with the square of the length."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention import attend_segments
from kvjax.distributed.collectives import max_over_sequence
from kvjax.partials import by_token, group_queries, merge, normalize
from kvjax.policy import Prompt, Repetition
from kvjax.prompt_attention import masked_softmax
from kvjax.segment import Segment
from pallas_kernels.weighted_decode import Entries, Partials, weighted_decode

_PROMPT_BLOCK, _TEXT_BLOCK = 2048, 256  # keys that a block of a repetition's queries attends to at a time


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
        chunk: index of the chunk; all chunks have C tokens.
        window: maximum number of visible tokens including the token itself; None: all.

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
        first: index of the first chunk.
        chunk: tokens per chunk.

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


class PromptAndTexts(NamedTuple):
    """Keys and values of prompts, and of texts that each follow a prompt independently.

    Attributes:
        keys: keys of the prompts.
        values: values of the prompts.
        text_keys: keys of all texts, which are padded to R tokens each.
        text_values: values of all texts.
        lengths: lengths of the prompts.
        sizes: lengths of the texts.
    """

    keys: Float[Array, "B H_kv N D"]
    values: Float[Array, "B H_kv N D"]
    text_keys: Float[Array, "B H_kv CR D"]
    text_values: Float[Array, "B H_kv CR D"]
    lengths: Int[Array, "B"]
    sizes: Int[Array, "B C"]


def attend_repetitions(
    query: Float[Array, "B nT H_q D"],
    entries: PromptAndTexts,
    blocks: Int[Array, "n"],
    sink_logits: Float[Array, "H_q"] | None = None,
    *,
    repeat: Repetition | None,
    window: int | None,
    logit_cap: float | None = None,
) -> tuple[Float[Array, "B nT H_q D"], Float[Array, "B H_kv N"] | None]:
    """Computes attention of texts that repeat a prompt: to the prompt, and causally to the text itself.

    Args:
        query: queries in blocks of T tokens, each within one text.
        entries: keys and values.
        blocks: index of each block among the blocks of all texts.
        repeat: the chunks that the texts repeat; None if the attention that they receive is not needed.

    Returns:
        The attention output, zero for blocks after the end of a text, and `RepeatedPrompt.received` or None.
    """
    (batch, num_texts), tokens = entries.sizes.shape, query.shape[1] // len(blocks)
    width = entries.text_keys.shape[2] // num_texts
    options: Mapping[str, Any] = {"repeat": repeat, "window": window, "logit_cap": logit_cap}
    attend = functools.partial(_attend_block, entries, sink_logits, **options)

    def skip(received, block_query, first):
        return received, jnp.zeros((*block_query.shape[:3], entries.values.shape[3]), query.dtype)

    def step(received, item):
        """Processes one block of queries, `item` = (queries, index)."""
        first = item[1] * tokens
        has_tokens = jnp.any(first % width < entries.sizes[:, first // width])
        return jax.lax.cond(has_tokens, attend, skip, received, item[0], first)

    received = None if repeat is None else jnp.zeros(entries.keys.shape[:3], jnp.float32)
    block_queries = query.reshape(batch, -1, tokens, *query.shape[2:]).swapaxes(0, 1)
    received, attended = jax.lax.scan(step, received, (block_queries, blocks))
    attended = attended.swapaxes(0, 1).reshape(*query.shape[:3], -1)
    return attended, None if received is None else max_over_sequence(received)


def attend_texts(
    query: Float[Array, "B CR H_q D"],
    entries: PromptAndTexts,
    sink_logits: Float[Array, "H_q"] | None = None,
    *,
    block: int,
    window: int | None,
    logit_cap: float | None = None,
) -> Float[Array, "B CR H_q D"]:
    """Computes the attention of `attend_repetitions` so that it can be differentiated.

    Args:
        query: queries of all texts.
        entries: keys and values.
        block: queries whose probabilities exist at a time; texts consist of entire blocks.

    Returns:
        The attention output.
    """
    keys, values, text_keys, text_values, lengths, sizes = entries
    prompt = Prompt(keys, values, lengths, sink_logits=sink_logits, logit_cap=logit_cap)
    (batch, count, heads, head_dim), (kv_heads, tokens) = query.shape, keys.shape[1:3]
    width = count // sizes.shape[1]

    @jax.checkpoint
    def attend(query: Float[Array, "B block H_q D"], first: Int[Array, ""]) -> Float[Array, "B block H_q D"]:
        """Attends with the queries from slot `first` of the texts on."""
        begin = first - first % width
        own_keys, own_values = (jax.lax.dynamic_slice_in_dim(x, begin, width, 2) for x in (text_keys, text_values))
        position = lengths[:, None] + first - begin + jnp.arange(block)
        key_position = [jnp.broadcast_to(jnp.arange(tokens), (batch, tokens)), lengths[:, None] + jnp.arange(width)]
        distance = position[:, :, None] - jnp.concatenate(key_position, axis=1)[:, None]
        is_text = jnp.arange(tokens + width) >= tokens
        visible = (distance >= 0) & (is_text | (jnp.arange(tokens + width) < lengths[:, None])[:, None])
        if window is not None:
            visible &= distance < window
        all_keys, all_values = (
            jnp.concatenate(pair, axis=2) for pair in ((keys, own_keys.astype(keys.dtype)), (values, own_values))
        )
        rows = query.reshape(batch, block, kv_heads, -1, head_dim)
        logits = jnp.einsum("bnhgd,bhtd->bhngt", rows, all_keys, preferred_element_type=jnp.float32)
        probability = masked_softmax(prompt, logits / head_dim**0.5, visible[:, None, :, None])
        attended = jnp.einsum("bhngt,bhtd->bnhgd", probability.astype(values.dtype), all_values)
        return attended.reshape(batch, block, heads, -1)

    blocks = query.reshape(batch, -1, block, heads, head_dim).swapaxes(0, 1)
    attended = jax.lax.map(lambda item: attend(*item), (blocks, block * jnp.arange(len(blocks))))
    return attended.swapaxes(0, 1).reshape(batch, count, heads, -1)


def _attend_block(
    entries: PromptAndTexts,
    sink_logits: Float[Array, "H_q"] | None,
    received: Float[Array, "B H_kv N"] | None,
    query: Float[Array, "B T H_q D"],
    first: Int[Array, ""],
    *,
    repeat: Repetition | None,
    window: int | None,
    logit_cap: float | None,
) -> tuple[Float[Array, "B H_kv N"] | None, Float[Array, "B T H_q D"]]:
    """Attends with a block of queries, which starts at slot `first` of the texts.

    Returns:
        The attention that the prompt has received so far, and the attention output.
    """
    keys, values, text_keys, text_values, lengths, sizes = entries
    width, tokens = text_keys.shape[2] // sizes.shape[1], keys.shape[2]
    text = 0 if sizes.shape[1] == 1 else first // width
    begin, slot = text * width, jnp.broadcast_to(first + jnp.arange(query.shape[1]), query.shape[:2])
    start = None if window is None else slot + 1 - window
    texts = _Slots(text_keys, text_values, start, slot + 1)
    prompt = _Slots(keys, values, None if start is None else start + lengths[:, None] - begin, lengths[:, None])
    attend = functools.partial(attend_segments, query, logit_cap=logit_cap)
    add = functools.partial(_add_slots, attend)

    last = first - (first - begin) % _TEXT_BLOCK
    own, _ = texts.take(last, last + _TEXT_BLOCK, _TEXT_BLOCK)
    partials = attend((own.segment(),), sink_logits=sink_logits)
    partials = add(partials, texts, begin, last, _TEXT_BLOCK)
    if repeat is None or received is None:
        return received, normalize(add(partials, prompt, 0, tokens, _PROMPT_BLOCK), query.dtype)

    chunk, stop = text * repeat.chunk_tokens, (text + 1) * repeat.chunk_tokens
    slots, chunk_start = prompt.take(chunk, stop, repeat.chunk_tokens)
    chunk_partials, logits = _attend_with_logits(query, slots.segment(), logit_cap)
    subset = partials = merge(partials, chunk_partials)  # scores are normalized over the subset
    if sizes.shape[1] > 1:
        if repeat.sinks:
            sinks, _ = prompt.take(0, jnp.minimum(chunk, repeat.sinks), repeat.sinks)
            subset = merge(partials, attend((sinks.segment(),)))
        partials = add(partials, prompt, 0, chunk, _PROMPT_BLOCK)
        partials = add(partials, prompt, stop, tokens, _PROMPT_BLOCK)
    score = _largest_probability(logits, subset, slot - begin < sizes[:, text, None])
    score = jnp.maximum(score, jax.lax.dynamic_slice_in_dim(received, chunk_start, score.shape[2], axis=2))
    received = jax.lax.dynamic_update_slice_in_dim(received, score, chunk_start, axis=2)
    return received, normalize(partials, query.dtype)


class _Slots(NamedTuple):
    """Keys and values of which each query sees slots [start, stop)."""

    keys: Float[Array, "B H_kv S D"]
    values: Float[Array, "B H_kv S D"]
    start: Int[Array, "B #T"] | None  # None for 0
    stop: Int[Array, "B #T"]

    def segment(self, masked: bool = True) -> Segment:
        """Returns the segment that attention reads; all slots are visible if it is not `masked`."""
        return Segment(self.keys, self.values, start=self.start, stop=self.stop) if masked else Segment(*self[:2])

    def take(
        self, first: Int[Array, ""] | int, stop: Int[Array, ""] | int, size: int
    ) -> tuple["_Slots", Int[Array, ""] | int]:
        """Returns `size` slots that include [first, stop), with the others hidden, and the index of the first one."""
        size = min(size, self.keys.shape[2])
        offset = 0 if isinstance(first, int) and first == 0 else jnp.minimum(first, self.keys.shape[2] - size)
        keys, values = (jax.lax.dynamic_slice_in_dim(x, offset, size, axis=2) for x in (self.keys, self.values))
        start = self.start
        if not isinstance(offset, int):
            start = jnp.maximum(jnp.zeros_like(self.stop[:, :1]) if start is None else start, first) - offset
        return _Slots(keys, values, start, jnp.minimum(self.stop, stop) - offset), offset


def _add_slots(
    attend: Callable[[tuple[Segment, ...]], Partials],
    partials: Partials,
    slots: _Slots,
    first: Int[Array, ""] | int,
    stop: Int[Array, ""] | int,
    size: int,
) -> Partials:
    """Adds slots [first, stop) to a partial softmax, `size` slots at a time; skips slots that no query sees."""
    stop = jnp.minimum(stop, jnp.max(slots.stop))
    unmasked: Int[Array, ""] | int = 0  # blocks that all queries see; masks cost a fifth of the time on a CPU

    def add(number, partials, masked=True):
        """Adds a block of slots."""
        block, _ = slots.take(first + number * size, stop, size)
        return merge(partials, attend((block.segment(masked),)))

    if slots.start is None:
        unmasked = jnp.maximum(jnp.minimum(stop, jnp.min(slots.stop)) - first, 0) // size
        partials = jax.lax.fori_loop(0, unmasked, functools.partial(add, masked=False), partials)
    else:
        first = jnp.maximum(first, jnp.min(slots.start))
    return jax.lax.fori_loop(unmasked, jnp.maximum(-((first - stop) // size), unmasked), add, partials)


def _attend_with_logits(
    query: Float[Array, "B T H_q D"], segment: Segment, logit_cap: float | None
) -> tuple[Partials, Float[Array, "B H_kv R S"]]:
    """Returns the partial softmax of a segment, and its logits for the R = T * G queries of each KV head."""
    entries = Entries(segment.keys, segment.values, start=segment.start, stop=segment.stop, logit_cap=logit_cap)
    partials = weighted_decode(group_queries(query, segment.keys.shape[1]), entries, logits=True)
    assert partials.logits is not None
    return by_token(partials._replace(logits=None), query.shape[1]), partials.logits


def _largest_probability(
    logits: Float[Array, "B H_kv R S"], partials: Partials, present: Bool[Array, "B T"]
) -> Float[Array, "B H_kv S"]:
    """Returns the largest attention probability of each slot among the queries that are present."""
    log_sum = jnp.where(present[..., None], jnp.log(partials.denominator), jnp.inf)
    peak, log_sum = (group_queries(x[..., None], logits.shape[1]) for x in (partials.max, log_sum))
    return jnp.exp(jnp.max(logits - peak - log_sum, axis=2))  # in this order, since logits may be large
