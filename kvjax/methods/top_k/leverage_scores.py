"""Leverage scores (Chari and Van Durme 2025): the prompt's tokens whose keys others cannot replace."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax import rope
from kvjax.methods.top_k.top_k_policy import TopKPolicy, prompt_mask
from kvjax.policy import Prompt, check_min
from kvjax.shared.per_head import per_head

RIDGE = 1e-2  # added to the Gram matrix, as in kvpress
RIDGE_GROWTH = 10.0  # as in kvpress, until float32 has a Cholesky factor


@dataclasses.dataclass(frozen=True)
class LeverageScores(TopKPolicy):
    """Keeps the tokens whose keys have the largest statistical leverage k' (K' K)^-1 k. It needs no queries.

    These are outliers: without them, a direction of the centered keys K would be lost. Inherited settings: see
    `TopKPolicy`. The paper uses sinks=0 and reserve_decode_slots=True.

    Attributes:
        rotated: whether stored keys are used, after RoPE. Otherwise RoPE is undone first, which needs
            `CacheSpec.rope_frequencies`.
        sketch: dimensions of a Gaussian sketch of the keys (48 in the paper). None for the keys themselves, whose Gram
            matrix is small enough.

    Reference:
        Compactor, section 3.1 (https://arxiv.org/abs/2507.08143); LeverageScorePress of kvpress.
    """

    rotated: bool = False
    sketch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(1, sketch=self.sketch)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """Returns the leverage scores."""
        return leverage_scores(prompt, prompt_mask(prompt), self.rotated, self.sketch)


def leverage_scores(
    prompt: Prompt, among: Bool[Array, "B 1 T"], rotated: bool = False, sketch: int | None = None
) -> Float[Array, "B H_kv T"]:
    """Computes leverage scores of the prompt's keys.

    Args:
        among: tokens that count; the others get 0.

    Returns:
        The scores, float32.

    Raises:
        ValueError: if keys are not to be rotated and the cache has no RoPE frequencies.
    """
    keys, matrix = prompt.keys, None
    if not rotated:
        if prompt.rope_frequencies is None:
            raise ValueError("rotated=False needs CacheSpec.rope_frequencies; pass them, or rotated=True")
        keys = rope.unrotate(keys.astype(jnp.float32).swapaxes(1, 2), prompt.rope_frequencies).swapaxes(1, 2)
    if sketch is not None:
        matrix = jax.random.normal(jax.random.key(0), (keys.shape[3], sketch)) / sketch**0.5
    return per_head(functools.partial(leverage, sketch=matrix))(keys, jnp.broadcast_to(among, keys.shape[:3]))


def leverage(
    keys: Float[Array, "T D"], valid: Bool[Array, "T"], sketch: Float[Array, "D k"] | None = None
) -> Float[Array, "T"]:
    """Computes the statistical leverage of every valid key.

    If fewer distinct keys than dimensions make the Gram matrix singular, the ridge can be below its rounding errors.
    Then it grows until the Cholesky factor exists.

    Args:
        valid: keys that count.
        sketch: a matrix that reduces the dimensions of keys.

    Returns:
        Scores in [0, 1], float32.
    """
    keys, valid = keys.astype(jnp.float32), valid[:, None]
    mean = jnp.sum(jnp.where(valid, keys, 0.0), axis=0) / jnp.maximum(jnp.sum(valid), 1)
    centered = jnp.where(valid, keys - mean, 0.0)
    multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    centered = centered if sketch is None else multiply(centered, sketch)
    factor = _regularized_factor(multiply(centered.T, centered))
    half = jax.scipy.linalg.solve_triangular(factor, centered.T, lower=True)
    return jnp.sum(jnp.square(half), axis=0)


def _regularized_factor(gram: Float[Array, "D D"]) -> Float[Array, "D D"]:
    """Returns the Cholesky factor of a Gram matrix with the smallest ridge for which it exists."""

    def factorize(ridge: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, "D D"]]:
        return ridge, jnp.linalg.cholesky(gram + ridge * jnp.eye(gram.shape[0]))

    def fails(carry: tuple[Float[Array, ""], Float[Array, "D D"]]) -> Bool[Array, ""]:
        ridge, factor = carry
        return jnp.isnan(factor).any() & (ridge < jnp.trace(gram))

    return jax.lax.while_loop(fails, lambda carry: factorize(RIDGE_GROWTH * carry[0]), factorize(jnp.float32(RIDGE)))[1]
