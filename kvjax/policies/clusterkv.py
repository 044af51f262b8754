"""ClusterKV: everything is kept, sorted by semantic clusters; each query reads the clusters that are nearest to it."""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.k_means import k_means
from kvjax.policies.windowed import init_windowed, over_heads, stream_keys, windowed_policy
from kvjax.policy import CachePolicy
from kvjax.recall import (
    BlockStore,
    Filed,
    Ranked,
    absorb_chunks,
    arrange,
    arrays_bytes,
    best_parts,
    block_slots,
    blocks_of,
    first_layers_full,
    init_store,
    put,
    recall,
    recalling,
)
from kvjax.segment import Segment, segment
from kvjax.staging import check_budget, check_period, init_window, occupancy, window_segments
from kvjax.state import HEAD_DIM, array, state, static

CLUSTERS = "clusters"
BLOCK = 16  # tokens that lie side by side in the store


@state
class Clusters:
    """One head's clusters: first those of the prompt, then those of every chunk of later tokens. Empty ones have size
    0."""

    mean_key: Float[Array, "C D"] = array(CLUSTERS, HEAD_DIM)  # float32, of the keys as they are stored
    mean_value: Float[Array, "C D"] | None = array(CLUSTERS, HEAD_DIM)  # float32; None without residual clusters
    size: Int[Array, "C"] = array(CLUSTERS)  # int32 tokens
    first: Int[Array, "C"] = array(CLUSTERS)  # int32, the store's block where the cluster begins
    radius: Float[Array, "C"] = array(CLUSTERS)  # float32, the largest distance of a stored key to the mean


@state
class Index:
    """What finds one head's tokens again."""

    clusters: Clusters
    stream_key: Key[Array, ""] = array()
    prompt_clusters: int = static()
    prompt_blocks: int = static()
    capacity: int = static()  # tokens that may ever be stored


@dataclasses.dataclass(frozen=True)
class Clustering:
    """How k-means is run."""

    iterations: int
    tolerance: float
    start: Literal["random", "k-means++"]
    sample: int
    turn_to: Literal["directions", "keys"]


