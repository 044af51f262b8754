"""A store that keeps every token in blocks, of which queries read a selection.

Selection looks at an index only, never at the stored entries, so that these may be quantized or in host memory.
"""

import dataclasses
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.distributed.collectives import global_slots, is_sequence_sharded, local_slot
from kvjax.distributed.memory import compute_where_stored, is_on_host
from kvjax.partials import Partials, by_token, group_queries, merge_over_sequence, shift_logits, shift_of_logits
from kvjax.quantization import (
    FORMATS,
    QuantizedArray,
    dequantize,
    empty_quantized,
    first_mean,
    quantize,
    rotate,
    rotate_back,
)
from kvjax.spec import CacheSpec
from kvjax.state import state, static
from pallas_kernels import packing
from pallas_kernels.cluster_recall import (
    Blocks,
    blocks_as_entries,
    cluster_recall,
    gather_blocks,
    key_value_columns,
    padded_width,
)
from pallas_kernels.weighted_decode import weighted_decode

T = TypeVar("T")

OUT_OF_RANGE = 2**30  # an index past every end, whose writes are dropped


@state
class BlockStore:
    """One head's tokens in N blocks of P tokens, key and value next to each other, as a TPU fetches a block.

    The key is in the first columns of the first half of an entry, the value in the first columns of the second half.
    A block is filled from its first slot on; empty slots hold finite numbers. Devices may share the blocks: block
    indices are global everywhere but in these arrays. An entry is quantized once, when it is written.
    """

    entries: Float[Array, "N P 2*W"]
    scale: Float[Array, "N P 2"] | None  # of a quantized key and value
    position: Int[Array, "N P"]  # int32, of the token in its sequence; -1 in empty slots
    head_dim: int = static()
    value_dim: int = static()
    offset: Float[Array, "D"] | None = None  # float32, subtracted from keys before quantization
    formats: tuple[str, str] | None = static(default=None)  # quantization formats of keys and values

    @property
    def keys(self) -> Float[Array, "*A N P D"]:
        """The stored keys, dequantized."""
        return self._half(0, self.head_dim)

    @property
    def values(self) -> Float[Array, "*A N P D_v"]:
        """The stored values, dequantized."""
        return self._half(1, self.value_dim)

    def _half(self, half: int, dim: int) -> Array:
        """Returns the keys (half 0) or the values (half 1)."""
        if self.formats is None:
            begin = half * (self.entries.shape[-1] // 2)
            return self.entries[..., begin : begin + dim]
        columns = key_value_columns(as_blocks(self), self.head_dim)[half]
        quantized = QuantizedArray(
            self.entries[..., columns], cast(Array, self.scale)[..., half], None, FORMATS[self.formats[half]].bits
        )
        vectors = dequantize(quantized)
        return vectors if half or self.offset is None else vectors + self.offset[..., None, None, :]


def as_blocks(store: BlockStore, logit_cap: float | None = None) -> Blocks:
    """Returns a store in the form that kernels take.

    Returns:
        The blocks with their bit widths.
    """
    bits = (None, None) if store.formats is None else tuple(FORMATS[name].bits for name in store.formats)
    return Blocks(
        store.entries,
        store.scale,
        value_dim=store.value_dim,
        logit_cap=logit_cap,
        key_bits=bits[0],
        value_bits=bits[1],
    )


def init_block_store(spec: CacheSpec, blocks: int, block_size: int) -> BlockStore:
    """Returns one head's empty store.

    Args:
        blocks: number of blocks, rounded up to the same number on every device that shares the store.

    Returns:
        The store.
    """
    blocks = -(-blocks // spec.sequence_shards) * spec.sequence_shards
    width = padded_width(max(spec.head_dim, spec.value_width))
    store = BlockStore(
        entries=jnp.zeros((blocks, block_size, 2 * width), spec.dtype),
        scale=None,
        position=jnp.full((blocks, block_size), -1, jnp.int32),
        head_dim=spec.head_dim,
        value_dim=spec.value_width,
    )
    formats = spec.kv_formats
    if formats is None:
        return store
    dims = (spec.head_dim, spec.value_width)
    empty = [empty_quantized(name, (blocks, block_size, dim)) for name, dim in zip(formats, dims, strict=True)]
    return dataclasses.replace(_join_halves(store, empty[0], empty[1], formats), offset=jnp.zeros(spec.head_dim))


def _join_halves(
    blocks: BlockStore, keys: QuantizedArray, values: QuantizedArray, formats: tuple[str, str]
) -> BlockStore:
    """Replaces the entries of blocks by quantized keys and values next to each other, padded to the blocks' width."""
    width = blocks.entries.shape[-1] // 2
    halves = [
        jnp.pad(half.values, ((0, 0), (0, 0), (0, packing.packed_width(width, half.bits) - half.values.shape[-1])))
        for half in (keys, values)
    ]
    scale = jnp.stack([keys.scale, values.scale], axis=-1)
    return dataclasses.replace(blocks, entries=jnp.concatenate(halves, axis=-1), scale=scale, formats=formats)


def num_blocks(store: BlockStore) -> int:
    """Returns the number of blocks on all devices, of a store of one head or of all."""
    return global_slots(store.position.shape[-2])


def arrange_blocks(
    source: Int[Array, "M P"], keys: Float[Array, "T D"], values: Float[Array, "T D_v"], position: Int[Array, "T"]
) -> BlockStore:
    """Arranges tokens in blocks.

    Args:
        source: index of the token in each slot; an index outside [0, T) leaves the slot empty.

    Returns:
        M blocks.
    """
    occupied = (source >= 0) & (source < position.shape[0])
    index = jnp.where(occupied, source, 0)
    width = padded_width(max(keys.shape[-1], values.shape[-1]))
    halves = [jnp.pad(x, ((0, 0), (0, width - x.shape[-1]))) for x in (keys, values)]
    return BlockStore(
        entries=jnp.where(occupied[..., None], jnp.concatenate(halves, axis=1)[index], 0),
        scale=None,
        position=jnp.where(occupied, position[index], -1),
        head_dim=keys.shape[-1],
        value_dim=values.shape[-1],
    )


def write_blocks(store: BlockStore, index: Int[Array, "M"], blocks: BlockStore) -> BlockStore:
    """Writes M blocks of one head.

    Args:
        index: where each block goes; blocks past the end are dropped.
        blocks: the blocks, not quantized.

    Returns:
        The store.
    """
    offset = store.offset
    if store.formats is not None:
        keys, values = jnp.split(blocks.entries, 2, axis=-1)
        keys, values = keys[..., : store.head_dim], values[..., : store.value_dim]
        occupied = (blocks.position >= 0).reshape(-1)
        offset = first_mean(cast(Array, offset), keys.reshape(-1, store.head_dim), occupied)
        quantized = quantize(keys - offset, store.formats[0], unbiased=True), quantize(values, store.formats[1])
        blocks = _join_halves(blocks, *quantized, store.formats)
    # The offset belongs to the store, not to blocks.
    written = write_index(dataclasses.replace(store, offset=None), local_slot(index, store.position.shape[0]), blocks)
    return dataclasses.replace(written, offset=offset)


def write_index(tree: T, index: Int[Array, "M"], new: T) -> T:
    """Writes M entries along the first axis of all arrays of a tree.

    Args:
        index: where each entry goes; entries past the end are dropped.
        new: a tree of the same structure with M entries.

    Returns:
        The updated tree.
    """

    def write(old: Array, index: Int[Array, "M"], new: Array) -> Array:
        return old.at[index].set(new.astype(old.dtype), mode="drop")

    return jax.tree.map(lambda old, new: compute_where_stored(write, old, index, new, stays=True), tree, new)


def attend_blocks(
    query: Float[Array, "B 1 H_q D"],
    store: BlockStore,
    block_indices: Int[Array, "B H K"],
    block_lengths: Int[Array, "B H K"],
    logit_cap: float | None = None,
    blocks: Float[Array, "B H K P 2*W"] | None = None,
) -> Partials:
    """Attends to selected blocks.

    Args:
        query: one query per row.
        store: the store of all KV heads.
        block_indices: for every KV head or (H = H_q) every query head.
        block_lengths: tokens that are read of each block, from its first on.
        blocks: the selected blocks, if they have been fetched already.

    Returns:
        The partial softmax by token.
    """
    heads = block_indices.shape[1]
    if is_sequence_sharded():
        local, last = local_slot(block_indices, store.position.shape[2]), store.position.shape[2] - 1
        block_indices, block_lengths = jnp.minimum(local, last), jnp.where(local <= last, block_lengths, 0)
    rows = group_queries(query, heads)
    kernel_rows = rows if store.formats is None else rotate(rows).astype(rows.dtype)
    kernel_blocks = as_blocks(store, logit_cap)
    offset = None if store.offset is None else jnp.repeat(store.offset, heads // store.offset.shape[1], axis=1)
    # The cap is not linear: q.offset cannot be added to capped logits.
    dequantizes = offset is not None and logit_cap is not None
    if blocks is None and not is_on_host(store.entries) and not dequantizes:
        sums = cluster_recall(kernel_rows, kernel_blocks, block_indices, block_lengths)
    else:
        if blocks is None:
            blocks = compute_where_stored(gather_blocks, store.entries, block_indices)
        scale = None if store.scale is None else gather_blocks(store.scale, block_indices)
        entries = blocks_as_entries(kernel_blocks, blocks, scale, block_lengths, rows.shape[3])
        if dequantizes:
            keys = dequantize(dataclasses.replace(cast(QuantizedArray, entries.keys), offset=offset))
            kernel_rows, entries = rows, dataclasses.replace(entries, keys=keys)
        sums = weighted_decode(kernel_rows, entries)
    if offset is not None:
        sums = sums._replace(numerator=rotate_back(sums.numerator))
        sums = sums if dequantizes else shift_logits(sums, shift_of_logits(rows, offset))
    return merge_over_sequence(by_token(sums, tokens=1))


def max_blocks(tokens: int, parts: int, block_size: int) -> int:
    """Returns the largest number of blocks that tokens in several parts can occupy.

    Args:
        tokens: number of tokens in all parts.
        parts: number of parts (clusters or pages); each starts a new block.

    Returns:
        The number of blocks; the last block of every part may be incomplete.
    """
    return (tokens + (block_size - 1) * min(parts, tokens)) // block_size


def max_selected_blocks(tokens: int, part_tokens: int, block_size: int) -> int:
    """Returns the most blocks that a query reads for a budget of tokens.

    Args:
        part_tokens: average tokens of a part (cluster or page), whose last block may be unfilled.

    Returns:
        The number of blocks; at most `tokens`.
    """
    return min(-(-tokens // block_size) + -(-tokens // part_tokens), tokens)
