"""The meaning of `cluster_recall`, in plain jax.numpy; every other form is tested against it."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cluster_recall.base import Blocks
from pallas_kernels.weighted_decode import EMPTY, Entries, Partials
from pallas_kernels.weighted_decode import reference as weighted_decode


def cluster_recall(
    rows: Float[Array, "B H R D"], blocks: Blocks, number: Int[Array, "B H K"], count: Int[Array, "B H K"]
) -> Partials:
    """Both sums of attention of the rows of every head over the first `count` tokens of each of its K blocks,
    accumulated in float32: keys and values are gathered, then attended to."""
    batch, heads, _, head_dim = rows.shape

    def gathered(first: int, width: int) -> Float[Array, "B H K*P w"]:
        # Apart, although they lie side by side: XLA:CPU would write both and then copy each.
        found = taken(blocks.entries, number, slice(first, first + width))
        return found.reshape(batch, heads, -1, width)

    keys = gathered(0, head_dim)
    values = gathered(blocks.entries.shape[4] // 2, blocks.value_dim or head_dim)
    read = jnp.where(read_places(count, blocks.entries.shape[3]), 0.0, EMPTY)
    entries = Entries(keys, values, log_num=read, logit_cap=blocks.logit_cap)
    if blocks.scale is not None:
        key_scale, value_scale = split(taken(blocks.scale, number), 1)
        entries = dataclasses.replace(entries, key_scale=key_scale[..., 0], value_scale=value_scale[..., 0])
    return weighted_decode.weighted_decode(rows, entries)


def taken(
    stored: Float[Array, "B H_kv N P W"], number: Int[Array, "B H K"], columns: slice = slice(None)
) -> Float[Array, "B H K P w"]:
    """Some columns of the blocks of these numbers, which are of kv heads or of query heads. Numbers are made by
    programs, not by users: there is no clamping pass over what was gathered."""
    batch, heads, _ = number.shape
    kv_heads, places = stored.shape[1], stored.shape[3]
    # Blocks of one place as rows: on TPUs XLA lays such blocks out in another way than it gathers them.
    squeezed = stored[:, :, :, 0] if places == 1 else stored
    of_head = jax.vmap(jax.vmap(lambda stored, at: stored.at[at, ..., columns].get(mode="promise_in_bounds")))
    found = of_head(squeezed, number.reshape(batch, kv_heads, -1))
    found = found[:, :, :, None] if places == 1 else found
    return found.reshape(batch, heads, -1, *found.shape[3:])


def split(
    entries: Float[Array, "B H K P 2*W"], head_dim: int, value_dim: int | None = None
) -> tuple[Float[Array, "B H K*P D"], Float[Array, "B H K*P D_v"]]:
    """Keys and values of the blocks of a head, one block after the other."""
    batch, heads, blocks, places, width = entries.shape
    slots = entries.reshape(batch, heads, blocks * places, width)
    return slots[..., :head_dim], slots[..., width // 2 : width // 2 + (value_dim or head_dim)]


def read_places(count: Int[Array, "B H K"], places: int) -> Bool[Array, "B H K*P"]:
    """Which slots of the blocks of a head, one after the other, hold tokens that are read."""
    return (jnp.arange(places, dtype=jnp.int32) < count[..., None]).reshape(*count.shape[:2], -1)
