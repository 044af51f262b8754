"""How evenly BalanceKV's walk splits a stream in two, against fair coins, as the stream grows.

    python -m experiments.discrepancy

SoftmaxBalance (BalanceKV, Algorithm 2) gives every key a sign so that |sum_j sign_j exp(<k_j, q> / sqrt(D))| stays
small for all queries q: logarithmic in the number n of keys (Theorem 3.2), where fair coins give sqrt(n). The
discrepancy measured here is its maximum over fresh queries, in units of the most that one key can add,
exp(norm^2 / sqrt(D)); keys and queries are random directions of one norm. The walk decides online, so that one walk
over the longest stream gives every shorter one. The coins are the walk without its feedback: the same keys, queries and
random numbers, so that where the walk is near to coin flipping the two are nearly equal.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags
from jaxtyping import Array, Float
from tqdm import tqdm

from experiments.common import plots, results, settings, streams
from kvjax.structures import balance

NAME = "discrepancy"
WALK, COINS = "softmax_balance", "fair coins"
# The chance of failure that the theorem's constant c = 30 log(n / delta) is asked for.
FAILURE = 0.01

settings.define_run()
_SEEDS = flags.DEFINE_integer("seeds", 40, "Seeds, from --seed on.")
_QUERIES = flags.DEFINE_integer("queries", 256, "Queries per seed.")
_LONGEST = flags.DEFINE_integer(
    "longest", 16384, "Keys of the longest stream; shorter ones are powers of two from 256."
)
_SETTING = flags.DEFINE_multi_string(
    "setting",
    ["16,1,1", "16,1,theorem", "16,3,1", "16,6,1", "128,15,1", "128,15,theorem"],
    "Dimension of keys, their norm, and the walk's constant c (or `theorem`); repeatable.",
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A walk on keys of one norm."""

    head_dim: int
    norm: float
    c: float | None  # None: the theorem's

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """Raises a ValueError for what is no setting."""
        try:
            head_dim, norm, c = text.split(",")
            return cls(int(head_dim), float(norm), None if c == "theorem" else float(c))
        except ValueError as error:
            raise ValueError(f"--setting={text}: give dimension, norm and c, such as 16,1,1 or 16,1,theorem") from error

    def __str__(self) -> str:
        return f"D = {self.head_dim}, norm {self.norm:g}, " + ("theorem's c" if self.c is None else f"c = {self.c:g}")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    count, longest = (4, 1024) if flags.FLAGS.quick else (_SEEDS.value, _LONGEST.value)
    seeds = range(flags.FLAGS.seed, flags.FLAGS.seed + count)
    sizes = tuple(256 * 2**i for i in range(int(np.log2(longest / 256)) + 1))
    chosen = [Setting.parse(text) for text in _SETTING.value]
    measured = {one: measure(one, seeds, sizes, _QUERIES.value) for one in tqdm(chosen, leave=False)}
    rows = [row for one, found in measured.items() for row in setting_rows(one, found, sizes, flags.FLAGS.seed)]
    show(measured, sizes)
    directory = pathlib.Path(flags.FLAGS.output_dir)
    results.write_rows(directory / f"{NAME}.json", rows)
    plot(directory / f"{NAME}.png", measured, sizes)
    print(f"Rows: {directory / f'{NAME}.json'}   plot: {directory / f'{NAME}.png'}")


def measure(
    setting: Setting, seeds: Sequence[int], sizes: tuple[int, ...], queries: int
) -> dict[str, Float[np.ndarray, "R S"]]:
    """The discrepancy of the walk and of coins after so many keys, for every seed."""
    drawn = streams.synthetic("iid", seeds, sizes[-1], queries, setting.head_dim).scaled(setting.norm)
    found: dict[str, list[np.ndarray]] = {WALK: [], COINS: []}
    for seed, keys, asked in zip(seeds, drawn.keys[:, :, 0], drawn.queries[:, :, 0], strict=True):
        uniforms = jax.random.uniform(jax.random.key(seed), keys.shape[:1])
        signs = {WALK: walk_signs(uniforms, keys, setting), COINS: jnp.where(uniforms < 0.5, 1.0, -1.0)}
        for name, own in signs.items():
            found[name].append(np.asarray(discrepancies(own, keys, asked, sizes)))
    return {name: np.stack(series) for name, series in found.items()}


