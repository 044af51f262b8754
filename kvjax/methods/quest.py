"""Quest (Tang et al. 2024): all tokens are kept in pages, and queries read the pages with the highest bounds.

All tokens stay in the cache; a step reads few pages of them. Per KV head:

1. Tokens are stored in pages of 16, in the order of the text. A page that is not full yet is always read.
2. The index of a page is the minimum and the maximum of its keys in every dimension.
3. For a query q, sum_d max(q_d min_d, q_d max_d) is at least the product of q with any key of the page. This upper
   bound is the page's score; it costs two products with vectors instead of 16.
4. The pages with the highest scores are read, as many as the budget holds, and attended to exactly.

While decoding, a page that becomes full is appended to the store, and its minimum and maximum to the index. One
relevant token among 15 others is enough for a high bound. Keys that differ in many dimensions also give a high bound,
so that some pages are read without need.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.block_store import (
    OUT_OF_RANGE,
    BlockStore,
    arrange_blocks,
    init_block_store,
    write_blocks,
    write_index,
)
from kvjax.policy import Policy, Prompt, check_budget
from kvjax.quantization import dequantize
from kvjax.segment import BlockSelection, BlockStoreRead, SegmentLike
from kvjax.shared import window as windows
from kvjax.shared.clusters import group_score, select_head_blocks
from kvjax.shared.per_head import per_head
from kvjax.shared.window import Window, init_window
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import fault, retrieval_index, stacked, state

PAGE = 16  # tokens
MIN_PAGES = 3  # pages that a query reads at least


@state
class Pages:
    """Coordinate-wise bounds of the keys of one head's pages. Page p holds tokens [16 p, 16 p + 16)."""

    low: Float[Array, "M D"] = retrieval_index()  # of the cache's dtype
    high: Float[Array, "M D"] = retrieval_index()  # of the cache's dtype
    size: Int[Array, "M"]  # int32 tokens: 16, or 0 for a page that is not full


@state
class QuestState:
    """The window, with tokens of the page that is not full in its selected slots, and the full pages."""

    window: Window
    pending: Int[Array, "B"]  # int32, tokens of the page that is not full
    inserted: Int[Array, "B"]  # int32, full pages
    overflow: Int[Array, "B"] = fault("tokens came to a full cache that must hold all of them")
    store: BlockStore = stacked("B", "H_kv")
    pages: Pages = stacked("B", "H_kv")


