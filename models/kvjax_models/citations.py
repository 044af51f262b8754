"""Citations: the parts of a document's text that the model attended to while it answered.

1. A few KV heads retrieve from the context (`profile`). `auto` keeps every token in them, so that a slot of their cache
   is a position in the text.
2. The question and its answer are processed once more after the document. For every retrieving head and token of the
   text, the largest attention probability counts among the queries from which the answer's tokens were predicted.
3. The text is divided into sentences, and long ones into parts of at most `MAX_CHARACTERS`.
4. The weight of a part is the sum over its tokens, a mean over the heads, relative to the sum of all parts. The first
   tokens of a sequence, which get attention whatever the question is, have no weight.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax.policy import Policy
from kvjax_models.formats.tokenizer import Streamer, Tokenizer
from kvjax_models.model.llama import DecoderLayer
from kvjax_models.model.rotary import Rotary, rotation
from kvjax_models.prefix import Prefix
from kvjax_models.profile import MAX_FULL_SHARE, MIN_HEADS, SKIPPED_TOKENS, Profile
from kvjax_models.runner.decode import Group, step_layer, step_layers
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.state import check_faults, commit_to_device, compact_layers

SEPARATOR = "\n\n"  # between the contents of messages in the text of a document
MAX_CITATIONS = 3
MAX_CHARACTERS = 200
# A sentence ends with a mark and a space, or with an empty line.
_SENTENCE = re.compile(r"\S.*?(?:[.!?][\"')\]]*(?=\s)|[。！？]|(?=\n\s*\n)|\Z)", re.DOTALL)
_PART = re.compile(rf"\S(?:.{{0,{MAX_CHARACTERS - 2}}}\S)?(?=\s|\Z)|\S{{1,{MAX_CHARACTERS}}}", re.DOTALL)


class Citation(NamedTuple):
    """A part of a document's text that an answer is based on.

    Attributes:
        start: index of its first character in `Document.text`.
        end: index after its last character.
        text: the part, `Document.text[start:end]`.
        weight: its share of the retrieving heads' attention to the text.
    """

    start: int
    end: int
    text: str
    weight: float


def find_citations(
    text: str, spans: Int[np.ndarray, "T 2"], attention: Float[np.ndarray, "H T"]
) -> tuple[Citation, ...]:
    """Returns up to `MAX_CITATIONS` parts of a text with the largest weights, largest first.

    Args:
        spans: start and end of the characters of every token; equal for tokens that are not part of the text.
        attention: attention of every head to every token; see `attention_to_text`.
    """
    bounds = np.array([*text_parts(text)], np.int64).reshape(-1, 2)
    starts, ends = spans.T
    # A token belongs to the part with its last character: it may begin with the space before it.
    part = np.searchsorted(bounds[:, 0], ends - 1, side="right") - 1
    is_inside = (ends > starts) & (part >= 0)
    is_inside[:SKIPPED_TOKENS] = False  # attention sinks
    weights = np.bincount(part[is_inside], attention.mean(axis=0)[is_inside], minlength=len(bounds))
    best = np.argsort(-weights, kind="stable")[:MAX_CITATIONS]
    return tuple(
        Citation(int(start), int(end), text[start:end], float(weight / weights.sum()))
        for (start, end), weight in zip(bounds[best], weights[best], strict=True)
        if weight > 0
    )


def token_pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Returns the text of every token, special ones included; a character of several tokens belongs to the last one."""
    streamer = Streamer(tokenizer, skip_special_tokens=False)
    pieces = [streamer.push(token) for token in tokens]
    return [*pieces[:-1], pieces[-1] + streamer.flush()]


def token_spans(
    tokenizer: Tokenizer, tokens: Sequence[int], rendered: str, contents: Sequence[str]
) -> Int[np.ndarray, "T 2"] | None:
    """Finds the characters of tokens in the contents of a conversation, joined by `SEPARATOR`.

    Args:
        tokens: token ids of the conversation.
        rendered: the conversation in the chat template, in which special tokens may have marks; see `Tokenizer.escape`.
        contents: contents of its messages, without marks.

    Returns:
        Start and end of every token; both are 0 for tokens of the template. None if the tokenizer
        encodes the conversation differently.
    """
    encoded, encoded_spans, rendered = tokenizer.encode_spans(rendered)
    num_before = len(tokens) - len(encoded)  # BOS
    if [*tokens[num_before:]] != encoded:
        return None
    spans = np.zeros((len(tokens), 2), np.int64)
    rows, places = spans[num_before:], np.array(encoded_spans, np.int64).reshape(-1, 2)
    end, end_of_content = len(rendered), sum(map(len, contents)) + len(SEPARATOR) * (len(contents) - 1)
    for content in reversed(contents):  # the last one ends the conversation, so that it is found there
        written = content if content in rendered[:end] else content.strip()  # as many templates write it
        start = rendered.rfind(written, 0, end)
        if written and start >= 0:
            clipped = np.clip(places, start, start + len(written))
            is_inside = clipped[:, 1] > clipped[:, 0]
            rows[is_inside] = clipped[is_inside] + end_of_content - len(content) + content.index(written) - start
            end = start
        end_of_content -= len(content) + len(SEPARATOR)
    return spans


