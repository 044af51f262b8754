"""Recall: everything is kept in blocks, an index says which blocks a query needs, and attention reads those alone.

What policies that recall have in common. The tokens between sinks and recent ones wait in the window (attended to like
all of it) until `every` of them have come; such a chunk is then filed: it goes to the block store, and what the policy
needs to find it again to the policy's index. Selection looks at the index only, never at the stored entries, so that
combinators may keep those in another form or place.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.attention import Partials, attend, attend_blocks, merge
from kvjax.memory import on_host, where_it_lies
from kvjax.policies.windowed import WindowedState
from kvjax.policy import CachePolicy, CacheSpec, Segments
from kvjax.segment import Segment, segment, segment_bytes
from kvjax.shards import are_shared, own_slot, slots_in_all
from kvjax.staging import Block
from kvjax.state import BATCH, HEAD_DIM, KV_HEADS, SEQUENCE, SLOTS, array, stacked, state, static
from pallas_kernels.cluster_recall import Blocks, entry_width, read_places, split, taken

T = TypeVar("T")

BLOCKS = "blocks"
FEW_QUERIES = 8  # that recall at the same time
NOWHERE = 2**30  # a place past every end


@state
class BlockStore:
    """One head's tokens in N blocks of P places. A block is filled from its first place on; empty places hold finite
    numbers. Of every place, key and value lie side by side, so that a TPU can fetch a block where it lies. Devices may
    share the blocks: their numbers, everywhere but in these arrays, are those among all of them."""

    # The key in the first columns of the first half, the value in those of the second half.
    entries: Float[Array, "N P 2*W"] = array(SEQUENCE, SLOTS, HEAD_DIM, entries=True, side_by_side=2)
    position: Int[Array, "N P"] = array(SEQUENCE, SLOTS)  # int32, of the token in the text; -1 in empty places
    head_dim: int = static()

    @property
    def keys(self) -> Float[Array, "*A N P D"]:
        return self.entries[..., : self.head_dim]

    @property
    def values(self) -> Float[Array, "*A N P D"]:
        half = self.entries.shape[-1] // 2
        return self.entries[..., half : half + self.head_dim]


@state
class Filed:
    """What a policy that recalls keeps beside its window."""

    store: BlockStore = stacked(BATCH, KV_HEADS)
    index: Any = stacked(BATCH, KV_HEADS)  # the policy's own pytree, of one head
    pending: Int[Array, "B"] = array(BATCH)  # int32 tokens that wait in the window's selection slots
    chunks: Int[Array, "B"] = array(BATCH)  # int32 chunks that were filed, as the policy counts them
    learnt: Any  # the policy's own pytree of what attention told it; None where it keeps nothing
    group: int = static()  # query heads per kv head


def init_store(spec: CacheSpec, blocks: int, places: int) -> BlockStore:
    """One head's empty store of so many blocks, as many for every device that shares it."""
    blocks = -(-blocks // spec.parts) * spec.parts
    return BlockStore(
        entries=jnp.zeros((blocks, places, 2 * entry_width(spec.head_dim)), spec.dtype),
        position=jnp.full((blocks, places), -1, jnp.int32),
        head_dim=spec.head_dim,
    )


def stored_blocks(store: BlockStore) -> int:
    """How many blocks a store has, of one head or of all, on all devices together."""
    return slots_in_all(store.position.shape[-2])


def put_blocks(store: BlockStore, place: Int[Array, "M"], blocks: BlockStore) -> BlockStore:
    """Writes M blocks of one head at these numbers; those past the end are dropped."""
    return put(store, own_slot(place, store.position.shape[0]), blocks)


def put(tree: T, place: Int[Array, "M"], new: T) -> T:
    """Writes M entries of an index at these numbers; those past the end are dropped."""

    def write(old: Array, place: Int[Array, "M"], new: Array) -> Array:
        return old.at[place].set(new.astype(old.dtype), mode="drop")

    return jax.tree.map(lambda old, new: where_it_lies(write, old, place, new, stays=True), tree, new)


def arrange(
    source: Int[Array, "N P"], keys: Float[Array, "T D"], values: Float[Array, "T D"], position: Int[Array, "T"]
) -> BlockStore:
    """Blocks whose places hold the tokens of these numbers; a number outside [0, T) leaves a place empty."""
    there = (source >= 0) & (source < position.shape[0])
    number = jnp.where(there, source, 0)
    head_dim = keys.shape[-1]
    padding = ((0, 0), (0, entry_width(head_dim) - head_dim))
    entries = jnp.concatenate([jnp.pad(keys, padding), jnp.pad(values, padding)], axis=1)
    return BlockStore(
        entries=jnp.where(there[..., None], entries[number], 0),
        position=jnp.where(there, position[number], -1),
        head_dim=head_dim,
    )


def attend_recalled(
    query: Float[Array, "B 1 H_q D"],
    store: BlockStore,
    block: Int[Array, "B H K"],
    count: Int[Array, "B H K"],
    scales: Float[Array, "B H_kv N P 2"] | None = None,
) -> Partials:
    """Partials of attention over the first `count` tokens of each of K blocks; arguments as for `recall`.

    Args:
        scales: float32 factors of quantised keys and values; None: one.
    """
    if on_host(store.entries):
        return attend(query, (recall(store, block, count),))
    return attend_blocks(query, Blocks(store.entries, scales), *own_blocks(store, block, count))


def recall(store: BlockStore, block: Int[Array, "B H K"], count: Int[Array, "B H K"]) -> Segment:
    """The first `count` tokens of each of K blocks, gathered.

    Args:
        store: of all rows and kv heads, [B, H_kv, N, P, D].
        block: numbers for every kv head, or (H = H_q) for every query head of its own.
        count: tokens of the block that are read; 0 where nothing is (any block number will do).

    Returns:
        A segment of K * P slots for H heads.
    """
    block, count = own_blocks(store, block, count)
    return blocks_segment(where_it_lies(taken, store.entries, block), count, store.head_dim)


def own_blocks(
    store: BlockStore, block: Int[Array, "B H K"], count: Int[Array, "B H K"]
) -> tuple[Int[Array, "B H K"], Int[Array, "B H K"]]:
    """Numbers of blocks as those of this device's, and how many tokens are read of each: none, where it lies on
    another."""
    if not are_shared():
        return block, count
    blocks = store.position.shape[2]
    here = own_slot(block, blocks)
    return jnp.minimum(here, blocks - 1), jnp.where(here < blocks, count, 0)


def blocks_segment(entries: Float[Array, "B H K P 2*W"], count: Int[Array, "B H K"], head_dim: int) -> Segment:
    """Blocks that were gathered, side by side, of which the first `count` tokens are read."""
    keys, values = split(entries, head_dim)
    weight = jnp.where(read_places(count, entries.shape[3]), 0.0, -jnp.inf)
    return segment(keys, values, log_num=weight, in_parts=True)


class Ranked(NamedTuple):
    """Which blocks hold the best parts of a store up to a budget, and how much of every part they are."""

    block: Int[Array, "K"]  # int32
    tokens: Int[Array, "K"]  # int32, how many are read of each; 0 where none
    taken: Int[Array, "C"]  # int32 tokens that are read of each part


def best_parts(
    score: Float[Array, "C"],
    size: Int[Array, "C"],
    first: Int[Array, "C"],
    *,
    tokens: int,
    blocks: int,
    places: int,
    skip: Int[Array, ""] | int | None = None,
) -> Ranked:
    """Whole parts (clusters, pages) in descending order of score, the last one cut so as to end exactly at the budget.

    Of equal scores the part with the lower number comes first; a part that is cut keeps its first tokens. Parts of size
    0 are passed over.

    Args:
        size: tokens of each part.
        first: block where it begins; its tokens fill that one and the following ones without gaps.
        tokens: the budget.
        blocks: K, as many blocks as are read at most: parts that leave much of their blocks empty may use them up
            before the tokens of the budget.
        skip: leaves out so many first blocks, which were read before; `taken` counts their tokens, too.
    """
    parts = min(score.shape[0], blocks) if skip is None else score.shape[0]
    if not parts:
        return Ranked(jnp.zeros(blocks, jnp.int32), jnp.zeros(blocks, jnp.int32), jnp.zeros_like(size))
    # Each part that is taken takes at least one block, so no more than K parts matter.
    _, order = jax.lax.top_k(jnp.where(size > 0, score, -jnp.inf), parts)
    sizes = size[order]
    taken = jnp.clip(tokens - (jnp.cumsum(sizes) - sizes), 0, sizes)
    needed = -(-taken // places)
    skip = 0 if skip is None else skip
    needed = jnp.clip(skip + blocks - (jnp.cumsum(needed) - needed), 0, needed)
    taken = jnp.minimum(taken, needed * places)
    end = jnp.cumsum(needed)

    slot = skip + jnp.arange(blocks, dtype=jnp.int32)
    part = jnp.sum(end <= slot[:, None], axis=1)
    used = part < parts
    part = jnp.minimum(part, parts - 1)
    place = slot - (end - needed)[part]
    count = jnp.where(used, jnp.clip(taken[part] - places * place, 0, places), 0)
    block = jnp.where(used, first[order][part] + place, 0)
    return Ranked(block, count, jnp.zeros_like(size).at[order].set(taken))


def blocks_of(tokens: int, parts: int, places: int) -> int:
    """Blocks that so many tokens in so many parts fill at most: each part may leave places - 1 empty."""
    return (tokens + (places - 1) * min(parts, tokens)) // places


class File(Protocol):
    def __call__(
        self,
        filed: Filed,
        keys: Float[Array, "B H_kv R T D"],
        values: Float[Array, "B H_kv R T D"],
        position: Int[Array, "B R T"],
        full: Bool[Array, "B R"],
    ) -> Filed:
        """Takes R chunks of T tokens into store and index, those that are full: nothing changes where none is."""
        ...


def absorb_chunks(
    state: WindowedState,
    block: Block,
    every: int,
    file: File,
    most: int,
) -> WindowedState:
    """Takes tokens that left the window's recent ones into its selection slots, and files every full chunk.

    Args:
        every: tokens of a chunk.
        file: takes chunks into store and index.
        most: chunks that there is room for; the tokens of later ones are lost, and counted.
    """
    window, filed = state.window, state.selection
    fixed = window.recent + window.sinks
    slots = window.keys.shape[2] - fixed
    arriving = block.keys.shape[2]
    fits = jnp.minimum(block.count, slots - filed.pending)
    place = jnp.arange(arriving)
    target = jnp.where(place < fits[:, None], fixed + filed.pending[:, None] + place, window.keys.shape[2])
    append = jax.vmap(lambda buffer, fresh, target: buffer.at[:, target].set(fresh, mode="drop"))
    keys, values = append(window.keys, block.keys, target), append(window.values, block.values, target)
    pending = filed.pending + fits
    oldest = block.first - filed.pending  # position of the first token that waits
    overflow = state.overflow + block.count - fits

    if rounds := min(slots, every - 1 + arriving) // every:
        full = pending // every
        split = lambda x: x[:, :, fixed : fixed + rounds * every].reshape(*x.shape[:2], rounds, every, -1)  # noqa: E731
        positions = oldest[:, None] + jnp.arange(rounds * every)
        there = jnp.arange(rounds) < full[:, None]
        filed = file(filed, split(keys), split(values), positions.reshape(-1, rounds, every), there)
        source = jnp.minimum(jnp.arange(slots) + (full * every)[:, None], slots - 1)

        def move_up(buffer, source, full):
            moved = buffer[:, fixed:][:, source]
            return buffer.at[:, fixed:].set(jnp.where(full > 0, moved, buffer[:, fixed:]))

        keys, values = jax.vmap(move_up)(keys, source, full), jax.vmap(move_up)(values, source, full)
        pending = pending - full * every
        too_many = jnp.maximum(filed.chunks + full - jnp.maximum(filed.chunks, most), 0)
        overflow = overflow + every * too_many
        filed = dataclasses.replace(filed, chunks=filed.chunks + full)
    return dataclasses.replace(
        state,
        window=dataclasses.replace(window, keys=keys, values=values),
        selection=dataclasses.replace(filed, pending=pending),
        overflow=overflow,
    )


class Plan(NamedTuple):
    """What one query of every row reads beside the window."""

    block: Int[Array, "B H K"]  # int32 numbers of blocks, for every kv head or every query head
    tokens: Int[Array, "B H K"]  # int32, how many of each are read
    rest: tuple[Segment, ...] = ()  # what stands for the tokens that are not read


class Planned(NamedTuple):
    """The two parts of what a policy that recalls reads, for combinators that keep blocks elsewhere."""

    window: Segments
    plan: "Planner"


class Planner(Protocol):
    def __call__(self, state: WindowedState, query: Float[Array, "B 1 H_q D"]) -> Plan:
        """What one query of every row is to read, by the index alone."""
        ...


def recalling(policy: CachePolicy, plan: Planner, index_bytes: Callable[[WindowedState], int]) -> CachePolicy:
    """The policy whose window and staging are those of `policy`, and that reads what `plan` says beside them, for every
    query anew.

    Args:
        index_bytes: bytes that finding it reads per token, where attention does not read them.
    """

    own = policy.segments
    assert own is not None

    def recalled(state, query) -> tuple[Segment, ...]:
        found = plan(state, query)
        read = (recall(state.selection.store, found.block, found.tokens),) if found.block.shape[2] else ()
        return read + found.rest

    def of_each(state, query, function):
        """`function` of every query, T leading: a few at once, many one by one, for each may recall other blocks."""
        of_one = lambda one: function(state, one[:, None])  # noqa: E731
        over_queries = jax.vmap(of_one) if query.shape[1] <= FEW_QUERIES else functools.partial(jax.lax.map, of_one)
        return over_queries(query.swapaxes(0, 1))

    def attend_each(state, query) -> tuple[Partials, ...]:
        found = plan(state, query)
        store = state.selection.store
        read = (attend_recalled(query, store, found.block, found.tokens),) if found.block.shape[2] else ()
        return read + tuple(attend(query, (one,)) for one in found.rest)

    def attend_cache(state, query, causal=False) -> tuple[Partials, WindowedState]:
        kept = attend(query, own(state, query, causal))
        if query.shape[1] == 1:
            return merge(kept, *attend_each(state, query)), state
        parts = of_each(state, query, attend_each)
        return merge(kept, *jax.tree.map(lambda x: x.swapaxes(0, 1)[:, :, 0], parts)), state

    def segments(state, query, causal=False) -> tuple[Segment, ...]:
        if query is None:
            # Staged keys are what they are, whatever a combinator puts in the place of stored ones.
            batch, kv_heads, _, head_dim = state.window.staging.keys.shape
            query = jnp.zeros((batch, 1, kv_heads * state.selection.group, head_dim))
        kept = own(state, query, causal)
        if query.shape[1] == 1:
            return kept + recalled(state, query)
        return kept + tuple(_side_by_side(one) for one in of_each(state, query, recalled))

    def read_bytes(state):
        shown = jax.eval_shape(lambda state: segments(state, None), state)
        return segment_bytes(*shown) + index_bytes(state)

    return policy._replace(
        attend=attend_cache, segments=segments, read_bytes=read_bytes, recalls=True, plan=Planned(own, plan)
    )


def _side_by_side(found: Segment) -> Segment:
    """Segments of T queries [T, B, H, S, ...] as one, of which query t sees its own S slots."""
    tokens, batch, _, slots, _ = found.keys.shape

    def join(x: Float[Array, "T B H S *F"]) -> Float[Array, "B H T*S *F"]:
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], tokens * slots, *x.shape[4:])

    start = jnp.broadcast_to(slots * jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
    return dataclasses.replace(jax.tree.map(join, found), start=start, stop=start + slots)


def arrays_bytes(*arrays: Array) -> int:
    """Bytes of the given buffers."""
    return sum(one.size * one.dtype.itemsize for one in arrays)


def block_slots(tokens: int, part_tokens: int, places: int) -> int:
    """How many blocks a query reads at most for so many tokens in parts of so many tokens on average: what they fill,
    and one more per part that ends inside a block."""
    return -(-tokens // places) + -(-tokens // part_tokens)
