"""Updates of one structure per row and KV head with the tokens of a prompt or of a compaction (SubGen)."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from kvjax.shared.per_head import per_head

PROMPT_BLOCK = 1024  # tokens of a prompt per update
# Tokens that accelerators assign to clusters, and centers that they compare, at a time: a GPU waits for the host in
# every iteration of a loop.
PARALLEL_BLOCK = 512

T = TypeVar("T")  # the structures of one head, or of all rows and heads
# Maps one head's structures, keys, values and valid tokens to the updated structures. `block` is the number of tokens
# that are assigned, and of centers that are compared, at a time; it does not change the result.
Extend = Callable[..., T]


def extend_all(extend: Extend[T], streams: T, *tokens: Shaped[Array, "B H T *D"]) -> T:
    """Takes a few tokens into the structures of all rows and heads.

    Accelerators update all streams in parallel. A CPU updates them one after the other, because in parallel every
    stream would repeat the work of the one whose table is full.

    Args:
        extend: updates the structures of one head.
        streams: structures of all rows and heads.
        *tokens: keys [B, H, T, D], values [B, H, T, D_v] and valid tokens [B, H, T].

    Returns:
        The structures.
    """
    in_sequence = functools.partial(_fill_in_sequence, extend)
    in_parallel = per_head(functools.partial(extend, block=PARALLEL_BLOCK))
    return jax.lax.platform_dependent(streams, *tokens, cpu=in_sequence, default=in_parallel)


def fill(extend: Extend[T], streams: T, *tokens: Shaped[Array, "B H T *D"]) -> T:
    """Takes a prompt's valid tokens in, block by block; see `extend_all` for the arguments.

    A GPU updates all streams in parallel, because every iteration of a loop waits for the host; other devices update
    one stream after the other.

    Returns:
        The structures.
    """
    in_sequence = functools.partial(_fill_in_sequence, extend)
    in_parallel = functools.partial(_fill_in_parallel, extend)
    return jax.lax.platform_dependent(streams, *tokens, cuda=in_parallel, default=in_sequence)


def _fill_in_sequence(extend: Extend[T], streams: T, *tokens: Shaped[Array, "B H T *D"]) -> T:
    def extend_block(streams: T, block: tuple[Array, ...]) -> tuple[T, None]:
        return extend(streams, *block), None

    def fill_head(head: tuple[Any, ...]) -> T:
        return jax.lax.scan(extend_block, head[0], head[1:])[0]

    return jax.lax.map(lambda row: jax.lax.map(fill_head, row), (streams, *map(_blocks, tokens)))


def _fill_in_parallel(extend: Extend[T], streams: T, *tokens: Shaped[Array, "B H T *D"]) -> T:
    extend_heads = per_head(functools.partial(extend, block=PARALLEL_BLOCK))

    def extend_block(streams: T, block: tuple[Array, ...]) -> tuple[T, None]:
        return extend_heads(streams, *block), None

    return jax.lax.scan(extend_block, streams, tuple(jnp.moveaxis(_blocks(x), 2, 0) for x in tokens))[0]


def _blocks(x: Shaped[Array, "B H T *D"]) -> Shaped[Array, "B H N block *D"]:
    """Divides the tokens of an array into padded blocks."""
    block = min(PROMPT_BLOCK, x.shape[2])
    x = jnp.pad(x, [(0, -x.shape[2] % block if axis == 2 else 0) for axis in range(x.ndim)])
    return x.reshape(*x.shape[:2], -1, block, *x.shape[3:])
