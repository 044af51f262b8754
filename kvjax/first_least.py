"""The least of each row and where it stands: what a plain argmin gives, at the speed of two reductions."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def first_least(x: Float[Array, "... K"]) -> tuple[Float[Array, "..."], Int[Array, "..."]]:
    """The least along the last axis and the first place (int32) where it stands; 0 where all are infinite.

    XLA:CPU vectorises two plain reductions, an argmin it does not.
    """
    least = jnp.min(x, axis=-1)
    place = jnp.arange(x.shape[-1], dtype=jnp.int32)
    return least, jnp.min(jnp.where(x <= least[..., None], place, x.shape[-1] - 1), axis=-1)
