"""Attention scores of cached tokens, for policies that learn from the attention of decode steps."""

from typing import cast

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.attention import AttentionStats
from kvjax.shared.window import Window
from kvjax.spec import CacheSpec
from kvjax.state import state


@state
class AttentionScores:
    """Attention probability of every slot of a window and of the staging buffer, summed over a group's query heads.

    The slots are those that may hold a token, `Window.slots` and `CacheSpec.staging_slots`.
    """

    window: Float[Array, "B H_kv M"]  # float32, 0 in empty slots
    staged: Float[Array, "B H_kv P"]  # float32


def init_attention_scores(spec: CacheSpec, window: Window) -> AttentionScores:
    """Returns zero scores.

    Args:
        spec: the cache's spec; `spec.staging_slots` must be set, as `kvjax.init` does.
        window: the window whose slots get a score.

    Returns:
        Scores for the slots of the window and of the staging buffer.
    """
    shape = (spec.batch, spec.kv_heads)
    return AttentionScores(jnp.zeros((*shape, window.slots)), jnp.zeros((*shape, spec.staging_slots)))


def accumulate_scores(scores: AttentionScores, stats: AttentionStats) -> AttentionScores:
    """Adds the attention probabilities of a step's queries to the scores.

    Args:
        stats: attention statistics of a policy with one segment, its window.

    Returns:
        The updated scores.
    """
    window, staged = _slot_probabilities(scores, stats)
    return AttentionScores(scores.window + jnp.sum(window, axis=2), scores.staged + jnp.sum(staged, axis=2))


def newest_scores(scores: AttentionScores, stats: AttentionStats) -> AttentionScores:
    """Replaces the scores by the attention probabilities of each row's newest query.

    Args:
        stats: attention statistics of a policy with one segment, its window.

    Returns:
        The updated scores; rows that appended no token keep theirs.
    """
    window, staged = _slot_probabilities(scores, stats)
    last = stats.appended.shape[1] - 1 - jnp.argmax(stats.appended[:, ::-1], axis=1)
    any_appended = jnp.any(stats.appended, axis=1)[:, None, None]

    def of_last(x: Float[Array, "B H T S"]) -> Float[Array, "B H S"]:
        """Returns `x` of each row's newest query."""
        if x.shape[2] > 1:
            x = jnp.take_along_axis(x, last[:, None, None, None], axis=2)
        return x[:, :, 0]

    return AttentionScores(
        jnp.where(any_appended, of_last(window), scores.window),
        jnp.where(any_appended, of_last(staged), scores.staged),
    )


def _slot_probabilities(
    scores: AttentionScores, stats: AttentionStats
) -> tuple[Float[Array, "B H T M"], Float[Array, "B H T P"]]:
    """Returns the probabilities of the slots that may hold a token, of the window and of the staging buffer."""
    (window,), staged = stats.segments, cast(Array, stats.staged)
    return window[..., : scores.window.shape[2]], staged[..., : scores.staged.shape[2]]


def after_compaction(scores: AttentionScores, window: Float[Array, "B H_kv M"]) -> AttentionScores:
    """Returns scores for an empty staging buffer.

    Args:
        scores: the scores before the compaction.
        window: new scores of the window's slots.

    Returns:
        The scores.
    """
    return AttentionScores(window, jnp.zeros_like(scores.staged))
