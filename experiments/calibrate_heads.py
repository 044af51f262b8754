"""Which heads of a model Chelsea should not merge: outlier heads that keep everything.

    python -m experiments.calibrate_heads
    python -m experiments.line_retrieval --policy chelsea:outlier_heads=build/heads_error.json --budget 50%

Two rules rank the heads. "share" is the paper's (its appendix B): the share of A tokens whose most similar B token in
the chunk has a cosine under .8. "error" is the error of attention to held-out queries, which come after the tokens that
were compressed, where the head's cache is merged. Both are
measured on two kinds of text, the text that the shipped checkpoint was trained for and the sources of Python's standard
library, and how far the kinds agree is reported. The heads of both files are those of the mean over the kinds. What a
file does at equal slots is then measured on later seeds.
"""

import dataclasses
import functools
import pathlib
import platform
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import stats
from tqdm import tqdm

import kvjax
from experiments.common import corpora, plots, results, settings, streams
from experiments.common.cases import spec_of
from experiments.common.options import Experiment, Run, each
from experiments.common.results import Row
from experiments.common.suites import RULES
from kvjax.combinators.outlier_heads import HeadChoice, OutlierHeads
from kvjax.policy import Policy
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.model.llama import Llama
from pallas_kernels.soft_match import soft_match

NAME = "calibrate_heads"
SINKS, RECENT, CHUNK = 16, 64, 256


@dataclasses.dataclass(frozen=True)
class Options(Run):
    """Options of this experiment."""

    corpus: tuple[str, ...] = each(*corpora.CORPORA, choices=corpora.CORPORA)  # kinds of text; repeatable
    seeds: int = 10  # texts per kind, from --seed on; as many later ones measure the effect
    tokens: int = 4032  # tokens that are compressed
    queries: int = 64  # held-out queries per text
    fraction: float = 0.04  # share of the heads that keep everything; at least one does
    kept: float = 0.5  # slots per head as a share of the tokens
    threshold: float = 0.8  # least cosine that counts as an edge

    QUICK: ClassVar[dict[str, Any]] = {"seeds": 2, "tokens": 512}

    def policy(self, heads: HeadChoice | None = None) -> Policy:
        """Chelsea at this budget."""
        slots = int(self.kept * self.tokens)
        chelsea = kvjax.Chelsea(slots, sinks=SINKS, recent=RECENT, chunk=CHUNK)
        if heads is None:
            return chelsea
        return OutlierHeads(chelsea, heads, kvjax.Exact(chelsea.compact_every))

    def row(self, metric: str, found: float | results.Estimate, **others: Any) -> Row:
        """A row of this run."""
        of: dict[str, Any] = {"policy": "chelsea", "context_tokens": self.tokens, "n": self.seeds, "seed": self.seed}
        return results.row(NAME, self.model, metric, found, **{**of, **others})


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was found of every head on one kind of text, a figure per text."""

    share: Float[np.ndarray, "R L H_kv"]  # of A tokens without an edge
    error: Float[np.ndarray, "R L H_kv"]  # where caches take means

    def ranking(self, rule: str) -> Float[np.ndarray, "L H_kv"]:
        """The larger, the sooner a head keeps everything."""
        if rule == "share":
            return self.share.mean(axis=0)
        return self.error.mean(axis=0)


def run(options: Options) -> list[Row]:
    """The rows of every head, of the rules' agreement, and of what their choices do; writes the choices."""
    model, tokenizer = settings.load_model(options)
    seeds = options.seeds_of(options.seeds)
    found = {name: measure(options, model, tokenizer, name, seeds) for name in options.corpus}
    chosen = {rule: choose(options, list(found.values()), rule) for rule in RULES}
    pathlib.Path(options.output_dir).mkdir(parents=True, exist_ok=True)
    given = {name: getattr(options, name) for name in ("model", "tokens", "kept", "threshold", "fraction")}
    made = {"corpora": list(found), "seeds": [seeds.start, seeds.stop - 1], "kvjax": kvjax.__version__, **given}
    for rule, choice in chosen.items():
        choice.save(options.file(f"heads_{rule}.json"), {**made, "rule": rule, "python": platform.python_version()})
    rows = head_rows(options, found, chosen) + agreement(options, found)
    later = range(seeds.stop, seeds.stop + options.seeds)
    return rows + [row for name in options.corpus for row in effect(options, model, tokenizer, name, later, chosen)]


