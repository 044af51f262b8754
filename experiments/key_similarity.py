"""How alike keys are, near and far: what Chelsea's matching rests on, and what finding alike keys costs.

    python -m experiments.key_similarity

- The cosine of keys by their distance in the text, by layer and head (Chelsea's Figures 2 and 3): the maps, and the
  mean over pairs, which should fall, convexly, for alternation to be the best partition (its Theorem 6.1).
- Outlier heads: the share of A tokens whose most similar B token of the chunk has a cosine under .8 (its appendix B).
- The cost of matching (its Table 1): operations by its formulas, and seconds measured here, of all pairs, k-means,
  bipartite matching and chunked soft matching.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags
from jaxtyping import Array, Float
from scipy import stats
from tqdm import tqdm

from experiments.common import geometry, plots, results, settings, speed, streams
from kvjax.structures.k_means import k_means
from pallas_kernels.soft_match import soft_match

NAME = "key_similarity"
MAP_TOKENS = 256  # of the stretch whose cosines are drawn as a map
CHUNK = 256
CLUSTERS_PER_TOKEN = 1 / 80  # ClusterKV's default number of clusters
ITERATIONS = 10  # of k-means
COST_HEAD_DIM = 128

settings.define_run()
_SEEDS = flags.DEFINE_integer("seeds", 5, "Prompts, from --seed on.")
_TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens of a prompt.")
_FARTHEST = flags.DEFINE_integer("farthest", 1024, "Largest distance between two tokens.")
_COST_TOKENS = flags.DEFINE_multi_integer("cost_tokens", [1024, 4096, 16384], "Tokens to match; repeatable.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    quick = flags.FLAGS.quick
    seeds = range(flags.FLAGS.seed, flags.FLAGS.seed + (2 if quick else _SEEDS.value))
    tokens = 512 if quick else _TOKENS.value
    loaded = settings.load_model(flags.FLAGS.model)
    layers = {number: found.keys for number, found in streams.prompt_streams(*loaded, seeds, tokens, queries=1)}
    directory = pathlib.Path(flags.FLAGS.output_dir)
    draw_maps(layers, directory / f"{NAME}_maps.png")
    rows = by_distance(layers, min(_FARTHEST.value, tokens // 2), directory / f"{NAME}_distance.png")
    rows += outliers(layers)
    rows += costs(_COST_TOKENS.value[:1] if quick else _COST_TOKENS.value)
    results.write_rows(directory / f"{NAME}.json", rows)
    print(f"Rows: {directory / f'{NAME}.json'}   plots: {directory}/{NAME}_*.png")


def row(metric: str, estimate: results.Estimate, layers: dict[int, np.ndarray], **extra: Any) -> results.Row:
    batch, tokens = next(iter(layers.values())).shape[:2]
    return results.Row(
        experiment=NAME,
        model=flags.FLAGS.model,
        stream="recorded",
        policy="chelsea",
        metric=metric,
        value=estimate.value,
        ci95_low=estimate.low,
        ci95_high=estimate.high,
        context_tokens=tokens,
        n=batch,
        seed=flags.FLAGS.seed,
        extra=extra,
    )


def draw_maps(layers: dict[int, Float[np.ndarray, "R n H_kv D"]], path: pathlib.Path) -> None:
    """The cosines of all pairs in a stretch in the middle of the first prompt, a map per layer and head."""
    heads = next(iter(layers.values())).shape[2]
    figure, axes = plt.subplots(len(layers), heads, figsize=(3 * heads + 1, 3 * len(layers)), squeeze=False)
    for (layer, keys), panels in zip(layers.items(), axes, strict=True):
        middle = max((keys.shape[1] - MAP_TOKENS) // 2, 0)
        for head, axis in enumerate(panels):
            part = geometry.unit(keys[0, middle : middle + MAP_TOKENS, head])
            image = axis.imshow(part @ part.T, vmin=-1, vmax=1, cmap="RdBu_r")
            axis.set_title(f"layer {layer}, kv head {head}", fontsize=9)
    figure.colorbar(image, ax=axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def by_distance(
    layers: dict[int, Float[np.ndarray, "R n H_kv D"]], farthest: int, path: pathlib.Path
) -> list[results.Row]:
    """The mean cosine at every distance; as a plot, and as a table of some distances and of the rank correlation."""
    rows, lines = [], []
    told = [distance for distance in (1, 2, 8, 64, 256, 1024) if distance <= farthest]
    distances = np.arange(1, farthest + 1)
    figure, axes = plt.subplots(1, len(layers), figsize=(5 * len(layers), 4), squeeze=False, sharey=True)
    for (layer, keys), axis in zip(layers.items(), axes[0], strict=True):
        for head in range(keys.shape[2]):
            cosine = geometry.mean_cosines(geometry.unit(keys[:, :, head]), farthest)
            place = {"layer": layer, "kv_head": head}
            estimates = [results.mean_interval(at) for at in cosine.T]
            rows += [row("cosine", estimates[distance - 1], layers, distance=distance, **place) for distance in told]
            falls = np.array([stats.spearmanr(distances, one).statistic for one in cosine])
            fall = results.mean_interval(falls)
            rows.append(row("cosine_distance_rank_correlation", fall, layers, **place))
            lines.append(
                (f"layer {layer}, kv head {head}", *(f"{estimates[d - 1].value:.3f}" for d in told), str(fall))
            )
            axis.plot(distances, cosine.mean(axis=0), linewidth=1, label=f"kv head {head}")
        axis.set(xscale="log", xlabel="distance in tokens", title=f"layer {layer}")
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("mean cosine of keys")
    plots.save(figure, path)
    columns = ("head", *(f"at {distance}" for distance in told), "rank correlation")
    results.print_table(f"Mean cosine of keys by distance, {len(cosine)} prompts", columns, lines)
    return rows


def outliers(layers: dict[int, Float[np.ndarray, "R n H_kv D"]]) -> list[results.Row]:
    """The share of A tokens without an edge of at least .8, by head."""
    rows, lines = [], []

    @jax.jit
    @jax.vmap
    def share(keys: Float[Array, "n D"]) -> Float[Array, ""]:
        cosine, _ = soft_match(keys, jnp.int32(keys.shape[0]), CHUNK)
        there = ~jnp.isneginf(cosine)
        return jnp.sum(there & (cosine < 0.8)) / jnp.sum(there)

    for layer, keys in layers.items():
        for head in range(keys.shape[2]):
            estimate = results.mean_interval(np.asarray(share(jnp.asarray(keys[:, :, head])), np.float64))
            rows.append(row("share_without_edge", estimate, layers, layer=layer, kv_head=head))
            lines.append((f"layer {layer}, kv head {head}", str(estimate)))
    results.print_table("A tokens without an edge of at least .8", ("head", "share [95%]"), lines)
    return rows


def costs(sizes: Sequence[int]) -> list[results.Row]:
    """Operations (two per multiplication) and seconds to find every key's partner or cluster, for one head."""
    rows, lines = [], []
    for tokens in tqdm(sizes, desc="costs", leave=False):
        keys = jax.random.normal(jax.random.key(flags.FLAGS.seed), (tokens, COST_HEAD_DIM))
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
            shared: dict[str, Any] = {"experiment": NAME, "model": "synthetic", "policy": "chelsea", "variant": name}
            for metric, value in {"matching_operations": operations, "matching_seconds": elapsed}.items():
                rows.append(
                    results.Row(**shared, metric=metric, value=value, context_tokens=tokens, seed=flags.FLAGS.seed)
                )
            lines.append((f"{tokens} tokens, {name}", f"{operations / 1e9:.3g}", f"{1e3 * elapsed:.3g}"))
    title = f"Cost of matching, one head of {COST_HEAD_DIM} dimensions, float32"
    results.print_table(title, ("method", "Gflop", "ms"), lines)
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


if __name__ == "__main__":
    app.run(main)
