"""Knorm (Devoto et al. 2024): the prompt's tokens whose keys are shortest."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policy import Prompt
from kvjax.top_k_policy import TopKPolicy


@dataclasses.dataclass(frozen=True)
class Knorm(TopKPolicy):
    """Keeps the tokens with the smallest keys: in many models what is attended to much has a short key. No query is
    needed.

    Attributes:
        budget, sinks, recent, beside, shares, compact_every: as in `TopKPolicy`; kvpress has sinks=0 and beside=True.

    Reference:
        A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression
    (https://arxiv.org/abs/2406.11430); kvpress's KnormPress.
    """

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        return shortness(prompt.keys)


def shortness(keys: Float[Array, "*N D"]) -> Float[Array, "*N"]:
    """How short keys are: their negative Euclidean norm, float32."""
    return -jnp.linalg.norm(keys.astype(jnp.float32), axis=-1)
