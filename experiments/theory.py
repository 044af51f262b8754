"""Compares the papers' bounds with measurements on synthetic streams.

    python -m experiments.theory
    python -m experiments.theory --measure discrepancy --seeds 40

- `discrepancy` (BalanceKV, Theorem 3.2): SoftmaxBalance gives every key a sign so that the signed sum of
  exp(<k_j, q> / sqrt(D)) is small for all queries: logarithmic in the number n of keys, while random signs give
  sqrt(n). The figure is the maximum over new queries, divided by the largest term, exp(norm^2 / sqrt(D)).
- `samples` (SubGen, Theorem 1): the relative error of attention should decrease as s^-1/2 with the s sampled pairs of
  the numerator, and as t^-1/2 with the t samples per cluster of the denominator; the other sum is exact.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from experiments.common import streams
from experiments.common.flags import Flags, repeatable, run_command
from experiments.common.output import Figure, figure, print_figures, write_figures
from experiments.common.statistics import Estimate, log_slope, mean_interval
from kvjax.methods.balancekv import balance
from kvjax.methods.subgen import cluster_table, reservoir

FAILURE = 0.01  # probability of failure in the theorem's constant c = 30 log(n / delta)
PAIRS = (64, 128, 256, 512, 1024)  # s
SAMPLES_PER_CLUSTER = (2, 4, 8, 16, 32)  # t
CLUSTERS = 64
DRAWS = 4  # structures per seed, whose errors are averaged
BALANCED, RANDOM = "softmax_balance", "random signs"


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of a measurement."""

    measure: tuple[str, ...] = repeatable("discrepancy", "samples", choices=("discrepancy", "samples"))
    seeds: int = 20  # Number of seeds.
    queries: int = 64  # Queries per seed.
    keys: int = 8192  # Keys of the longest stream.
    head_dim: int = 128  # Dimensions of the streams of `samples`.
    stream: tuple[str, ...] = repeatable("tight", "drift", "low_rank", choices=streams.SYNTHETIC)  # Of `samples`.
    norm: float = 4.0  # Norm of keys and queries of `samples`.
    walk: tuple[str, ...] = repeatable("16,1,1", "16,1,theorem", "16,3,1", "16,6,1", "128,15,1", "128,15,theorem")
    """Dimensions, norm and constant c (a number, or "theorem") of `discrepancy`; repeatable."""
    output_dir: pathlib.Path = pathlib.Path("build/theory")  # Directory of the figures.


class Walk(NamedTuple):
    """A balanced walk on random keys.

    Attributes:
        head_dim: dimensions of the keys.
        norm: norm of keys and queries.
        c: constant of the walk; None for the theorem's.
    """

    head_dim: int
    norm: float
    c: float | None


def parse_walk(text: str) -> Walk:
    """Returns the walk of a text "DIMENSIONS,NORM,C".

    Raises:
        ValueError: if the text is invalid.
    """
    try:
        head_dim, norm, c = text.split(",")
        return Walk(int(head_dim), float(norm), None if c == "theorem" else float(c))
    except ValueError as error:
        raise ValueError(f"walk={text} must be dimensions, norm and c, such as 16,1,1 or 16,1,theorem") from error


def measure_discrepancy(options: Options) -> list[Figure]:
    """Returns discrepancies of the walk and of random signs, their ratios, and their exponents in n."""
    sizes = tuple(256 * 2**i for i in range(int(np.log2(options.keys / 256)) + 1))
    figures = []
    for text in options.walk:
        series = discrepancy_series(parse_walk(text), range(options.seeds), sizes, options.queries)
        for name, values in series.items():
            labels = {"line": f"{text}: {name}", "walk": text, "signs": name}
            figures += sweep("discrepancy", "n", sizes, values, labels)
        logs = mean_interval(np.log(series[BALANCED][:, -1] / series[RANDOM][:, -1]))
        ratio = Estimate(*np.exp(logs).tolist())
        figures.append(figure("ratio", ratio, n="ratio", line=f"{text}: {BALANCED}", walk=text, signs=BALANCED))
    print_figures(f"Discrepancy by number of keys, {options.seeds} seeds", figures, "line", "n")
    return figures


def sweep(
    metric: str, size: str, sizes: Sequence[int], values: Float[np.ndarray, "R S"], labels: dict[str, Any]
) -> list[Figure]:
    """Returns the figures of a metric at every size, and its exponent."""
    pairs = zip(sizes, values.T, strict=True)
    figures = [figure(metric, mean_interval(of_size), **{size: one}, **labels) for one, of_size in pairs]
    return [*figures, figure("exponent", log_slope(sizes, values), **{size: "exponent"}, **labels)]


def discrepancy_series(
    walk: Walk, seeds: Sequence[int], sizes: tuple[int, ...], queries: int
) -> dict[str, Float[np.ndarray, "R S"]]:
    """Returns the discrepancy of the walk and of random signs after every number of keys, for every seed.

    Args:
        walk: the walk.
        seeds: the seeds.
        sizes: numbers of keys.
        queries: number of queries.

    Returns:
        The discrepancies; both kinds of signs use the same random numbers.
    """
    drawn = streams.synthetic("iid", seeds, sizes[-1], queries, walk.head_dim).scaled(walk.norm)
    c = balance.walk_constant(sizes[-1], FAILURE) if walk.c is None else walk.c
    series: dict[str, list[np.ndarray]] = {BALANCED: [], RANDOM: []}
    for seed, keys, asked in zip(seeds, drawn.keys[:, :, 0], drawn.queries[:, :, 0], strict=True):
        uniforms = jax.random.uniform(jax.random.key(seed), keys.shape[:1])
        signs = {BALANCED: walk_signs(uniforms, keys, c, walk.norm), RANDOM: jnp.where(uniforms < 0.5, 1.0, -1.0)}
        for name, of_keys in signs.items():
            series[name].append(np.asarray(discrepancies(of_keys, keys, asked, sizes)))
    return {name: np.stack(values) for name, values in series.items()}


