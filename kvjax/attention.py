"""Attention over weighted segments and retrieved blocks.

    out(q) = sum_s exp(q.k_s / sqrt(D) + log_num_s) v_s / sum_s exp(q.k_s / sqrt(D) + log_den_s)

The attention of every segment is a partial softmax in float32 (maximum, numerator, denominator). Partial softmaxes
merge by rescaling (`kvjax.partials.merge`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import partials as softmax
from kvjax import rope
from kvjax.block_cache import BlockCache, fetch_through_cache
from kvjax.block_store import attend_blocks
from kvjax.distributed.collectives import is_sequence_sharded
from kvjax.partials import Partials
from kvjax.quantization import QuantizedArray, dequantize, rotate, rotate_back
from kvjax.segment import BlockSelection, BlockStoreRead, Segment, SegmentLike
from pallas_kernels.weighted_decode import Entries, weighted_decode_many

VMAP_QUERIES = 8  # up to this many queries retrieve blocks under vmap; a scan processes more of them


class AttentionStats(NamedTuple):
    """Statistics of the attention of one step, for `Policy.observe`.

    Attributes:
        segments: one item per result of `Policy.segments`. For a `Segment`: the attention probabilities [B, H_kv, T, S]
            of its slots, float32, summed over the query heads of a group (None if the policy does not require them).
            For a `BlockStoreRead`: its updated block cache.
        staged: the attention probabilities of the staging slots.
        appended: whether each query belongs to an appended token; other queries have probability 0.
    """

    segments: tuple[Any, ...]
    staged: Float[Array, "B H_kv T P"] | None
    appended: Bool[Array, "B T"]


def attend_segments(
    queries: Float[Array, "B T H_q D"],
    segments: Sequence[SegmentLike],
    *,
    kv_heads: int | None = None,
    logit_cap: float | None = None,
    sink_logits: Float[Array, "H_q"] | None = None,
) -> Partials:
    """Attends to segments and block stores. Query head h reads KV head h // (H_q / H_kv).

    Args:
        kv_heads: KV heads of the layer, if segments hold a subset of them.
        logit_cap: soft cap: logits l become cap * tanh(l / cap) before log-weights are added.
        sink_logits: logit of an attention sink per query head; the sink adds to the softmax denominator only (gpt-oss).

    Returns:
        The partial softmax, by token.
    """
    return attend_with_stats(queries, segments, None, kv_heads=kv_heads, logit_cap=logit_cap, sink_logits=sink_logits)[
        0
    ]


def attend_with_stats(
    queries: Float[Array, "B T H_q D"],
    segments: Sequence[SegmentLike],
    appended: Bool[Array, "B T"] | None,
    *,
    probabilities: bool = False,
    kv_heads: int | None = None,
    logit_cap: float | None = None,
    sink_logits: Float[Array, "H_q"] | None = None,
    others: Sequence[Partials] = (),
) -> tuple[Partials, tuple[Any, ...]]:
    """Attends as `attend_segments` does, and also returns the items of `AttentionStats.segments`.

    Args:
        appended: whether each query belongs to an appended token; None if no query does.
        probabilities: whether to compute the attention probabilities of segments.
        kv_heads: KV heads of the layer, if segments hold a subset of them.
        sink_logits: logit of an attention sink per query head.
        others: partial softmaxes of further entries, by token, which are part of the result.

    Returns:
        The partial softmax by token, and one statistic per segment or block store.
    """
    plain = [one for one in segments if isinstance(one, Segment)]
    reads = [one for one in segments if isinstance(one, BlockStoreRead)]
    if kv_heads is None:
        kv_heads = plain[0].keys.shape[1] if plain else reads[0].store.position.shape[1]
    # The selection of a single query is made first, so that its residual segments are read with the others.
    selections = [
        read.select(_queries_of(queries, read.kv_heads, kv_heads)) if queries.shape[1] == 1 else None for read in reads
    ]
    residual = [
        dataclasses.replace(segment, kv_heads=read.kv_heads)
        for read, selection in zip(reads, selections, strict=True)
        if selection is not None
        for segment in selection.residual
    ]
    groups: list[tuple[Segment, ...]] = [(one,) for one in (*plain, *residual)]
    if not probabilities:
        groups = _group_plain([*plain, *residual], kv_heads)
    rows = [_kernel_queries(queries, group[0], kv_heads) for group in groups]
    entries = [[_entries(segment, logit_cap) for segment in group] for group in groups]
    parts = [(part, *stores) for part, stores in zip(_rotate_queries(rows, entries), entries, strict=True)]
    sums = _undo_quantization(rows, entries, weighted_decode_many(parts, logits=probabilities))
    widths = [one.values.shape[-1] for group in groups for one in group if one.values is not None]
    width = [*widths, *(read.store.value_dim for read in reads), queries.shape[3]][0]
    total = softmax.merge(
        *([] if groups else [_no_partials(queries, width)]),
        *(_place_heads(queries, group[0], one, kv_heads, width) for group, one in zip(groups, sums, strict=True)),
        *(() if sink_logits is None else (_sink_partials(queries, sink_logits, width),)),
        *others,
    )
    caches = []
    for read, selection in zip(reads, selections, strict=True):
        heads = _query_heads(queries, read.kv_heads, kv_heads)
        before = jax.tree.map(lambda x, heads=heads: x[:, :, heads], total)
        own_queries = _queries_of(queries, read.kv_heads, kv_heads)
        after, cache = _attend_retrieved(own_queries, read, selection, before, appended, logit_cap)
        total = after if read.kv_heads is None else _set_heads(total, after, heads)
        caches.append(cache)
    masses: list[Any] = [None] * len(plain)
    if probabilities and appended is not None:  # of the policy's segments, which are the first groups
        masses = [
            _probabilities(queries, segment, one, total, appended, kv_heads)
            for segment, one in zip(plain, sums, strict=False)
        ]
    of_plain, of_reads = iter(masses), iter(caches)
    return total, tuple(next(of_plain if isinstance(one, Segment) else of_reads) for one in segments)


# --- segments ---


HeadIndices = Int[Array, "H"] | Int[np.ndarray, "H"] | None  # KV heads of a segment; None for all


def _query_heads(queries: Float[Array, "B T H_q D"], heads: HeadIndices, kv_heads: int) -> Any:
    """Returns an index of the query heads that read these KV heads of the layer."""
    group = queries.shape[2] // kv_heads
    if heads is None:
        return slice(None)
    if isinstance(heads, np.ndarray) and np.array_equal(heads, np.arange(heads[0], heads[0] + len(heads))):
        return slice(heads[0] * group, (heads[-1] + 1) * group)
    return (heads[:, None] * group + np.arange(group)).reshape(-1)


def _queries_of(queries: Float[Array, "B T H_q D"], heads: HeadIndices, kv_heads: int) -> Float[Array, "B T H D"]:
    """Returns the queries that read these KV heads of the layer."""
    return queries[:, :, _query_heads(queries, heads, kv_heads)]


def _set_heads(total: Partials, new: Partials, heads: Any) -> Partials:
    """Replaces the partial softmax of some query heads."""
    return jax.tree.map(lambda x, new: x.at[:, :, heads].set(new), total, new)


def _group_plain(segments: Sequence[Segment], kv_heads: int) -> list[tuple[Segment, ...]]:
    """Groups segments: all unquantized segments of all KV heads share one kernel call, every other one has its call."""

    def is_plain(segment: Segment) -> bool:
        return (
            segment.values is not None
            and not isinstance(segment.keys, QuantizedArray)
            and not isinstance(segment.values, QuantizedArray)
            and segment.query_rope_angles is None
            and segment.keys.shape[1] == kv_heads
            and segment.kv_heads is None
            and not (segment.sequence_sharded and is_sequence_sharded())
        )

    plain = tuple(segment for segment in segments if is_plain(segment))
    others: list[tuple[Segment, ...]] = [(segment,) for segment in segments if not is_plain(segment)]
    return [plain, *others] if plain else others


def _rotate_queries(rows: Sequence[Array], entries: Sequence[Sequence[Entries]]) -> list[Array]:
    """Returns the queries of every group, rotated as its keys if these are quantized."""
    quantized = [i for i, stores in enumerate(entries) if isinstance(stores[0].keys, QuantizedArray)]
    return _map_heads(lambda x: rotate(x).astype(x.dtype), quantized, rows)


def _undo_quantization(
    rows: Sequence[Array], entries: Sequence[Sequence[Entries]], sums: Sequence[Partials]
) -> list[Partials]:
    """Rotates the sums of quantized values back, and adds the offsets of quantized keys to the logits."""
    # Groups of quantized segments have one segment.
    keys, values = [stores[0].keys for stores in entries], [stores[0].values for stores in entries]
    quantized = [i for i, x in enumerate(values) if isinstance(x, QuantizedArray)]
    numerators = _map_heads(rotate_back, quantized, [one.numerator for one in sums])
    offsets = {i: x.offset for i, x in enumerate(keys) if isinstance(x, QuantizedArray) and x.offset is not None}
    shifts = _map_heads(softmax.shift_of_logits, list(offsets), rows, offsets)
    sums = [one._replace(numerator=numerator) for one, numerator in zip(sums, numerators, strict=True)]
    return [softmax.shift_logits(one, shifts[i]) if i in offsets else one for i, one in enumerate(sums)]


def _map_heads(function: Callable[..., Array], selected: Sequence[int], *arrays: Any) -> list[Any]:
    """Applies a function of arrays [B, H, ...] to some of them at once: each operation is a kernel launch on a GPU.

    Args:
        function: computes each head separately.
        selected: indices of the arrays that it is applied to.
        *arrays: its arguments, each a sequence or a mapping by index.

    Returns:
        The first sequence with the results in place of the selected arrays.
    """
    mapped = list(arrays[0])
    if selected:
        result = function(*(jnp.concatenate([of[i] for i in selected], axis=1) for of in arrays))
        ends = np.cumsum([mapped[i].shape[1] for i in selected])
        for i, part in zip(selected, jnp.split(result, ends[:-1], axis=1), strict=True):
            mapped[i] = part
    return mapped


def _entries(segment: Segment, logit_cap: float | None) -> Entries:
    """Returns a segment as the kernel takes it."""
    keys = segment.keys
    if logit_cap is not None and isinstance(keys, QuantizedArray) and keys.offset is not None:
        keys = dequantize(keys)  # the cap is not linear: q.offset cannot be added afterwards
    return Entries(
        keys, segment.values, segment.log_num, segment.log_den, segment.start, segment.stop, logit_cap=logit_cap
    )


def _kernel_queries(queries: Float[Array, "B T H_q D"], segment: Segment, kv_heads: int) -> Float[Array, "B H_kv R D"]:
    """Returns the queries of a segment's KV heads, RoPE changed where the segment asks for it."""
    queries = _queries_of(queries, segment.kv_heads, kv_heads)
    if segment.query_rope_angles is not None:
        angles = segment.query_rope_angles
        angles = jnp.broadcast_to(angles, (*queries.shape[:2], angles.shape[2]))
        queries = rope.rotate(queries, jnp.cos(angles), jnp.sin(angles))
    return softmax.group_queries(queries, segment.keys.shape[1])


