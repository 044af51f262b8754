"""Next tokens from logits: greedy, or sampled with temperature, top-k and top-p, each row with its own key.

Logits that are not finite have no right token, and no value of a token could say so: the index that argmax gives for a
row of NaN is an ordinary one. A generation loop therefore asks `finite` at every step, carries the answer (a counter
or a flag per row, beside the tokens), and raises when it next looks at it on the host:

    failed = failed | ~is_finite(logits)
    tokens = sample(logits, keys, options)
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

MIN_TEMPERATURE = 1e-30  # far from the smallest numbers of float32, which devices take for zero


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; hashable, so it can be a static argument.

    Args:
        temperature: divides the logits; 0 takes the most likely token and needs no randomness.
        top_k: only the k most likely tokens; None for all.
        top_p: only the smallest set of most likely tokens whose probability reaches p, taken among what top_k left;
            None (or 1) for all.

    Raises:
        ValueError: names the argument and its value.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf):
            raise ValueError(
                f"temperature={self.temperature} must be finite, and 0 (greedy) or at least {MIN_TEMPERATURE}"
            )
        if self.top_k is not None and (
            isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 1
        ):
            raise ValueError(f"top_k={self.top_k} must be a whole number of tokens, at least 1, or None for all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be over 0 and at most 1, or None for all")


def sample(logits: Float[Array, "B V"], keys: Key[Array, "B"] | None, options: Sampling) -> Int[Array, "B"]:
    """One token per row, int32; a row gets the token that it gets alone with its key.

    Args:
        logits: any float dtype, finite (see `finite`); computed in float32.
        keys: one typed key per row (`jax.random.key`), fresh for every step; None will do when greedy.
        options: static under jit.

    Raises:
        ValueError: shapes or kinds of logits and keys do not fit.

    The order is that of transformers: temperature, top-k, top-p. Of equal logits the lower token counts as the more
    likely one, so that top-k keeps exactly k (transformers keeps all that tie with the last).
    """
    if logits.ndim != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be floats [B, V], not {logits.dtype}{list(logits.shape)}")
    if options.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if keys is None or not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.shape != logits.shape[:1]:
        given = None if keys is None else f"{keys.dtype}{list(keys.shape)}"
        raise ValueError(f"keys={given} must be {logits.shape[0]} typed keys, one per row: jax.random.split(key, B)")

    scaled = logits.astype(jnp.float32)
    # By distance to the best: at low temperatures the logits themselves would be infinite.
    scaled = (scaled - jnp.max(scaled, axis=-1, keepdims=True)) / options.temperature
    top_p = 1.0 if options.top_p is None else options.top_p
    if options.top_k is None and top_p == 1:
        return _categorical(keys, scaled)
    # Chosen among sorted candidates and mapped back: no scatter of a mask over the vocabulary.
    candidates, tokens = jax.lax.top_k(scaled, min(options.top_k or scaled.shape[1], scaled.shape[1]))
    if top_p < 1:
        candidates = jnp.where(_nucleus(candidates, top_p), candidates, -jnp.inf)
    return jnp.take_along_axis(tokens, _categorical(keys, candidates)[:, None], axis=1)[:, 0]


def is_finite(logits: Float[Array, "B V"]) -> Bool[Array, "B"]:
    """Which rows' logits are all finite: the others have no token to choose. An -inf that bans a token counts as not
    finite, so ask before banning."""
    return jnp.isfinite(logits).all(axis=-1)


def _nucleus(descending: Float[Array, "B K"], top_p: float) -> Bool[Array, "B K"]:
    """The tokens that top-p keeps: those before which less than p has been gathered, the crossing one included.

    Source: Holtzman et al. 2020, section 3.1.
    """
    probabilities = jax.nn.softmax(descending, axis=-1)
    return jnp.cumsum(probabilities, axis=-1) - probabilities < top_p


def _categorical(keys: Key[Array, "B"], logits: Float[Array, "B K"]) -> Int[Array, "B"]:
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
