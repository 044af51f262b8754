"""`paged_decode` and `write_tokens` in jax.numpy: the definitions that the kernels are tested against."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.paged_decode.pages import (
    STEP,
    ZERO,
    Pages,
    as_unsigned,
    join_words,
    split_words,
    unpack_codes,
    unpack_scales,
)
from pallas_kernels.partials import MASK_VALUE, Partials, merge_partials
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.weighted_decode import reference as weighted_decode
from pallas_kernels.weighted_decode.entries import Entries

BLOCK_SLOTS = 512  # that are gathered and unpacked at a time


def paged_decode(
    queries: Float[Array, "B H R D"],
    pages: Pages,
    page_table: Int[Array, "B K"],
    start: Int[Array, "B"] | Int[Array, "B R"],
    stop: Int[Array, "B"] | Int[Array, "B R"],
    *,
    logit_cap: float | None = None,
) -> Partials:
    """Computes `weighted_decode` of the tokens of each sequence, gathered from its pages.

    Args:
        queries: The R queries of each KV head.
        pages: The pages.
        page_table: The pages of each sequence in the order of its positions.
        start: First position that is read.
        stop: Exclusive end of the positions that are read.
        logit_cap: See `Entries`.

    Returns:
        Partials over the tokens in the ranges.
    """
    batch, heads, count, head_dim = queries.shape
    block_pages = min(max(BLOCK_SLOTS // pages.page_size, 1), page_table.shape[1])
    block = block_pages * pages.page_size
    blocks = -(-page_table.shape[1] // block_pages)
    page_table = jnp.pad(page_table, ((0, 0), (0, blocks * block_pages - page_table.shape[1])))

    def add_block(index: Int[Array, ""], partials: Partials) -> Partials:
        """Returns `partials` with block `index` of every sequence added."""
        block_table = jax.lax.dynamic_slice_in_dim(page_table, index * block_pages, block_pages, axis=1)
        keys, values = gather_pages(pages, block_table)
        bounds = [jnp.maximum(bound - index * block, 0) for bound in (start, stop)]
        entries = Entries(keys, values, start=bounds[0], stop=bounds[1], logit_cap=logit_cap)
        return merge_partials(partials, weighted_decode.weighted_decode(queries, entries))

    zeros = jnp.zeros((batch, heads, count))
    partials = Partials(zeros + MASK_VALUE, jnp.zeros((batch, heads, count, head_dim)), zeros)
    first, last = jnp.min(start) // block, -(-jnp.max(stop) // block)
    return jax.lax.fori_loop(jnp.clip(first, 0, blocks), jnp.clip(last, 0, blocks), add_block, partials)


def gather_pages(pages: Pages, page_table: Int[Array, "B K"]) -> tuple[QuantizedArray, QuantizedArray]:
    """Returns the keys and values of pages, [B, H, K * P, D]."""
    words = jnp.moveaxis(join_words(as_unsigned(pages)[page_table]), 1, 3)  # [B, H, W, K, P]
    words = words.reshape(*words.shape[:3], -1)
    key_scale, value_scale = unpack_scales(words[:, :, -1])
    keys, values = jnp.split(words[:, :, :-1], 2, axis=2)
    return _dequantize(keys, key_scale, pages.bits), _dequantize(values, value_scale, pages.bits)


def _dequantize(words: UInt32[Array, "B H V S"], scale: Float[Array, "B H S"], bits: int) -> QuantizedArray:
    """Returns vectors of int8 numbers, without packing."""
    numbers = unpack_codes(words, bits).astype(jnp.int32) * STEP[bits] - ZERO[bits]
    return QuantizedArray(numbers.astype(jnp.int8).swapaxes(2, 3), scale)


def write_tokens(
    pages: Pages, words: UInt32[Array, "T H W"], page_indices: Int[Array, "T"], slots: Int[Array, "T"]
) -> Pages:
    """Returns pages with the words of tokens in their slots; tokens with a page index outside the pages are dropped."""
    elements = split_words(words, pages.data.shape[3])
    data = as_unsigned(pages).at[page_indices, :, :, :, slots].set(elements, mode="drop")
    return Pages(jax.lax.bitcast_convert_type(data, pages.data.dtype), pages.bits)
