"""What the theorems assume of a stream, measured: clusters, norms and effective rank of its keys.

    python -m experiments.stream_geometry

- The number of clusters of radius delta that SubGen's table opens as the stream grows. Its memory is sublinear
  (Corollary 1) where this number grows as n^b with b < 1; b is fitted.
- The norms of keys, values and queries along recorded prompts, which enter both papers' bounds exponentially.
- The effective rank of the kernel exp(<k, k'> / sqrt(D)), per stream and norm, and per layer and head of a checkpoint:
  few directions are what a balanced choice can exploit.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from experiments.common import cases, plots, results, settings, streams
from experiments.common.options import Experiment, each
from experiments.common.results import Row
from kvjax.structures import cluster_table

NAME = "stream_geometry"
BLOCK = 256  # tokens between two looks at the number of clusters
PLACES = 16  # along a prompt, at which norms are averaged


@dataclasses.dataclass(frozen=True)
class Options(cases.Streams):
    """Options of this experiment."""

    seeds: int = 5  # seeds, from --seed on
    recorded_tokens: int = 4096  # tokens of a recorded stream
    delta: tuple[float, ...] = each(0.25, 0.5, 1.0)  # radii as shares of the keys' mean norm; repeatable
    norm: tuple[float, ...] = each(2.0, 4.0, 8.0, 15.0)
    """l2 norms of synthetic keys for the effective rank; repeatable."""

    QUICK: ClassVar = cases.Streams.QUICK


@dataclasses.dataclass(frozen=True)
class Source:
    """One head of one stream, and what rows of results say of it."""

    stream: str
    layer: int | None
    head: int | None
    keys: Float[np.ndarray, "R n D"]
    model: str
    seed: int

    def row(self, metric: str, found: results.Estimate, tokens: int | None = None, **extra: Any) -> Row:
        of: dict[str, Any] = {"stream": self.stream, "policy": "subgen", "n": len(self.keys), "seed": self.seed}
        of |= {"context_tokens": tokens or self.keys.shape[1], "layer": self.layer, "kv_head": self.head}
        return results.row(NAME, self.model, metric, found, **of, **extra)


def run(options: Options) -> list[Row]:
    """The rows of every head of every stream; synthetic ones are at norm one."""
    seeds, tokens = options.seeds_of(options.seeds), options.recorded_tokens
    layers = dict(streams.prompt_streams(*settings.load_model(options), seeds, tokens, tokens))
    sources = []
    for name in options.stream:
        if name == cases.RECORDED:
            for layer, found in layers.items():
                for head in range(found.keys.shape[2]):
                    keys = found.keys[:, :, head]
                    sources.append(Source(name, layer, head, keys, options.model, options.seed))
        else:
            keys = streams.synthetic(name, seeds, options.tokens, queries=1).keys[:, :, 0]
            sources.append(Source(name, None, None, keys, "synthetic", options.seed))
    return growth(sources, options) + ranks(sources, options) + norms(layers, options)


def where(row: Row) -> str:
    """The stream of a row, with the layer and head of a recorded one."""
    layer = row.extra["layer"]
    return str(row.stream) + ("" if layer is None else f", layer {layer}, kv head {row.extra['kv_head']}")


def growth(sources: Sequence[Source], options: Options) -> list[Row]:
    """Numbers of clusters at powers of two tokens, and the exponents fitted to them; as a table and a plot."""
    rows: list[Row] = []
    for source in tqdm(sources, desc="clusters", leave=False):
        tokens = source.keys.shape[1]
        sizes = [2**i for i in range(BLOCK.bit_length() - 1, tokens.bit_length())]
        for share in options.delta:
            delta = share * float(np.linalg.norm(source.keys, axis=-1).mean())
            counts = np.stack([np.asarray(cluster_counts(jnp.asarray(keys), delta)) for keys in source.keys])
            counts = counts[:, [size // BLOCK - 1 for size in sizes]]
            slope = results.log_slope(sizes, counts)
            rows.append(source.row("clusters_slope", slope, delta_share=share, delta=delta))
            rows += [
                source.row("clusters", results.mean_interval(values), tokens=size, delta_share=share, delta=delta)
                for size, values in zip(sizes, counts.T, strict=True)
            ]
    shown = [row for row in rows if row.context_tokens == BLOCK or row.metric == "clusters_slope"]
    share_of = lambda row: f"{where(row)}, delta {row.extra['delta_share']:g} of the norm"  # noqa: E731
    results.print_rows(f"Clusters of {BLOCK} tokens, and the exponent of their growth", shown, share_of)
    plots.by_rows(
        options.file(f"{NAME}_growth.png"),
        [row for row in rows if row.metric == "clusters"],
        panel=lambda row: f"delta = {row.extra['delta_share']:g} of the mean norm",
        x=lambda row: row.context_tokens,
        label=where,
        xscale="log",
        yscale="log",
        xlabel="tokens",
        ylabel="clusters",
    )
    return rows


@jax.jit
def cluster_counts(keys: Float[Array, "n D"], delta: Float[Array, ""]) -> Int[Array, "n_blocks"]:
    """int32 clusters of radius delta that SubGen's table has open after every block, in a table that is never full."""
    tokens, head_dim = keys.shape
    table = cluster_table.init_cluster_table(tokens, head_dim, keys.dtype, jax.random.key(0), delta=1.0)
    table = dataclasses.replace(table, delta=jnp.asarray(delta, jnp.float32))

    def look(table: cluster_table.ClusterTable, block: Float[Array, "b D"]):
        table = cluster_table.extend(table, block)
        return table, table.size

    return jax.lax.scan(look, table, keys[: tokens // BLOCK * BLOCK].reshape(-1, BLOCK, head_dim))[1]


def ranks(sources: Sequence[Source], options: Options) -> list[Row]:
    """Effective ranks: synthetic streams at every norm, recorded ones at their own."""
    rows: list[Row] = []
    for source in tqdm(sources, desc="effective rank", leave=False):
        for norm in options.norm if source.layer is None else (None,):
            scale = 1.0 if norm is None else norm
            rank = results.mean_interval(np.array([streams.effective_rank(scale * keys) for keys in source.keys]))
            rows.append(source.row("effective_rank", rank, **({} if norm is None else {"norm": norm})))
    title = "Effective rank of the keys' kernel, by norm (of recorded keys their own)"
    results.print_rows(title, rows, where, lambda row: f"{row.extra.get('norm', 'own')}")
    return rows


def norms(layers: dict[int, streams.Streams], options: Options) -> list[Row]:
    """Mean norms of keys, values and queries by position, a line per head; as a plot."""
    rows = []
    for layer, drawn in layers.items():
        for name, part in {"key": drawn.keys, "value": drawn.values, "query": drawn.queries}.items():
            places = np.array_split(np.linalg.norm(part, axis=-1), PLACES, axis=1)
            ends = np.cumsum([place.shape[1] for place in places])
            for head in range(part.shape[2]):
                source = Source(cases.RECORDED, layer, head, part[:, :, head], options.model, options.seed)
                rows += [
                    source.row(f"{name}_norm", results.mean_interval(place.mean(axis=1)[:, head]), tokens=int(end))
                    for end, place in zip(ends, places, strict=True)
                ]
    plots.by_rows(
        options.file(f"{NAME}_norms.png"),
        rows,
        panel=lambda row: f"layer {row.extra['layer']}: {row.metric.replace('_', ' ')}",
        x=lambda row: row.context_tokens,
        label=lambda row: f"head {row.extra['kv_head']}",
        across=3,
        xlabel="position",
    )
    return rows


EXPERIMENT = Experiment(NAME, Options, run)
if __name__ == "__main__":
    EXPERIMENT.main()
