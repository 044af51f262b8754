"""Predicts the scores of tokens from the input of attention; see `kvjax_models.profile`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def predict_log_scores(
    scorer: Float[Array, "W+2 H_kv"], x: Float[Array, "*B T W"], first: Int[Array, "*#B"] | int = 0
) -> Float[Array, "*B T H_kv"]:
    """Predicts the log of the scores of tokens; can be used in `jax.jit`.

    Args:
        scorer: the layer's coefficients, `Profile.scorer[layer]`.
        x: normalized residual stream of consecutive tokens.
        first: position of the first token, or of each row's.

    Returns:
        Log scores, float32.
    """
    scorer, x = jnp.asarray(scorer, jnp.float32), x.astype(jnp.float32)
    position = jnp.log1p(jnp.asarray(first)[..., None] + jnp.arange(x.shape[-2], dtype=jnp.float32))[..., None]
    predicted = jnp.matmul(x, scorer[:-2], precision=jax.lax.Precision.HIGHEST)
    return predicted + scorer[-2] + position * scorer[-1]
