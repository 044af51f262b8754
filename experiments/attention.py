"""Measures attention over compressed keys and values, layer by layer of a pretrained model or on synthetic streams.

    python -m experiments.attention --model smollm2-135m --text docs --policy uniform --policy balancekv --budget 25%
    python -m experiments.attention --measure recall --text books --data_dir DIR --budget 64slots 128slots
    python -m experiments.attention --stream tight --norm 4 --policy subgen --policy uniform

- `error`: relative error of attention of the last tokens' queries over a compressed prompt (BalanceKV, Figures 1 and
  3).
- `recall`: share of a query's B tokens with the largest logits that the first clusters or pages with B tokens contain,
  and the share of clusters that the previous one or two steps selected, too (ClusterKV, Figure 11 and its cache's hit
  rates).
- `similarity`: cosine of keys by distance, share of tokens with a neighbor of cosine .8 in their chunk, by head
  (Chelsea, Figures 2 and 3), and variance within clusters of keys and of values (SubGen, Figure 1).

Intervals are over seeds, which are the rows of a batch. Figures have the values of all seeds, because settings share
texts and are compared in pairs.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

import kvjax
from experiments import evaluate
from experiments.common import caches, streams
from experiments.common.caches import Setting
from experiments.common.flags import Flags, repeatable, run_command
from experiments.common.output import Figure, figure, print_figures, write_figures
from experiments.common.statistics import mean_interval
from kvjax.budget import Budget, row_bytes, row_read_bytes
from kvjax.methods.clustergen.k_center import greedy_k_center
from kvjax.methods.clusterkv.clusterkv import ClusterKV
from kvjax.policy import Policy
from kvjax.shared.k_means import k_means
from pallas_kernels.soft_match import soft_match

SINKS = 16  # tokens that ClusterKV and Chelsea keep; excluded from `recall` and `similarity`
PAGE = 16  # tokens of a page (Quest)
CHUNK, COSINE = 256, 0.8  # Chelsea's chunk, and the similarity that counts as an edge
NEAR = 16  # tokens


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of a measurement."""

    measure: tuple[str, ...] = repeatable("error", choices=("error", "recall", "similarity"))  # Repeatable.
    model: str = "smollm2-135m"  # Name of `kvjax models`, GGUF file or Hugging Face directory.
    text: str = "docs"  # Text of the prompts: docs (Python's documentation), books, wikitext2 or essays.
    data_dir: pathlib.Path | None = None  # Directory of published files.
    stream: tuple[str, ...] = repeatable(choices=streams.SYNTHETIC)  # Synthetic streams in place of a model.
    norm: float = 8.0  # Norm of synthetic keys and queries.
    policy: tuple[str, ...] = repeatable("uniform", "subgen", "balancekv", "chelsea", "snapkv")  # Of `error`.
    budget: tuple[str, ...] = repeatable("50%", "25%", "12.5%")  # Of `recall`: slots.
    layer: tuple[int, ...] = repeatable()  # Layers; by default all.
    tokens: int = 1024  # Tokens of a stream.
    queries: int = 32  # Queries after it.
    seeds: int = 4  # Number of seeds, each with its own text.
    draws: int = 1  # Random numbers of the policies per seed; `error` is the mean over them.
    cluster_tokens: tuple[int, ...] = repeatable(80, 16)  # Tokens per cluster of `recall`; repeatable.
    output_dir: pathlib.Path = pathlib.Path("build/attention")  # Directory of the figures.


class Case(NamedTuple):
    """A stream and its place: a layer of a model, or the name of a synthetic stream."""

    name: str
    spec: kvjax.CacheSpec
    stream: streams.Streams


def cases(options: Options) -> Iterator[Case]:
    """Yields the streams of the options."""
    seeds = range(options.seeds)
    if options.stream:
        for name in options.stream:
            drawn = streams.synthetic(name, seeds, options.tokens, options.queries, prompt_queries=True)
            yield Case(name, _spec(drawn), drawn.scaled(options.norm))
        return
    llm = evaluate.load_model(options.model, None)
    length = options.tokens + options.queries
    prompts = streams.text_prompts(llm.tokenizer, options.text, seeds, length, options.data_dir)
    for number, drawn in streams.recorded(llm.model, prompts, options.queries, prompt_queries=True):
        if not options.layer or number in options.layer:
            frequencies = llm.model.config.rotary(number, length).frequencies
            yield Case(f"layer {number}", _spec(drawn, number, llm.model.config.layers, frequencies), drawn)


