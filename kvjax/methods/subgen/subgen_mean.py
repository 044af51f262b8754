"""SubGenMean: kvjax's variant of `SubGen`, which reads the means of a stream's clusters.

Per KV head, for every token that leaves the recent window:

1. The key joins the nearest of the cluster centers if it is within delta, and opens a cluster otherwise.
2. The center becomes the mean key of its cluster, and the cluster's value the mean of its values.
3. If all clusters are in use, delta grows, and clusters whose centers are now within delta merge.

Attention reads a cluster as one entry of weight n_i, its number of tokens: log(n_i) is added to the logit. Means
add no sampling noise. The method has no error bound.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from kvjax.methods.subgen import cluster_table
from kvjax.methods.subgen.cluster_table import ClusterTable, init_cluster_table, log_counts
from kvjax.methods.subgen.streams import extend_all, fill
from kvjax.policy import Policy, Prompt, check_above, check_budget
from kvjax.segment import Segment, SegmentLike
from kvjax.shared import window as windows
from kvjax.shared.per_head import per_head, stream_keys
from kvjax.shared.window import Window, init_window
from kvjax.spec import CacheSpec, round_to_tiles
from kvjax.staging import Tokens
from kvjax.state import stacked, state


@state
class SubGenMeanState:
    """The window, and one cluster table per row and KV head."""

    window: Window
    table: ClusterTable = stacked("B", "H_kv")


@dataclasses.dataclass(frozen=True)
class SubGenMean(Policy[SubGenMeanState]):
    """Keeps sinks and recent tokens, and the tokens between them as weighted cluster means.

    The clusters are those of `SubGen`: a token joins the nearest center within delta or opens a cluster. Here a center
    is the mean key of its cluster and has the mean value; both sums of attention read it with the number of its tokens
    as weight. The method is kvjax's and has no error bound. Averaging hides the value of a single token if tokens with
    similar keys have different values.

    Attributes:
        budget: slots per KV head, sinks and recent tokens included; the other slots hold clusters.
        sinks: first tokens that are always kept (kvjax's choice).
        recent: newest tokens that are always kept (kvjax's choice).
        delta: first radius of clusters, in units of keys (delta of SubGen, Algorithm 1); None to take it from the data.
        growth: smallest factor by which delta grows when there are too many clusters. A smaller factor leaves fewer
            slots empty, but delta grows more often (kvjax's choice; 2 in Charikar et al. 1997).
        compact_every: tokens between compactions; until then all new tokens are read (kvjax's staging).
    """

    budget: int
    sinks: int = 4
    recent: int = 64
    delta: float | None = None
    growth: float = 1.02
    compact_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, self.recent, self.compact_every, remainder_for="clusters")
        check_above(0, delta=self.delta)
        check_above(1, growth=self.growth)

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> SubGenMeanState:
        """Returns an empty window and empty cluster tables for `spec`."""
        init_table = functools.partial(
            init_cluster_table,
            round_to_tiles(self.budget - self.sinks - self.recent),
            spec.head_dim,
            spec.dtype,
            value_dim=spec.value_width,
            moving=True,
            delta=self.delta,
            growth=self.growth,
        )
        table = per_head(lambda rng: init_table(rng=rng))(stream_keys(row_keys, spec.kv_heads))
        return SubGenMeanState(init_window(spec, self.sinks, self.recent), table)

    def prefill(self, state: SubGenMeanState, prompt: Prompt) -> SubGenMeanState:
        """Fills the window and clusters the prompt's tokens between sinks and recent ones."""
        window = windows.fill(state.window, prompt)
        middle = windows.middle_mask(window, prompt.keys.shape[2])
        valid = jnp.broadcast_to(middle[:, None], prompt.keys.shape[:3])
        return SubGenMeanState(window, fill(cluster_table.extend, state.table, prompt.keys, prompt.values, valid))

    def segments(self, state: SubGenMeanState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window and the cluster means."""
        table = state.table
        means = Segment(table.centers, table.mean_value, log_num=per_head(log_counts)(table))
        return (*windows.window_segments(state.window), means)

    def compact(self, state: SubGenMeanState, new: Tokens) -> SubGenMeanState:
        """Slides the window over new tokens and clusters tokens that leave it."""
        window, left = windows.slide(state.window, new)
        valid = jnp.broadcast_to(left.present[:, None], left.keys.shape[:3])
        table = extend_all(cluster_table.extend, state.table, left.keys, left.values, valid)
        return SubGenMeanState(window, table)
