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
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tqdm import tqdm

from experiments.common import plots, results, streams
from experiments.common.options import Experiment, Run, each
from experiments.common.results import Row
from kvjax.structures import balance

NAME = "discrepancy"
WALK, COINS = "softmax_balance", "fair coins"
# The chance of failure that the theorem's constant c = 30 log(n / delta) is asked for.
FAILURE = 0.01


@dataclasses.dataclass(frozen=True)
class Options(Run):
    """Options of this experiment."""

    seeds: int = 40  # seeds, from --seed on
    queries: int = 256  # queries per seed
    longest: int = 16384  # keys of the longest stream; shorter ones are powers of two from 256
    setting: tuple[str, ...] = each("16,1,1", "16,1,theorem", "16,3,1", "16,6,1", "128,15,1", "128,15,theorem")
    """Dimension of keys, their norm, and the walk's constant c (or `theorem`); repeatable."""

    QUICK: ClassVar[dict[str, Any]] = {"seeds": 4, "longest": 1024}


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


def run(options: Options) -> list[Row]:
    """The rows of every setting: discrepancies of walk and coins by n, their slopes, the walk's share of the coins'."""
    sizes = tuple(256 * 2**i for i in range(int(np.log2(options.longest / 256)) + 1))
    seeds = options.seeds_of(options.seeds)
    rows: list[Row] = []
    for setting in tqdm([Setting.parse(text) for text in options.setting], leave=False):
        found = measure(setting, seeds, sizes, options.queries)
        row = functools.partial(
            results.row,
            NAME,
            "synthetic",
            policy="balancekv",
            stream="iid",
            n=len(seeds),
            seed=options.seed,
            head_dim=setting.head_dim,
            norm=setting.norm,
            c=setting.c or "theorem",
        )
        # log of the walk's discrepancy over the coins', paired by seed.
        shares = [results.mean_interval(one).exponential() for one in np.log(found[WALK] / found[COINS]).T]
        for name, series in found.items():
            slope = results.log_slope(sizes, series)
            rows.append(row("discrepancy_slope", slope, variant=name))
            for size, values in zip(sizes, series.T, strict=True):
                rows.append(row("discrepancy", results.mean_interval(values), variant=name, context_tokens=size))
        for size, share in zip(sizes, shares, strict=True):
            rows.append(row("discrepancy_over_coins", share, variant=WALK, context_tokens=size))
    keys = lambda row: f"{keys_of(row)}: {row.variant}"  # noqa: E731
    shown = [row for row in rows if row.context_tokens in (None, sizes[0], sizes[-1])]
    title = f"Discrepancy by number of keys, {len(seeds)} seeds"
    results.print_rows(title, shown, keys, lambda row: f"{row.metric} {row.context_tokens or ''}")
    return rows


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


def keys_of(row: Row) -> str:
    """The keys and the walk's constant of a row."""
    return "D = {head_dim}, norm {norm:g}, c = {c}".format(**row.extra)


def draw(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """A panel per setting, both axes logarithmic."""
    plots.by_rows(
        path,
        [row for row in rows if row.metric == "discrepancy"],
        panel=keys_of,
        x=lambda row: row.context_tokens,
        label=lambda row: str(row.variant),
        across=3,
        xscale="log",
        yscale="log",
        xlabel="keys",
        ylabel="discrepancy",
    )


EXPERIMENT = Experiment(NAME, Options, run, draw)
if __name__ == "__main__":
    EXPERIMENT.main()
