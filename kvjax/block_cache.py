"""A cache on the device of recently retrieved blocks, for a block store in host memory."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.distributed.collectives import sum_over_heads
from kvjax.distributed.memory import compute_where_stored
from kvjax.state import state
from pallas_kernels.cluster_recall import gather_blocks


@state
class BlockCache:
    """Blocks that the last R steps selected.

    H are KV heads, or query heads if each query head selects blocks separately.
    """

    entries: Float[Array, "B H R K P 2*W"]
    block: Int[Array, "B H R K"]  # int32 block indices; -1 for none
    step: Int[Array, "B"]  # int32 appended tokens so far; the blocks of the next token go to step mod R
    requested: Int[Array, "B"]  # int32 blocks requested so far, over all heads
    hits: Int[Array, "B"]  # int32 blocks among these that were cached


def init_block_cache(blocks: jax.ShapeDtypeStruct, stored: Float[Array, "B H_kv N P 2*W"], steps: int) -> BlockCache:
    """Returns an empty block cache.

    Args:
        blocks: shape [B, H, K] of the block indices of one step.
        stored: entries of the block store.
        steps: R, steps whose blocks are cached.

    Returns:
        The cache.
    """
    batch, heads, count = blocks.shape
    shape = (batch, heads, steps, count)
    return BlockCache(
        entries=jnp.zeros((*shape, *stored.shape[3:]), stored.dtype),
        block=jnp.full(shape, -1, jnp.int32),
        step=jnp.zeros(batch, jnp.int32),
        requested=jnp.zeros(batch, jnp.int32),
        hits=jnp.zeros(batch, jnp.int32),
    )


def fetch_through_cache(
    stored: Float[Array, "B H_kv N P 2*W"],
    cache: BlockCache,
    block_indices: Int[Array, "B H K"],
    block_lengths: Int[Array, "B H K"],
    appended: Bool[Array, "B"],
) -> tuple[Float[Array, "B H K P 2*W"], BlockCache]:
    """Fetches blocks from the cache, and missing ones from the store.

    Missing blocks move in groups of an eighth of a selection, as many groups as the row and head with the most misses
    needs.

    Args:
        stored: entries of the block store, in host or device memory.
        block_lengths: tokens read of each; 0 for blocks that are not read.
        appended: rows whose query belongs to an appended token; the cache of other rows does not change.

    Returns:
        The blocks, and the updated cache.
    """
    batch, heads, steps, count = cache.block.shape
    wanted = block_lengths > 0
    cached = cache.block.reshape(batch, heads, steps * count)
    same = (block_indices[..., None] == cached[:, :, None]) & wanted[..., None]
    hit = jnp.any(same, axis=3)
    blocks, rank = _fetch_missing(stored, block_indices, wanted & ~hit)
    entries = gather_blocks(blocks, jnp.maximum(rank, 0))
    if steps:
        kept = cache.entries.reshape(batch, heads, steps * count, *cache.entries.shape[4:])
        entries = jnp.where(hit[..., None, None], gather_blocks(kept, jnp.argmax(same, axis=3)), entries)
    newest = (jnp.arange(steps) == cache.step[:, None] % max(steps, 1)) & appended[:, None]

    def replace_step(old: Array, new: Array) -> Array:
        return jnp.where(newest.reshape(batch, 1, steps, *(1,) * (old.ndim - 3)), new[:, :, None], old)

    def row_count(x: Bool[Array, "B H K"]) -> Int[Array, "B"]:
        return jnp.where(appended, sum_over_heads(jnp.sum(x, axis=(1, 2), dtype=jnp.int32)), 0)

    return (
        entries,
        BlockCache(
            entries=replace_step(cache.entries, entries),
            block=replace_step(cache.block, jnp.where(wanted, block_indices, -1)),
            step=cache.step + appended,
            requested=cache.requested + row_count(wanted),
            hits=cache.hits + row_count(hit),
        ),
    )


def _fetch_missing(
    stored: Float[Array, "B H_kv N P 2*W"], block_indices: Int[Array, "B H K"], missing: Bool[Array, "B H K"]
) -> tuple[Float[Array, "B H M P 2*W"], Int[Array, "B H K"]]:
    """Fetches missing blocks; returns them in order, and the index of each missing block among them."""
    count = block_indices.shape[2]
    rank = jnp.cumsum(missing, axis=2) - 1
    target = jnp.where(missing, rank, count)
    put = jax.vmap(jax.vmap(lambda queue, target, block: queue.at[target].set(block, mode="drop")))
    queue = put(jnp.zeros_like(block_indices), target, block_indices)
    group = -(-count // 8)
    groups = -(-jnp.max(jnp.sum(missing, axis=2)) // group)
    queue = jnp.pad(queue, ((0, 0), (0, 0), (0, -count % group)))

    def fetch(number: Int[Array, ""], fetched: Array) -> Array:
        """Fetches group `number` of the missing blocks and writes it into `fetched`."""
        indices = jax.lax.dynamic_slice_in_dim(queue, number * group, group, axis=2)
        blocks = compute_where_stored(gather_blocks, stored, indices)
        return jax.lax.dynamic_update_slice_in_dim(fetched, blocks, number * group, axis=2)

    fetched = jnp.zeros((*queue.shape, *stored.shape[3:]), stored.dtype)
    return jax.lax.fori_loop(0, groups, fetch, fetched), rank
