"""`cluster_recall` in XLA: blocks are gathered, on a CPU in chunks, and attended to."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cluster_recall.blocks import Inputs, as_entries, key_value_columns
from pallas_kernels.partials import Partials, merge_partials
from pallas_kernels.weighted_decode import xla as weighted_decode

# Numbers that a CPU gathers at a time, so that they are still in a core's cache when attention reads them.
GATHERED_NUMBERS = 2**17


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
    return weighted_decode.weighted_decode(queries, as_entries(blocks, keys, values, scale, lengths))


def check_rows(inputs: Inputs) -> None:
    """Raises NotImplementedError for quantized numbers, whose factors differ between the halves of a row."""
    if inputs.blocks.scale is not None:
        raise NotImplementedError("entries have factors, which differ between the halves of a row")


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
    partials = weighted_decode.weighted_decode(padded, as_entries(blocks, rows, rows, None, lengths))
    return partials._replace(numerator=partials.numerator[..., key_value_columns(blocks, head_dim)[1]])


def gather_blocks(
    stored: Float[Array, "B H_kv N P W"], block_indices: Int[Array, "B H K"], columns: slice = slice(None)
) -> Float[Array, "B H K P w"]:
    """Gathers blocks of a store.

    Args:
        stored: The entries or factors of a store.
        block_indices: The blocks, per KV head or per query head. They are not checked, because clamping would take
            another pass over the gathered blocks.

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