def read(
    options: Options, model: Llama, tokenizer: Tokenizer, corpus: str, seeds: Sequence[int]
) -> Iterator[tuple[int, streams.Streams]]:
    """Every layer's keys and values of each text's first tokens, and the queries of its last ones."""
    prompts = corpora.prompts(corpus, tokenizer, seeds, options.tokens + options.queries)
    return streams.read_streams(model, prompts, options.tokens, options.queries)


def measure(options: Options, model: Llama, tokenizer: Tokenizer, corpus: str, seeds: Sequence[int]) -> Measured:
    """Shares and errors of every head on one kind of text."""
    shares: list[np.ndarray] = []
    errors: list[np.ndarray] = []
    layers = read(options, model, tokenizer, corpus, seeds)
    for _, drawn in tqdm(layers, total=model.config.layers, desc=corpus, leave=False):
        middle = jnp.asarray(drawn.keys[:, SINKS : options.tokens - RECENT].swapaxes(1, 2))
        shares.append(np.asarray(without_edge(middle, options.threshold)))
        errors.append(head_errors(options.policy(), spec_of(drawn), drawn))
    stack = lambda layers: np.stack(layers, axis=1)  # noqa: E731
    return Measured(stack(shares), stack(errors))


@jax.jit
def without_edge(keys: Float[Array, "R H_kv n D"], threshold: float) -> Float[Array, "R H_kv"]:
    """The share of A tokens without a B token of their chunk at that cosine."""

    def share(keys: Float[Array, "n D"]) -> Float[Array, ""]:
        cosine, _ = soft_match(keys, jnp.int32(keys.shape[0]), CHUNK)
        there = ~jnp.isneginf(cosine)
        return jnp.sum(there & (cosine < threshold)) / jnp.sum(there)

    return jax.vmap(jax.vmap(share))(keys)


