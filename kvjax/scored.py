"""What policies have in common that learn from the attention which decoding pays to their cache."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.attention import Seen
from kvjax.spec import CacheSpec
from kvjax.state import state
from kvjax.window import Window


@state
class AttentionScores:
    """Attention probability that the slots of a window and the staging slots drew, summed over the query heads of a
    group; 0 in empty ones. It moves along when their tokens do."""

    window: Float[Array, "B H_kv S"]  # float32
    staged: Float[Array, "B H_kv P"]  # float32


def init_scores(spec: CacheSpec, window: Window) -> AttentionScores:
    shape = window.keys.shape[:3]
    return AttentionScores(jnp.zeros(shape), jnp.zeros((*shape[:2], spec.staging)))


def summed(scores: AttentionScores, seen: Seen) -> AttentionScores:
    """The attention of all queries so far."""
    (window,), staged = seen.parts, seen.staged
    assert staged is not None  # of policies that observe
    return AttentionScores(scores.window + jnp.sum(window, axis=2), scores.staged + jnp.sum(staged, axis=2))


def newest(scores: AttentionScores, seen: Seen) -> AttentionScores:
    """The attention of the newest query; as it was, in rows that appended no token."""
    (window,) = seen.parts
    last = seen.real.shape[1] - 1 - jnp.argmax(seen.real[:, ::-1], axis=1)
    came = jnp.any(seen.real, axis=1)[:, None, None]
    newest_of = lambda x: jnp.take_along_axis(x, last[:, None, None, None], axis=2)  # noqa: E731
    of_last = lambda x: (newest_of(x) if x.shape[2] > 1 else x)[:, :, 0]  # noqa: E731
    return AttentionScores(
        jnp.where(came, of_last(window), scores.window), jnp.where(came, of_last(seen.staged), scores.staged)
    )


def moved_in(scores: AttentionScores, window: Float[Array, "B H_kv S"]) -> AttentionScores:
    """The scores once the staged tokens have gone where `window` says."""
    return AttentionScores(window, jnp.zeros_like(scores.staged))
