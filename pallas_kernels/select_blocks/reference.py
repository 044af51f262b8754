"""`select_blocks` in jax.numpy: by sorting, which is fast on CPU, and by comparison of pairs, with few launches."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MAX_COMPARED = 2048  # clusters that accelerators compare pairwise faster than they sort them


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
    """Selects blocks by comparison on accelerators, for up to `MAX_COMPARED` clusters, and by sorting elsewhere.

    Args:
        scores: One score per cluster.
        sizes: The tokens of each cluster.
        first_blocks: The index of each cluster's first block.
        limits: The limits of the selection.

    Returns:
        The selected blocks.
    """
    sort = functools.partial(select_by_sorting, limits=limits)
    compare = functools.partial(select_by_comparing, limits=limits)
    if not 0 < scores.shape[0] <= MAX_COMPARED:
        return sort(scores, sizes, first_blocks)
    return jax.lax.platform_dependent(scores, sizes, first_blocks, default=sort, tpu=compare, cuda=compare)


def select_by_sorting(
    scores: Float[Array, "C"], sizes: Int[Array, "C"], first_blocks: Int[Array, "C"], *, limits: Limits
) -> SelectedBlocks:
    """Selects blocks by sorting scores: little work, but a dozen launches on a GPU.

    Args:
        scores: One score per cluster.
        sizes: The tokens of each cluster.
        first_blocks: The index of each cluster's first block.
        limits: The limits of the selection.

    Returns:
        The selected blocks, in descending order of their clusters' scores.
    """
    max_tokens, max_blocks, block_size = limits
    # Every selected cluster uses at least one block.
    clusters = min(scores.shape[0], max_blocks)
    if not clusters:
        return SelectedBlocks(jnp.zeros(max_blocks, jnp.int32), jnp.zeros(max_blocks, jnp.int32), jnp.zeros_like(sizes))
    _, order = jax.lax.top_k(jnp.where(sizes > 0, scores, -jnp.inf), clusters)
    ranked_sizes = sizes[order]
    tokens = jnp.clip(max_tokens - (jnp.cumsum(ranked_sizes) - ranked_sizes), 0, ranked_sizes)
    blocks = -(-tokens // block_size)
    blocks = jnp.clip(max_blocks - (jnp.cumsum(blocks) - blocks), 0, blocks)
    tokens = jnp.minimum(tokens, blocks * block_size)
    end = jnp.cumsum(blocks)

    slot = jnp.arange(max_blocks, dtype=jnp.int32)
    # The number of clusters that end before the slot. Comparing all ends with all slots takes 60 times as long for 400
    # clusters of 8,000 blocks.
    cluster = jnp.cumsum(jnp.zeros(max_blocks, jnp.int32).at[end].add(1, mode="drop"))
    is_used = cluster < clusters
    cluster = jnp.minimum(cluster, clusters - 1)
    place = slot - (end - blocks)[cluster]
    lengths = jnp.where(is_used, jnp.clip(tokens[cluster] - block_size * place, 0, block_size), 0)
    indices = jnp.where(is_used, first_blocks[order][cluster] + place, 0)
    return SelectedBlocks(indices, lengths, jnp.zeros_like(sizes).at[order].set(tokens))


def select_by_comparing(
    scores: Float[Array, "C"], sizes: Int[Array, "C"], first_blocks: Int[Array, "C"], *, limits: Limits
) -> SelectedBlocks:
    """Selects blocks by comparing all pairs of clusters: three passes without a sort, a scatter or a gather.

    Args:
        scores: One score per cluster.
        sizes: The tokens of each cluster.
        first_blocks: The index of each cluster's first block.
        limits: The limits of the selection.

    Returns:
        The selected blocks, in descending order of their clusters' scores.
    """
    max_tokens, max_blocks, block_size = limits
    scores = jnp.where((sizes > 0) & (scores == scores), scores, -jnp.inf)
    index = jnp.arange(scores.shape[0], dtype=jnp.int32)

    def sum_over_better(x: Int[Array, "C"]) -> Int[Array, "C"]:
        """Returns for each cluster the sum of x over all clusters that are selected before it."""
        # Comparisons are recomputed for each sum: storing them for both would fill memory.
        own, x = jax.lax.optimization_barrier((scores, x))
        is_better = (own[None] > own[:, None]) | ((own[None] == own[:, None]) & (index[None] < index[:, None]))
        return jnp.sum(jnp.where(is_better, x[None], 0), axis=1, dtype=jnp.int32)

    tokens = jnp.clip(max_tokens - sum_over_better(sizes), 0, sizes)
    blocks = -(-tokens // block_size)
    begin = sum_over_better(blocks)
    blocks = jnp.clip(max_blocks - begin, 0, blocks)
    tokens = jnp.minimum(tokens, blocks * block_size)

    slot = jnp.arange(max_blocks, dtype=jnp.int32)
    place = slot[:, None] - begin
    is_in_slot = (place >= 0) & (place < blocks)

    def pick(x: Int[Array, "K C"]) -> Int[Array, "K"]:
        return jnp.sum(jnp.where(is_in_slot, x, 0), axis=1, dtype=jnp.int32)

    lengths = pick(jnp.clip(tokens - block_size * place, 0, block_size))
    return SelectedBlocks(pick(first_blocks + place), lengths, tokens)
