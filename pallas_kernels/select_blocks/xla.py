"""`select_blocks` in XLA: by sorting or bisection on CPU, and by sorting tuples on GPUs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from pallas_kernels.bisection import bisect, float_ranks
from pallas_kernels.select_blocks.oracle import Limits, SelectedBlocks

MAX_COMPARED = 2**21  # pairs of a slot and a cluster per head


def select_by_sorting(
    scores: Float[Array, "C"], sizes: Int[Array, "C"], first_blocks: Int[Array, "C"], *, limits: Limits
) -> SelectedBlocks:
    """Selects blocks by sorting scores: little work, but 13 to 17 launches on a GPU.

    Returns:
        The selected blocks, in descending order of their clusters' scores.
    """
    max_tokens, max_blocks, block_size = limits
    # Every selected cluster uses at least one block.
    clusters = min(scores.shape[0], max_blocks)
    if not clusters:
        return SelectedBlocks(jnp.zeros(max_blocks, jnp.int32), jnp.zeros(max_blocks, jnp.int32), jnp.zeros_like(sizes))
    scores = jnp.where((sizes > 0) & (scores == scores), scores, -jnp.inf)
    # `top_k` ranks NaN above all numbers, and -0 below 0.
    _, order = jax.lax.top_k(jnp.where(scores == 0, 0.0, scores), clusters)
    tokens = _cut(sizes[order], max_tokens)
    blocks = _cut(-(-tokens // block_size), max_blocks)
    tokens = jnp.minimum(tokens, blocks * block_size)
    end = jnp.cumsum(blocks)

    slot = jnp.arange(max_blocks, dtype=jnp.int32)
    # The number of clusters that end before the slot.
    cluster = jnp.cumsum(jnp.zeros(max_blocks, jnp.int32).at[end].add(1, mode="drop"))
    is_used = cluster < clusters
    cluster = jnp.minimum(cluster, clusters - 1)
    place = slot - (end - blocks)[cluster]
    lengths = jnp.where(is_used, jnp.clip(tokens[cluster] - block_size * place, 0, block_size), 0)
    indices = jnp.where(is_used, first_blocks[order][cluster] + place, 0)
    return SelectedBlocks(indices, lengths, jnp.zeros_like(sizes).at[order].set(tokens))


def select_by_bisection(
    scores: Float[Array, "C"], sizes: Int[Array, "C"], first_blocks: Int[Array, "C"], *, limits: Limits
) -> SelectedBlocks:
    """Selects blocks by bisecting the lowest score that is selected: an eighth of the time of a sort on a CPU.

    Returns:
        The selected blocks, in ascending order of their clusters' indices.
    """
    max_tokens, max_blocks, block_size = limits
    full_blocks = -(-sizes // block_size)
    scores = jnp.where((sizes > 0) & (scores == scores), scores, -jnp.inf)
    rank = float_ranks(scores)

    def sum_where(mask: Bool[Array, "C"]) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Returns the tokens and the blocks of the clusters in `mask`."""
        return jnp.sum(jnp.where(mask, sizes, 0)), jnp.sum(jnp.where(mask, full_blocks, 0))

    def exhausts_limit(threshold: UInt[Array, ""]) -> Bool[Array, ""]:
        """Returns whether the clusters that reach the threshold fill the tokens or the blocks."""
        tokens, blocks = sum_where(rank >= threshold)
        return (tokens >= max_tokens) | (blocks >= max_blocks)

    threshold = bisect(exhausts_limit)
    is_better = rank > threshold
    better_tokens, better_blocks = sum_where(is_better)
    tied_tokens = _cut(jnp.where(rank == threshold, sizes, 0), max_tokens - better_tokens)
    tied_blocks = _cut(-(-tied_tokens // block_size), max_blocks - better_blocks)
    tokens = jnp.where(is_better, sizes, jnp.minimum(tied_tokens, tied_blocks * block_size))
    return SelectedBlocks(*_fill_slots(tokens, first_blocks, limits), tokens)


def _cut(amounts: Int[Array, "C"], limit: int | Int[Array, ""]) -> Int[Array, "C"]:
    """Returns the first of the amounts, up to a sum of `limit`."""
    return jnp.clip(limit - (jnp.cumsum(amounts) - amounts), 0, amounts)


def _fill_slots(
    tokens: Int[Array, "C"], first_blocks: Int[Array, "C"], limits: Limits
) -> tuple[Int[Array, "K"], Int[Array, "K"]]:
    """Lists the selected blocks, cluster by cluster.

    Args:
        tokens: The tokens that are selected of each cluster.
        first_blocks: The index of each cluster's first block.

    Returns:
        The indices and lengths of `SelectedBlocks`.
    """
    _, max_blocks, block_size = limits
    blocks = -(-tokens // block_size)
    end = jnp.cumsum(blocks)
    begin = end - blocks
    slot = jnp.arange(max_blocks, dtype=jnp.int32)
    is_used = slot < end[-1]
    # The difference between block and slot changes where a cluster begins. Sums of these changes take less time than
    # finding the cluster of every slot, and gathering from it.
    change = jnp.diff(first_blocks - begin, prepend=0)
    shift = jnp.cumsum(jnp.zeros(max_blocks, jnp.int32).at[begin].add(change, mode="drop"))
    last_slot = jnp.where(blocks > 0, end - 1, max_blocks)
    lengths = jnp.where(is_used, block_size, 0).at[last_slot].set(tokens - block_size * (blocks - 1), mode="drop")
    return jnp.where(is_used, slot + shift, 0), lengths


def select_by_sorting_tuples(
    scores: Float[Array, "C"], sizes: Int[Array, "C"], first_blocks: Int[Array, "C"], *, limits: Limits
) -> SelectedBlocks:
    """Selects blocks by sorting scores with sizes and first blocks, which needs no gather and no scatter.

    A GPU sorts up to 2,048 clusters in one launch, and the clusters of slots are counted by one reduction: six
    launches for 410 clusters, nine for 1,638. On a CPU, sorting tuples takes two to six times as long as
    `top_k`.

    Returns:
        The selected blocks, in descending order of their clusters' scores.
    """
    max_tokens, max_blocks, block_size = limits
    clusters = min(scores.shape[0], max_blocks)
    key = jnp.where((sizes > 0) & (scores == scores), -scores, jnp.inf)
    index = jnp.arange(scores.shape[0], dtype=jnp.int32)
    ordered = jax.lax.sort((key, index, sizes, first_blocks), num_keys=2)
    order, size, first_block = (x[:clusters] for x in ordered[1:])
    amounts = jnp.stack([size, -(-size // block_size)])
    # One cumulative sum for both: a cluster has fewer blocks than in `amounts` only if it is the last one.
    tokens_before, begin = jnp.cumsum(amounts, axis=1) - amounts
    tokens = jnp.clip(max_tokens - tokens_before, 0, size)
    blocks = jnp.clip(max_blocks - begin, 0, -(-tokens // block_size))
    tokens = jnp.minimum(tokens, blocks * block_size)

    slot = jnp.arange(max_blocks, dtype=jnp.int32)
    # Comparing every slot with every cluster is one launch, a binary search several.
    method = "compare_all" if max_blocks * clusters <= MAX_COMPARED else "scan_unrolled"
    cluster = jnp.searchsorted(begin, slot, side="right", method=method) - 1
    place = slot - begin[cluster]
    lengths = jnp.clip(tokens[cluster] - block_size * place, 0, block_size)
    indices = jnp.where(lengths > 0, first_block[cluster] + place, 0)
    return SelectedBlocks(indices, lengths, jnp.zeros_like(sizes).at[order].set(tokens))