def _spec(
    drawn: streams.Streams, layer: int = 0, layers: int = 1, rope_frequencies: tuple[float, ...] | None = None
) -> kvjax.CacheSpec:
    """Returns the spec of a cache for a stream."""
    batch, tokens, kv_heads, head_dim = drawn.keys.shape
    heads = drawn.queries.shape[2]
    sizes: Any = {"batch": batch, "query_heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    sizes |= {"max_prompt_tokens": tokens, "max_new_tokens": 1, "layer": layer, "layers": layers}
    return kvjax.CacheSpec(**sizes, rope_frequencies=rope_frequencies)


def measure_error(options: Options, case: Case) -> list[Figure]:
    """Returns the errors of all settings on one stream."""
    exact = streams.exact_attention(case.stream)
    figures = []
    for setting in caches.parse_settings(options.policy, options.budget):
        try:
            draws = [attend(setting, case, draw) for draw in range(options.draws)]
        except ValueError as error:
            print(f"{setting} is left out in {case.name}: {error}")
            continue
        _, held, read = draws[0]
        labels: dict[str, Any] = {"setting": str(setting), "case": case.name, "held": held, "read": read}
        labels |= {"tokens": options.tokens, "seeds": options.seeds, "draws": options.draws}
        samples = np.mean([streams.relative_errors(attended, exact) for attended, _, _ in draws], axis=0)
        figures.append(_over_seeds("relative_error", samples, **labels))
    print_figures(f"Relative error of attention, {case.name}", figures, "setting")
    return figures


def _over_seeds(metric: str, samples: Float[np.ndarray, "n"], **labels: Any) -> Figure:
    """Returns the figure of one value per seed."""
    return figure(metric, mean_interval(samples), samples=np.asarray(samples, float).tolist(), **labels)


def attend(setting: Setting, case: Case, draw: int = 0) -> tuple[np.ndarray, float, float]:
    """Compresses a stream and attends to it.

    Args:
        setting: settings of the cache.
        case: the stream.
        draw: seed of the policy's random numbers.

    Returns:
        The attention output, and the held and read shares of a full cache.
    """
    spec, drawn = case.spec, case.stream
    full = dataclasses.replace(spec, dtype=caches.REFERENCE_DTYPE)
    policy = setting.resolve(spec, spec.max_prompt_tokens)
    count = policy.requires.num_prompt_queries(spec.max_prompt_tokens)
    assert drawn.prompt_queries is not None
    queries = jnp.asarray(drawn.prompt_queries[:, -count:]) if count else None
    rows = jax.random.split(jax.random.key(draw), spec.batch)
    cache, counters = compress(policy, spec, rows, jnp.asarray(drawn.keys), jnp.asarray(drawn.values), queries)
    kvjax.raise_faults((cache, counters))
    attend = jax.jit(lambda *arguments: kvjax.normalize(kvjax.attend(*arguments)))
    attended = attend(cache, counters, drawn.queries)
    total = full.full_cache_bytes(spec.max_prompt_tokens)
    return np.asarray(attended, np.float64), row_bytes(policy, full) / total, row_read_bytes(policy, full) / total


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def compress(
    policy: Policy, spec: kvjax.CacheSpec, rows: Key[Array, "B"], keys: Array, values: Array, queries: Array | None
) -> tuple[kvjax.Cache, kvjax.Counters]:
    """Returns the cache and the counters after a prompt, with one seed per row."""
    lengths = jnp.full(spec.batch, spec.max_prompt_tokens, jnp.int32)
    cache, counters, _ = kvjax.prefill(*kvjax.init(policy, spec, rows), keys, values, lengths, queries)
    return cache, counters


def measure_recall(options: Options, case: Case) -> list[Figure]:
    """Returns the recall and the hit rates of clusters and pages on one stream."""
    keys = jnp.asarray(case.stream.keys[:, SINKS:])
    batch, count, _, dim = case.stream.queries.shape
    queries = jnp.asarray(case.stream.queries).reshape(batch, count, keys.shape[2], -1, dim)
    figures = []
    for size in (None, *options.cluster_tokens):
        name = f"pages of {PAGE}" if size is None else f"clusters of {size}"
        for budget in options.budget:
            selected = Budget.parse(budget).slots
            if selected is None or selected > keys.shape[1]:
                raise ValueError(f"budget={budget} must be at most {keys.shape[1]} slots")
            result = np.asarray(recall_of_heads(size, selected, keys, queries)).mean(axis=1)
            labels = {"setting": f"{name} @ {selected}", "case": case.name}
            names = ("recall", "hit_rate_1", "hit_rate_2")
            figures += [_over_seeds(metric, v, **labels) for metric, v in zip(names, result.T, strict=True)]
    print_figures(f"Recall of the tokens with the largest logits, {case.name}", figures, "setting")
    return figures


@functools.partial(jax.jit, static_argnames=("size", "selected"))
def recall_of_heads(
    size: int | None, selected: int, keys: Float[Array, "R n H D"], queries: Float[Array, "R Q H G D"]
) -> Float[Array, "R H 3"]:
    """Returns recall and hit rates of every row and KV head (`recall`)."""

    def of_row(row):
        return jax.lax.map(lambda head: recall(size, selected, *head), row)

    return jax.lax.map(of_row, (keys.swapaxes(1, 2), queries.transpose(0, 2, 1, 3, 4)))


def recall(
    size: int | None, selected: int, keys: Float[Array, "n D"], queries: Float[Array, "Q G D"]
) -> Float[Array, "3"]:
    """Measures the selection of one KV head.

    Args:
        size: tokens per cluster; None for pages.
        selected: number of tokens that are selected.
        keys: keys of the tokens.
        queries: queries of consecutive steps.

    Returns:
        Mean recall of the `selected` tokens with the largest logits, and the shares of selected groups that the last
        step, or one of the last two steps, selected.
    """
    label, scores, count = group_scores(size, keys, queries)
    order = jnp.argsort(-scores, axis=-1, stable=True)
    sizes = jnp.zeros(count, jnp.int32).at[label].add(1)
    ordered = sizes[order]
    chosen = (jnp.cumsum(ordered, axis=-1) - ordered < selected) & (ordered > 0)
    chosen = jnp.take_along_axis(chosen, jnp.argsort(order, axis=-1), axis=-1)
    # The last group is trimmed to its first tokens.
    rank = jnp.argsort(order, axis=-1)[..., label]
    retrieved = _ranks(-rank.astype(jnp.float32)) < selected
    largest = _ranks(queries @ keys.T) < selected
    share = jnp.mean(jnp.sum(retrieved & largest, axis=-1) / selected)
    now, last, before = chosen[2:], chosen[1:-1], chosen[:-2]
    total = jnp.sum(now, axis=-1)
    hits = [jnp.mean(jnp.sum(now & held, axis=-1) / total) for held in (last, last | before)]
    return jnp.stack([share, *hits])


def _ranks(scores: Float[Array, "... n"]) -> Int[Array, "... n"]:
    """Returns the rank of every token by descending score; the earlier of equal ones first."""
    return jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1)


