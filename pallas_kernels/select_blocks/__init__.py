"""Chooses the blocks of the clusters with the highest scores, up to a budget of tokens."""

import functools
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, Kernel, dispatch
from pallas_kernels.select_blocks import mosaic_tpu, reference
from pallas_kernels.select_blocks.reference import SelectedBlocks as SelectedBlocks


def select_blocks(
    scores: Float[Array, "C"],
    sizes: Int[Array, "C"],
    first_blocks: Int[Array, "C"],
    *,
    max_tokens: int,
    max_blocks: int,
    block_size: int,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> SelectedBlocks:
    """Selects clusters (or pages) in descending order of score until the budget is reached.

    Of equal scores the lower index comes first. The last cluster is cut to its first tokens such that the selection
    ends exactly at the budget. Clusters of size 0 are skipped. Use `jax.vmap` for several heads.

    Raises ValueError if the implementation is unknown, and NotImplementedError if a requested kernel does not support
    the arguments.

    Args:
        scores: One score per cluster. NaN counts as -inf.
        sizes: The tokens of each cluster.
        first_blocks: The index of each cluster's first block. Its tokens fill this block and the following ones.
        max_tokens: The budget.
        max_blocks: K, the largest number of blocks. Clusters that leave much of their blocks empty may reach it before
            the budget.
        block_size: Tokens per block.
        implementation: "xla", "mosaic_tpu", or None for the kernel on a TPU if it supports the arguments, XLA
            otherwise.
        interpret: Passed to `pallas_call`.

    Returns:
        The blocks, and the tokens that are selected of each cluster.
    """
    limits = reference.Limits(max_tokens, max_blocks, block_size)
    kernel = Kernel(mosaic_tpu.select_blocks, mosaic_tpu.check, {"limits": limits, "interpret": interpret})
    compute_xla = functools.partial(reference.select_blocks, limits=limits)
    return dispatch("select_blocks", implementation, compute_xla, scores, sizes, first_blocks, mosaic_tpu=kernel)
