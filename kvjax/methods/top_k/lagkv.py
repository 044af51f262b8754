"""LagKV (Liang et al. 2025): the prompt's tokens that vary most relative to the next partition."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.top_k.top_k_policy import TopKPolicy
from kvjax.policy import Prompt, check_min


@dataclasses.dataclass(frozen=True)
class LagKV(TopKPolicy):
    """Keeps, of every partition of the prompt, the tokens whose keys and values vary most over their dimensions.

    Each dimension is first scaled to its range in the next partition. The last full partition, which has no next one,
    and the tokens after it get the highest ranks, the last token first. It needs no queries. Inherited settings: see
    `TopKPolicy`. Partitions start after the sinks.

    Attributes:
        lag_size: tokens of a partition.
        cross_scoring: whether partitions compete by their tokens' scores. Otherwise a token's score is its rank in its
            partition, so that every partition keeps the same number. Of equal ranks the later token is dropped first;
            under `AdaKV` this prefers the first heads.

    Reference:
        LagKV (https://arxiv.org/abs/2504.04704); LagKVPress of kvpress.
    """

    lag_size: int = 128
    cross_scoring: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(1, lag_size=self.lag_size)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """Scores the prompt: from 0 to 1 in partitions with a full next partition, then from 1 to 2."""
        first, lag, shape, tokens = self.sinks, self.lag_size, prompt.keys.shape[:3], prompt.keys.shape[2]
        position, partitions = jnp.arange(tokens), max(tokens - first, 0) // lag
        by_position = jnp.broadcast_to(1 + position / tokens, shape)
        if partitions < 2:
            return by_position

        def variation(x: Float[Array, "B H_kv T D"]) -> Float[Array, "B H_kv P-1 L"]:
            return _variation(x[:, :, first : first + partitions * lag].reshape(*shape[:2], partitions, lag, -1))

        score = (variation(prompt.keys) + variation(prompt.values)) / 2
        if not self.cross_scoring:
            score = jnp.argsort(jnp.argsort(score, axis=-1), axis=-1) / lag
        after = tokens - first - (partitions - 1) * lag
        score = jnp.pad(score.reshape(*shape[:2], -1), ((0, 0), (0, 0), (first, after)))
        has_next = (position - first) // lag < (prompt.lengths[:, None] - first) // lag - 1
        return jnp.where(has_next[:, None], score, by_position)


def _variation(x: Float[Array, "B H_kv P L D"]) -> Float[Array, "B H_kv P-1 L"]:
    """Returns the softmax over each partition of the standard deviation of a token's scaled dimensions."""
    x = x.astype(jnp.float32)
    low, high = jnp.min(x[:, :, 1:], axis=3, keepdims=True), jnp.max(x[:, :, 1:], axis=3, keepdims=True)
    # A dimension that is constant in the next partition has no range.
    scaled = jnp.where(high > low, (x[:, :, :-1] - low) / jnp.where(high > low, high - low, 1.0), 0.0)
    return jax.nn.softmax(jnp.std(scaled, axis=-1, ddof=1), axis=-1)
