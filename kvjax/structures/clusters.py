"""Clusters of one head's tokens, sorted in a block store, and what their means tell of attention to them
(ClusterKV)."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.segment import BlockSelection, Segment
from kvjax.state import state
from kvjax.stores.block_store import BlockStore, arrange_blocks, write_blocks, write_index
from kvjax.structures.per_head import per_head
from pallas_kernels.k_means import cluster_sums
from pallas_kernels.select_blocks import SelectedBlocks, select_blocks


@state
class Clusters:
    """One head's clusters: first those of the prompt, then those of every chunk of later tokens. Empty ones have size
    0."""

    # Of the cache's type, which they are rounded to once: what is said below of keys about them holds of these.
    mean_key: Float[Array, "C D"]
    mean_value: Float[Array, "C D_v"] | None  # None without residual clusters
    size: Int[Array, "C"]  # int32 tokens
    first: Int[Array, "C"]  # int32, the store's block where the cluster begins
    rms: Float[Array, "C"] | None  # float32, the root of the mean square of those distances, where clusters reach


def init_clusters(
    count: int, head_dim: int, value_dim: int | None, dtype: jax.typing.DTypeLike, *, with_rms: bool = False
) -> Clusters:
    """So many empty clusters of one head; `value_dim` None for no mean values, `with_rms` for root mean squares."""
    none = lambda: jnp.zeros(count, jnp.int32)  # noqa: E731
    mean_value = None if value_dim is None else jnp.zeros((count, value_dim), dtype)
    rms = jnp.zeros(count) if with_rms else None
    return Clusters(jnp.zeros((count, head_dim), dtype), mean_value, none(), none(), rms)


def store_clusters(
    store: BlockStore,
    clusters: Clusters,
    label: Int[Array, "T"],
    tokens: tuple[Float[Array, "T D"], Float[Array, "T D"], Int[Array, "T"]],
    made: tuple[int, int],
    first: tuple[Int[Array, ""] | int, Int[Array, ""] | int],
) -> tuple[BlockStore, Clusters]:
    """Writes one head's tokens (keys, values, positions, in the order of the text), sorted by cluster, and the
    clusters.

    Args:
        label: each token's cluster; one past the last for a token that belongs to none.
        made: so many clusters, in so many blocks.
        first: where clusters and blocks go; what lies past the end is dropped.
    """
    (keys, values, position), (count, blocks), block_size = tokens, made, store.position.shape[1]
    size = jnp.zeros(count, jnp.int32).at[label].add(1, mode="drop")
    needed = -(-size // block_size)
    begin = jnp.cumsum(needed) - needed
    order = jnp.argsort(label, stable=True)
    home = jnp.minimum(label[order], count - 1)
    rank = jnp.arange(label.shape[0]) - (jnp.cumsum(size) - size)[home]
    slot = jnp.where(label[order] < count, begin[home] * block_size + rank, blocks * block_size)
    source = jnp.full(blocks * block_size, label.shape[0], jnp.int32).at[slot].set(order, mode="drop")
    arranged = arrange_blocks(source.reshape(blocks, block_size), keys, values, position)
    mean = lambda x: cluster_sums(label, x.astype(jnp.float32), count) / jnp.maximum(size, 1)[:, None]  # noqa: E731
    mean_key = mean(keys).astype(clusters.mean_key.dtype)
    away = keys.astype(jnp.float32) - mean_key.astype(jnp.float32)[jnp.minimum(label, count - 1)]
    square = jnp.sum(away * away, axis=1)
    mean_value = None if clusters.mean_value is None else mean(values)
    rms = None if clusters.rms is None else jnp.sqrt(mean(square[:, None])[:, 0])
    inserted = Clusters(mean_key, mean_value, size, first[1] + begin, rms)
    written = write_index(clusters, first[0] + jnp.arange(count), inserted)
    return write_blocks(store, first[1] + jnp.arange(blocks), arranged), written


def cluster_logits(clusters: Clusters, query: Float[Array, "B 1 H_q D"]) -> Float[Array, "B H_kv G C"]:
    """<query, mean key> / sqrt(D) of every query head and cluster."""
    batch, kv_heads, _, head_dim = clusters.mean_key.shape
    grouped = query.reshape(batch, kv_heads, -1, head_dim).astype(jnp.float32)
    means = clusters.mean_key.astype(jnp.float32)
    product = jnp.einsum("bhgd,bhcd->bhgc", grouped, means, precision=jax.lax.Precision.HIGHEST)
    return product / math.sqrt(head_dim)


def select_clusters(
    clusters: Clusters,
    query: Float[Array, "B 1 H_q D"],
    select: Literal["group", "query_head"],
    *,
    max_tokens: int,
    max_blocks: int,
    block_size: int,
    score_stddevs: float = 0.0,
) -> BlockSelection:
    """Selects the blocks of the clusters nearest to one query of every row, and residual entries of the others.

    Args:
        clusters: clusters of all rows and heads.
        query: one query per row.
        select: "query_head": every query head selects clusters by descending <query, mean key>. "group": the query
            heads of a group select the same clusters, by descending `group_score`.
        max_tokens: tokens to read.
        max_blocks: blocks to read.
        block_size: tokens of a block.
        score_stddevs: standard deviations of a cluster's keys along the query, assumed isotropic
            (|q| rms / sqrt(D)), added to the product with its mean key.

    Returns:
        The selection.
    """
    batch, kv_heads = clusters.size.shape[:2]
    logits = cluster_logits(clusters, query)
    if score_stddevs:
        logits += score_stddevs / query.shape[3] * query_norms(query, kv_heads) * clusters.rms[:, :, None]
    scores = logits if select == "query_head" else group_score(logits, clusters.size)[:, :, None]

    def select_head(scores: Float[Array, "G C"], sizes: Int[Array, "C"], first: Int[Array, "C"]) -> SelectedBlocks:
        def select(scores: Float[Array, "C"]) -> SelectedBlocks:
            return select_blocks(
                scores, sizes, first, max_tokens=max_tokens, max_blocks=max_blocks, block_size=block_size
            )

        return jax.vmap(select)(scores)

    selected = per_head(select_head)(scores, clusters.size, clusters.first)
    indices, lengths, read = (x.reshape(batch, kv_heads * x.shape[2], x.shape[3]) for x in selected)
    return BlockSelection(indices, lengths, residual_clusters(clusters, read))


def query_norms(query: Float[Array, "B 1 H_q D"], kv_heads: int) -> Float[Array, "B H_kv G 1"]:
    """Every query head's norm."""
    return jnp.linalg.norm(query.astype(jnp.float32), axis=-1).reshape(query.shape[0], kv_heads, -1, 1)


