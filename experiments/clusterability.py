"""Whether keys and values lie in clusters: as a picture, and as the radius that k centres leave.

    python -m experiments.clusterability

SubGen's and ClusterGen's Figure 1 shows t-SNE maps of keys and values with the 16 centres of greedy k-center, by layer
and head; here also of keys before they are rotated. A t-SNE shows neighbours, not distances, and clusters even where
there are none, so the radius that k centres leave is drawn beside it against k: clusters show where it falls steeply.
ClusterGen's Table 1, the norms of queries, is measured along with it.
"""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags
from jaxtyping import Array, Float
from kvjax_models.llama import rope_frequencies
from sklearn.manifold import TSNE
from tqdm import tqdm

from experiments.common import geometry, plots, results, settings, streams
from kvjax.structures.k_center import greedy_k_center

NAME = "clusterability"
CENTERS = 16  # drawn, as in the papers
PARTS = ("keys before RoPE", "keys", "values")

settings.define_run()
_SEEDS = flags.DEFINE_integer("seeds", 5, "Prompts, from --seed on; maps are of the first.")
_TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens of a prompt.")
_POINTS = flags.DEFINE_integer("points", 1024, "Tokens on a map, at even distances (the papers' SubGen: 1024).")
_LAYERS = flags.DEFINE_integer("layers", 5, "Layers that are drawn, from first to last at even distances.")
_HEADS = flags.DEFINE_integer("heads", 2, "Kv heads that are drawn of each, from the first on.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    quick = flags.FLAGS.quick
    seeds = range(flags.FLAGS.seed, flags.FLAGS.seed + (2 if quick else _SEEDS.value))
    tokens, points = (512, 128) if quick else (_TOKENS.value, _POINTS.value)
    model, tokenizer = settings.load_model(flags.FLAGS.model)
    drawn = np.unique(np.linspace(0, model.config.layers - 1, _LAYERS.value).round().astype(int))
    parts: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    rows: list[results.Row] = []
    for layer, found in streams.prompt_streams(model, tokenizer, seeds, tokens, queries=tokens):
        rows += query_norms(layer, found.queries)
        if layer not in drawn:
            continue
        before = geometry.unrotated(found.keys, rope_frequencies(model.config))
        for head in range(min(1 if quick else _HEADS.value, found.keys.shape[2])):
            of = (before, found.keys, found.values)
            parts[layer, head] = {name: x[:, :, head] for name, x in zip(PARTS, of, strict=True)}
    show_norms(rows)
    directory = pathlib.Path(flags.FLAGS.output_dir)
    draw_maps(parts, points, directory / f"{NAME}_maps.png")
    rows += radii(parts, directory / f"{NAME}_radius.png")
    results.write_rows(directory / f"{NAME}.json", rows)
    print(f"Rows: {directory / f'{NAME}.json'}   plots: {directory}/{NAME}_*.png")


def row(metric: str, estimate: results.Estimate, seeds: int, tokens: int, **extra: Any) -> results.Row:
    return results.Row(
        experiment=NAME,
        model=flags.FLAGS.model,
        stream="recorded",
        policy="clustergen",
        metric=metric,
        value=estimate.value,
        ci95_low=estimate.low,
        ci95_high=estimate.high,
        context_tokens=tokens,
        n=seeds,
        seed=flags.FLAGS.seed,
        extra=extra,
    )


def query_norms(layer: int, queries: Float[np.ndarray, "R n H_q D"]) -> list[results.Row]:
    """The mean norm of a layer's queries, and the largest, which the theorems take."""
    norms = np.linalg.norm(queries, axis=-1)
    measured = {"query_norm": norms.mean(axis=(1, 2)), "largest_query_norm": norms.max(axis=(1, 2))}
    return [row(metric, results.mean_interval(of), *norms.shape[:2], layer=layer) for metric, of in measured.items()]


def show_norms(rows: Sequence[results.Row]) -> None:
    lines = [
        (f"layer {row.extra['layer']}, {row.metric}", f"{row.value:.4g} [{row.ci95_low:.4g}, {row.ci95_high:.4g}]")
        for row in rows
    ]
    results.print_table("l2 norms of queries", ("layer", "norm [95%]"), lines)


@functools.partial(jax.jit, static_argnames="count")
def centers(points: Float[Array, "n D"], count: int) -> tuple[Array, Array]:
    """Greedy k-center: the points chosen, and each one's distance to the centres before it, which is the radius that
    these leave."""
    found = greedy_k_center(points, jnp.ones(points.shape[0], bool), count)
    return found.index, found.separation


def draw_maps(parts: dict[tuple[int, int], dict[str, np.ndarray]], points: int, path: pathlib.Path) -> None:
    """A t-SNE map per layer and head of each part of the first prompt, coloured by position, with centres found in all
    dimensions."""
    figure, axes = plt.subplots(len(PARTS), len(parts), figsize=(2.8 * len(parts), 2.8 * len(PARTS)), squeeze=False)
    for (place, part), panels in zip(tqdm(parts.items(), desc="t-SNE", leave=False), axes.T, strict=True):
        for (name, vectors), axis in zip(part.items(), panels, strict=True):
            some = vectors[0, :: max(1, vectors.shape[1] // points)][:points]
            index, _ = centers(jnp.asarray(some), CENTERS)
            flat = tsne(min(30, len(some) / 4)).fit_transform(some)
            axis.scatter(*flat.T, s=3, c=np.arange(len(some)), cmap="viridis")
            axis.scatter(*flat[np.asarray(index)].T, s=18, color="tab:green", edgecolors="black", linewidths=0.5)
            axis.set(xticks=[], yticks=[])
            axis.set_title(f"layer {place[0]}, kv head {place[1]}: {name}", fontsize=8)
    plots.save(figure, path)


def tsne(perplexity: float) -> TSNE:
    iterations = 300 if flags.FLAGS.quick else 1000
    return TSNE(perplexity=perplexity, init="pca", random_state=flags.FLAGS.seed, max_iter=iterations)


def radii(parts: dict[tuple[int, int], dict[str, np.ndarray]], path: pathlib.Path) -> list[results.Row]:
    """The radius that k centres leave, as a share of the radius of one, against k."""
    rows, lines = [], []
    figure, axes = plt.subplots(1, len(PARTS), figsize=(5 * len(PARTS), 4), sharey=True)
    for (layer, head), part in tqdm(parts.items(), desc="k-center", leave=False):
        for (name, vectors), axis in zip(part.items(), axes, strict=True):
            tokens = vectors.shape[1]
            sizes = [2**i for i in range((tokens // 4).bit_length())]
            separations = np.stack([np.asarray(centers(jnp.asarray(x), max(sizes) + 1)[1]) for x in vectors])
            shares = separations[:, sizes] / separations[:, 1:2]
            estimates = [results.mean_interval(at) for at in shares.T]
            place = {"layer": layer, "kv_head": head, "part": name}
            rows += [
                row("k_center_radius_share", estimate, len(vectors), tokens, centers=size, **place)
                for size, estimate in zip(sizes, estimates, strict=True)
            ]
            told = dict(zip(sizes, estimates, strict=True))
            half = next((size for size, estimate in told.items() if estimate.value <= 0.5), None)
            lines.append(
                (f"layer {layer}, kv head {head}: {name}", str(told[CENTERS]), f"{half}" if half else f"> {max(sizes)}")
            )
            axis.plot(sizes, shares.mean(axis=0), marker=".", label=f"layer {layer}, kv head {head}")
            axis.set(xscale="log", xlabel="centres", title=name)
    axes[0].set_ylabel("radius, share of one centre's")
    axes[0].legend(fontsize=7)
    plots.save(figure, path)
    columns = ("part", f"radius of {CENTERS} centres [95%]", "centres for half the radius")
    results.print_table("k-center radii as shares of one centre's", columns, lines)
    return rows


if __name__ == "__main__":
    app.run(main)
