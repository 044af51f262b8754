"""k-means of one head's keys by cosine, as ClusterKV clusters a prompt."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.state import state
from pallas_kernels import k_means as op
from pallas_kernels.k_means import cluster_sums


@state
class KMeans:
    """Clusters of N keys. Every valid key is in exactly one; a cluster may be empty."""

    mean: Float[Array, "C D"]  # float32, of the cluster's keys as they are; 0 where empty
    size: Int[Array, "C"]  # int32 keys
    label: Int[Array, "T"]  # int32, the key's cluster; C where it is not valid
    # float32, the sum over keys of (1 - cosine with their cluster's direction), after each iteration; the last value
    # repeats where an iteration was not needed.
    objective: Float[Array, "I"]
    iterations: Int[Array, ""]  # int32, how many were made


def k_means(
    rng: Key[Array, ""],
    keys: Float[Array, "T D"],
    valid: Bool[Array, "T"],
    clusters: int,
    *,
    used: Int[Array, ""] | int | None = None,
    iterations: int = 20,
    tolerance: float = 1e-4,
    kmeans_init: Literal["random", "k-means++"] = "random",
    sample: int = 1,
    polish: int = 1,
    centroid_update: Literal["directions", "keys"] = "directions",
    block: int = 2048,
) -> KMeans:
    """Lloyd's algorithm on the keys' directions: assign each to the most similar direction, then turn every direction
    to the sum of its keys' directions. The objective never rises.

    A cluster that no key joins keeps its direction. Of equally similar directions the first is taken. A key of norm
    zero has no direction: it joins the first cluster and adds nothing.

    Args:
        clusters: C; more than there are keys leaves some empty.
        used: how many of them may hold keys, the first ones; None for all.
        iterations: most assignments that are made.
        tolerance: stops when the objective fell by no more than this share of what is left of it.
        start: "random": directions of distinct keys drawn uniformly; "k-means++": drawn one after the other in
            proportion to 1 - cosine with the nearest drawn so far (Arthur and Vassilvitskii 2007).
        sample: all but the last `polish` iterations look at every `sample`-th key only, which takes so much less time.
            Then `objective` is that of the last iterations, on all keys.
        polish: iterations over all keys after those on a sample; without one it means nothing.
        turn_to: "keys" turns directions to the sum of keys as they are, as ClusterKV's released code does; the
            objective may then rise, so that all iterations are made.
        block: keys whose similarities are held at a time.

    Raises:
        ValueError: for settings that cannot be.

    Source: ClusterKV, section 3.2 (Semantic clustering).
    """
    if clusters < 1 or iterations < 1:
        raise ValueError(f"clusters={clusters}, iterations={iterations}; both must be at least 1")
    if kmeans_init not in ("random", "k-means++"):
        raise ValueError(f"start={kmeans_init!r}; it must be 'random' or 'k-means++'")
    if centroid_update not in ("directions", "keys"):
        raise ValueError(f"turn_to={centroid_update!r}; it must be 'directions' or 'keys'")
    if sample < 1 or not 1 <= polish <= iterations:
        raise ValueError(f"sample={sample}, polish={polish}; they must be at least 1, polish at most iterations")
    keys = jnp.where(valid[:, None], keys.astype(jnp.float32), 0.0)
    points = _directions(keys)
    draw = _draw_uniformly if kmeans_init == "random" else _draw_apart
    directions = points[draw(rng, points, valid, clusters)]
    used = jnp.full((), clusters) if used is None else used
    refine = functools.partial(
        _lloyd, used=used, tolerance=tolerance if centroid_update == "directions" else -jnp.inf, block=block
    )
    if sample > 1 and iterations > polish:
        part = points[::sample], keys[::sample], valid[::sample]
        directions = refine(directions, *part, iterations=iterations - polish, centroid_update=centroid_update)[0]
        iterations = polish
    _, label, objective, made = refine(
        directions, points, keys, valid, iterations=iterations, centroid_update=centroid_update
    )
    size = jnp.zeros(clusters, jnp.int32).at[label].add(1, mode="drop")
    mean = cluster_sums(label, keys, clusters) / jnp.maximum(size, 1)[:, None]
    return KMeans(mean, size, label, objective, made)


def _lloyd(directions, points, keys, valid, *, used, iterations, tolerance, centroid_update, block):
    """Lloyd's iterations from given directions: the next directions, labels [N], the objective after each iteration
    and how many were made."""
    tokens = points.shape[0]
    # Once, so that no pass has to.
    padding = -tokens % min(block, tokens)
    points, keys = (jnp.pad(x, ((0, padding), (0, 0))) for x in (points, keys))
    valid = jnp.pad(valid, (0, padding))
    assign = functools.partial(
        op.k_means,
        points,
        is_valid=valid,
        num_centroids=used,
        summands=None if centroid_update == "directions" else keys,
        block_size=block,
    )
    total = jnp.sum(valid.astype(jnp.float32))

    def iterate(carry):
        number, directions, _, objective, last = carry
        label, sums, gained = assign(directions)
        now = total - gained
        moved = jnp.sum(sums * sums, axis=1, keepdims=True) > 0
        objective = jnp.where(jnp.arange(iterations) >= number, now, objective)
        done = last - now <= tolerance * now
        return number + 1, jnp.where(moved, _directions(sums), directions), label, objective, jnp.where(done, -1.0, now)

    first = (
        jnp.int32(0),
        directions,
        jnp.full(valid.shape, directions.shape[0], jnp.int32),
        jnp.zeros(iterations),
        jnp.float32(jnp.inf),
    )
    # An objective is never negative: -1 says that the last iteration gained too little.
    running = lambda carry: (carry[0] < iterations) & (carry[4] >= 0)  # noqa: E731
    made, directions, label, objective, _ = jax.lax.while_loop(running, iterate, first)
    return directions, label[:tokens], objective, made


def _directions(x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    norm = jnp.sqrt(jnp.sum(x * x, axis=1, keepdims=True))
    return jnp.where(norm > 0, x / jnp.where(norm > 0, norm, 1.0), 0.0)


def _draw_uniformly(
    rng: Key[Array, ""], points: Float[Array, "T D"], valid: Bool[Array, "T"], count: int
) -> Int[Array, "C"]:
    """Distinct valid points, any order; repeated from the first where there are too few."""
    priority = jnp.where(valid, jax.random.uniform(rng, valid.shape), jnp.inf)
    _, first = jax.lax.top_k(-priority, min(count, valid.shape[0]))
    return first[jnp.arange(count) % jnp.maximum(jnp.sum(valid), 1)]


def _draw_apart(
    rng: Key[Array, ""], points: Float[Array, "T D"], valid: Bool[Array, "T"], count: int
) -> Int[Array, "C"]:
    """k-means++: each next point in proportion to its distance, 1 - cosine, to the nearest of those drawn."""

    def draw(distance, rng):
        # Where all points coincide with drawn ones, any valid one will do.
        weight = jnp.where(valid, distance, 0.0)
        log_weight = jnp.where(jnp.sum(weight) > 0, jnp.log(weight), jnp.where(valid, 0.0, -jnp.inf))
        index = jax.random.categorical(rng, log_weight)
        return jnp.minimum(distance, jnp.maximum(1 - points @ points[index], 0.0)), index.astype(jnp.int32)

    return jax.lax.scan(draw, jnp.full(valid.shape, 2.0), jax.random.split(rng, count))[1]
