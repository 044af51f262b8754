"""Which heads of a model Chelsea should not merge: outlier heads that keep everything, and heads that drop.

    python -m experiments.calibrate_heads
    python -m experiments.line_retrieval --policy chelsea:heads=build/heads_error.json --budget 50%

Two rules rank the heads. "share" is the paper's (its appendix B): the share of A tokens whose most similar B token in
the chunk has a cosine under .8. "error" is the error of attention to held-out queries, which come after the tokens that
were compressed, where the head's cache is merged; there a head drops instead where that error is smaller. Both are
measured on two kinds of text, the text that the shipped checkpoint was trained for and the sources of Python's standard
library, and how far the kinds agree is reported. The heads of both files are those of the mean over the kinds. What a
file does at equal slots is then measured on later seeds.
"""

import dataclasses
import functools
import pathlib
import platform
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags
from jaxtyping import Array, Float
from kvjax_models.llama import Llama
from kvjax_models.tokenizer import Tokenizer
from scipy import stats
from tqdm import tqdm

import kvjax
from experiments.common import corpora, plots, results, settings, streams
from kvjax.combinators.head_choice import HeadChoice
from pallas_kernels.soft_match import soft_match

NAME = "calibrate_heads"
SINKS, RECENT, CHUNK = 16, 64, 256
RULES = ("share", "error")

