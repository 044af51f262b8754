"""The definition of `select_blocks`: clusters in descending order of score, cut at both limits."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Limits(NamedTuple):
    """The limits of a selection.

    Attributes:
        max_tokens: The budget.
        max_blocks: K, the largest number of blocks.
        block_size: Tokens per block.
    """

    max_tokens: int
    max_blocks: int
    block_size: int


class SelectedBlocks(NamedTuple):
    """The selected blocks of a store.

    Attributes:
        block_indices: The blocks, int32, in an order that depends on the implementation. Unused slots come last and
            are 0.
        block_lengths: The tokens that are selected of each block, its first ones, int32; 0 in unused slots.
        selected_tokens: The tokens that are selected of each cluster, int32.
    """

    block_indices: Int[Array, "K"]
    block_lengths: Int[Array, "K"]
    selected_tokens: Int[Array, "C"]


def select_blocks(
    scores: Float[Array, "C"], sizes: Int[Array, "C"], first_blocks: Int[Array, "C"], *, limits: Limits
) -> SelectedBlocks:
    """Computes `select_blocks`; blocks are in descending order of their clusters' scores."""
    max_tokens, max_blocks, block_size = limits
    order = jnp.argsort(jnp.where(jnp.isnan(scores), -jnp.inf, scores), descending=True, stable=True)
    size = sizes[order]
    tokens = jnp.clip(max_tokens - (jnp.cumsum(size) - size), 0, size)
    blocks = -(-tokens // block_size)
    begin = jnp.cumsum(blocks) - blocks
    blocks = jnp.clip(max_blocks - begin, 0, blocks)
    tokens = jnp.minimum(tokens, blocks * block_size)
    slot = jnp.arange(max_blocks)[:, None]
    place = slot - begin  # of the slot among the blocks of each cluster
    is_in_slot = (place >= 0) & (place < blocks)
    indices = jnp.sum(jnp.where(is_in_slot, first_blocks[order] + place, 0), axis=1, dtype=jnp.int32)
    lengths = jnp.clip(tokens - block_size * place, 0, block_size)
    lengths = jnp.sum(jnp.where(is_in_slot, lengths, 0), axis=1, dtype=jnp.int32)
    return SelectedBlocks(indices, lengths, jnp.zeros_like(sizes).at[order].set(tokens))
