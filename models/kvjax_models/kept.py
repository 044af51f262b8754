"""Finds the tokens of a text that every KV head of a cache keeps.

1. The model computes the text layer by layer, as in `Generator.prefill`.
2. Every layer is compressed again by its policy, with the random keys of the text's state and without quantization.
3. This time the values have more dimensions: a constant, and one dimension for each position of a block of positions.
4. A token's value is `MARK` in the constant and in the dimension of its position, and 0 in the others.
5. The marks are too small to change the norm of a value in float32, so that the policy makes the same choices.
6. A copy of a token has its mark, and the mean of n tokens has the n marks divided by n.
7. A mark divided by the entry's constant is the token's share of the entry's slot, and a token's shares are added up.
8. Texts whose marks exceed `MAX_ELEMENTS` are compressed several times, each time with another block of positions.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

import kvjax
from kvjax.cache import with_counters
from kvjax.segment import BlockStoreRead, Segment
from kvjax.stores.staging import Counters
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.prefill import compression_arguments
from kvjax_models.generation.state import check_seed, init_layers

# A power of two, whose multiples are exact. Its square is lost in a float32 sum with the square of a value.
MARK = 2.0**-40
MAX_ELEMENTS = 2**24  # of one layer's marks
MIN_BLOCK = 64  # positions
_MAX_NEGATIVE = 1e-3  # share of a mark that rounding may make negative


def kept_shares(generator: Generator, tokens: Sequence[int], seed: int = 0) -> Float[np.ndarray, "L H_kv T"]:
    """Returns the share of a slot that every token of a text has after `Generator.prefill`.

    A token with a slot to itself has 1, a token in the mean of n tokens 1/n, a dropped token 0. A policy that samples
    with replacement may draw a token several times; its shares are added up. The sum over the tokens is the number of
    occupied entries. A KV head that retrieves blocks holds all tokens. A layer with a sliding window holds its window.

    Args:
        generator: generator with one batch row.
        tokens: token ids of the text.
        seed: seed of the policies' random numbers.

    Returns:
        Shares, float32. In a quantized cache, they are the shares that the policy chooses without quantization.

    Raises:
        ValueError: if the generator is streaming or on a mesh, or an entry is not a mean of tokens.
    """
    if generator.mesh is not None:
        raise ValueError("the kept tokens are found on a single device; load the model without a mesh")
    if generator.streaming:
        raise ValueError("a streaming prefill has no tokens to compare with; create the prefix without streaming")
    layers, lengths = generator.prefilled_layers([tokens])
    kv_heads = generator.config.kv_heads
    block = min(max(MAX_ELEMENTS // (kv_heads * len(tokens)), MIN_BLOCK), len(tokens))
    specs = tuple(
        replace(spec, dtype=jnp.float32, kv_dtype=None, value_dim=spec.head_dim + 1 + block) for spec in generator.specs
    )
    caches = init_layers(generator.policies, specs, None, check_seed(seed))
    kept, carry = np.zeros((generator.config.layers, kv_heads, len(tokens)), np.float32), None
    for number, ((cache, counters), layer) in enumerate(zip(caches, layers, strict=True)):
        arguments, options = compression_arguments(cache, counters, layer, lengths, carry)
        for first in range(0, len(tokens), block):
            shares, new_carry = _block_shares(block, np.int32(first), *arguments, **options)
            kept[number, :, first : first + block] = np.asarray(shares)[:, : len(tokens) - first]
        carry = new_carry
        if kept[number].min() < -_MAX_NEGATIVE:
            raise ValueError(
                f"{generator.policies[number]} fits its values to the attention of the text, so that its entries are "
                "not means of tokens; use a policy that selects or merges tokens"
            )
    return np.maximum(kept, 0)


@functools.partial(jax.jit, static_argnames=("block",))
def _block_shares(
    block: int,
    first: Int[Array, ""],
    cache: kvjax.Cache,
    counters: Counters,
    keys: Float[Array, "1 N H_kv D"],
    values: Float[Array, "1 N H_kv D"],
    *prompt: Any,
    **options: Any,
) -> tuple[Float[Array, "H_kv block"], Shaped[Array, "1 H_kv *N"] | None]:
    """Compresses a layer with marked values.

    Args:
        block: number of positions with marks.
        first: first position with a mark.
        cache: empty cache for values with marks, without counters.
        counters: its counters.
        keys: keys of the text.
        values: values of the text.
        *prompt: arguments of `kvjax.prefill` after the values.
        **options: options of `kvjax.prefill`.

    Returns:
        The shares of the block's tokens, and the carry for the next layer.
    """
    tokens, kv_heads = keys.shape[1:3]
    is_position = jnp.arange(tokens)[:, None] == first + jnp.arange(block)
    marks = MARK * jnp.concatenate([jnp.ones((tokens, 1)), is_position], axis=1)
    marks = jnp.broadcast_to(marks[None, :, None], (1, tokens, kv_heads, 1 + block))
    marked = jnp.concatenate([values.astype(jnp.float32), marks], axis=3)
    cache, carry = kvjax.prefill(with_counters(cache, counters), keys, marked, *prompt, **options)
    shares, retrieves = jnp.zeros((kv_heads, block)), jnp.zeros(kv_heads, bool)
    for one in cache.policy.segments(cache.state, jnp.zeros((1, 1), jnp.int32)):
        heads = jnp.arange(kv_heads) if one.kv_heads is None else one.kv_heads
        if isinstance(one, BlockStoreRead):
            retrieves = retrieves.at[heads].set(True)
        elif one.values is not None:
            shares = shares.at[heads].add(_segment_shares(one, values.shape[3]))
    return jnp.where(retrieves[:, None], 1.0, shares), carry


def _segment_shares(segment: Segment, value_dim: int) -> Float[Array, "H block"]:
    """Returns the sums of the tokens' shares over the occupied entries of a segment.

    Args:
        segment: segment of one batch row.
        value_dim: dimensions of a value before its marks.
    """
    values: Any = segment.values  # not quantized
    marks = values[0, ..., value_dim:].astype(jnp.float32)
    slot = jnp.arange(marks.shape[1])
    is_occupied = jnp.ones(marks.shape[:2], bool)
    for bound, is_inside in ((segment.start, jnp.greater_equal), (segment.stop, jnp.less)):
        if bound is not None:
            is_occupied &= is_inside(slot, bound[0, -1])
    if segment.log_num is not None:
        is_occupied &= segment.log_num[0] > -jnp.inf
    total = marks[..., 0]
    is_occupied &= total != 0
    weight = jnp.where(is_occupied, 1 / jnp.where(is_occupied, total, 1), 0)
    return jnp.sum(weight[..., None] * jnp.where(is_occupied[..., None], marks[..., 1:], 0), axis=1)
