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

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tqdm import tqdm

from experiments.common import cases, plots, results
from experiments.common.options import Experiment, each
from experiments.common.recalling import PAGE, Way, group_labels, group_scores, over_heads, ranks, recalls
from experiments.common.results import Row

NAME = "recall_rate"
SINKS = 16
SHARES = (1 / 128, 1 / 64, 1 / 32, 1 / 16, 1 / 8)  # of the tokens, for B; the paper's are 1/128 to 1/16 of 32k
TYPICAL = 1 / 32  # its 1,024 of 32k
STEPS = (1, 2, 4, 8, 16, 32, 63)


@dataclasses.dataclass(frozen=True)
class Options(cases.Streams):
    """Options of this experiment."""

    stream: tuple[str, ...] = each("tight", "drift", "low_rank", "iid", cases.RECORDED, choices=cases.STREAMS)
    """Streams; repeatable."""

    QUICK: ClassVar[dict[str, Any]] = {**cases.Streams.QUICK, "recorded_tokens": 1024}


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
    """One stream, or one layer of a recorded one, without sinks."""

    case: cases.Case
    model: str
    seed: int

    def __str__(self) -> str:
        return str(self.case)

    @property
    def keys(self) -> Float[np.ndarray, "R n H_kv D"]:
        return self.case.drawn.keys[:, SINKS:]

    @property
    def queries(self) -> Float[np.ndarray, "R Q H_q D"]:
        return self.case.drawn.queries

    def row(self, way: Way | None, metric: str, samples: Float[np.ndarray, "R"], **extra: Any) -> Row:
        pages = way is not None and way.distance is None
        named: dict[str, Any] = {} if way is None or pages else way._asdict()
        if self.case.layer is None:
            named["norm"] = self.case.number
        return results.row(
            NAME,
            self.model,
            metric,
            results.mean_interval(samples),
            stream=self.case.stream,
            policy="exact" if way is None else "quest" if pages else "clusterkv",
            variant=None if way is None else str(way),
            context_tokens=self.keys.shape[1] + SINKS,
            n=len(samples),
            seed=self.seed,
            layer=self.case.layer,
            **named,
            **extra,
        )


def run(options: Options) -> list[Row]:
    """The rows of every stream, and of every layer of a recorded one."""
    ways = (PLAIN, PAGES) if options.quick else tuple(dict.fromkeys(sum(PANELS.values(), ())))
    rows: list[Row] = []
    for case in cases.cases(options):
        source = Source(case, options.model_of(case.stream), options.seed)
        found = recall_rows(source, ways)
        title = f"{case}: recall of the true top B of {source.keys.shape[1]} tokens, {options.seeds} seeds"
        way = lambda row: f"{row.policy}: {row.variant}"  # noqa: E731
        results.print_rows(title, found, way, lambda row: f"B = {row.extra['recalled_tokens']}")
        rows += found
        if case.layer is not None:
            found = drift_rows(source) + hit_rows(source)
            steps = lambda row: str(row.extra.get("steps") or row.extra.get("kept_steps") or "")  # noqa: E731
            results.print_rows(f"{case}: by steps", found, lambda row: f"{row.metric}, {row.policy}", steps)
            rows += found
            plot_drift(options.file(f"{NAME}_drift_{case.layer}.png"), source, found)
        results.write_rows(options.file(f"{NAME}.json"), rows)
    return rows


def recall_rows(source: Source, ways: Sequence[Way]) -> list[Row]:
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


def drift_rows(source: Source) -> list[Row]:
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


def hit_rows(source: Source) -> list[Row]:
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


def draw(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Recall against B: a panel per stream (or layer) and question."""
    layer = lambda row: "" if row.extra["layer"] is None else f", layer {row.extra['layer']}"  # noqa: E731
    questions = {str(way): [title for title, ways in PANELS.items() if way in ways] for way in sum(PANELS.values(), ())}
    shown = [
        dataclasses.replace(row, extra={**row.extra, "panel": f"{row.stream}{layer(row)}: {title}"})
        for row in rows
        if row.metric == "recall"
        for title in questions[str(row.variant)]
    ]
    plots.by_rows(
        path,
        shown,
        panel=lambda row: row.extra["panel"],
        x=lambda row: row.extra["recalled_tokens"],
        label=lambda row: str(row.variant),
        across=len(PANELS),
        xscale="log",
        xlabel="B",
        ylabel="recall",
        ylim=(0, 1),
    )


def plot_drift(path: pathlib.Path, source: Source, rows: Sequence[Row]) -> None:
    """Figure 3 of one layer: ranks of three tokens over the steps; how long a step's top B stay there."""
    figure, (left, right) = plots.panels(2, size=(5.5, 4))
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


EXPERIMENT = Experiment(NAME, Options, run, draw)
if __name__ == "__main__":
    EXPERIMENT.main()
