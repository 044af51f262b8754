"""Rotary position embedding (RoPE): models apply it, and caches that re-index positions undo it.

Reference:
    RoFormer (Su et al. 2021), equation 13.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotation(
    positions: Int[Array, "B T"], frequencies: Float[Array, "half_D"]
) -> tuple[Float[Array, "B T half_D"], Float[Array, "B T half_D"]]:
    """Computes cosine and sine of every position's angles, float32.

    Args:
        positions: absolute or relative positions, possibly negative.
        frequencies: angle per position of each pair of dimensions.

    Returns:
        Cosines and sines.
    """
    angles = positions[..., None].astype(jnp.float32) * frequencies.astype(jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B T H D"], cos: Float[Array, "B T half_D"], sin: Float[Array, "B T half_D"]
) -> Float[Array, "B T H D"]:
    """Rotates the pairs (i, i + D/2) of every head, the pairing of Hugging Face checkpoints."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def unrotate(x: Float[Array, "B T H D"], frequencies: Float[Array, "half_D"]) -> Float[Array, "B T H D"]:
    """Undoes the rotation of vectors at positions 0, 1, ...

    Args:
        x: rotated vectors.
        frequencies: angle per position of each pair of dimensions.

    Returns:
        The vectors before the rotation.
    """
    return rotate(x, *rotation(-jnp.arange(x.shape[1])[None], frequencies))
