"""KeyDiff (Park et al. 2025): the prompt's tokens whose keys are least like the others."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.policy import Prompt
from kvjax.top_k_policy import TopKPolicy, prompt_mask

TINY = 1e-12  # least norm that is divided by, as in kvpress


@dataclasses.dataclass(frozen=True)
class KeyDiff(TopKPolicy):
    """Keeps the tokens whose keys have the least cosine similarity to the mean direction of the prompt's keys. No query
    is needed.

    Attributes:
        budget, sinks, recent, beside, shares, compact_every: as in `TopKPolicy`. kvpress has sinks=0. The paper evicts
            block by block while it reads a prompt; here, and in kvpress, all keys are compared at once.

    Reference:
        KeyDiff (https://arxiv.org/abs/2504.15364); kvpress's KeyDiffPress.
    """

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        return key_difference(prompt.keys, prompt_mask(prompt))


def key_difference(keys: Float[Array, "*N T D"], valid: Bool[Array, "*#N T"]) -> Float[Array, "*N T"]:
    """The negative cosine similarity of keys to the mean of all valid ones' directions, in [-1, 1], float32."""
    keys = jnp.where(valid[..., None], keys.astype(jnp.float32), 0.0)
    direction = _normalised(keys)
    return -jnp.sum(direction * _normalised(jnp.sum(direction, axis=-2, keepdims=True)), axis=-1)


def _normalised(x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), TINY)
