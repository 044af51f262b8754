"""Attention of decode steps to quantized keys and values in pages, and writing of new tokens into pages."""

import functools
from typing import Any

from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.dispatch import Implementation, Kernel, dispatch
from pallas_kernels.paged_decode import mosaic_tpu, reference
from pallas_kernels.paged_decode.mosaic_tpu import TpuConfig as TpuConfig
from pallas_kernels.paged_decode.pages import Pages as Pages
from pallas_kernels.paged_decode.pages import pack_words as pack_words
from pallas_kernels.paged_decode.pages import slot_words as slot_words
from pallas_kernels.partials import Partials


def paged_decode(
    queries: Float[Array, "B H R D"],
    pages: Pages,
    page_table: Int[Array, "B K"],
    start: Int[Array, "B"] | Int[Array, "B R"],
    stop: Int[Array, "B"] | Int[Array, "B R"],
    *,
    logit_cap: float | None = None,
    implementation: Implementation | None = None,
    config: TpuConfig | None = None,
    interpret: Any = False,
) -> Partials:
    """Computes partials of attention to the tokens of sequences, which are read from their pages.

    Raises NotImplementedError if a requested kernel does not support the arguments, and ValueError if the
    implementation is unknown.

    Args:
        queries: The R queries of each KV head, in the basis in which keys were quantized. Logits are their products
            with keys, divided by sqrt(D).
        pages: The pages.
        page_table: The pages of each sequence in the order of its positions, int32. All entries must be valid indices
            of pages; those outside the range are not read.
        start: First position that is read, at least 0; per sequence, or per query.
        stop: Exclusive end of the positions that are read, likewise, at most K * P.
        logit_cap: Logits become cap * tanh(logit / cap). None disables this.
        implementation: "xla", "mosaic_tpu", or None for the kernel on a TPU if it supports the arguments, XLA
            otherwise.
        config: How the kernel divides its work; None for the defaults.
        interpret: Passed to `pallas_call`.

    Returns:
        Partials over the tokens in the ranges, float32.

    Raises:
        ValueError: If shapes do not match.
    """
    batch, heads, _, head_dim = queries.shape
    if (heads, head_dim) != (pages.heads, pages.head_dim):
        raise ValueError(
            f"queries have {heads} heads of {head_dim} dimensions; the pages have {pages.heads} of {pages.head_dim}"
        )
    for name, array in {"page_table": page_table, "start": start, "stop": stop}.items():
        if array.shape[0] != batch:
            raise ValueError(f"{name} has shape {array.shape}; its first axis must be B={batch}")
    kernel_options = {"config": config or TpuConfig(), "interpret": interpret, "logit_cap": logit_cap}
    return dispatch(
        "paged_decode", implementation, functools.partial(reference.paged_decode, logit_cap=logit_cap),
        queries, pages, page_table, start, stop,
        mosaic_tpu=Kernel(mosaic_tpu.paged_decode, mosaic_tpu.check, kernel_options),
    )  # fmt: skip


def write_tokens(
    pages: Pages,
    words: UInt32[Array, "T H W"],
    page_indices: Int[Array, "T"],
    slots: Int[Array, "T"],
    *,
    max_runs: int,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> Pages:
    """Writes tokens into slots of pages.

    Raises NotImplementedError if a requested kernel does not support the pages, and ValueError if the implementation is
    unknown.

    Args:
        pages: The pages. Donate them to update them in place.
        words: Keys, values and scales of new tokens, from `pack_words`.
        page_indices: The page of each token, int32; N for tokens that are not written. All tokens of a page must be
            neighbors, in the order of their slots, which must be consecutive.
        slots: The slot of each token in its page, int32.
        max_runs: The largest number of pages that are written.
        implementation: See `paged_decode`.
        interpret: Passed to `pallas_call`.

    Returns:
        The pages with the tokens.

    Raises:
        ValueError: If shapes do not match.
    """
    expected = (pages.heads, pages.data.shape[2])
    if words.shape[1:] != expected:
        raise ValueError(
            f"words have shape {words.shape}; for these pages it must be [T, {expected[0]}, {expected[1]}]"
        )
    options = {"max_runs": max(max_runs, 1), "interpret": interpret}
    return dispatch(
        "write_tokens", implementation, reference.write_tokens, pages, words, page_indices, slots,
        mosaic_tpu=Kernel(mosaic_tpu.write_tokens, mosaic_tpu.check_write, options),
    )  # fmt: skip
