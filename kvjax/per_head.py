"""What policies do head by head: mapping over rows and kv heads, randomness of a row's own, and who takes whose
slot."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.collectives import heads_in_all, own_heads


def per_head(function: Callable[..., Any], *in_axes: int | None) -> Callable[..., Any]:
    """Maps a function of one head's stream over rows and kv heads. In-axes are those over heads (0 where none are
    given); None is for an argument that all heads of a row share."""
    return jax.vmap(jax.vmap(function, in_axes=in_axes or 0))


def stream_keys(row_keys: Key[Array, "B"], heads: int) -> Key[Array, "B H_kv"]:
    """A random key of its own for every row's every kv head."""
    return jax.vmap(lambda key: own_heads(jax.random.split(key, heads_in_all(heads)), heads))(row_keys)


def draws_by_position(row_keys: Key[Array, "B"], positions: Int[Array, "B T"], heads: int) -> Float[Array, "B H_kv T"]:
    """A uniform number in [0, 1) for every row, head and token, which depends on the row's key, the head and the
    token's position alone, and so not on how a stream is cut into blocks."""

    def of_row(row_key: Key[Array, ""], positions: Int[Array, "T"]) -> Float[Array, "H T"]:
        draw = lambda position: jax.random.uniform(jax.random.fold_in(row_key, position), (heads_in_all(heads),))  # noqa: E731
        return own_heads(jax.vmap(draw, out_axes=1)(positions), heads)

    return jax.vmap(of_row)(row_keys, positions)


def replace_lowest(
    stored: Float[Array, "M"], fresh: Float[Array, "P"]
) -> tuple[Int[Array, "p"], Int[Array, "p"], Float[Array, "M"]]:
    """Which slots are taken over by which newcomers so that the M largest scores of both stay.

    The smallest stored scores meet the largest new ones, pair by pair: the newcomer stays where it is larger. Empty
    slots, at -inf, lose first, the lowest slot first. A slot of M means that the newcomer is dropped.

    Returns:
        Slots, newcomers, and the scores that are then stored.
    """
    contested = min(stored.shape[0], fresh.shape[0])
    worst, slot = jax.lax.top_k(-stored, contested)
    best, source = jax.lax.top_k(fresh, contested)
    slot = jnp.where(best > -worst, slot, stored.shape[0])
    return slot, source, stored.at[slot].set(best, mode="drop")


def largest(score: Float[Array, "T"], valid: Bool[Array, "T"], room: int) -> Int[Array, "room"]:
    """The valid tokens of largest score, in the order of the text; what follows them is any token."""
    top, index = jax.lax.top_k(jnp.where(valid, score, -jnp.inf), room)
    index = jnp.sort(jnp.where(jnp.isneginf(top), score.shape[0], index))
    return jnp.minimum(index, score.shape[0] - 1)
