"""ClusterGen: the recent tokens and k centres of the keys before them, by greedy k-center.

The streaming algorithm of the same papers, with its guarantees, is the policy `subgen`; this is what their experiments
run, and a better variant of it.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.k_center import extend_k_center, greedy_k_center
from kvjax.policies.windowed import init_windowed, windowed_policy
from kvjax.policy import CachePolicy
from kvjax.staging import Block, between, check_budget, check_period, init_window, occupancy, window_segments
from kvjax.state import BATCH, KV_HEADS, SLOTS, array, state


@state
class Clusters:
    """What `mean_value` knows of the clusters whose centres are the keys in the window's selection slots."""

    count: Int[Array, "B H_kv M"] = array(BATCH, KV_HEADS, SLOTS)  # int32 tokens, 0 in empty slots
    # float32 l2 distance at which the centre was chosen; -inf in empty slots. The smallest go first.
    separation: Float[Array, "B H_kv M"] = array(BATCH, KV_HEADS, SLOTS)
    log_weight: Float[Array, "B H_kv S"] = array(BATCH, KV_HEADS, SLOTS)  # float32, of the whole window


def clustergen(
    budget: int,
    *,
    recent: int | None = None,
    sinks: int = 0,
    period: int = 64,
    variant: Literal["mean_value", "paper"] = "mean_value",
) -> CachePolicy:
    """Keeps recent tokens and centres of the others, chosen per kv head by farthest-first traversal of the keys.

    Args:
        budget: slots per head, sinks and recent tokens included; the rest are centres.
        recent: newest tokens always kept; half the budget by default, as in the papers' LongBench runs.
        sinks: first tokens always kept; the papers keep none.
        period: tokens between compactions.
        variant: "mean_value": a centre stands for its cluster, with the number of its tokens as weight and their mean
            value; tokens that leave the window join clusters or become centres in place of the least separated ones.
            It is the default because its attention is nearer to exact attention on every stream tried; where a task
            asks for one token's own value, a mean blurs it, and "paper" does better. "paper": the prompt is clustered
            once and centres are plain tokens; tokens that leave the window while decoding are dropped (with `recent`
            below `period`, up to `period` staged tokens stay visible until a compaction).

    Raises:
        ValueError: for a budget that leaves no slot for centres, or an unknown variant.
    """
    recent = budget // 2 if recent is None else recent
    check_budget(budget, sinks, recent)
    check_period(period)
    if budget == sinks + recent:
        raise ValueError(f"budget={budget} leaves no slot for centres; sinks + recent already take {budget}")
    if variant not in ("mean_value", "paper"):
        raise ValueError(f"variant={variant!r}; it must be 'mean_value' or 'paper'")
    centers, fixed = budget - sinks - recent, sinks + recent

    def init(spec, row_keys):
        del row_keys
        window = init_window(spec, budget, sinks, recent, period)
        if variant == "paper":
            return init_windowed(spec, window, Centered(jnp.zeros(spec.batch, jnp.int32)))
        shape = (spec.batch, spec.kv_heads, centers)
        clusters = Clusters(
            count=jnp.zeros(shape, jnp.int32),
            separation=jnp.full(shape, -jnp.inf),
            log_weight=jnp.zeros((*shape[:2], budget)),
        )
        return init_windowed(spec, window, clusters)

    def select(state, keys, values, queries):
        window = state.window
        middle = between(window, keys.shape[1])
        per_head = jax.vmap(_cluster, in_axes=(0, 0, None, None))
        found = jax.vmap(per_head, in_axes=(0, 0, 0, None))(keys.swapaxes(1, 2), values.swapaxes(1, 2), middle, centers)
        center_keys, center_values, count, separation, mean_value = found
        kept_values = center_values if variant == "paper" else mean_value
        window = dataclasses.replace(
            window,
            keys=window.keys.at[:, :, fixed:].set(center_keys.astype(window.keys.dtype)),
            values=window.values.at[:, :, fixed:].set(kept_values.astype(window.values.dtype)),
        )
        state = dataclasses.replace(state, window=window)
        if variant == "paper":
            chosen = jnp.sum(separation[:, 0] > -jnp.inf, axis=-1, dtype=jnp.int32)
            return dataclasses.replace(state, selection=Centered(chosen))
        return _weigh(state, count, separation)

    def absorb(state, block: Block):
        if variant == "paper":
            return state
        window, clusters = state.window, state.selection
        per_head = jax.vmap(_recluster, in_axes=(0, 0, 0, 0, 0, 0, None))
        center_keys, count, separation, mean_value = jax.vmap(per_head)(
            window.keys[:, :, fixed:],
            clusters.count,
            clusters.separation,
            window.values[:, :, fixed:],
            block.keys,
            block.values,
            block.present,
        )
        window = dataclasses.replace(
            window,
            keys=window.keys.at[:, :, fixed:].set(center_keys),
            values=window.values.at[:, :, fixed:].set(mean_value.astype(window.values.dtype)),
        )
        return _weigh(dataclasses.replace(state, window=window), count, separation)

    def segments(state, queries):
        if variant == "paper":
            return window_segments(state.window, selected=state.selection.chosen, queries=queries, slide=True)
        _, _, middle = occupancy(state.window)
        selected = jnp.minimum(middle, centers)
        weights = state.selection.log_weight
        return window_segments(state.window, selected=selected, log_weight=weights, queries=queries)

    return windowed_policy(
        f"clustergen({variant})", init=init, select=select, absorb=absorb, segments=segments, period=period
    )


