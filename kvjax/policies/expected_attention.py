"""Expected attention (Devoto et al. 2025): the prompt's tokens that queries to come will attend to, if they are like
those of the prompt."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax import rope
from kvjax.policy import Prompt, Requirements, check_min
from kvjax.prompt_attention import check_prompt_queries, probabilities
from kvjax.top_k_policy import TopKPolicy


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(TopKPolicy):
    """Keeps the tokens to which Gaussian queries, with the mean and covariance of the prompt's before their positions
    turned them, would pay most attention from the positions that follow, times the length of their values. It needs
    `spec.rope_frequencies`.

    Attributes:
        budget, sinks, recent, beside, shares, compact_every: as in `TopKPolicy`; sinks=4 and beside=True are those
            published. Neither sinks' queries nor their keys count.
        n_future_positions: over how many positions behind the prompt the turn of queries is averaged.
        use_covariance: whether queries vary, or are all the mean.
        use_vnorm: whether the norm of a token's value multiplies its score.
        epsilon: is added to scores before it does.

    Reference:
        Expected Attention (https://arxiv.org/abs/2510.00636); kvpress's ExpectedAttentionPress.
    """

    n_future_positions: int = 512
    use_covariance: bool = True
    use_vnorm: bool = True
    epsilon: float = 0.0

    requires = Requirements(prompt_queries="all", entire_prompt=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(1, n_future_positions=self.n_future_positions)
        if self.epsilon < 0:
            raise ValueError(f"epsilon={self.epsilon}; it must be at least 0")

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        queries = check_prompt_queries(self, prompt)
        score = expected_attention(prompt, queries, self.sinks, self.n_future_positions, self.use_covariance)
        if not self.use_vnorm:
            return score
        return (score + self.epsilon) * jnp.linalg.norm(prompt.values.astype(jnp.float32), axis=-1)


def expected_attention(
    prompt: Prompt,
    queries: Float[Array, "B T H_q D"],
    sinks: int = 4,
    future: int = 512,
    use_covariance: bool = True,
) -> Float[Array, "B H_kv T"]:
    """The softmax, over all tokens but the sinks, of the logarithm of E exp(q.k / sqrt(D)) for Gaussian queries q like
    the prompt's, averaged over the query heads of a kv head's group; float32. A soft cap, under which there is no
    closed form, is put on that logarithm.

    Args:
        queries: all of the prompt's, right-aligned.
        sinks: first tokens, whose queries and keys are left out.
        future: positions behind the prompt, over which the queries' turn is averaged.

    Raises:
        ValueError: for a cache that was not told the frequencies.
    """
    if prompt.rope_frequencies is None:
        raise ValueError("queries before their position turned them need spec.rope_frequencies; give these")
    batch, kv_heads, tokens, head_dim = prompt.keys.shape
    place = prompt.lengths[:, None] - tokens + jnp.arange(tokens)
    queries = rope.rotate(queries.astype(jnp.float32), *rope.rotation(-place, prompt.rope_frequencies))
    queries = queries.reshape(batch, tokens, kv_heads, -1, head_dim)
    counts = lambda x: jnp.where((place >= sinks)[:, :, None, None, None], x, 0.0)  # noqa: E731
    count = jnp.maximum(prompt.lengths - sinks, 1)[:, None, None, None]
    mean = jnp.sum(counts(queries), axis=1) / count
    # A mean of turns is no turn, but a linear map of queries all the same: its transpose is applied to the keys.
    cos, sin = rope.rotation(prompt.lengths[:, None] + jnp.arange(future), prompt.rope_frequencies)
    cos, sin = (jnp.mean(x, axis=1, keepdims=True) for x in (cos, sin))
    keys = rope.rotate(prompt.keys.astype(jnp.float32).swapaxes(1, 2), cos, -sin)
    logits = jnp.einsum("bhgd,bthd->bhgt", mean, keys) / math.sqrt(head_dim)
    if use_covariance:
        centred = counts(queries - mean[:, None])
        covariance = jnp.einsum("bthgi,bthgj->bhgij", centred, centred) / count[..., None]
        logits += jnp.einsum("bhgtj,bthj->bhgt", jnp.einsum("bthi,bhgij->bhgtj", keys, covariance), keys) / head_dim / 2
    position = jnp.arange(tokens)
    visible = (position >= sinks) & (position < prompt.lengths[:, None])
    return jnp.mean(probabilities(prompt, logits[:, :, None], visible[:, None, None, None]), axis=(2, 3))