settings.define_run()
_CORPUS = flags.DEFINE_multi_enum("corpus", list(corpora.CORPORA), list(corpora.CORPORA), "Kinds of text; repeatable.")
_SEEDS = flags.DEFINE_integer("seeds", 10, "Texts per kind, from --seed on; as many later ones measure the effect.")
_TOKENS = flags.DEFINE_integer("tokens", 4032, "Tokens that are compressed.")
_QUERIES = flags.DEFINE_integer("queries", 64, "Held-out queries per text.")
_FRACTION = flags.DEFINE_float("fraction", 0.04, "Share of the heads that keep everything; at least one does.")
_KEPT = flags.DEFINE_float("kept", 0.5, "Slots per head as a share of the tokens.")
_THRESHOLD = flags.DEFINE_float("threshold", 0.8, "Least cosine that counts as an edge.")


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was found of every head on one kind of text, a figure per text."""

    share: Float[np.ndarray, "R L H_kv"]  # of A tokens without an edge
    error: dict[Literal["mean", "drop"], Float[np.ndarray, "R L H_kv"]]  # where caches take means, and where they drop

    def ranking(self, rule: str) -> Float[np.ndarray, "L H_kv"]:
        """The larger, the sooner a head keeps everything."""
        if rule == "share":
            return self.share.mean(axis=0)
        return np.minimum(*(self.error[joins].mean(axis=0) for joins in ("mean", "drop")))


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    model, tokenizer = settings.load_model(flags.FLAGS.model)
    count = 2 if flags.FLAGS.quick else _SEEDS.value
    seeds = range(flags.FLAGS.seed, flags.FLAGS.seed + count)
    found = {name: measure(model, tokenizer, name, seeds) for name in _CORPUS.value}
    directory = pathlib.Path(flags.FLAGS.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    chosen = {rule: choose(list(found.values()), rule) for rule in RULES}
    for rule, choice in chosen.items():
        choice.save(directory / f"heads_{rule}.json", provenance(rule, seeds, found))
    rows = head_rows(found, chosen) + agreement(found)
    later = range(seeds.stop, seeds.stop + count)
    rows += [row for name in _CORPUS.value for row in effect(model, tokenizer, name, later, chosen)]
    results.write_rows(directory / f"{NAME}.json", rows)
    plot(directory / f"{NAME}.png", found, chosen)
    print(f"Files: {directory}/heads_*.json   rows: {directory / f'{NAME}.json'}   plot: {directory / f'{NAME}.png'}")


def tokens() -> int:
    return 512 if flags.FLAGS.quick else _TOKENS.value


def read(
    model: Llama, tokenizer: Tokenizer, corpus: str, seeds: Sequence[int]
) -> Iterator[tuple[int, streams.Streams]]:
    """Every layer's keys and values of each text's first tokens, and the queries of its last ones."""
    prompts = corpora.prompts(corpus, tokenizer, seeds, tokens() + _QUERIES.value)
    return streams.read_streams(model, prompts, tokens(), _QUERIES.value)


def measure(model: Llama, tokenizer: Tokenizer, corpus: str, seeds: Sequence[int]) -> Measured:
    """Shares and errors of every head on one kind of text."""
    shares: list[np.ndarray] = []
    errors: dict[Literal["mean", "drop"], list[np.ndarray]] = {"mean": [], "drop": []}
    for _, drawn in tqdm(read(model, tokenizer, corpus, seeds), total=model.config.layers, desc=corpus, leave=False):
        middle = jnp.asarray(drawn.keys[:, SINKS : tokens() - RECENT].swapaxes(1, 2))
        shares.append(np.asarray(without_edge(middle, _THRESHOLD.value)))
        for joins, of in errors.items():
            of.append(head_errors(policy(joins), spec_of(drawn), drawn))
    stack = lambda layers: np.stack(layers, axis=1)  # noqa: E731
    return Measured(stack(shares), {joins: stack(of) for joins, of in errors.items()})


@jax.jit
def without_edge(keys: Float[Array, "R H_kv n D"], threshold: float) -> Float[Array, "R H_kv"]:
    """The share of A tokens without a B token of their chunk at that cosine."""

    def share(keys: Float[Array, "n D"]) -> Float[Array, ""]:
        cosine, _ = soft_match(keys, jnp.int32(keys.shape[0]), CHUNK)
        there = ~jnp.isneginf(cosine)
        return jnp.sum(there & (cosine < threshold)) / jnp.sum(there)

    return jax.vmap(jax.vmap(share))(keys)


def policy(joins: Literal["mean", "drop"], heads: HeadChoice | None = None) -> kvjax.Chelsea:
    """Chelsea at the budget of the flags."""
    return kvjax.Chelsea(
        int(_KEPT.value * tokens()),
        sinks=SINKS,
        recent=RECENT,
        chunk=CHUNK,
        joins=joins,
        heads=heads,
    )


def spec_of(drawn: streams.Streams, layer: int = 0, layers: int = 1) -> kvjax.CacheSpec:
    batch, count, kv_heads, head_dim = drawn.keys.shape
    sizes = {"batch": batch, "query_heads": drawn.queries.shape[2], "kv_heads": kv_heads, "head_dim": head_dim}
    return kvjax.CacheSpec(**sizes, max_prompt=count, max_new=1, layer=layer, layers=layers)


def head_errors(policy: kvjax.Chelsea, spec: kvjax.CacheSpec, drawn: streams.Streams) -> Float[np.ndarray, "R H_kv"]:
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
    lengths = jnp.full(spec.batch, spec.max_prompt, jnp.int32)
    cache, _ = kvjax.prefill(kvjax.init(policy, spec, row_keys), keys, values, lengths)
    return kvjax.output(kvjax.attend(cache, queries))


def choose(found: Sequence[Measured], rule: str) -> HeadChoice:
    """The heads of a rule, by its mean over the kinds of text."""
    ranking = np.mean([one.ranking(rule) for one in found], axis=0)
    full = first_heads(ranking)
    drop: set[tuple[int, int]] = set()
    if rule == "error":
        means, drops = (np.mean([one.error[joins].mean(axis=0) for one in found], axis=0) for joins in ("mean", "drop"))
        drop = {(int(layer), int(head)) for layer, head in np.argwhere(drops < means)} - full
    layers, kv_heads = ranking.shape
    return HeadChoice(layers, kv_heads, full=tuple(sorted(full)), drop=tuple(sorted(drop)))


def first_heads(ranking: Float[np.ndarray, "L H_kv"]) -> set[tuple[int, int]]:
    """As many heads as --fraction says, at least one: those that rank highest."""
    count = max(1, round(_FRACTION.value * ranking.size))
    best = np.argsort(-ranking, axis=None, kind="stable")[:count]
    return {(int(place) // ranking.shape[1], int(place) % ranking.shape[1]) for place in best}


def provenance(rule: str, seeds: range, found: dict[str, Measured]) -> dict[str, Any]:
    return {
        "model": flags.FLAGS.model,
        "rule": rule,
        "corpora": list(found),
        "seeds": [seeds.start, seeds.stop - 1],
        "tokens": tokens(),
        "kept": _KEPT.value,
        "threshold": _THRESHOLD.value,
        "fraction": _FRACTION.value,
        "python": platform.python_version(),
        "kvjax": kvjax.__version__,
    }


def row(metric: str, estimate: results.Estimate, *, policy: str = "chelsea", **others: Any) -> results.Row:
    fields = {"task": others.pop("corpus", None), "variant": others.pop("variant", None)}
    return results.Row(
        experiment=NAME,
        model=flags.FLAGS.model,
        policy=policy,
        metric=metric,
        value=estimate.value,
        ci95_low=estimate.low,
        ci95_high=estimate.high,
        context_tokens=tokens(),
        n=2 if flags.FLAGS.quick else _SEEDS.value,
        seed=flags.FLAGS.seed,
        extra=others,
        **fields,
    )


def head_rows(found: dict[str, Measured], chosen: dict[str, HeadChoice]) -> list[results.Row]:
    """Every head's share and errors, as rows and as a table that marks what each rule chose."""
    rows, lines = [], []
    for corpus, one in found.items():
        for layer, head in np.ndindex(one.share.shape[1:]):
            share = results.mean_interval(one.share[:, layer, head])
            errors = {joins: results.mean_interval(of[:, layer, head]) for joins, of in one.error.items()}
            place = {"corpus": corpus, "layer": layer, "kv_head": head}
            rows.append(row("share_without_edge", share, **place))
            rows += [row("relative_error", error, variant=f"joins={joins}", **place) for joins, error in errors.items()]
            marks = [f"keeps all ({rule})" for rule, choice in chosen.items() if (layer, head) in choice.full]
            marks += [f"drops ({rule})" for rule, choice in chosen.items() if (layer, head) in choice.drop]
            named = f"{corpus}, layer {layer}, kv head {head}"
            lines.append((named, str(share), str(errors["mean"]), str(errors["drop"]), ", ".join(marks) or "-"))
    columns = ("head", f"A without {_THRESHOLD.value:g}", "error of means", "error of dropping", "chosen")
    results.print_table(f"Heads, {_KEPT.value:.0%} of {tokens()} tokens kept", columns, lines)
    return rows


