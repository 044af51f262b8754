"""Leverage scores (Chari and Van Durme 2025): the prompt's tokens whose keys no combination of others replaces."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax import rope
from kvjax.policy import Prompt, check_min
from kvjax.structures.per_head import per_head
from kvjax.top_k_policy import TopKPolicy, prompt_mask

RIDGE = 1e-2  # added to the Gram matrix, as kvpress does


@dataclasses.dataclass(frozen=True)
class LeverageScores(TopKPolicy):
    """Keeps the tokens whose keys have the largest statistical leverage k' (K' K)^-1 k among the prompt's, centred:
    outliers, without which a direction of the keys would be lost. No query is needed.

    Attributes:
        budget, sinks, recent, beside, shares, compact_every: as in `TopKPolicy`. Published with sinks=0 and beside=True.
        rotated: keys as they are stored, rather than as they were before their position turned them (which needs
            `spec.rope_frequencies`).
        sketch: dimensions of a Gaussian sketch of the keys, as published (48); None: the keys themselves, whose Gram
            matrix is small enough.

    Reference:
        Compactor, section 3.1 (https://arxiv.org/abs/2507.08143); kvpress's LeverageScorePress.
    """

    rotated: bool = False
    sketch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(1, sketch=self.sketch)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        return leverage_scores(prompt, prompt_mask(prompt), self.rotated, self.sketch)


def leverage_scores(
    prompt: Prompt, among: Bool[Array, "B 1 T"], rotated: bool = False, sketch: int | None = None
) -> Float[Array, "B H_kv T"]:
    """The statistical leverage of a prompt's keys among some of them, 0 for the others; float32.

    Args:
        rotated, sketch: as in `LeverageScores`.

    Raises:
        ValueError: for a cache that was not told the frequencies, but for `rotated` keys.
    """
    keys = prompt.keys if rotated else unrotated(prompt, prompt.keys)
    matrix = None
    if sketch is not None:
        matrix = jax.random.normal(jax.random.key(0), (keys.shape[3], sketch)) / sketch**0.5
    of_head = lambda keys, valid: leverage(keys, valid, matrix)  # noqa: E731
    return per_head(of_head)(keys, jnp.broadcast_to(among, keys.shape[:3]))


def leverage(
    keys: Float[Array, "T D"], valid: Bool[Array, "T"], sketch: Float[Array, "D k"] | None = None
) -> Float[Array, "T"]:
    """The statistical leverage of every valid key among them, in [0, 1]."""
    keys, valid = keys.astype(jnp.float32), valid[:, None]
    mean = jnp.sum(jnp.where(valid, keys, 0.0), axis=0) / jnp.maximum(jnp.sum(valid), 1)
    centred = jnp.where(valid, keys - mean, 0.0)
    centred = centred if sketch is None else centred @ sketch
    gram = centred.T @ centred + RIDGE * jnp.eye(centred.shape[1])
    half = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(gram), centred.T, lower=True)
    return jnp.sum(jnp.square(half), axis=0)


def unrotated(prompt: Prompt, x: Float[Array, "B H T D"]) -> Float[Array, "B H T D"]:
    """What stood at a prompt's positions before these turned it, float32.

    Raises:
        ValueError: for a cache that was not told the frequencies.
    """
    if prompt.rope_frequencies is None:
        raise ValueError(
            "keys before their position turned them need spec.rope_frequencies; give these, or rotated=True"
        )
    return rope.unrotate(x.astype(jnp.float32).swapaxes(1, 2), prompt.rope_frequencies).swapaxes(1, 2)