def text_parts(text: str) -> Iterator[tuple[int, int]]:
    """Yields start and end of the sentences of a text, and of parts of sentences with too many characters."""
    for sentence in _SENTENCE.finditer(text):
        for part in _PART.finditer(sentence[0]):
            yield sentence.start() + part.start(), sentence.start() + part.end()


def cited_heads(prefix: Prefix, profile: Profile | None) -> list[tuple[int, int]]:
    """Returns (layer, KV head) of the retrieving heads that keep every token.

    Args:
        profile: profile of the model; without one, all heads that keep every token are returned.

    Raises:
        ValueError: if no head is left, or the prefix is on a mesh.
    """
    if prefix.generator.mesh is not None:
        raise ValueError("cite=True needs a document on a single device; load the model without a mesh")
    full = [(layer, head) for layer, heads in enumerate(full_heads(prefix)) for head in heads]
    if profile is not None:
        ranked = profile.ranked_heads()
        full = [head for head in ranked[: max(int(MAX_FULL_SHARE * len(ranked)), 1)] if head in full]
    if not full:
        raise ValueError(
            "cite=True needs retrieving heads that keep every token of the text, and this cache has none; read the "
            f'text with the policy "exact", or, if the model has at least {MIN_HEADS} KV heads without a sliding '
            'window, with "auto" or heads="auto"'
        )
    return full


def full_heads(prefix: Prefix) -> list[list[int]]:
    """Returns the KV heads of every layer that keep every token."""

    def of_layer(policy: Policy, kv_heads: int) -> list[int]:
        if isinstance(policy, kvjax.Exact):
            return [*range(kv_heads)]
        by_head = policy.policies if isinstance(policy, kvjax.ByHead) else ()
        return [head for head, one in enumerate(by_head) if isinstance(one, kvjax.Exact)]

    generator = prefix.generator
    return [of_layer(policy, spec.kv_heads) for policy, spec in zip(generator.policies, generator.specs, strict=True)]


def attention_to_text(
    prefix: Prefix, suffix: Generator, tokens: Sequence[int], first_query: int, heads: Sequence[tuple[int, int]]
) -> Float[np.ndarray, "H T"]:
    """Processes tokens after a prefix, and returns the largest attention of their queries to each of its tokens.

    Args:
        suffix: sizes and policies of the tokens, with one row.
        tokens: token ids of question and answer.
        first_query: index of the first token whose query counts.
        heads: (layer, KV head) of heads that keep every token.

    Returns:
        The largest attention probability of a query, float32, a mean over the query heads of a group.
    """
    with_heads = {layer for layer, _ in heads}
    attention: dict[int, Array] = {}
    # `step_layers` calls `step` for every layer with attention, in order.
    numbers = itertools.cycle(range(len(prefix.entries)))

    def step(module, rotaries, caches, counters, x, positions, lengths, prefixes, scorers):
        """Computes a layer like `step_layer`, and updates the attention of one with heads."""
        before, number = jnp.copy(x), next(numbers)
        x, caches, counters = step_layer(module, rotaries, caches, counters, x, positions, lengths, prefixes, scorers)
        if number in with_heads and is_query.any():
            arrays = caches[0], counters[0], before, positions[0], is_query, prefixes[0]
            largest = _block_attention(module, rotaries[0], *arrays)
            attention[number] = jnp.maximum(attention.get(number, 0), largest)
        return x, caches, counters

    state, split = commit_to_device(prefix.start_rows(suffix), None), suffix.split_model
    for start in range(0, len(tokens), suffix.block_size):
        new = tokens[start : start + suffix.block_size]
        block = np.zeros((1, suffix.block_size), np.int32)
        block[0, : len(new)] = new
        is_query = (start + np.arange(block.size) >= first_query)[None]
        lengths = jax.device_put(np.array([len(new)], np.int32), state.positions.sharding)
        x = split.model.embed(jnp.asarray(block))
        _, [state] = step_layers([Group(split, state, prefix.entries)], x, (lengths,), step)
        state = compact_layers(dataclasses.replace(state, positions=state.positions + lengths))
    check_faults(state, None)
    return np.stack([np.asarray(attention[layer][head, : prefix.num_tokens]) for layer, head in heads])


@functools.partial(jax.jit, static_argnames=("rotary",))
def _block_attention(
    flat: Any,
    rotary: Rotary,
    cache: kvjax.Cache,
    counters: kvjax.Counters,
    x: Float[Array, "1 T W"],
    positions: Int[Array, "1"],
    is_query: Bool[Array, "1 T"],
    entries: kvjax.FrozenCache,
) -> Float[Array, "H_kv N"]:
    """Returns the largest attention of a block's queries to each token of the prefix, a mean over a group's heads.

    Args:
        flat: the layer, as `split_model` returns it.
        cache: its cache after the step of the block.
        x: residual stream before the layer.
        positions: number of tokens before the block.
        is_query: whether a query counts.
    """
    layer: DecoderLayer = flat.module
    query = layer.project_queries(x, rotation(rotary, positions[:, None] + jnp.arange(x.shape[1])))
    probabilities = kvjax.prefix_probabilities(cache, counters, query, entries, sink_logits=layer.sink_logits)
    largest = jnp.max(jnp.where(is_query[:, None, :, None], probabilities, 0), axis=(0, 2))
    return largest / layer.attention.group_size
