"""Chelsea: the middle of the context as weighted centroids, made by chunked soft matching, online."""

import dataclasses
import functools
import json
import os
import pathlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.policies.choice import by_head, chosen
from kvjax.policies.exact import exact
from kvjax.policies.windowed import init_windowed, over_heads, windowed_policy
from kvjax.policy import CachePolicy, CacheSpec, abstract_state
from kvjax.segment import segment
from kvjax.soft_matching import SCHEDULES, Centroids, Schedule, compress
from kvjax.staging import Block, between, check_budget, check_period, init_window, window_segments
from kvjax.state import BATCH, HEAD_DIM, KV_HEADS, SLOTS, array, state

Joins = Literal["mean", "drop"]

# Of the values' deviation inside centroids, the most that a query may move a centroid's value along the slope. Linear
# growth is right for small logits only. Of .25, .5, 1, 2 and no bound, on synthetic streams at norms of 2 to 15, this
# was best on low-rank ones and no different on the others.
SLOPE_LIMIT = 0.25


@state
class Slope:
    """How values vary with keys inside a head's centroids, pooled over all of them: means over tokens."""

    covariance: Float[Array, "B H_kv D D"] = array(BATCH, KV_HEADS, "value_dim", HEAD_DIM)  # float32, of value and key
    variance: Float[Array, "B H_kv"] = array(BATCH, KV_HEADS)  # float32, of values, summed over dimensions


@state
class Merged:
    """The centroids, in the slots [0, count), and what each stands for. Their number is the same in all heads."""

    keys: Float[Array, "B H_kv M D"] = array(BATCH, KV_HEADS, SLOTS, HEAD_DIM, entries=True)
    values: Float[Array, "B H_kv M D"] = array(BATCH, KV_HEADS, SLOTS, HEAD_DIM, entries=True)
    degree: Int[Array, "B H_kv M"] = array(BATCH, KV_HEADS, SLOTS)  # int32 tokens, 0 in empty slots
    count: Int[Array, "B"] = array(BATCH)  # int32 centroids
    log_weight: Float[Array, "B H_kv M"] = array(BATCH, KV_HEADS, SLOTS)  # float32, log of the degree
    slope: Slope | None


