"""LagKV (Liang et al. 2025): the prompt's tokens that vary most beside what comes right behind them."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policy import Prompt, check_min
from kvjax.top_k_policy import TopKPolicy


@dataclasses.dataclass(frozen=True)
class LagKV(TopKPolicy):
    """Cuts what follows the sinks into partitions, and keeps of each the tokens whose keys and values vary most over
    their dimensions, once each dimension is scaled to the range that it has in the next partition. The last whole
    partition, which has no next one, and what follows it come first, the last token first. No query is needed.

    Attributes:
        budget, sinks, recent, beside, shares, compact_every: as in `TopKPolicy`.
        lag_size: tokens of a partition.
        cross_scoring: partitions compete by their tokens' scores. Otherwise a token's score is its rank in its own,
            so that each partition keeps as many; of equal ranks the earlier token goes first, which under `AdaKV`
            prefers the first heads.

    Reference:
        LagKV (https://arxiv.org/abs/2504.04704); kvpress's LagKVPress.
    """

    lag_size: int = 128
    cross_scoring: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(1, lag_size=self.lag_size)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        return lag_relative(prompt, self.sinks, self.lag_size, self.cross_scoring)


def lag_relative(prompt: Prompt, first: int, lag: int, cross_scoring: bool = False) -> Float[Array, "B H_kv T"]:
    """A score of each token: in [0, 1] in partitions that another follows whole, then from 1 to 2 rising to the end.

    Args:
        first: where the first partition begins.
        cross_scoring: the mean of both variations' softmax in a partition, rather than its rank there.
    """
    shape, tokens = prompt.keys.shape[:3], prompt.keys.shape[2]
    position, partitions = jnp.arange(tokens), max(tokens - first, 0) // lag
    last_first = jnp.broadcast_to(1 + position / tokens, shape)
    if partitions < 2:
        return last_first
    cut = lambda x: x[:, :, first : first + partitions * lag].reshape(*shape[:2], partitions, lag, -1)  # noqa: E731
    score = (_variation(cut(prompt.keys)) + _variation(cut(prompt.values))) / 2
    if not cross_scoring:
        score = jnp.argsort(jnp.argsort(score, axis=-1), axis=-1) / lag
    behind = tokens - first - (partitions - 1) * lag
    score = jnp.pad(score.reshape(*shape[:2], -1), ((0, 0), (0, 0), (first, behind)))
    followed = (position - first) // lag < (prompt.lengths[:, None] - first) // lag - 1
    return jnp.where(followed[:, None], score, last_first)


def _variation(x: Float[Array, "B H_kv P L D"]) -> Float[Array, "B H_kv P-1 L"]:
    """The softmax, over each partition but the last, of the standard deviation over a token's scaled dimensions."""
    x = x.astype(jnp.float32)
    low, high = (of(x[:, :, 1:], axis=3, keepdims=True) for of in (jnp.min, jnp.max))
    # Where the next partition does not vary there is no range to scale to.
    scaled = jnp.where(high > low, (x[:, :, :-1] - low) / jnp.where(high > low, high - low, 1.0), 0.0)
    return jax.nn.softmax(jnp.std(scaled, axis=-1, ddof=1), axis=-1)
