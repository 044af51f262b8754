"""The choice of parts as a Pallas kernel for TPU (Mosaic)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.batching import fold_mapped_axes
from pallas_kernels.dispatch import PreferXla
from pallas_kernels.select_blocks.reference import SelectedBlocks

HEADS, LANES = 8, 128  # heads of a step, one in each sublane of a register
LOWEST = -(2**31)  # the key of a part without tokens
# Counts are float32 numbers, which must stay exact, and be divided exactly.
MAX_TOKENS = 2**21
# Arrays of so many numbers for each of a step's heads are on chip together, some twenty of them.
MAX_CLUSTERS = MAX_BLOCKS = 2**14


def check(
    scores: Float[Array, "C"],
    _sizes: Int[Array, "C"],
    _first_blocks: Int[Array, "C"],
    *,
    max_tokens: int,
    max_blocks: int,
    block_size: int,
    **_options: Any,
) -> None:
    """Checks that the kernel supports the arguments of `select_blocks`.

    Args:
        scores: One score per cluster.
        max_tokens: The budget.
        max_blocks: K.
        block_size: Tokens per block.

    Raises:
        NotImplementedError: If the kernel does not support them.
    """
    for name, value, limit in (("clusters", scores.shape[0], MAX_CLUSTERS), ("blocks", max_blocks, MAX_BLOCKS)):
        if not value:
            raise PreferXla(f"0 {name}; nothing is selected")
        if value > limit:
            raise NotImplementedError(f"{value} {name}; the TPU kernel supports 1 to {limit}")
    tokens = max(max_tokens, max_blocks * block_size)
    if tokens > MAX_TOKENS:
        raise NotImplementedError(f"{tokens} tokens; the TPU kernel supports at most {MAX_TOKENS}")


def select_blocks(
    scores: Float[Array, "C"],
    sizes: Int[Array, "C"],
    first_blocks: Int[Array, "C"],
    *,
    max_tokens: int,
    max_blocks: int,
    block_size: int,
    interpret: Any,
) -> SelectedBlocks:
    """`reference.select_by_sorting` without a sort, in one kernel for all heads, also under `vmap`.

    A bitwise search over 32 steps finds the score of the first cluster that does not fit: each step sums the sizes of
    all clusters with higher scores. Only clusters of exactly this score are selected in the order of their indices.

    Args:
        scores: One score per cluster.
        sizes: The tokens of each cluster.
        first_blocks: The index of each cluster's first block.
        max_tokens: The budget.
        max_blocks: K.
        block_size: Tokens per block.
        interpret: Passed to `pallas_call`.

    Returns:
        The selected blocks, in the order of their clusters' indices.
    """
    run = functools.partial(
        _select_for_heads, tokens=max_tokens, blocks=max_blocks, places=block_size, interpret=interpret
    )
    return jax.tree.map(lambda x: x[0], fold_mapped_axes(run)(scores[None], sizes[None], first_blocks[None]))


def _select_for_heads(
    score: Float[Array, "N C"],
    size: Int[Array, "N C"],
    first: Int[Array, "N C"],
    *,
    tokens: int,
    blocks: int,
    places: int,
    interpret: Any,
) -> SelectedBlocks:
    heads, parts = score.shape
    to_whole = ((0, -heads % HEADS), (0, -parts % LANES))
    arrays = [
        jnp.pad(x.astype(kind), to_whole) for x, kind in ((score, jnp.float32), (size, jnp.int32), (first, jnp.int32))
    ]
    rows, wide = arrays[0].shape
    of_parts = pl.BlockSpec((HEADS, wide), lambda i: (i, 0))
    room = pl.cdiv(blocks, LANES) * LANES
    of_blocks = pl.BlockSpec((HEADS, room), lambda i: (i, 0))
    block, count, taken = pl.pallas_call(
        functools.partial(_kernel, tokens=tokens, blocks=blocks, places=places),
        grid=(rows // HEADS,),
        in_specs=[of_parts] * 3,
        out_specs=[of_blocks, of_blocks, of_parts],
        out_shape=[jax.ShapeDtypeStruct((rows, width), jnp.int32) for width in (room, room, wide)],
        scratch_shapes=[pltpu.VMEM((HEADS, wide), jnp.float32)] * 4,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=rows * wide * (32 * 4 + 5 * room),
            bytes_accessed=4 * rows * (4 * wide + 2 * room),
            transcendentals=0,
        ),
        interpret=interpret,
        name="select_blocks",
    )(*arrays)
    return SelectedBlocks(block[:heads, :blocks], count[:heads, :blocks], taken[:heads, :parts])


def _kernel(
    score_ref, size_ref, first_ref, block_ref, count_ref, taken_ref, *of_parts, tokens: int, blocks: int, places: int
):
    """The choice of `HEADS` heads, one in each sublane."""
    size = size_ref[...].astype(jnp.float32)
    whole = _blocks_of(size, places)
    key = _ordered(score_ref[...], size > 0)

    def do_not_fit(lowest: Int[Array, "8 1"]) -> Bool[Array, "8 1"]:
        """Whether parts from a key on are more than the budget."""
        above = key >= lowest
        return (_sum(above, size) > tokens) | (_sum(above, whole) > blocks)

    def with_bit(number: Int[Array, ""], last: Int[Array, "8 1"]) -> Int[Array, "8 1"]:
        more = last + jax.lax.shift_left(1, 30 - number)
        return jnp.where(do_not_fit(more), more, last)

    # The highest key from which on parts do not fit: that of the last ones that are taken, or the lowest of all.
    last = jnp.full((HEADS, 1), LOWEST, jnp.int32)
    last = jnp.where(do_not_fit(jnp.zeros_like(last)), 0, last)
    last = jax.lax.fori_loop(0, 31, with_bit, last)
    better, equal = key > last, (key == last) & (size > 0)
    left, room = tokens - _sum(better, size), blocks - _sum(better, whole)
    taken = jnp.where(equal, size, 0.0)
    taken = jnp.clip(left - _before(taken), 0.0, taken)
    needed = _blocks_of(taken, places)
    needed = jnp.clip(room - _before(needed), 0.0, needed)
    taken = jnp.where(better, size, jnp.minimum(taken, needed * places))
    needed = jnp.where(better, whole, needed)
    taken_ref[...] = taken.astype(jnp.int32)

    begin = _before(needed)
    # Of slot j a part's block is base + j, and left - places * j are its tokens from there on.
    told = begin, begin + needed, first_ref[...].astype(jnp.float32) - begin, taken + places * begin
    for ref, x in zip(of_parts, told, strict=True):
        ref[...] = x
    slot = jax.lax.broadcasted_iota(jnp.int32, (1, block_ref.shape[1]), 1).astype(jnp.float32)

    def with_parts(number: Int[Array, ""], sums: tuple[Array, Array]) -> tuple[Array, Array]:
        """Adds what so many parts have in each slot, of which one fills it."""
        lanes = pl.ds(pl.multiple_of(number * LANES, LANES), LANES)
        begin, end, base, left = (ref[:, lanes].T for ref in of_parts)
        bases: list[Array] = []
        lefts: list[Array] = []
        for head in range(HEADS):
            own = slice(head, head + 1)
            fills = (slot >= begin[:, own]) & (slot < end[:, own])
            for found, x in ((bases, base), (lefts, left)):
                found.append(jnp.sum(jnp.where(fills, x[:, own], 0.0), axis=0, keepdims=True))
        return sums[0] + jnp.concatenate(bases, axis=0), sums[1] + jnp.concatenate(lefts, axis=0)

    none = jnp.zeros((HEADS, slot.shape[1]), jnp.float32)
    base, left = jax.lax.fori_loop(0, key.shape[1] // LANES, with_parts, (none, none))
    count = jnp.clip(left - places * slot, 0.0, places)
    count_ref[...] = count.astype(jnp.int32)
    block_ref[...] = jnp.where(count > 0, base + slot, 0.0).astype(jnp.int32)


def _ordered(score: Float[Array, "8 C"], there: Bool[Array, "8 C"]) -> Int[Array, "8 C"]:
    """Whole numbers in the order of the scores, of what is no number as of -inf."""
    score = jnp.where(score == 0, 0.0, score)  # -0 is as high as 0
    bits = jax.lax.bitcast_convert_type(jnp.where(score == score, score, -jnp.inf), jnp.int32)
    return jnp.where(there, jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LOWEST)


def _sum(which: Bool[Array, "8 C"], x: Float[Array, "8 C"]) -> Float[Array, "8 1"]:
    return jnp.sum(jnp.where(which, x, 0.0), axis=1, keepdims=True)


def _before(x: Float[Array, "8 C"]) -> Float[Array, "8 C"]:
    """Of every part the sum over those with lower numbers."""
    part, total, reach = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1), x, 1
    while reach < x.shape[1]:
        total = total + jnp.where(part >= reach, pltpu.roll(total, reach, 1), 0.0)
        reach *= 2
    return total - x


def _blocks_of(tokens: Float[Array, "8 C"], places: int) -> Float[Array, "8 C"]:
    """Blocks that so many tokens fill; half a token more keeps rounding from mattering."""
    return jnp.floor((tokens + (places - 0.5)) * (1 / places))