@dataclasses.dataclass(frozen=True)
class HeadChoice:
    """Which heads do not merge, as `experiments.calibrate_heads` finds it for a model. Pairs are (layer, kv head).

    Attributes:
        layers, kv_heads: of the model.
        full: heads that keep every token (Chelsea's outlier heads).
        drop: heads that drop tokens where the others take means.
    """

    layers: int
    kv_heads: int
    full: tuple[tuple[int, int], ...] = ()
    drop: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        named = [*self.full, *self.drop]
        for layer, head in named:
            if not (0 <= layer < self.layers and 0 <= head < self.kv_heads):
                raise ValueError(f"head {(layer, head)} is none of {self.layers} layers x {self.kv_heads} kv heads")
        if len(set(named)) != len(named):
            raise ValueError(f"heads are named twice among full={self.full} and drop={self.drop}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "HeadChoice":
        """Reads the file that `save` wrote."""
        found = json.loads(pathlib.Path(path).read_text())
        heads = {name: tuple((layer, head) for layer, head in found[name]) for name in ("full", "drop")}
        return cls(found["layers"], found["kv_heads"], **heads)

    def save(self, path: str | os.PathLike[str], provenance: dict[str, Any]) -> None:
        """Writes a small JSON file; `provenance` says how the choice was made and is not read again."""
        pathlib.Path(path).write_text(
            json.dumps(dataclasses.asdict(self) | {"provenance": provenance}, indent=1) + "\n"
        )


def chelsea(
    budget: int,
    *,
    sinks: int = 16,
    recent: int = 64,
    chunk: int = 256,
    schedule: str = "llama-3",
    first: float | None = None,
    decay: float | None = None,
    steps: int | None = None,
    floor: float | None = None,
    period: int = 128,
    slope: Literal["pooled"] | None = "pooled",
    joins: Joins = "mean",
    heads: str | os.PathLike[str] | HeadChoice | None = None,
) -> CachePolicy:
    """Keeps sinks, recent tokens and centroids of the others, each weighing as many tokens as it was merged from.

    Whenever more tokens have left the window than there are slots, similar neighbours are merged, step by step, until
    exactly the budget is filled (Chelsea, Algorithm 1). The paper compacts whenever the cache is g tokens over its
    budget: here g is the period.

    The slope goes beyond the paper. Inside a centroid of n tokens, sum_i exp(s q.k_i) v_i is to first order
    n exp(s q.k) (v + s C q) with the means k and v, C = Cov(value, key) over its tokens and s = 1 / sqrt(D). The paper
    keeps n exp(s q.k) v; with the slope, C is taken to be the same in all centroids of a head, so that it costs one
    D x D matrix per head, and what it adds to values is softly bounded (`SLOPE_LIMIT`).

    Args:
        budget: slots per head, sinks and recent tokens included; the rest are centroids.
        sinks, recent: tokens always kept; the paper's 16 and 64 by default.
        chunk: entries among which an entry looks for a partner; even.
        schedule: the share of entries merged per step as the paper has it for "llama-2", "llama-3" or "qwen".
        first, decay, steps, floor: replace parts of it, see `soft_matching.Schedule`.
        period: tokens between compactions.
        slope: "pooled" as above, or None, as the paper has it.
        joins: "mean" for means weighted by degree, as the paper has it; "drop" keeps one of the two tokens that join,
            weighing both. Without a mean there is no slope.
        heads: heads that keep everything or drop, or the file that names them. The others get smaller budgets, all
            the same, so that slots over all layers and heads are as many as without.

    Raises:
        ValueError: for a budget that leaves no slot for centroids (with `heads`, when a cache is made), a chunk, a
            schedule or an option that cannot be, or heads of another model.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}; known: {', '.join(SCHEDULES)}")
    given = {"first": first, "decay": decay, "steps": steps, "floor": floor}
    planned = dataclasses.replace(SCHEDULES[schedule], **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
    if slope not in ("pooled", None):
        raise ValueError(f"slope={slope!r}; it must be 'pooled' or None")
    if joins not in ("mean", "drop"):
        raise ValueError(f"joins={joins!r}; it must be 'mean' or 'drop'")
    if chunk < 2 or chunk % 2:
        raise ValueError(f"chunk={chunk}; it must be even and at least 2")
    check_period(period)

    @functools.cache
    def make(budget: int, joins: Joins) -> CachePolicy:
        return _chelsea(budget, sinks, recent, chunk, planned, period, slope == "pooled" and joins == "mean", joins)

    plain = make(budget, joins)
    if heads is None:
        return plain
    choice = heads if isinstance(heads, HeadChoice) else HeadChoice.load(heads)
    full = exact(period=period)

    @functools.cache
    def divided(layers: int, kv_heads: int, full_slots: int) -> CachePolicy:
        if (layers, kv_heads) != (choice.layers, choice.kv_heads):
            raise ValueError(
                f"heads are those of {choice.layers} layers x {choice.kv_heads} kv heads; the cache has "
                f"{layers} x {kv_heads}"
            )
        others = layers * kv_heads - len(choice.full)
        left = layers * kv_heads * budget - len(choice.full) * full_slots
        if others and left // others <= sinks + recent:
            raise ValueError(
                f"budget={budget} is {layers * kv_heads * budget} slots over all heads; {len(choice.full)} heads that "
                f"keep all take {full_slots} each and leave {left} for {others} others, which need more than "
                f"{sinks + recent} each: give a larger budget or fewer such heads"
            )

        def policy(head: tuple[int, int]) -> CachePolicy:
            if head in choice.full:
                return full
            return make(left // others, "drop" if head in choice.drop else joins)

        return by_head([[policy((layer, head)) for head in range(kv_heads)] for layer in range(layers)])

    def choose(spec: CacheSpec) -> CachePolicy:
        # As many as exact really makes, which rounds up.
        full_slots = abstract_state(full, spec).selection.keys.shape[2]
        return divided(spec.layers, spec.kv_heads, full_slots)

    return chosen(choose, [by_head([[plain, full]])], name="chelsea(heads)")


def _chelsea(
    budget: int,
    sinks: int,
    recent: int,
    chunk: int,
    schedule: Schedule,
    period: int,
    sloped: bool,
    joins: Joins,
) -> CachePolicy:
    """The policy of heads that are all alike; arguments as `chelsea` has checked them."""
    check_budget(budget, sinks, recent)
    if budget == sinks + recent:
        raise ValueError(f"budget={budget} leaves no slot for centroids; sinks + recent already take {budget}")
    slots = budget - sinks - recent

    def init(spec, row_keys):
        del row_keys
        shape, dim = (spec.batch, spec.kv_heads), spec.head_dim
        merged = Merged(
            keys=jnp.zeros((*shape, slots, dim), spec.dtype),
            values=jnp.zeros((*shape, slots, dim), spec.dtype),
            degree=jnp.zeros((*shape, slots), jnp.int32),
            count=jnp.zeros(spec.batch, jnp.int32),
            log_weight=jnp.zeros((*shape, slots)),
            slope=Slope(jnp.zeros((*shape, dim, dim)), jnp.zeros(shape)) if sloped else None,
        )
        return init_windowed(spec, init_window(spec, sinks + recent, sinks, recent, period), merged)

    def merge(state, entries: Centroids):
        """Compresses every head's entries into the centroids' slots."""
        left = over_heads(lambda one: compress(one, slots, chunk, schedule, drop=joins == "drop"))(entries)
        merged: Merged = state.selection
        slope = merged.slope
        if slope is not None:
            updated = over_heads(_pooled)(slope, merged.degree, entries, left)
            # Where no token came, nothing may change, not even by rounding.
            came = jnp.sum(entries.degree, axis=2) > jnp.sum(merged.degree, axis=2)
            of = lambda x: came.reshape(came.shape + (1,) * (x.ndim - 2))  # noqa: E731
            slope = jax.tree.map(lambda new, old: jnp.where(of(new), new, old), updated, slope)

        def place(buffer, x):
            x = jnp.where(left.degree[..., None] > 0, x, 0)
            return buffer.at[:, :, : x.shape[2]].set(x.astype(buffer.dtype))

        degree = merged.degree.at[:, :, : left.degree.shape[2]].set(left.degree)
        merged = Merged(
            keys=place(merged.keys, left.keys),
            values=place(merged.values, left.values),
            degree=degree,
            count=jnp.min(left.count, axis=1),
            log_weight=jnp.log(jnp.maximum(degree, 1).astype(jnp.float32)),
            slope=slope,
        )
        return dataclasses.replace(state, selection=merged)

    def select(state, keys, values, queries):
        # The tokens in between begin behind the sinks; what lies past them is cut off by the count.
        middle = jnp.sum(between(state.window, keys.shape[1]), axis=1, dtype=jnp.int32)
        keys, values = (x[:, sinks:].swapaxes(1, 2) for x in (keys, values))
        return merge(state, _entries(keys, values, middle))

    def absorb(state, block: Block):
        merged: Merged = state.selection
        fresh = _entries(block.keys, block.values, block.count)

        def appended(old, new):
            old = jnp.pad(old, ((0, 0), (0, 0), (0, new.shape[2]), *((0, 0),) * (old.ndim - 3))).astype(new.dtype)
            return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1))(old, new, merged.count)

        entries = Centroids(
            keys=appended(merged.keys, fresh.keys),
            values=appended(merged.values, fresh.values),
            degree=appended(merged.degree, fresh.degree),
            count=merged.count[:, None] + fresh.count,
        )
        return merge(state, entries)

    def segments(state, queries):
        merged: Merged = state.selection
        slope = merged.slope
        centroids = segment(
            merged.keys,
            merged.values,
            log_num=merged.log_weight,
            stop=merged.count,
            slope=None if slope is None else slope.covariance,
            slope_limit=None if slope is None else SLOPE_LIMIT * jnp.sqrt(slope.variance),
        )
        return *window_segments(state.window, queries=queries), centroids

    return windowed_policy("chelsea", init=init, select=select, absorb=absorb, segments=segments, period=period)


def _entries(keys: Float[Array, "B H_kv T D"], values: Float[Array, "B H_kv T D"], count: Int[Array, "B"]) -> Centroids:
    """The first `count` tokens of every row as float32 entries of degree one."""
    degree = (jnp.arange(keys.shape[2]) < count[:, None]).astype(jnp.int32)
    return Centroids(
        keys=keys.astype(jnp.float32),
        values=values.astype(jnp.float32),
        degree=jnp.broadcast_to(degree[:, None], keys.shape[:3]),
        count=jnp.broadcast_to(count[:, None], keys.shape[:2]),
    )


def _pooled(slope: Slope, degree: Int[Array, "M"], before: Centroids, after: Centroids) -> Slope:
    """One head's slope after its entries were merged; `degree` are those of the tokens that it is a mean over so far.

    What varies inside entries grows by what varied between them before and no longer does.
    """
    tokens = jnp.maximum(jnp.sum(before.degree), 1).astype(jnp.float32)
    center = lambda x: (before.degree / tokens) @ x  # noqa: E731
    key, value = (center(jnp.where(before.degree[:, None] > 0, x, 0)) for x in (before.keys, before.values))

    def scatter(entries: Centroids) -> tuple[Float[Array, "D D"], Float[Array, ""]]:
        weight = entries.degree[:, None] / tokens
        keys = jnp.where(weight > 0, entries.keys - key, 0)
        weighted = jnp.where(weight > 0, entries.values - value, 0) * weight
        covariance = jnp.matmul(weighted.T, keys, precision=jax.lax.Precision.HIGHEST)
        return covariance, jnp.sum(weighted * jnp.where(weight > 0, entries.values - value, 0))

    (covariance, variance), (left_covariance, left_variance) = scatter(before), scatter(after)
    held = jnp.sum(degree) / tokens
    return Slope(
        held * slope.covariance + covariance - left_covariance,
        jnp.maximum(held * slope.variance + variance - left_variance, 0),
    )
