"""ClusterGen: recent tokens, and k centers of the keys before them by greedy k-center.

The experiments of ClusterGen and SubGen run this method. A second variant is more accurate. The streaming algorithm of
these papers, with its guarantees, is `SubGen`.
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
from kvjax.structures.k_center import CenterClusters, cluster_prompt, extend_clusters
from kvjax.structures.per_head import per_head


@state
class Clusters:
    """Clusters of variant "mean_value", whose centers are the keys in the window's selected slots."""

    count: Int[Array, "B H_kv M"]  # int32 tokens, 0 in empty slots
    separation: Float[Array, "B H_kv M"]  # float32, as in `CenterClusters`
    log_weight: Float[Array, "B H_kv S"]  # float32, of all slots of the window


@state
class MeanWindow(Window):
    """A window whose selected slots have mean values."""

    values: Float[Array, "B H_kv S D_v"] = kv_entries(running_mean=True)


@state
class ClusterGenState:
    """A window with centers in its selected slots."""

    window: Window
    num_centers: Int[Array, "B"] | None  # int32; for variant "paper"
    clusters: Clusters | None  # for variant "mean_value"


@dataclasses.dataclass(frozen=True)
class ClusterGen(Policy[ClusterGenState]):
    """Keeps recent tokens and centers of the tokens before them, chosen per KV head by farthest-first traversal.

    A center is a token whose key is far from the keys of all other centers. There are two variants:

    - "mean_value" (kvjax's variant): a center represents its cluster, with the number of its tokens as weight and their
      mean value. Tokens that leave the window join clusters or replace the centers with the smallest separation. It
      approximates exact attention better than "paper" on every stream that was tried, but averaging hides the value
      of a single token, for which "paper" is better.
    - "paper": the prompt is clustered once and centers are plain tokens. Tokens that leave the window while decoding
      are dropped. If `recent` is below `compact_every`, up to `compact_every` staged tokens stay visible.

    Attributes:
        budget: slots per KV head, sinks and recent tokens included; the other slots hold centers (k).
        recent: newest tokens that are always kept (r); None for half the budget, as in the papers' LongBench runs.
        sinks: first tokens that are always kept; the papers use 0.
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
        check_budget(self.budget, self.sinks, self.num_recent, self.compact_every, remainder_for="centers")

    @property
    def num_recent(self) -> int:
        """Slots of recent tokens."""
        return self.budget // 2 if self.recent is None else self.recent

    @property
    def num_centers(self) -> int:
        """Slots of centers."""
        return self.budget - self.sinks - self.num_recent

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> ClusterGenState:
        """Returns an empty window for `spec`."""
        centers, shape = self.num_centers, (spec.batch, spec.kv_heads)
        window = init_window(spec, self.sinks, self.num_recent, centers)
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
        """Fills the window and clusters the prompt's tokens between sinks and recent ones."""
        window = windows.fill(state.window, prompt)
        middle = windows.middle_mask(window, prompt.keys.shape[2])
        cluster = per_head(functools.partial(cluster_prompt, size=self.num_centers), 0, 0, None)
        new, center_values = cluster(prompt.keys, prompt.values, middle)
        if state.clusters is None:
            count = jnp.sum(new.separation[:, 0] > -jnp.inf, axis=-1, dtype=jnp.int32)
            return ClusterGenState(_write_centers(window, new.keys, center_values), count, None)
        return _write_clusters(window, state.clusters, new)

    def segments(self, state: ClusterGenState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window of a state."""
        if state.clusters is None:
            assert state.num_centers is not None
            selected = state.num_centers
            return windows.window_segments(state.window, selected, num_visible_staged=num_visible_staged)
        _, _, middle = windows.occupancy(state.window)
        selected = jnp.minimum(middle, self.num_centers)
        return windows.window_segments(state.window, selected, state.clusters.log_weight)

    def compact(self, state: ClusterGenState, new: Tokens) -> ClusterGenState:
        """Slides the window over new tokens; tokens that leave it join clusters or become centers."""
        window, left = windows.slide(state.window, new)
        if state.clusters is None:
            return dataclasses.replace(state, window=window)
        keys, mean_values = (x[:, :, window.fixed :] for x in (window.keys, window.values))
        clusters = CenterClusters(keys, state.clusters.count, state.clusters.separation, mean_values)
        clusters = per_head(extend_clusters, 0, 0, 0, None)(clusters, left.keys, left.values, left.present)
        return _write_clusters(window, state.clusters, clusters)


def _write_centers(window: Window, keys: Float[Array, "B H M D"], values: Float[Array, "B H M D_v"]) -> Window:
    """Writes centers into the window's selected slots."""
    return dataclasses.replace(
        window,
        keys=window.keys.at[:, :, window.fixed :].set(keys.astype(window.keys.dtype)),
        values=window.values.at[:, :, window.fixed :].set(values.astype(window.values.dtype)),
    )


def _write_clusters(window: Window, old: Clusters, new: CenterClusters) -> ClusterGenState:
    """Returns the state with these clusters, each weighted by its number of tokens."""
    weight = jnp.log(jnp.maximum(new.size, 1).astype(jnp.float32))
    clusters = Clusters(new.size, new.separation, old.log_weight.at[:, :, window.fixed :].set(weight))
    return ClusterGenState(_write_centers(window, new.keys, new.mean_value), None, clusters)