@state
class Centered:
    """All that `paper` keeps beside the window."""

    chosen: Int[Array, "B"] = array(BATCH)  # int32 centres of the row


def _weigh(state, count, separation):
    """Stores the clusters; a centre weighs as much as the tokens of its cluster."""
    clusters = state.selection
    fixed = state.window.sinks + state.window.recent
    log_weight = clusters.log_weight.at[:, :, fixed:].set(jnp.log(jnp.maximum(count, 1).astype(jnp.float32)))
    return dataclasses.replace(state, selection=Clusters(count, separation, log_weight))


def _cluster(keys: Float[Array, "T D"], values: Float[Array, "T D"], valid: Bool[Array, "T"], size: int):
    """One head's prompt: centres' keys and values, clusters' counts, separations and mean values, empty ones last."""
    found = greedy_k_center(keys, valid, size)
    chosen = found.separation > -jnp.inf
    # A centre belongs to itself, even where an earlier one has the same key: no cluster may be without a token.
    own = jnp.where(chosen, found.index, valid.shape[0])
    home = found.nearest.at[own].set(jnp.arange(size, dtype=found.nearest.dtype), mode="drop")
    weight = valid.astype(jnp.float32)
    count = jnp.zeros(size).at[home].add(weight)
    total = jnp.zeros((size, values.shape[1])).at[home].add(values.astype(jnp.float32) * weight[:, None])
    count = jnp.where(chosen, count, 0)
    mean = total / jnp.maximum(count, 1)[:, None]
    return keys[found.index], values[found.index], count.astype(jnp.int32), found.separation, mean


def _recluster(
    centers: Float[Array, "M D"],
    count: Int[Array, "M"],
    separation: Float[Array, "M"],
    mean_value: Float[Array, "M D"],
    keys: Float[Array, "P D"],
    values: Float[Array, "P D"],
    present: Bool[Array, "P"],
):
    """Takes a block of tokens into one head's clusters.

    The P newcomers and the P centres of least separation (empty slots before all) form a pool; the other centres
    stand. The traversal goes on from them through the pool until the slots are full again, and what it leaves over
    joins the nearest centre, count and value. Its whole cost is a product of [2P, D] with [D, M].
    """
    slots, newcomers = centers.shape[0], keys.shape[0]
    contested = min(slots, newcomers)
    _, pool_slots = jax.lax.top_k(-separation, contested)
    pool_slots = jnp.sort(pool_slots)  # the traversal's first choices go to the lowest slots, so empty ones stay last
    stands = (separation > -jnp.inf).at[pool_slots].set(False)

    pool_keys = jnp.concatenate([centers[pool_slots], keys]).astype(jnp.float32)
    mean_value = mean_value.astype(jnp.float32)
    pool_values = jnp.concatenate([mean_value[pool_slots], values.astype(jnp.float32)])
    pool_count = jnp.concatenate([count[pool_slots], present.astype(jnp.int32)])
    valid = pool_count > 0
    to_centers = jnp.where(stands, _pairwise(pool_keys, centers.astype(jnp.float32)), jnp.inf)
    among = _pairwise(pool_keys, pool_keys)
    to_standing = jnp.min(to_centers, axis=1)
    picked, picked_separation = extend_k_center(to_standing, among, valid, contested)
    chosen = picked_separation > -jnp.inf

    # Every pool token belongs to the nearest of the standing and the newly chosen centres; a chosen one to itself.
    to_picked = jnp.where(chosen, among[:, picked], jnp.inf)
    nearest_picked = jnp.argmin(to_picked, axis=1)
    joins_picked = jnp.min(to_picked, axis=1) <= to_standing
    home = jnp.where(joins_picked, pool_slots[nearest_picked], jnp.argmin(to_centers, axis=1))
    home = home.at[jnp.where(chosen, picked, home.shape[0])].set(pool_slots, mode="drop")

    old_count = jnp.where(stands, count, 0)
    old_total = mean_value * old_count[:, None]
    home = jnp.where(valid, home, slots)
    new_count = old_count.at[home].add(pool_count, mode="drop")
    new_total = old_total.at[home].add(pool_values * pool_count[:, None], mode="drop")
    mean = new_total / jnp.maximum(new_count, 1)[:, None]
    new_centers = centers.at[jnp.where(chosen, pool_slots, slots)].set(
        pool_keys[picked].astype(centers.dtype), mode="drop"
    )
    new_separation = separation.at[pool_slots].set(picked_separation)
    # A row that brings nothing stays as it is: it may not feel how often the others of its batch are compacted.
    brings = jnp.any(present)
    return (
        jnp.where(brings, new_centers, centers),
        jnp.where(brings, new_count, count),
        jnp.where(brings, new_separation, separation),
        jnp.where(brings, mean, mean_value),
    )


def _pairwise(a: Float[Array, "N D"], b: Float[Array, "M D"]) -> Float[Array, "N M"]:
    """Squared distances, by a product. Good to 1e-6 of the keys' squared norms, which only orders near ties."""
    squared = jnp.sum(a * a, axis=1)[:, None] + jnp.sum(b * b, axis=1)[None, :]
    return jnp.maximum(squared - 2 * a @ b.T, 0.0)
