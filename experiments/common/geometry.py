"""What is measured of keys as vectors."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax import rope


def unit(keys: Float[np.ndarray, "... D"]) -> Float[np.ndarray, "... D"]:
    return keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-30)


def mean_cosines(keys: Float[np.ndarray, "R n D"], farthest: int) -> Float[np.ndarray, "R farthest"]:
    """The mean over all pairs at each distance 1, 2, ... of unit keys: an autocorrelation, by Fourier transform."""
    tokens = keys.shape[1]
    spectrum = np.fft.rfft(keys.astype(np.float64), n=2 * tokens, axis=1)
    products = np.fft.irfft(np.sum(np.abs(spectrum) ** 2, axis=2), n=2 * tokens, axis=1)
    return products[:, 1 : farthest + 1] / (tokens - np.arange(1, farthest + 1))


def unrotated(
    keys: Float[np.ndarray, "R n H_kv D"], frequencies: Float[Array, "half_D"]
) -> Float[np.ndarray, "R n H_kv D"]:
    """Keys as they were before RoPE: turned back by their positions."""
    return np.asarray(rope.unrotate(jnp.asarray(keys), frequencies))