def group_scores(
    size: int | None, keys: Float[Array, "n D"], queries: Float[Array, "Q G D"]
) -> tuple[Int[Array, "n"], Float[Array, "Q G C"], int]:
    """Groups tokens and scores the groups.

    Args:
        size: tokens per cluster (ClusterKV's k-means, scored by the mean key); None for pages, scored by Quest's bound.
        keys: the keys.
        queries: the queries.

    Returns:
        The group of every token, the scores, and the number of groups.
    """
    tokens = keys.shape[0]
    count = -(-tokens // (size or PAGE))
    if size is None:
        label = jnp.arange(tokens) // PAGE
        low = jnp.full((count, keys.shape[1]), jnp.inf).at[label].min(keys)
        high = jnp.full((count, keys.shape[1]), -jnp.inf).at[label].max(keys)
        return label, jnp.maximum(queries, 0) @ high.T + jnp.minimum(queries, 0) @ low.T, count
    settings = ClusterKV(tokens).k_means_options(is_prompt=True)
    label = k_means(jax.random.key(0), keys, jnp.ones(tokens, bool), count, **settings).label
    means, sizes = group_means(keys, label, count)
    return label, jnp.where(sizes > 0, queries @ means.T, -jnp.inf), count


def group_means(
    vectors: Float[Array, "n D"], label: Int[Array, "n"], count: int
) -> tuple[Float[Array, "C D"], Int[Array, "C"]]:
    """Returns the mean of every group of vectors (zeros for an empty group), and the sizes of the groups."""
    sizes = jnp.zeros(count, jnp.int32).at[label].add(1)
    sums = jnp.zeros((count, vectors.shape[1])).at[label].add(vectors)
    return sums / jnp.maximum(sizes, 1)[:, None], sizes


def measure_similarity(options: Options, case: Case) -> list[Figure]:
    """Returns how similar keys are by distance and by head, and how well keys and values cluster."""
    keys, values = (jnp.asarray(x[:, SINKS:]).swapaxes(1, 2) for x in (case.stream.keys, case.stream.values))
    near, far = cosine_by_distance(keys)
    figures = [
        _over_seeds("cosine", np.asarray(near), setting=f"distance up to {NEAR}", case=case.name),
        _over_seeds("cosine", np.asarray(far), setting=f"distance over {CHUNK}", case=case.name),
        _over_seeds("cluster_residual", np.asarray(cluster_residual(keys)), setting="keys", case=case.name),
        _over_seeds("cluster_residual", np.asarray(cluster_residual(values)), setting="values", case=case.name),
    ]
    shares = 1 - np.asarray(share_without_edge(keys))
    figures += [
        _over_seeds("share_with_edge", share, setting=f"KV head {head}", case=case.name)
        for head, share in enumerate(shares.T)
    ]
    print_figures(f"Similarity of keys and values, {case.name}", figures, "setting")
    return figures


@jax.jit
def cosine_by_distance(keys: Float[Array, "R H n D"]) -> tuple[Float[Array, "R"], Float[Array, "R"]]:
    """Returns the mean cosine of keys at most `NEAR` tokens apart, and of keys more than a chunk apart."""
    units = keys / jnp.linalg.norm(keys, axis=-1, keepdims=True)
    cosine = jnp.mean(units @ units.swapaxes(2, 3), axis=1)
    distance = jnp.abs(jnp.subtract.outer(jnp.arange(keys.shape[2]), jnp.arange(keys.shape[2])))
    near, far = (distance > 0) & (distance <= NEAR), distance > CHUNK
    return jnp.mean(cosine, axis=(1, 2), where=near), jnp.mean(cosine, axis=(1, 2), where=far)


@jax.jit
def cluster_residual(vectors: Float[Array, "R H n D"]) -> Float[Array, "R"]:
    """Returns the share of the variance that remains within the clusters of greedy k-center, a center per 16 tokens."""

    def residual(x: Float[Array, "n D"]) -> Float[Array, ""]:
        centers = x[greedy_k_center(x, jnp.ones(len(x), bool), len(x) // 16).index]
        label = jnp.argmin(jnp.sum((x[:, None] - centers) ** 2, axis=-1), axis=1)
        means, _ = group_means(x, label, len(centers))
        return jnp.sum((x - means[label]) ** 2) / jnp.sum((x - x.mean(axis=0)) ** 2)

    return jnp.mean(jax.lax.map(lambda row: jax.lax.map(residual, row), vectors), axis=1)


@jax.jit
def share_without_edge(keys: Float[Array, "R H n D"]) -> Float[Array, "R H"]:
    """Returns the share of Chelsea's A tokens whose most similar B token of the chunk has a smaller cosine than .8."""

    def share(keys: Float[Array, "n D"]) -> Float[Array, ""]:
        cosine, _ = soft_match(keys, jnp.int32(keys.shape[0]), CHUNK)
        exists = ~jnp.isneginf(cosine)
        return jnp.sum(exists & (cosine < COSINE)) / jnp.sum(exists)

    return jax.vmap(jax.vmap(share))(keys)


MEASURES = {"error": measure_error, "recall": measure_recall, "similarity": measure_similarity}


def main(options: Options) -> None:
    """Prints the tables and writes the figures."""
    figures: list[Figure] = []
    for case in cases(options):
        for measure in options.measure:
            figures += [one | {"measure": measure} for one in MEASURES[measure](options, case)]
        write_figures(options.output_dir / "attention.json", figures)


if __name__ == "__main__":
    run_command(main, Options)
