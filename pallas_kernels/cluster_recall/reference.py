"""`cluster_recall` in jax.numpy: the definition that the kernels are tested against."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import packing
from pallas_kernels.cluster_recall.blocks import Blocks, Inputs
from pallas_kernels.partials import MASK_VALUE, Partials, merge_partials
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.weighted_decode import reference as weighted_decode
from pallas_kernels.weighted_decode.entries import Entries

# Numbers that a CPU gathers at a time, so that they are still in a core's cache when attention reads them.
GATHERED_NUMBERS = 2**17


def cluster_recall(inputs: Inputs) -> Partials:
    """Returns partials of attention to the selected blocks of `inputs`, which are gathered."""
    dtype, scale = inputs.blocks.entries.dtype, inputs.blocks.scale
    if dtype.itemsize == 2:
        return attend_to_columns(inputs)  # XLA:CPU converts two-byte numbers slowly, and more slowly in chunks
    # float32 entries need no conversion, so that a CPU only has to read them once.
    attend = attend_to_rows if dtype == jnp.float32 and scale is None else attend_to_columns
    on_cpu = functools.partial(attend_in_chunks, attend)
    return jax.lax.platform_dependent(inputs, cpu=on_cpu, default=attend_to_columns)


def attend_in_chunks(attend: Callable[[Inputs], Partials], inputs: Inputs) -> Partials:
    """Merges the partials of chunks of the selected blocks.

    Args:
        attend: Computes the partials of a chunk.
        inputs: The queries, the store, and the selected blocks.

    Returns:
        The partials of all selected blocks.
    """
    queries, blocks, indices, lengths = inputs
    batch, heads, count = indices.shape
    _, _, _, block_size, width = blocks.entries.shape
    tokens = max(GATHERED_NUMBERS // (batch * heads * width), weighted_decode.SLOT_BLOCK)
    chunk = max(tokens // weighted_decode.SLOT_BLOCK * weighted_decode.SLOT_BLOCK // block_size, 1)
    if count <= chunk:
        return attend(inputs)

    def attend_from(first: int | Int[Array, ""], size: int) -> Partials:
        """Returns the partials of `size` selected blocks from index `first` on."""
        chosen = (jax.lax.dynamic_slice_in_dim(x, first, size, axis=2) for x in (indices, lengths))
        return attend(Inputs(queries, blocks, *chosen))

    full_chunks = (count - 1) // chunk
    last = attend_from(full_chunks * chunk, count - full_chunks * chunk)

    def add_chunk(index: Int[Array, ""], partials: Partials) -> Partials:
        """Returns `partials` merged with those of chunk `index`."""
        return merge_partials(partials, attend_from(index * chunk, chunk))

    return jax.lax.fori_loop(0, full_chunks, add_chunk, last)


def attend_to_columns(inputs: Inputs) -> Partials:
    """Returns partials of attention to keys and values of `inputs` that are gathered separately.

    If rows were gathered, XLA:CPU would write them and then copy keys and values.
    """
    queries, blocks, indices, lengths = inputs
    batch, heads, _, head_dim = queries.shape

    def gather(columns: slice) -> Float[Array, "B H K*P w"]:
        gathered = gather_blocks(blocks.entries, indices, columns)
        return gathered.reshape(batch, heads, -1, columns.stop - columns.start)

    keys, values = map(gather, key_value_columns(blocks, head_dim))
    scale = None if blocks.scale is None else gather_blocks(blocks.scale, indices)
    return weighted_decode.weighted_decode(queries, _entries(blocks, keys, values, scale, lengths))


def attend_to_rows(inputs: Inputs) -> Partials:
    """Returns partials of attention to rows of the store of `inputs`, each as a key and as a value.

    Queries are padded with zeros in the columns of the values. Only these columns of the numerator are returned.
    """
    queries, blocks, indices, lengths = inputs
    batch, heads, _, head_dim = queries.shape
    rows = gather_blocks(blocks.entries, indices).reshape(batch, heads, -1, blocks.entries.shape[4])
    width = rows.shape[3]
    # Attention divides logits by sqrt(width).
    scaled = queries.astype(jnp.float32) * math.sqrt(width / head_dim)
    padded = jnp.pad(scaled, ((0, 0), (0, 0), (0, 0), (0, width - head_dim)))
    partials = weighted_decode.weighted_decode(padded, _entries(blocks, rows, rows, None, lengths))
    return partials._replace(numerator=partials.numerator[..., key_value_columns(blocks, head_dim)[1]])


def blocks_as_entries(
    blocks: Blocks,
    gathered: Float[Array, "B H K P 2*W"],
    scale: Float[Array, "B H K P 2"] | None,
    block_lengths: Int[Array, "B H K"],
    head_dim: int,
) -> Entries:
    """Converts gathered blocks to entries of `weighted_decode`.

    Args:
        blocks: The store.
        gathered: The selected blocks, from `gather_blocks`.
        scale: Their factors, likewise; None without factors.
        block_lengths: The tokens of each selected block that are attended to.
        head_dim: D.

    Returns:
        The entries, with log-weights that mask the other tokens.
    """
    batch, heads, _, _, width = gathered.shape
    rows = gathered.reshape(batch, heads, -1, width)
    keys, values = (rows[..., columns] for columns in key_value_columns(blocks, head_dim))
    return _entries(blocks, keys, values, scale, block_lengths)


def key_value_columns(blocks: Blocks, head_dim: int) -> tuple[slice, slice]:
    """Returns the columns of the key and of the value in a row of a store.

    Args:
        blocks: The store.
        head_dim: D.

    Returns:
        The columns of the key and of the value, in bytes if they are packed.
    """
    first = blocks.value_column
    value_width = packing.packed_width(blocks.value_dim or head_dim, blocks.value_bits)
    return slice(0, packing.packed_width(head_dim, blocks.key_bits)), slice(first, first + value_width)


def _entries(blocks: Blocks, keys: Array, values: Array, scale: Array | None, block_lengths: Array) -> Entries:
    is_read = jnp.arange(blocks.entries.shape[3], dtype=jnp.int32) < block_lengths[..., None]
    log_num = jnp.where(is_read.reshape(*block_lengths.shape[:2], -1), 0.0, MASK_VALUE)
    stored: tuple[Any, Any] = keys, values
    if scale is not None:
        key_scale, value_scale = (scale[..., half].reshape(log_num.shape) for half in (0, 1))
        stored = (
            QuantizedArray(keys, key_scale, bits=blocks.key_bits),
            QuantizedArray(values, value_scale, bits=blocks.value_bits),
        )
    return Entries(*stored, log_num, logit_cap=blocks.logit_cap)


def gather_blocks(
    stored: Float[Array, "B H_kv N P W"], block_indices: Int[Array, "B H K"], columns: slice = slice(None)
) -> Float[Array, "B H K P w"]:
    """Gathers blocks of a store.

    Args:
        stored: The entries or factors of a store.
        block_indices: The blocks, per KV head or per query head. They are not checked, because clamping would take
            another pass over the gathered blocks.
        columns: The columns to gather.

    Returns:
        The columns of these blocks.
    """
    batch, heads, _ = block_indices.shape
    kv_heads, block_size = stored.shape[1], stored.shape[3]
    # On TPUs, XLA stores blocks of one row in another layout than it gathers them in.
    squeezed = stored[:, :, :, 0] if block_size == 1 else stored

    def gather(stored: Array, indices: Array) -> Array:
        return stored.at[indices, ..., columns].get(mode="promise_in_bounds")

    gathered = jax.vmap(jax.vmap(gather))(squeezed, block_indices.reshape(batch, kv_heads, -1))
    gathered = gathered[:, :, :, None] if block_size == 1 else gathered
    return gathered.reshape(batch, heads, -1, *gathered.shape[3:])
