"""Quest (Tang et al. 2024): everything is kept in pages of consecutive tokens; each query reads the pages that may hold
its largest logits."""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.policy import Policy, Prompt, check_budget
from kvjax.quantization import dequantize
from kvjax.segment import BlockSelection, BlockStoreRead, SegmentLike
from kvjax.spec import CacheSpec
from kvjax.state import fault, retrieval_index, stacked, state
from kvjax.stores import window as windows
from kvjax.stores.block_store import (
    OUT_OF_RANGE,
    BlockStore,
    arrange_blocks,
    init_block_store,
    write_blocks,
    write_index,
)
from kvjax.stores.staging import Tokens
from kvjax.stores.window import Window, init_window
from kvjax.structures.clusters import group_score
from kvjax.structures.per_head import per_head
from pallas_kernels.select_blocks import SelectedBlocks, select_blocks

PAGE = 16  # tokens
MIN_PAGES = 3  # that a query reads


@state
class Pages:
    """Bounds of the keys of one head's pages, coordinate by coordinate. Page p holds tokens [16 p, 16 p + 16)."""

    low: Float[Array, "M D"] = retrieval_index()  # of the cache's dtype
    high: Float[Array, "M D"] = retrieval_index()  # of the cache's dtype
    size: Int[Array, "M"]  # int32 tokens: 16, or 0 where no page was filed yet


@state
class QuestState:
    window: Window  # the tokens of the page that is not full are in its selected slots
    pending: Int[Array, "B"]  # int32, how many those are
    inserted: Int[Array, "B"]  # int32 pages
    overflow: Int[Array, "B"] = fault("tokens came to a full cache that must hold all of them")
    store: BlockStore = stacked("B", "H_kv")
    pages: Pages = stacked("B", "H_kv")


