"""How the error of SubGen's two sums falls with their samples, each with the other sum exact.

    python -m experiments.subgen_rates

The numerator is estimated from s pairs of the reservoir, the denominator from t keys of each of a table's clusters
(SubGen, Algorithm 1, lines 29 and 30). Its theorem asks for s and t of the order 1 / epsilon^2, so that the relative
error of attention should fall as s^-1/2 and t^-1/2: a slope is fitted for every seed.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key
from tqdm import tqdm

from experiments.common import cases, results, streams
from experiments.common.driven import reservoir_numerator, table_denominator, update_reservoir
from experiments.common.options import Experiment, each
from experiments.common.results import Row
from kvjax.structures import cluster_table, reservoir

NAME = "subgen_rates"
PAIRS = (64, 128, 256, 512, 1024, 2048)  # s
KEYS_PER_CLUSTER = (2, 4, 8, 16, 32, 64)  # t
CLUSTERS = 64
DRAWS = 4  # structures per seed, whose errors are averaged


@dataclasses.dataclass(frozen=True)
class Options(cases.Streams):
    """Options of this experiment."""

    stream: tuple[str, ...] = each("tight", "drift", "low_rank", choices=streams.SYNTHETIC)  # streams; repeatable
    norm: tuple[float, ...] = each(4.0)
    seeds: int = 20  # seeds, from --seed on

    QUICK: ClassVar[dict[str, Any]] = {**cases.Streams.QUICK, "seeds": 4}


def run(options: Options) -> list[Row]:
    """The rows of every stream, number of samples and sum."""
    swept: dict[str, tuple[Callable[..., Float[Array, ""]], Sequence[int]]] = {
        "s": (reservoir_error, PAIRS),
        "t": (table_error, KEYS_PER_CLUSTER),
    }
    rows: list[Row] = []
    rng = jax.vmap(jax.random.key)(jnp.asarray(options.seeds_of(options.seeds)))
    for case in tqdm(cases.cases(options), desc="streams", leave=False):
        drawn = case.drawn
        inputs = (rng, *(jnp.asarray(part[:, :, 0]) for part in (drawn.keys, drawn.values, drawn.queries)))
        for knob, (error, sizes) in swept.items():
            measured = np.stack([np.asarray(mean_errors(error, size, *inputs)) for size in sizes], axis=1)
            slope = results.log_slope(sizes, measured)
            errors = [results.mean_interval(one) for one in measured.T]
            of: dict[str, Any] = {"policy": "subgen", "variant": "paper", "stream": case.stream, "n": options.seeds}
            of |= {"seed": options.seed, "knob": knob, "norm": case.number}
            rows += [
                results.row(NAME, "synthetic", "relative_error", one, size=size, **of)
                for size, one in zip(sizes, errors, strict=True)
            ]
            rows.append(results.row(NAME, "synthetic", "relative_error_slope", slope, size=None, **of))
    title = f"Error by number of samples, {options.tokens} tokens, {options.seeds} seeds"
    knob_of = lambda row: f"{row.stream}, {row.extra['knob']}"  # noqa: E731
    results.print_rows(title, rows, knob_of, lambda row: str(row.extra["size"] or "slope"))
    return rows


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
    sampled = update_reservoir(sampled, keys, values)
    exact = streams.weighted_terms(queries, keys) @ values
    estimate = reservoir_numerator(sampled, queries)
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
    estimate = table_denominator(table, queries)
    return jnp.mean(jnp.abs(jnp.sum(streams.weighted_terms(queries, keys), axis=1) / estimate - 1))


EXPERIMENT = Experiment(NAME, Options, run)
if __name__ == "__main__":
    EXPERIMENT.main()
