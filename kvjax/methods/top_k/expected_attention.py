"""Expected attention (Devoto et al. 2025): the prompt's tokens to which future queries are expected to attend."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax import rope
from kvjax.methods.top_k.top_k_policy import TopKPolicy
from kvjax.policy import Prompt, Requirements, check_min
from kvjax.prompt_attention import check_prompt_queries, masked_softmax


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(TopKPolicy):
    """Keeps the tokens with the largest expected attention of future queries times the norm of their values.

    Future queries are modeled as Gaussian, with the mean and covariance of the prompt's queries before RoPE, at the
    positions after the prompt. Needs `CacheSpec.rope_frequencies`. Inherited settings: see `TopKPolicy`. The paper
    uses sinks=4 and reserve_decode_slots=True. Queries and keys of sinks do not count.

    Attributes:
        n_future_positions: number of positions after the prompt over which RoPE is averaged.
        use_covariance: whether queries have the covariance of the prompt's; otherwise all are the mean.
        use_vnorm: whether scores are multiplied by the norms of values.
        epsilon: added to scores before this multiplication.

    Reference:
        Expected Attention (https://arxiv.org/abs/2510.00636); ExpectedAttentionPress of kvpress.
    """

    n_future_positions: int = 512
    use_covariance: bool = True
    use_vnorm: bool = True
    epsilon: float = 0.0

    requires = Requirements(prompt_queries="all", entire_prompt=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(1, n_future_positions=self.n_future_positions)
        check_min(0, epsilon=self.epsilon)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """Returns the expected attention to the prompt, times the norms of values if `use_vnorm`."""
        score = self._expected_attention(prompt)
        if not self.use_vnorm:
            return score
        return (score + self.epsilon) * jnp.linalg.norm(prompt.values.astype(jnp.float32), axis=-1)

    def _expected_attention(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """Returns the softmax over tokens of log E exp(q.k / sqrt(D)), averaged over the query heads of a group.

        A logit cap has no closed form and is applied to that logarithm.

        Raises:
            ValueError: if the cache has no RoPE frequencies.
        """
        if prompt.rope_frequencies is None:
            raise ValueError("ExpectedAttention needs CacheSpec.rope_frequencies to undo RoPE on queries; pass them")
        batch, kv_heads, tokens, head_dim = prompt.keys.shape
        queries = check_prompt_queries(self, prompt).astype(jnp.float32)
        position = prompt.lengths[:, None] - tokens + jnp.arange(tokens)
        queries = rope.rotate(queries, *rope.rotation(-position, prompt.rope_frequencies))
        queries = queries.reshape(batch, tokens, kv_heads, -1, head_dim)

        def mask(x: Float[Array, "B T H_kv G D"]) -> Float[Array, "B T H_kv G D"]:
            return jnp.where((position >= self.sinks)[:, :, None, None, None], x, 0.0)

        count = jnp.maximum(prompt.lengths - self.sinks, 1)[:, None, None, None]
        mean = jnp.sum(mask(queries), axis=1) / count
        # The mean of rotations is a linear map; its transpose is applied to the keys.
        future = prompt.lengths[:, None] + jnp.arange(self.n_future_positions)
        cos, sin = (jnp.mean(x, axis=1, keepdims=True) for x in rope.rotation(future, prompt.rope_frequencies))
        keys = rope.rotate(prompt.keys.astype(jnp.float32).swapaxes(1, 2), cos, -sin)
        einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        logits = einsum("bhgd,bthd->bhgt", mean, keys) / math.sqrt(head_dim)
        if self.use_covariance:
            centered = mask(queries - mean[:, None])
            covariance = einsum("bthgi,bthgj->bhgij", centered, centered) / count[..., None]
            products = einsum("bthi,bhgij->bhgtj", keys, covariance)
            logits += einsum("bhgtj,bthj->bhgt", products, keys) / head_dim / 2
        index = jnp.arange(tokens)
        visible = (index >= self.sinks) & (index < prompt.lengths[:, None])
        return jnp.mean(masked_softmax(prompt, logits[:, :, None], visible[:, None, None, None]), axis=(2, 3))
