"""A store of blocks of tokens, as all implementations of `cluster_recall` take it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import packing
from pallas_kernels.partials import MASK_VALUE
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.weighted_decode.entries import Entries

# A TPU fetches a block in place only if its rows fill registers of 128 lanes: a key and its value together do, if each
# has a multiple of 64 columns. Smaller head dimensions (of toy models) are not padded.
COLUMN_MULTIPLE = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """N blocks per KV head, of P tokens each, with key and value of a token in one row.

    Attributes:
        entries: A row has the key in the first D columns and the value in the first D_v columns of its second half. All
            other columns, and rows without a token, must be finite. float32, bfloat16, float16, int8 or float8; uint8
            for packed codes (see `pallas_kernels.packing`), whose bytes take the place of the columns. W is at least D
            and D_v.
        scale: Finite factors of quantized keys and values. None means 1.
        value_dim: D_v. None means D.
        logit_cap: See `weighted_decode.Entries`.
        key_bits: The bit width of packed keys; None for one element per number. Keys and values are packed both or
            not at all.
        value_bits: The bit width of packed values.
    """

    entries: Float[Array, "B H_kv N P 2*W"]
    scale: Float[Array, "B H_kv N P 2"] | None = None
    value_dim: int | None = dataclasses.field(default=None, metadata={"static": True})
    logit_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    key_bits: int | None = dataclasses.field(default=None, metadata={"static": True})
    value_bits: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def width(self) -> int:
        """W."""
        bits = (self.key_bits or 8) + (self.value_bits or 8)
        return self.entries.shape[-1] * 8 // bits

    @property
    def value_column(self) -> int:
        """The first column of the value in a row."""
        return packing.packed_width(self.width, self.key_bits)


class Inputs(NamedTuple):
    """The arguments of `cluster_recall`.

    Attributes:
        queries: Queries that share a selection.
        blocks: The store.
        block_indices: The selected blocks, int32.
        block_lengths: The tokens of each selected block that are attended to, int32.
    """

    queries: Float[Array, "B H R D"]
    blocks: Blocks
    block_indices: Int[Array, "B H K"]
    block_lengths: Int[Array, "B H K"]


def padded_width(head_dim: int) -> int:
    """Returns W, the columns that a store allocates for a key and for a value of `head_dim` dimensions."""
    return head_dim if head_dim < COLUMN_MULTIPLE else -(-head_dim // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def blocks_as_entries(
    blocks: Blocks,
    gathered: Float[Array, "B H K P 2*W"],
    scale: Float[Array, "B H K P 2"] | None,
    block_lengths: Int[Array, "B H K"],
    head_dim: int,
) -> Entries:
    """Converts gathered blocks to entries of `weighted_decode`.

    Args:
        gathered: The selected blocks, from `gather_blocks`.
        scale: Their factors, likewise; None without factors.
        block_lengths: The tokens of each selected block that are attended to.

    Returns:
        The entries, with log-weights that mask the other tokens.
    """
    batch, heads, _, _, width = gathered.shape
    rows = gathered.reshape(batch, heads, -1, width)
    keys, values = (rows[..., columns] for columns in key_value_columns(blocks, head_dim))
    return as_entries(blocks, keys, values, scale, block_lengths)


def key_value_columns(blocks: Blocks, head_dim: int) -> tuple[slice, slice]:
    """Returns the columns of the key and of the value in a row of a store.

    Returns:
        The columns of the key and of the value, in bytes if they are packed.
    """
    first = blocks.value_column
    value_width = packing.packed_width(blocks.value_dim or head_dim, blocks.value_bits)
    return slice(0, packing.packed_width(head_dim, blocks.key_bits)), slice(first, first + value_width)


def as_entries(
    blocks: Blocks,
    keys: Float[Array, "B H K*P w"],
    values: Float[Array, "B H K*P w"],
    scale: Float[Array, "B H K P 2"] | None,
    block_lengths: Int[Array, "B H K"],
) -> Entries:
    """Returns gathered keys and values as entries, of which those after the length of their block are masked.

    Args:
        keys: The keys of all selected blocks.
        scale: Their factors; None without factors.
        block_lengths: The tokens of each selected block that are attended to.
    """
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
