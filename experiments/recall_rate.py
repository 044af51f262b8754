"""How many of the tokens that matter most a query finds by clusters or pages, how they drift and scatter, and how often
what it finds was there a step before (ClusterKV, Figures 11 and 3, and its cache's hit rates).

    python -m experiments.recall_rate
    python -m experiments.recall_rate --stream recorded --model DIRECTORY

- Recall: the share of a query's true top B tokens (by attention weight) among the B that it recalls, against B; by what
  distance keys are clustered, into how many clusters, by how many iterations; and by Quest's pages.
- Drift: the share of a step's top B tokens that are among the top B so many steps later, and how far ranks move.
- Fragmentation: how many of the top B tokens lie in a page of 16 that holds any.
- Hit rates: the share of the clusters that a step selects which the last R steps had selected.

The first 16 tokens, which every policy keeps, are left out. Queries of recorded streams are those of consecutive tokens
(a prompt's last); synthetic ones are drawn afresh, so only recall is measured on them. Every query head selects for
itself, as published. A row of results averages over queries and heads; intervals are over seeds.
"""

import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

from experiments.common import plots, results, settings, streams
from kvjax.structures.k_means import k_means

NAME = "recall_rate"
RECORDED = "recorded"
SINKS, PAGE = 16, 16
SHARES = (1 / 128, 1 / 64, 1 / 32, 1 / 16, 1 / 8)  # of the tokens, for B; the paper's are 1/128 to 1/16 of 32k
TYPICAL = 1 / 32  # its 1,024 of 32k
STEPS = (1, 2, 4, 8, 16, 32, 63)

settings.define_run()
_STREAM = flags.DEFINE_multi_enum(
    "stream", ["tight", "drift", "low_rank", "iid", RECORDED], [*streams.SYNTHETIC, RECORDED], "Streams; repeatable."
)
_SEEDS = flags.DEFINE_integer("seeds", 4, "Seeds, from --seed on.")
_TOKENS = flags.DEFINE_integer("tokens", 8192, "Tokens of a synthetic stream.")
_RECORDED_TOKENS = flags.DEFINE_integer("recorded_tokens", 4032, "Tokens of a recorded stream.")
_NORM = flags.DEFINE_float("norm", 8.0, "l2 norm of synthetic keys and queries.")
_QUERIES = flags.DEFINE_integer("queries", 64, "Queries per seed: consecutive steps of a recorded stream.")


class Way(NamedTuple):
    """One way to find tokens: by clusters of keys, or (`distance` is None) by pages."""

    distance: str | None = "cosine"
    cluster_tokens: int = 80
    iterations: int = 20
    sample: int = 1

    def __str__(self) -> str:
        if self.distance is None:
            return f"pages of {PAGE}"
        sampled = f", sample {self.sample}" if self.sample > 1 else ""
        return f"{self.distance}, n/{self.cluster_tokens}, {self.iterations} iterations{sampled}"


PLAIN, PAGES = Way(), Way(distance=None)
DISTANCES = (PLAIN, Way("l2"), Way("inner product"))
CLUSTERS = tuple(Way(cluster_tokens=tokens) for tokens in (320, 160, 80, 40, 20))
ITERATIONS = (*(Way(iterations=number) for number in (1, 2, 5, 10, 20)), Way(sample=4), Way(sample=8))
PANELS = {
    "against pages, by distance": (*DISTANCES, PAGES),
    "by number of clusters": CLUSTERS,
    "by iterations": ITERATIONS,
}


class Source(NamedTuple):
    """One stream, or one layer of a recorded one."""

    stream: str
    layer: int | None
    keys: Float[np.ndarray, "R n H_kv D"]  # without sinks
    queries: Float[np.ndarray, "R Q H_q D"]

    def __str__(self) -> str:
        return self.stream if self.layer is None else f"{self.stream}, layer {self.layer}"

    def row(self, way: Way | None, metric: str, samples: Float[np.ndarray, "R"], **extra: float) -> results.Row:
        estimate = results.mean_interval(samples)
        pages = way is not None and way.distance is None
        if way is not None and not pages:
            extra = way._asdict() | extra
        return results.Row(
            experiment=NAME,
            model=flags.FLAGS.model if self.stream == RECORDED else "synthetic",
            stream=self.stream,
            policy="exact" if way is None else "quest" if pages else "clusterkv",
            variant=None if way is None else str(way),
            metric=metric,
            value=estimate.value,
            ci95_low=estimate.low,
            ci95_high=estimate.high,
            context_tokens=self.keys.shape[1] + SINKS,
            n=len(samples),
            seed=flags.FLAGS.seed,
            extra={"layer": self.layer} | ({} if self.stream == RECORDED else {"norm": _NORM.value}) | extra,
        )


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    ways = (PLAIN, PAGES) if flags.FLAGS.quick else tuple(dict.fromkeys(sum(PANELS.values(), ())))
    rows: list[results.Row] = []
    directory = pathlib.Path(flags.FLAGS.output_dir)
    for source in sources():
        found = recall_rows(source, ways)
        show_recall(source, found)
        rows += found
        if source.stream == RECORDED:
            found = drift_rows(source) + hit_rows(source)
            show_drift(source, found)
            rows += found
            plot_drift(directory / f"{NAME}_drift_{source.layer}.png", source, found)
        results.write_rows(directory / f"{NAME}.json", rows)
    plot_recall(directory / f"{NAME}.png", rows)
    print(f"Rows: {directory / f'{NAME}.json'}   plots: {directory}/{NAME}*.png")


