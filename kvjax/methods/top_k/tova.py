"""TOVA (Oren et al. 2024) for prompts: the tokens to which the prompt's last query attends."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.distributed.collectives import global_heads, sum_over_heads
from kvjax.methods.top_k.top_k_policy import TopKPolicy
from kvjax.policy import Prompt, Requirements
from kvjax.prompt_attention import attention_received, check_prompt_queries


@dataclasses.dataclass(frozen=True)
class TOVA(TopKPolicy):
    """Keeps the tokens to which the prompt's last query attends most, averaged over all heads of the layer.

    All heads keep the same tokens. The paper selects anew at every step. Here, as in kvpress, the prompt is ranked
    once, and later tokens replace the lowest-ranked ones. Inherited settings: see `TopKPolicy`. kvpress uses sinks=0
    and reserve_decode_slots=True.

    Attributes:
        recent: last tokens of the prompt that are always kept; 1 as in kvpress.

    Reference:
        Transformers are Multi-State RNNs, section 3 (https://arxiv.org/abs/2401.06104); TOVAPress of kvpress.
    """

    recent: int = 1

    requires = Requirements(prompt_queries=1, entire_prompt=True)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """Returns the attention of the prompt's last query, averaged over heads."""
        received = attention_received(self, prompt)
        total = sum_over_heads(jnp.sum(received, axis=1, keepdims=True))
        query_heads = check_prompt_queries(self, prompt).shape[2]
        return jnp.broadcast_to(total / global_heads(query_heads), received.shape)
