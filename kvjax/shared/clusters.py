"""Clusters of one head's tokens, sorted in a block store, and the selection of clusters by their means (ClusterKV)."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.block_store import BlockStore, arrange_blocks, write_blocks, write_index
from kvjax.segment import Segment
from kvjax.shared.per_head import per_head
from kvjax.spec import allocated_slots
from kvjax.state import state
from pallas_kernels.k_means import cluster_sums
from pallas_kernels.select_blocks import SelectedBlocks, select_blocks


@state
class Clusters:
    """One head's clusters, of the prompt and then of every chunk of later tokens; empty ones have size 0.

    C is a multiple of 8 (`spec.allocated_slots`).
    """

    mean_key: Float[Array, "C D"]  # of the cache's dtype
    mean_value: Float[Array, "C D_v"] | None  # None without residual clusters
    size: Int[Array, "C"]  # int32 tokens
    first_block: Int[Array, "C"]  # int32, block of the store with the cluster's first token
    rms: Float[Array, "C"] | None  # float32, root mean square distance of keys to the mean key; None likewise


def init_clusters(count: int, head_dim: int, value_dim: int | None, dtype: jax.typing.DTypeLike) -> Clusters:
    """Returns one head's empty clusters.

    Args:
        count: maximum number of clusters.
        value_dim: dimensions of values; None for clusters without mean values and deviations.

    Returns:
        The clusters.
    """
    slots = allocated_slots(count)
    return Clusters(
        mean_key=jnp.zeros((slots, head_dim), dtype),
        mean_value=None if value_dim is None else jnp.zeros((slots, value_dim), dtype),
        size=jnp.zeros(slots, jnp.int32),
        first_block=jnp.zeros(slots, jnp.int32),
        rms=None if value_dim is None else jnp.zeros(slots),
    )


def store_clusters(
    store: BlockStore,
    clusters: Clusters,
    keys: Float[Array, "T D"],
    values: Float[Array, "T D_v"],
    position: Int[Array, "T"],
    label: Int[Array, "T"],
    *,
    count: int,
    blocks: int,
    first_cluster: Int[Array, ""] | int = 0,
    first_block: Int[Array, ""] | int = 0,
) -> tuple[BlockStore, Clusters]:
    """Writes one head's tokens, sorted by cluster, and their clusters.

    Args:
        keys: keys of the tokens, in the order of the text.
        label: cluster of each token, from 0; `count` for a token without one.
        count: number of clusters to write.
        blocks: number of blocks to write.
        first_cluster: index of the first cluster; clusters past the end are dropped.
        first_block: index of the first block; blocks past the end are dropped.

    Returns:
        The store and the clusters.
    """
    block_size = store.position.shape[1]
    size = jnp.zeros(count, jnp.int32).at[label].add(1, mode="drop")
    cluster_blocks = -(-size // block_size)
    begin = jnp.cumsum(cluster_blocks) - cluster_blocks
    order = jnp.argsort(label, stable=True)
    cluster = jnp.minimum(label[order], count - 1)
    rank = jnp.arange(label.shape[0]) - (jnp.cumsum(size) - size)[cluster]
    slot = jnp.where(label[order] < count, begin[cluster] * block_size + rank, blocks * block_size)
    source = jnp.full(blocks * block_size, label.shape[0], jnp.int32).at[slot].set(order, mode="drop")
    arranged = arrange_blocks(source.reshape(blocks, block_size), keys, values, position)

    def mean(x: Float[Array, "T D"]) -> Float[Array, "C D"]:
        return cluster_sums(label, x.astype(jnp.float32), count) / jnp.maximum(size, 1)[:, None]

    mean_key = mean(keys).astype(clusters.mean_key.dtype)
    difference = keys.astype(jnp.float32) - mean_key.astype(jnp.float32)[jnp.minimum(label, count - 1)]
    square = jnp.sum(difference * difference, axis=1)
    new = Clusters(
        mean_key=mean_key,
        mean_value=None if clusters.mean_value is None else mean(values),
        size=size,
        first_block=first_block + begin,
        rms=None if clusters.rms is None else jnp.sqrt(mean(square[:, None])[:, 0]),
    )
    clusters = write_index(clusters, first_cluster + jnp.arange(count), new)
    return write_blocks(store, first_block + jnp.arange(blocks), arranged), clusters


def cluster_logits(
    clusters: Clusters, query: Float[Array, "B 1 H_q D"], score_stddevs: float = 0.0
) -> Float[Array, "B H_kv G C"]:
    """Returns the logit of every cluster's mean key for one query of every row.

    Args:
        clusters: clusters of all rows and heads.
        query: one query per row.
        score_stddevs: standard deviations of a cluster's keys along the query, assumed isotropic
            (|q| rms / sqrt(D)), that are added.

    Returns:
        float32 <query, mean key> / sqrt(D), for the G query heads of each KV head.
    """
    batch, kv_heads, _, head_dim = clusters.mean_key.shape
    grouped = query.reshape(batch, kv_heads, -1, head_dim).astype(jnp.float32)
    means = clusters.mean_key.astype(jnp.float32)
    product = jnp.einsum("bhgd,bhcd->bhgc", grouped, means, precision=jax.lax.Precision.HIGHEST)
    logits = product / math.sqrt(head_dim)
    if score_stddevs and clusters.rms is not None:
        norms = jnp.linalg.norm(grouped, axis=-1, keepdims=True)
        logits += score_stddevs / head_dim * norms * clusters.rms[:, :, None]
    return logits


def select_head_blocks(
    scores: Float[Array, "B H_kv G C"],
    sizes: Int[Array, "B H_kv C"],
    first_block: Int[Array, "B H_kv C"],
    *,
    max_tokens: int,
    max_blocks: int,
    block_size: int,
) -> SelectedBlocks:
    """Selects blocks of the highest-scoring clusters or pages, for G selections per KV head.

    Args:
        sizes: tokens of each cluster.

    Returns:
        Blocks and tokens read of every cluster, for H_kv G heads.
    """

    def select_head(
        scores: Float[Array, "G C"], sizes: Int[Array, "C"], first_block: Int[Array, "C"]
    ) -> SelectedBlocks:
        """Selects blocks for every selection of one KV head, from the `scores` and `sizes` of its clusters."""

        def select(scores: Float[Array, "C"]) -> SelectedBlocks:
            return select_blocks(
                scores, sizes, first_block, max_tokens=max_tokens, max_blocks=max_blocks, block_size=block_size
            )

        return jax.vmap(select)(scores)

    selected = per_head(select_head)(scores, sizes, first_block)
    return jax.tree.map(lambda x: x.reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[3]), selected)


def group_score(logits: Float[Array, "B H_kv G C"], size: Int[Array, "B H_kv C"]) -> Float[Array, "B H_kv C"]:
    """Returns the log of the attention that each cluster's mean key gets per token, summed over a group's heads.

    Args:
        size: tokens of each cluster.

    Returns:
        Scores; descending order gets the most attention for a budget of tokens.
    """
    total = jax.nn.logsumexp(logits + _log_count(size)[:, :, None], axis=3, keepdims=True)
    return jax.nn.logsumexp(logits - jnp.where(jnp.isneginf(total), 0.0, total), axis=2)


def residual_clusters(clusters: Clusters, tokens_read: Int[Array, "B H_kv C"]) -> tuple[Segment, ...]:
    """Returns clusters as entries that weigh as many tokens as are not read; nothing without clusters.

    Args:
        clusters: clusters of all rows and heads, with mean values.

    Returns:
        At most one segment.
    """
    if not clusters.size.shape[2]:
        return ()
    return (Segment(clusters.mean_key, clusters.mean_value, log_num=_log_count(clusters.size - tokens_read)),)


def _log_count(count: Int[Array, "..."]) -> Float[Array, "..."]:
    return jnp.where(count > 0, jnp.log(jnp.maximum(count, 1).astype(jnp.float32)), -jnp.inf)