def agreement(found: dict[str, Measured]) -> list[results.Row]:
    """How far two kinds of text agree on the heads of each rule: overlap of the sets, correlation of the ranks."""
    if len(found) != 2:
        return []
    rows = []
    for rule in RULES:
        one, other = (measured.ranking(rule) for measured in found.values())
        sets = first_heads(one), first_heads(other)
        overlap = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
        rank = float(stats.spearmanr(one.ravel(), other.ravel()).statistic)
        print(f"Rule {rule}: overlap (Jaccard) {overlap:.2f}, rank correlation over {one.size} heads {rank:.2f}")
        for metric, value in {"overlap": overlap, "rank_correlation": rank}.items():
            rows.append(row(metric, results.Estimate(value, np.nan, np.nan), rule=rule))
            rows[-1] = dataclasses.replace(rows[-1], ci95_low=None, ci95_high=None, n=one.size)
    return rows


def effect(
    model: Llama, tokenizer: Tokenizer, corpus: str, seeds: range, chosen: dict[str, HeadChoice]
) -> list[results.Row]:
    """Errors on later seeds at the same number of slots: without a choice, with each rule's, and with dropping alone.
    Differences are paired by text."""
    choices: dict[str, HeadChoice | None] = {"none": None, **chosen}
    choices["dropping alone"] = dataclasses.replace(chosen["error"], full=())
    layers = model.config.layers
    errors: dict[str, list[np.ndarray]] = {name: [] for name in choices}
    for layer, drawn in read(model, tokenizer, corpus, seeds):
        for name, choice in choices.items():
            try:
                error = head_errors(policy("mean", choice), spec_of(drawn, layer, layers), drawn)
            except ValueError as reason:
                if layer == 0:
                    print(f"{name} is left out: {reason}")
                continue
            errors[name].append(error.mean(axis=1))
    means = {name: np.mean(of, axis=0) for name, of in errors.items() if of}
    rows, lines = [], []
    for name, error in means.items():
        estimate, difference = results.mean_interval(error), results.mean_interval(error - means["none"])
        rows.append(row("relative_error", estimate, corpus=corpus, variant=f"heads={name}"))
        rows.append(row("relative_error_minus_none", difference, corpus=corpus, variant=f"heads={name}"))
        lines.append((name, str(estimate), str(difference)))
    title = f"{corpus}, seeds {seeds.start} to {seeds.stop - 1}: all heads, equal slots"
    results.print_table(title, ("heads", "error [95%]", "minus none [95%]"), lines)
    return rows


def plot(path: pathlib.Path, found: dict[str, Measured], chosen: dict[str, HeadChoice]) -> None:
    """Shares and errors per head, layer by layer, a bar per kind of text."""
    panels = ("A tokens without an edge", "error of means", "error of dropping")
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 9), sharex=True)
    for number, (corpus, one) in enumerate(found.items()):
        parts = (one.share, one.error["mean"], one.error["drop"])
        for axis, part, title in zip(axes, parts, panels, strict=True):
            place = np.arange(part[0].size) + number / (len(found) + 1)
            axis.bar(place, part.mean(axis=0).ravel(), width=1 / (len(found) + 1), label=corpus)
            axis.set_ylabel(title)
    axes[0].legend()
    shape = found[_CORPUS.value[0]].share.shape[1:]
    axes[-1].set_xlabel(f"layer x {shape[1]} + kv head; keeps all by error: {list(chosen['error'].full)}")
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
