"""Finds the tokens of a text that every KV head of a cache keeps.

1. The model computes the text layer by layer, as in `Generator.prefill`.
2. Every layer is compressed again by its policy, with the random keys of the text's state and without quantization.
3. The values of the entries are differentiated with respect to the values of the tokens.
4. A copy of a token has the derivative 1, and a mean of n tokens the derivative 1/n with respect to each of them.
5. The choices of a policy are discrete and have no derivative, so that any policy can be differentiated.
6. One derivative with D value dimensions serves D - 1 positions: each changes another dimension.
7. All tokens change the first dimension, whose derivative is the sum over the tokens of an entry.
8. A derivative divided by that sum is a token's share of the entry's slot, and the shares of a token are added up.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

import kvjax
from kvjax.segment import BlockStoreRead, Segment
from kvjax_models.runner.generator import Generator, prefill_for
from kvjax_models.runner.prefill import prefill_cache
from kvjax_models.runner.state import init_layers, row_seeds

_MAX_NEGATIVE = 1e-3  # share that rounding may make negative


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
        raise ValueError("a streaming prefill never has all tokens of a layer; read the text without streaming")
    layers, _, lengths = prefill_for([generator], [tokens], shared_lengths=False)
    specs = tuple(replace(spec, dtype=jnp.float32, kv_dtype=None) for spec in generator.specs)
    caches = init_layers(generator.policies, specs, None, row_seeds(generator.batch, seed))
    kept, carry = [], None
    for policy, (cache, counters), layer in zip(generator.policies, caches, layers, strict=True):
        shares, carry = _layer_shares(cache, counters, lengths, carry, layer.inputs_for(cache.policy))
        kept.append(np.asarray(shares)[:, : len(tokens)])
        if kept[-1].min() < -_MAX_NEGATIVE:
            raise ValueError(
                f"{policy} fits its values to the attention of the text, so that its entries are not means of tokens; "
                "use a policy that selects or merges tokens"
            )
    return np.maximum(kept, 0)


@jax.jit
def _layer_shares(
    cache: kvjax.Cache,
    counters: kvjax.Counters,
    lengths: Int[Array, "1"],
    layer_carry: Shaped[Array, "1 H_kv *N"] | None,
    inputs: dict[str, Any],
) -> tuple[Float[Array, "H_kv N"], Shaped[Array, "1 H_kv *N"] | None]:
    """Compresses a layer and returns the shares of all tokens.

    Args:
        layer_carry: the second result for the previous layer.
        inputs: further arguments of `kvjax.prefill`.

    Returns:
        The shares, and the carry for the next layer.
    """
    _, tokens, kv_heads, dim = inputs["values"].shape

    def compress(values: Array) -> tuple[list[Array], Any]:
        """Returns the values of all segments, and what else is needed of them."""
        filled, _, carry = prefill_cache(cache, counters, lengths, layer_carry, inputs | {"values": values})
        retrieves, entries, numbers = jnp.zeros(kv_heads, bool), [], []
        for one in filled.policy.segments(filled.state, jnp.zeros((1, 1), jnp.int32)):
            heads = jnp.arange(kv_heads) if one.kv_heads is None else jnp.asarray(one.kv_heads)
            if isinstance(one, BlockStoreRead):
                retrieves = retrieves.at[heads].set(True)
            elif one.values is not None:
                entries.append(jnp.asarray(one.values)[0])
                numbers.append((heads, _is_occupied(one)))
        return entries, (retrieves, numbers, carry)

    _, derivative, (retrieves, numbers, carry) = jax.linearize(
        compress, inputs["values"].astype(jnp.float32), has_aux=True
    )

    def block_shares(first: Array) -> Float[Array, "H_kv P"]:
        """Returns the shares of P = D - 1 tokens from position `first` on."""
        is_position = jnp.arange(tokens)[:, None] == first + jnp.arange(dim - 1)
        change = jnp.concatenate([jnp.ones((tokens, 1)), is_position], axis=1)[None, :, None]
        shares = jnp.zeros((kv_heads, dim - 1))
        for change_of_entries, (heads, is_occupied) in zip(
            derivative(jnp.broadcast_to(change, inputs["values"].shape)), numbers, strict=True
        ):
            total = change_of_entries[..., :1]
            is_token = is_occupied[..., None] & (total != 0)
            share = jnp.where(is_token, change_of_entries[..., 1:] / jnp.where(is_token, total, 1), 0)
            shares = shares.at[heads].add(jnp.sum(share, axis=1))
        return shares

    blocks = jax.lax.map(block_shares, jnp.arange(0, tokens, dim - 1))
    shares = jnp.moveaxis(blocks, 0, 1).reshape(kv_heads, -1)[:, :tokens]
    return jnp.where(retrieves[:, None], 1.0, shares), carry


def _is_occupied(segment: Segment) -> Bool[Array, "H S"]:
    """Returns which slots of a segment of one batch row add to the numerator of attention."""
    slot = jnp.arange(segment.keys.shape[2])
    is_occupied = jnp.ones(segment.keys.shape[1:3], bool)
    if segment.start is not None:
        is_occupied &= slot >= segment.start[0, -1]
    if segment.stop is not None:
        is_occupied &= slot < segment.stop[0, -1]
    return is_occupied if segment.log_num is None else is_occupied & (segment.log_num[0] > -jnp.inf)
