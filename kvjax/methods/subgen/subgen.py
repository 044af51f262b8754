"""SubGen (Zandieh et al. 2024), Algorithm 1: streaming attention in sublinear memory, with an error bound.

Attention is a quotient of two sums over all tokens: exp(logit) times value (numerator) and exp(logit) (denominator).
Each sum has an estimate from a sample of the stream. Per KV head, for every token:

1. Numerator (`reservoir`): each of s slots takes the token with probability |v|^2 / mu, where mu is the sum of |v|^2 so
   far. A slot then holds any token with probability |v|^2 / mu, and with the weight mu / (s |v|^2) the slots' sum is
   an unbiased estimate.
2. Denominator (`cluster_table`): the key joins the nearest of the cluster centers if it is within delta, and opens a
   cluster otherwise. Each cluster holds t uniform samples of its n_i keys, each with weight n_i / t. Keys of a cluster
   have similar logits for any query, so that few samples suffice.
3. If all m clusters are in use, delta grows, and clusters whose centers are now within delta merge.

Tokens are processed once, in order, and memory depends on s, m and t only. Sinks, a recent window and the tokens with
the smallest values, which the algorithm does not have, are exact; other tokens go to the structures when they leave the
window. Attention merges the segments of the window, of the reservoir (numerator, and a share of the denominator) and of
the sampled keys (the other share of the denominator).

The papers' experiments run k-center on the prompt instead: `ClusterGen`. `SubGenMean` is kvjax's variant.
"""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.methods.subgen import cluster_table, reservoir
from kvjax.methods.subgen.cluster_table import ClusterTable, init_cluster_table, log_sample_weights
from kvjax.methods.subgen.reservoir import WeightedReservoir, init_reservoir
from kvjax.methods.subgen.streams import extend_all, fill
from kvjax.policy import Policy, Prompt, check_above, check_budget, check_min
from kvjax.segment import Segment, SegmentLike, flatten_slots
from kvjax.shared import window as windows
from kvjax.shared.light_values import init_light_norms, keep_lightest, num_light_slots
from kvjax.shared.per_head import per_head, stream_keys
from kvjax.shared.window import Window, init_window
from kvjax.spec import CacheSpec, round_to_tiles
from kvjax.staging import Tokens
from kvjax.state import stacked, state


class Sizes(NamedTuple):
    """The paper's s (samples), m (clusters) and t (samples per cluster), and the slots for light tokens."""

    samples: int
    clusters: int
    per_cluster: int
    light: int

    def fit(self, slots: float) -> bool:
        """Returns whether there is a sample and a cluster, and both take at most this number of slots."""
        samples, clusters, per_cluster, _ = self
        return min(samples, clusters) >= 1 and 2 * samples + clusters * (1 + per_cluster) <= 2 * slots


@state
class Streams:
    """One head's structures, for the tokens that left the window."""

    reservoir: WeightedReservoir  # M of Algorithm 1, for the numerator
    table: ClusterTable  # D of Algorithm 1, for the denominator


@state
class SubGenState:
    """The window, whose selected slots hold light tokens, and one head's structures per row and KV head."""

    window: Window
    light_norms: Float[Array, "B H_kv M"]  # float32, inf in empty slots
    streams: Streams = stacked("B", "H_kv")


