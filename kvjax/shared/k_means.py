"""k-means of one head's keys by cosine similarity, as ClusterKV clusters a prompt."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.state import state
from pallas_kernels import k_means as lloyd_op


@state
class KMeans:
    """Clusters of keys. Every valid key is in exactly one; a cluster can be empty."""

    label: Int[Array, "T"]  # int32, the key's cluster; C for an invalid key
    # float32, sum over keys of (1 - cosine similarity with the cluster's direction) after each iteration; iterations
    # that were not needed repeat the last value.
    objective: Float[Array, "I"]
    iterations: Int[Array, ""]  # int32, iterations that were needed


def k_means(
    rng: Key[Array, ""],
    keys: Float[Array, "T D"],
    valid: Bool[Array, "T"],
    clusters: int,
    *,
    num_clusters: Int[Array, ""] | int | None = None,
    iterations: int = 20,
    tolerance: float = 1e-4,
    kmeans_init: Literal["random", "k-means++"] = "random",
    sample: int = 1,
    polish: int = 1,
    centroid_update: Literal["directions", "keys"] = "directions",
    block: int = 2048,
) -> KMeans:
    """Runs Lloyd's algorithm on the directions of keys.

    An iteration assigns every key to the most similar centroid direction (the first of a tie). It then sets every
    direction to the direction of the sum of its keys' directions. The objective never rises. A cluster that no key
    joins keeps its direction. A key of norm zero joins the first cluster and adds nothing.

    Args:
        valid: keys that count.
        clusters: number of clusters, C; some stay empty if there are fewer keys.
        num_clusters: clusters that can have keys, the first ones; None for all.
        iterations: maximum number of iterations.
        tolerance: relative decrease of the objective below which iterations stop.
        kmeans_init: first directions: of distinct keys drawn uniformly ("random"), or drawn by k-means++.
        sample: all but the last `polish` iterations use every `sample`-th key only. The objective then covers the
            last iterations, on all keys.
        polish: iterations over all keys, after those on a sample.
        centroid_update: "keys" sums the keys instead of their directions, as the released code of ClusterKV does. The
            objective may then rise, so that all iterations run.
        block: keys whose similarities are in memory at a time.

    Returns:
        The clusters.

    Reference:
        ClusterKV, section III. k-means++: Arthur and Vassilvitskii (2007).
    """
    keys = jnp.where(valid[:, None], keys.astype(jnp.float32), 0.0)
    points = _normalize(keys)
    draw = _draw_uniformly if kmeans_init == "random" else _draw_apart
    directions = points[draw(rng, points, valid, clusters)]
    sums_keys = centroid_update == "keys"
    tolerance = -jnp.inf if sums_keys else tolerance
    num_clusters = clusters if num_clusters is None else num_clusters
    refine = functools.partial(_lloyd, num_clusters=num_clusters, tolerance=tolerance, sums_keys=sums_keys, block=block)
    if sample > 1 and iterations > polish:
        part = (x[::sample] for x in (points, keys, valid))
        directions = refine(directions, *part, iterations=iterations - polish)[0]
        iterations = polish
    return KMeans(*refine(directions, points, keys, valid, iterations=iterations)[1:])


def _lloyd(
    directions: Float[Array, "C D"],
    points: Float[Array, "T D"],
    keys: Float[Array, "T D"],
    valid: Bool[Array, "T"],
    *,
    num_clusters: Int[Array, ""] | int,
    iterations: int,
    tolerance: float,
    sums_keys: bool,
    block: int,
) -> tuple[Float[Array, "C D"], Int[Array, "T"], Float[Array, "I"], Int[Array, ""]]:
    """Runs Lloyd's iterations.

    Returns:
        The last directions, labels, the objective after each iteration, and the number of iterations.
    """
    tokens = points.shape[0]
    padding = -tokens % min(block, tokens)  # once, instead of in every iteration
    points, keys = (jnp.pad(x, ((0, padding), (0, 0))) for x in (points, keys))
    valid = jnp.pad(valid, (0, padding))
    assign = functools.partial(
        lloyd_op.k_means,
        points,
        is_valid=valid,
        num_centroids=num_clusters,
        summands=keys if sums_keys else None,
        config=lloyd_op.XlaConfig(block),
    )
    total = jnp.sum(valid.astype(jnp.float32))

    def iterate(carry: Any) -> Any:
        """Runs one iteration on the `carry`: its number, the directions, labels, objectives and the last objective."""
        number, directions, _, objective, last = carry
        label, sums, similarity = assign(directions)
        current = total - similarity
        moves = jnp.sum(sums * sums, axis=1, keepdims=True) > 0
        objective = jnp.where(jnp.arange(iterations) >= number, current, objective)
        # An objective is never negative, so that -1 can mean that iterations stop.
        last = jnp.where(last - current <= tolerance * current, -1.0, current)
        return number + 1, jnp.where(moves, _normalize(sums), directions), label, objective, last

    def continues(carry: Any) -> Bool[Array, ""]:
        return (carry[0] < iterations) & (carry[4] >= 0)

    no_label = jnp.full(valid.shape, directions.shape[0], jnp.int32)
    start = (jnp.int32(0), directions, no_label, jnp.zeros(iterations), jnp.float32(jnp.inf))
    count, directions, label, objective, _ = jax.lax.while_loop(continues, iterate, start)
    return directions, label[:tokens], objective, count


def _normalize(x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Scales vectors to norm 1; zeros stay."""
    norm = jnp.sqrt(jnp.sum(x * x, axis=1, keepdims=True))
    return jnp.where(norm > 0, x / jnp.where(norm > 0, norm, 1.0), 0.0)


def _draw_uniformly(
    rng: Key[Array, ""], points: Float[Array, "T D"], valid: Bool[Array, "T"], count: int
) -> Int[Array, "C"]:
    """Draws distinct valid points; they repeat from the first if there are too few."""
    priority = jnp.where(valid, jax.random.uniform(rng, valid.shape), jnp.inf)
    _, first = jax.lax.top_k(-priority, min(count, valid.shape[0]))
    return first[jnp.arange(count) % jnp.maximum(jnp.sum(valid), 1)]


def _draw_apart(
    rng: Key[Array, ""], points: Float[Array, "T D"], valid: Bool[Array, "T"], count: int
) -> Int[Array, "C"]:
    """Draws points by k-means++: in proportion to 1 - cosine similarity with the nearest point drawn before."""

    def draw(distance: Float[Array, "T"], rng: Key[Array, ""]) -> tuple[Float[Array, "T"], Int[Array, ""]]:
        """Draws one point in proportion to its `distance` to the points drawn before, and updates the distances."""
        # If all points equal drawn ones, any valid point is drawn.
        weight = jnp.where(valid, distance, 0.0)
        log_weight = jnp.where(jnp.sum(weight) > 0, jnp.log(weight), jnp.where(valid, 0.0, -jnp.inf))
        index = jax.random.categorical(rng, log_weight)
        similarity = jnp.matmul(points, points[index], precision=jax.lax.Precision.HIGHEST)
        return jnp.minimum(distance, jnp.maximum(1 - similarity, 0.0)), index.astype(jnp.int32)

    return jax.lax.scan(draw, jnp.full(valid.shape, 2.0), jax.random.split(rng, count))[1]