@functools.partial(jax.jit, static_argnames=("setting",))
def walk_signs(uniforms: Float[Array, "n"], keys: Float[Array, "n D"], setting: Setting) -> Float[Array, "n"]:
    """The signs of SoftmaxBalance for the denominator (every value 1)."""
    tokens = keys.shape[0]
    c = balance.walk_constant(tokens, FAILURE) if setting.c is None else setting.c
    return balance.softmax_signs(uniforms, keys, None, jnp.ones(tokens), c=c, key_norm=setting.norm)[0]


@functools.partial(jax.jit, static_argnames=("sizes",))
def discrepancies(
    signs: Float[Array, "n"], keys: Float[Array, "n D"], queries: Float[Array, "Q D"], sizes: tuple[int, ...]
) -> Float[Array, "S"]:
    """max_q |sum over the first n keys of sign_j exp(<k_j, q> / sqrt(D))| / exp(norm^2 / sqrt(D)), for every n."""
    squared_norm = jnp.sum(queries[0] ** 2)
    terms = jnp.exp((queries @ keys.T - squared_norm) / jnp.sqrt(keys.shape[1])) * signs
    sums = jnp.stack([jnp.sum(terms[:, :size], axis=1) for size in sizes])
    return jnp.max(jnp.abs(sums), axis=1)


def setting_rows(
    setting: Setting, found: dict[str, Float[np.ndarray, "R S"]], sizes: Sequence[int], seed: int
) -> list[results.Row]:
    """Discrepancies of walk and coins by n, their slopes, and the walk's share of the coins'."""

    def row(name: str, metric: str, estimate: results.Estimate, tokens: int | None) -> results.Row:
        return results.Row(
            experiment=NAME,
            model="synthetic",
            stream="iid",
            policy="balancekv",
            variant=name,
            metric=metric,
            value=estimate.value,
            ci95_low=estimate.low,
            ci95_high=estimate.high,
            context_tokens=tokens,
            n=len(found[name]),
            seed=seed,
            extra={"head_dim": setting.head_dim, "norm": setting.norm, "c": setting.c or "theorem"},
        )

    rows = []
    for name, series in found.items():
        rows.append(row(name, "discrepancy_slope", results.log_slope(sizes, series), None))
        for size, values in zip(sizes, series.T, strict=True):
            rows.append(row(name, "discrepancy", results.mean_interval(values), size))
    for size, shares in zip(sizes, log_shares(found).T, strict=True):
        rows.append(row(WALK, "discrepancy_over_coins", results.mean_interval(shares).exponential(), size))
    return rows


def log_shares(found: dict[str, Float[np.ndarray, "R S"]]) -> Float[np.ndarray, "R S"]:
    """log of the walk's discrepancy over the coins', paired by seed."""
    return np.log(found[WALK] / found[COINS])


def show(measured: dict[Setting, dict[str, Float[np.ndarray, "R S"]]], sizes: Sequence[int]) -> None:
    """A line per setting and kind of signs: discrepancies, the slope, and the walk's share of the coins' at the end."""
    shown = (0, len(sizes) // 2, -1)
    lines = []
    for setting, found in measured.items():
        share = results.mean_interval(log_shares(found)[:, -1]).exponential()
        for name, series in found.items():
            means = [f"{series[:, column].mean():.3g}" for column in shown]
            slope = results.log_slope(sizes, series)
            lines.append((str(setting), name, *means, str(slope), str(share) if name == WALK else "-"))
    columns = ("keys", "signs", *(f"n = {sizes[column]}" for column in shown), "slope [95%]", "of the coins' [95%]")
    seeds = len(next(iter(measured.values()))[WALK])
    results.print_table(f"Discrepancy by number of keys, {seeds} seeds", columns, lines)


def plot(
    path: pathlib.Path, measured: dict[Setting, dict[str, Float[np.ndarray, "R S"]]], sizes: Sequence[int]
) -> None:
    """A panel per setting, both axes logarithmic."""
    columns = min(len(measured), 3)
    lines = -(-len(measured) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.5 * columns, 3.5 * lines), squeeze=False)
    for axis, (setting, found) in zip(axes.flat, measured.items(), strict=False):
        for name, series in found.items():
            value, low, high = np.array([results.mean_interval(values) for values in series.T]).T
            axis.errorbar(sizes, value, yerr=(value - low, high - value), marker=".", label=name)
        axis.set(xscale="log", yscale="log", title=str(setting), xlabel="keys", ylabel="discrepancy")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    for axis in axes.flat[len(measured) :]:
        axis.set_visible(False)
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
