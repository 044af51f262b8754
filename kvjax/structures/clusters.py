"""Clusters of one head's tokens, sorted in a block store, and what their means tell of attention to them
(ClusterKV)."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.per_head import per_head
from kvjax.recall import BlockStore, arrange, put, put_blocks
from kvjax.segment import Choice, Segment
from kvjax.state import state
from pallas_kernels.best_parts import best_parts
from pallas_kernels.k_means import cluster_sums


@state
class Clusters:
    """One head's clusters: first those of the prompt, then those of every chunk of later tokens. Empty ones have size
    0."""

    # Of the cache's type, which they are rounded to once: what is said below of keys about them holds of these.
    mean_key: Float[Array, "C D"]
    mean_value: Float[Array, "C D_v"] | None  # None without residual clusters
    size: Int[Array, "C"]  # int32 tokens
    first: Int[Array, "C"]  # int32, the store's block where the cluster begins
    radius: Float[Array, "C"]  # float32, the largest distance of a stored key to the mean
    rms: Float[Array, "C"] | None  # float32, the root of the mean square of those distances, where clusters reach


def init_clusters(
    count: int, head_dim: int, value_dim: int | None, dtype: jax.typing.DTypeLike, *, reaching: bool = False
) -> Clusters:
    """So many empty clusters of one head; `value_dim` None for no mean values, `reaching` for root mean squares."""
    none = lambda: jnp.zeros(count, jnp.int32)  # noqa: E731
    mean_value = None if value_dim is None else jnp.zeros((count, value_dim), dtype)
    rms = jnp.zeros(count) if reaching else None
    return Clusters(jnp.zeros((count, head_dim), dtype), mean_value, none(), none(), jnp.zeros(count), rms)


def file_clusters(
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
    (keys, values, position), (count, blocks), places = tokens, made, store.position.shape[1]
    size = jnp.zeros(count, jnp.int32).at[label].add(1, mode="drop")
    needed = -(-size // places)
    begin = jnp.cumsum(needed) - needed
    order = jnp.argsort(label, stable=True)
    home = jnp.minimum(label[order], count - 1)
    rank = jnp.arange(label.shape[0]) - (jnp.cumsum(size) - size)[home]
    slot = jnp.where(label[order] < count, begin[home] * places + rank, blocks * places)
    source = jnp.full(blocks * places, label.shape[0], jnp.int32).at[slot].set(order, mode="drop")
    arranged = arrange(source.reshape(blocks, places), keys, values, position)
    mean = lambda x: cluster_sums(label, x.astype(jnp.float32), count) / jnp.maximum(size, 1)[:, None]  # noqa: E731
    mean_key = mean(keys).astype(clusters.mean_key.dtype)
    away = keys.astype(jnp.float32) - mean_key.astype(jnp.float32)[jnp.minimum(label, count - 1)]
    square = jnp.sum(away * away, axis=1)
    radius = jnp.sqrt(jnp.zeros(count).at[label].max(square, mode="drop"))
    mean_value = None if clusters.mean_value is None else mean(values)
    rms = None if clusters.rms is None else jnp.sqrt(mean(square[:, None])[:, 0])
    filed = Clusters(mean_key, mean_value, size, first[1] + begin, radius, rms)
    written = put(clusters, first[0] + jnp.arange(count), filed)
    return put_blocks(store, first[1] + jnp.arange(blocks), arranged), written


def cluster_logits(clusters: Clusters, query: Float[Array, "B 1 H_q D"]) -> Float[Array, "B H_kv G C"]:
    """<query, mean key> / sqrt(D) of every query head and cluster."""
    batch, kv_heads, _, head_dim = clusters.mean_key.shape
    grouped = query.reshape(batch, kv_heads, -1, head_dim).astype(jnp.float32)
    means = clusters.mean_key.astype(jnp.float32)
    product = jnp.einsum("bhgd,bhcd->bhgc", grouped, means, precision=jax.lax.Precision.HIGHEST)
    return product / math.sqrt(head_dim)


def nearest_clusters(
    clusters: Clusters,
    query: Float[Array, "B 1 H_q D"],
    select: Literal["group", "query_head"],
    *,
    tokens: int,
    blocks: int,
    places: int,
    reach: float = 0.0,
    skip: Int[Array, "B"] | None = None,
) -> Choice:
    """The blocks (of `places` tokens) of the clusters that are nearest to one query of every row, up to so many tokens
    and blocks, without the first `skip` blocks; the rest of the clusters as residual ones.

    Args:
        select: "query_head": every query head has clusters of its own, in descending order of <query, mean key>.
            "group": all heads of a group have the same, in descending order of `group_score`.
        reach: so many standard deviations of its keys along the query, were these the same in every direction, a
            cluster is ranked beyond its mean key: |q| rms / sqrt(D) each.
    """
    batch, kv_heads = clusters.size.shape[:2]
    logits = cluster_logits(clusters, query)
    if reach:
        assert clusters.rms is not None
        logits += reach / query.shape[3] * lengths(query, kv_heads) * clusters.rms[:, :, None]
    score = logits if select == "query_head" else group_score(logits, clusters.size)[:, :, None]

    def of_head(score: Float[Array, "G C"], size, first, skip):
        rank = functools.partial(best_parts, tokens=tokens, blocks=blocks, places=places, skip=skip)
        return jax.vmap(lambda score: rank(score, size, first))(score)

    ranked = per_head(of_head, 0, 0, 0, None)(score, clusters.size, clusters.first, skip)
    block, read, taken = (x.reshape(batch, kv_heads * x.shape[2], x.shape[3]) for x in ranked)
    return Choice(block, read, residual_clusters(clusters, taken), taken=taken)


def lengths(query: Float[Array, "B 1 H_q D"], kv_heads: int) -> Float[Array, "B H_kv G 1"]:
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


def unread_mass(
    clusters: Clusters,
    query: Float[Array, "B 1 H_q D"],
    taken: Int[Array, "B H C"],
    logit_cap: float | None = None,
) -> Float[Array, "B H_q"]:
    """The logarithm of a bound on the attention mass of all that is not read: the keys of cluster c lie within its
    radius r_c of its mean key m_c, so n unread ones hold no more than n exp((<q, m_c> + |q| r_c) / sqrt(D))."""
    batch, kv_heads, count, head_dim = clusters.mean_key.shape
    length = lengths(query, kv_heads) / math.sqrt(head_dim)
    # What float32 may lose of a logit: a rounding per dimension of products no larger than those of the norms.
    reach = clusters.radius + 1e-5 * (clusters.radius + jnp.linalg.norm(clusters.mean_key.astype(jnp.float32), axis=-1))
    left = clusters.size[:, :, None] - taken.reshape(batch, kv_heads, -1, count)
    most = cluster_logits(clusters, query) + length * reach[:, :, None]
    if logit_cap is not None:
        most = logit_cap * jnp.tanh(most / logit_cap)  # which keeps the order
    return jax.nn.logsumexp(most + _log_count(left), axis=-1).reshape(batch, -1)


def _log_count(count: Int[Array, "..."]) -> Float[Array, "..."]:
    return jnp.where(count > 0, jnp.log(jnp.maximum(count, 1).astype(jnp.float32)), -jnp.inf)
