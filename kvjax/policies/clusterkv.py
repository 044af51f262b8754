"""ClusterKV (Liu et al. 2024): everything is kept, sorted by semantic clusters; each query reads the clusters that are
nearest to it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax import window as windows
from kvjax.per_head import per_head, stream_keys
from kvjax.policy import Policy, check_least, check_settings
from kvjax.recall import NOWHERE, BlockStore, block_slots, blocks_of, init_store, stored_blocks, wait_and_file
from kvjax.segment import Choice, Recalled
from kvjax.state import fault, stacked, state, static
from kvjax.structures.clusters import Clusters, file_clusters, init_clusters, nearest_clusters
from kvjax.structures.k_means import KMeans, k_means
from kvjax.window import Window, init_window


@state
class Clustered:
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
class ClusterKV(Policy[Clustered]):
    """Keeps every key and value; a query reads sinks, recent tokens, tokens that wait to be clustered, and whole
    clusters in descending order of <query, mean key> until the budget is reached, the last one cut to its first tokens.

    A prompt is clustered by cosine k-means when it has been read, later tokens `every` at a time, those alone; until
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
        compact_every: tokens between compactions; no more than `every`.

    Source: ClusterKV, sections 3 and 4; https://github.com/sjtu-zhao-lab/ClusterKV.
    """

    budget: int
    sinks: int = 16
    recent: int = 0
    cluster_tokens: int = 80
    clusters: int | None = None
    every: int | None = 320
    chunk_clusters: int = 4
    select: Literal["group", "query_head"] = "group"
    residual: bool = True
    iterations: int = 10
    sample: int = 4
    start: Literal["random", "k-means++"] = "random"
    turn_to: Literal["directions", "keys"] = "directions"
    reach: float = 2.0
    places: int = 16
    compact_every: int = 64

    recalls = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.budget, self.sinks, self.recent, self.compact_every)
        check_least(1, cluster_tokens=self.cluster_tokens, clusters=self.clusters, every=self.every, places=self.places)
        check_least(1, chunk_clusters=self.chunk_clusters, iterations=self.iterations, sample=self.sample)
        check_least(0, reach=self.reach)
        if self.every is not None and self.compact_every > self.every:
            raise ValueError(f"compact_every={self.compact_every} must not exceed every={self.every}: one chunk a time")

    @property
    def tokens(self) -> int:
        """Tokens of clusters that a query reads."""
        return self.budget - self.sinks - self.recent

    def init(self, spec, row_keys) -> Clustered:
        tokens, later = max(spec.max_prompt - self.sinks - self.recent, 0), spec.max_new + self.recent
        prompt_clusters = -(-tokens // self.cluster_tokens) if self.clusters is None else min(tokens, self.clusters)
        prompt_blocks = blocks_of(tokens, prompt_clusters, self.places)
        of_prompt = self.cluster_tokens if self.clusters is None else max(tokens // self.clusters, 1)
        of_chunk = of_prompt if self.every is None else max(self.every // self.chunk_clusters, 1)
        chunks, every = (0, 0) if self.every is None else (later // self.every, self.every)
        blocks = prompt_blocks + chunks * blocks_of(every, self.chunk_clusters, self.places)
        count = prompt_clusters + chunks * self.chunk_clusters
        waiting = min(later, every - 1 + self.compact_every) if chunks else later
        value_dim = spec.value_width if self.residual else None
        make = functools.partial(init_clusters, count, spec.head_dim, value_dim, spec.dtype, reaching=self.reach > 0)
        keys = stream_keys(row_keys, spec.kv_heads)
        store, clusters = per_head(lambda _: (init_store(spec, blocks, self.places), make()))(keys)
        none = lambda: jnp.zeros(spec.batch, jnp.int32)  # noqa: E731
        return Clustered(
            window=init_window(spec, self.sinks, self.recent, waiting=waiting),
            pending=none(),
            chunks=none(),
            stream_keys=keys,
            overflow=none(),
            store=store,
            clusters=clusters,
            prompt_clusters=prompt_clusters,
            prompt_blocks=prompt_blocks,
            capacity=tokens + chunks * every,
            part_tokens=min(of_prompt, of_chunk),
        )

    def prefill(self, state: Clustered, prompt) -> Clustered:
        state = dataclasses.replace(state, window=windows.fill(state.window, prompt))
        if not state.prompt_clusters or prompt.keys.shape[2] <= self.sinks:
            return state
        _, _, count = windows.occupancy(state.window)
        position = jnp.arange(self.sinks, prompt.keys.shape[2], dtype=jnp.int32)

        def of_head(store, clusters, stream_key, keys, values, count):
            rng, valid = jax.random.fold_in(stream_key, 0), position < self.sinks + count
            used = -(-count // self.cluster_tokens) if self.clusters is None else state.prompt_clusters
            label = self._k_means(rng, keys, valid, state.prompt_clusters, used=used, sample=self.sample).label
            made = (state.prompt_clusters, state.prompt_blocks)
            return file_clusters(store, clusters, label, (keys, values, position), made, (0, 0))

        later = lambda x: x[:, :, self.sinks :].astype(state.window.keys.dtype)  # noqa: E731
        store, clusters = per_head(of_head, 0, 0, 0, 0, 0, None)(
            state.store, state.clusters, state.stream_keys, later(prompt.keys), later(prompt.values), count
        )
        return dataclasses.replace(state, store=store, clusters=clusters)

    def read(self, state: Clustered, newer):
        # Where mean keys are shown, attention reads them again.
        clusters = state.clusters
        means = () if self.residual else (clusters.mean_key,)
        index = (clusters.size, clusters.first, *means, *(() if clusters.rms is None else (clusters.rms,)))
        choose = functools.partial(self._choose, state)
        return windows.shown(state.window, selected=state.pending), Recalled(state.store, choose, index)

    def compact(self, state: Clustered, new) -> Clustered:
        window, left = windows.slide(state.window, new)
        every = window.keys.shape[2] + 1 if self.every is None else self.every  # a chunk that is never full
        file = functools.partial(self._file_chunks, state, every)
        window, pending, full, filed, lost = wait_and_file(window, state.pending, left, every, file)
        store, clusters = (state.store, state.clusters) if filed is None else filed
        room = (clusters.size.shape[2] - state.prompt_clusters) // self.chunk_clusters
        too_many = jnp.maximum(state.chunks + full - jnp.maximum(state.chunks, room), 0)
        return dataclasses.replace(
            state,
            window=window,
            pending=pending,
            chunks=state.chunks + full,
            store=store,
            clusters=clusters,
            overflow=state.overflow + lost + every * too_many,
        )

    def _file_chunks(self, state: Clustered, every: int, keys, values, position, full):
        """Clusters the first chunk of every row where it is full (compactions come at least once per chunk)."""
        count, blocks = self.chunk_clusters, blocks_of(every, self.chunk_clusters, self.places)
        some = jnp.any(full[:, 0])

        def of_head(store, clusters, stream_key, keys, values, position, full, chunk):
            rng, valid = jax.random.fold_in(stream_key, 1 + chunk), jnp.broadcast_to(full[0], (every,))
            cluster = lambda: self._k_means(rng, keys[0], valid, count).label  # noqa: E731
            label = jax.lax.cond(some, cluster, lambda: jnp.full(valid.shape, count, jnp.int32))
            behind = lambda first: jnp.where(full[0], first, NOWHERE)  # noqa: E731
            first = (behind(state.prompt_clusters + chunk * count), behind(state.prompt_blocks + chunk * blocks))
            return file_clusters(store, clusters, label, (keys[0], values[0], position[0]), (count, blocks), first)

        of_heads = per_head(of_head, 0, 0, 0, 0, 0, None, None, None)
        return of_heads(state.store, state.clusters, state.stream_keys, keys, values, position, full, state.chunks)

    @property
    def _k_means(self) -> Callable[..., KMeans]:
        of_settings = functools.partial(k_means, iterations=self.iterations, start=self.start, turn_to=self.turn_to)
        return functools.partial(of_settings, polish=min(2, self.iterations))

    def _choose(self, state: Clustered, query: Float[Array, "B 1 H_q D"], round: Int[Array, "B"] | None) -> Choice:
        """What one query of every row reads: the budget's tokens (everything, where it is as large as the store)."""
        stored, usual = stored_blocks(state.store), block_slots(self.tokens, state.part_tokens, self.places)
        blocks = stored if self.tokens >= state.capacity else min(stored, usual)
        return self._nearest(state.clusters, query, tokens=self.tokens, blocks=blocks)

    @property
    def _nearest(self) -> Callable[..., Choice]:
        return functools.partial(nearest_clusters, select=self.select, places=self.places, reach=self.reach)
