"""Chelsea (2025): the middle of the context as weighted centroids, made by chunked soft matching, online."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.policy import Policy, Prompt, check_budget
from kvjax.segment import Segment, SegmentLike
from kvjax.spec import CacheSpec
from kvjax.state import kv_entries, state
from kvjax.stores import window as windows
from kvjax.stores.staging import Tokens
from kvjax.stores.window import Window, init_window
from kvjax.structures.per_head import per_head
from kvjax.structures.soft_matching import SCHEDULES, Centroids, Schedule, compress, fresh_entries


@state
class ChelseaState:
    """Centroids in slots [0, count), the same number in all heads."""

    window: Window
    keys: Float[Array, "B H_kv S D"] = kv_entries(running_mean=True)
    values: Float[Array, "B H_kv S D_v"] = kv_entries(running_mean=True)
    degree: Int[Array, "B H_kv S"]  # int32 tokens of each centroid, 0 in empty slots
    count: Int[Array, "B"]  # int32 centroids
    log_weight: Float[Array, "B H_kv S"]  # float32, log of the degree


@dataclasses.dataclass(frozen=True)
class Chelsea(Policy[ChelseaState]):
    """Keeps sinks, recent tokens and centroids of the others, each weighing as many tokens as it was merged from.

    Whenever more tokens have left the window than there are slots, similar neighbours are merged, step by step, until
    exactly the budget is filled.

    Attributes:
        budget: slots per head, sinks and recent tokens included; the rest are centroids (the paper's B).
        sinks, recent: tokens always kept (n_1 = 16 and n_2 = 64).
        chunk: entries among which an entry looks for a partner (c); even.
        schedule: the share of entries merged per step (r_i) as the paper has it for "llama-2", "llama-3" or "qwen".
        first, decay, steps, floor: replace parts of it (r_init, alpha, m; the floor is ours), see `Schedule`.
        joins: "mean" for means weighted by degree, as the paper has it; "drop" keeps one of the two tokens that join,
            weighing both.
        compact_every: tokens between compactions (the paper compacts whenever the cache is g tokens over its budget:
            here g is this).

    Reference:
        Chelsea, Algorithm 1, section 5.2 and appendix C.
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
    joins: Literal["mean", "drop"] = "mean"
    compact_every: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, self.recent, self.compact_every, remainder_for="centroids")
        if self.chunk < 2 or self.chunk % 2:
            raise ValueError(f"chunk={self.chunk}; it must be even and at least 2")
        _ = self.plan

    @property
    def plan(self) -> Schedule:
        """The schedule with what replaces parts of it."""
        parts = {name: getattr(self, name) for name in ("first", "decay", "steps", "floor")}
        return dataclasses.replace(SCHEDULES[self.schedule], **{k: v for k, v in parts.items() if v is not None})

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> ChelseaState:
        """Returns an empty window without centroids."""
        slots, shape = self.budget - self.sinks - self.recent, (spec.batch, spec.kv_heads)
        # Means are computed in float32; tokens that are dropped leave no mean to round.
        dtype = spec.dtype if self.joins == "drop" else jnp.float32
        return ChelseaState(
            window=init_window(spec, self.sinks, self.recent),
            keys=jnp.zeros((*shape, slots, spec.head_dim), dtype),
            values=jnp.zeros((*shape, slots, spec.value_width), dtype),
            degree=jnp.zeros((*shape, slots), jnp.int32),
            count=jnp.zeros(spec.batch, jnp.int32),
            log_weight=jnp.zeros((*shape, slots)),
        )

    def prefill(self, state: ChelseaState, prompt: Prompt) -> ChelseaState:
        """Fills the window and merges the tokens between sinks and recent ones."""
        window = windows.fill(state.window, prompt)
        _, _, middle = windows.occupancy(window)  # tokens from the end of the sinks on
        keys, values = prompt.keys[:, :, self.sinks :], prompt.values[:, :, self.sinks :]
        return self._merge(dataclasses.replace(state, window=window), fresh_entries(keys, values, middle))

    def segments(self, state: ChelseaState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window and the centroids."""
        centroids = Segment(state.keys, state.values, log_num=state.log_weight, stop=state.count[:, None])
        return (*windows.window_segments(state.window), centroids)

    def compact(self, state: ChelseaState, new: Tokens) -> ChelseaState:
        """Slides the window and merges the tokens that leave it with the centroids."""
        window, left = windows.slide(state.window, new)
        entries = fresh_entries(left.keys, left.values, left.count)

        def append(old: Any, new: Any) -> Any:
            padding = ((0, 0), (0, 0), (0, new.shape[2]), *((0, 0),) * (old.ndim - 3))
            old = jnp.pad(old, padding).astype(new.dtype)
            return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1))(old, new, state.count)

        joined = Centroids(
            keys=append(state.keys, entries.keys),
            values=append(state.values, entries.values),
            degree=append(state.degree, entries.degree),
            count=state.count[:, None] + entries.count,
        )
        return self._merge(dataclasses.replace(state, window=window), joined)

    def _merge(self, state: ChelseaState, entries: Centroids) -> ChelseaState:
        """Compresses every head's entries into the centroids' slots."""
        slots, drop = state.keys.shape[2], self.joins == "drop"
        merged = per_head(lambda one: compress(one, slots, self.chunk, self.plan, drop=drop))(entries)

        def write(buffer: Float[Array, "B H S D"], x: Float[Array, "B H M D"]) -> Float[Array, "B H S D"]:
            x = jnp.where(merged.degree[..., None] > 0, x, 0)
            return buffer.at[:, :, : x.shape[2]].set(x.astype(buffer.dtype))

        degree = state.degree.at[:, :, : merged.degree.shape[2]].set(merged.degree)
        return dataclasses.replace(
            state,
            keys=write(state.keys, merged.keys),
            values=write(state.values, merged.values),
            degree=degree,
            count=jnp.min(merged.count, axis=1),
            log_weight=jnp.log(jnp.maximum(degree, 1).astype(jnp.float32)),
        )
