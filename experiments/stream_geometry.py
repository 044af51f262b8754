"""What the theorems assume of a stream, measured: clusters, norms and effective rank of its keys.

    python -m experiments.stream_geometry

- The number of clusters of radius delta that SubGen's table opens as the stream grows. Its memory is sublinear
  (Corollary 1) where this number grows as n^b with b < 1; b is fitted.
- The norms of keys, values and queries along recorded prompts, which enter both papers' bounds exponentially.
- The effective rank of the kernel exp(<k, k'> / sqrt(D)), per stream and norm, and per layer and head of a checkpoint:
  few directions are what a balanced choice can exploit.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from experiments.common import plots, results, settings, streams
from kvjax.structures import cluster_table

NAME = "stream_geometry"
RECORDED = "recorded"
BLOCK = 256  # tokens between two looks at the number of clusters

settings.define_run()
_SEEDS = flags.DEFINE_integer("seeds", 5, "Seeds, from --seed on.")
_TOKENS = flags.DEFINE_integer("tokens", 8192, "Tokens of a synthetic stream.")
_RECORDED_TOKENS = flags.DEFINE_integer("recorded_tokens", 4096, "Tokens of a recorded stream.")
_DELTA = flags.DEFINE_multi_float("delta", [0.25, 0.5, 1.0], "Radii as shares of the keys' mean norm; repeatable.")
_NORM = flags.DEFINE_multi_float(
    "norm", [2, 4, 8, 15], "l2 norms of synthetic keys for the effective rank; repeatable."
)
_PLACES = 16  # along a prompt, at which norms are averaged


@dataclasses.dataclass(frozen=True)
class Source:
    """The keys of one head of one stream, and how rows of results name it."""

    stream: str
    layer: int | None
    head: int | None
    keys: Float[np.ndarray, "R n D"]

    def __str__(self) -> str:
        return self.stream if self.layer is None else f"{self.stream}, layer {self.layer}, kv head {self.head}"

    def row(self, metric: str, estimate: results.Estimate, tokens: int | None = None, **extra: float) -> results.Row:
        return results.Row(
            experiment=NAME,
            model=flags.FLAGS.model if self.stream == RECORDED else "synthetic",
            stream=self.stream,
            policy="subgen",
            metric=metric,
            value=estimate.value,
            ci95_low=estimate.low,
            ci95_high=estimate.high,
            context_tokens=tokens or self.keys.shape[1],
            n=len(self.keys),
            seed=flags.FLAGS.seed,
            extra={"layer": self.layer, "kv_head": self.head} | extra,
        )


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    quick = flags.FLAGS.quick
    seeds = range(flags.FLAGS.seed, flags.FLAGS.seed + (2 if quick else _SEEDS.value))
    tokens, recorded_tokens = (1024, 512) if quick else (_TOKENS.value, _RECORDED_TOKENS.value)
    layers = dict(
        streams.prompt_streams(*settings.load_model(flags.FLAGS.model), seeds, recorded_tokens, recorded_tokens)
    )
    sources = [*synthetic_sources(seeds, tokens), *recorded_sources(layers)]
    directory = pathlib.Path(flags.FLAGS.output_dir)
    rows = growth(sources, directory / f"{NAME}_growth.png") + ranks(sources)
    rows += norms(layers, directory / f"{NAME}_norms.png")
    results.write_rows(directory / f"{NAME}.json", rows)
    print(f"Rows: {directory / f'{NAME}.json'}   plots: {directory}/{NAME}_*.png")


def synthetic_sources(seeds: Sequence[int], tokens: int) -> Iterator[Source]:
    """All synthetic streams at norm one."""
    for name in streams.SYNTHETIC:
        yield Source(name, None, None, streams.synthetic(name, seeds, tokens, queries=1).keys[:, :, 0])


def recorded_sources(layers: dict[int, streams.Streams]) -> Iterator[Source]:
    for layer, found in layers.items():
        for head in range(found.keys.shape[2]):
            yield Source(RECORDED, layer, head, found.keys[:, :, head])


def growth(sources: Sequence[Source], path: pathlib.Path) -> list[results.Row]:
    """Numbers of clusters at powers of two tokens, and the exponents fitted to them; as a table and a plot."""
    rows, lines = [], []
    figure, axes = plt.subplots(1, len(_DELTA.value), figsize=(5 * len(_DELTA.value), 4), squeeze=False, sharey=True)
    for source in tqdm(sources, desc="clusters", leave=False):
        tokens = source.keys.shape[1]
        sizes = [2**i for i in range(BLOCK.bit_length() - 1, tokens.bit_length())]
        for share, axis in zip(_DELTA.value, axes[0], strict=True):
            delta = share * float(np.linalg.norm(source.keys, axis=-1).mean())
            counts = np.stack([np.asarray(cluster_counts(jnp.asarray(keys), delta)) for keys in source.keys])
            counts = counts[:, [size // BLOCK - 1 for size in sizes]]
            slope = results.log_slope(sizes, counts)
            rows.append(source.row("clusters_slope", slope, delta_share=share, delta=delta))
            estimates = [results.mean_interval(values) for values in counts.T]
            rows += [
                source.row("clusters", estimate, tokens=size, delta_share=share, delta=delta)
                for size, estimate in zip(sizes, estimates, strict=True)
            ]
            lines.append(
                (str(source), f"{share:g}", f"{counts[:, 0].mean():.0f}", f"{counts[:, -1].mean():.0f}", str(slope))
            )
            axis.plot(sizes, counts.mean(axis=0), marker=".", label=str(source))
            axis.set(xscale="log", yscale="log", xlabel="tokens", title=f"delta = {share:g} of the mean norm")
    axes[0][0].set_ylabel("clusters")
    axes[0][0].legend(fontsize=7)
    plots.save(figure, path)
    columns = ("stream", "delta / norm", f"clusters of {BLOCK}", "of all", "exponent [95%]")
    results.print_table(f"Clusters by number of tokens, {len(sources[0].keys)} seeds", columns, lines)
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


def ranks(sources: Sequence[Source]) -> list[results.Row]:
    """Effective ranks: synthetic streams at every norm, recorded ones at their own."""
    rows, lines = [], []
    for source in tqdm(sources, desc="effective rank", leave=False):
        for norm in _NORM.value if source.layer is None else [None]:
            scale = 1.0 if norm is None else norm
            found = np.array([streams.effective_rank(scale * keys) for keys in source.keys])
            rank = results.mean_interval(found)
            extra = {} if norm is None else {"norm": norm}
            rows.append(source.row("effective_rank", rank, **extra))
            mean_norm = float(np.linalg.norm(source.keys, axis=-1).mean()) * scale
            lines.append((str(source), f"{mean_norm:.3g}", str(rank)))
    results.print_table("Effective rank of the keys' kernel", ("stream", "mean norm", "effective rank [95%]"), lines)
    return rows


def norms(layers: dict[int, streams.Streams], path: pathlib.Path) -> list[results.Row]:
    """Mean norms of keys, values and queries by position, a line per head; as a plot."""
    rows = []
    figure, axes = plt.subplots(len(layers), 3, figsize=(13, 3 * len(layers)), squeeze=False, sharex=True)
    for layer, panels in zip(layers, axes, strict=True):
        parts = {"key": layers[layer].keys, "value": layers[layer].values, "query": layers[layer].queries}
        for (name, part), axis in zip(parts.items(), panels, strict=True):
            lengths = np.linalg.norm(part, axis=-1)
            places = [place.mean(axis=1) for place in np.array_split(lengths, _PLACES, axis=1)]
            ends = np.cumsum([place.shape[1] for place in np.array_split(lengths, _PLACES, axis=1)])
            for head in range(lengths.shape[2]):
                estimates = [results.mean_interval(place[:, head]) for place in places]
                source = Source(RECORDED, layer, head, part[:, :, head])
                rows += [
                    source.row(f"{name}_norm", estimate, tokens=int(end))
                    for end, estimate in zip(ends, estimates, strict=True)
                ]
                value, low, high = np.array(estimates).T
                axis.errorbar(ends, value, yerr=(value - low, high - value), marker=".", label=f"head {head}")
            axis.set_title(f"layer {layer}: {name} norms", fontsize=10)
            axis.legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("position")
    plots.save(figure, path)
    return rows


if __name__ == "__main__":
    app.run(main)
