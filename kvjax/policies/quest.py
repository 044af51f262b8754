"""Quest (Tang et al. 2024): everything is kept in pages of consecutive tokens; each query reads the pages that may hold
its largest logits."""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import window as windows
from kvjax.per_head import per_head
from kvjax.policy import Policy, check_settings
from kvjax.recall import NOWHERE, BlockStore, arrange, init_store, put, put_blocks, wait_and_file
from kvjax.segment import Choice, Recalled
from kvjax.state import fault, index, stacked, state
from kvjax.structures.clusters import group_score
from kvjax.window import Window, init_window
from pallas_kernels.best_parts import best_parts

PAGE = 16  # tokens
LEAST_PAGES = 3  # that a query reads


@state
class Pages:
    """Bounds of the keys of one head's pages, coordinate by coordinate. Page p holds tokens [16 p, 16 p + 16)."""

    low: Float[Array, "M D"] = index()  # of the cache's dtype
    high: Float[Array, "M D"] = index()  # of the cache's dtype
    size: Int[Array, "M"]  # int32 tokens: 16, or 0 where no page was filed yet


@state
class Paged:
    window: Window  # the tokens of the page that is not full are in its selected slots
    pending: Int[Array, "B"]  # int32, how many those are
    filed: Int[Array, "B"]  # int32 pages
    overflow: Int[Array, "B"] = fault("tokens came to a full cache that must hold all of them")
    store: BlockStore = stacked("B", "H_kv")
    pages: Pages = stacked("B", "H_kv")


@dataclasses.dataclass(frozen=True)
class Quest(Policy[Paged]):
    """Keeps every key and value; a query reads the max(3, budget // 16) pages of 16 tokens that promise most, by the
    upper bound sum_d max(q_d min_d, q_d max_d) on its logits.

    Attributes:
        budget: tokens read per query head, in whole pages; the last page, until it is full, is read beside it.
        select: "query_head", as published: every query head reads pages of its own. "group" (ours): all query heads of
            a kv head read the same, those whose bounds, were they logits, would draw the most attention summed over the
            heads; a group of four then reads a quarter of the bytes.
        compact_every: tokens between compactions.

    The paper keeps the first two layers whole: `FirstLayers(2, Quest(budget))`.

    Source: Quest, section 3.
    """

    budget: int
    select: Literal["query_head", "group"] = "query_head"
    compact_every: int = 64

    recalls = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.budget, compact_every=self.compact_every)

    def init(self, spec, row_keys) -> Paged:
        count = spec.capacity // PAGE
        bound = lambda: jnp.zeros((count, spec.head_dim), spec.dtype)  # noqa: E731
        empty = lambda _: (init_store(spec, count, PAGE), Pages(bound(), bound(), jnp.zeros(count, jnp.int32)))  # noqa: E731
        store, pages = per_head(empty)(jnp.zeros((spec.batch, spec.kv_heads)))
        none = lambda: jnp.zeros(spec.batch, jnp.int32)  # noqa: E731
        window = init_window(spec, 0, 0, waiting=PAGE - 1 + min(self.compact_every, spec.max_new))
        return Paged(window, none(), none(), none(), store, pages)

    def prefill(self, state, prompt):
        window, tokens = windows.fill(state.window, prompt), prompt.keys.shape[2]
        full = prompt.lengths // PAGE
        keys, values = (x.astype(window.keys.dtype) for x in (prompt.keys, prompt.values))

        def of_head(store, pages, keys, values, full):
            page = jnp.arange(-(-tokens // PAGE))
            source = jnp.where(page[:, None] < full, PAGE * page[:, None] + jnp.arange(PAGE), tokens)
            return file_pages(store, pages, 0, arrange(source, keys, values, jnp.arange(tokens)))

        store, pages = per_head(of_head, 0, 0, 0, 0, None)(state.store, state.pages, keys, values, full)
        left = jnp.minimum(PAGE * full[:, None] + jnp.arange(PAGE - 1), tokens - 1)
        source = jnp.broadcast_to(left[:, None], (*keys.shape[:2], PAGE - 1))
        slot = jnp.broadcast_to(jnp.arange(PAGE - 1), source.shape)
        window = windows.put_selected(window, slot, keys, values, source)
        return Paged(window, prompt.lengths - PAGE * full, full, state.overflow, store, pages)

    def read(self, state, newer):
        choose = functools.partial(self._choose, state.pages)
        recalled = Recalled(state.store, choose, (state.pages.low, state.pages.high, state.pages.size))
        return windows.shown(state.window, selected=state.pending), recalled

    def compact(self, state, new):
        window, left = windows.slide(state.window, new)

        def file(keys, values, position, full):
            def of_head(store, pages, keys, values, position, full, filed):
                number = jnp.arange(position.size).reshape(position.shape)
                join = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
                source = jnp.where(full[:, None], number, position.size)
                return file_pages(store, pages, filed, arrange(source, join(keys), join(values), position.reshape(-1)))

            of_heads = per_head(of_head, 0, 0, 0, 0, None, None, None)
            return of_heads(state.store, state.pages, keys, values, position, full, state.filed)

        window, pending, full, filed, lost = wait_and_file(window, state.pending, left, PAGE, file)
        store, pages = (state.store, state.pages) if filed is None else filed
        room = pages.size.shape[2]
        too_many = jnp.maximum(state.filed + full - jnp.maximum(state.filed, room), 0)
        return Paged(window, pending, state.filed + full, state.overflow + lost + PAGE * too_many, store, pages)

    def _choose(self, pages: Pages, query: Float[Array, "B 1 H_q D"], round) -> Choice:
        count = pages.size.shape[2]
        number, taken = jnp.arange(count, dtype=jnp.int32), min(max(LEAST_PAGES, self.budget // PAGE), count)

        def of_head(score: Float[Array, "G M"], size):
            best = functools.partial(best_parts, tokens=PAGE * taken, blocks=taken, places=PAGE)
            return jax.vmap(lambda score: best(score, size, number))(score)

        score = page_scores(pages, query)
        if self.select == "group":
            score = group_score(score / math.sqrt(query.shape[3]), pages.size)[:, :, None]
        read = per_head(of_head)(score, pages.size)
        join = lambda x: x.reshape(x.shape[0], -1, x.shape[-1])  # noqa: E731
        return Choice(join(read.block), join(read.tokens))


def file_pages(
    store: BlockStore, pages: Pages, first: Int[Array, ""] | int, blocks: BlockStore
) -> tuple[BlockStore, Pages]:
    """Writes the blocks that hold tokens (full ones, which come first) as pages from number `first` on."""
    full = blocks.position[:, 0] >= 0
    place = jnp.where(full, first + jnp.arange(full.shape[0]), NOWHERE)
    keys = blocks.entries[..., : blocks.head_dim]
    bounds = Pages(jnp.min(keys, axis=1), jnp.max(keys, axis=1), jnp.full(full.shape, PAGE, jnp.int32))
    return put_blocks(store, place, blocks), put(pages, place, bounds)


def page_scores(pages: Pages, query: Float[Array, "B 1 H_q D"]) -> Float[Array, "B H_kv G M"]:
    """The upper bound sum_d max(q_d low_d, q_d high_d) of every query head and page."""
    batch, kv_heads, _, head_dim = pages.low.shape
    grouped = query.reshape(batch, kv_heads, -1, head_dim).astype(jnp.float32)

    def product(query, bound):
        return jnp.einsum("bhgd,bhnd->bhgn", query, bound.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)

    return product(jnp.maximum(grouped, 0), pages.high) + product(jnp.minimum(grouped, 0), pages.low)
