"""Chelsea (2025): tokens between sinks and recent window become weighted centroids by chunked soft matching.

Per KV head, the cache is the sinks, the recent window and at most B centroids (key, value, degree). A centroid is the
mean of the tokens that were merged into it, and its degree is their number. Attention adds log(degree) to its logit, so
that it weighs as much as these tokens would with equal keys and values.

Tokens that leave the recent window become centroids of degree 1, in the order of the text. When there are more than B,
`soft_matching.compress` merges them in steps:

1. The centroids are divided into chunks of c neighbors. In a chunk, those at even places are A, the others B.
2. Every A finds the B of its chunk with the most similar key (cosine). Chunks keep this linear in the length.
3. The most similar pairs of all chunks are merged, a share r_i of the centroids in step i: degrees add, keys and values
   become means weighted by degree. Shares fall from step to step (the schedule): later pairs are less similar.
4. Steps repeat until B centroids are left.

The prompt is compressed once in this way. While decoding, a compaction appends the tokens that left the window and
merges again. Only keys decide which centroids merge; queries and values do not.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, Shaped

from kvjax.methods.chelsea.soft_matching import (
    SCHEDULES,
    Centroids,
    Schedule,
    compress,
    single_token_entries,
    tile_slots,
)
from kvjax.policy import Policy, Prompt, check_budget
from kvjax.segment import Segment, SegmentLike
from kvjax.shared import window as windows
from kvjax.shared.per_head import per_head
from kvjax.shared.window import Window, init_window
from kvjax.spec import CacheSpec, allocated_slots
from kvjax.staging import Tokens
from kvjax.state import kv_entries, state


@state
class ChelseaState:
    """The window, and centroids in slots [0, count), the same number for all heads."""

    window: Window
    keys: Float[Array, "B H_kv S D"] = kv_entries(running_mean=True)
    values: Float[Array, "B H_kv S D_v"] = kv_entries(running_mean=True)
    degree: Int[Array, "B H_kv S"]  # int32 tokens of each centroid, 0 in empty slots
    count: Int[Array, "B"]  # int32 centroids
    log_weight: Float[Array, "B H_kv S"]  # float32, log of the degree


@dataclasses.dataclass(frozen=True)
class Chelsea(Policy[ChelseaState]):
    """Keeps sinks, recent tokens and weighted centroids of the tokens between them.

    When tokens that left the window exceed the slots, similar neighbors are merged step by step until exactly the
    budget is used. A centroid weighs as much as the tokens that were merged into it.

    In the paper, outlier heads keep the full cache (section 5.4, appendix B); use `kvjax.HeadBudgets`, or
    `heads=FILE` in text, with the heads of the model.

    Attributes:
        budget: slots per KV head, sinks and recent tokens included; the other slots hold centroids (the paper's B).
        sinks: first tokens that are always kept (n_1 = 16; section 7.1).
        recent: newest tokens that are always kept (n_2 = 64; section 7.1).
        chunk: entries among which an entry looks for a partner (c = 256; section 7.4); even.
        schedule: share of entries merged per step (r_i), as appendix C.2 sets it for the families "llama-2", "llama-3"
            and "qwen". Pass the one of the model; for other families the paper has none, and "llama-3" is the default.
        first: replaces the schedule's first share (r_init). The paper's needle test uses the constant share 0.25:
            `first=0.25, decay=0.0`.
        decay: replaces the schedule's decrease per step (alpha).
        steps: replaces the number of steps with a decrease (m).
        floor: replaces the smallest share, which is kvjax's choice; the paper only says that shares exceed 0.
        compact_every: tokens between compactions (g of Algorithm 1, which compacts when the cache is g tokens over
            budget; the paper gives no value).

    Reference:
        Chelsea, Algorithm 1, sections 5 and 7.1, appendix C.
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
    compact_every: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, self.recent, self.compact_every, remainder_for="centroids")
        if self.chunk < 2 or self.chunk % 2:
            raise ValueError(f"chunk={self.chunk} must be even and at least 2")
        _ = self.merge_schedule

    @property
    def merge_schedule(self) -> Schedule:
        """The schedule, with the settings that replace parts of it."""
        parts = {name: getattr(self, name) for name in ("first", "decay", "steps", "floor")}
        return dataclasses.replace(SCHEDULES[self.schedule], **{k: v for k, v in parts.items() if v is not None})

    @property
    def num_centroids(self) -> int:
        """Maximum number of centroids."""
        return self.budget - self.sinks - self.recent

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> ChelseaState:
        """Returns an empty window without centroids for `spec`."""
        slots, shape = allocated_slots(self.num_centroids), (spec.batch, spec.kv_heads)
        return ChelseaState(
            window=init_window(spec, self.sinks, self.recent),
            keys=jnp.zeros((*shape, slots, spec.head_dim)),
            values=jnp.zeros((*shape, slots, spec.value_width)),
            degree=jnp.zeros((*shape, slots), jnp.int32),
            count=jnp.zeros(spec.batch, jnp.int32),
            log_weight=jnp.zeros((*shape, slots)),
        )

    def prefill(self, state: ChelseaState, prompt: Prompt) -> ChelseaState:
        """Fills the window and merges the prompt's tokens between sinks and recent ones."""
        window = windows.fill(state.window, prompt)
        _, _, middle = windows.occupancy(window)  # tokens from the end of the sinks on
        keys, values = prompt.keys[:, :, self.sinks :], prompt.values[:, :, self.sinks :]
        entries = single_token_entries(keys, values, middle)
        return self._merge(dataclasses.replace(state, window=window), entries)

    def segments(self, state: ChelseaState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window and the centroids of a state."""
        centroids = Segment(state.keys, state.values, log_num=state.log_weight, stop=state.count[:, None])
        return (*windows.window_segments(state.window), centroids)

    def compact(self, state: ChelseaState, new: Tokens) -> ChelseaState:
        """Slides the window over new tokens and merges tokens that leave it with the centroids."""
        window, left = windows.slide(state.window, new)
        entries = single_token_entries(left.keys, left.values, left.count)
        # Merging processes whole tiles; with enough slots for them it copies nothing.
        max_count = self.num_centroids + left.keys.shape[2]
        slots = max_count + -max_count % tile_slots(max_count, self.chunk)

        def append(old: Shaped[Array, "B H S *N"], new: Shaped[Array, "B H P *N"]) -> Shaped[Array, "B H R *N"]:
            """Writes `new` after the first `state.count` entries of `old`, which is enlarged to full tiles."""
            old = old[:, :, : self.num_centroids]
            padding = ((0, 0), (0, 0), (0, slots - old.shape[2]), *((0, 0),) * (old.ndim - 3))
            old = jnp.pad(old, padding).astype(new.dtype)
            return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1))(old, new, state.count)

        entries = Centroids(
            keys=append(state.keys, entries.keys),
            values=append(state.values, entries.values),
            degree=append(state.degree, entries.degree),
            count=state.count[:, None] + entries.count,
        )
        return self._merge(dataclasses.replace(state, window=window), entries, max_count)

    def _merge(self, state: ChelseaState, entries: Centroids, max_count: int | None = None) -> ChelseaState:
        """Compresses every head's entries, at most `max_count`, into the centroids' slots."""
        slots, schedule = self.num_centroids, self.merge_schedule
        merge = functools.partial(compress, budget=slots, chunk=self.chunk, schedule=schedule, max_count=max_count)
        merged = per_head(merge)(entries)

        def write(buffer: Float[Array, "B H S D"], x: Float[Array, "B H M D"]) -> Float[Array, "B H S D"]:
            """Writes the merged entries `x` into the first slots of a `buffer`; empty slots become 0."""
            x = jnp.where(merged.degree[..., None] > 0, x, 0)
            return buffer.at[:, :, : x.shape[2]].set(x.astype(buffer.dtype))

        degree = state.degree.at[:, :, : merged.degree.shape[2]].set(merged.degree)
        return dataclasses.replace(
            state,
            keys=write(state.keys, merged.keys),
            values=write(state.values, merged.values),
            degree=degree,
            count=jnp.min(merged.count, axis=1),  # equal in all heads: it depends on the number of tokens only
            log_weight=jnp.log(jnp.maximum(degree, 1).astype(jnp.float32)),
        )
