"""The base class of policies that keep every token in clusters of similar keys."""

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.block_store import (
    OUT_OF_RANGE,
    BlockStore,
    init_block_store,
    max_blocks,
    max_selected_blocks,
    num_blocks,
)
from kvjax.policy import Policy, Prompt, check_budget, check_min
from kvjax.segment import BlockSelection, BlockStoreRead, SegmentLike
from kvjax.shared import window as windows
from kvjax.shared.clusters import Clusters, init_clusters, store_clusters
from kvjax.shared.k_means import k_means
from kvjax.shared.per_head import per_head, stream_keys
from kvjax.shared.window import Window, init_window
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import fault, stacked, state, static

KERNEL_BLOCK = 16  # tokens of a block that kernels read without copies
LARGE_CLUSTER = 64  # tokens of a cluster that fills such blocks well


@state
class ClusterState:
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
    max_chunks: int = static()
    capacity: int = static()  # maximum number of tokens in the store
    cluster_tokens: int = static()  # average tokens of a cluster


@dataclasses.dataclass(frozen=True)
class ClusterPolicy(Policy[ClusterState]):
    """Keeps every token in clusters of similar keys; a query reads the clusters with the highest scores.

    A query also reads sinks, recent tokens and tokens that are not clustered yet. The last cluster that fits the budget
    is read in part. The prompt is clustered after it has been read, and later tokens in chunks. Subclasses are frozen
    dataclasses that define the number of clusters, the options of k-means and the scores.

    Attributes:
        budget: tokens that a query reads, sinks and recent tokens included, tokens that are not clustered yet excluded.
            The number of blocks is limited to the number that clusters of average size need.
        sinks: first tokens, which are always read and never clustered.
        recent: newest tokens that are always read.
        chunk_tokens: later tokens that are clustered together; None: later tokens are never clustered and always read.
        chunk_clusters: clusters per chunk.
        block_size: tokens per block of the store. A cluster's last block may be partly empty. 1 reads exactly the
            budget, token by token; kernels read multiples of 16 without copies. None: 16 if the clusters of a prompt
            have 64 tokens or more on average, and 1 for smaller ones, whose blocks would be half empty.
        compact_every: tokens between compactions; at most `chunk_tokens`.
    """

    budget: int
    sinks: int = 16
    recent: int = 0
    chunk_tokens: int | None = 320
    chunk_clusters: int = 4
    block_size: int | None = None
    compact_every: int = 64

    is_retrieval = True
    has_residual: ClassVar[bool] = False  # whether clusters have mean values and deviations of keys

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, self.recent, self.compact_every)
        check_min(1, chunk_tokens=self.chunk_tokens, chunk_clusters=self.chunk_clusters, block_size=self.block_size)
        if self.chunk_tokens is not None and self.compact_every > self.chunk_tokens:
            raise ValueError(
                f"compact_every={self.compact_every} must be at most chunk_tokens={self.chunk_tokens}, so that a "
                "compaction completes one chunk"
            )

    @abc.abstractmethod
    def num_clusters(self, tokens: Any) -> Any:
        """Returns the number of clusters of a prompt of `tokens` tokens, an int or an array, not decreasing in them."""

    @abc.abstractmethod
    def k_means_options(self, is_prompt: bool) -> dict[str, Any]:
        """Returns the options of `k_means` for a prompt, or for a chunk of later tokens."""

    def label(
        self,
        rng: Key[Array, ""],
        keys: Float[Array, "T D"],
        valid: Bool[Array, "T"],
        count: int,
        num_clusters: Int[Array, ""] | None = None,
    ) -> Int[Array, "T"]:
        """Clusters one head's keys.

        Args:
            keys: keys of a prompt or of a chunk.
            valid: keys that count.
            count: maximum number of clusters.
            num_clusters: number of clusters of a prompt; None for a chunk of later tokens, which has `count`.

        Returns:
            int32 cluster of every key; `count` for a key that does not count.
        """
        options = self.k_means_options(is_prompt=num_clusters is not None)
        return k_means(rng, keys, valid, count, num_clusters=num_clusters, **options).label

    @abc.abstractmethod
    def select(self, clusters: Clusters, query: Float[Array, "B 1 H_q D"], **limits: int) -> BlockSelection:
        """Selects clusters.

        Args:
            clusters: clusters of all rows and heads.
            query: one query per row.
            **limits: the limits of `kvjax.shared.clusters.select_head_blocks`.

        Returns:
            The selected blocks.
        """

    def min_budget(self, spec: CacheSpec | None = None) -> int:
        """Returns the sinks and recent tokens, and at least one slot."""
        return max(self.sinks + self.recent, 1)

    @property
    def max_tokens(self) -> int:
        """Tokens of clusters that a query reads."""
        return self.budget - self.sinks - self.recent

    def for_layer(self, spec: CacheSpec) -> Policy:
        """Returns the policy with the size of its blocks."""
        if self.block_size is not None:
            return self
        tokens = max(spec.max_prompt_tokens - self.sinks - self.recent, 0)
        has_large_clusters = tokens >= LARGE_CLUSTER * self.num_clusters(tokens) > 0
        return dataclasses.replace(self, block_size=KERNEL_BLOCK if has_large_clusters else 1)

    @property
    def _tokens_per_block(self) -> int:
        return self.block_size or 1

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> ClusterState:
        """Returns an empty window and an empty store for `spec`."""
        tokens, later = max(spec.max_prompt_tokens - self.sinks - self.recent, 0), spec.max_new_tokens + self.recent
        prompt_clusters = int(self.num_clusters(tokens))
        cluster_tokens = max(-(-tokens // max(prompt_clusters, 1)), 1)
        prompt_blocks = max_blocks(tokens, prompt_clusters, self._tokens_per_block)
        chunks = chunk_tokens = 0
        if self.chunk_tokens is not None:
            chunks, chunk_tokens = later // self.chunk_tokens, self.chunk_tokens
            cluster_tokens = min(cluster_tokens, max(chunk_tokens // self.chunk_clusters, 1))
        blocks = prompt_blocks + chunks * max_blocks(chunk_tokens, self.chunk_clusters, self._tokens_per_block)
        count = prompt_clusters + chunks * self.chunk_clusters
        # Tokens wait until a chunk is full; the compaction that fills it can bring up to `compact_every` at once.
        max_pending = min(later, chunk_tokens - 1 + self.compact_every) if chunks else later

        def init_head(_: Key[Array, ""]) -> tuple[BlockStore, Clusters]:
            value_dim = spec.value_width if self.has_residual else None
            clusters = init_clusters(count, spec.head_dim, value_dim, spec.dtype)
            return init_block_store(spec, blocks, self._tokens_per_block), clusters

        keys = stream_keys(row_keys, spec.kv_heads)
        store, clusters = per_head(init_head)(keys)
        return ClusterState(
            window=init_window(spec, self.sinks, self.recent, max_pending),
            pending=jnp.zeros(spec.batch, jnp.int32),
            chunks=jnp.zeros(spec.batch, jnp.int32),
            stream_keys=keys,
            overflow=jnp.zeros(spec.batch, jnp.int32),
            store=store,
            clusters=clusters,
            prompt_clusters=prompt_clusters,
            prompt_blocks=prompt_blocks,
            max_chunks=chunks,
            capacity=tokens + chunks * chunk_tokens,
            cluster_tokens=cluster_tokens,
        )

    def prefill(self, state: ClusterState, prompt: Prompt) -> ClusterState:
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
            label = self.label(rng, keys, valid, count, self.num_clusters(middle))
            return store_clusters(store, clusters, keys, values, position, label, count=count, blocks=blocks)

        keys, values = (x[:, :, self.sinks :].astype(state.window.keys.dtype) for x in (prompt.keys, prompt.values))
        cluster = per_head(cluster_head, 0, 0, 0, 0, 0, None)
        store, clusters = cluster(state.store, state.clusters, state.stream_keys, keys, values, middle)
        return dataclasses.replace(state, store=store, clusters=clusters)

    def segments(self, state: ClusterState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window and the store of a state."""
        clusters = state.clusters
        # Mean keys of residual clusters are read as entries, and are not counted twice.
        vectors = clusters.mean_key if clusters.rms is None else clusters.rms
        index = (clusters.size, clusters.first_block, vectors)
        read = BlockStoreRead(state.store, functools.partial(self._select, state), index)
        return (*windows.window_segments(state.window, selected=state.pending), read)

    def compact(self, state: ClusterState, new: Tokens) -> ClusterState:
        """Slides the window over new tokens and clusters a full chunk of tokens that left it."""
        window, left = windows.slide(state.window, new)
        # Without chunks, a number of tokens that never come together.
        chunk_tokens = window.selected + 1 if self.chunk_tokens is None else self.chunk_tokens
        window, pending, full, clustered, lost = windows.insert_full_chunks(
            window, state.pending, left, chunk_tokens, functools.partial(self._cluster_chunk, state)
        )
        store, clusters = (state.store, state.clusters) if clustered is None else clustered
        excess = jnp.maximum(state.chunks + full - jnp.maximum(state.chunks, state.max_chunks), 0)
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
        state: ClusterState,
        keys: Float[Array, "B H R C D"],
        values: Float[Array, "B H R C D_v"],
        position: Int[Array, "B R C"],
        full: Bool[Array, "B R"],
    ) -> tuple[BlockStore, Clusters]:
        """Clusters the first chunk of every row in which it is full; a compaction completes at most one."""
        chunk_tokens, count = keys.shape[3], self.chunk_clusters
        blocks = max_blocks(chunk_tokens, count, self._tokens_per_block)
        # Most compactions fill no chunk in any row, and then skip k-means.
        any_full = jnp.any(full[:, 0])

        def cluster_head(
            store: BlockStore, clusters: Clusters, stream_key: Array, *chunk: Array
        ) -> tuple[BlockStore, Clusters]:
            """Clusters one head's chunk, if it is full, and writes it into `store` and `clusters`."""
            keys, values, position, full, number = chunk
            fits = full[0] & (number < state.max_chunks)
            rng, valid = jax.random.fold_in(stream_key, 1 + number), jnp.broadcast_to(full[0], (chunk_tokens,))
            label = jax.lax.cond(
                any_full,
                lambda: self.label(rng, keys[0], valid, count),
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
                first_cluster=jnp.where(fits, state.prompt_clusters + number * count, OUT_OF_RANGE),
                first_block=jnp.where(fits, state.prompt_blocks + number * blocks, OUT_OF_RANGE),
            )

        cluster = per_head(cluster_head, 0, 0, 0, 0, 0, None, None, None)
        return cluster(state.store, state.clusters, state.stream_keys, keys, values, position, full, state.chunks)

    def _select(self, state: ClusterState, query: Float[Array, "B 1 H_q D"]) -> BlockSelection:
        """Selects clusters for one query of every row; all blocks if the budget is as large as the store."""
        tokens, blocks = self.max_tokens, num_blocks(state.store)
        average = max_selected_blocks(tokens, state.cluster_tokens, self._tokens_per_block)
        return self.select(
            state.clusters,
            query,
            max_tokens=tokens,
            max_blocks=blocks if tokens >= state.capacity else min(blocks, average),
            block_size=self._tokens_per_block,
        )
