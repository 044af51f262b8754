"""`paged_decode` and `write_tokens` as Pallas kernels for TPU (Mosaic)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.paged_decode.pages import STEP, ZERO, Pages, unpack_codes, unpack_scales
from pallas_kernels.partials import MASK_VALUE, Partials
from pallas_kernels.tpu import dot_stored, launch

PAGE_SIZE, SUBLANES = 128, 8  # slots of a page, which are the lanes of a register, and rows of a register
STEP_BYTES, STEP_LOGITS = 5 * 2**19, 2**18  # of the pages of a step, and of a head
MAX_TABLE = 2**17  # entries of a page table, in scalar memory of 1 MiB
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """How the kernel divides its work.

    Attributes:
        step_pages: Pages of a sequence that are fetched and processed together, a power of two. None: as many as fit
            in 2.5 MiB, or fewer for many queries.
    """

    step_pages: int | None = None

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: If a value is not allowed.
        """
        if self.step_pages is not None and (self.step_pages < 1 or self.step_pages.bit_count() > 1):
            raise ValueError(f"step_pages={self.step_pages}; it must be None or a power of two")


def check_pages(pages: Pages) -> None:
    """Checks that the kernels support pages.

    Args:
        pages: The pages.

    Raises:
        NotImplementedError: If they do not.
    """
    if pages.page_size != PAGE_SIZE:
        raise NotImplementedError(f"pages have {pages.page_size} slots; the TPU kernel supports {PAGE_SIZE}")
    if pages.data.dtype.itemsize != 2 and pages.data.dtype != jnp.int32:
        raise NotImplementedError(f"pages are {pages.data.dtype.name}; the TPU kernel supports int32 and two bytes")
    if pages.vector_words % SUBLANES:
        raise NotImplementedError(
            f"vectors have {pages.vector_words} words; the TPU kernel supports multiples of {SUBLANES}"
        )


def check(
    queries: Float[Array, "B H R D"], pages: Pages, page_table: Int[Array, "B K"], *_ranges: Array, **_options: Any
) -> None:
    """Checks that the kernel supports the arguments of `paged_decode`.

    Args:
        queries: The R queries of each KV head.
        pages: The pages.
        page_table: The pages of each sequence.

    Raises:
        NotImplementedError: If the kernel does not support them.
    """
    check_pages(pages)
    if queries.dtype.name not in DTYPES:
        raise NotImplementedError(f"queries are {queries.dtype.name}; the TPU kernel supports {', '.join(DTYPES)}")
    if page_table.size > MAX_TABLE:
        raise NotImplementedError(f"the page table has {page_table.size} entries; scalar memory holds {MAX_TABLE}")


