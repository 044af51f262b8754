"""Helpers for policies that treat every KV head as a separate stream."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.distributed.collectives import global_heads, local_heads
from kvjax.state import ArrayField, batch_size, map_fields


def per_head(function: Callable[..., Any], *in_axes: int | None) -> Callable[..., Any]:
    """Maps a function of one head's arrays over batch rows and KV heads.

    Args:
        *in_axes: axis of KV heads of every argument; None for an argument that all heads of a row share. By default 0
            for all.

    Returns:
        The mapped function.
    """
    return jax.vmap(jax.vmap(function, in_axes=in_axes or 0))


def map_rows(function: Callable[..., Any], *trees: Any) -> Any:
    """Maps a function of one batch row over all rows, one after the other.

    A compiled product of matrices rounds differently in batches of different sizes. A result that depends on such
    rounding, such as a choice among equal scores, would make a row depend on its batch.

    Args:
        function: the function; receives states with one batch row and returns arrays whose first axis is that row.
        *trees: states; all rows share fields without a batch axis.

    Returns:
        The results of all rows.
    """

    def call(row: Int[Array, ""]) -> Any:
        """Calls the function with one row."""

        def take(field: ArrayField, leaf: Array) -> Array:
            return leaf if field.batch_axis is None else jax.lax.dynamic_slice_in_dim(leaf, row, 1, field.batch_axis)

        return jax.tree.map(lambda x: x[0], function(*(map_fields(take, tree) for tree in trees)))

    return jax.lax.map(call, jnp.arange(batch_size(trees[0])))


def stream_keys(row_keys: Key[Array, "B"], heads: int) -> Key[Array, "B H_kv"]:
    """Returns one PRNG key per row and KV head.

    Args:
        row_keys: one PRNG key per row.
        heads: number of KV heads.

    Returns:
        Keys [B, H_kv].
    """
    return jax.vmap(lambda key: local_heads(jax.random.split(key, global_heads(heads)), heads))(row_keys)


def draws_by_position(row_keys: Key[Array, "B"], positions: Int[Array, "B T"], heads: int) -> Float[Array, "B H_kv T"]:
    """Draws a uniform number in [0, 1) per row, KV head and token.

    A draw depends only on the row's key, the head and the token's position, not on how a stream is divided into blocks.

    Args:
        row_keys: one PRNG key per row.

    Returns:
        The draws, float32.
    """

    def draw_row(row_key: Key[Array, ""], positions: Int[Array, "T"]) -> Float[Array, "H T"]:
        """Draws the numbers of one row at its `positions`, for the heads on this device."""

        def draw(position: Int[Array, ""]) -> Float[Array, "H_all"]:
            return jax.random.uniform(jax.random.fold_in(row_key, position), (global_heads(heads),))

        return local_heads(jax.vmap(draw, out_axes=1)(positions), heads)

    return jax.vmap(draw_row)(row_keys, positions)


def replace_lowest(
    stored: Float[Array, "M"], arriving: Float[Array, "P"]
) -> tuple[Int[Array, "p"], Int[Array, "p"], Float[Array, "M"]]:
    """Chooses slots for new tokens, so that the M highest scores of stored and new tokens stay.

    Args:
        stored: scores of the slots; -inf in empty ones, which are filled first, from the lowest slot on.
        arriving: scores of the new tokens.

    Returns:
        Slots to overwrite (M where the new token is dropped), the new token for each, and the scores afterwards.
    """
    contested = min(stored.shape[0], arriving.shape[0])
    worst, slot = jax.lax.top_k(-stored, contested)
    best, source = jax.lax.top_k(arriving, contested)
    slot = jnp.where(best > -worst, slot, stored.shape[0])
    return slot, source, stored.at[slot].set(best, mode="drop")


def top_indices(score: Float[Array, "T"], valid: Bool[Array, "T"], count: int) -> Int[Array, "count"]:
    """Returns the indices of the valid tokens with the highest scores, in ascending order.

    Args:
        valid: tokens that may be chosen.
        count: number of indices; if there are fewer valid tokens, the others are arbitrary and come last.

    Returns:
        int32 indices.
    """
    top, index = jax.lax.top_k(jnp.where(valid, score, -jnp.inf), count)
    index = jnp.sort(jnp.where(jnp.isneginf(top), score.shape[0], index))
    return jnp.minimum(index, score.shape[0] - 1)
