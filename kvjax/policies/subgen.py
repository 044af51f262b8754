"""SubGen: streaming attention from a norm-weighted sample of the tokens and a clustering of the keys.

What the papers' experiments run, k-center on the prompt, is the policy `clustergen`; this is the streaming algorithm
of their theorems, in sublinear memory at every step, and two variants that do better in practice.
"""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key

from kvjax import cluster_table, reservoir
from kvjax.attention import Partials, attend, attend_segment, merge
from kvjax.cluster_table import ClusterTable, init_cluster_table, log_counts, log_sample_weights
from kvjax.policies.windowed import init_windowed, over_heads, stream_keys, windowed_policy
from kvjax.policy import CachePolicy, whole_tiles
from kvjax.reservoir import WeightedReservoir, init_reservoir
from kvjax.segment import Segment, segment
from kvjax.staging import Block, between, check_budget, check_period, init_window, window_segments
from kvjax.state import BATCH, HEAD_DIM, KV_HEADS, array, cache_bytes, stacked, state

Variant = Literal["mean_value", "self_normalised", "paper"]

# Tokens of a prompt per update of the structures.
PROMPT_BLOCK = 1024

# Dimensions to which keys and values are projected to estimate how they vary together.
SKETCH = 16


@state
class Spread:
    """How far one stream's clusters are to be spread about their mean, so that keys and values vary together over the
    clusters as they do over the tokens.

    Clusters lose what varies inside them: with keys and values that follow a common law, a mean key and a mean value
    tell of C_b = Cov(mean value, mean key) where the tokens have C = Cov(value, key), and to first order attention is
    the mean value plus C q. Scaling both means' deviations by sqrt(1 + lambda) with C - C_b ~ lambda C_b repairs it.
    """

    # float32 mean over the tokens of (A value)(B key)^T with fixed random A, B
    moment: Float[Array, "f f"] = array("sketch", "sketch")
    mean_key: Float[Array, "D"] = array(HEAD_DIM)  # float32, of all tokens in clusters
    mean_value: Float[Array, "D"] = array(HEAD_DIM)  # float32
    scale: Float[Array, ""] = array()  # float32 sqrt(1 + lambda), at least 1


@state
class Streams:
    """What the policy keeps beside the window, for every row and kv head."""

    reservoir: WeightedReservoir | None = stacked(BATCH, KV_HEADS)
    table: ClusterTable | None = stacked(BATCH, KV_HEADS)
    spread: Spread | None = stacked(BATCH, KV_HEADS)


