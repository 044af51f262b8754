"""`select_blocks` as a Pallas kernel for TPU (Mosaic)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.batching import run_batched
from pallas_kernels.dispatch import PreferXla
from pallas_kernels.select_blocks.oracle import Limits, SelectedBlocks
from pallas_kernels.tpu import launch

HEADS, LANES = 8, 128  # heads of a step, one in each sublane of a register
MIN_KEY = -(2**31)  # of empty clusters
# Counts are float32, and must be exact also when they are divided.
MAX_TOKENS = 2**21
# Some twenty arrays with this many numbers per head of a step are on chip together.
MAX_CLUSTERS = MAX_BLOCKS = 2**14


def check(
    scores: Float[Array, "C"], _sizes: Int[Array, "C"], _first: Int[Array, "C"], *, limits: Limits, **_options: Any
) -> None:
    """Checks that the kernel supports the arguments of `select_blocks`.

    Args:
        scores: One score per cluster.

    Raises:
        NotImplementedError: If the kernel does not support them.
        PreferXla: If the selection is empty.
    """
    counts = ("clusters", scores.shape[0], MAX_CLUSTERS), ("blocks", limits.max_blocks, MAX_BLOCKS)
    for name, value, supported in counts:
        if not value:
            raise PreferXla(f"0 {name}; the selection is empty")
        if value > supported:
            raise NotImplementedError(f"{value} {name}; the TPU kernel supports at most {supported}")
    tokens = max(limits.max_tokens, limits.max_blocks * limits.block_size)
    if tokens > MAX_TOKENS:
        raise NotImplementedError(f"{tokens} tokens; the TPU kernel supports at most {MAX_TOKENS}")


def select_blocks(
    scores: Float[Array, "C"], sizes: Int[Array, "C"], first_blocks: Int[Array, "C"], *, limits: Limits, interpret: Any
) -> SelectedBlocks:
    """`xla.select_by_sorting` without a sort, in one kernel for all heads, also under `vmap`.

    A bitwise search over 32 steps finds the score of the first cluster that does not fit: each step sums the sizes of
    all clusters with higher scores. Only clusters of exactly this score are selected in the order of their indices.

    Args:
        scores: One score per cluster.
        sizes: The tokens of each cluster.
        first_blocks: The index of each cluster's first block.
        interpret: Passed to `pallas_call`.

    Returns:
        The selected blocks, in the order of their clusters' indices.
    """
    run = functools.partial(_select_for_heads, limits=limits, interpret=interpret)
    return run_batched(run, scores, sizes, first_blocks)


def _select_for_heads(*arrays: Array, limits: Limits, interpret: Any) -> SelectedBlocks:
    heads, clusters = arrays[0].shape
    padding = ((0, -heads % HEADS), (0, -clusters % LANES))
    dtypes = (jnp.float32, jnp.int32, jnp.int32)
    padded = [jnp.pad(x.astype(dtype), padding) for x, dtype in zip(arrays, dtypes, strict=True)]
    rows, cluster_width = padded[0].shape
    block_width = pl.cdiv(limits.max_blocks, LANES) * LANES
    cluster_spec = pl.BlockSpec((HEADS, cluster_width), lambda i: (i, 0))
    block_spec = pl.BlockSpec((HEADS, block_width), lambda i: (i, 0))
    outputs = [(block_width, block_spec), (block_width, block_spec), (cluster_width, cluster_spec)]
    indices, lengths, tokens = launch(
        "select_blocks", functools.partial(_kernel, limits=limits),
        [(x, cluster_spec) for x in padded], [((rows, width), jnp.int32, spec) for width, spec in outputs],
        parallel=(rows // HEADS,), scratch=[pltpu.VMEM((HEADS, cluster_width), jnp.float32)] * 4, interpret=interpret,
        flops=rows * cluster_width * (32 * 4 + 5 * block_width),
    )  # fmt: skip
    blocks = slice(limits.max_blocks)
    return SelectedBlocks(indices[:heads, blocks], lengths[:heads, blocks], tokens[:heads, :clusters])


def _kernel(scores_ref, sizes_ref, first_ref, indices_ref, lengths_ref, tokens_ref, *cluster_refs, limits):
    """Selects the blocks of `HEADS` heads, one in each sublane."""
    max_tokens, max_blocks, block_size = limits
    sizes = sizes_ref[...].astype(jnp.float32)
    all_blocks = _count_blocks(sizes, block_size)
    keys = _sortable_keys(scores_ref[...], sizes > 0)

    def exceeds_limits(lowest: Int[Array, "8 1"]) -> Bool[Array, "8 1"]:
        """Returns whether the clusters with keys of at least `lowest` exceed a limit."""
        is_above = keys >= lowest
        return (_sum_where(is_above, sizes) > max_tokens) | (_sum_where(is_above, all_blocks) > max_blocks)

    def search_bit(step: Int[Array, ""], last: Int[Array, "8 1"]) -> Int[Array, "8 1"]:
        """Returns `last` with the bit of `step` set if clusters from there on exceed a limit."""
        candidate = last + jax.lax.shift_left(1, 30 - step)
        return jnp.where(exceeds_limits(candidate), candidate, last)

    # The largest key from which on clusters exceed a limit: the key of the last selected clusters, or the minimum.
    last = jnp.full((HEADS, 1), MIN_KEY, jnp.int32)
    last = jnp.where(exceeds_limits(jnp.zeros_like(last)), 0, last)
    last = jax.lax.fori_loop(0, 31, search_bit, last)
    is_better, is_last = keys > last, (keys == last) & (sizes > 0)
    tokens_left = max_tokens - _sum_where(is_better, sizes)
    blocks_left = max_blocks - _sum_where(is_better, all_blocks)
    tokens = jnp.where(is_last, sizes, 0.0)
    tokens = jnp.clip(tokens_left - _exclusive_cumsum(tokens), 0.0, tokens)
    blocks = _count_blocks(tokens, block_size)
    blocks = jnp.clip(blocks_left - _exclusive_cumsum(blocks), 0.0, blocks)
    tokens = jnp.where(is_better, sizes, jnp.minimum(tokens, blocks * block_size))
    blocks = jnp.where(is_better, all_blocks, blocks)
    tokens_ref[...] = tokens.astype(jnp.int32)

    begin = _exclusive_cumsum(blocks)
    # In slot j, a cluster's block is base + j, and remaining - block_size * j tokens remain from there on.
    base, remaining = first_ref[...].astype(jnp.float32) - begin, tokens + block_size * begin
    for ref, x in zip(cluster_refs, (begin, begin + blocks, base, remaining), strict=True):
        ref[...] = x
    slot = jax.lax.broadcasted_iota(jnp.int32, (1, indices_ref.shape[1]), 1).astype(jnp.float32)

    def add_clusters(group: Int[Array, ""], sums: tuple[Array, Array]) -> tuple[Array, Array]:
        """Returns `sums` with the contribution of `group`, of `LANES` clusters, to each slot; one fills a slot."""
        lanes = pl.ds(pl.multiple_of(group * LANES, LANES), LANES)
        begin, end, base, remaining = (ref[:, lanes].T for ref in cluster_refs)
        bases: list[Array] = []
        remainders: list[Array] = []
        for head in range(HEADS):
            column = slice(head, head + 1)
            fills = (slot >= begin[:, column]) & (slot < end[:, column])
            for results, x in ((bases, base), (remainders, remaining)):
                results.append(jnp.sum(jnp.where(fills, x[:, column], 0.0), axis=0, keepdims=True))
        return sums[0] + jnp.concatenate(bases, axis=0), sums[1] + jnp.concatenate(remainders, axis=0)

    zeros = jnp.zeros((HEADS, slot.shape[1]), jnp.float32)
    base, remaining = jax.lax.fori_loop(0, keys.shape[1] // LANES, add_clusters, (zeros, zeros))
    lengths = jnp.clip(remaining - block_size * slot, 0.0, block_size)
    lengths_ref[...] = lengths.astype(jnp.int32)
    indices_ref[...] = jnp.where(lengths > 0, base + slot, 0.0).astype(jnp.int32)


def _sortable_keys(scores: Float[Array, "8 C"], is_present: Bool[Array, "8 C"]) -> Int[Array, "8 C"]:
    """Returns integers in the order of the scores, with NaN as -inf."""
    scores = jnp.where(scores == 0, 0.0, scores)  # -0 equals 0
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == scores, scores, -jnp.inf), jnp.int32)
    return jnp.where(is_present, jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), MIN_KEY)


def _sum_where(condition: Bool[Array, "8 C"], x: Float[Array, "8 C"]) -> Float[Array, "8 1"]:
    return jnp.sum(jnp.where(condition, x, 0.0), axis=1, keepdims=True)


def _exclusive_cumsum(x: Float[Array, "8 C"]) -> Float[Array, "8 C"]:
    """Returns for each cluster the sum over clusters with lower indices."""
    index, total, shift = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1), x, 1
    while shift < x.shape[1]:
        total = total + jnp.where(index >= shift, pltpu.roll(total, shift, 1), 0.0)
        shift *= 2
    return total - x


def _count_blocks(tokens: Float[Array, "8 C"], block_size: int) -> Float[Array, "8 C"]:
    """Returns the blocks that tokens fill; half a token is added so that rounding does not matter."""
    return jnp.floor((tokens + (block_size - 0.5)) * (1 / block_size))
