"""Chelsea (2025): the middle of the context as weighted centroids, made by chunked soft matching, online."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import window as windows
from kvjax.combinators.by_head import ByHead
from kvjax.combinators.head_choice import HeadChoice
from kvjax.growing import init_growing
from kvjax.per_head import per_head
from kvjax.policies.exact import Exact
from kvjax.policy import Policy, check_settings
from kvjax.segment import Segment, Slope
from kvjax.state import entries, stacked, state
from kvjax.structures import means
from kvjax.structures.soft_matching import (
    SCHEDULES,
    Centroids,
    PooledSlope,
    Schedule,
    compress,
    fresh_entries,
    pooled_slope,
)
from kvjax.window import Window, init_window

# Of the values' deviation inside centroids, the most that a query may move a centroid's value along the slope. Linear
# growth is right for small logits only. Of .25, .5, 1, 2 and no bound, on synthetic streams at norms of 2 to 15, this
# was best on low-rank ones and no different on the others.
SLOPE_LIMIT = 0.25


@state
class Merged:
    """The centroids, in the slots [0, count), and what each stands for. Their number is the same in all heads."""

    window: Window
    keys: Float[Array, "B H_kv S D"] = entries(means=True)
    values: Float[Array, "B H_kv S D_v"] = entries(means=True)
    key_rest: Int[Array, "B H_kv S D"] | None  # int8, see `means`
    value_rest: Int[Array, "B H_kv S D_v"] | None
    degree: Int[Array, "B H_kv S"]  # int32 tokens, 0 in empty slots
    count: Int[Array, "B"]  # int32 centroids
    log_weight: Float[Array, "B H_kv S"]  # float32, log of the degree
    pooled: PooledSlope | None = stacked("B", "H_kv")


@dataclasses.dataclass(frozen=True)
class Chelsea(Policy[Merged]):
    """Keeps sinks, recent tokens and centroids of the others, each weighing as many tokens as it was merged from.

    Whenever more tokens have left the window than there are slots, similar neighbours are merged, step by step, until
    exactly the budget is filled. The slope goes beyond the paper: see `PooledSlope`; what it adds to values is softly
    bounded (`SLOPE_LIMIT`). The paper keeps the mean value.

    Attributes:
        budget: slots per head, sinks and recent tokens included; the rest are centroids (the paper's B).
        sinks, recent: tokens always kept (n_1 = 16 and n_2 = 64).
        chunk: entries among which an entry looks for a partner (c); even.
        schedule: the share of entries merged per step (r_i) as the paper has it for "llama-2", "llama-3" or "qwen".
        first, decay, steps, floor: replace parts of it (r_init, alpha, m; the floor is ours), see `Schedule`.
        slope: "pooled" (ours) or None, as the paper has it.
        joins: "mean" for means weighted by degree, as the paper has it; "drop" keeps one of the two tokens that join,
            weighing both. Without a mean there is no slope.
        heads: heads that keep everything (outlier heads) or drop. The others get smaller budgets, all the same, so
            that slots over all layers and heads are as many as without.
        compact_every: tokens between compactions (the paper compacts whenever the cache is g tokens over its budget:
            here g is this).

    Source: Chelsea, Algorithm 1, section 5.2 and appendix C.
    """

    budget: int
    sinks: int = 16
    recent: int = 64
    chunk: int = 256
    schedule: Literal["llama-2", "llama-3", "qwen"] = "llama-3"
    first: float | None = None
    decay: float | None = None
    steps: int | None = None
    floor: float | None = None
    slope: Literal["pooled"] | None = "pooled"
    joins: Literal["mean", "drop"] = "mean"
    heads: HeadChoice | None = None
    compact_every: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.budget, self.sinks, self.recent, self.compact_every, selects="centroids")
        if self.chunk < 2 or self.chunk % 2:
            raise ValueError(f"chunk={self.chunk}; it must be even and at least 2")
        _ = self.plan

    @property
    def plan(self) -> Schedule:
        """The schedule with what replaces parts of it."""
        parts = {name: getattr(self, name) for name in ("first", "decay", "steps", "floor")}
        return dataclasses.replace(SCHEDULES[self.schedule], **{k: v for k, v in parts.items() if v is not None})

    def at(self, spec) -> Policy:
        if self.heads is None:
            return self
        full_slots = jax.eval_shape(lambda: init_growing(spec, spec.max_prompt)).keys.shape[2]
        budget = self.heads.budget_of_others(spec, self.budget, full_slots, least=self.sinks + self.recent + 1)
        merging = dataclasses.replace(self, budget=budget, heads=None)
        dropping = dataclasses.replace(merging, joins="drop")
        return ByHead(self.heads.policies(spec, Exact(self.compact_every), dropping, merging)).at(spec)

    def init(self, spec, row_keys) -> Merged:
        slots = self.budget - self.sinks - self.recent
        shape, dims = (spec.batch, spec.kv_heads), (spec.value_width, spec.head_dim)
        sloped = self.slope == "pooled" and self.joins == "mean"
        # Tokens that are dropped leave no mean to be rounded.
        rest = (lambda shape: None) if self.joins == "drop" else functools.partial(means.init_rest, spec)
        return Merged(
            window=init_window(spec, self.sinks, self.recent),
            keys=jnp.zeros((*shape, slots, spec.head_dim), spec.dtype),
            values=jnp.zeros((*shape, slots, spec.value_width), spec.dtype),
            key_rest=rest((*shape, slots, spec.head_dim)),
            value_rest=rest((*shape, slots, spec.value_width)),
            degree=jnp.zeros((*shape, slots), jnp.int32),
            count=jnp.zeros(spec.batch, jnp.int32),
            log_weight=jnp.zeros((*shape, slots)),
            pooled=PooledSlope(jnp.zeros((*shape, *dims)), jnp.zeros(shape)) if sloped else None,
        )

    def prefill(self, state: Merged, prompt) -> Merged:
        window = windows.fill(state.window, prompt)
        _, _, middle = windows.occupancy(window)  # tokens, from the end of the sinks on
        keys, values = (x[:, :, self.sinks :] for x in (prompt.keys, prompt.values))
        return self._merge(dataclasses.replace(state, window=window), fresh_entries(keys, values, middle))

    def read(self, state: Merged, newer):
        slope = None
        if state.pooled is not None:
            slope = Slope(state.pooled.covariance, SLOPE_LIMIT * jnp.sqrt(state.pooled.variance))
        stop = state.count[:, None]
        centroids = Segment(state.keys, state.values, log_num=state.log_weight, stop=stop, slope=slope)
        return windows.shown(state.window), centroids

    def compact(self, state: Merged, new) -> Merged:
        window, left = windows.slide(state.window, new)
        fresh = fresh_entries(left.keys, left.values, left.count)

        def behind(old, new):
            old = jnp.pad(old, ((0, 0), (0, 0), (0, new.shape[2]), *((0, 0),) * (old.ndim - 3))).astype(new.dtype)
            return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1))(old, new, state.count)

        both = Centroids(
            keys=behind(means.whole(state.keys, state.key_rest), fresh.keys),
            values=behind(means.whole(state.values, state.value_rest), fresh.values),
            degree=behind(state.degree, fresh.degree),
            count=state.count[:, None] + fresh.count,
        )
        return self._merge(dataclasses.replace(state, window=window), both)

    def _merge(self, state: Merged, centroids: Centroids) -> Merged:
        """Compresses every head's entries into the centroids' slots."""
        slots, drop = state.keys.shape[2], self.joins == "drop"
        left = per_head(lambda own: compress(own, slots, self.chunk, self.plan, drop=drop))(centroids)
        pooled = state.pooled
        if pooled is not None:
            updated = per_head(pooled_slope)(pooled, state.degree, centroids, left)
            # Where no token came, nothing may change, not even by rounding.
            came = jnp.sum(centroids.degree, axis=2) > jnp.sum(state.degree, axis=2)
            of = lambda x: came.reshape(came.shape + (1,) * (x.ndim - 2))  # noqa: E731
            pooled = jax.tree.map(lambda new, old: jnp.where(of(new), new, old), updated, pooled)

        def place(buffer, rest, x):
            x = jnp.where(left.degree[..., None] > 0, x, 0)
            new = means.rounded(x, buffer.dtype, rest is not None)
            return jax.tree.map(lambda old, new: old.at[:, :, : x.shape[2]].set(new), (buffer, rest), new)

        keys, key_rest = place(state.keys, state.key_rest, left.keys)
        values, value_rest = place(state.values, state.value_rest, left.values)
        degree = state.degree.at[:, :, : left.degree.shape[2]].set(left.degree)
        return dataclasses.replace(
            state,
            keys=keys,
            values=values,
            key_rest=key_rest,
            value_rest=value_rest,
            degree=degree,
            count=jnp.min(left.count, axis=1),
            log_weight=jnp.log(jnp.maximum(degree, 1).astype(jnp.float32)),
            pooled=pooled,
        )
