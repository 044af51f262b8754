"""The meaning of `cluster_recall`, in plain jax.numpy; every other form is tested against it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import packing
from pallas_kernels.cluster_recall.base import Blocks
from pallas_kernels.weighted_decode import EMPTY, Entries, Partials
from pallas_kernels.weighted_decode import reference as weighted_decode


def cluster_recall(
    rows: Float[Array, "B H R D"], blocks: Blocks, number: Int[Array, "B H K"], count: Int[Array, "B H K"]
) -> Partials:
    """Both sums of attention of the rows of every head over the first `count` tokens of each of its K blocks,
    accumulated in float32: keys and values are gathered, then attended to."""
    if blocks.entries.dtype != jnp.float32 or blocks.scale is not None:
        return halves_apart(rows, blocks, number, count)
    # What is as wide as the arithmetic costs a CPU its reading and nothing else.
    return jax.lax.platform_dependent(rows, blocks, number, count, cpu=halves_together, default=halves_apart)


def halves_apart(
    rows: Float[Array, "B H R D"], blocks: Blocks, number: Int[Array, "B H K"], count: Int[Array, "B H K"]
) -> Partials:
    """From keys and values gathered each for itself."""
    batch, heads, _, head_dim = rows.shape

    def gathered(first: int, width: int) -> Float[Array, "B H K*P w"]:
        # Apart, although they lie side by side: XLA:CPU would write both and then copy each.
        found = taken(blocks.entries, number, slice(first, first + width))
        return found.reshape(batch, heads, -1, width)

    keys, values = (gathered(columns.start, columns.stop - columns.start) for columns in halves(blocks, head_dim))
    scale = None if blocks.scale is None else taken(blocks.scale, number)
    return weighted_decode.weighted_decode(rows, _entries(blocks, keys, values, scale, count))


def halves_together(
    rows: Float[Array, "B H R D"], blocks: Blocks, number: Int[Array, "B H K"], count: Int[Array, "B H K"]
) -> Partials:
    """From whole blocks, gathered in one piece each: rows that are zero where the values lie read keys of twice the
    width, and of the sums over them the values' columns count."""
    batch, heads, _, head_dim = rows.shape
    found = taken(blocks.entries, number).reshape(batch, heads, -1, blocks.entries.shape[4])
    width = found.shape[3]
    # Logits are divided by the root of the width.
    scaled = rows.astype(jnp.float32) * math.sqrt(width / head_dim)
    padded = jnp.pad(scaled, ((0, 0), (0, 0), (0, 0), (0, width - head_dim)))
    sums = weighted_decode.weighted_decode(padded, _entries(blocks, found, found, None, count))
    return sums._replace(num=sums.num[..., halves(blocks, head_dim)[1]])


def as_entries(
    blocks: Blocks,
    found: Float[Array, "B H K P 2*W"],
    scale: Float[Array, "B H K P 2"] | None,
    count: Int[Array, "B H K"],
    head_dim: int,
) -> Entries:
    """Blocks that were taken, of which the first `count` tokens are read, as `weighted_decode` takes them."""
    batch, heads, _, _, width = found.shape
    slots = found.reshape(batch, heads, -1, width)
    keys, values = (slots[..., columns] for columns in halves(blocks, head_dim))
    return _entries(blocks, keys, values, scale, count)


def halves(blocks: Blocks, head_dim: int) -> tuple[slice, slice]:
    """Where in a row the key lies, and where the value."""
    first = blocks.value_column
    value = packing.packed_width(blocks.value_dim or head_dim, blocks.value_bits)
    return slice(0, packing.packed_width(head_dim, blocks.key_bits)), slice(first, first + value)


def _entries(blocks: Blocks, keys: Array, values: Array, scale: Array | None, count: Array) -> Entries:
    read = jnp.where(read_places(count, blocks.entries.shape[3]), 0.0, EMPTY)
    entries = Entries(
        keys,
        values,
        log_num=read,
        logit_cap=blocks.logit_cap,
        key_bits=blocks.key_bits,
        value_bits=blocks.value_bits,
    )
    if scale is None:
        return entries
    key_scale, value_scale = (scale[..., half].reshape(read.shape) for half in (0, 1))
    return dataclasses.replace(entries, key_scale=key_scale, value_scale=value_scale)


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


def read_places(count: Int[Array, "B H K"], places: int) -> Bool[Array, "B H K*P"]:
    """Which slots of the blocks of a head, one after the other, hold tokens that are read."""
    return (jnp.arange(places, dtype=jnp.int32) < count[..., None]).reshape(*count.shape[:2], -1)