def group_score(logits: Float[Array, "B H_kv G C"], size: Int[Array, "B H_kv C"]) -> Float[Array, "B H_kv C"]:
    """The logarithm of the attention that a cluster's mean key gets per token, summed over the heads of a group: what a
    budget of tokens buys most of in descending order."""
    total = jax.nn.logsumexp(logits + _log_count(size)[:, :, None], axis=3, keepdims=True)
    return jax.nn.logsumexp(logits - jnp.where(jnp.isneginf(total), 0.0, total), axis=2)


def residual_clusters(clusters: Clusters, taken: Int[Array, "B H C"]) -> tuple[Segment, ...]:
    """Clusters as entries that weigh as many tokens as were not read; nothing without residual clusters."""
    if clusters.mean_value is None or not clusters.size.shape[2]:
        return ()
    each = taken.shape[1] // clusters.size.shape[1]
    size, key, value = (
        x if each == 1 else jnp.repeat(x, each, axis=1) for x in (clusters.size, clusters.mean_key, clusters.mean_value)
    )
    return (Segment(key, value, log_num=_log_count(size - taken)),)


def _log_count(count: Int[Array, "..."]) -> Float[Array, "..."]:
    return jnp.where(count > 0, jnp.log(jnp.maximum(count, 1).astype(jnp.float32)), -jnp.inf)