@functools.partial(jax.jit, static_argnames=("c", "norm"))
def walk_signs(uniforms: Float[Array, "n"], keys: Float[Array, "n D"], c: float, norm: float) -> Float[Array, "n"]:
    """Returns the signs of SoftmaxBalance for the denominator, where every value is 1."""
    return balance.softmax_signs(uniforms, keys, None, jnp.ones(keys.shape[0]), c=c, key_norm=norm)[0]


@functools.partial(jax.jit, static_argnames=("sizes",))
def discrepancies(
    signs: Float[Array, "n"], keys: Float[Array, "n D"], queries: Float[Array, "Q D"], sizes: tuple[int, ...]
) -> Float[Array, "S"]:
    """Returns the maximum over queries of the absolute signed sum over the first n keys, for every n."""
    squared_norm = jnp.sum(queries[0] ** 2)
    terms = jnp.exp((queries @ keys.T - squared_norm) / jnp.sqrt(keys.shape[1])) * signs
    return jnp.max(jnp.abs(jnp.stack([jnp.sum(terms[:, :size], axis=1) for size in sizes])), axis=1)


def measure_samples(options: Options) -> list[Figure]:
    """Returns errors of SubGen's two sums by the number of samples, and their exponents."""
    swept: dict[str, tuple[Callable[..., Any], Sequence[int]]] = {
        "s": (numerator_error, PAIRS),
        "t": (denominator_error, SAMPLES_PER_CLUSTER),
    }
    rng = jax.vmap(jax.random.key)(jnp.arange(options.seeds))
    figures = []
    for name in options.stream:
        drawn = streams.synthetic(name, range(options.seeds), options.keys, options.queries, options.head_dim)
        scaled = drawn.scaled(options.norm)
        inputs = [jnp.asarray(part[:, :, 0]) for part in (scaled.keys, scaled.values, scaled.queries)]
        for parameter, (error, sizes) in swept.items():
            measured = np.stack([np.asarray(mean_errors(error, size, rng, *inputs)) for size in sizes], axis=1)
            labels = {"line": f"{name}, {parameter}", "stream": name, "parameter": parameter, "norm": options.norm}
            figures += sweep("relative_error", "size", sizes, measured, labels)
    print_figures(f"Error by number of samples, {options.keys} tokens, {options.seeds} seeds", figures, "line", "size")
    return figures


@functools.partial(jax.jit, static_argnames=("error", "size"))
def mean_errors(
    error: Callable[..., Any],
    size: int,
    rng: Key[Array, "R"],
    keys: Float[Array, "R n D"],
    values: Float[Array, "R n D"],
    queries: Float[Array, "R Q D"],
) -> Float[Array, "R"]:
    """Returns the mean of `error` over `DRAWS` structures of a size, for every seed."""

    def of_seed(args):
        key, *tokens = args
        return jnp.mean(jax.vmap(lambda draw: error(size, draw, *tokens))(jax.random.split(key, DRAWS)))

    return jax.lax.map(of_seed, (rng, keys, values, queries))


def numerator_error(
    pairs: int, rng: Array, keys: Float[Array, "n D"], values: Float[Array, "n D"], queries: Float[Array, "Q D"]
) -> Float[Array, ""]:
    """Returns the mean relative error of attention with a sampled numerator and the exact denominator."""
    state = reservoir.init_reservoir(pairs, keys.shape[1], values.shape[1], keys.dtype, rng)
    state = reservoir.extend(state, keys, values, jnp.sum(values**2, axis=1))
    estimate = streams.weighted_terms(queries, state.keys, reservoir.log_weights(state)) @ state.values
    exact = streams.weighted_terms(queries, keys) @ values
    return jnp.mean(jnp.linalg.norm(estimate - exact, axis=1) / jnp.linalg.norm(exact, axis=1))


def denominator_error(
    samples: int, rng: Array, keys: Float[Array, "n D"], values: Float[Array, "n D"], queries: Float[Array, "Q D"]
) -> Float[Array, ""]:
    """Returns the mean relative error of attention with a sampled denominator and the exact numerator."""
    del values
    table = cluster_table.init_cluster_table(CLUSTERS, keys.shape[1], keys.dtype, rng, samples=samples)
    table = cluster_table.extend(table, keys)
    assert table.samples is not None
    weights = cluster_table.log_sample_weights(table).reshape(-1)
    terms = streams.weighted_terms(queries, table.samples.reshape(-1, keys.shape[1]), weights)
    exact = jnp.sum(streams.weighted_terms(queries, keys), axis=1)
    return jnp.mean(jnp.abs(exact / jnp.sum(terms, axis=1) - 1))


def main(options: Options) -> None:
    """Prints the tables and writes the figures."""
    measures = {"discrepancy": measure_discrepancy, "samples": measure_samples}
    for name in options.measure:
        write_figures(options.output_dir / f"{name}.json", measures[name](options))


if __name__ == "__main__":
    run_command(main, Options)