def subgen(
    budget: int | None,
    *,
    sinks: int = 4,
    recent: int = 64,
    period: int = 64,
    variant: Variant = "mean_value",
    samples: int | None = None,
    clusters: int | None = None,
    per_cluster: int | None = None,
    delta: float | None = None,
    growth: float | None = None,
    spread: bool = True,
) -> CachePolicy:
    """Keeps sinks and recent tokens; all others go, once they leave the window, through SubGen's structures.

    Variants, with s samples, m clusters and t samples per cluster:

    - "paper": Algorithm 1. The numerator is a sum over s tokens sampled by |v|^2, each with weight mu / (s |v|^2), the
      denominator one over the clusters' t sampled keys, each with weight n_i / t. Only here the theorem holds, and
      only while delta has not grown. Three quarters of the slots are samples, which was better than half at
      norms of 4, where the numerator is the noisier sum, and the rest hold clusters with t = 1.
    - "self_normalised": the sampled tokens feed both sums, and there are no clusters.
    - "mean_value" (the default): a cluster is its mean key, its mean value and the number of its tokens. Tokens join
      the nearest mean within delta. With t = 0, which is best at equal bytes wherever it was measured, the means are
      spread about their overall mean (`Spread`). With t > 0 a cluster shows t sampled tokens instead, whose values are
      shifted so that their mean is the cluster's: sum_i (n_i / t) sum_j e_ij (v_ij - mean_j v_ij + vbar_i), which is
      sum_i n_i [ebar_i vbar_i + (1 / t) sum_j (e_ij - ebar_i)(v_ij - vbar_i)], the sampled values as a control variate.

    The error of `mean_value` has no bound that is proved; it is the best of the three on every stream tried. Like
    `clustergen` it blurs one token's own value where tokens with like keys carry different values.

    Args:
        budget: slots per head (a slot is a key and a value), sinks and recent tokens included. None: all sizes that the
            variant needs are given.
        sinks, recent: tokens always kept.
        period: tokens between compactions.
        variant: see above.
        samples: s instead of the budget's share.
        clusters: m instead of the budget's share.
        per_cluster: t; 1 in "paper", 0 in "mean_value".
        delta: the start of the clusters' radius, in units of the keys; None takes it from the data.
        growth: the least factor by which delta grows when the clusters run out: 2 in "paper", as in the guarantees,
            1.1 in "mean_value", so that the table stays nearly full.
        spread: whether "mean_value" with t = 0 spreads its clusters.

    Raises:
        ValueError: for a budget that leaves no slots, sizes that are missing, or an unknown variant.
    """
    sizes = _sizes(variant, budget, sinks + recent, samples, clusters, per_cluster)
    check_budget(sinks + recent + 1 if budget is None else budget, sinks, recent)
    check_period(period)
    growth = (2.0 if variant == "paper" else 1.1) if growth is None else growth
    means = variant == "mean_value"
    spread = spread and means and not sizes.per_cluster

    def init(spec, row_keys):
        dim = spec.head_dim

        def one(rng: Key[Array, ""]) -> Streams:
            of_samples, of_clusters = jax.random.split(rng)
            return Streams(
                reservoir=init_reservoir(sizes.samples, dim, dim, spec.dtype, of_samples) if sizes.samples else None,
                table=init_cluster_table(
                    sizes.clusters,
                    dim,
                    spec.dtype,
                    of_clusters,
                    samples=sizes.per_cluster,
                    value_dim=dim if means else None,
                    moving=means,
                    delta=delta,
                    growth=growth,
                )
                if sizes.clusters
                else None,
                spread=_init_spread(dim) if spread else None,
            )

        rngs = stream_keys(row_keys, spec.kv_heads)
        window = init_window(spec, sinks + recent, sinks, recent, period)
        return init_windowed(spec, window, over_heads(one)(rngs))

    def select(state, keys, values, queries):
        batch, tokens = keys.shape[:2]
        block = min(PROMPT_BLOCK, tokens)
        padding = -tokens % block
        valid = jnp.pad(between(state.window, tokens), ((0, 0), (0, padding))).reshape(batch, -1, block)

        def blocks(x: Float[Array, "B T H D"]) -> Float[Array, "B H n block D"]:
            x = jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, padding), (0, 0)))
            return x.reshape(*x.shape[:2], -1, block, x.shape[3])

        def row(of):
            streams, keys, values, valid = of
            take = lambda now, block: (_take(now, *block), None)  # noqa: E731
            head = lambda of: jax.lax.scan(take, of[0], (of[1], of[2], valid))[0]  # noqa: E731
            return jax.lax.map(head, (streams, keys, values))

        # One stream after the other: side by side, all would wait whenever the clusters of one run out.
        streams = jax.lax.map(row, (state.selection, blocks(keys), blocks(values), valid))
        return dataclasses.replace(state, selection=streams)

    def absorb(state, block: Block):
        take = over_heads(_take, 0, 0, 0, None)
        return dataclasses.replace(state, selection=take(state.selection, block.keys, block.values, block.present))

    def segments(state, queries):
        return *window_segments(state.window, queries=queries), *_segments(state.selection, variant)

    def attend_spread(state, query, causal=False):
        queries = query.shape[1] if causal else None
        streams: Streams = state.selection
        (clusters,) = _segments(streams, variant)
        spread = jax.tree.map(lambda part: jnp.repeat(part, query.shape[2] // part.shape[1], axis=1), streams.spread)
        seen = _spread_out(attend_segment(query * spread.scale[:, None, :, None], clusters), query, spread)
        return merge(attend(query, window_segments(state.window, queries=queries)), seen), state

    policy = windowed_policy(
        f"subgen({variant})", init=init, select=select, absorb=absorb, segments=segments, period=period
    )
    if not spread:
        return policy

    def read_bytes(state):
        spread = state.selection.spread
        return policy.read_bytes(state) + cache_bytes((spread.mean_key, spread.mean_value, spread.scale)).device

    return policy._replace(attend=attend_spread, read_bytes=read_bytes, segments=None)


class SubgenSettings(NamedTuple):
    """Sizes that SubGen's theorem asks for.

    Attributes:
        samples, per_cluster: s and t.
        delta: the clusters' radius that t was computed for.
        vacuous: whether they take no fewer slots than there are tokens, so that an exact cache is smaller.
        message: what was found, for people.
    """

    samples: int
    per_cluster: int
    delta: float
    vacuous: bool
    message: str

    def policy(self, clusters: int, **options) -> CachePolicy:
        """The policy `subgen(variant="paper")` of these sizes, for so many clusters; `options` as there."""
        return subgen(
            None,
            variant="paper",
            samples=self.samples,
            clusters=clusters,
            per_cluster=self.per_cluster,
            delta=self.delta,
            **options,
        )


def subgen_settings(
    epsilon: float,
    *,
    tokens: int,
    head_dim: int,
    query_norm: float,
    delta: float,
    clusters: int = 1,
    doubling: bool = True,
    constant_samples: float = 1.0,
    constant_per_cluster: float = 1.0,
) -> SubgenSettings:
    """s and t for |z - Attn| <= epsilon |softmax|_2 |V|_op with high probability, as SubGen's Theorem 1 has them:

        s = c_s d / epsilon^2,    t = c_t e^(2 delta r) log(n) / epsilon^2

    and e^(4 delta r) where the table may double: after j doublings keys lie within (2 - 2^-j) delta_j of their centre.
    Then `delta` must be the value that delta has reached, not the start.

    Args:
        epsilon: the error, in (0, 1).
        tokens: n.
        head_dim: d.
        query_norm: largest norm of a query before the logits' factor 1 / sqrt(d), which is applied here: r is
            query_norm / sqrt(d), since the papers write logits without that factor.
        delta: radius of the clusters, in units of the keys.
        clusters: how many there are expected to be; it decides only what is vacuous.
        doubling: whether the number of clusters is bounded, as it is in `subgen`.
        constant_samples, constant_per_cluster: c_s and c_t, which the theorem leaves open.

    Raises:
        ValueError: for numbers that cannot be.
    """
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon={epsilon}; it must lie between 0 and 1")
    numbers = {"tokens": tokens, "head_dim": head_dim, "clusters": clusters, "constant_samples": constant_samples}
    for name, number in {**numbers, "constant_per_cluster": constant_per_cluster}.items():
        if number <= 0:
            raise ValueError(f"{name}={number}; it must be positive")
    for name, number in {"query_norm": query_norm, "delta": delta}.items():
        if not number > 0:
            raise ValueError(f"{name}={number}; it must be positive")
    exponent = (4 if doubling else 2) * delta * query_norm / math.sqrt(head_dim)
    samples = math.ceil(constant_samples * head_dim / epsilon**2)
    # Beyond n samples there is nothing left to sample; the exponential need not be computed there.
    log_per_cluster = exponent + math.log(constant_per_cluster * max(math.log(tokens), 1.0) / epsilon**2)
    per_cluster = math.ceil(math.exp(min(log_per_cluster, 40.0)))
    slots = samples + clusters * (1 + per_cluster) / 2
    vacuous = slots >= tokens
    found = (
        f"epsilon={epsilon:g} at n={tokens}, d={head_dim}, |q|={query_norm:g}, delta={delta:g} takes s={samples} "
        f"samples and t={per_cluster:.3g} per cluster (e^{exponent:.3g} of it for the radius), "
        f"{slots:.3g} slots with {clusters} clusters"
    )
    verdict = ": vacuous, an exact cache is smaller" if vacuous else f", {slots / tokens:.1%} of an exact cache"
    return SubgenSettings(samples, per_cluster, delta, vacuous, found + verdict)


class _Sizes(NamedTuple):
    samples: int
    clusters: int
    per_cluster: int


def _sizes(variant, budget, fixed, samples, clusters, per_cluster) -> _Sizes:
    """What is given, and the budget's division for what is not."""
    if variant not in ("mean_value", "self_normalised", "paper"):
        raise ValueError(f"variant={variant!r}; it must be 'mean_value', 'self_normalised' or 'paper'")
    if variant == "mean_value" and samples is not None:
        raise ValueError(f"samples={samples}: 'mean_value' keeps none; per_cluster= gives it samples of each cluster")
    if variant == "self_normalised" and (clusters, per_cluster) != (None, None):
        raise ValueError(f"clusters={clusters}, per_cluster={per_cluster}: 'self_normalised' has no clusters")
    if per_cluster is None:
        per_cluster = 1 if variant == "paper" else 0
    # Half slots: a key alone takes one, a key and a value two.
    halves = {"mean_value": 2 + 2 * per_cluster, "self_normalised": 0, "paper": 1 + per_cluster}[variant]
    wants_samples, wants_clusters = variant != "mean_value", variant != "self_normalised"
    if budget is None:
        if (wants_samples and samples is None) or (wants_clusters and clusters is None):
            raise ValueError(f"budget=None: give {'samples= ' * wants_samples}{'clusters= ' * wants_clusters}instead")
        return _Sizes(samples or 0, clusters or 0, per_cluster)
    free = budget - fixed
    if samples is None and wants_samples:
        share = 3 * free // 4 if wants_clusters else free
        samples = whole_tiles(share if clusters is None else (2 * free - clusters * halves) // 2)
    samples = samples or 0
    if clusters is None and wants_clusters:
        clusters = whole_tiles(2 * (free - samples) // halves)
    clusters = clusters or 0
    if (
        (wants_samples and samples < 1)
        or (wants_clusters and clusters < 1)
        or 2 * samples + clusters * halves > 2 * free
    ):
        raise ValueError(
            f"budget={budget} leaves {free} slots beside sinks and recent tokens; samples={samples} and "
            f"clusters={clusters} of {halves / 2:g} slots each do not fit"
        )
    return _Sizes(samples, clusters, per_cluster)


def _take(streams: Streams, keys: Float[Array, "T D"], values: Float[Array, "T D"], valid: Bool[Array, "T"]) -> Streams:
    """One stream's structures with the valid ones of T more tokens."""
    held, table, spread = streams.reservoir, streams.table, streams.spread
    if held is not None:
        mass = jnp.sum(jnp.square(values.astype(jnp.float32)), axis=1)
        held = reservoir.extend(held, keys, values, jnp.where(valid, mass, 0.0))
    if table is not None:
        taken = cluster_table.extend(table, keys, None if table.mean_value is None else values, valid)
        spread = None if spread is None else _update_spread(spread, table, taken, keys, values, valid)
        table = taken
    return Streams(held, table, spread)


def _segments(streams: Streams, variant: Variant) -> tuple[Segment, ...]:
    shown = []
    if (held := streams.reservoir) is not None:
        feeds: Literal["numerator", "both"] = "numerator" if variant == "paper" else "both"
        shown.append(segment(held.keys, held.values, log_num=over_heads(reservoir.log_weights)(held), feeds=feeds))
    if (table := streams.table) is None:
        return tuple(shown)
    if table.samples is None:
        return *shown, segment(table.centers, table.mean_value, log_num=over_heads(log_counts)(table))
    flat = lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:])  # noqa: E731
    keys, weights = flat(table.samples), flat(over_heads(log_sample_weights)(table))
    if table.mean_value is None or table.sample_values is None:
        return *shown, segment(keys, None, log_den=weights, feeds="denominator")
    drawn = table.sample_values.astype(jnp.float32)
    shift = table.mean_value - jnp.mean(drawn, axis=3)
    return *shown, segment(keys, flat(drawn + shift[:, :, :, None]), log_num=weights)


def _init_spread(dim: int) -> Spread:
    width = min(SKETCH, dim)
    return Spread(jnp.zeros((width, width)), jnp.zeros(dim), jnp.zeros(dim), jnp.ones(()))


def _update_spread(
    spread: Spread,
    before: ClusterTable,
    table: ClusterTable,
    keys: Float[Array, "T D"],
    values: Float[Array, "T D"],
    valid: Bool[Array, "T"],
) -> Spread:
    """The spread after an update that took the table from `before` to `table`."""
    assert table.mean_value is not None
    width, dim = spread.moment.shape[0], keys.shape[1]
    # Any fixed matrices will do: they only meet keys and values that know nothing of them.
    of_values, of_keys = np.random.default_rng(0).normal(size=(2, dim, width)).astype(np.float32)
    total = jnp.maximum(jnp.sum(table.count), 1).astype(jnp.float32)
    dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    project = lambda x, onto, weight: dot(jnp.where(weight[:, None] > 0, x.astype(jnp.float32), 0.0), onto)  # noqa: E731
    fresh = dot(project(values, of_values, valid).T, project(keys, of_keys, valid))
    moment = (spread.moment * jnp.sum(before.count) + fresh) / total

    share = table.count / total
    mean_key, mean_value = dot(share, table.centers), dot(share, table.mean_value)
    means = jnp.outer(dot(mean_value, of_values), dot(mean_key, of_keys))
    weighted = project(table.mean_value, of_values, share) * share[:, None]
    among = dot(weighted.T, project(table.centers, of_keys, share))
    between, within = among - means, moment - among
    # lambda is the regression of what varies inside the clusters on what varies between them, taken as seriously as
    # they agree (by the square of their cosine): without a common law it is noise.
    along, squared = jnp.sum(within * between), jnp.sum(between * between)
    agreement = along**2 / jnp.maximum(squared * jnp.sum(within * within), _TINY)
    excess = jnp.maximum(along / jnp.maximum(squared, _TINY), 0.0) * agreement
    updated = Spread(moment, mean_key, mean_value, jnp.sqrt(1 + excess))
    return jax.tree.map(lambda new, old: jnp.where(jnp.any(valid), new, old), updated, spread)


_TINY = float(np.finfo(np.float32).tiny)


def _spread_out(partials: Partials, query: Float[Array, "B T H_q D"], spread: Spread) -> Partials:
    """Of partials of queries scaled by `spread.scale` over the clusters as they are, those of the queries over the
    clusters spread about their mean: keys m + scale (k - m), and values alike."""
    scale = spread.scale[:, None]
    logit = jnp.einsum("bthd,bhd->bth", query, spread.mean_key) / math.sqrt(query.shape[-1])
    shift = (1 - scale)[..., None] * spread.mean_value[:, None]
    return Partials(
        max=partials.max + (1 - scale) * logit,
        num=scale[..., None] * partials.num + shift * partials.den[..., None],
        den=partials.den,
    )