def clusterkv(
    budget: int,
    *,
    sinks: int = 16,
    recent: int = 0,
    cluster_tokens: int = 80,
    every: int = 320,
    chunk_clusters: int = 4,
    select: Literal["group", "query_head"] = "group",
    residual: bool = True,
    iterations: int = 20,
    sample: int = 4,
    full_layers: int = 0,
    period: int = 64,
    variant: Literal["clusters", "reference"] = "clusters",
) -> CachePolicy:
    """Keeps every key and value; a query reads sinks, recent tokens, tokens that wait to be clustered, and whole
    clusters in descending order of <query, mean key> until the budget is reached, the last one cut.

    A prompt is clustered by cosine k-means when it has been read, later tokens `every` at a time, those alone; until
    then they are attended to, beside the budget. A cluster that is cut loses its latest tokens.

    Args:
        budget: tokens read per query head, sinks and recent ones included, waiting and staged ones not. Tokens lie in
            blocks of 16, and a query reads no more of them than the budget takes in clusters of average size: one whose
            clusters are much smaller may run out of blocks before it has so many tokens.
        sinks, recent: tokens always read; the paper's 16 and 0 by default. Sinks are never clustered.
        cluster_tokens: tokens of a prompt per cluster, on average; the paper's 80 by default.
        every, chunk_clusters: so many later tokens make so many clusters; the paper's 320 and 4.
        select: "query_head": every query head reads clusters of its own, as published; "group": all heads of a group
            read the same ones, those that hold the most attention per token by the clusters' means, summed over the
            group. A budget then costs so many times less, and at equal bytes read the error is lower on every stream
            tried.
        residual: clusters that are not read stay present as one entry each: their mean key and mean value, weighing as
            many tokens as were not read (one that is cut: by the means of the whole cluster).
        iterations, sample: of k-means; all iterations but the last look at every `sample`-th key.
        full_layers: so many first layers keep exact caches and read all of them; the paper's two are for deep models.
        period: tokens between compactions; no more than `every`.
        variant: "reference" follows the released code of the accuracy study: 400 clusters for any prompt, k-means++,
            at most 20 iterations on all keys that turn to the sum of keys, selection per query head, no residual
            clusters, and later tokens are never clustered.

    Raises:
        ValueError: for sizes that cannot be.

    Source: ClusterKV (Liu et al. 2024), sections 3 and 4; https://github.com/sjtu-zhao-lab/ClusterKV.
    """
    check_budget(budget, sinks, recent)
    check_period(period)
    for name, least in {"cluster_tokens": 1, "every": 1, "chunk_clusters": 1, "full_layers": 0}.items():
        if locals()[name] < least:
            raise ValueError(f"{name}={locals()[name]}; it must be at least {least}")
    if period > every:
        raise ValueError(f"period={period} must not exceed every={every}: a chunk is clustered per compaction")
    if select not in ("group", "query_head"):
        raise ValueError(f"select={select!r}; it must be 'group' or 'query_head'")
    if variant not in ("clusters", "reference"):
        raise ValueError(f"variant={variant!r}; it must be 'clusters' or 'reference'")
    reference = variant == "reference"
    if reference:
        select, residual = "query_head", False
        clustering = Clustering(20, 1e-4, "k-means++", 1, "keys")
    else:
        clustering = Clustering(iterations, 1e-4, "random", sample, "directions")
    recalled_tokens = budget - sinks - recent
    recalled_blocks = block_slots(recalled_tokens, min(cluster_tokens, max(every // chunk_clusters, 1)), BLOCK)

    def init(spec, row_keys):
        tokens = max(spec.max_prompt - sinks - recent, 0)
        prompt_clusters = min(tokens, 400) if reference else -(-tokens // cluster_tokens)
        prompt_blocks = blocks_of(tokens, prompt_clusters, BLOCK)
        later = spec.max_new + recent
        chunks = 0 if reference else later // every
        blocks = prompt_blocks + chunks * blocks_of(every, chunk_clusters, BLOCK)
        clusters = prompt_clusters + chunks * chunk_clusters

        def one(stream_key):
            return (
                init_store(blocks, BLOCK, spec.head_dim, spec.dtype),
                Index(
                    init_clusters(clusters, spec.head_dim, residual),
                    stream_key,
                    prompt_clusters,
                    prompt_blocks,
                    capacity=tokens + chunks * every,
                ),
            )

        store, index = over_heads(one)(stream_keys(row_keys, spec.kv_heads))
        waiting = min(later, every - 1 + period) if chunks else later
        window = init_window(spec, sinks + recent + waiting, sinks, recent, period)
        filed = Filed(
            store=store,
            index=index,
            pending=jnp.zeros(spec.batch, jnp.int32),
            chunks=jnp.zeros(spec.batch, jnp.int32),
            group=spec.query_heads // spec.kv_heads,
        )
        return init_windowed(spec, window, filed)

    def select_prompt(state, keys, values, queries):
        filed = state.selection
        clusters, blocks = filed.index.prompt_clusters, filed.index.prompt_blocks
        if not clusters:
            return state
        _, _, count = occupancy(state.window)
        used = jnp.full_like(count, clusters) if reference else -(-count // cluster_tokens)
        position = jnp.arange(sinks, keys.shape[1], dtype=jnp.int32)

        def one(store, index, keys, values, count, used):
            return file_clusters(
                store,
                index,
                jax.random.fold_in(index.stream_key, 0),
                (keys, values, position),
                position < sinks + count,
                first_cluster=0,
                first_block=0,
                clusters=clusters,
                blocks=blocks,
                used=used,
                clustering=clustering,
            )

        later = lambda x: x[:, sinks:].swapaxes(1, 2).astype(state.window.keys.dtype)  # noqa: E731
        store, index = over_heads(one, 0, 0, 0, 0, None, None)(
            filed.store, filed.index, later(keys), later(values), count, used
        )
        return dataclasses.replace(state, selection=dataclasses.replace(filed, store=store, index=index))

    def file(filed, keys, values, position, full):
        made = blocks_of(every, chunk_clusters, BLOCK)

        def one(store, index, keys, values, position, full, chunk):
            return file_clusters(
                store,
                index,
                jax.random.fold_in(index.stream_key, 1 + chunk),
                (keys[0], values[0], position[0]),
                jnp.broadcast_to(full[0], (every,)),
                first_cluster=jnp.where(full[0], index.prompt_clusters + chunk * chunk_clusters, _NOWHERE),
                first_block=jnp.where(full[0], index.prompt_blocks + chunk * made, _NOWHERE),
                clusters=chunk_clusters,
                blocks=made,
                used=chunk_clusters,
                clustering=clustering,
                gate=jnp.any(full_rows),
            )

        full_rows = full[:, 0]
        store, index = over_heads(one, 0, 0, 0, 0, None, None, None)(
            filed.store, filed.index, keys, values, position, full, filed.chunks
        )
        return dataclasses.replace(filed, store=store, index=index)

    def absorb(state, block):
        index = state.selection.index
        room = (index.clusters.size.shape[2] - index.prompt_clusters) // chunk_clusters
        # The reference's chunk is never full.
        chunk = state.window.keys.shape[2] + 1 if reference else every
        return absorb_chunks(state, block, chunk, file, most=room)

    def segments(state, queries):
        return window_segments(state.window, selected=state.selection.pending, queries=queries)

    def recalled(state, query) -> tuple[Segment, ...]:
        store, clusters = state.selection.store, state.selection.index.clusters
        read = choose(state, query, recalled_tokens, recalled_blocks, select)
        found = (recall(store, read.block, read.tokens),) if read.block.shape[2] else ()
        return found + ((rest_segment(clusters, read.taken),) if residual and clusters.size.shape[2] else ())

    def index_bytes(state):
        clusters = state.selection.index.clusters
        shown = arrays_bytes(clusters.size, clusters.first)
        # Attention itself reads the mean keys again where residual clusters are shown.
        return shown if residual else shown + arrays_bytes(clusters.mean_key)

    base = windowed_policy(
        "clusterkv", init=init, select=select_prompt, absorb=absorb, segments=segments, period=period
    )
    return first_layers_full(recalling(base, recalled, index_bytes), full_layers)


def init_clusters(count: int, head_dim: int, residual: bool) -> Clusters:
    """So many empty clusters of one head."""
    return Clusters(
        mean_key=jnp.zeros((count, head_dim)),
        mean_value=jnp.zeros((count, head_dim)) if residual else None,
        size=jnp.zeros(count, jnp.int32),
        first=jnp.zeros(count, jnp.int32),
        radius=jnp.zeros(count),
    )


def file_clusters(
    store: BlockStore,
    index: Index,
    rng: Key[Array, ""],
    tokens: tuple[Float[Array, "T D"], Float[Array, "T D"], Int[Array, "T"]],
    valid: Bool[Array, "T"],
    *,
    first_cluster: Int[Array, ""] | int,
    first_block: Int[Array, ""] | int,
    clusters: int,
    blocks: int,
    used: Int[Array, ""] | int,
    clustering: Clustering,
    gate: Bool[Array, ""] | None = None,
) -> tuple[BlockStore, Index]:
    """Clusters one head's tokens (keys, values, positions, in the order of the text) and writes them, sorted by
    cluster, and the clusters at the given places; what lies past the end is dropped.

    Args:
        used: how many of the clusters may hold tokens.
        gate: where not, nothing is to be written and clustering is left out; a scalar of the batch.
    """
    keys, values, position = tokens

    def label_of(_) -> Int[Array, "T"]:
        return k_means(rng, keys, valid, clusters, used=used, **dataclasses.asdict(clustering)).label

    if gate is None:
        label = label_of(None)
    else:
        label = jax.lax.cond(gate, label_of, lambda _: jnp.full(valid.shape, clusters, jnp.int32), None)
    size = jnp.zeros(clusters, jnp.int32).at[label].add(1, mode="drop")
    needed = -(-size // BLOCK)
    first = jnp.cumsum(needed) - needed
    order = jnp.argsort(label, stable=True)
    home = jnp.minimum(label[order], clusters - 1)
    rank = jnp.arange(label.shape[0]) - (jnp.cumsum(size) - size)[home]
    slot = jnp.where(label[order] < clusters, first[home] * BLOCK + rank, blocks * BLOCK)
    source = jnp.full(blocks * BLOCK, label.shape[0], jnp.int32).at[slot].set(order, mode="drop")
    arranged = arrange(source.reshape(blocks, BLOCK), keys, values, position)

    def mean(x: Float[Array, "T D"]) -> Float[Array, "C D"]:
        sums = jnp.zeros((clusters, x.shape[1])).at[label].add(x.astype(jnp.float32), mode="drop")
        return sums / jnp.maximum(size, 1)[:, None]

    mean_key = mean(keys)
    away = keys.astype(jnp.float32) - mean_key[jnp.minimum(label, clusters - 1)]
    radius = jnp.sqrt(jnp.zeros(clusters).at[label].max(jnp.sum(away * away, axis=1), mode="drop"))
    found = Clusters(
        mean_key=mean_key,
        mean_value=None if index.clusters.mean_value is None else mean(values),
        size=size,
        first=first_block + first,
        radius=radius,
    )
    written = put(index.clusters, first_cluster + jnp.arange(clusters), found)
    return put(store, first_block + jnp.arange(blocks), arranged), dataclasses.replace(index, clusters=written)


def choose(
    state, query: Float[Array, "B 1 H_q D"], tokens: int, slots: int, select: Literal["group", "query_head"]
) -> Ranked:
    """What one query of every row reads, for every query head [B, H_q, ...] or every kv head [B, H_kv, ...]: so many
    tokens in so many blocks at most, or everything where the tokens are as many as the store can hold."""
    filed = state.selection
    clusters = filed.index.clusters
    batch, kv_heads, blocks = filed.store.position.shape[:3]
    blocks = blocks if tokens >= filed.index.capacity else min(blocks, slots)
    logits = cluster_logits(clusters, query)
    score = logits if select == "query_head" else group_score(logits, clusters.size)[:, :, None]

    def one(score: Float[Array, "G C"], size, first) -> Ranked:
        rank = functools.partial(best_parts, tokens=tokens, blocks=blocks, places=BLOCK)
        return jax.vmap(lambda score: rank(score, size, first))(score)

    ranked = over_heads(one)(score, clusters.size, clusters.first)
    return Ranked(*(x.reshape(batch, kv_heads * x.shape[2], x.shape[3]) for x in ranked))


def cluster_logits(clusters: Clusters, query: Float[Array, "B 1 H_q D"]) -> Float[Array, "B H_kv G C"]:
    """<query, mean key> / sqrt(D) of every query head and cluster."""
    batch, kv_heads, _, head_dim = clusters.mean_key.shape
    grouped = query.reshape(batch, kv_heads, -1, head_dim).astype(jnp.float32)
    product = jnp.einsum("bhgd,bhcd->bhgc", grouped, clusters.mean_key, precision=jax.lax.Precision.HIGHEST)
    return product / math.sqrt(head_dim)


def group_score(logits: Float[Array, "B H_kv G C"], size: Int[Array, "B H_kv C"]) -> Float[Array, "B H_kv C"]:
    """The logarithm of the attention that a cluster's mean key gets per token, summed over the heads of a group: what a
    budget of tokens buys most of in descending order. Of one head alone the order is that of its logits."""
    weighted = jnp.where(size > 0, jnp.log(jnp.maximum(size, 1)), -jnp.inf)[:, :, None]
    total = jax.nn.logsumexp(logits + weighted, axis=3, keepdims=True)
    return jax.nn.logsumexp(logits - jnp.where(jnp.isneginf(total), 0.0, total), axis=2)


def rest_segment(clusters: Clusters, taken: Int[Array, "B H C"]) -> Segment:
    """Clusters as entries that weigh as many tokens as were not read, for kv heads or query heads."""
    repeats = taken.shape[1] // clusters.size.shape[1]
    spread = (lambda x: x) if repeats == 1 else functools.partial(jnp.repeat, repeats=repeats, axis=1)
    left = spread(clusters.size) - taken
    weight = jnp.where(left > 0, jnp.log(jnp.maximum(left, 1).astype(jnp.float32)), -jnp.inf)
    assert clusters.mean_value is not None
    return segment(spread(clusters.mean_key), spread(clusters.mean_value), log_num=weight)


_NOWHERE = 2**30
