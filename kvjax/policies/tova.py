"""TOVA (Oren et al. 2024), of a prompt: the tokens that its last query attends to."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.distributed.collectives import global_heads, sum_over_heads
from kvjax.policy import Policy, Prompt, Requirements
from kvjax.prompt_attention import attention_received
from kvjax.top_k_policy import TopKPolicy


@dataclasses.dataclass(frozen=True)
class TOVA(TopKPolicy):
    """Keeps the tokens that the prompt's last query attends to most, on average over the heads of the layer: all heads
    keep the same. The paper chooses anew at every step; here, as in kvpress, the prompt is ranked once, and later
    tokens take the places of the least.

    Attributes:
        budget, sinks, recent, beside, shares, compact_every: as in `TopKPolicy`; kvpress has sinks=0 and beside=True,
            and keeps the last token whatever its attention (recent=1).

    Reference:
        Transformers are Multi-State RNNs, section 3 (https://arxiv.org/abs/2401.06104); kvpress's TOVAPress.
    """

    recent: int = 1

    requires = Requirements(prompt_queries=1, entire_prompt=True)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        return layer_attention(self, prompt)


def layer_attention(policy: Policy, prompt: Prompt) -> Float[Array, "B H_kv T"]:
    """The probability of attention that each token draws from the last queries that the policy asks for, summed over
    these and averaged over all query heads of the layer; float32.

    Raises:
        ValueError: where the queries are not those asked for (`kvjax.prompt_attention.check_prompt_queries`).
    """
    received = attention_received(policy, prompt)
    total = sum_over_heads(jnp.sum(received, axis=1, keepdims=True))
    assert prompt.queries is not None  # attention asked for them
    return jnp.broadcast_to(total / global_heads(prompt.queries.shape[2]), received.shape)
