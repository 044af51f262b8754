"""Stores that keep every token in blocks, and what policies that recall parts of them have in common.

Selection looks at an index only, never at the stored entries, so that these may lie in another form or place.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import storage
from kvjax.collectives import are_shared, own_slot, slots_in_all
from kvjax.memory import on_host, where_it_lies
from kvjax.partials import around, by_token, merge_over_parts, rows_of_heads
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import state, static
from kvjax.storage import Storage, Stored
from kvjax.window import Window
from pallas_kernels import packing
from pallas_kernels.cluster_recall import Blocks, as_entries, cluster_recall, entry_width, halves, taken
from pallas_kernels.weighted_decode import Partials, weighted_decode

T = TypeVar("T")

NOWHERE = 2**30  # a place past every end


@state
class BlockStore:
    """One head's tokens in N blocks of P places, key and value side by side, so that a TPU can fetch a block where it
    lies: the key in the first columns of the first half, the value in those of the second half. A block is filled from
    its first place on; empty places hold finite numbers. Devices may share the blocks: their numbers, everywhere but in
    these arrays, are those among all of them.

    What is written is stored in the form of the storage, where there is one: old blocks are never touched again.
    """

    entries: Float[Array, "N P 2*W"]
    scale: Float[Array, "N P 2"] | None  # of a stored key and value
    position: Int[Array, "N P"]  # int32, of the token in the text; -1 in empty places
    head_dim: int = static()
    value_dim: int = static()
    center: Float[Array, "D"] | None = None  # float32, what stored keys are without
    storage: Storage | None = static(default=None)

    @property
    def keys(self) -> Float[Array, "*A N P D"]:
        """As they were written, but for what storing them changed."""
        return self._half(slice(0, self.head_dim), 0)

    @property
    def values(self) -> Float[Array, "*A N P D_v"]:
        """Alike."""
        return self._half(slice(self.entries.shape[-1] // 2, self.entries.shape[-1] // 2 + self.value_dim), 1)

    def _half(self, columns: slice, half: int) -> Array:
        if self.storage is None:
            return self.entries[..., columns]
        blocks = as_blocks(self)
        numbers = self.entries[..., halves(blocks, self.head_dim)[half]]
        assert self.scale is not None
        found = storage.load(numbers, self.scale[..., half : half + 1], (blocks.key_bits, blocks.value_bits)[half])
        return found if half or self.center is None else found + self.center[..., None, None, :]


def as_blocks(store: BlockStore, logit_cap: float | None = None) -> Blocks:
    """A store as kernels take it."""
    return Blocks(
        store.entries,
        store.scale,
        value_dim=store.value_dim,
        logit_cap=logit_cap,
        key_bits=None if store.storage is None else store.storage.key_bits,
        value_bits=None if store.storage is None else store.storage.value_bits,
    )


def init_store(spec: CacheSpec, blocks: int, places: int) -> BlockStore:
    """One head's empty store of so many blocks, as many for every device that shares it."""
    blocks = -(-blocks // spec.parts) * spec.parts
    width = entry_width(max(spec.head_dim, spec.value_width))
    none = jnp.zeros((blocks, places, 2 * width), spec.dtype)
    store = BlockStore(
        entries=none,
        scale=None,
        position=jnp.full((blocks, places), -1, jnp.int32),
        head_dim=spec.head_dim,
        value_dim=spec.value_width,
    )
    if spec.storage is None:
        return store
    empty = spec.storage.empty((blocks, places), spec.head_dim, spec.value_width)
    return dataclasses.replace(_side_by_side(store, empty, spec.storage), center=jnp.zeros(spec.head_dim))


def _side_by_side(blocks: BlockStore, halves: Sequence[Stored], form: Storage) -> BlockStore:
    """Blocks of W columns with stored keys and values for those that they have."""
    width = blocks.entries.shape[-1] // 2
    room = [packing.packed_width(width, bits) for bits in (form.key_bits, form.value_bits)]
    numbers = [
        jnp.pad(half.numbers, ((0, 0), (0, 0), (0, of_half - half.numbers.shape[-1])))
        for half, of_half in zip(halves, room, strict=True)
    ]
    scale = jnp.concatenate([half.scale for half in halves], axis=-1)
    return dataclasses.replace(blocks, entries=jnp.concatenate(numbers, axis=-1), scale=scale, storage=form)


def stored_blocks(store: BlockStore) -> int:
    """How many blocks a store has, of one head or of all, on all devices together."""
    return slots_in_all(store.position.shape[-2])


def arrange(
    source: Int[Array, "M P"], keys: Float[Array, "T D"], values: Float[Array, "T D_v"], position: Int[Array, "T"]
) -> BlockStore:
    """Blocks whose places hold the tokens of these numbers; a number outside [0, T) leaves a place empty."""
    there = (source >= 0) & (source < position.shape[0])
    number = jnp.where(there, source, 0)
    width = entry_width(max(keys.shape[-1], values.shape[-1]))
    halves = [jnp.pad(x, ((0, 0), (0, width - x.shape[-1]))) for x in (keys, values)]
    return BlockStore(
        entries=jnp.where(there[..., None], jnp.concatenate(halves, axis=1)[number], 0),
        scale=None,
        position=jnp.where(there, position[number], -1),
        head_dim=keys.shape[-1],
        value_dim=values.shape[-1],
    )


def put_blocks(store: BlockStore, place: Int[Array, "M"], blocks: BlockStore) -> BlockStore:
    """Writes M blocks of one head at these numbers; those past the end are dropped."""
    center = store.center
    if store.storage is not None and center is not None:
        keys, values = jnp.split(blocks.entries, 2, axis=-1)
        keys, there = keys[..., : store.head_dim], (blocks.position >= 0).reshape(-1)
        center = storage.mean_of_first(center, keys.reshape(-1, store.head_dim), there)
        stored = store.storage.store(keys - center, values[..., : store.value_dim])
        blocks = _side_by_side(blocks, stored, store.storage)
    # Blocks have no center of their own.
    written = put(dataclasses.replace(store, center=None), own_slot(place, store.position.shape[0]), blocks)
    return dataclasses.replace(written, center=center)


def put(tree: T, place: Int[Array, "M"], new: T) -> T:
    """Writes M entries of an index at these numbers; those past the end are dropped."""

    def write(old: Array, place: Int[Array, "M"], new: Array) -> Array:
        return old.at[place].set(new.astype(old.dtype), mode="drop")

    return jax.tree.map(lambda old, new: where_it_lies(write, old, place, new, stays=True), tree, new)


def attend_blocks(
    query: Float[Array, "B 1 H_q D"],
    store: BlockStore,
    block: Int[Array, "B H K"],
    count: Int[Array, "B H K"],
    logit_cap: float | None = None,
    fetched: Float[Array, "B H K P 2*W"] | None = None,
) -> Partials:
    """Partials of one query's attention over the first `count` tokens of the blocks that it names, for every kv head or
    (H = H_q) every query head of its own; `fetched` are these blocks, where they have been fetched already."""
    heads = block.shape[1]
    if are_shared():
        here, last = own_slot(block, store.position.shape[2]), store.position.shape[2] - 1
        block, count = jnp.minimum(here, last), jnp.where(here <= last, count, 0)
    own = rows = rows_of_heads(query, heads)
    if store.storage is not None:
        rows = storage.turned(own).astype(own.dtype)
    blocks = as_blocks(store, logit_cap)
    if fetched is None and not on_host(store.entries):
        sums = cluster_recall(rows, blocks, block, count)
    else:
        fetched = where_it_lies(taken, store.entries, block) if fetched is None else fetched
        scale = None if store.scale is None else taken(store.scale, block)
        sums = weighted_decode(rows, as_entries(blocks, fetched, scale, count, rows.shape[3]))
    if store.center is not None:
        center = jnp.repeat(store.center, heads // store.center.shape[1], axis=1)
        sums = around(sums._replace(num=storage.turned_back(sums.num)), own, center)
    return merge_over_parts(by_token(sums, tokens=1))


def blocks_of(tokens: int, parts: int, places: int) -> int:
    """Blocks that so many tokens in so many parts fill at most: each part may leave places - 1 empty."""
    return (tokens + (places - 1) * min(parts, tokens)) // places


def block_slots(tokens: int, part_tokens: int, places: int) -> int:
    """How many blocks a query reads at most for so many tokens in parts of so many tokens on average: what they fill,
    and one more per part that ends inside a block; never more than tokens."""
    return min(-(-tokens // places) + -(-tokens // part_tokens), tokens)


def wait_and_file(
    window: Window,
    pending: Int[Array, "B"],
    left: Tokens,
    every: int,
    file: Callable[..., Any],
) -> tuple[Window, Int[Array, "B"], Int[Array, "B"], Any, Int[Array, "B"]]:
    """Tokens that left the window's recent ones wait in its selected slots (attended to like all of it); every chunk of
    `every` that is full is filed.

    Args:
        pending: tokens that wait.
        file: (keys [B, H_kv, R, every, D], values, position [B, R, every], full [B, R]) -> what is filed then.

    Returns:
        The window, tokens that wait, chunks filed, what `file` gave (None where no chunk can be full), tokens lost.
    """
    fixed = window.fixed
    slots = window.keys.shape[2] - fixed
    arriving = left.keys.shape[2]
    fits = jnp.minimum(left.count, slots - pending)
    place = jnp.arange(arriving)
    target = jnp.where(place < fits[:, None], fixed + pending[:, None] + place, window.keys.shape[2])
    add = jax.vmap(lambda buffer, fresh, target: buffer.at[:, target].set(fresh, mode="drop"))
    keys, values = add(window.keys, left.keys, target), add(window.values, left.values, target)
    oldest = left.first - pending  # position of the first token that waits
    pending, lost, full, filed = pending + fits, left.count - fits, jnp.zeros_like(pending), None
    if rounds := min(slots, every - 1 + arriving) // every:
        full = pending // every
        chunks = lambda x: x[:, :, fixed : fixed + rounds * every].reshape(*x.shape[:2], rounds, every, -1)  # noqa: E731
        position = (oldest[:, None] + jnp.arange(rounds * every)).reshape(-1, rounds, every)
        filed = file(chunks(keys), chunks(values), position, jnp.arange(rounds) < full[:, None])
        source = jnp.minimum(jnp.arange(slots) + (full * every)[:, None], slots - 1)

        def move_up(buffer, source, full):
            return buffer.at[:, fixed:].set(jnp.where(full > 0, buffer[:, fixed:][:, source], buffer[:, fixed:]))

        keys, values = jax.vmap(move_up)(keys, source, full), jax.vmap(move_up)(values, source, full)
        pending = pending - full * every
    return dataclasses.replace(window, keys=keys, values=values), pending, full, filed, lost
