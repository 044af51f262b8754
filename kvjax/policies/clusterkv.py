"""ClusterKV (Liu et al. 2024): everything is kept, sorted by semantic clusters; each query reads the clusters that are
nearest to it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.policy import Policy, Prompt, check_budget, check_min
from kvjax.segment import BlockSelection, BlockStoreRead, SegmentLike
from kvjax.spec import CacheSpec
from kvjax.state import fault, stacked, state, static
from kvjax.stores import window as windows
from kvjax.stores.block_store import (
    OUT_OF_RANGE,
    BlockStore,
    init_block_store,
    max_blocks,
    max_selected_blocks,
    num_blocks,
)
from kvjax.stores.staging import Tokens
from kvjax.stores.window import Window, init_window
from kvjax.structures.clusters import Clusters, init_clusters, select_clusters, store_clusters
from kvjax.structures.k_means import KMeans, k_means
from kvjax.structures.per_head import per_head, stream_keys


@state
class ClusterKVState:
    window: Window  # tokens that wait to be clustered are in its selected slots
    pending: Int[Array, "B"]  # int32, how many wait
    chunks: Int[Array, "B"]  # int32 chunks that were clustered
    stream_keys: Key[Array, "B H_kv"]
    overflow: Int[Array, "B"] = fault("tokens came to a full cache that must hold all of them")
    store: BlockStore = stacked("B", "H_kv")
    clusters: Clusters = stacked("B", "H_kv")
    prompt_clusters: int = static()
    prompt_blocks: int = static()
    capacity: int = static()  # tokens that may ever be stored
    part_tokens: int = static()  # of a cluster, on average


@dataclasses.dataclass(frozen=True)
class ClusterKV(Policy[ClusterKVState]):
    """Keeps every key and value; a query reads sinks, recent tokens, tokens that wait to be clustered, and whole
    clusters in descending order of <query, mean key> until the budget is reached, the last one cut to its first tokens.

    A prompt is clustered by cosine k-means when it has been read, later tokens `chunk_tokens` at a time, those alone; until
    then they are attended to, beside the budget. `ClusterKVCertified` bounds what is missed; `ClusterKVPaper` is the
    paper's system, `ClusterKVReference` the released code of its study of accuracy.

    Attributes:
        budget: tokens read per query head (B), sinks and recent ones included, waiting and staged ones not. A query
            reads no more blocks than the budget takes in clusters of average size.
        sinks, recent: tokens always read; the paper's 16 and 0 by default. Sinks are never clustered.
        cluster_tokens: tokens of a prompt per cluster, on average (L / C_0); the paper's 80.
        clusters: so many for any prompt instead (C_0). Clusters of few tokens fill few places of their blocks.
        every, chunk_clusters: so many later tokens make so many clusters (m and C_+); the paper's 320 and 4. None:
            later tokens are never clustered, and always read.
        select: "query_head": every query head reads clusters of its own, as published; "group" (ours): all heads of a
            group read the same ones, those that hold the most attention per token by the clusters' means; a budget then
            costs so many times less.
        residual: (ours) clusters that are not read stay present as one entry each: their mean key and mean value,
            weighing as many tokens as were not read. In the paper they are absent.
        reach: (ours) clusters are ranked by <query, mean key> and so many standard deviations beyond it (see
            `nearest_clusters`), for four more bytes per cluster; 0, as published, by the mean key alone.
        places: tokens of a block of the store. A cluster's last block may be part empty and is read whole: 1 reads
            exactly the budget's tokens one by one, 16 and its multiples are what kernels read where they lie.
        iterations, sample: of k-means; for a prompt all iterations but the last two look at every `sample`-th key. The
            paper runs all on all.
        start, turn_to: of k-means, see there.
        compact_every: tokens between compactions; no more than `chunk_tokens`.

    Reference:
        ClusterKV, sections 3 and 4; https://github.com/sjtu-zhao-lab/ClusterKV.
    """

    budget: int
    sinks: int = 16
    recent: int = 0
    cluster_tokens: int = 80
    clusters: int | None = None
    chunk_tokens: int | None = 320
    chunk_clusters: int = 4
    select: Literal["group", "query_head"] = "group"
    residual: bool = True
    iterations: int = 10
    sample: int = 4
    kmeans_init: Literal["random", "k-means++"] = "random"
    centroid_update: Literal["directions", "keys"] = "directions"
    score_stddevs: float = 2.0
    block_size: int = 16
    compact_every: int = 64

    is_retrieval = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, self.recent, self.compact_every)
        check_min(
            1,
            cluster_tokens=self.cluster_tokens,
            clusters=self.clusters,
            chunk_tokens=self.chunk_tokens,
            block_size=self.block_size,
        )
        check_min(1, chunk_clusters=self.chunk_clusters, iterations=self.iterations, sample=self.sample)
        check_min(0, score_stddevs=self.score_stddevs)
        if self.chunk_tokens is not None and self.compact_every > self.chunk_tokens:
            raise ValueError(
                f"compact_every={self.compact_every} must not exceed every={self.chunk_tokens}: one chunk a time"
            )

    @property
    def tokens(self) -> int:
        """Tokens of clusters that a query reads."""
        return self.budget - self.sinks - self.recent

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> ClusterKVState:
        tokens, later = max(spec.max_prompt_tokens - self.sinks - self.recent, 0), spec.max_new_tokens + self.recent
        prompt_clusters = -(-tokens // self.cluster_tokens) if self.clusters is None else min(tokens, self.clusters)
        prompt_blocks = max_blocks(tokens, prompt_clusters, self.block_size)
        of_prompt = self.cluster_tokens if self.clusters is None else max(tokens // self.clusters, 1)
        of_chunk = of_prompt if self.chunk_tokens is None else max(self.chunk_tokens // self.chunk_clusters, 1)
        chunks, chunk_tokens = (0, 0) if self.chunk_tokens is None else (later // self.chunk_tokens, self.chunk_tokens)
        blocks = prompt_blocks + chunks * max_blocks(chunk_tokens, self.chunk_clusters, self.block_size)
        count = prompt_clusters + chunks * self.chunk_clusters
        waiting = min(later, chunk_tokens - 1 + self.compact_every) if chunks else later
        value_dim = spec.value_width if self.residual else None
        make = functools.partial(
            init_clusters, count, spec.head_dim, value_dim, spec.dtype, with_rms=self.score_stddevs > 0
        )
        keys = stream_keys(row_keys, spec.kv_heads)
        store, clusters = per_head(lambda _: (init_block_store(spec, blocks, self.block_size), make()))(keys)
        none = lambda: jnp.zeros(spec.batch, jnp.int32)  # noqa: E731
        return ClusterKVState(
            window=init_window(spec, self.sinks, self.recent, waiting),
            pending=none(),
            chunks=none(),
            stream_keys=keys,
            overflow=none(),
            store=store,
            clusters=clusters,
            prompt_clusters=prompt_clusters,
            prompt_blocks=prompt_blocks,
            capacity=tokens + chunks * chunk_tokens,
            part_tokens=min(of_prompt, of_chunk),
        )

    def prefill(self, state: ClusterKVState, prompt: Prompt) -> ClusterKVState:
        state = dataclasses.replace(state, window=windows.fill(state.window, prompt))
        if not state.prompt_clusters or prompt.keys.shape[2] <= self.sinks:
            return state
        _, _, count = windows.occupancy(state.window)
        position = jnp.arange(self.sinks, prompt.keys.shape[2], dtype=jnp.int32)

        def of_head(store, clusters, stream_key, keys, values, count):
            rng, valid = jax.random.fold_in(stream_key, 0), position < self.sinks + count
            used = -(-count // self.cluster_tokens) if self.clusters is None else state.prompt_clusters
            label = self._k_means(rng, keys, valid, state.prompt_clusters, num_clusters=used, sample=self.sample).label
            made = (state.prompt_clusters, state.prompt_blocks)
            return store_clusters(store, clusters, label, (keys, values, position), made, (0, 0))

        later = lambda x: x[:, :, self.sinks :].astype(state.window.keys.dtype)  # noqa: E731
        store, clusters = per_head(of_head, 0, 0, 0, 0, 0, None)(
            state.store, state.clusters, state.stream_keys, later(prompt.keys), later(prompt.values), count
        )
        return dataclasses.replace(state, store=store, clusters=clusters)

    def segments(self, state: ClusterKVState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        # Where mean keys are shown, attention reads them again.
        clusters = state.clusters
        means = () if self.residual else (clusters.mean_key,)
        index = (clusters.size, clusters.first, *means, *(() if clusters.rms is None else (clusters.rms,)))
        select = functools.partial(self._select, state)
        return (
            *windows.window_segments(state.window, selected=state.pending),
            BlockStoreRead(state.store, select, index),
        )

    def compact(self, state: ClusterKVState, new: Tokens) -> ClusterKVState:
        window, left = windows.slide(state.window, new)
        chunk_tokens = (
            window.keys.shape[2] + 1 if self.chunk_tokens is None else self.chunk_tokens
        )  # a chunk that is never full
        insert_chunk = functools.partial(self._file_chunks, state, chunk_tokens)
        window, pending, full, inserted, lost = windows.insert_full_chunks(
            window, state.pending, left, chunk_tokens, insert_chunk
        )
        store, clusters = (state.store, state.clusters) if inserted is None else inserted
        room = (clusters.size.shape[2] - state.prompt_clusters) // self.chunk_clusters
        too_many = jnp.maximum(state.chunks + full - jnp.maximum(state.chunks, room), 0)
        return dataclasses.replace(
            state,
            window=window,
            pending=pending,
            chunks=state.chunks + full,
            store=store,
            clusters=clusters,
            overflow=state.overflow + lost + chunk_tokens * too_many,
        )

    def _file_chunks(self, state: ClusterKVState, chunk_tokens: int, keys, values, position, full):
        """Clusters the first chunk of every row where it is full (compactions come at least once per chunk)."""
        count, blocks = self.chunk_clusters, max_blocks(chunk_tokens, self.chunk_clusters, self.block_size)
        some = jnp.any(full[:, 0])

        def of_head(store, clusters, stream_key, keys, values, position, full, chunk):
            rng, valid = jax.random.fold_in(stream_key, 1 + chunk), jnp.broadcast_to(full[0], (chunk_tokens,))
            cluster = lambda: self._k_means(rng, keys[0], valid, count).label  # noqa: E731
            label = jax.lax.cond(some, cluster, lambda: jnp.full(valid.shape, count, jnp.int32))
            behind = lambda first: jnp.where(full[0], first, OUT_OF_RANGE)  # noqa: E731
            first = (behind(state.prompt_clusters + chunk * count), behind(state.prompt_blocks + chunk * blocks))
            return store_clusters(store, clusters, label, (keys[0], values[0], position[0]), (count, blocks), first)

        of_heads = per_head(of_head, 0, 0, 0, 0, 0, None, None, None)
        return of_heads(state.store, state.clusters, state.stream_keys, keys, values, position, full, state.chunks)

    @property
    def _k_means(self) -> Callable[..., KMeans]:
        of_settings = functools.partial(
            k_means, iterations=self.iterations, kmeans_init=self.kmeans_init, centroid_update=self.centroid_update
        )
        return functools.partial(of_settings, polish=min(2, self.iterations))

    def _select(self, state: ClusterKVState, query: Float[Array, "B 1 H_q D"]) -> BlockSelection:
        """Selects clusters for one query of every row; all blocks if the budget is as large as the store."""
        stored, usual = num_blocks(state.store), max_selected_blocks(self.tokens, state.part_tokens, self.block_size)
        return select_clusters(
            state.clusters,
            query,
            self.select,
            max_tokens=self.tokens,
            max_blocks=stored if self.tokens >= state.capacity else min(stored, usual),
            block_size=self.block_size,
            score_stddevs=self.score_stddevs,
        )