def paged_decode(
    queries: Float[Array, "B H R D"], pages: Pages, page_table: Int[Array, "B K"],
    start: Int[Array, "B"] | Int[Array, "B R"], stop: Int[Array, "B"] | Int[Array, "B R"],
    *, logit_cap: float | None, config: TpuConfig, interpret: Any,
) -> Partials:  # fmt: skip
    """`reference.paged_decode` in one pass over the pages, which are read in place.

    A step of the grid fetches several pages of a sequence, with all heads. Pages outside the range are not fetched. The
    grid ends with the longest sequence.

    Args:
        queries: The R queries of each KV head.
        pages: The pages.
        page_table: The pages of each sequence in the order of its positions.
        start: First position that is read.
        stop: Exclusive end of the positions that are read.
        logit_cap: See `Entries`.
        config: How to divide the work.
        interpret: Passed to `pallas_call`.

    Returns:
        Partials over the tokens in the ranges.
    """
    batch, heads, count, head_dim = queries.shape
    page_shape, max_pages = pages.data.shape[1:], page_table.shape[1]
    page_bytes = pages.data.size // len(pages.data) * pages.data.dtype.itemsize
    default_pages = min(STEP_BYTES // page_bytes, STEP_LOGITS // (count * PAGE_SIZE), max_pages)
    step_pages = config.step_pages or 1 << (max(default_pages, 1).bit_length() - 1)
    lowest, highest = (x if x.ndim == 1 else edge(x, axis=1) for x, edge in ((start, jnp.min), (stop, jnp.max)))
    first = jnp.clip(lowest // PAGE_SIZE, 0, max_pages - 1)
    # Sequences without tokens have no last page.
    last = jnp.where(highest > lowest, jnp.clip((highest - 1) // PAGE_SIZE, first, max_pages - 1), first - 1)
    steps = jnp.maximum(jnp.max((last - first) // step_pages), 0) + 1

    def page_index(b, j, table, first, last, *_, place):
        # After the last page, each place repeats its previous page; the pipeline does not fetch it again.
        others = last[b] - first[b] - place
        offset = jnp.minimum(j * step_pages, others & -step_pages) + place  # step_pages is a power of two
        return table[jnp.where(others >= 0, b * max_pages + first[b] + offset, 0)], 0, 0, 0, 0

    def sequence_spec(*shape):
        return pl.BlockSpec((1, *shape), lambda b, j, *_: (b, *(0 for _ in shape)))

    inputs = [(queries, sequence_spec(heads, count, head_dim))]
    if has_bounds := 2 in (start.ndim, stop.ndim):
        bounds = [jnp.broadcast_to(x if x.ndim == 2 else x[:, None], (batch, count)) for x in (start, stop)]
        inputs.append((jnp.stack(bounds, axis=-1), sequence_spec(count, 2)))
    for place in range(step_pages):
        inputs.append((pages.data, pl.BlockSpec((1, *page_shape), functools.partial(page_index, place=place))))
    shapes = [(heads, count, width) for width in (1, head_dim, 1)]
    outputs = [((batch, *shape), jnp.float32, sequence_spec(*shape)) for shape in shapes]
    slots = batch * heads * max_pages * PAGE_SIZE  # at most
    maximum, numerator, denominator = launch(
        "paged_decode", functools.partial(_attend, bits=pages.bits, logit_cap=logit_cap, has_bounds=has_bounds),
        inputs, outputs, parallel=(batch,), sequential=(steps,), interpret=interpret,
        scalars=[x.astype(jnp.int32) for x in (page_table.reshape(-1), first, last, lowest, highest)],
        flops=4 * slots * count * head_dim, transcendentals=slots * count,
        bytes_accessed=batch * max_pages * page_bytes,
    )  # fmt: skip
    return Partials(maximum[..., 0], numerator, denominator[..., 0])


def _attend(table, first, last, lowest, highest, queries, *refs, bits, logit_cap, has_bounds):
    """Adds the pages of one step to the partials of all heads of a sequence, which stay on chip."""
    *inputs, max_ref, num_ref, den_ref = refs
    pages = inputs[1:] if has_bounds else inputs
    b, j = pl.program_id(0), pl.program_id(1)

    @pl.when(j == 0)
    def _():
        max_ref[...] = jnp.full_like(max_ref, MASK_VALUE)
        num_ref[...] = jnp.zeros_like(num_ref)
        den_ref[...] = jnp.zeros_like(den_ref)

    first_page = first[b] + j * len(pages)
    position = first_page * PAGE_SIZE + jax.lax.broadcasted_iota(jnp.int32, (1, len(pages) * PAGE_SIZE), 1)
    is_read = (position >= lowest[b]) & (position < highest[b])
    if has_bounds:
        bounds = inputs[0][0]
        is_read = is_read & (position >= bounds[:, :1]) & (position < bounds[:, 1:])

    def add_head(head, carry):
        """Returns the unused `carry` after adding the pages to a head's partials."""
        words = jnp.concatenate([_words(page, head) for page in pages], axis=1)
        vector = (words.shape[0] - 1) // 2
        key_scale, value_scale = unpack_scales(words[2 * vector :])
        logits = _product(queries[0, head], words[:vector], bits, axis=0) * key_scale * queries.shape[3] ** -0.5
        if logit_cap is not None:
            logits = logit_cap * jnp.tanh(logits / logit_cap)
        logits = jnp.where(is_read, logits, MASK_VALUE)
        old_max = max_ref[0, head]
        new_max = jnp.maximum(old_max, jnp.max(logits, axis=1, keepdims=True))
        weights, rescale = jnp.exp(logits - new_max), jnp.exp(old_max - new_max)
        max_ref[0, head] = new_max
        den_ref[0, head] = den_ref[0, head] * rescale + jnp.sum(weights, axis=1, keepdims=True)
        weights = jnp.where(is_read, weights * value_scale, 0.0).astype(queries.dtype)
        num_ref[0, head] = num_ref[0, head] * rescale + _product(weights, words[vector : 2 * vector], bits, axis=1)
        return carry

    @pl.when(first_page <= last[b])
    def _():
        jax.lax.fori_loop(0, queries.shape[1], add_head, None)


def _words(page: Any, head: Any) -> Int[Array, "W P"]:
    """Loads the words of a head in a page."""
    if page.dtype == jnp.int32:
        return page[0, head, :, 0]
    # Halves of a word are one register on chip.
    return page.at[0, head].bitcast(jnp.int32).reshape(page.shape[2], page.shape[4])[...]


def _product(left: Float[Array, "R K"], words: Int[Array, "V S"], bits: int, *, axis: int) -> Float[Array, "R N"]:
    """Returns queries times keys, or weights times values, without scales; `axis` of the vectors is contracted."""
    total = jnp.sum(left.astype(jnp.float32), axis=1, keepdims=True)
    if bits == 8:
        return dot_stored(left, unpack_codes(words, bits), axis) - ZERO[bits] * total
    # The last four bits of a bfloat16 from 128 on are a code: two numbers in a word need no conversion.
    pairs = [((words >> (4 * i)) & 0x000F000F) | 0x43004300 for i in range(4)]
    numbers = jnp.concatenate([pltpu.bitcast(x, jnp.bfloat16) for x in pairs], axis=0)
    if left.dtype == jnp.float32:  # in which the difference of products would lose digits
        return STEP[bits] * dot_stored(left, numbers.astype(jnp.float32) - 128, axis) - ZERO[bits] * total
    return STEP[bits] * (dot_stored(left, numbers, axis) - 128 * total) - ZERO[bits] * total


def check_write(pages: Pages, *_arguments: Any, **_options: Any) -> None:
    """Checks that the kernel supports the pages of `write_tokens`, as `check_pages` does."""
    check_pages(pages)


def write_tokens(
    pages: Pages, words: UInt32[Array, "T H W"], page_indices: Int[Array, "T"], slots: Int[Array, "T"],
    *, max_runs: int, interpret: Any,
) -> Pages:  # fmt: skip
    """`reference.write_tokens` in place. Each run of tokens of one page is one step, which reads and writes the page.

    Args:
        pages: The pages; their buffer becomes the result's.
        words: The words of new tokens.
        page_indices: The page of each token. All tokens of a page are neighbors, with ascending slots.
        slots: The slot of each token.
        max_runs: The largest number of pages that are written, at least 1.
        interpret: Passed to `pallas_call`.

    Returns:
        The pages.
    """
    tokens, heads, width = words.shape
    page_indices = page_indices.astype(jnp.int32)
    is_valid = (page_indices >= 0) & (page_indices < len(pages.data))
    is_first = is_valid & jnp.concatenate([jnp.ones(1, bool), page_indices[1:] != page_indices[:-1]])
    runs = jnp.sum(is_first.astype(jnp.int32))
    token = jnp.nonzero(is_first, size=max_runs, fill_value=0)[0].astype(jnp.int32)
    run = jnp.cumsum(is_first.astype(jnp.int32)) - 1
    counts = jnp.zeros(max_runs, jnp.int32).at[jnp.where(is_valid, run, max_runs)].add(1, mode="drop")
    # Unused steps repeat the page of the last run, or of the first token, and write nothing.
    token = jnp.where(jnp.arange(max_runs) < runs, token, token[jnp.maximum(runs - 1, 0)])
    page = jnp.clip(page_indices[token], 0, len(pages.data) - 1)

    columns = jnp.moveaxis(jax.lax.bitcast_convert_type(words, jnp.int32), 0, 2)
    columns = jnp.pad(columns, ((0, 0), (0, 0), (0, PAGE_SIZE + -tokens % PAGE_SIZE)))
    block = (heads, width, PAGE_SIZE)
    page_spec = pl.BlockSpec((1, *pages.data.shape[1:]), lambda i, page, *_: (page[i], 0, 0, 0, 0))
    inputs = [(pages.data, page_spec)]
    for place in range(2):
        spec = pl.BlockSpec(
            block, lambda i, page, token, *_, place=place: (0, 0, jax.lax.div(token[i], PAGE_SIZE) + place)
        )
        inputs.append((columns, spec))
    scalars = [page, token, slots.astype(jnp.int32)[token], counts]
    (data,) = launch(
        "write_tokens", _write, inputs, [(pages.data.shape, pages.data.dtype, page_spec)],
        sequential=(max_runs,), scalars=scalars, interpret=interpret, aliases={len(scalars): 0}, flops=0,
        bytes_accessed=2 * max_runs * pages.data.size // len(pages.data) * pages.data.dtype.itemsize,
    )  # fmt: skip
    return Pages(data, pages.bits)


def _write(page, token, slot, count, old, columns, next_columns, new):
    """Writes a run of tokens; several steps in a row may have the same page, which then stays on chip."""
    i = pl.program_id(0)

    @pl.when((i == 0) | (page[i] != page[jnp.maximum(i - 1, 0)]))
    def _():
        new[...] = old[...]

    offset = jax.lax.rem(token[i], PAGE_SIZE) - slot[i]  # `%` is lowered differently per chip
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, PAGE_SIZE), 1)
    is_written = (lane >= slot[i]) & (lane < slot[i] + count[i])

    def write_head(head, carry):
        """Returns the unused `carry` after writing a head."""
        shift = jax.lax.rem(PAGE_SIZE - offset, PAGE_SIZE)
        first, second = (pltpu.roll(block[head], shift, 1) for block in (columns, next_columns))
        words = jnp.where(is_written, jnp.where(lane + offset < PAGE_SIZE, first, second), _words(new, head))
        new[0, head] = pltpu.bitcast(words, new.dtype).reshape(new.shape[2:])  # references are bitcast to load only
        return carry

    @pl.when(count[i] > 0)
    def _():
        jax.lax.fori_loop(0, old.shape[1], write_head, None)
