"""Quest: everything is kept in pages of consecutive tokens; each query reads the pages that may hold its largest
logits."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.policies.choice import first_layers
from kvjax.policies.exact import exact
from kvjax.policies.windowed import init_windowed, over_heads, windowed_policy
from kvjax.policy import CachePolicy
from kvjax.recall import (
    NOWHERE,
    BlockStore,
    Filed,
    Plan,
    absorb_chunks,
    arrange,
    arrays_bytes,
    best_parts,
    init_store,
    put,
    put_blocks,
    recalling,
)
from kvjax.staging import check_budget, check_period, init_window, window_segments
from kvjax.state import HEAD_DIM, array, state

PAGES = "pages"
PAGE = 16  # tokens
LEAST_PAGES = 3  # that a query reads


@state
class Pages:
    """Bounds of the keys of one head's pages, coordinate by coordinate. Page p holds tokens [16 p, 16 p + 16)."""

    low: Float[Array, "N D"] = array(PAGES, HEAD_DIM)  # of the cache's dtype
    high: Float[Array, "N D"] = array(PAGES, HEAD_DIM)  # of the cache's dtype
    size: Int[Array, "N"] = array(PAGES)  # int32 tokens: 16, or 0 where no page was filed yet


def quest(budget: int, *, full_layers: int = 0, period: int = 64) -> CachePolicy:
    """Keeps every key and value; a query reads the max(3, budget // 16) pages of 16 tokens that promise most, by the
    upper bound sum_d max(q_d min_d, q_d max_d) on its logits, per query head.

    The last page, until it is full, is always read, as are staged tokens: both beside the budget. (The released kernels
    always read the last page, too; the released evaluation has it compete.)

    Args:
        budget: tokens read per query head, in whole pages.
        full_layers: so many first layers keep exact caches and read all of them; published as 2, which is for deep
            models.
        period: tokens between compactions.

    Raises:
        ValueError: for sizes that cannot be.

    Source: Quest (Tang et al. 2024), section 3; https://github.com/mit-han-lab/Quest.
    """
    check_budget(budget, 0, 0)
    check_period(period)
    if full_layers < 0:
        raise ValueError(f"full_layers={full_layers}; it must not be negative")
    pages = max(LEAST_PAGES, budget // PAGE)

    def init(spec, row_keys):
        del row_keys
        count = (spec.max_prompt + spec.max_new) // PAGE

        def one(_):
            bounds = Pages(
                low=jnp.zeros((count, spec.head_dim), spec.dtype),
                high=jnp.zeros((count, spec.head_dim), spec.dtype),
                size=jnp.zeros(count, jnp.int32),
            )
            return init_store(spec, count, PAGE), bounds

        store, index = over_heads(one)(jnp.zeros((spec.batch, spec.kv_heads)))
        filed = Filed(
            store=store,
            index=index,
            pending=jnp.zeros(spec.batch, jnp.int32),
            chunks=jnp.zeros(spec.batch, jnp.int32),
            learnt=None,
            group=spec.query_heads // spec.kv_heads,
        )
        return init_windowed(spec, init_window(spec, PAGE - 1 + min(period, spec.max_new), 0, 0, period), filed)

    def select_prompt(state, keys, values, queries):
        filed, window = state.selection, state.window
        tokens = keys.shape[1]
        full = window.total // PAGE
        keys, values = (x.swapaxes(1, 2).astype(window.keys.dtype) for x in (keys, values))

        def one(store, index, keys, values, full):
            page = jnp.arange(-(-tokens // PAGE))
            source = PAGE * page[:, None] + jnp.arange(PAGE)
            blocks = arrange(jnp.where(page[:, None] < full, source, tokens), keys, values, jnp.arange(tokens))
            return file_pages(store, index, 0, blocks)

        store, index = over_heads(one, 0, 0, 0, 0, None)(filed.store, filed.index, keys, values, full)
        # The tokens of the page that is not full wait in the window.
        left = jnp.minimum(PAGE * full[:, None] + jnp.arange(PAGE - 1), tokens - 1)

        def wait(buffer, x):
            return buffer.at[:, :, : PAGE - 1].set(jax.vmap(lambda x, left: x[:, left])(x, left))

        return dataclasses.replace(
            state,
            window=dataclasses.replace(window, keys=wait(window.keys, keys), values=wait(window.values, values)),
            selection=dataclasses.replace(
                filed, store=store, index=index, pending=window.total - PAGE * full, chunks=full
            ),
        )

    def file(filed, keys, values, position, full):
        def one(store, index, keys, values, position, full, chunks):
            number = jnp.arange(position.size).reshape(position.shape)
            join = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
            source = jnp.where(full[:, None], number, position.size)
            blocks = arrange(source, join(keys), join(values), position.reshape(-1))
            return file_pages(store, index, chunks, blocks)

        store, index = over_heads(one, 0, 0, 0, 0, None, None, None)(
            filed.store, filed.index, keys, values, position, full, filed.chunks
        )
        return dataclasses.replace(filed, store=store, index=index)

    def absorb(state, block):
        return absorb_chunks(state, block, PAGE, file, most=state.selection.index.size.shape[2])

    def segments(state, queries):
        return window_segments(state.window, selected=state.selection.pending, queries=queries)

    def plan(state, query) -> Plan:
        filed = state.selection
        count = filed.index.size.shape[2]
        score = page_scores(filed.index, query)

        def one(score: Float[Array, "G N"], size):
            number = jnp.arange(count, dtype=jnp.int32)
            taken = min(pages, count)
            return jax.vmap(
                lambda score: best_parts(score, size, number, tokens=PAGE * taken, blocks=taken, places=PAGE)
            )(score)

        read = over_heads(one)(score, filed.index.size)
        join = lambda x: x.reshape(x.shape[0], -1, x.shape[-1])  # noqa: E731
        return Plan(join(read.block), join(read.tokens))

    def index_bytes(state):
        return arrays_bytes(*jax.tree.leaves(state.selection.index))

    base = windowed_policy("quest", init=init, select=select_prompt, absorb=absorb, segments=segments, period=period)
    return first_layers(full_layers, exact(period=period), recalling(base, plan, index_bytes))


def file_pages(
    store: BlockStore, index: Pages, first: Int[Array, ""] | int, blocks: BlockStore
) -> tuple[BlockStore, Pages]:
    """Writes the blocks that hold tokens (full ones, which come first) as pages from number `first` on."""
    full = blocks.position[:, 0] >= 0
    place = jnp.where(full, first + jnp.arange(full.shape[0]), NOWHERE)
    bounds = Pages(
        low=jnp.min(blocks.keys, axis=1), high=jnp.max(blocks.keys, axis=1), size=jnp.full(full.shape, PAGE, jnp.int32)
    )
    return put_blocks(store, place, blocks), put(index, place, bounds)


def page_scores(index: Pages, query: Float[Array, "B 1 H_q D"]) -> Float[Array, "B H_kv G N"]:
    """The upper bound sum_d max(q_d low_d, q_d high_d) of every query head and page."""
    batch, kv_heads, _, head_dim = index.low.shape
    grouped = query.reshape(batch, kv_heads, -1, head_dim).astype(jnp.float32)

    def product(query, bound):
        return jnp.einsum("bhgd,bhnd->bhgn", query, bound.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)

    return product(jnp.maximum(grouped, 0), index.high) + product(jnp.minimum(grouped, 0), index.low)
