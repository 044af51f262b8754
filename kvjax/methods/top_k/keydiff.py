"""KeyDiff (Park et al. 2025): the prompt's tokens whose keys differ most from the mean direction."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.top_k.top_k_policy import TopKPolicy, prompt_mask
from kvjax.policy import Prompt

MIN_NORM = 1e-12  # as in kvpress


@dataclasses.dataclass(frozen=True)
class KeyDiff(TopKPolicy):
    """Keeps the tokens whose keys are least similar to the mean direction of the prompt's keys. It needs no queries.

    The paper evicts blocks while it reads a prompt. Here, as in kvpress, all keys are compared at once. Inherited
    settings: see `TopKPolicy`. kvpress uses sinks=0.

    Reference:
        KeyDiff (https://arxiv.org/abs/2504.15364); KeyDiffPress of kvpress.
    """

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """Returns the negative cosine similarity to the mean direction of the prompt's keys."""
        keys = jnp.where(prompt_mask(prompt)[..., None], prompt.keys.astype(jnp.float32), 0.0)
        directions = _normalize(keys)
        return -jnp.sum(directions * _normalize(jnp.sum(directions, axis=-2, keepdims=True)), axis=-1)


def _normalize(x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), MIN_NORM)