@dataclasses.dataclass(frozen=True)
class Quest(Policy[QuestState]):
    """Keeps every key and value; a query reads the max(3, budget // 16) pages of 16 tokens that promise most, by the
    upper bound sum_d max(q_d min_d, q_d max_d) on its logits.

    Attributes:
        budget: tokens read per query head, in whole pages; the last page, until it is full, is read beside it.
        select: "query_head", as published: every query head reads pages of its own. "group" (ours): all query heads of
            a kv head read the same, those whose bounds, were they logits, would draw the most attention summed over the
            heads; a group of four then reads a quarter of the bytes.
        compact_every: tokens between compactions.

    The paper keeps the first two layers whole: `FirstLayers(2, Quest(budget))`.

    Reference:
        Quest, section 3.
    """

    budget: int
    select: Literal["query_head", "group"] = "query_head"
    compact_every: int = 64

    is_retrieval = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, compact_every=self.compact_every)

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> QuestState:
        count = spec.capacity // PAGE
        bound = lambda: jnp.zeros((count, spec.head_dim), spec.dtype)  # noqa: E731
        empty = lambda _: (init_block_store(spec, count, PAGE), Pages(bound(), bound(), jnp.zeros(count, jnp.int32)))  # noqa: E731
        store, pages = per_head(empty)(jnp.zeros((spec.batch, spec.kv_heads)))
        none = lambda: jnp.zeros(spec.batch, jnp.int32)  # noqa: E731
        window = init_window(spec, 0, 0, PAGE - 1 + min(self.compact_every, spec.max_new_tokens))
        return QuestState(window, none(), none(), none(), store, pages)

    def prefill(self, state: QuestState, prompt: Prompt) -> QuestState:
        window, tokens = windows.fill(state.window, prompt), prompt.keys.shape[2]
        full = prompt.lengths // PAGE
        keys, values = (x.astype(window.keys.dtype) for x in (prompt.keys, prompt.values))

        def of_head(store, pages, keys, values, full):
            page = jnp.arange(-(-tokens // PAGE))
            source = jnp.where(page[:, None] < full, PAGE * page[:, None] + jnp.arange(PAGE), tokens)
            return write_pages(store, pages, 0, arrange_blocks(source, keys, values, jnp.arange(tokens)))

        store, pages = per_head(of_head, 0, 0, 0, 0, None)(state.store, state.pages, keys, values, full)
        left = jnp.minimum(PAGE * full[:, None] + jnp.arange(PAGE - 1), tokens - 1)
        source = jnp.broadcast_to(left[:, None], (*keys.shape[:2], PAGE - 1))
        slot = jnp.broadcast_to(jnp.arange(PAGE - 1), source.shape)
        window = windows.write_selected(window, slot, keys, values, source)
        return QuestState(window, prompt.lengths - PAGE * full, full, state.overflow, store, pages)

    def segments(self, state: QuestState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        select = functools.partial(self._select, state.pages)
        read = BlockStoreRead(state.store, select, (state.pages.low, state.pages.high, state.pages.size))
        return (*windows.window_segments(state.window, selected=state.pending), read)

    def compact(self, state: QuestState, new: Tokens) -> QuestState:
        window, left = windows.slide(state.window, new)

        def insert_chunk(keys, values, position, full):
            def of_head(store, pages, keys, values, position, full, inserted):
                number = jnp.arange(position.size).reshape(position.shape)
                join = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
                source = jnp.where(full[:, None], number, position.size)
                return write_pages(
                    store, pages, inserted, arrange_blocks(source, join(keys), join(values), position.reshape(-1))
                )

            of_heads = per_head(of_head, 0, 0, 0, 0, None, None, None)
            return of_heads(state.store, state.pages, keys, values, position, full, state.inserted)

        window, pending, full, inserted, lost = windows.insert_full_chunks(
            window, state.pending, left, PAGE, insert_chunk
        )
        store, pages = (state.store, state.pages) if inserted is None else inserted
        room = pages.size.shape[2]
        too_many = jnp.maximum(state.inserted + full - jnp.maximum(state.inserted, room), 0)
        return QuestState(window, pending, state.inserted + full, state.overflow + lost + PAGE * too_many, store, pages)

    def _select(self, pages: Pages, query: Float[Array, "B 1 H_q D"]) -> BlockSelection:
        """Selects the pages with the highest bounds for one query of every row."""
        count = pages.size.shape[2]
        first, max_pages = jnp.arange(count, dtype=jnp.int32), min(max(MIN_PAGES, self.budget // PAGE), count)

        def select_head(scores: Float[Array, "G M"], sizes: Int[Array, "M"]) -> SelectedBlocks:
            def select(scores: Float[Array, "M"]) -> SelectedBlocks:
                return select_blocks(
                    scores, sizes, first, max_tokens=PAGE * max_pages, max_blocks=max_pages, block_size=PAGE
                )

            return jax.vmap(select)(scores)

        scores = page_scores(pages, query)
        if self.select == "group":
            scores = group_score(scores / math.sqrt(query.shape[3]), pages.size)[:, :, None]
        selected = per_head(select_head)(scores, pages.size)
        indices, lengths = (
            x.reshape(x.shape[0], -1, x.shape[-1]) for x in (selected.block_indices, selected.block_lengths)
        )
        return BlockSelection(indices, lengths)


def write_pages(
    store: BlockStore, pages: Pages, first: Int[Array, ""] | int, blocks: BlockStore
) -> tuple[BlockStore, Pages]:
    """Writes the blocks that hold tokens (full ones, which come first) as pages from number `first` on."""
    full = blocks.position[:, 0] >= 0
    place = jnp.where(full, first + jnp.arange(full.shape[0]), OUT_OF_RANGE)
    keys = blocks.entries[..., : blocks.head_dim]
    bounds = Pages(jnp.min(keys, axis=1), jnp.max(keys, axis=1), jnp.full(full.shape, PAGE, jnp.int32))
    return write_blocks(store, place, blocks), write_index(pages, place, bounds)


def page_scores(pages: Pages, query: Float[Array, "B 1 H_q D"]) -> Float[Array, "B H_kv G M"]:
    """The upper bound sum_d max(q_d low_d, q_d high_d) of every query head and page."""
    batch, kv_heads, _, head_dim = pages.low.shape
    grouped = query.reshape(batch, kv_heads, -1, head_dim).astype(jnp.float32)

    def product(query, bound):
        return jnp.einsum(
            "bhgd,bhnd->bhgn", query, dequantize(bound).astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )

    return product(jnp.maximum(grouped, 0), pages.high) + product(jnp.minimum(grouped, 0), pages.low)
