"""Chooses next tokens from logits: greedily, or randomly with temperature, top-k and top-p, with one key per batch row.

A row of NaN has no valid token, but argmax returns one. A generation loop therefore calls `is_finite` at every step,
accumulates the result in its state, and raises an error when it reads the state on the host:

    failed = failed | ~is_finite(logits)
    tokens = sample(logits, keys, sampling)
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

MIN_TEMPERATURE = 1e-30  # far above the smallest float32 numbers, which devices flush to zero


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters; hashable, so they can be a static argument of a jitted function.

    Attributes:
        temperature: divisor of the logits; 0 selects the most likely token and needs no randomness.
        top_k: sample among the k most likely tokens; None: all.
        top_p: sample among the smallest set of most likely tokens whose probability reaches p, after top_k; None: all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        """Checks the parameters.

        Raises:
            ValueError: if one is invalid.
        """
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf):
            raise ValueError(
                f"temperature={self.temperature} must be 0 (greedy), or finite and at least {MIN_TEMPERATURE}"
            )
        if self.top_k is not None and (
            isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 1
        ):
            raise ValueError(f"top_k={self.top_k} must be an integer of at least 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be greater than 0 and at most 1, or None for all tokens")


def sample(logits: Float[Array, "B V"], keys: Key[Array, "B"] | None, sampling: Sampling) -> Int[Array, "B"]:
    """Samples one token per row; the token of a row depends only on its logits and its key.

    Temperature, top-k and top-p are applied in this order, as in transformers. Among equal logits, the smaller token id
    counts as more likely, so that top-k keeps exactly k tokens (transformers keeps all ties with the last one).

    Args:
        logits: finite logits of any float dtype (see `is_finite`); computed in float32.
        keys: one typed key per row (`jax.random.key`), new for every step; may be None for greedy sampling.
        sampling: sampling parameters, static under jit.

    Returns:
        Token ids, int32.

    Raises:
        ValueError: if shapes or dtypes of logits and keys are invalid.
    """
    if logits.ndim != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be floats of shape [B, V], got {logits.dtype}{list(logits.shape)}")
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if keys is None or not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.shape != logits.shape[:1]:
        actual = None if keys is None else f"{keys.dtype}{list(keys.shape)}"
        raise ValueError(
            f"keys must be {logits.shape[0]} typed keys, one per row (jax.random.split(key, B)), got {actual}"
        )

    scaled = logits.astype(jnp.float32)
    # Relative to the maximum: at low temperatures the logits themselves would overflow.
    scaled = (scaled - jnp.max(scaled, axis=-1, keepdims=True)) / sampling.temperature
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    if sampling.top_k is None and top_p == 1:
        return _categorical(keys, scaled)
    # Chosen among sorted candidates, which avoids a scatter over the vocabulary.
    candidates, tokens = jax.lax.top_k(scaled, min(sampling.top_k or scaled.shape[1], scaled.shape[1]))
    if top_p < 1:
        candidates = jnp.where(_nucleus(candidates, top_p), candidates, -jnp.inf)
    return jnp.take_along_axis(tokens, _categorical(keys, candidates)[:, None], axis=1)[:, 0]


def is_finite(logits: Float[Array, "B V"]) -> Bool[Array, "B"]:
    """Returns which rows have only finite logits; check before tokens are banned by -inf."""
    return jnp.isfinite(logits).all(axis=-1)


def _nucleus(logits: Float[Array, "B K"], top_p: float) -> Bool[Array, "B K"]:
    """Returns which tokens top-p keeps, given logits in descending order; includes the token that crosses p.

    Reference:
        Holtzman et al. 2020, section 3.1.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    return jnp.cumsum(probabilities, axis=-1) - probabilities < top_p


def _categorical(keys: Key[Array, "B"], logits: Float[Array, "B K"]) -> Int[Array, "B"]:
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
