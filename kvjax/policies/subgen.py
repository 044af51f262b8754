"""SubGen (Zandieh et al. 2024): streaming attention in sublinear memory.

It combines a sample of the tokens weighted by value norms with a clustering of the keys. The papers' experiments run
k-center on the prompt instead: `ClusterGen`.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
from jaxtyping import Array, Int, Key

from kvjax.policy import Policy, Prompt, check_above, check_budget, check_min
from kvjax.segment import SegmentLike
from kvjax.spec import CacheSpec, round_to_tiles
from kvjax.state import stacked, state
from kvjax.stores import window as windows
from kvjax.stores.staging import Tokens
from kvjax.stores.window import Window, init_window
from kvjax.structures import streams as structures
from kvjax.structures.cluster_table import init_cluster_table
from kvjax.structures.per_head import per_head, stream_keys
from kvjax.structures.reservoir import init_reservoir
from kvjax.structures.streams import Streams


class Sizes(NamedTuple):
    """The paper's s (samples), m (clusters) and t (samples per cluster)."""

    samples: int
    clusters: int
    per_cluster: int


@state
class SubGenState:
    """The window, and one head's structures per row and KV head."""

    window: Window
    streams: Streams = stacked("B", "H_kv")


@dataclasses.dataclass(frozen=True)
class SubGen(Policy[SubGenState]):
    """Keeps sinks and recent tokens, and the tokens between them in SubGen's structures.

    The structures are a reservoir of s sampled tokens and a table of m clusters with t sampled tokens each. There are
    three variants:

    - "paper": Algorithm 1. The numerator is a sum over the s samples, drawn in proportion to |v|^2, each with weight
      mu / (s |v|^2). The denominator is a sum over the clusters' samples, each with weight n_i / t. SubGen's theorem
      holds for this variant only, and only until delta grows. Three quarters of the slots are samples, because the
      numerator is the noisier sum; the others are clusters with t = 1.
    - "self_normalised": the s samples are used for both sums, without clusters.
    - "mean_value" (kvjax's variant): a cluster is its mean key, its mean value and its number of tokens. A token joins
      the nearest mean within delta. With t > 0 a cluster is read as t sampled tokens, whose values are shifted so that
      their mean is the cluster's: the sampled values are a control variate. No error bound is proved. Averaging
      hides the value of a single token if tokens with similar keys have different values, as in `ClusterGen`.

    Attributes:
        budget: slots per KV head, sinks and recent tokens included. A slot is a key and a value. None if all sizes of
            the variant are set.
        sinks: first tokens that are always kept.
        recent: newest tokens that are always kept.
        variant: see above.
        samples: s; None for the budget's share.
        clusters: m; None for the budget's share.
        per_cluster: t; None for 1 in "paper" and 0 in "mean_value".
        delta: first radius of clusters, in units of keys; None to take it from the data.
        growth: smallest factor by which delta grows when there are too many clusters; None for 2 in "paper", as in the
            guarantees, and 1.02 in "mean_value". A smaller factor leaves fewer slots empty, but delta grows more often.
        compact_every: tokens between compactions; until then all new tokens are read.

    Reference:
        SubGen, Algorithm 1, Lemmas 1 and 2, Theorem 1.
    """

    budget: int | None = None
    sinks: int = 4
    recent: int = 64
    variant: Literal["mean_value", "self_normalised", "paper"] = "mean_value"
    samples: int | None = None
    clusters: int | None = None
    per_cluster: int | None = None
    delta: float | None = None
    growth: float | None = None
    compact_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed = self.sinks + self.recent
        check_budget(fixed + 1 if self.budget is None else self.budget, self.sinks, self.recent, self.compact_every)
        check_min(0, samples=self.samples, clusters=self.clusters, per_cluster=self.per_cluster)
        check_above(0, delta=self.delta)
        check_above(1, growth=self.growth)
        _ = self.sizes

    @functools.cached_property
    def sizes(self) -> Sizes:
        """Sizes of the structures; sizes that are not set are shares of the budget.

        Raises:
            ValueError: if sizes do not fit the budget, are missing, or are not sizes of the variant.
        """
        variant, budget, samples, clusters = self.variant, self.budget, self.samples, self.clusters
        if variant == "mean_value" and samples is not None:
            raise ValueError(f"samples={samples} is not a size of variant='mean_value'; pass per_cluster")
        if variant == "self_normalised" and (clusters, self.per_cluster) != (None, None):
            raise ValueError(
                f"clusters={clusters} and per_cluster={self.per_cluster} are not sizes of variant='self_normalised'; "
                "pass samples"
            )
        per_cluster = (1 if variant == "paper" else 0) if self.per_cluster is None else self.per_cluster
        # Half slots: a key alone takes one, a key and a value two.
        halves = {"mean_value": 2 + 2 * per_cluster, "self_normalised": 0, "paper": 1 + per_cluster}[variant]
        has_samples, has_clusters = variant != "mean_value", variant != "self_normalised"
        if budget is None:
            missing = {"samples": has_samples and samples is None, "clusters": has_clusters and clusters is None}
            if any(missing.values()):
                names = " and ".join(name for name in missing if missing[name])
                raise ValueError(f"budget=None needs the sizes of variant={variant!r}; pass {names}")
            return Sizes(samples or 0, clusters or 0, per_cluster)
        free = budget - self.sinks - self.recent
        if samples is None and has_samples:
            share = 3 * free // 4 if has_clusters else free
            samples = round_to_tiles(share if clusters is None else (2 * free - clusters * halves) // 2)
        samples = samples or 0
        if clusters is None and has_clusters:
            clusters = round_to_tiles(2 * (free - samples) // halves)
        clusters = clusters or 0
        empty = (has_samples and samples < 1) or (has_clusters and clusters < 1)
        if empty or 2 * samples + clusters * halves > 2 * free:
            raise ValueError(
                f"budget={budget} leaves {free} slots for samples={samples} and clusters={clusters} of {halves / 2:g} "
                "slots each; pass a larger budget or smaller sizes"
            )
        return Sizes(samples, clusters, per_cluster)

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> SubGenState:
        """Returns an empty window and empty structures for `spec`."""
        streams = per_head(functools.partial(self._init_streams, spec))(stream_keys(row_keys, spec.kv_heads))
        return SubGenState(init_window(spec, self.sinks, self.recent), streams)

    def _init_streams(self, spec: CacheSpec, rng: Key[Array, ""]) -> Streams:
        """Returns one head's empty structures."""
        dims, sizes, moving = (spec.head_dim, spec.value_width), self.sizes, self.variant == "mean_value"
        reservoir_key, table_key = jax.random.split(rng)
        samples = init_reservoir(sizes.samples, *dims, spec.dtype, reservoir_key) if sizes.samples else None
        if not sizes.clusters:
            return Streams(samples, None)
        table = init_cluster_table(
            sizes.clusters,
            spec.head_dim,
            spec.dtype,
            table_key,
            samples=sizes.per_cluster,
            value_dim=spec.value_width if moving else None,
            moving=moving,
            delta=self.delta,
            growth=(1.02 if moving else 2.0) if self.growth is None else self.growth,
        )
        return Streams(samples, table)

    def prefill(self, state: SubGenState, prompt: Prompt) -> SubGenState:
        """Fills the window; the prompt's tokens between sinks and recent ones go to the structures."""
        window = windows.fill(state.window, prompt)
        middle = windows.middle_mask(window, prompt.keys.shape[2])
        return SubGenState(window, structures.fill(state.streams, prompt.keys, prompt.values, middle))

    def segments(self, state: SubGenState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window and the structures of a state."""
        streams = structures.stream_segments(state.streams, numerator_only=self.variant == "paper")
        return (*windows.window_segments(state.window), *streams)

    def compact(self, state: SubGenState, new: Tokens) -> SubGenState:
        """Slides the window over new tokens; tokens that leave it go to the structures."""
        window, left = windows.slide(state.window, new)
        return SubGenState(window, structures.extend_all(state.streams, left.keys, left.values, left.present))
