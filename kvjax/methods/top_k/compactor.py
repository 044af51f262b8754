"""Compactor (Chari and Van Durme 2025): the prompt's tokens with high leverage or much attention."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.distributed.collectives import global_heads, sum_over_heads
from kvjax.methods.top_k.leverage_scores import leverage_scores
from kvjax.methods.top_k.top_k_policy import TopKPolicy
from kvjax.policy import Prompt, Requirements, check_above, check_min
from kvjax.prompt_attention import check_prompt_queries, key_attention


@dataclasses.dataclass(frozen=True)
class Compactor(TopKPolicy):
    """Keeps the tokens with the largest weighted sum of two scores: the leverage of their keys, and attention.

    Attention is not causal: all queries of a chunk attend to all its keys. Both scores are standardized to mean 0 and
    variance 1 over a layer. Needs `CacheSpec.rope_frequencies`. Inherited settings: see `TopKPolicy`. kvpress uses
    reserve_decode_slots=True.

    Attributes:
        sinks: first tokens that are always kept; 8 as in kvpress. Chunks start after them.
        recent: last tokens of the prompt that are always kept; 4 as in kvpress. They get no score.
        chunk: tokens that attend to one another.
        blending: weight of the leverage; None for the share of the prompt that is dropped.
        scale: scale of the attention logits; 1 as in the released code, None for 1 / sqrt(head_dim).
        sketch: as in `LeverageScores`; 48 in the paper.

    Reference:
        Compactor, section 3 (https://arxiv.org/abs/2507.08143); CompactorPress of kvpress, in which the padding of the
        last chunk attends too.
    """

    sinks: int = 8
    recent: int = 4
    chunk: int = 256
    blending: float | None = None
    scale: float | None = 1.0
    sketch: int | None = None

    requires = Requirements(prompt_queries="all", entire_prompt=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(1, chunk=self.chunk, sketch=self.sketch)
        check_above(0, scale=self.scale)
        check_min(0, blending=self.blending)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """Returns the weighted sum of leverage and attention of the prompt's tokens."""
        position, lengths = jnp.arange(prompt.keys.shape[2]), prompt.lengths[:, None, None]
        among = (position >= self.sinks) & (position < lengths - self.recent)
        leverage = leverage_scores(prompt, among, sketch=self.sketch)
        attention = self._chunk_attention(prompt, among)
        attention = _neighbor_mean(attention * jnp.linalg.norm(prompt.values.astype(jnp.float32), axis=-1), among)
        dropped_share = jnp.maximum(1 - self.budget / jnp.maximum(lengths, 1), 0)
        weight = dropped_share if self.blending is None else self.blending
        return weight * _standardize(leverage, among) + _standardize(attention, among)

    def _chunk_attention(self, prompt: Prompt, among: Bool[Array, "B 1 T"]) -> Float[Array, "B H_kv T"]:
        """Returns the attention that tokens receive from the queries of their chunk, averaged over a group's heads.

        Only the tokens in `among` attend and are attended to.
        """
        queries, first = check_prompt_queries(self, prompt), self.sinks
        batch, kv_heads, tokens, head_dim = prompt.keys.shape
        chunk = min(self.chunk, max(tokens - first, 1))
        position = first + jnp.arange(-(-max(tokens - first, 1) // chunk) * chunk)
        key_index = jnp.minimum(position, tokens - 1)
        # Queries are right-aligned, keys left-aligned.
        query_index = jnp.clip(position - prompt.lengths[:, None] + tokens, 0, tokens - 1)
        queries = jnp.take_along_axis(queries, query_index[..., None, None], axis=1)
        queries = queries if self.scale is None else queries * (self.scale * math.sqrt(head_dim))
        queries = queries.reshape(-1, chunk, *queries.shape[2:])
        keys = prompt.keys[:, :, key_index].reshape(batch, kv_heads, -1, chunk, head_dim).swapaxes(1, 2)
        attends = (among[:, 0, key_index] & (position < tokens)).reshape(-1, chunk)

        def is_visible(index: Int[Array, "n"]) -> Bool[Array, "B n chunk"]:
            return attends[:, index, None] & attends[:, None]

        received = key_attention(prompt, queries, keys.reshape(-1, kv_heads, chunk, head_dim), is_visible)
        received = received.reshape(batch, -1, kv_heads, chunk).swapaxes(1, 2).reshape(batch, kv_heads, -1)
        received = jnp.pad(received, ((0, 0), (0, 0), (first, 0)))[:, :, :tokens]
        return received * kv_heads / queries.shape[2]


def _neighbor_mean(score: Float[Array, "B H T"], among: Bool[Array, "B 1 T"]) -> Float[Array, "B H T"]:
    """Returns the mean score of each token and its two neighbors; tokens outside `among` count as 0."""
    padded = jnp.pad(jnp.where(among, score, 0.0), ((0, 0), (0, 0), (1, 1)))
    return (padded[:, :, :-2] + padded[:, :, 1:-1] + padded[:, :, 2:]) / 3


def _standardize(score: Float[Array, "B H T"], among: Bool[Array, "B 1 T"]) -> Float[Array, "B H T"]:
    """Returns scores with mean 0 and variance 1 over all heads of a row."""

    def total(x: Float[Array, "B H T"]) -> Float[Array, "B 1 1"]:
        return sum_over_heads(jnp.sum(jnp.where(among, x, 0.0), axis=(1, 2), keepdims=True))

    count = global_heads(score.shape[1]) * jnp.sum(among, axis=2, keepdims=True)
    centered = score - total(score) / jnp.maximum(count, 1)
    deviation = jnp.sqrt(total(jnp.square(centered)) / jnp.maximum(count - 1, 1))
    return centered / jnp.maximum(deviation, 1e-6)