@dataclasses.dataclass(frozen=True)
class Quest(Policy[QuestState]):
    """Keeps every token in pages of 16; a query reads the max(3, budget // 16) pages with the highest bounds.

    The bound of a page is an upper bound of its logits: sum_d max(q_d min_d, q_d max_d) over the coordinates' minima
    and maxima. The paper does not compress the first two layers: use `FirstLayers(2, Quest(budget), Exact())`.

    Attributes:
        budget: tokens that a query head reads, in full pages; the page that is not full is read in addition.
        select: "query_head": every query head selects pages, as in the paper. "group": all query heads of a KV head
            read the same pages, those whose bounds, taken as logits, receive the most attention summed over the heads.
            A group of four then reads a quarter of the bytes.
        compact_every: tokens between compactions.

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
        """Returns an empty window and an empty store for `spec`."""
        count = spec.capacity // PAGE

        def init_head(_: Array) -> tuple[BlockStore, Pages]:
            low, high = (jnp.zeros((count, spec.head_dim), spec.dtype) for _ in range(2))
            return init_block_store(spec, count, PAGE), Pages(low, high, jnp.zeros(count, jnp.int32))

        store, pages = per_head(init_head)(jnp.zeros((spec.batch, spec.kv_heads)))
        # The page that is not full, and the tokens of one compaction.
        window = init_window(spec, 0, 0, PAGE - 1 + min(self.compact_every, spec.max_new_tokens))
        pending, inserted, overflow = (jnp.zeros(spec.batch, jnp.int32) for _ in range(3))
        return QuestState(window, pending, inserted, overflow, store, pages)

    def prefill(self, state: QuestState, prompt: Prompt) -> QuestState:
        """Writes the prompt's full pages into the store."""
        window, tokens = windows.fill(state.window, prompt), prompt.keys.shape[2]
        full = prompt.lengths // PAGE
        keys, values = (x.astype(window.keys.dtype) for x in (prompt.keys, prompt.values))

        def write_head(
            store: BlockStore, pages: Pages, keys: Array, values: Array, full: Int[Array, ""]
        ) -> tuple[BlockStore, Pages]:
            """Writes the first `full` pages of one head's tokens into `store` and their bounds into `pages`."""
            page = jnp.arange(-(-tokens // PAGE))
            source = jnp.where(page[:, None] < full, PAGE * page[:, None] + jnp.arange(PAGE), tokens)
            return _write_pages(store, pages, 0, arrange_blocks(source, keys, values, jnp.arange(tokens)))

        store, pages = per_head(write_head, 0, 0, 0, 0, None)(state.store, state.pages, keys, values, full)
        remaining = jnp.minimum(PAGE * full[:, None] + jnp.arange(PAGE - 1), tokens - 1)
        source = jnp.broadcast_to(remaining[:, None], (*keys.shape[:2], PAGE - 1))
        pending = prompt.lengths - PAGE * full
        slot = jnp.arange(PAGE - 1)
        slot = jnp.broadcast_to(jnp.where(slot < pending[:, None], slot, window.selected)[:, None], source.shape)
        window = windows.write_selected(window, slot, keys, values, source)
        return QuestState(window, pending, full, state.overflow, store, pages)

    def segments(self, state: QuestState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window and the store of a state."""
        select = functools.partial(self._select, state.pages)
        read = BlockStoreRead(state.store, select, (state.pages.low, state.pages.high, state.pages.size))
        return (*windows.window_segments(state.window, selected=state.pending), read)

    def compact(self, state: QuestState, new: Tokens) -> QuestState:
        """Collects new tokens and writes pages that are full into the store."""
        window, left = windows.slide(state.window, new)
        window, pending, full, inserted, lost = windows.insert_full_chunks(
            window, state.pending, left, PAGE, functools.partial(_insert_pages, state)
        )
        store, pages = (state.store, state.pages) if inserted is None else inserted
        excess = jnp.maximum(state.inserted + full - jnp.maximum(state.inserted, pages.size.shape[2]), 0)
        return QuestState(window, pending, state.inserted + full, state.overflow + lost + PAGE * excess, store, pages)

    def _select(self, pages: Pages, query: Float[Array, "B 1 H_q D"]) -> BlockSelection:
        """Selects the pages with the highest bounds for one query of every row."""
        batch, kv_heads, count = pages.size.shape
        max_pages = min(max(MIN_PAGES, self.budget // PAGE), count)
        scores = _page_scores(pages, query)
        if self.select == "group":
            scores = group_score(scores / math.sqrt(query.shape[3]), pages.size)[:, :, None]
        first = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, kv_heads, count))
        limits = {"max_tokens": PAGE * max_pages, "max_blocks": max_pages, "block_size": PAGE}
        return BlockSelection(*select_head_blocks(scores, pages.size, first, **limits)[:2])


def _insert_pages(
    state: QuestState,
    keys: Float[Array, "B H R P D"],
    values: Float[Array, "B H R P D_v"],
    position: Int[Array, "B R P"],
    full: Bool[Array, "B R"],
) -> tuple[BlockStore, Pages]:
    """Appends the full ones of R pages to the store."""

    def insert_head(store: BlockStore, pages: Pages, *page: Array) -> tuple[BlockStore, Pages]:
        """Writes the full pages of one head into its `store` and their bounds into `pages`."""
        keys, values, position, full, inserted = page
        number = jnp.arange(position.size).reshape(position.shape)
        source = jnp.where(full[:, None], number, position.size)
        keys, values = (x.reshape(-1, x.shape[-1]) for x in (keys, values))
        return _write_pages(store, pages, inserted, arrange_blocks(source, keys, values, position.reshape(-1)))

    insert = per_head(insert_head, 0, 0, 0, 0, None, None, None)
    return insert(state.store, state.pages, keys, values, position, full, state.inserted)


def _write_pages(
    store: BlockStore, pages: Pages, first: Int[Array, ""] | int, blocks: BlockStore
) -> tuple[BlockStore, Pages]:
    """Writes the full blocks, which come first, as pages from index `first` on."""
    full = blocks.position[:, 0] >= 0
    index = jnp.where(full, first + jnp.arange(full.shape[0]), OUT_OF_RANGE)
    keys = blocks.entries[..., : blocks.head_dim]
    bounds = Pages(jnp.min(keys, axis=1), jnp.max(keys, axis=1), jnp.full(full.shape, PAGE, jnp.int32))
    return write_blocks(store, index, blocks), write_index(pages, index, bounds)


def _page_scores(pages: Pages, query: Float[Array, "B 1 H_q D"]) -> Float[Array, "B H_kv G M"]:
    """Returns the upper bound sum_d max(q_d low_d, q_d high_d) for every query head and page."""
    batch, kv_heads, _, head_dim = pages.low.shape
    grouped = query.reshape(batch, kv_heads, -1, head_dim).astype(jnp.float32)

    def product(query: Float[Array, "B H_kv G D"], bound: Float[Array, "B H_kv M D"]) -> Float[Array, "B H_kv G M"]:
        """Returns the product of every `query` with every page's `bound`, float32."""
        bound = dequantize(bound).astype(jnp.float32)
        return jnp.einsum("bhgd,bhnd->bhgn", query, bound, precision=jax.lax.Precision.HIGHEST)

    # max(q low, q high) is q high where q is positive, and q low where it is negative.
    return product(jnp.maximum(grouped, 0), pages.high) + product(jnp.minimum(grouped, 0), pages.low)