def sources() -> Iterator[Source]:
    quick = flags.FLAGS.quick
    seeds = range(flags.FLAGS.seed, flags.FLAGS.seed + (2 if quick else _SEEDS.value))
    tokens, recorded_tokens = (1024, 1024) if quick else (_TOKENS.value, _RECORDED_TOKENS.value)
    for name in _STREAM.value:
        if name == RECORDED:
            model, tokenizer = settings.load_model(flags.FLAGS.model)
            for layer, drawn in streams.recorded(model, tokenizer, seeds, recorded_tokens, _QUERIES.value):
                yield Source(name, layer, drawn.keys[:, SINKS:], drawn.queries)
        else:
            drawn = streams.synthetic(name, seeds, tokens, _QUERIES.value).scaled(_NORM.value)
            yield Source(name, None, drawn.keys[:, SINKS:], drawn.queries)


def over_heads(function: Callable[..., Array]) -> Callable[..., Array]:
    """Maps a function of one head's keys [n, D] and its group's queries [Q, G, D] over seeds and kv heads."""

    @jax.jit
    def mapped(keys: Float[Array, "R n H_kv D"], queries: Float[Array, "R Q H_q D"]) -> Array:
        rows, count, query_heads, head_dim = queries.shape
        grouped = queries.reshape(rows, count, keys.shape[2], query_heads // keys.shape[2], head_dim)
        # A seed after the other: every query's order of all tokens is held at once.
        return jax.lax.map(
            lambda row: jax.lax.map(lambda head: function(*head), row),
            (keys.swapaxes(1, 2), grouped.transpose(0, 2, 1, 3, 4)),
        )

    return mapped


def top_mask(logits: Float[Array, "... n"], count: int) -> Bool[Array, "... n"]:
    """Which tokens are the `count` largest."""
    return ranks(logits) < count


def ranks(score: Float[Array, "... n"]) -> Int[Array, "... n"]:
    """Every token's place in descending order of score, the earlier of equal ones first."""
    order = jnp.argsort(-score, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1)


def group_labels(way: Way, keys: Float[Array, "n D"]) -> tuple[Int[Array, "n"], int]:
    """Every token's cluster or page, and how many there are."""
    tokens = keys.shape[0]
    if way.distance is None:
        return jnp.arange(tokens) // PAGE, -(-tokens // PAGE)
    count = -(-tokens // way.cluster_tokens)
    rng = jax.random.key(0)
    if way.distance == "cosine":
        every = jnp.ones(tokens, bool)
        return k_means(rng, keys, every, count, iterations=way.iterations, sample=way.sample).label, count
    return lloyd(rng, keys, count, way), count


def lloyd(rng: Array, keys: Float[Array, "n D"], count: int, way: Way) -> Int[Array, "n"]:
    """k-means by l2 distance or by inner product, with means of keys as centroids (the latter has no objective)."""

    def nearest(centroids: Float[Array, "C D"]) -> Int[Array, "n"]:
        product = keys @ centroids.T
        half = 0.5 * jnp.sum(centroids**2, axis=1) if way.distance == "l2" else 0.0
        return jnp.argmax(product - half, axis=1)

    def turn(_, centroids: Float[Array, "C D"]) -> Float[Array, "C D"]:
        means, size = group_means(keys, nearest(centroids), count)
        return jnp.where(size[:, None] > 0, means, centroids)

    start = keys[jax.random.choice(rng, keys.shape[0], (count,), replace=False)]
    return nearest(jax.lax.fori_loop(0, way.iterations - 1, turn, start))


def group_means(keys: Float[Array, "n D"], label: Int[Array, "n"], count: int):
    size = jnp.zeros(count, jnp.int32).at[label].add(1)
    return jnp.zeros((count, keys.shape[1])).at[label].add(keys) / jnp.maximum(size, 1)[:, None], size


def group_scores(
    way: Way, keys: Float[Array, "n D"], label: Int[Array, "n"], count: int, queries: Float[Array, "... D"]
) -> Float[Array, "... C"]:
    """By what clusters are ordered (inner product with the mean key), or pages (Quest's upper bound)."""
    if way.distance is not None:
        means, size = group_means(keys, label, count)
        return jnp.where(size > 0, queries @ means.T, -jnp.inf)
    low = jnp.full((count, keys.shape[1]), jnp.inf).at[label].min(keys)
    high = jnp.full((count, keys.shape[1]), -jnp.inf).at[label].max(keys)
    return jnp.maximum(queries, 0) @ high.T + jnp.minimum(queries, 0) @ low.T


@functools.cache
def recalls(way: Way, counts: tuple[int, ...]):
    """Compiled: recall [R, H_kv, Q, G, B] of every query at every B."""

    def one(keys: Float[Array, "n D"], queries: Float[Array, "Q G D"]) -> Float[Array, "Q G B"]:
        label, count = group_labels(way, keys)
        scores = group_scores(way, keys, label, count, queries)

        def query(item) -> Float[Array, "B"]:
            asked, score = item
            true = ranks(asked @ keys.T)
            # Whole groups in order, each in the order of the text; the last is cut.
            found = ranks(-ranks(score)[label].astype(jnp.float32))
            return jnp.stack([jnp.sum((true < size) & (found < size)) / size for size in counts])

        flat = (queries.reshape(-1, queries.shape[-1]), scores.reshape(-1, count))
        return jax.lax.map(query, flat).reshape(*queries.shape[:2], len(counts))

    return over_heads(one)


def recall_rows(source: Source, ways: Sequence[Way]) -> list[results.Row]:
    """Recall of every way at every B (multiples of a page, so that pages are not cut)."""
    counts = tuple(dict.fromkeys(max(PAGE, int(share * source.keys.shape[1]) // PAGE * PAGE) for share in SHARES))
    rows = []
    for way in tqdm(ways, desc=str(source), leave=False):
        found = np.asarray(recalls(way, counts)(source.keys, source.queries)).mean(axis=(1, 2, 3))
        rows += [
            source.row(way, "recall", samples, recalled_tokens=size)
            for size, samples in zip(counts, found.T, strict=True)
        ]
    return rows


def drift_rows(source: Source) -> list[results.Row]:
    """What becomes of a step's top B, and how many of them a page holds."""
    size = int(TYPICAL * source.keys.shape[1]) // PAGE * PAGE

    def one(keys: Float[Array, "n D"], queries: Float[Array, "Q G D"]) -> Float[Array, "F"]:
        place = jax.lax.map(lambda asked: ranks(asked @ keys.T), queries)  # [Q, G, n]
        top = place < size
        label, count = group_labels(PAGES, keys)
        held = jnp.zeros((*top.shape[:2], count), jnp.int32).at[:, :, label].add(top)
        touched = jnp.sum(held > 0, axis=-1)
        figures = [jnp.mean(jnp.sum(held, axis=-1) / touched)]
        for lag in lags(queries.shape[0]):
            figures.append(jnp.mean(jnp.sum(top[lag:] & top[:-lag], axis=-1) / size))
            figures.append(jnp.mean(jnp.abs(place[lag:] - place[:-lag]) / keys.shape[0]))
        return jnp.stack(figures)

    found = np.asarray(over_heads(one)(source.keys, source.queries)).mean(axis=1)
    rows = [source.row(None, "important_per_page", found[:, 0], recalled_tokens=size)]
    for number, lag in enumerate(lags(source.queries.shape[1])):
        rows.append(source.row(None, "top_kept", found[:, 1 + 2 * number], steps=lag, recalled_tokens=size))
        rows.append(source.row(None, "rank_change", found[:, 2 + 2 * number], steps=lag))
    return rows


def lags(queries: int) -> list[int]:
    return [lag for lag in STEPS if lag < queries]


def hit_rows(source: Source) -> list[results.Row]:
    """Hit rates of a cache of the last R steps' clusters, or pages."""
    size = int(TYPICAL * source.keys.shape[1]) // PAGE * PAGE
    rows = []
    for way in (PLAIN, PAGES):

        def one(keys: Float[Array, "n D"], queries: Float[Array, "Q G D"], way: Way = way) -> Float[Array, "2"]:
            label, count = group_labels(way, keys)
            order = jnp.argsort(-group_scores(way, keys, label, count, queries), axis=-1, stable=True)
            sizes = jnp.zeros(count, jnp.int32).at[label].add(1)[order]
            # A group is selected where the budget is not yet met before it.
            taken = (jnp.cumsum(sizes, axis=-1) - sizes < size) & (sizes > 0)
            selected = jnp.take_along_axis(taken, jnp.argsort(order, axis=-1), axis=-1)
            chosen, last = selected[2:], selected[1:-1]
            either = last | selected[:-2]
            asked = jnp.sum(chosen, axis=-1)
            return jnp.stack([jnp.mean(jnp.sum(chosen & seen, axis=-1) / asked) for seen in (last, either)])

        found = np.asarray(over_heads(one)(source.keys, source.queries)).mean(axis=1)
        rows += [
            source.row(way, "hit_rate", found[:, number], kept_steps=number + 1, recalled_tokens=size)
            for number in range(2)
        ]
    return rows


def estimate(row: results.Row) -> str:
    assert row.ci95_low is not None and row.ci95_high is not None
    return str(results.Estimate(row.value, row.ci95_low, row.ci95_high))


def show_recall(source: Source, rows: Sequence[results.Row]) -> None:
    counts = list(dict.fromkeys(row.extra["recalled_tokens"] for row in rows))
    by_way: dict[str, list[results.Row]] = {}
    for row in rows:
        by_way.setdefault(f"{row.policy}: {row.variant}", []).append(row)
    lines = [(way, *(estimate(row) for row in found)) for way, found in by_way.items()]
    title = f"{source}: recall of the true top B of {source.keys.shape[1]} tokens, {len(source.keys)} seeds"
    results.print_table(title, ("way", *(f"B = {count}" for count in counts)), lines)


def show_drift(source: Source, rows: Sequence[results.Row]) -> None:
    lines = []
    for row in rows:
        detail = {"hit_rate": "kept_steps", "top_kept": "steps", "rank_change": "steps"}.get(row.metric)
        what = row.metric + (f", {row.policy}" if row.metric == "hit_rate" else "")
        where = f"{detail} {row.extra[detail]}" if detail else ""
        lines.append((what, where, estimate(row)))
    size = rows[0].extra["recalled_tokens"]
    results.print_table(f"{source}: consecutive steps, B = {size}", ("metric", "", "value [95%]"), lines)


def plot_recall(path: pathlib.Path, rows: Sequence[results.Row]) -> None:
    """A row of panels per stream (or layer), a column per question, recall against B."""
    recall = [row for row in rows if row.metric == "recall"]
    names = list(dict.fromkeys((row.stream, row.extra["layer"]) for row in recall))
    figure, axes = plt.subplots(len(names), len(PANELS), figsize=(5 * len(PANELS), 3.2 * len(names)), squeeze=False)
    for name, panels in zip(names, axes, strict=True):
        for (title, ways), axis in zip(PANELS.items(), panels, strict=True):
            for way in ways:
                line = [row for row in recall if (row.stream, row.extra["layer"]) == name and row.variant == str(way)]
                if line:
                    axis.plot(
                        [row.extra["recalled_tokens"] for row in line],
                        [row.value for row in line],
                        marker=".",
                        label=str(way),
                    )
            axis.set(title=f"{name[0]}{'' if name[1] is None else f', layer {name[1]}'}: {title}", xlabel="B")
            axis.title.set_fontsize(9)
            axis.set_xscale("log", base=2)
            axis.set_ylim(0, 1)
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(fontsize=6)
        panels[0].set_ylabel("recall")
    plots.save(figure, path)


def plot_drift(path: pathlib.Path, source: Source, rows: Sequence[results.Row]) -> None:
    """Figure 3 of one layer: ranks of three tokens over the steps; how long a step's top B stay there."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    group = source.queries.shape[2] // source.keys.shape[2]
    logits = source.queries[0, :, :1] @ source.keys[0, :, 0].T  # of the first query head
    place = np.asarray(ranks(jnp.asarray(logits[:, 0])))
    for token in np.argsort(place.std(axis=0))[[-1, len(place[0]) // 2, len(place[0]) // 10]]:
        left.plot(place[:, token], label=f"token {token + SINKS}")
    left.set(xlabel="step", ylabel="rank", title=f"{source}: ranks, first of {group} query heads")
    left.legend(fontsize=8)
    kept = [row for row in rows if row.metric == "top_kept"]
    right.plot([row.extra["steps"] for row in kept], [row.value for row in kept], marker=".")
    right.set(xlabel="steps later", ylabel="share of the top B still there", ylim=(0, 1))
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
