"""SubGen (Zandieh et al. 2024): streaming attention from a norm-weighted sample of the tokens and a clustering of the
keys, in sublinear memory at every step. What the papers' experiments run, k-center on the prompt, is `ClusterGen`."""

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
    """The paper's s, m and t."""

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
    """Keeps sinks and recent tokens; all others go, once they leave the window, through SubGen's structures.

    Variants, with s samples, m clusters and t samples per cluster:

    - "paper": Algorithm 1. The numerator is a sum over s tokens sampled by |v|^2, each with weight mu / (s |v|^2), the
      denominator one over the clusters' t sampled keys, each with weight n_i / t. Only here the theorem holds, and
      only while delta has not grown. Three quarters of the slots are samples, which was better than half at norms of
      4, where the numerator is the noisier sum, and the rest hold clusters with t = 1.
    - "self_normalised": the sampled tokens feed both sums, and there are no clusters.
    - "mean_value" (ours, the default): a cluster is its mean key, its mean value and the number of its tokens. Tokens
      join the nearest mean within delta. With t > 0 a cluster shows t sampled tokens instead, whose values are shifted so that their
      mean is the cluster's: the sampled values are a control variate.

    The error of "mean_value" has no bound that is proved. Like `ClusterGen` it blurs one token's own value where tokens
    with like keys carry different values.

    Attributes:
        budget: slots per head (a slot is a key and a value), sinks and recent tokens included. None: all sizes that the
            variant needs are given.
        sinks, recent: tokens always kept.
        variant: see above.
        samples, clusters: s and m, instead of the budget's shares.
        per_cluster: t; 1 in "paper", 0 in "mean_value".
        delta: the start of the clusters' radius (delta), in units of the keys; None takes it from the data.
        growth: the least factor by which delta grows when the clusters run out: 2 in "paper", as in the guarantees,
            1.02 in "mean_value". Nearer to 1 leaves fewer slots empty and makes the table grow so much more often: at
            1.02 some 40 times in a prompt of 4,032 tokens where 1.1 makes it 10.
        compact_every: tokens between compactions; until then new tokens are all read.

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
        """What is given, and the budget's division for what is not.

        Raises:
            ValueError: for a budget that leaves no slots, or sizes that are missing or mean nothing to the variant.
        """
        variant, budget, samples, clusters = self.variant, self.budget, self.samples, self.clusters
        if variant == "mean_value" and samples is not None:
            raise ValueError(
                f"samples={samples}: 'mean_value' keeps none; per_cluster= gives it samples of each cluster"
            )
        if variant == "self_normalised" and (clusters, self.per_cluster) != (None, None):
            raise ValueError(f"clusters={clusters}, per_cluster={self.per_cluster}: 'self_normalised' has no clusters")
        per_cluster = (1 if variant == "paper" else 0) if self.per_cluster is None else self.per_cluster
        # Half slots: a key alone takes one, a key and a value two.
        halves = {"mean_value": 2 + 2 * per_cluster, "self_normalised": 0, "paper": 1 + per_cluster}[variant]
        wants_samples, wants_clusters = variant != "mean_value", variant != "self_normalised"
        if budget is None:
            missing = {"samples": wants_samples and samples is None, "clusters": wants_clusters and clusters is None}
            if any(missing.values()):
                raise ValueError(f"budget=None: give {' and '.join(name for name in missing if missing[name])} instead")
            return Sizes(samples or 0, clusters or 0, per_cluster)
        free = budget - self.sinks - self.recent
        if samples is None and wants_samples:
            share = 3 * free // 4 if wants_clusters else free
            samples = round_to_tiles(share if clusters is None else (2 * free - clusters * halves) // 2)
        samples = samples or 0
        if clusters is None and wants_clusters:
            clusters = round_to_tiles(2 * (free - samples) // halves)
        clusters = clusters or 0
        empty = (wants_samples and samples < 1) or (wants_clusters and clusters < 1)
        if empty or 2 * samples + clusters * halves > 2 * free:
            raise ValueError(
                f"budget={budget} leaves {free} slots beside sinks and recent tokens; samples={samples} and "
                f"clusters={clusters} of {halves / 2:g} slots each do not fit"
            )
        return Sizes(samples, clusters, per_cluster)

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> SubGenState:
        """Returns an empty window and empty structures."""
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
        """Fills the window and streams the tokens between sinks and recent ones through the structures."""
        window = windows.fill(state.window, prompt)
        middle = windows.middle_mask(window, prompt.keys.shape[2])
        return SubGenState(window, structures.fill(state.streams, prompt.keys, prompt.values, middle))

    def segments(self, state: SubGenState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window and the structures."""
        streams = structures.stream_segments(state.streams, numerator_only=self.variant == "paper")
        return (*windows.window_segments(state.window), *streams)

    def compact(self, state: SubGenState, new: Tokens) -> SubGenState:
        """Slides the window; tokens that leave it stream through the structures."""
        window, left = windows.slide(state.window, new)
        return SubGenState(window, structures.extend_all(state.streams, left.keys, left.values, left.present))
