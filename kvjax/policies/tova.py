"""TOVA (Oren et al. 2024), of a prompt: the tokens that its last query attends to."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.collectives import heads_in_all, summed_over_heads
from kvjax.policy import Policy, Prompt
from kvjax.prompt_attention import attention_received
from kvjax.selection import Selection


@dataclasses.dataclass(frozen=True)
class TOVA(Selection):
    """Keeps the tokens that the prompt's last query attends to most, on average over the heads of the layer: all heads
    keep the same. The paper chooses anew at every step; here, as in kvpress, the prompt is ranked once, and later
    tokens take the places of the least.

    Attributes:
        budget, sinks, recent, beside, shares, compact_every: as in `Selection`; kvpress has sinks=0 and beside=True,
            and keeps the last token whatever its attention (recent=1).

    Source: Transformers are Multi-State RNNs, section 3 (https://arxiv.org/abs/2401.06104); kvpress's TOVAPress.
    """

    recent: int = 1

    prompt_queries = 1

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        return layer_attention(self, prompt)


def layer_attention(policy: Policy, prompt: Prompt) -> Float[Array, "B H_kv T"]:
    """The probability of attention that each token draws from the last queries that the policy asks for, summed over
    these and averaged over all query heads of the layer; float32.

    Raises:
        ValueError: where the queries are not those asked for (`kvjax.prompt_attention.asked_queries`).
    """
    received = attention_received(policy, prompt)
    total = summed_over_heads(jnp.sum(received, axis=1, keepdims=True))
    assert prompt.queries is not None  # attention asked for them
    return jnp.broadcast_to(total / heads_in_all(prompt.queries.shape[2]), received.shape)