@dataclasses.dataclass(frozen=True)
class SubGen(Policy[SubGenState]):
    """Keeps sinks and recent tokens, and the tokens between them as two samples: one per sum of attention.

    The numerator is a sum over s sampled tokens, drawn in proportion to |v|^2, each with weight mu / (s |v|^2) for
    mu = sum |v|^2. The denominator is a sum over m clusters of keys with t sampled keys each, of weight n_i / t.

    `light_values=0, self_normalization=0, sinks=0, recent=0, compact_every=1` is exactly Algorithm 1, as long as the
    keys form at most m clusters of radius delta. The paper opens clusters without a limit. Here delta grows when the
    table is full, as in the doubling algorithm of Charikar et al. (1997), and the bound's exponent grows by the factor
    growth / (growth - 1).

    Two additions make the algorithm work on pretrained models:

    1. The tokens with the smallest values are kept exactly (`light_values`). Among them are attention sinks, which
       samples in proportion to |v|^2 do not contain.
    2. With `self_normalization` = a > 0, the denominator is a D_M + (1 - a) D_C, where D_M is the sum of the weights of
       the numerator's samples and D_C the sum over clusters. Both are unbiased, and so is their mean (if at most
       `light_values` values are zero, which are never sampled). An output is then at most max |v| / a, where Algorithm
       1 has no limit, and the errors of numerator and denominator partly cancel. D_M adds at most a kappa times the
       numerator's bound to the bound of Theorem 1, where kappa is the ratio of the largest to the smallest value norm
       in the stream of the samples; `light_values` reduces it.

    Attributes:
        budget: slots per KV head, sinks and recent tokens included. A slot is a key and a value; a cluster's center
            and its sampled keys take half a slot each. None if `samples` and `clusters` are set.
        sinks: first tokens that are always kept (kvjax's addition; Algorithm 1 has none).
        recent: newest tokens that are always kept. SubGen, section 3.2, keeps recent tokens in its experiments;
            Algorithm 1 has none. The number is kvjax's choice.
        light_values: tokens with the smallest |v| per head that are kept exactly; at most a quarter of the slots that
            sinks and recent tokens leave (kvjax's addition; 0 for none, as in Algorithm 1).
        self_normalization: weight a of the numerator's samples in the denominator, at least 0 and below 1 (kvjax's
            addition; 0 for none, as in Algorithm 1).
        samples: s of Algorithm 1. None for seven eighths of the slots, because the numerator is the noisier sum
            (kvjax's choice; Theorem 1 asks for s of the order d / epsilon^2).
        clusters: m, the number of clusters; None for the remaining slots (the paper's m follows from the data).
        per_cluster: t of Algorithm 1 (1 is kvjax's choice; Theorem 1 asks for e^(2 delta r) log(n) / epsilon^2).
        delta: radius of clusters, in units of keys (delta of Algorithm 1). None to take it from the data: 0 until the
            table is full, then the smallest distance between centers.
        growth: smallest factor by which delta grows when there are too many clusters. It is 2 in Charikar et al.
            (1997), which merges most keys of pretrained models into one cluster; 1.05 leaves more clusters.
        compact_every: tokens between compactions; until then all new tokens are read (kvjax's staging).

    Reference:
        SubGen, Algorithm 1, Lemmas 1 and 2, Theorem 1. `kvjax.theory.subgen_settings` has the theorem's sizes.
    """

    budget: int | None = None
    sinks: int = 4
    recent: int = 64
    light_values: int = 32
    self_normalization: float = 0.75
    samples: int | None = None
    clusters: int | None = None
    per_cluster: int = 1
    delta: float | None = None
    growth: float = 1.05
    compact_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed = self.sinks + self.recent
        check_budget(fixed + 1 if self.budget is None else self.budget, self.sinks, self.recent, self.compact_every)
        check_min(1, samples=self.samples, clusters=self.clusters, per_cluster=self.per_cluster)
        check_min(0, light_values=self.light_values)
        if not 0 <= self.self_normalization < 1:
            raise ValueError(f"self_normalization={self.self_normalization} must be at least 0 and below 1")
        check_above(0, delta=self.delta)
        check_above(1, growth=self.growth)
        _ = self.sizes

    @functools.cached_property
    def sizes(self) -> Sizes:
        """Sizes of the structures; sizes that are not set are shares of the budget.

        Raises:
            ValueError: if sizes do not fit the budget, or are missing.
        """
        if self.budget is None:
            if self.samples is None or self.clusters is None:
                raise ValueError(
                    f"budget=None with samples={self.samples} and clusters={self.clusters}; pass both sizes"
                )
            return Sizes(self.samples, self.clusters, self.per_cluster, self.light_values)
        sizes, free = self._divide(self.budget)
        if not sizes.fit(free):
            raise ValueError(
                f"budget={self.budget} leaves {free} slots for samples={sizes.samples} and clusters={sizes.clusters} "
                f"of {(1 + self.per_cluster) / 2:g} slots each; pass a larger budget or smaller sizes"
            )
        return sizes

    def min_budget(self, spec: CacheSpec | None = None) -> int:
        """Returns the smallest budget into which one sample, one cluster and the sizes that are set fit."""

        def fits(budget: int) -> bool:
            sizes, free = self._divide(budget)
            return sizes.fit(free)

        return next(budget for budget in itertools.count(super().min_budget()) if fits(budget))

    def _divide(self, budget: int) -> tuple[Sizes, int]:
        """Returns sizes for a budget, and its slots for samples and clusters."""
        samples, clusters, halves = self.samples, self.clusters, 1 + self.per_cluster
        slots = budget - self.sinks - self.recent
        light = num_light_slots(self.light_values, slots)
        free = slots - light
        if samples is None:
            samples = round_to_tiles(7 * free // 8 if clusters is None else (2 * free - clusters * halves) // 2)
        if clusters is None:
            clusters = round_to_tiles(2 * (free - samples) // halves)
        return Sizes(samples, clusters, self.per_cluster, light), free

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> SubGenState:
        """Returns an empty window and empty structures for `spec`."""
        sizes = self.sizes
        init_table = functools.partial(
            init_cluster_table, samples=sizes.per_cluster, delta=self.delta, growth=self.growth
        )

        def init_head(rng: Key[Array, ""]) -> Streams:
            """Returns one head's empty structures, which draw from `rng`."""
            reservoir_key, table_key = jax.random.split(rng)
            samples = init_reservoir(sizes.samples, spec.head_dim, spec.value_width, spec.dtype, reservoir_key)
            return Streams(samples, init_table(sizes.clusters, spec.head_dim, spec.dtype, table_key))

        streams = per_head(init_head)(stream_keys(row_keys, spec.kv_heads))
        window = init_window(spec, self.sinks, self.recent, sizes.light)
        return SubGenState(window, init_light_norms(spec, sizes.light), streams)

    def prefill(self, state: SubGenState, prompt: Prompt) -> SubGenState:
        """Fills the window; the prompt's other tokens, except light ones, go to the structures."""
        window = windows.fill(state.window, prompt)
        middle = windows.middle_mask(window, prompt.keys.shape[2])
        window, norms, *others = keep_lightest(window, state.light_norms, prompt.keys, prompt.values, middle)
        return SubGenState(window, norms, fill(_extend, state.streams, *others))

    def segments(self, state: SubGenState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window, the samples of the numerator and the samples of the clusters."""
        samples, table, share = state.streams.reservoir, state.streams.table, self.self_normalization
        weights = per_head(reservoir.log_weights)(samples)
        numerator = Segment(
            samples.keys, samples.values, log_num=weights, log_den=weights + (math.log(share) if share else -jnp.inf)
        )
        cluster_weights = per_head(log_sample_weights)(table)
        assert table.samples is not None
        keys = flatten_slots(table.samples)
        denominator = Segment(keys, None, log_den=cluster_weights.reshape(keys.shape[:3]) + math.log1p(-share))
        _, _, middle = windows.occupancy(state.window)
        light = jnp.minimum(middle, state.window.selected)
        return (*windows.window_segments(state.window, light), numerator, denominator)

    def compact(self, state: SubGenState, new: Tokens) -> SubGenState:
        """Slides the window over new tokens; tokens that leave it, except light ones, go to the structures."""
        window, left = windows.slide(state.window, new)
        window, norms, *others = keep_lightest(window, state.light_norms, left.keys, left.values, left.present)
        return SubGenState(window, norms, extend_all(_extend, state.streams, *others))


def _extend(
    streams: Streams, keys: Float[Array, "T D"], values: Float[Array, "T D_v"], valid: Bool[Array, "T"], **options: int
) -> Streams:
    """Takes the valid ones of T tokens into one head's structures; see `cluster_table.extend` for the options."""
    mass = jnp.where(valid, jnp.sum(jnp.square(values.astype(jnp.float32)), axis=1), 0.0)
    samples = reservoir.extend(streams.reservoir, keys, values, mass)
    return Streams(samples, cluster_table.extend(streams.table, keys, None, valid, **options))
