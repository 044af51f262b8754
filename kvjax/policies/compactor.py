"""Compactor (Chari and Van Durme 2025): the prompt's tokens that are hard to replace or much attended to."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.distributed.collectives import global_heads, sum_over_heads
from kvjax.policies.leverage_scores import leverage_scores
from kvjax.policy import Prompt, Requirements, check_above, check_min
from kvjax.prompt_attention import attention_drawn, check_prompt_queries
from kvjax.top_k_policy import TopKPolicy


@dataclasses.dataclass(frozen=True)
class Compactor(TopKPolicy):
    """Keeps the tokens of largest sum of two scores, each with mean 0 and variance 1 over a layer: the leverage of
    their keys, and the attention that they draw when all queries of a chunk attend to all its keys, later ones too.
    It needs `spec.rope_frequencies`.

    Attributes:
        budget, sinks, recent, beside, shares, compact_every: as in `TopKPolicy`; sinks=8, recent=4 and beside=True are
            those of kvpress. Scores are among the tokens between.
        chunk: tokens that attend to one another, from the sinks on.
        blending: weight of the leverage; None: the share of the prompt that goes.
        scale: of the logits of that attention; 1 as released, None: 1 / sqrt(head_dim), as the model's.
        sketch: as in `LeverageScores`; 48 as published.

    Reference:
        Compactor, section 3 (https://arxiv.org/abs/2507.08143); kvpress's CompactorPress, which also lets the
    padding of a last chunk that is not full attend.
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
        position, lengths = jnp.arange(prompt.keys.shape[2]), prompt.lengths[:, None, None]
        among = (position >= self.sinks) & (position < lengths - self.recent)
        leverage = leverage_scores(prompt, among, sketch=self.sketch)
        attention = non_causal_attention(
            prompt, check_prompt_queries(self, prompt), among, self.sinks, self.chunk, self.scale
        )
        attention = neighbours_mean(attention * jnp.linalg.norm(prompt.values.astype(jnp.float32), axis=-1), among)
        goes = jnp.maximum(1 - self.budget / jnp.maximum(lengths, 1), 0)
        weight = goes if self.blending is None else self.blending
        return weight * standardised(leverage, among) + standardised(attention, among)


def non_causal_attention(
    prompt: Prompt,
    queries: Float[Array, "B T H_q D"],
    among: Bool[Array, "B 1 T"],
    first: int = 0,
    chunk: int = 256,
    scale: float | None = None,
) -> Float[Array, "B H_kv T"]:
    """The probability of attention that tokens draw from all queries of their chunk, which see all of it, summed over
    these and averaged over the query heads of a kv head's group; 0 outside, float32.

    Args:
        queries: all of the prompt's, right-aligned.
        among: tokens that attend and are attended to.
        first: where the first chunk begins.
        scale: of logits, where it is not 1 / sqrt(D).
    """
    batch, kv_heads, tokens, head_dim = prompt.keys.shape
    chunk = min(chunk, max(tokens - first, 1))
    place = first + jnp.arange(-(-max(tokens - first, 1) // chunk) * chunk)
    own = jnp.minimum(place, tokens - 1)
    behind = jnp.clip(place - prompt.lengths[:, None] + tokens, 0, tokens - 1)
    queries = jnp.take_along_axis(queries, behind[..., None, None], axis=1)
    queries = queries if scale is None else queries * (scale * math.sqrt(head_dim))
    queries = queries.reshape(-1, chunk, *queries.shape[2:])
    keys = prompt.keys[:, :, own].reshape(batch, kv_heads, -1, chunk, head_dim).swapaxes(1, 2)
    attends = (among[:, 0, own] & (place < tokens)).reshape(-1, chunk)
    sees = lambda number: attends[:, number, None] & attends[:, None]  # noqa: E731
    drawn = attention_drawn(prompt, queries, keys.reshape(-1, kv_heads, chunk, head_dim), sees)
    drawn = drawn.reshape(batch, -1, kv_heads, chunk).swapaxes(1, 2).reshape(batch, kv_heads, -1)
    drawn = jnp.pad(drawn, ((0, 0), (0, 0), (first, 0)))[:, :, :tokens]
    return drawn * kv_heads / queries.shape[2]


def neighbours_mean(score: Float[Array, "B H T"], among: Bool[Array, "B 1 T"]) -> Float[Array, "B H T"]:
    """The mean of each token's score and both its neighbours', 0 for what is not among them."""
    padded = jnp.pad(jnp.where(among, score, 0.0), ((0, 0), (0, 0), (1, 1)))
    return (padded[:, :, :-2] + padded[:, :, 1:-1] + padded[:, :, 2:]) / 3


def standardised(score: Float[Array, "B H T"], among: Bool[Array, "B 1 T"]) -> Float[Array, "B H T"]:
    """Scores less their mean, over their standard deviation, both of all heads of a row."""
    over_all = lambda x: sum_over_heads(jnp.sum(jnp.where(among, x, 0.0), axis=(1, 2), keepdims=True))  # noqa: E731
    count = global_heads(score.shape[1]) * jnp.sum(among, axis=2, keepdims=True)
    centred = score - over_all(score) / jnp.maximum(count, 1)
    deviation = jnp.sqrt(over_all(jnp.square(centred)) / jnp.maximum(count - 1, 1))
    return centred / jnp.maximum(deviation, 1e-6)
