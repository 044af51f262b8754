"""Whether keys and values lie in clusters: as a picture, and as the radius that k centres leave.

    python -m experiments.clusterability

SubGen's and ClusterGen's Figure 1 shows t-SNE maps of keys and values with the 16 centres of greedy k-center, by layer
and head; here also of keys before they are rotated. A t-SNE shows neighbours, not distances, and clusters even where
there are none, so the radius that k centres leave is drawn beside it against k: clusters show where it falls steeply.
ClusterGen's Table 1, the norms of queries, is measured along with it.
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
from sklearn.manifold import TSNE
from tqdm import tqdm

from experiments.common import plots, results, settings, streams
from experiments.common.options import Experiment, Run
from experiments.common.results import Row
from kvjax import rope
from kvjax.structures.k_center import greedy_k_center
from kvjax_models.llama import rope_frequencies

NAME = "clusterability"
CENTERS = 16  # drawn, as in the papers
PARTS = ("keys before RoPE", "keys", "values")

Parts = dict[tuple[int, int], dict[str, np.ndarray]]  # by layer and kv head, and by name


@dataclasses.dataclass(frozen=True)
class Options(Run):
    """Options of this experiment."""

    seeds: int = 5  # prompts, from --seed on; maps are of the first
    tokens: int = 4096  # tokens of a prompt
    points: int = 1024  # tokens on a map, at even distances (the papers' SubGen: 1024)
    layers: int = 5  # layers that are drawn, from first to last at even distances
    heads: int = 2  # kv heads that are drawn of each, from the first on

    QUICK: ClassVar[dict[str, Any]] = {"seeds": 2, "tokens": 512, "points": 128, "heads": 1}


def run(options: Options) -> list[Row]:
    """The rows of queries' norms and of radii."""
    model, tokenizer = settings.load_model(options)
    tokens = options.tokens
    drawn = np.unique(np.linspace(0, model.config.layers - 1, options.layers).round().astype(int))
    row = functools.partial(results.row, NAME, options.model, stream="recorded", policy="clustergen", n=options.seeds)
    row = functools.partial(row, seed=options.seed, context_tokens=tokens)
    parts: Parts = {}
    rows: list[Row] = []
    for layer, found in streams.prompt_streams(model, tokenizer, options.seeds_of(options.seeds), tokens, tokens):
        norms = np.linalg.norm(found.queries, axis=-1)  # of which the theorems take the largest
        for metric, of in {"query_norm": norms.mean(axis=(1, 2)), "largest_query_norm": norms.max(axis=(1, 2))}.items():
            rows.append(row(metric, results.mean_interval(of), layer=layer))
        if layer in drawn:
            before = np.asarray(rope.unrotate(jnp.asarray(found.keys), rope_frequencies(model.config)))
            for head in range(min(options.heads, found.keys.shape[2])):
                of = (before, found.keys, found.values)
                parts[layer, head] = {name: x[:, :, head] for name, x in zip(PARTS, of, strict=True)}
    results.print_rows("l2 norms of queries", rows, lambda row: f"layer {row.extra['layer']}")
    draw_maps(parts, options)
    return rows + radii(parts, row)


@functools.partial(jax.jit, static_argnames="count")
def centers(points: Float[Array, "n D"], count: int) -> tuple[Array, Array]:
    """Greedy k-center: the points chosen, and each one's distance to the centres before it, which is the radius that
    these leave."""
    found = greedy_k_center(points, jnp.ones(points.shape[0], bool), count)
    return found.index, found.separation


def draw_maps(parts: Parts, options: Options) -> None:
    """A t-SNE map per layer and head of each part of the first prompt, coloured by position, with centres found in all
    dimensions."""
    figure, axes = plots.panels(len(PARTS) * len(parts), across=len(PARTS), size=(2.8, 2.8))
    shown = [(place, name, vectors) for place, part in parts.items() for name, vectors in part.items()]
    for (place, name, vectors), axis in zip(tqdm(shown, desc="t-SNE", leave=False), axes, strict=True):
        some = vectors[0, :: max(1, vectors.shape[1] // options.points)][: options.points]
        index, _ = centers(jnp.asarray(some), CENTERS)
        steps = 300 if options.quick else 1000
        tsne = TSNE(perplexity=min(30, len(some) / 4), init="pca", random_state=options.seed, max_iter=steps)
        flat = tsne.fit_transform(some)
        axis.scatter(flat[:, 0], flat[:, 1], s=3, c=np.arange(len(some)), cmap="viridis")
        found = flat[np.asarray(index)]
        axis.scatter(found[:, 0], found[:, 1], s=18, color="tab:green", edgecolors="black", linewidths=0.5)
        axis.set(xticks=[], yticks=[])
        axis.set_title(f"layer {place[0]}, kv head {place[1]}: {name}", fontsize=8)
    plots.save(figure, options.file(f"{NAME}_maps.png"))


def radii(parts: Parts, row: functools.partial[Row]) -> list[Row]:
    """The radius that k centres leave, as a share of the radius of one, against k."""
    rows: list[Row] = []
    for (layer, head), part in tqdm(parts.items(), desc="k-center", leave=False):
        for name, vectors in part.items():
            sizes = [2**i for i in range((vectors.shape[1] // 4).bit_length())]
            separations = np.stack([np.asarray(centers(jnp.asarray(x), max(sizes) + 1)[1]) for x in vectors])
            shares = separations[:, sizes] / separations[:, 1:2]
            told = {size: results.mean_interval(at) for size, at in zip(sizes, shares.T, strict=True)}
            place: dict[str, Any] = {"layer": layer, "kv_head": head, "part": name}
            rows += [row("k_center_radius_share", of, centers=size, **place) for size, of in told.items()]
    where = lambda row: "layer {layer}, kv head {kv_head}: {part}".format(**row.extra)  # noqa: E731
    title = "k-center radii as shares of one centre's, by centres"
    results.print_rows(title, rows, where, lambda row: str(row.extra["centers"]))
    return rows


def draw(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Radii against the number of centres, a panel per part."""
    plots.by_rows(
        path.with_name(f"{NAME}_radius.png"),
        [row for row in rows if row.metric == "k_center_radius_share"],
        panel=lambda row: row.extra["part"],
        x=lambda row: row.extra["centers"],
        label=lambda row: f"layer {row.extra['layer']}, kv head {row.extra['kv_head']}",
        xscale="log",
        xlabel="centres",
        ylabel="radius, share of one centre's",
    )


EXPERIMENT = Experiment(NAME, Options, run, draw)
if __name__ == "__main__":
    EXPERIMENT.main()
