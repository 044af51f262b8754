"""How alike keys are, near and far: what Chelsea's matching rests on, and what finding alike keys costs.

    python -m experiments.key_similarity

- The cosine of keys by their distance in the text, by layer and head (Chelsea's Figures 2 and 3): the maps, and the
  mean over pairs, which should fall, convexly, for alternation to be the best partition (its Theorem 6.1).
- Outlier heads: the share of A tokens whose most similar B token of the chunk has a cosine under .8 (its appendix B).
- The cost of matching (its Table 1): operations by its formulas, and seconds measured here, of all pairs, k-means,
  bipartite matching and chunked soft matching.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import stats
from tqdm import tqdm

from experiments.calibrate_heads import CHUNK, without_edge
from experiments.common import plots, results, settings, speed, streams
from experiments.common.options import Experiment, Run, each
from experiments.common.results import Row
from kvjax.structures.k_means import k_means
from pallas_kernels.soft_match import soft_match

NAME = "key_similarity"
MAP_TOKENS = 256  # of the stretch whose cosines are drawn as a map
CLUSTERS_PER_TOKEN = 1 / 80  # ClusterKV's default number of clusters
ITERATIONS = 10  # of k-means
COST_HEAD_DIM = 128

TOLD = (1, 2, 8, 64, 256, 1024)  # distances

Layers = dict[int, Float[np.ndarray, "R n H_kv D"]]


@dataclasses.dataclass(frozen=True)
class Options(Run):
    """Options of this experiment."""

    seeds: int = 5  # prompts, from --seed on
    tokens: int = 4096  # tokens of a prompt
    farthest: int = 1024  # largest distance between two tokens
    cost_tokens: tuple[int, ...] = each(1024, 4096, 16384)  # tokens to match; repeatable

    QUICK: ClassVar[dict[str, Any]] = {"seeds": 2, "tokens": 512, "cost_tokens": (1024,)}

    def row(self, metric: str, found: results.Estimate, **extra: Any) -> Row:
        """A row on the model's keys."""
        of: dict[str, Any] = {"stream": "recorded", "policy": "chelsea", "context_tokens": self.tokens, "n": self.seeds}
        return results.row(NAME, self.model, metric, found, **of, seed=self.seed, **extra)


def run(options: Options) -> list[Row]:
    """The rows of cosines, outlier heads and costs."""
    seeds = options.seeds_of(options.seeds)
    read = streams.prompt_streams(*settings.load_model(options), seeds, options.tokens, queries=1)
    layers = {number: found.keys for number, found in read}
    draw_maps(layers, options.file(f"{NAME}_maps.png"))
    return by_distance(options, layers) + outliers(options, layers) + costs(options)


def unit(keys: Float[np.ndarray, "... D"]) -> Float[np.ndarray, "... D"]:
    return keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-30)


def mean_cosines(keys: Float[np.ndarray, "R n D"], farthest: int) -> Float[np.ndarray, "R farthest"]:
    """The mean over all pairs at each distance 1, 2, ... of unit keys: an autocorrelation, by Fourier transform."""
    tokens = keys.shape[1]
    spectrum = np.fft.rfft(keys.astype(np.float64), n=2 * tokens, axis=1)
    products = np.fft.irfft(np.sum(np.abs(spectrum) ** 2, axis=2), n=2 * tokens, axis=1)
    return products[:, 1 : farthest + 1] / (tokens - np.arange(1, farthest + 1))


def head_of(row: Row) -> str:
    return "layer {layer}, kv head {kv_head}".format(**row.extra)


