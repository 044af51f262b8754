"""The one function that attends: over all that a reading says, for every policy.

    out(q) = sum_s exp(q.k_s / sqrt(D) + log_num_s) v_s / sum_s exp(q.k_s / sqrt(D) + log_den_s)

Every part of a reading gives float32 partials (a maximum and both sums relative to it), which merge by rescaling.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import rope, storage
from kvjax.collectives import are_shared, largest_over_heads
from kvjax.partials import around, by_token, finite, merge, merge_over_parts, rows_of_heads
from kvjax.recall import attend_blocks
from kvjax.recent import recall_recent
from kvjax.segment import Choice, Reading, Recalled, Segment, Slope, Spread, loaded, map_parts, parts_of
from pallas_kernels.weighted_decode import Entries, Partials, weighted_decode_parts

FEW_QUERIES = 8  # that recall at the same time


class Recall(NamedTuple):
    """What was found while reading a `Recalled`."""

    missing: Float[Array, "B T H"] | None  # the bound on the share of attention that was not read, if there is one
    rounds: Int[Array, "B T"]
    recent: Any  # what is on the device now, where the store is not


class Seen(NamedTuple):
    """What attention tells a policy that learns from it.

    Attributes:
        parts: in the reading's place, of every segment the attention probability [B, H_kv, T, S] that each query paid
            to its slots, summed over grouped heads (None where the policy does not ask), and of every `Recalled` its
            `Recall`.
        staged: the same [B, H_kv, T, P] of the staged tokens.
        real: which queries are those of an appended token. The others paid nothing.
    """

    parts: Any
    staged: Float[Array, "B H_kv T P"] | None
    real: Bool[Array, "B T"]


def attend_reading(
    query: Float[Array, "B T H_q D"],
    reading: Reading,
    *,
    kv_heads: int | None = None,
    logit_cap: float | None = None,
    sink_logits: Float[Array, "H_q"] | None = None,
) -> Partials:
    """Partials of attention of the queries to all that a reading says. Query head h reads kv head h // (H_q / H_kv).

    Args:
        kv_heads: of the cache, where parts may be of some heads only.
        logit_cap: logits l become cap tanh(l / cap), before log-weights are added.
        sink_logits: of every query head the logit of an entry without a value, in the denominator alone (gpt-oss).

    Raises:
        ValueError: where heads or head dimensions do not fit.
    """
    return attend_and_see(query, reading, None, kv_heads=kv_heads, logit_cap=logit_cap, sink_logits=sink_logits)[0]


def attend_and_see(
    query: Float[Array, "B T H_q D"],
    reading: Reading,
    real: Bool[Array, "B T"] | None,
    *,
    observes: bool = False,
    kv_heads: int | None = None,
    logit_cap: float | None = None,
    sink_logits: Float[Array, "H_q"] | None = None,
) -> tuple[Partials, Any]:
    """As `attend_reading`, and in the reading's place what `Seen.parts` holds.

    Args:
        real: which queries are those of an appended token; None: of none, and nothing is learnt.
        observes: whether attention probabilities are asked for.
    """
    parts = parts_of(reading)
    if kv_heads is None:
        kv_heads = next(part.keys.shape[1] for part in parts if isinstance(part, Segment))
    shown = [part for part in parts if isinstance(part, Segment)]
    recalled = [part for part in parts if isinstance(part, Recalled)]
    chosen = [_chosen_ahead(query, part, kv_heads) for part in recalled]
    # What stands for the tokens that are not recalled is read with the segments.
    rests = [
        dataclasses.replace(rest, heads=part.heads)
        for part, choice in zip(recalled, chosen, strict=True)
        if choice is not None
        for rest in choice.rest
    ]
    segments = [_capped(part, logit_cap) for part in (*shown, *rests)]
    groups = [(part,) for part in segments] if observes else _read_as_one(segments, kv_heads)
    sums = _sums(query, groups, kv_heads, logits=observes)
    width = next((part.value_dim for part in segments if part.value_dim is not None), query.shape[3])
    partials = merge(
        *(_partials(query, segment, sum_, kv_heads, width) for (segment, *_), sum_ in zip(groups, sums, strict=True)),
        *(() if sink_logits is None else (_sink_partials(query, sink_logits, width),)),
    )
    recalls = []
    for part, choice in zip(recalled, chosen, strict=True):
        heads = _query_heads(query, part.heads, kv_heads)
        kept = jax.tree.map(lambda x, heads=heads: x[:, :, heads], partials)
        kept, recall = _attend_recalled(query[:, :, heads], part, kept, real, logit_cap, choice)
        put = lambda x, new, heads=heads: new if part.heads is None else x.at[:, :, heads].set(new)  # noqa: B023, E731
        partials = jax.tree.map(put, partials, kept)
        recalls.append(recall)
    masses: list[Any] = [None] * len(shown)
    if observes:  # of the segments that the policy shows, which come first
        masses = [
            None if real is None or sum_.logits is None else _mass(query, part, sum_.logits, partials, real, kv_heads)
            for part, sum_, _ in zip(segments, sums, shown, strict=False)
        ]
    of_segments, of_recalled = iter(masses), iter(recalls)
    return partials, map_parts(lambda part: next(of_segments if isinstance(part, Segment) else of_recalled), reading)


# --- segments ---


def _query_heads(query: Array, heads: tuple[int, int] | None, kv_heads: int) -> slice:
    """The query heads that read kv heads [first, last) of so many."""
    if query.shape[2] % kv_heads:
        raise ValueError(f"queries have {query.shape[2]} heads; it must be a multiple of kv_heads={kv_heads}")
    group = query.shape[2] // kv_heads
    return slice(None) if heads is None else slice(heads[0] * group, heads[1] * group)


def _capped(segment: Segment, logit_cap: float | None) -> Segment:
    """The segment under a cap of logits. A spread is then carried out, and a center added: the logits of such entries
    are no longer those of the entries, scaled and shifted."""
    if logit_cap is None:
        return segment
    segment = dataclasses.replace(segment, logit_cap=logit_cap)
    spread = segment.spread
    if spread is None and segment.center is None:
        return segment
    segment = loaded(segment)
    if spread is None:
        return segment
    scale = spread.scale[..., None, None]

    def apart(x: Array, mean: Array) -> Array:
        return mean[:, :, None] + scale * (x.astype(jnp.float32) - mean[:, :, None])

    values = None if segment.values is None else apart(segment.values, spread.mean_value)
    keys = apart(segment.keys, spread.mean_key)
    return dataclasses.replace(segment, keys=keys, values=values, spread=None)


def _read_as_one(segments: Sequence[Segment], kv_heads: int) -> list[tuple[Segment, ...]]:
    """Segments in groups. Those of all kv heads that are entries and nothing besides are one: whatever reads them sums
    over all, and nothing is left to merge."""

    def is_plain(segment: Segment) -> bool:
        bare = all(getattr(segment, name) is None for name in _BESIDES) and segment.values is not None
        return bare and segment.keys.shape[1] == kv_heads and not (segment.in_parts and are_shared())

    together = tuple(segment for segment in segments if is_plain(segment))
    groups = [together] if together else []
    return [*groups, *((segment,) for segment in segments if not is_plain(segment))]


# What is done to the queries of a segment, or to its sums.
_BESIDES = ("heads", "turn", "spread", "slope", "center", "value_center", "key_scale", "value_scale")


def _sums(
    query: Float[Array, "B T H_q D"], groups: Sequence[tuple[Segment, ...]], kv_heads: int, *, logits: bool
) -> list[Partials]:
    """What the kernel makes of the entries of groups of segments, by rows [B, H_kv, R, ...]."""
    rows = [_rows(query, group[0], kv_heads) for group in groups]
    names = [field.name for field in dataclasses.fields(Entries)]
    bare = lambda segment: Entries(**{name: getattr(segment, name) for name in names})  # noqa: E731
    asked = [
        (own if group[0].key_scale is None else storage.turned(own).astype(own.dtype), *map(bare, group))
        for own, group in zip(rows, groups, strict=True)
    ]
    found = weighted_decode_parts(asked, logits=logits)
    return [_of_entries(sums, own, group[0]) for sums, own, group in zip(found, rows, groups, strict=True)]


def _of_entries(sums: Partials, rows: Float[Array, "B H_kv R D"], segment: Segment) -> Partials:
    """Sums over entries as they are stored, in the basis of the rows and around the center."""
    if segment.value_scale is not None:
        sums = sums._replace(num=storage.turned_back(sums.num))
    return sums if segment.center is None else around(sums, rows, segment.center)


def _rows(query: Float[Array, "B T H_q D"], segment: Segment, kv_heads: int) -> Float[Array, "B H_kv R D"]:
    """The queries that read a segment, as it has them turned and scaled."""
    query = query[:, :, _query_heads(query, segment.heads, kv_heads)]
    batch, own_heads, _, head_dim = (*segment.keys.shape[:3], segment.key_dim)
    if query.shape[0] != batch or query.shape[3] != head_dim or query.shape[2] % own_heads:
        raise ValueError(
            f"queries [B, T, H_q, D] = {query.shape} do not fit keys [B, H_kv, S, D] = "
            f"{(*segment.keys.shape[:3], head_dim)}: B and D must be equal and H_q a multiple of H_kv"
        )
    if segment.turn is not None:
        turn = jnp.broadcast_to(segment.turn, (*query.shape[:2], segment.turn.shape[2]))
        query = rope.rotate(query, jnp.cos(turn), jnp.sin(turn))
    if segment.spread is not None:
        query = query * _of_query_heads(segment.spread.scale, query)[:, None, :, None]
    return rows_of_heads(query, own_heads)


def _partials(
    query: Float[Array, "B T H_q D"], segment: Segment, sums: Partials, kv_heads: int, width: int
) -> Partials:
    """What the sums of a segment's entries say about attention, of all heads: those that do not read it found no
    entry."""
    if segment.values is None:  # the kernel knows no width of values then
        sums = sums._replace(num=jnp.zeros((*sums.den.shape, width)))
    heads = _query_heads(query, segment.heads, kv_heads)
    own = query[:, :, heads]
    if segment.slope is not None:
        change = _sloped(rows_of_heads(own, segment.keys.shape[1]), segment.slope)
        sums = sums._replace(num=sums.num + sums.den[..., None] * change)
    partials = by_token(sums._replace(logits=None), tokens=query.shape[1])
    if segment.spread is not None:
        partials = _spread_out(own, partials, segment.spread)
    if segment.value_center is not None:
        center = _of_query_heads(segment.value_center, own)[:, None]
        partials = partials._replace(num=partials.num + partials.den[..., None] * center)
    if segment.in_parts:
        partials = merge_over_parts(partials)
    if own.shape[2] == query.shape[2]:
        return partials
    sides = (heads.start, query.shape[2] - heads.stop)

    def pad(x: Array, value: float) -> Array:
        return jnp.pad(x, ((0, 0), (0, 0), sides, *((0, 0),) * (x.ndim - 3)), constant_values=value)

    return Partials(pad(partials.max, -jnp.inf), pad(partials.num, 0.0), pad(partials.den, 0.0))


def _sink_partials(query: Float[Array, "B T H_q D"], sink_logits: Float[Array, "H_q"], width: int) -> Partials:
    """An entry without a value."""
    if sink_logits.shape != query.shape[2:3]:
        raise ValueError(f"sink_logits has shape {sink_logits.shape}; it must be [H_q] = {query.shape[2:3]}")
    logits = jnp.broadcast_to(sink_logits.astype(jnp.float32), query.shape[:3])
    return Partials(logits, jnp.zeros((*query.shape[:3], width)), jnp.ones(query.shape[:3]))


def _sloped(rows: Float[Array, "B H_kv R D"], slope: Slope) -> Float[Array, "B H_kv R D_v"]:
    """What each query adds to the values of a segment's entries: covariance q / sqrt(D), softly bounded by the
    limit."""
    rows = rows.astype(jnp.float32)
    change = jnp.einsum("bhvd,bhrd->bhrv", slope.covariance, rows, precision=jax.lax.Precision.HIGHEST)
    change = change / math.sqrt(rows.shape[-1])
    limit = slope.limit[:, :, None, None]
    size = jnp.sqrt(jnp.sum(change * change, axis=-1, keepdims=True) + limit * limit)
    return change * (limit / jnp.maximum(size, 1e-30))


def _spread_out(query: Float[Array, "B T H_q D"], partials: Partials, spread: Spread) -> Partials:
    """Of partials of queries scaled by `spread.scale` over the entries as they are, those of the queries over the
    entries spread about their mean."""
    scale = _of_query_heads(spread.scale, query)[:, None]
    shift = (1 - scale)[..., None] * _of_query_heads(spread.mean_value, query)[:, None]
    return Partials(
        max=partials.max + _spread_logit(query, spread),
        num=scale[..., None] * partials.num + shift * partials.den[..., None],
        den=partials.den,
    )


def _spread_logit(query: Float[Array, "B T H_q D"], spread: Spread) -> Float[Array, "B T H_q"]:
    """What spreading adds to the logits of all entries alike."""
    scale, mean_key = _of_query_heads(spread.scale, query)[:, None], _of_query_heads(spread.mean_key, query)
    return (1 - scale) * jnp.einsum("bthd,bhd->bth", query, mean_key) / math.sqrt(query.shape[-1])


def _of_query_heads(x: Float[Array, "B H_kv *N"], query: Float[Array, "B T H_q D"]) -> Float[Array, "B H_q *N"]:
    return jnp.repeat(x, query.shape[2] // x.shape[1], axis=1)


def _mass(
    query: Float[Array, "B T H_q D"],
    segment: Segment,
    logits: Float[Array, "B H_kv R S"],
    partials: Partials,
    real: Bool[Array, "B T"],
    kv_heads: int,
) -> Float[Array, "B H_kv T S"]:
    """The attention probability that real queries paid to each slot, summed over grouped heads."""
    heads = _query_heads(query, segment.heads, kv_heads)
    base, total = (x[:, :, heads] for x in (finite(partials.max), partials.den))
    if segment.spread is not None:
        base = base - _spread_logit(query[:, :, heads], segment.spread)
    base, total = (rows_of_heads(x[..., None], logits.shape[1]) for x in (base, jnp.where(total == 0, 1.0, total)))
    batch, own_heads, _, slots = logits.shape
    paid = (jnp.exp(logits - base) / total).reshape(batch, own_heads, query.shape[1], -1, slots)
    return jnp.sum(jnp.where(real[:, None, :, None, None], paid, 0.0), axis=3)


# --- what is recalled ---


def _chosen_ahead(query: Float[Array, "B T H_q D"], part: Recalled, kv_heads: int) -> Choice | None:
    """What a single query recalls, where nothing about that depends on what it finds."""
    if query.shape[1] != 1 or part.target is not None:
        return None
    choice = part.choose(query[:, :, _query_heads(query, part.heads, kv_heads)], None)
    return choice if choice.unread is None else None


def _attend_recalled(
    query: Float[Array, "B T H_q D"],
    part: Recalled,
    kept: Partials,
    real: Bool[Array, "B T"] | None,
    logit_cap: float | None,
    chosen: Choice | None,
) -> tuple[Partials, Recall]:
    """Adds to what was kept what each query recalls: a few queries at once, many one by one. What was chosen ahead has
    had its rest read."""
    if real is None:
        real = jnp.zeros(query.shape[:2], bool)
    if query.shape[1] == 1:
        return _recall_one(query, part, kept, real, part.recent, logit_cap, chosen)

    def step(recent: Any, item: tuple) -> tuple[Any, tuple[Partials, Recall]]:
        query, kept, real = jax.tree.map(lambda x: x[:, None], item)
        partials, recall = _recall_one(query, part, kept, real, recent, logit_cap)
        return recall.recent, (partials, recall._replace(recent=None))

    items = jax.tree.map(lambda x: x.swapaxes(0, 1), (query, kept, real))
    if part.recent is None and query.shape[1] <= FEW_QUERIES:
        recent, (partials, recall) = None, jax.vmap(lambda item: step(None, item)[1])(items)
    else:
        recent, (partials, recall) = jax.lax.scan(step, part.recent, items)
    partials, recall = jax.tree.map(lambda x: x.swapaxes(0, 1)[:, :, 0], (partials, recall))
    return partials, recall._replace(recent=recent)


def _recall_one(
    query: Float[Array, "B 1 H_q D"],
    part: Recalled,
    kept: Partials,
    real: Bool[Array, "B 1"],
    recent: Any,
    logit_cap: float | None,
    chosen: Choice | None = None,
) -> tuple[Partials, Recall]:
    batch = query.shape[0]
    choice = chosen or part.choose(query, None if part.target is None else jnp.zeros(batch, jnp.int32))
    fetched = None
    if recent is not None and choice.block.shape[2]:
        fetched, recent = recall_recent(part.store.entries, recent, choice.block, choice.tokens, real[:, 0])
    partials = _with_blocks(query, part, kept, choice, logit_cap, fetched)
    missing, rounds, rest = None, jnp.ones(batch, jnp.int32), choice.rest if chosen is None else ()
    if choice.unread is not None:
        missing = _missing_share(choice.unread, partials)
        if part.target is not None and part.rounds > 1:
            partials, missing, rounds = _recall_until(query, part, partials, missing, part.target, logit_cap)
            rest = part.choose(query, rounds - 1).rest
    if rest:
        heads = rest[0].keys.shape[1]
        partials = merge(partials, attend_reading(query, rest, kv_heads=heads, logit_cap=logit_cap))
    return partials, Recall(missing, rounds[:, None], recent)


def _with_blocks(
    query: Array, part: Recalled, kept: Partials, choice: Choice, logit_cap: float | None, fetched: Array | None = None
) -> Partials:
    if not choice.block.shape[2]:
        return kept
    return merge(kept, attend_blocks(query, part.store, choice.block, choice.tokens, logit_cap, fetched))


def _missing_share(unread: Float[Array, "B H_q"], attended: Partials) -> Float[Array, "B 1 H_q"]:
    """The share of attention that is not read at most; `attended` are the partials of all tokens read."""
    read = attended.max + jnp.log(attended.den)
    return jnp.where(jnp.isneginf(unread[:, None]), 0.0, jax.nn.sigmoid(unread[:, None] - read))


def _recall_until(
    query: Array, part: Recalled, partials: Partials, missing: Array, target: float, logit_cap: float | None
) -> tuple[Partials, Array, Int[Array, "B"]]:
    """Further rounds until every row's bound is at most the target, or all is read; a row that is done reads no
    more."""

    def searching(missing: Float[Array, "B 1 H_q"]) -> Bool[Array, "B"]:
        return largest_over_heads(jnp.max(missing, axis=(1, 2))) > target

    def step(carry):
        partials, missing, rounds = carry
        more = searching(missing)
        choice = part.choose(query, rounds)
        assert choice.unread is not None  # as in the first round
        further = _with_blocks(query, part, partials, choice, logit_cap)
        pick = lambda new, old: jnp.where(more.reshape(-1, *(1,) * (new.ndim - 1)), new, old)  # noqa: E731
        missing = pick(_missing_share(choice.unread, further), missing)
        return jax.tree.map(pick, further, partials), missing, rounds + more

    def running(carry):
        _, missing, rounds = carry
        return jnp.any(searching(missing) & (rounds < part.rounds))

    return jax.lax.while_loop(running, step, (partials, missing, jnp.ones(query.shape[0], jnp.int32)))
