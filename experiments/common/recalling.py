"""Ways to find the tokens that matter most to a query: by clusters of keys, or by pages."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.structures.k_means import k_means

PAGE = 16


class Way(NamedTuple):
    """One way to find tokens: by clusters of keys, or (`distance` is None) by pages."""

    distance: str | None = "cosine"
    cluster_tokens: int = 80
    iterations: int = 20
    sample: int = 1

    def __str__(self) -> str:
        if self.distance is None:
            return f"pages of {PAGE}"
        sampled = f", sample {self.sample}" if self.sample > 1 else ""
        return f"{self.distance}, n/{self.cluster_tokens}, {self.iterations} iterations{sampled}"


def over_heads(function: Callable[..., Array]) -> Callable[..., Array]:
    """Maps a function of one head's keys [n, D] and its group's queries [Q, G, D] over seeds and kv heads."""

    @jax.jit
    def mapped(keys: Float[Array, "R n H_kv D"], queries: Float[Array, "R Q H_q D"]) -> Array:
        rows, count, query_heads, head_dim = queries.shape
        grouped = queries.reshape(rows, count, keys.shape[2], query_heads // keys.shape[2], head_dim)
        # A seed after the other: every query's order of all tokens is held at once.
        return jax.lax.map(
            lambda row: jax.lax.map(lambda head: function(*head), row),
            (keys.swapaxes(1, 2), grouped.transpose(0, 2, 1, 3, 4)),
        )

    return mapped


def ranks(score: Float[Array, "... n"]) -> Int[Array, "... n"]:
    """Every token's place in descending order of score, the earlier of equal ones first."""
    order = jnp.argsort(-score, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1)


def group_labels(way: Way, keys: Float[Array, "n D"]) -> tuple[Int[Array, "n"], int]:
    """Every token's cluster or page, and how many there are."""
    tokens = keys.shape[0]
    if way.distance is None:
        return jnp.arange(tokens) // PAGE, -(-tokens // PAGE)
    count = -(-tokens // way.cluster_tokens)
    rng = jax.random.key(0)
    if way.distance == "cosine":
        every = jnp.ones(tokens, bool)
        return k_means(rng, keys, every, count, iterations=way.iterations, sample=way.sample).label, count
    return lloyd(rng, keys, count, way), count


def lloyd(rng: Array, keys: Float[Array, "n D"], count: int, way: Way) -> Int[Array, "n"]:
    """k-means by l2 distance or by inner product, with means of keys as centroids (the latter has no objective)."""

    def nearest(centroids: Float[Array, "C D"]) -> Int[Array, "n"]:
        product = keys @ centroids.T
        half = 0.5 * jnp.sum(centroids**2, axis=1) if way.distance == "l2" else 0.0
        return jnp.argmax(product - half, axis=1)

    def turn(_, centroids: Float[Array, "C D"]) -> Float[Array, "C D"]:
        means, size = group_means(keys, nearest(centroids), count)
        return jnp.where(size[:, None] > 0, means, centroids)

    start = keys[jax.random.choice(rng, keys.shape[0], (count,), replace=False)]
    return nearest(jax.lax.fori_loop(0, way.iterations - 1, turn, start))


def group_means(keys: Float[Array, "n D"], label: Int[Array, "n"], count: int):
    size = jnp.zeros(count, jnp.int32).at[label].add(1)
    return jnp.zeros((count, keys.shape[1])).at[label].add(keys) / jnp.maximum(size, 1)[:, None], size


def group_scores(
    way: Way, keys: Float[Array, "n D"], label: Int[Array, "n"], count: int, queries: Float[Array, "... D"]
) -> Float[Array, "... C"]:
    """By what clusters are ordered (inner product with the mean key), or pages (Quest's upper bound)."""
    if way.distance is not None:
        means, size = group_means(keys, label, count)
        return jnp.where(size > 0, queries @ means.T, -jnp.inf)
    low = jnp.full((count, keys.shape[1]), jnp.inf).at[label].min(keys)
    high = jnp.full((count, keys.shape[1]), -jnp.inf).at[label].max(keys)
    return jnp.maximum(queries, 0) @ high.T + jnp.minimum(queries, 0) @ low.T


@functools.cache
def recalls(way: Way, counts: tuple[int, ...]):
    """Compiled: recall [R, H_kv, Q, G, B] of every query at every B."""

    def one(keys: Float[Array, "n D"], queries: Float[Array, "Q G D"]) -> Float[Array, "Q G B"]:
        label, count = group_labels(way, keys)
        scores = group_scores(way, keys, label, count, queries)

        def query(item) -> Float[Array, "B"]:
            asked, score = item
            true = ranks(asked @ keys.T)
            # Whole groups in order, each in the order of the text; the last is cut.
            found = ranks(-ranks(score)[label].astype(jnp.float32))
            return jnp.stack([jnp.sum((true < size) & (found < size)) / size for size in counts])

        flat = (queries.reshape(-1, queries.shape[-1]), scores.reshape(-1, count))
        return jax.lax.map(query, flat).reshape(*queries.shape[:2], len(counts))

    return over_heads(one)