def draw_maps(layers: Layers, path: pathlib.Path) -> None:
    """The cosines of all pairs in a stretch in the middle of the first prompt, a map per layer and head."""
    heads = next(iter(layers.values())).shape[2]
    figure, axes = plots.panels(len(layers) * heads, across=heads, size=(3.2, 3))
    shown = [(layer, head, keys[0, :, head]) for layer, keys in layers.items() for head in range(heads)]
    for (layer, head, keys), axis in zip(shown, axes, strict=True):
        middle = max((len(keys) - MAP_TOKENS) // 2, 0)
        part = unit(keys[middle : middle + MAP_TOKENS])
        image = axis.imshow(part @ part.T, vmin=-1, vmax=1, cmap="RdBu_r")
        axis.set_title(f"layer {layer}, kv head {head}", fontsize=9)
    figure.set_layout_engine("constrained")
    figure.colorbar(image, ax=axes)
    plots.save(figure, path)


def by_distance(options: Options, layers: Layers) -> list[Row]:
    """The mean cosine at every distance; as a plot, and as a table of some distances and of the rank correlation."""
    farthest = min(options.farthest, options.tokens // 2)
    rows: list[Row] = []
    told = [distance for distance in TOLD if distance <= farthest]
    distances = np.arange(1, farthest + 1)
    figure, axes = plots.panels(len(layers), size=(5, 4))
    for (layer, keys), axis in zip(layers.items(), axes, strict=True):
        for head in range(keys.shape[2]):
            cosine = mean_cosines(unit(keys[:, :, head]), farthest)
            place: dict[str, Any] = {"layer": layer, "kv_head": head}
            estimates = [results.mean_interval(cosine[:, distance - 1]) for distance in told]
            rows += [options.row("cosine", of, distance=at, **place) for at, of in zip(told, estimates, strict=True)]
            fall = results.mean_interval(np.array([stats.spearmanr(distances, one).statistic for one in cosine]))
            rows.append(options.row("cosine_distance_rank_correlation", fall, **place))
            axis.plot(distances, cosine.mean(axis=0), linewidth=1, label=f"kv head {head}")
        axis.set(xscale="log", xlabel="distance in tokens", title=f"layer {layer}", ylabel="mean cosine of keys")
        axis.legend(fontsize=7)
    plots.save(figure, options.file(f"{NAME}_distance.png"))
    at = lambda row: f"at {row.extra['distance']}" if "distance" in row.extra else "rank correlation"  # noqa: E731
    results.print_rows(f"Mean cosine of keys by distance, {options.seeds} prompts", rows, head_of, at)
    return rows


def outliers(options: Options, layers: Layers) -> list[Row]:
    """The share of A tokens without an edge of at least .8, by head."""
    rows: list[Row] = []
    for layer, keys in layers.items():
        shares = np.asarray(without_edge(jnp.asarray(keys.swapaxes(1, 2)), 0.8), np.float64)
        for head, share in enumerate(shares.T):
            rows.append(options.row("share_without_edge", results.mean_interval(share), layer=layer, kv_head=head))
    results.print_rows("A tokens without an edge of at least .8", rows, head_of)
    return rows


def costs(options: Options) -> list[Row]:
    """Operations (two per multiplication) and seconds to find every key's partner or cluster, for one head."""
    rows: list[Row] = []
    for tokens in tqdm(options.cost_tokens, desc="costs", leave=False):
        keys = jax.random.normal(jax.random.key(options.seed), (tokens, COST_HEAD_DIM))
        clusters = max(1, round(CLUSTERS_PER_TOKEN * tokens))
        chunk = min(CHUNK, tokens)
        methods: list[tuple[str, Callable[..., Any], float]] = [
            ("all pairs", most_similar, tokens**2),
            ("k-means", functools.partial(cluster, clusters=clusters), ITERATIONS * tokens * clusters),
            ("bipartite", functools.partial(partners, chunk=tokens), tokens**2 / 4),
            ("chunked", functools.partial(partners, chunk=chunk), tokens * chunk / 4),
        ]
        for name, function, products in methods:
            operations = 2 * products * COST_HEAD_DIM
            elapsed = float(np.median(speed.seconds(function, keys, repetitions=3)))
            of: dict[str, Any] = {"policy": "chelsea", "variant": name, "context_tokens": tokens, "seed": options.seed}
            rows.append(results.row(NAME, "synthetic", "matching_operations", operations, **of))
            rows.append(results.row(NAME, "synthetic", "matching_seconds", elapsed, **of))
    title = f"Cost of matching, one head of {COST_HEAD_DIM} dimensions, float32"
    results.print_rows(title, rows, lambda row: f"{row.context_tokens} tokens, {row.variant}")
    return rows


@jax.jit
def most_similar(keys: Float[Array, "n D"]) -> tuple[Array, Array]:
    """Every key's most similar other key among all, in blocks, since all cosines would not fit."""
    directions = keys * jax.lax.rsqrt(jnp.sum(keys * keys, axis=1, keepdims=True))
    places = jnp.arange(keys.shape[0])

    def block(own):
        rows, numbers = own
        cosine = jnp.where(numbers[:, None] == places, -jnp.inf, rows @ directions.T)
        return jnp.max(cosine, axis=1), jnp.argmax(cosine, axis=1)

    width = min(512, keys.shape[0])
    return jax.lax.map(block, (directions.reshape(-1, width, keys.shape[1]), places.reshape(-1, width)))


@functools.partial(jax.jit, static_argnames="chunk")
def partners(keys: Float[Array, "n D"], chunk: int) -> tuple[Array, Array]:
    return soft_match(keys, jnp.int32(keys.shape[0]), chunk)


@functools.partial(jax.jit, static_argnames="clusters")
def cluster(keys: Float[Array, "n D"], clusters: int) -> Array:
    valid = jnp.ones(keys.shape[0], bool)
    return k_means(jax.random.key(0), keys, valid, clusters, iterations=ITERATIONS, tolerance=0.0).label


EXPERIMENT = Experiment(NAME, Options, run)
if __name__ == "__main__":
    EXPERIMENT.main()