def head_errors(policy: Policy, spec: kvjax.CacheSpec, drawn: streams.Streams) -> Float[np.ndarray, "R H_kv"]:
    """|z - Attn| / |Attn| of every kv head, its mean over queries and over the query heads that read it."""
    given = (jnp.asarray(x) for x in (drawn.keys, drawn.values, drawn.queries))
    attended = np.asarray(compressed(policy, spec, *given), np.float64)
    exact = streams.exact_attention(drawn)
    error = np.linalg.norm(attended - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    return error.reshape(*error.shape[:2], spec.kv_heads, -1).mean(axis=(1, 3))


@functools.partial(jax.jit, static_argnums=(0, 1))
def compressed(policy, spec, keys, values, queries):
    """What attention to the queries gives once keys and values are compressed."""
    row_keys = jax.random.split(jax.random.key(0), spec.batch)
    lengths = jnp.full(spec.batch, spec.max_prompt_tokens, jnp.int32)
    cache, _ = kvjax.prefill(kvjax.init(policy, spec, row_keys), keys, values, lengths)
    return kvjax.normalize(kvjax.attend(cache, queries))


def choose(options: Options, found: Sequence[Measured], rule: str) -> HeadChoice:
    """The heads of a rule, by its mean over the kinds of text."""
    ranking = np.mean([one.ranking(rule) for one in found], axis=0)
    full = first_heads(ranking, options.fraction)
    layers, kv_heads = ranking.shape
    return HeadChoice(layers, kv_heads, full=tuple(sorted(full)))


def first_heads(ranking: Float[np.ndarray, "L H_kv"], fraction: float) -> set[tuple[int, int]]:
    """Such a share of the heads, at least one: those that rank highest."""
    count = max(1, round(fraction * ranking.size))
    best = np.argsort(-ranking, axis=None, kind="stable")[:count]
    return {(int(place) // ranking.shape[1], int(place) % ranking.shape[1]) for place in best}


def head_rows(options: Options, found: dict[str, Measured], chosen: dict[str, HeadChoice]) -> list[Row]:
    """Every head's share and errors, as rows and as a table that marks what each rule chose."""
    rows: list[Row] = []
    for corpus, one in found.items():
        for layer, head in np.ndindex(one.share.shape[1:]):
            share = results.mean_interval(one.share[:, layer, head])
            place: dict[str, Any] = {"task": corpus, "layer": layer, "kv_head": head}
            rows.append(options.row("share_without_edge", share, **place))
            rows.append(options.row("relative_error", results.mean_interval(one.error[:, layer, head]), **place))
    title = f"Heads, {options.kept:.0%} of {options.tokens} tokens kept"
    what = lambda row: f"{row.metric} {row.variant or ''}"  # noqa: E731
    results.print_rows(
        title, rows, lambda row: "{}, layer {layer}, kv head {kv_head}".format(row.task, **row.extra), what
    )
    for rule, choice in chosen.items():
        print(f"Rule {rule}: heads (layer, kv head) that keep all: {choice.full}")
    return rows


def agreement(options: Options, found: dict[str, Measured]) -> list[Row]:
    """How far two kinds of text agree on the heads of each rule: overlap of the sets, correlation of the ranks."""
    if len(found) != 2:
        return []
    rows = []
    for rule in RULES:
        one, other = (measured.ranking(rule) for measured in found.values())
        sets = first_heads(one, options.fraction), first_heads(other, options.fraction)
        overlap = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
        rank = float(stats.spearmanr(one.ravel(), other.ravel()).statistic)
        print(f"Rule {rule}: overlap (Jaccard) {overlap:.2f}, rank correlation over {one.size} heads {rank:.2f}")
        for metric, value in {"overlap": overlap, "rank_correlation": rank}.items():
            rows.append(options.row(metric, value, rule=rule, n=one.size))
    return rows


def effect(
    options: Options,
    model: Llama,
    tokenizer: Tokenizer,
    corpus: str,
    seeds: range,
    chosen: dict[str, HeadChoice],
) -> list[Row]:
    """Errors on later seeds at the same number of slots: without a choice and with each rule's. Differences are paired
    by text."""
    choices: dict[str, HeadChoice | None] = {"none": None, **chosen}
    errors: dict[str, list[np.ndarray]] = {name: [] for name in choices}
    for layer, drawn in read(options, model, tokenizer, corpus, seeds):
        for name, choice in choices.items():
            try:
                spec = spec_of(drawn, layer, model.config.layers)
                errors[name].append(head_errors(options.policy(choice), spec, drawn).mean(axis=1))
            except ValueError as reason:
                if layer == 0:
                    print(f"{name} is left out: {reason}")
    means = {name: np.mean(of, axis=0) for name, of in errors.items() if of}
    rows = []
    for name, error in means.items():
        found = {"relative_error": error, "relative_error_minus_none": error - means["none"]}
        for metric, of in found.items():
            rows.append(options.row(metric, results.mean_interval(of), task=corpus, variant=f"heads={name}"))
    title = f"{corpus}, seeds {seeds.start} to {seeds.stop - 1}: all heads, equal slots"
    results.print_rows(title, rows, lambda row: str(row.variant))
    return rows


def draw(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Shares and errors per head, by the place of the head, a line per kind of text."""
    plots.by_rows(
        path,
        [row for row in rows if "kv_head" in row.extra],
        panel=lambda row: f"{row.metric.replace('_', ' ')} {row.variant or ''}",
        x=lambda row: row.extra["layer"] + row.extra["kv_head"] / 100,
        label=lambda row: str(row.task),
        xlabel="layer, heads side by side",
    )


EXPERIMENT = Experiment(NAME, Options, run, draw)
if __name__ == "__main__":
    EXPERIMENT.main()
