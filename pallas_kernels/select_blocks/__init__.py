"""Chooses the blocks of the clusters with the highest scores, up to a budget of tokens."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.select_blocks import mosaic_tpu, oracle, xla
from pallas_kernels.select_blocks.oracle import Limits as Limits
from pallas_kernels.select_blocks.oracle import SelectedBlocks as SelectedBlocks


def _are_any(scores: Float[Array, "C"], *_arrays: Array, limits: Limits) -> bool:
    return min(len(scores), limits.max_blocks) > 0


def _are_most(scores: Float[Array, "C"], *_arrays: Array, limits: Limits) -> bool:
    """Whether most clusters may be selected; a CPU finds a few of the best as fast by sorting."""
    return 0 < len(scores) <= limits.max_blocks


IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", mosaic_tpu.select_blocks, ("tpu",), mosaic_tpu.check, is_kernel=True),
    Implementation("xla_sort_tuples", xla.select_by_sorting_tuples, ("cuda",), is_preferred=_are_any),
    Implementation("xla_bisect", xla.select_by_bisection, ("cpu",), is_preferred=_are_most),
    Implementation("xla_sort", xla.select_by_sorting),
    Implementation("oracle", oracle.select_blocks),
)


def select_blocks(
    scores: Float[Array, "C"],
    sizes: Int[Array, "C"],
    first_blocks: Int[Array, "C"],
    *,
    max_tokens: int,
    max_blocks: int,
    block_size: int,
    implementation: str | None = None,
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
        max_blocks: K, the largest number of blocks. Clusters that leave much of their blocks empty may reach it before
            the budget.
        implementation: A name in `IMPLEMENTATIONS`, "xla" for all of its forms, or None for the first one that applies.
        interpret: Passed to `pallas_call`.

    Returns:
        The blocks, and the tokens that are selected of each cluster.
    """
    limits = Limits(max_tokens, max_blocks, block_size)
    return dispatch(
        "select_blocks", IMPLEMENTATIONS, implementation, scores, sizes, first_blocks,
        interpret=interpret, limits=limits,
    )  # fmt: skip
