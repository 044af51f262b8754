"""SubGen's structures of one head's stream: a norm-weighted reservoir of tokens and a table of clusters."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.quantization import dequantize
from kvjax.segment import Segment, flatten_slots
from kvjax.state import state
from kvjax.structures import cluster_table, reservoir
from kvjax.structures.cluster_table import ClusterTable, log_counts, log_sample_weights
from kvjax.structures.per_head import per_head
from kvjax.structures.reservoir import WeightedReservoir

PROMPT_BLOCK = 1024  # tokens of a prompt per update


@state
class Streams:
    """One head's structures, for the tokens that left the window."""

    reservoir: WeightedReservoir | None
    table: ClusterTable | None


def extend(
    streams: Streams, keys: Float[Array, "T D"], values: Float[Array, "T D_v"], valid: Bool[Array, "T"]
) -> Streams:
    """Takes the valid ones of T tokens into one head's structures.

    Args:
        streams: one head's structures.
        keys: keys of the tokens.
        values: values of the tokens.
        valid: tokens that count.

    Returns:
        The structures.
    """
    samples, table = streams.reservoir, streams.table
    if samples is not None:
        mass = jnp.sum(jnp.square(values.astype(jnp.float32)), axis=1)
        samples = reservoir.extend(samples, keys, values, jnp.where(valid, mass, 0.0))
    if table is not None:
        table = cluster_table.extend(table, keys, None if table.mean_value is None else values, valid)
    return Streams(samples, table)


def extend_all(
    streams: Streams, keys: Float[Array, "B H T D"], values: Float[Array, "B H T D_v"], valid: Bool[Array, "B T"]
) -> Streams:
    """Takes a few tokens into the structures of all rows and heads.

    Accelerators update all streams in parallel. A CPU updates them one after the other, because in parallel every
    stream would repeat the work of the one whose table is full.

    Args:
        streams: structures of all rows and heads.
        keys: keys of the tokens.
        values: values of the tokens.
        valid: tokens that count.

    Returns:
        The structures.
    """
    in_parallel = per_head(extend, 0, 0, 0, None)
    return jax.lax.platform_dependent(streams, keys, values, valid, cpu=fill, default=in_parallel)


def fill(
    streams: Streams, keys: Float[Array, "B H T D"], values: Float[Array, "B H T D_v"], valid: Bool[Array, "B T"]
) -> Streams:
    """Takes a prompt's valid tokens in, one stream after the other.

    Args:
        streams: structures of all rows and heads.
        keys: keys of the prompt.
        values: values of the prompt.
        valid: tokens that count.

    Returns:
        The structures.
    """
    batch, heads, tokens, _ = keys.shape
    block = min(PROMPT_BLOCK, tokens)
    padding = -tokens % block
    valid = jnp.pad(valid, ((0, 0), (0, padding))).reshape(batch, -1, block)

    def blocks(x: Float[Array, "B H T D"]) -> Float[Array, "B H n block D"]:
        """Divides the tokens of `x` into padded blocks."""
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0)))
        return x.reshape(batch, heads, -1, block, x.shape[3])

    def fill_row(row: tuple[Streams, Array, Array, Array]) -> Streams:
        """Extends the structures of one `row`, head by head and block by block."""
        streams, keys, values, valid = row

        def extend_block(streams: Streams, block: tuple[Array, Array, Array]) -> tuple[Streams, None]:
            return extend(streams, *block), None

        def fill_head(head: tuple[Streams, Array, Array]) -> Streams:
            return jax.lax.scan(extend_block, head[0], (head[1], head[2], valid))[0]

        return jax.lax.map(fill_head, (streams, keys, values))

    return jax.lax.map(fill_row, (streams, blocks(keys), blocks(values), valid))


def stream_segments(streams: Streams, *, numerator_only: bool) -> tuple[Segment, ...]:
    """Returns the structures of all rows and heads as attention reads them.

    Args:
        streams: structures of all rows and heads.
        numerator_only: whether sampled tokens add to the numerator alone (SubGen's Algorithm 1). Clusters without
            values add to the denominator alone.

    Returns:
        At most two segments.
    """
    samples, table = streams.reservoir, streams.table
    segments = []
    if samples is not None:
        weights = per_head(reservoir.log_weights)(samples)
        log_den = jnp.full_like(weights, -jnp.inf) if numerator_only else None
        segments.append(Segment(samples.keys, samples.values, log_num=weights, log_den=log_den))
    if table is None:
        return tuple(segments)
    if table.samples is None:
        weights = per_head(log_counts)(table)
        return *segments, Segment(table.centers, table.mean_value, log_num=weights)
    weights = per_head(log_sample_weights)(table)
    keys, weights = flatten_slots(table.samples), weights.reshape(*weights.shape[:2], -1)
    if table.mean_value is None or table.sample_values is None:
        return *segments, Segment(keys, None, log_den=weights)
    # A control variate: sampled values are shifted so that their mean is the cluster's.
    sampled = dequantize(table.sample_values).astype(jnp.float32)
    shift = dequantize(table.mean_value) - jnp.mean(sampled, axis=3)
    return *segments, Segment(keys, flatten_slots(sampled + shift[:, :, :, None]), log_num=weights)
