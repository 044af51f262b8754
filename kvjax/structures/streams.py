"""SubGen's structures of one head's stream together: a norm-weighted reservoir of tokens, and a table of clusters."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.per_head import per_head
from kvjax.segment import Segment, Spread
from kvjax.state import state
from kvjax.structures import cluster_table, reservoir
from kvjax.structures.cluster_table import ClusterTable, log_counts, log_sample_weights
from kvjax.structures.reservoir import WeightedReservoir
from kvjax.structures.spread import Moments, update_moments

PROMPT_BLOCK = 1024  # tokens of a prompt per update


@state
class Streams:
    """What one head keeps of the tokens that left the window."""

    reservoir: WeightedReservoir | None
    table: ClusterTable | None
    moments: Moments | None


def take(
    streams: Streams, keys: Float[Array, "T D"], values: Float[Array, "T D_v"], valid: Bool[Array, "T"]
) -> Streams:
    """One head's structures with the valid ones of T more tokens."""
    samples, table, moments = streams.reservoir, streams.table, streams.moments
    if samples is not None:
        mass = jnp.sum(jnp.square(values.astype(jnp.float32)), axis=1)
        samples = reservoir.extend(samples, keys, values, jnp.where(valid, mass, 0.0))
    if table is not None:
        extended = cluster_table.extend(table, keys, None if table.mean_value is None else values, valid)
        if moments is not None:
            moments = update_moments(moments, table, extended, keys, values, valid)
        table = extended
    return Streams(samples, table, moments)


def take_all(
    streams: Streams, keys: Float[Array, "B H T D"], values: Float[Array, "B H T D_v"], valid: Bool[Array, "B T"]
) -> Streams:
    """All rows' and heads' structures with a few more tokens, as `take` takes them: side by side where devices are made
    for that. A core would widen every table whenever the clusters of one run out."""
    side_by_side = per_head(take, 0, 0, 0, None)
    return jax.lax.platform_dependent(streams, keys, values, valid, cpu=fill, default=side_by_side)


def fill(
    streams: Streams, keys: Float[Array, "B H T D"], values: Float[Array, "B H T D_v"], valid: Bool[Array, "B T"]
) -> Streams:
    """Takes in a prompt's valid tokens, one stream after the other: side by side, all would wait whenever the clusters
    of one run out."""
    batch, heads, tokens, _ = keys.shape
    block = min(PROMPT_BLOCK, tokens)
    padding = -tokens % block
    valid = jnp.pad(valid, ((0, 0), (0, padding))).reshape(batch, -1, block)

    def blocks(x: Float[Array, "B H T D"]) -> Float[Array, "B H n block D"]:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0)))
        return x.reshape(batch, heads, -1, block, x.shape[3])

    def of_row(row: tuple) -> Streams:
        streams, keys, values, valid = row
        add = lambda streams, block: (take(streams, *block), None)  # noqa: E731
        of_head = lambda head: jax.lax.scan(add, head[0], (head[1], head[2], valid))[0]  # noqa: E731
        return jax.lax.map(of_head, (streams, keys, values))

    return jax.lax.map(of_row, (streams, blocks(keys), blocks(values), valid))


def shown(
    streams: Streams, feeds: Literal["both", "numerator"], value_center: Float[Array, "B H D_v"] | None = None
) -> tuple[Segment, ...]:
    """The structures of all rows and heads as attention reads them.

    Args:
        feeds: which sums sampled tokens add to. Clusters that know no values add to the denominator alone.
        value_center: float32, what the clusters' mean values lack in the mean.
    """
    samples, table, moments = streams.reservoir, streams.table, streams.moments
    segments = []
    if samples is not None:
        weights = per_head(reservoir.log_weights)(samples)
        segments.append(Segment(samples.keys, samples.values, log_num=weights, feeds=feeds))
    if table is None:
        return tuple(segments)
    if table.samples is None:
        spread = None if moments is None else Spread(moments.scale, moments.mean_key, moments.mean_value)
        weights = per_head(log_counts)(table)
        center = value_center if spread is None or value_center is None else spread.scale[..., None] * value_center
        shows = Segment(table.centers, table.mean_value, log_num=weights, spread=spread, value_center=center)
        return *segments, shows
    flat = lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:])  # noqa: E731
    keys, weights = flat(table.samples), flat(per_head(log_sample_weights)(table))
    if table.mean_value is None or table.sample_values is None:
        return *segments, Segment(keys, None, log_den=weights, feeds="denominator")
    drawn = table.sample_values.astype(jnp.float32)
    shift = table.mean_value - jnp.mean(drawn, axis=3)
    return *segments, Segment(keys, flat(drawn + shift[:, :, :, None]), log_num=weights, value_center=value_center)
