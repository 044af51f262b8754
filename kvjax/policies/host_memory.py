"""A combinator that keeps what a policy recalls from in host memory, with the last blocks recalled on the device."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.attention import Partials, attend, merge
from kvjax.memory import where_it_lies
from kvjax.policy import CachePolicy
from kvjax.recall import BLOCKS, BlockStore, blocks_segment
from kvjax.shards import summed_over_heads
from kvjax.staging import appended
from kvjax.state import BATCH, HEAD_DIM, SLOTS, array, map_fields, state
from pallas_kernels.cluster_recall import taken

# Kv heads, or query heads where each recalls for itself.
READING_HEADS, STEPS = "reading_heads", "steps"


@state
class Recent:
    """Blocks that the last R steps recalled, and counts over all steps of what was asked for and what was moved."""

    entries: Float[Array, "B H R K P 2*W"] = array(BATCH, READING_HEADS, STEPS, BLOCKS, SLOTS, HEAD_DIM)
    block: Int[Array, "B H R K"] = array(BATCH, READING_HEADS, STEPS, BLOCKS)  # int32; -1 where there is none
    step: Int[Array, "B"] = array(BATCH)  # int32 appended tokens so far; the next one's blocks go to step mod R
    requested: Int[Array, "B"] = array(BATCH)  # int32 blocks, of all heads
    hits: Int[Array, "B"] = array(BATCH)  # int32, how many of those were there


@state
class Hosted:
    """A policy's state whose stored entries lie in host memory."""

    cache: Any
    recent: Recent


def host_memory(policy: CachePolicy, steps: int = 1) -> CachePolicy:
    """The policy with the blocks that it recalls from in host memory. The device holds its index, its window, and the
    blocks that the last `steps` appended tokens recalled; only blocks that are not among these are moved.

    Results are those of the policy itself. Blocks are moved in groups of an eighth of what a query reads, as many
    groups as the row and head that lack most need. Hits are counted in blocks (`state.recent.requested`, `.hits`);
    every miss is a block moved. A prompt is compressed on the device, from where its store is moved at once.

    Where the backend has no host memory space, a warning says so and everything stays on the device.

    Args:
        policy: one that recalls, without a target to recall up to. `full_layers` and choices by layer go around it:
            `by_layer([exact, exact, host_memory(clusterkv), ...])`.
        steps: R, the paper's 1 by default; 0 keeps none, so that every block that is read is moved.

    Raises:
        ValueError: for a policy that does not recall, or says no plan; steps under 0; when a cache is made, where
            devices share kv heads.

    Source: ClusterKV, sections 4.1 and 4.4 (there clusters are cached, not blocks).
    """
    if policy.plan is None:
        raise ValueError(
            f"host_memory: {policy.name} does not say which blocks a query reads: give a policy that recalls, without "
            "certify, target or full_layers (put by_layer around host_memory)"
        )
    if steps < 0:
        raise ValueError(f"steps={steps}; it must be at least 0")
    window, plan = policy.plan

    def init(spec, row_keys):
        if spec.parts > 1:
            raise ValueError(f"host_memory: {spec.parts} devices share each kv head; its blocks cannot be shared there")
        cache = policy.init(spec, row_keys)
        query = jnp.zeros((spec.batch, 1, spec.query_heads, spec.head_dim))
        block = jax.eval_shape(lambda state: plan(state, query).block, cache)
        batch, heads, recalled = block.shape
        shape = (batch, heads, steps, recalled)
        entries = cache.selection.store.entries
        cached = jnp.zeros((*shape, *entries.shape[3:]), entries.dtype)
        zero = lambda: jnp.zeros(batch, jnp.int32)  # noqa: E731
        recent = Recent(cached, jnp.full(shape, -1, jnp.int32), zero(), zero(), zero())
        return Hosted(to_host(cache), recent)

    def prefill(state, keys, values, lengths, query_tail=None, shared=None):
        cache, shared = policy.prefill(fresh_on_device(state.cache), keys, values, lengths, query_tail, shared)
        return Hosted(to_host(cache), state.recent), shared

    def attend_cache(state, query, causal=False) -> tuple[Partials, Hosted]:
        if not causal:
            partials, _ = policy.attend(state.cache, query, causal)
            return partials, state
        kept = attend(query, window(state.cache, query, causal))
        real = appended(state.cache.window.staging, query.shape[1])

        def one(recent: Recent, item):
            query, real = item
            query = query[:, None]
            found = plan(state.cache, query)
            parts = found.rest
            if found.block.shape[2]:
                store = state.cache.selection.store
                entries, recent = recall_recent(store, recent, found.block, found.tokens, real)
                parts = (blocks_segment(entries, found.tokens, store.head_dim), *parts)
            return recent, attend(query, parts) if parts else None

        recent, partials = jax.lax.scan(one, state.recent, (query.swapaxes(0, 1), real.T))
        if partials is not None:
            kept = merge(kept, jax.tree.map(lambda x: x.swapaxes(0, 1)[:, :, 0], partials))
        return kept, Hosted(state.cache, recent)

    def extend(state, keys, values, lengths=None):
        return Hosted(policy.extend(state.cache, keys, values, lengths), state.recent)

    def compact(state):
        return Hosted(policy.compact(state.cache), state.recent)

    return CachePolicy(
        name=f"host_memory({policy.name})",
        init=init,
        prefill=prefill,
        attend=attend_cache,
        extend=extend,
        compact=compact,
        read_bytes=lambda state: policy.read_bytes(state.cache),
        period=policy.period,
        query_tail=policy.query_tail,
        streams=policy.streams,
        recalls=True,
    )


