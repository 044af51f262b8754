"""ClusterKV (Liu et al. 2024): all tokens are kept in semantic clusters, and queries read the nearest clusters."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

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
from kvjax.structures.k_means import k_means
from kvjax.structures.per_head import per_head, stream_keys


@state
class ClusterKVState:
    """The window, with tokens that are not clustered yet in its selected slots, and the clusters."""

    window: Window
    pending: Int[Array, "B"]  # int32, tokens that are not clustered yet
    chunks: Int[Array, "B"]  # int32, chunks that were clustered
    stream_keys: Key[Array, "B H_kv"]
    overflow: Int[Array, "B"] = fault("tokens came to a full cache that must hold all of them")
    store: BlockStore = stacked("B", "H_kv")
    clusters: Clusters = stacked("B", "H_kv")
    prompt_clusters: int = static()
    prompt_blocks: int = static()
    capacity: int = static()  # maximum number of tokens in the store
    part_tokens: int = static()  # average tokens of a cluster


@dataclasses.dataclass(frozen=True)
class ClusterKV(Policy[ClusterKVState]):
    """Keeps every token in clusters of similar keys; a query reads the clusters with the highest scores.

    A cluster's score is <query, mean key>. A query also reads sinks, recent tokens and tokens that are not clustered
    yet. The last cluster that fits the budget is read in part. The prompt is clustered by cosine k-means after it has
    been read, and later tokens in chunks of `chunk_tokens`.

    `ClusterKVPaper` has the settings of the paper, `ClusterKVReference` the settings of the released accuracy study.

    Attributes:
        budget: tokens that a query head reads (B), sinks and recent tokens included, tokens that are not clustered yet
            excluded. The number of blocks is limited to the number that clusters of average size need.
        sinks: first tokens, which are always read and never clustered (16 in the paper).
        recent: newest tokens that are always read (0 in the paper).
        cluster_tokens: average tokens per cluster of a prompt (L / C_0; 80 in the paper).
        clusters: number of clusters of a prompt (C_0), instead of `cluster_tokens`. Small clusters leave blocks partly
            empty.
        chunk_tokens: later tokens that are clustered together (m; 320 in the paper). None: later tokens are never
            clustered and always read.
        chunk_clusters: clusters per chunk (C_+; 4 in the paper).
        select: "query_head": every query head reads the clusters with the highest scores, as in the paper. "group": all
            query heads of a KV head read the same clusters, those with the most attention per token. A budget then
            reads fewer bytes, by the group size.
        residual: whether a cluster that is not read is present as one entry: its mean key and mean value, weighted by
            the tokens that are not read. In the paper it is absent.
        iterations: iterations of k-means.
        sample: all iterations for a prompt except the last two use every `sample`-th key; 1 in the paper.
        kmeans_init: see `kvjax.structures.k_means.k_means`.
        centroid_update: see `kvjax.structures.k_means.k_means`.
        score_stddevs: standard deviations of a cluster's keys that are added to its score (see `select_clusters`), at
            the cost of four bytes per cluster; 0 in the paper.
        block_size: tokens per block of the store. A cluster's last block may be partly empty. 1 reads exactly the
            budget, token by token; kernels read multiples of 16 without copies.
        compact_every: tokens between compactions; at most `chunk_tokens`.

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
        at_least_one = (
            *("cluster_tokens", "clusters", "chunk_tokens", "chunk_clusters"),
            *("iterations", "sample", "block_size"),
        )
        check_min(1, **{name: getattr(self, name) for name in at_least_one})
        check_min(0, score_stddevs=self.score_stddevs)
        if self.chunk_tokens is not None and self.compact_every > self.chunk_tokens:
            raise ValueError(
                f"compact_every={self.compact_every} must be at most chunk_tokens={self.chunk_tokens}, so that a "
                "compaction completes one chunk"
            )

    @property
    def tokens(self) -> int:
        """Tokens of clusters that a query reads."""
        return self.budget - self.sinks - self.recent

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> ClusterKVState:
        """Returns an empty window and an empty store for `spec`."""
        tokens, later = max(spec.max_prompt_tokens - self.sinks - self.recent, 0), spec.max_new_tokens + self.recent
        if self.clusters is None:
            prompt_clusters, part_tokens = -(-tokens // self.cluster_tokens), self.cluster_tokens
        else:
            prompt_clusters, part_tokens = min(tokens, self.clusters), max(tokens // self.clusters, 1)
        prompt_blocks = max_blocks(tokens, prompt_clusters, self.block_size)
        chunks = chunk_tokens = 0
        if self.chunk_tokens is not None:
            chunks, chunk_tokens = later // self.chunk_tokens, self.chunk_tokens
            part_tokens = min(part_tokens, max(chunk_tokens // self.chunk_clusters, 1))
        blocks = prompt_blocks + chunks * max_blocks(chunk_tokens, self.chunk_clusters, self.block_size)
        count = prompt_clusters + chunks * self.chunk_clusters
        max_pending = min(later, chunk_tokens - 1 + self.compact_every) if chunks else later
        value_dim = spec.value_width if self.residual else None
        with_rms = self.score_stddevs > 0

        def init_head(_: Key[Array, ""]) -> tuple[BlockStore, Clusters]:
            clusters = init_clusters(count, spec.head_dim, value_dim, spec.dtype, with_rms=with_rms)
            return init_block_store(spec, blocks, self.block_size), clusters

        keys = stream_keys(row_keys, spec.kv_heads)
        store, clusters = per_head(init_head)(keys)
        return ClusterKVState(
            window=init_window(spec, self.sinks, self.recent, max_pending),
            pending=jnp.zeros(spec.batch, jnp.int32),
            chunks=jnp.zeros(spec.batch, jnp.int32),
            stream_keys=keys,
            overflow=jnp.zeros(spec.batch, jnp.int32),
            store=store,
            clusters=clusters,
            prompt_clusters=prompt_clusters,
            prompt_blocks=prompt_blocks,
            capacity=tokens + chunks * chunk_tokens,
            part_tokens=part_tokens,
        )

    def prefill(self, state: ClusterKVState, prompt: Prompt) -> ClusterKVState:
        """Fills the window and clusters the prompt's tokens between sinks and recent ones."""
        state = dataclasses.replace(state, window=windows.fill(state.window, prompt))
        count, blocks = state.prompt_clusters, state.prompt_blocks
        if not count or prompt.keys.shape[2] <= self.sinks:
            return state
        _, _, middle = windows.occupancy(state.window)
        position = jnp.arange(self.sinks, prompt.keys.shape[2], dtype=jnp.int32)

        def cluster_head(
            store: BlockStore, clusters: Clusters, stream_key: Array, keys: Array, values: Array, middle: Array
        ) -> tuple[BlockStore, Clusters]:
            """Clusters the first `middle` of one head's `keys` and writes them into `store` and `clusters`."""
            rng, valid = jax.random.fold_in(stream_key, 0), position < self.sinks + middle
            num_clusters = -(-middle // self.cluster_tokens) if self.clusters is None else count
            label = self._label(rng, keys, valid, count, num_clusters=num_clusters, sample=self.sample)
            return store_clusters(store, clusters, keys, values, position, label, count=count, blocks=blocks)

        keys, values = (x[:, :, self.sinks :].astype(state.window.keys.dtype) for x in (prompt.keys, prompt.values))
        cluster = per_head(cluster_head, 0, 0, 0, 0, 0, None)
        store, clusters = cluster(state.store, state.clusters, state.stream_keys, keys, values, middle)
        return dataclasses.replace(state, store=store, clusters=clusters)

    def segments(self, state: ClusterKVState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window and the store of a state."""
        clusters = state.clusters
        # Mean keys of residual clusters are read as entries, and are not counted twice.
        means = () if self.residual else (clusters.mean_key,)
        index = (clusters.size, clusters.first_block, *means, *(() if clusters.rms is None else (clusters.rms,)))
        read = BlockStoreRead(state.store, functools.partial(self._select, state), index)
        return (*windows.window_segments(state.window, selected=state.pending), read)

    def compact(self, state: ClusterKVState, new: Tokens) -> ClusterKVState:
        """Slides the window over new tokens and clusters a full chunk of tokens that left it."""
        window, left = windows.slide(state.window, new)
        # Without chunks, a number of tokens that never come together.
        chunk_tokens = window.keys.shape[2] + 1 if self.chunk_tokens is None else self.chunk_tokens
        window, pending, full, clustered, lost = windows.insert_full_chunks(
            window, state.pending, left, chunk_tokens, functools.partial(self._cluster_chunk, state)
        )
        store, clusters = (state.store, state.clusters) if clustered is None else clustered
        max_chunks = (clusters.size.shape[2] - state.prompt_clusters) // self.chunk_clusters
        excess = jnp.maximum(state.chunks + full - jnp.maximum(state.chunks, max_chunks), 0)
        return dataclasses.replace(
            state,
            window=window,
            pending=pending,
            chunks=state.chunks + full,
            store=store,
            clusters=clusters,
            overflow=state.overflow + lost + chunk_tokens * excess,
        )

    def _cluster_chunk(
        self,
        state: ClusterKVState,
        keys: Float[Array, "B H R C D"],
        values: Float[Array, "B H R C D_v"],
        position: Int[Array, "B R C"],
        full: Bool[Array, "B R"],
    ) -> tuple[BlockStore, Clusters]:
        """Clusters the first chunk of every row in which it is full; a compaction completes at most one."""
        chunk_tokens, count = keys.shape[3], self.chunk_clusters
        blocks = max_blocks(chunk_tokens, count, self.block_size)
        any_full = jnp.any(full[:, 0])

        def cluster_head(
            store: BlockStore, clusters: Clusters, stream_key: Array, *chunk: Array
        ) -> tuple[BlockStore, Clusters]:
            """Clusters one head's chunk, if it is full, and writes it into `store` and `clusters`."""
            keys, values, position, full, number = chunk
            rng, valid = jax.random.fold_in(stream_key, 1 + number), jnp.broadcast_to(full[0], (chunk_tokens,))
            label = jax.lax.cond(
                any_full,
                lambda: self._label(rng, keys[0], valid, count),
                lambda: jnp.full(valid.shape, count, jnp.int32),
            )
            return store_clusters(
                store,
                clusters,
                keys[0],
                values[0],
                position[0],
                label,
                count=count,
                blocks=blocks,
                first_cluster=jnp.where(full[0], state.prompt_clusters + number * count, OUT_OF_RANGE),
                first_block=jnp.where(full[0], state.prompt_blocks + number * blocks, OUT_OF_RANGE),
            )

        cluster = per_head(cluster_head, 0, 0, 0, 0, 0, None, None, None)
        return cluster(state.store, state.clusters, state.stream_keys, keys, values, position, full, state.chunks)

    def _label(
        self,
        rng: Key[Array, ""],
        keys: Float[Array, "T D"],
        valid: Bool[Array, "T"],
        count: int,
        num_clusters: Int[Array, ""] | int | None = None,
        sample: int = 1,
    ) -> Int[Array, "T"]:
        """Returns the cluster of every key; `count` for an invalid key."""
        return k_means(
            rng,
            keys,
            valid,
            count,
            num_clusters=num_clusters,
            iterations=self.iterations,
            kmeans_init=self.kmeans_init,
            sample=sample,
            polish=min(2, self.iterations),
            centroid_update=self.centroid_update,
        ).label

    def _select(self, state: ClusterKVState, query: Float[Array, "B 1 H_q D"]) -> BlockSelection:
        """Selects clusters for one query of every row; all blocks if the budget is as large as the store."""
        blocks, average = num_blocks(state.store), max_selected_blocks(self.tokens, state.part_tokens, self.block_size)
        return select_clusters(
            state.clusters,
            query,
            self.select,
            max_tokens=self.tokens,
            max_blocks=blocks if self.tokens >= state.capacity else min(blocks, average),
            block_size=self.block_size,
            score_stddevs=self.score_stddevs,
        )