def _place_heads(
    queries: Float[Array, "B T H_q D"], segment: Segment, sums: Partials, kv_heads: int, width: int
) -> Partials:
    """Returns a segment's partial softmax by token and query head of the layer; heads that do not read it get none."""
    if segment.values is None:  # the kernel knows no value dimension then
        sums = sums._replace(numerator=jnp.zeros((*sums.denominator.shape, width)))
    partials = softmax.by_token(sums._replace(logits=None), tokens=queries.shape[1])
    if segment.sequence_sharded:
        partials = softmax.merge_over_sequence(partials)
    if segment.kv_heads is None:
        return partials
    # A gather, which XLA fuses with the merge; it does not fuse a scatter. Its indices are elementwise, because a
    # reduction, such as a search of each head, would be a kernel launch.
    head, within = np.divmod(np.arange(queries.shape[2]), queries.shape[2] // kv_heads)
    source, holds = jnp.zeros(len(head), jnp.int32), jnp.zeros(len(head), bool)
    for number in range(segment.keys.shape[1]):
        is_head = segment.kv_heads[number] == head
        source, holds = jnp.where(is_head, number * (queries.shape[2] // kv_heads) + within, source), holds | is_head

    def place(x: Array, empty: float) -> Array:
        present = holds.reshape(-1, *(1 for _ in x.shape[3:]))
        return jnp.where(present, jnp.take(x, source, axis=2, mode="clip"), jnp.asarray(empty, x.dtype))

    return Partials(place(partials.max, -jnp.inf), place(partials.numerator, 0.0), place(partials.denominator, 0.0))


def _no_partials(queries: Float[Array, "B T H_q D"], width: int) -> Partials:
    """Returns the partial softmax of no entry."""
    shape = queries.shape[:3]
    return Partials(jnp.full(shape, -jnp.inf), jnp.zeros((*shape, width)), jnp.zeros(shape))


def _sink_partials(queries: Float[Array, "B T H_q D"], sink_logits: Float[Array, "H_q"], width: int) -> Partials:
    """Returns the partial softmax of an attention sink, which has no value."""
    logits = jnp.broadcast_to(sink_logits.astype(jnp.float32), queries.shape[:3])
    return Partials(logits, jnp.zeros((*queries.shape[:3], width)), jnp.ones(queries.shape[:3]))


def _probabilities(
    queries: Float[Array, "B T H_q D"],
    segment: Segment,
    sums: Partials,
    total: Partials,
    appended: Bool[Array, "B T"],
    kv_heads: int,
) -> Float[Array, "B H_kv T S"] | None:
    """Returns the attention probabilities of a segment's slots, summed over the query heads of a group."""
    if sums.logits is None:
        return None
    heads = _query_heads(queries, segment.kv_heads, kv_heads)
    base, norm = softmax.finite_max(total.max[:, :, heads]), total.denominator[:, :, heads]
    batch, own_heads, _, slots = sums.logits.shape
    base, norm = (softmax.group_queries(x[..., None], own_heads) for x in (base, jnp.where(norm == 0, 1.0, norm)))
    mass = (jnp.exp(sums.logits - base) / norm).reshape(batch, own_heads, queries.shape[1], -1, slots)
    return jnp.sum(jnp.where(appended[:, None, :, None, None], mass, 0.0), axis=3)


# --- retrieved blocks ---


def _attend_retrieved(
    queries: Float[Array, "B T H D"],
    read: BlockStoreRead,
    selection: BlockSelection | None,
    before: Partials,
    appended: Bool[Array, "B T"] | None,
    logit_cap: float | None,
) -> tuple[Partials, BlockCache | None]:
    """Adds the blocks that each query selects to a partial softmax.

    Args:
        queries: queries of the heads that read the store.
        selection: the selection of a single query, whose residual segments are part of `before`; None for several
            queries.
        before: the partial softmax of all segments.
        appended: whether each query belongs to an appended token; other queries do not change the block cache.

    Returns:
        The partial softmax, and the block cache after the step.
    """
    if appended is None:
        appended = jnp.zeros(queries.shape[:2], bool)
    if selection is not None:
        return _attend_selection(queries, read, selection, before, appended, read.block_cache, logit_cap)

    def one_query(cache: BlockCache | None, item: tuple[Array, Partials, Array]) -> tuple[BlockCache | None, Partials]:
        """Attends with one query, given the block `cache` after the previous query and the query's `item`."""
        query, before, appended = jax.tree.map(lambda x: x[:, None], item)
        selection = read.select(query)
        if selection.residual:
            heads = selection.residual[0].keys.shape[1]
            rest = attend_segments(query, selection.residual, kv_heads=heads, logit_cap=logit_cap)
            before = softmax.merge(before, rest)
        after, cache = _attend_selection(query, read, selection, before, appended, cache, logit_cap)
        return cache, after

    items = jax.tree.map(lambda x: x.swapaxes(0, 1), (queries, before, appended))
    if read.block_cache is None and queries.shape[1] <= VMAP_QUERIES:
        cache, partials = None, jax.vmap(lambda item: one_query(None, item)[1])(items)
    else:
        cache, partials = jax.lax.scan(one_query, read.block_cache, items)
    return jax.tree.map(lambda x: x.swapaxes(0, 1)[:, :, 0], partials), cache


def _attend_selection(
    query: Float[Array, "B 1 H D"],
    read: BlockStoreRead,
    selection: BlockSelection,
    before: Partials,
    appended: Bool[Array, "B 1"],
    cache: BlockCache | None,
    logit_cap: float | None,
) -> tuple[Partials, BlockCache | None]:
    """Adds the selected blocks of one query to a partial softmax."""
    indices, lengths = selection.block_indices, selection.block_lengths
    if not indices.shape[2]:
        return before, cache
    blocks = None
    if cache is not None:
        blocks, cache = fetch_through_cache(read.store.entries, cache, indices, lengths, appended[:, 0])
    return softmax.merge(before, attend_blocks(query, read.store, indices, lengths, logit_cap, blocks)), cache
