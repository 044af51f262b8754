"""Norms of keys, queries and values, which the guarantees of SubGen and BalanceKV depend on exponentially."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Norms(NamedTuple):
    """The largest l2 norms of a stream, before attention's factor 1 / sqrt(D)."""

    key: float
    query: float
    value: float


def measured_norms(
    queries: Float[Array, "... D"], keys: Float[Array, "... D"], values: Float[Array, "... D_v"]
) -> Norms:
    """The largest norms of the given vectors, for `subgen_settings` and `balancekv_settings`. Call it outside jit.

    Raises:
        ValueError: for vectors that are not finite.
    """
    found = {}
    for name, vectors in {"key": keys, "query": queries, "value": values}.items():
        norm = float(jnp.max(jnp.linalg.norm(vectors.astype(jnp.float32), axis=-1)))
        if not norm < float("inf"):
            raise ValueError(f"the {name} vectors are not all finite: their largest norm is {norm}")
        found[name] = norm
    return Norms(**found)
