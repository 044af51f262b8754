"""How the error of SubGen's two sums falls with their samples, each with the other sum exact.

    python -m experiments.subgen_rates

The numerator is estimated from s pairs of the reservoir, the denominator from t keys of each of a table's clusters
(SubGen, Algorithm 1, lines 29 and 30). Its theorem asks for s and t of the order 1 / epsilon^2, so that the relative
error of attention should fall as s^-1/2 and t^-1/2: a slope is fitted for every seed.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jaxtyping import Array, Float, Key
from tqdm import tqdm

from experiments.common import results, settings, streams
from kvjax.structures import cluster_table, reservoir

NAME = "subgen_rates"
STREAMS = ("tight", "drift", "low_rank")
PAIRS = (64, 128, 256, 512, 1024, 2048)  # s
KEYS_PER_CLUSTER = (2, 4, 8, 16, 32, 64)  # t
CLUSTERS = 64
DRAWS = 4  # structures per seed, whose errors are averaged

settings.define_run()
_SEEDS = flags.DEFINE_integer("seeds", 20, "Seeds, from --seed on.")
_TOKENS = flags.DEFINE_integer("tokens", 8192, "Tokens of a stream.")
_NORM = flags.DEFINE_float("norm", 4, "l2 norm of keys and queries.")
_QUERIES = flags.DEFINE_integer("queries", 64, "Queries per seed.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    count, tokens = (4, 1024) if flags.FLAGS.quick else (_SEEDS.value, _TOKENS.value)
    seeds = range(flags.FLAGS.seed, flags.FLAGS.seed + count)
    swept: dict[str, tuple[Callable[..., Float[Array, ""]], Sequence[int]]] = {
        "s": (reservoir_error, PAIRS),
        "t": (table_error, KEYS_PER_CLUSTER),
    }
    rows, lines = [], []
    for stream in tqdm(STREAMS, desc="streams", leave=False):
        drawn = streams.synthetic(stream, seeds, tokens, _QUERIES.value).scaled(_NORM.value)
        rng = jax.vmap(jax.random.key)(jnp.asarray(seeds))
        inputs = (rng, *(jnp.asarray(part[:, :, 0]) for part in (drawn.keys, drawn.values, drawn.queries)))
        for knob, (error, sizes) in swept.items():
            measured = np.stack([np.asarray(mean_errors(error, size, *inputs)) for size in sizes], axis=1)
            slope = results.log_slope(sizes, measured)
            rows += swept_rows(stream, knob, sizes, measured, slope)
            ends = (results.mean_interval(measured[:, end]) for end in (0, -1))
            lines.append((stream, f"{knob} = {sizes[0]} to {sizes[-1]}", *map(str, ends), str(slope)))
    columns = ("stream", "samples", "error at the fewest [95%]", "at the most", "slope [95%]")
    results.print_table(f"Error by number of samples, {tokens} tokens, {len(seeds)} seeds", columns, lines)
    path = pathlib.Path(flags.FLAGS.output_dir) / f"{NAME}.json"
    results.write_rows(path, rows)
    print(f"Rows: {path}")


@functools.partial(jax.jit, static_argnames=("error", "size"))
def mean_errors(
    error: Callable[..., Float[Array, ""]],
    size: int,
    rng: Key[Array, "R"],
    keys: Float[Array, "R n D"],
    values: Float[Array, "R n D"],
    queries: Float[Array, "R Q D"],
) -> Float[Array, "R"]:
    """The mean error over `DRAWS` structures of that size, for every seed."""

    def of_seed(seed):
        rng, *tokens = seed
        return jnp.mean(jax.vmap(lambda draw: error(size, draw, *tokens))(jax.random.split(rng, DRAWS)))

    return jax.lax.map(of_seed, (rng, keys, values, queries))


def reservoir_error(
    pairs: int,
    rng: Key[Array, ""],
    keys: Float[Array, "n D"],
    values: Float[Array, "n D"],
    queries: Float[Array, "Q D"],
) -> Float[Array, ""]:
    """Mean |z - Attn| / |Attn| where the numerator comes from so many sampled pairs and the denominator is exact."""
    sampled = reservoir.init_reservoir(pairs, keys.shape[1], values.shape[1], keys.dtype, rng)
    sampled = reservoir.extend(sampled, keys, values, jnp.sum(values**2, axis=1))
    exact = streams.weighted_terms(queries, keys) @ values
    estimate = streams.weighted_terms(queries, sampled.keys, reservoir.log_weights(sampled)) @ sampled.values
    return jnp.mean(jnp.linalg.norm(estimate - exact, axis=1) / jnp.linalg.norm(exact, axis=1))


def table_error(
    samples: int,
    rng: Key[Array, ""],
    keys: Float[Array, "n D"],
    values: Float[Array, "n D"],
    queries: Float[Array, "Q D"],
) -> Float[Array, ""]:
    """The same where the denominator comes from so many keys of every cluster and the numerator is exact: then
    |z - Attn| / |Attn| is |tau / tau' - 1| of the exact and the estimated denominator."""
    del values
    table = cluster_table.init_cluster_table(CLUSTERS, keys.shape[1], keys.dtype, rng, samples=samples)
    table = cluster_table.extend(table, keys)
    weights = cluster_table.log_sample_weights(table).reshape(-1)
    assert table.samples is not None
    estimate = jnp.sum(streams.weighted_terms(queries, table.samples.reshape(-1, keys.shape[1]), weights), axis=1)
    return jnp.mean(jnp.abs(jnp.sum(streams.weighted_terms(queries, keys), axis=1) / estimate - 1))


def swept_rows(
    stream: str,
    knob: str,
    sizes: Sequence[int],
    measured: Float[np.ndarray, "R S"],
    slope: results.Estimate,
) -> list[results.Row]:
    """The rows of one sweep: an error per size and the slope."""
    estimates = [
        ("relative_error", size, results.mean_interval(one)) for size, one in zip(sizes, measured.T, strict=True)
    ]
    return [
        results.Row(
            experiment=NAME,
            model="synthetic",
            stream=stream,
            policy="subgen",
            variant="paper",
            metric=metric,
            value=estimate.value,
            ci95_low=estimate.low,
            ci95_high=estimate.high,
            n=len(measured),
            seed=flags.FLAGS.seed,
            extra={"knob": knob, "size": size, "norm": _NORM.value},
        )
        for metric, size, estimate in [*estimates, ("relative_error_slope", None, slope)]
    ]


if __name__ == "__main__":
    app.run(main)
