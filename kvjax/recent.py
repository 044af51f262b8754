"""Blocks that were recalled lately, on the device, where the store that they are of lies in host memory."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.collectives import summed_over_heads
from kvjax.memory import where_it_lies
from kvjax.state import state
from pallas_kernels.cluster_recall import taken


@state
class Recent:
    """Blocks that the last R steps recalled, and counts over all steps of what was asked for and what was moved. H are
    kv heads, or query heads where each recalls for itself."""

    entries: Float[Array, "B H R K P 2*W"]
    block: Int[Array, "B H R K"]  # int32; -1 where there is none
    step: Int[Array, "B"]  # int32 appended tokens so far; the next one's blocks go to step mod R
    requested: Int[Array, "B"]  # int32 blocks, of all heads
    hits: Int[Array, "B"]  # int32, how many of those were there


def init_recent(block: jax.ShapeDtypeStruct, stored: Float[Array, "B H_kv N P 2*W"], steps: int) -> Recent:
    """Nothing recalled yet, of a store whose queries name such blocks [B, H, K]."""
    batch, heads, recalled = block.shape
    shape = (batch, heads, steps, recalled)
    none = lambda: jnp.zeros(batch, jnp.int32)  # noqa: E731
    return Recent(
        entries=jnp.zeros((*shape, *stored.shape[3:]), stored.dtype),
        block=jnp.full(shape, -1, jnp.int32),
        step=none(),
        requested=none(),
        hits=none(),
    )


def recall_recent(
    stored: Float[Array, "B H_kv N P 2*W"],
    recent: Recent,
    block: Int[Array, "B H K"],
    tokens: Int[Array, "B H K"],
    real: Bool[Array, "B"],
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
        got = where_it_lies(taken, stored, numbers)
        return jax.lax.dynamic_update_slice_in_dim(moved, got, number * group, axis=2)

    moved = jnp.zeros((*queue.shape, *stored.shape[3:]), stored.dtype)
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
