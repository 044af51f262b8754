"""ClusterGen: the recent tokens and k centres of the keys before them, by greedy k-center.

The streaming algorithm of the same papers, with its guarantees, is `SubGen`; this is what their experiments run, and a
better variant of it.
"""

import dataclasses
import functools
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.policy import Policy, Prompt, check_budget
from kvjax.segment import SegmentLike
from kvjax.spec import CacheSpec
from kvjax.state import kv_entries, state
from kvjax.stores import window as windows
from kvjax.stores.staging import Tokens
from kvjax.stores.window import Window, init_window
from kvjax.structures.k_center import cluster_more, cluster_prompt
from kvjax.structures.per_head import per_head


@state
class Clusters:
    """What "mean_value" knows of the clusters whose centres are the keys in the window's selected slots."""

    count: Int[Array, "B H_kv M"]  # int32 tokens, 0 in empty slots
    # float32 l2 distance at which the centre was chosen; -inf in empty slots. The smallest go first.
    separation: Float[Array, "B H_kv M"]
    log_weight: Float[Array, "B H_kv S"]  # float32, of the whole window


@state
class MeanWindow(Window):
    """A window whose selected slots have mean values."""

    values: Float[Array, "B H_kv S D_v"] = kv_entries(running_mean=True)


@state
class ClusterGenState:
    window: Window  # centres are in its selected slots
    chosen: Int[Array, "B"] | None  # int32 centres of the row, for "paper"
    clusters: Clusters | None  # for "mean_value"


@dataclasses.dataclass(frozen=True)
class ClusterGen(Policy[ClusterGenState]):
    """Keeps recent tokens and centres of the others, chosen per kv head by farthest-first traversal of the keys.

    Variants:

    - "mean_value" (ours, the default): a centre stands for its cluster, with the number of its tokens as weight and
      their mean value; tokens that leave the window join clusters or become centres in place of the least separated
      ones. Its attention is nearer to exact attention on every stream tried; where a task asks for one token's own
      value, a mean blurs it, and "paper" does better.
    - "paper": the prompt is clustered once and centres are plain tokens; tokens that leave the window while decoding
      are dropped (with `recent` below `compact_every`, up to that many staged tokens stay visible until a compaction).

    Attributes:
        budget: slots per head, sinks and recent tokens included; the rest are centres (k).
        recent: newest tokens always kept (r); half the budget by default, as in the papers' LongBench runs.
        sinks: first tokens always kept; the papers keep none.
        variant: see above.
        compact_every: tokens between compactions.

    Reference:
        ClusterGen, section 4; SubGen, section 3.2.
    """

    budget: int
    recent: int | None = None
    sinks: int = 0
    variant: Literal["mean_value", "paper"] = "mean_value"
    compact_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, self.newest, self.compact_every, remainder_for="centres")

    @property
    def newest(self) -> int:
        """Slots of recent tokens."""
        return self.budget // 2 if self.recent is None else self.recent

    @property
    def fixed(self) -> int:
        """Slots before the centres'."""
        return self.sinks + self.newest

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> ClusterGenState:
        centers = self.budget - self.fixed
        window, shape = init_window(spec, self.sinks, self.newest, centers), (spec.batch, spec.kv_heads)
        if self.variant == "paper":
            return ClusterGenState(window, jnp.zeros(spec.batch, jnp.int32), None)
        mean_window = MeanWindow(**(vars(window) | {"values": window.values.astype(jnp.float32)}))
        clusters = Clusters(
            count=jnp.zeros((*shape, centers), jnp.int32),
            separation=jnp.full((*shape, centers), -jnp.inf),
            log_weight=jnp.zeros((*shape, self.budget)),
        )
        return ClusterGenState(mean_window, None, clusters)

    def prefill(self, state: ClusterGenState, prompt: Prompt) -> ClusterGenState:
        window = windows.fill(state.window, prompt)
        middle = windows.middle_mask(window, prompt.keys.shape[2])
        cluster = functools.partial(cluster_prompt, size=self.budget - self.fixed)
        keys, values, count, separation, mean_value = per_head(cluster, 0, 0, None)(prompt.keys, prompt.values, middle)
        if state.clusters is None:
            chosen = jnp.sum(separation[:, 0] > -jnp.inf, axis=-1, dtype=jnp.int32)
            return ClusterGenState(self._placed(window, keys, values), chosen, None)
        return self._clustered(window, state.clusters, keys, count, separation, mean_value)

    def segments(self, state: ClusterGenState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        if state.clusters is None:
            assert state.chosen is not None
            return windows.window_segments(state.window, selected=state.chosen, num_visible_staged=num_visible_staged)
        _, _, middle = windows.occupancy(state.window)
        selected = jnp.minimum(middle, self.budget - self.fixed)
        return windows.window_segments(state.window, selected=selected, log_weight=state.clusters.log_weight)

    def compact(self, state: ClusterGenState, new: Tokens) -> ClusterGenState:
        window, left = windows.slide(state.window, new)
        if state.clusters is None:
            return dataclasses.replace(state, window=window)
        keys, count, separation, mean_value = per_head(cluster_more, 0, 0, 0, 0, 0, 0, None)(
            window.keys[:, :, self.fixed :],
            state.clusters.count,
            state.clusters.separation,
            window.values[:, :, self.fixed :],
            left.keys,
            left.values,
            left.present,
        )
        return self._clustered(window, state.clusters, keys, count, separation, mean_value)

    def _placed(self, window: Window, keys: Array, values: Array) -> Window:
        """The window with these in its selected slots."""
        return dataclasses.replace(
            window,
            keys=window.keys.at[:, :, self.fixed :].set(keys.astype(window.keys.dtype)),
            values=window.values.at[:, :, self.fixed :].set(values.astype(window.values.dtype)),
        )

    def _clustered(
        self, window: Window, clusters: Clusters, keys: Array, count: Array, separation: Array, mean_value: Array
    ) -> ClusterGenState:
        """The state with these clusters. A centre weighs as much as the tokens of its cluster."""
        weight = jnp.log(jnp.maximum(count, 1).astype(jnp.float32))
        log_weight = clusters.log_weight.at[:, :, self.fixed :].set(weight)
        clusters = Clusters(count, separation, log_weight)
        return ClusterGenState(self._placed(window, keys, mean_value), None, clusters)
