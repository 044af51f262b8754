"""Updates of one structure per row and KV head with the tokens of a prompt or of a compaction (SubGen)."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.structures.per_head import per_head

PROMPT_BLOCK = 1024  # tokens of a prompt per update

T = TypeVar("T")  # the structures of one head, or of all rows and heads
Extend = Callable[..., T]  # maps one head's structures, keys, values and valid tokens to the updated structures


def extend_all(
    extend: Extend[T],
    streams: T,
    keys: Float[Array, "B H T D"],
    values: Float[Array, "B H T D_v"],
    valid: Bool[Array, "B T"],
) -> T:
    """Takes a few tokens into the structures of all rows and heads.

    Accelerators update all streams in parallel. A CPU updates them one after the other, because in parallel every
    stream would repeat the work of the one whose table is full.

    Args:
        extend: updates the structures of one head.
        streams: structures of all rows and heads.
        keys: keys of the tokens.
        values: values of the tokens.
        valid: tokens that count.

    Returns:
        The structures.
    """
    in_sequence = functools.partial(fill, extend)
    in_parallel = per_head(extend, 0, 0, 0, None)
    return jax.lax.platform_dependent(streams, keys, values, valid, cpu=in_sequence, default=in_parallel)


def fill(
    extend: Extend[T],
    streams: T,
    keys: Float[Array, "B H T D"],
    values: Float[Array, "B H T D_v"],
    valid: Bool[Array, "B T"],
) -> T:
    """Takes a prompt's valid tokens in, one stream after the other.

    Args:
        extend: updates the structures of one head.
        streams: structures of all rows and heads.
        keys: keys of the prompt.
        values: values of the prompt.
        valid: tokens that count.

    Returns:
        The structures.
    """
    batch, heads, tokens, _ = keys.shape
    block = min(PROMPT_BLOCK, tokens)
    padding = -tokens % block
    valid = jnp.pad(valid, ((0, 0), (0, padding))).reshape(batch, -1, block)

    def blocks(x: Float[Array, "B H T D"]) -> Float[Array, "B H n block D"]:
        """Divides the tokens of `x` into padded blocks."""
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0)))
        return x.reshape(batch, heads, -1, block, x.shape[3])

    def fill_row(row: tuple[T, Array, Array, Array]) -> T:
        """Extends the structures of one `row`, head by head and block by block."""
        streams, keys, values, valid = row

        def extend_block(streams: T, block: tuple[Array, Array, Array]) -> tuple[T, None]:
            return extend(streams, *block), None

        def fill_head(head: tuple[T, Array, Array]) -> T:
            return jax.lax.scan(extend_block, head[0], (head[1], head[2], valid))[0]

        return jax.lax.map(fill_head, (streams, keys, values))

    return jax.lax.map(fill_row, (streams, blocks(keys), blocks(values), valid))
