"""Knorm (Devoto et al. 2024): the prompt's tokens whose keys have the smallest norms."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.top_k.top_k_policy import TopKPolicy
from kvjax.policy import Prompt


@dataclasses.dataclass(frozen=True)
class Knorm(TopKPolicy):
    """Keeps the tokens whose keys have the smallest norms. It needs no queries.

    In many models, tokens that receive much attention have keys of small norm. Inherited settings: see `TopKPolicy`.
    kvpress uses sinks=0 and reserve_decode_slots=True.

    Reference:
        A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (https://arxiv.org/abs/2406.11430);
        KnormPress of kvpress.
    """

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """Returns the negative norms of keys."""
        return -jnp.linalg.norm(prompt.keys.astype(jnp.float32), axis=-1)