def recall_recent(
    store: BlockStore, recent: Recent, block: Int[Array, "B H K"], tokens: Int[Array, "B H K"], real: Array
) -> tuple[Float[Array, "B H K P 2*W"], Recent]:
    """The blocks that are asked for, from the recent ones or else from the store, and the recent ones after that (as
    they were, in rows whose query is not that of an appended token)."""
    batch, heads, steps, count = recent.block.shape
    wanted = tokens > 0
    held = recent.block.reshape(batch, heads, steps * count)
    same = (block[..., None] == held[:, :, None]) & wanted[..., None]
    hit = jnp.any(same, axis=3)
    missing = wanted & ~hit
    # Missing blocks in front, in order; each knows its place among them.
    rank = jnp.cumsum(missing, axis=2) - 1
    target = jnp.where(missing, rank, count)
    queue = jnp.zeros_like(block)
    put = jax.vmap(jax.vmap(lambda queue, target, block: queue.at[target].set(block, mode="drop")))
    queue = put(queue, target, block)
    group = -(-count // 8)
    groups = -(-jnp.max(jnp.sum(missing, axis=2)) // group)
    queue = jnp.pad(queue, ((0, 0), (0, 0), (0, -count % group)))

    def fetch(number, moved):
        numbers = jax.lax.dynamic_slice_in_dim(queue, number * group, group, axis=2)
        got = where_it_lies(taken, store.entries, numbers)
        return jax.lax.dynamic_update_slice_in_dim(moved, got, number * group, axis=2)

    moved = jnp.zeros((*queue.shape, *store.entries.shape[3:]), store.entries.dtype)
    moved = jax.lax.fori_loop(0, groups, fetch, moved)
    entries = taken(moved, jnp.maximum(rank, 0))
    if steps:
        kept = recent.entries.reshape(batch, heads, steps * count, *recent.entries.shape[4:])
        entries = jnp.where(hit[..., None, None], taken(kept, jnp.argmax(same, axis=3)), entries)
    newest = (jnp.arange(steps) == recent.step[:, None] % max(steps, 1)) & real[:, None]

    def replace(old: Array, new: Array) -> Array:
        return jnp.where(newest.reshape(batch, 1, steps, *(1,) * (old.ndim - 3)), new[:, :, None], old)

    asked = lambda x: jnp.where(real, summed_over_heads(jnp.sum(x, axis=(1, 2), dtype=jnp.int32)), 0)  # noqa: E731
    return (
        entries,
        Recent(
            entries=replace(recent.entries, entries),
            block=replace(recent.block, jnp.where(wanted, block, -1)),
            step=recent.step + real,
            requested=recent.requested + asked(wanted),
            hits=recent.hits + asked(hit),
        ),
    )


def to_host(cache: Any) -> Any:
    """The state with its store's entries in host memory, where the backend has any."""
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "pinned_host" not in kinds:
        message = f"host_memory: backend {jax.default_backend()!r} has no host memory; blocks stay on the device"
        warnings.warn(message, stacklevel=2)
        return cache
    return _moved(cache, lambda x: jax.device_put(x, jax.memory.Space.Host))


def fresh_on_device(cache: Any) -> Any:
    """A state that has stored nothing yet, with an empty store on the device."""
    return _moved(cache, lambda x: jnp.zeros(x.shape, x.dtype))


def _moved(cache: Any, move: Any) -> Any:
    filed = cache.selection
    store = map_fields(lambda field, x: move(x) if field.entries else x, filed.store)
    return dataclasses.replace(cache, selection=dataclasses.replace(filed, store=store))
