"""How far attention over each compressed cache is from exact attention, at equal bytes.

    python -m experiments.attention_error
    python -m experiments.attention_error --study block_size
    python -m experiments.attention_error --policy uniform --policy subgen --stream tight --norm 4 --budget 12.5%

Streams are those of `experiments.common.streams`: synthetic ones of known structure at several norms, and what every
layer of a checkpoint computes on held-out documents (BalanceKV's study of a single layer: its Figures 1 and 3). A
stream is compressed as a prompt (with its queries, for policies that learn from them), then queries are asked of it.
Every policy is sized to the same share of exact's bytes, all buffers counted; one that recalls, by the bytes that it
reads per token. Rows of a batch are seeds: stream and cache are random in each on its own, and two policies are
compared by their differences, paired by seed.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags
from jaxtyping import Float
from kvjax_models.prefill import asked_queries
from tqdm import tqdm

import kvjax
from experiments.common import plots, results, settings, speed, streams, sweeping
from kvjax.policy import Policy
from kvjax.registry import POLICIES, PolicyChoice

NAME = "attention_error"
RECORDED = "recorded"
# The paper's study keeps the first and the newest 256 of about 16k tokens: as many tokens per kept one are kept here.
RECORDED_TOKENS_PER_FIXED = 64
BUDGETS = ("50%", "25%", "12.5%", "6.25%", "5%")
NORMS = (2.0, 4.0, 8.0, 15.0)


class Study(NamedTuple):
    """What is measured where flags do not say otherwise."""

    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    norms: tuple[float, ...]
    option: str | None = None  # the setting that is swept, for a figure of its own
    baseline: str = "uniform"  # the policy that others are compared with


STUDIES = {
    "policies": Study(
        (
            "uniform",
            "subgen",
            "subgen:variant=self_normalised",
            "balancekv",
            "balancekv:walk=streaming",
            "balancekv_reference",
        ),
        BUDGETS,
        NORMS,
    ),
    # Both papers' Algorithm 1, which their theorems are about.
    "theory": Study(("uniform", "subgen:variant=paper", "balancekv_paper"), BUDGETS, NORMS),
    "block_size": Study(
        (
            "uniform",
            *(
                f"{policy}block_size={size}"
                for policy in ("balancekv:walk=pairs,", "balancekv:walk=streaming,", "balancekv_reference:")
                for size in (64, 128, 256)
            ),
        ),
        ("50%", "25%", "12.5%"),
        (4.0,),
        "block_size",
    ),
    # Pairs of the reservoir take what clusters leave: at 12.5% of 8,192 tokens there are about 1,020 slots.
    "samples": Study(
        ("uniform", *(f"subgen:variant=paper,samples={samples}" for samples in (64, 256, 512, 768, 896))),
        ("12.5%",),
        (4.0,),
        "samples",
    ),
    # As the paper has it, with the value slope, and dropping where the others take means.
    "chelsea": Study(
        ("uniform", "chelsea:slope=None", "chelsea", "chelsea:joins=drop"),
        ("25%", "12.5%"),
        (2.0, 4.0, 8.0, 15.0),
    ),
    # Whether clusters that are not read stay present, at equal bytes read.
    "recall": Study(
        (
            "clusterkv:residual=False",
            "clusterkv",
            "clusterkv:cluster_tokens=40",
            "quest",
            "uniform",
        ),
        ("50%", "25%", "12.5%", "6.25%"),
        NORMS,
        baseline="clusterkv:residual=False",
    ),
    "per_cluster": Study(
        (
            "uniform",
            *(f"subgen:variant=paper,per_cluster={samples}" for samples in (1, 2, 4, 8)),
            *(f"subgen:variant=mean_value,per_cluster={samples}" for samples in (0, 1, 2, 4, 8)),
        ),
        ("12.5%",),
        (4.0,),
        "per_cluster",
    ),
}

settings.define_common(policies=(), budgets=())
_STUDY = flags.DEFINE_enum("study", "policies", list(STUDIES), "Default policies, budgets and norms.")
# Variants are chosen on seeds 0 to 9 and reported on later ones.
flags.FLAGS.set_default("seed", 10)
_SEEDS = flags.DEFINE_integer("seeds", 20, "Seeds, from --seed on: rows of the batch.")
_STREAM = flags.DEFINE_multi_enum(
    "stream", [*streams.SYNTHETIC, RECORDED], [*streams.SYNTHETIC, RECORDED], "Streams; repeatable."
)
_NORM = flags.DEFINE_multi_float("norm", [], "l2 norms of synthetic keys and queries; repeatable.")
_TOKENS = flags.DEFINE_integer("tokens", 8192, "Tokens of a synthetic stream.")
_HEAD_DIM = flags.DEFINE_integer("head_dim", 128, "Dimensions of a synthetic stream.")
_QUERIES = flags.DEFINE_integer("queries", 64, "Queries per seed.")
_RECORDED_TOKENS = flags.DEFINE_integer("recorded_tokens", 4032, "Tokens of a recorded stream.")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compressed: a stream at a norm, or in a layer."""

    stream: str
    where: str  # "norm" or "layer"
    number: float
    spec: kvjax.CacheSpec
    fixed: int  # sinks, and as many recent tokens, that every policy keeps which can

    @classmethod
    def of(
        cls, stream: str, where: str, number: float, drawn: streams.Streams, fixed: int, layer: int = 0, layers: int = 1
    ) -> "Case":
        batch, tokens, kv_heads, head_dim = drawn.keys.shape
        sizes = {"batch": batch, "query_heads": drawn.queries.shape[2], "kv_heads": kv_heads, "head_dim": head_dim}
        spec = kvjax.CacheSpec(**sizes, max_prompt=tokens, max_new=1, layer=layer, layers=layers)
        return cls(stream, where, number, spec, fixed)

    def __str__(self) -> str:
        return f"{self.where} {self.number:g}"


@dataclasses.dataclass(frozen=True)
class Result:
    """What one setting did to one case: errors are a figure per seed, the rest is per seed."""

    setting: PolicyChoice
    error: Float[np.ndarray, "R"]
    clamped_error: Float[np.ndarray, "R"]
    compress_seconds: float
    device_bytes: int
    read_bytes: int  # per token
    counted_bytes: int  # those that budgets are of: bytes held, or bytes read for a policy that recalls
    fraction: float  # of exact's bytes, counted so


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    study = STUDIES[_STUDY.value]
    budgets = flags.FLAGS.budget or study.budgets
    chosen = settings.settings(flags.FLAGS.policy or study.policies, budgets[:1] if flags.FLAGS.quick else budgets)
    directory = pathlib.Path(flags.FLAGS.output_dir)
    measured: dict[Case, list[Result]] = {}
    rows: list[results.Row] = []
    for _, alike in itertools.groupby(cases(_NORM.value or study.norms), lambda pair: pair[0].spec):
        for case, drawn in alike:
            measured[case] = measure(case, drawn, chosen)
            rank = float(np.mean([streams.effective_rank(keys) for keys in drawn.keys[0].swapaxes(0, 1)]))
            rows += [row for result in measured[case] for row in result_rows(case, result, measured[case], rank)]
            show(case, measured[case], rank)
            results.write_rows(directory / f"{NAME}.json", rows)
        # Programs are for one spec, and every layer has its own.
        build.cache_clear()
        programs.cache_clear()
        sweeping.drop_programs()
    sweeping.check_any(rows)
    plot(directory / f"{NAME}.png", measured)
    if study.option:
        plot_option(directory / f"{NAME}_{study.option}.png", measured, study.option)
    print(f"Rows: {directory / f'{NAME}.json'}   plot: {directory / f'{NAME}.png'}")


def cases(norms: Sequence[float]) -> Iterator[tuple[Case, streams.Streams]]:
    """The streams that the flags ask for: synthetic ones at every norm, the recorded one in every layer."""
    quick = flags.FLAGS.quick
    seeds = range(flags.FLAGS.seed, flags.FLAGS.seed + (4 if quick else _SEEDS.value))
    tokens, recorded_tokens = (1024, 512) if quick else (_TOKENS.value, _RECORDED_TOKENS.value)
    for name in _STREAM.value[:1] if quick and not flags.FLAGS["stream"].present else _STREAM.value:
        if name == RECORDED:
            model, tokenizer = settings.load_model(flags.FLAGS.model)
            fixed = recorded_tokens // RECORDED_TOKENS_PER_FIXED
            for layer, drawn in streams.recorded(
                model, tokenizer, seeds, recorded_tokens, _QUERIES.value, prompt_queries=True
            ):
                yield Case.of(name, "layer", layer, drawn, fixed, layer, model.config.layers), drawn
        else:
            drawn = streams.synthetic(name, seeds, tokens, _QUERIES.value, _HEAD_DIM.value, prompt_queries=True)
            for norm in norms:
                yield Case.of(name, "norm", norm, drawn, fixed=0), drawn.scaled(norm)


def measure(case: Case, drawn: streams.Streams, chosen: Sequence[PolicyChoice]) -> list[Result]:
    """Every setting's result. One that cannot be made so small, or counts faults, is left out and said to be."""
    exact = streams.exact_attention(drawn)
    keys, values, queries = (jnp.asarray(part) for part in (drawn.keys, drawn.values, drawn.queries))
    rows = flags.FLAGS.seed + jnp.arange(case.spec.batch)
    row_keys = jax.vmap(jax.random.key)(rows)
    of_case = []
    for setting in tqdm(chosen, desc=f"{case.stream}, {case}", leave=False):
        try:
            policy = build(setting, case.spec, case.fixed)
            compress, attend = programs(policy, case.spec, queries.shape[1])
        except ValueError as error:
            settings.tell_left_out(setting, error)
            continue
        asked = None
        if count := asked_queries(policy, case.spec.max_prompt):
            assert drawn.prompt_queries is not None
            asked = jnp.asarray(drawn.prompt_queries[:, -count:])
        seconds, cache = speed.timed(compress, row_keys, keys, values, asked)
        try:
            kvjax.check(cache)
        except ValueError as error:
            settings.tell_left_out(setting, error)
            continue
        attended = np.asarray(attend(cache, queries), np.float64)
        device, read = kvjax.cache_bytes(cache).device, kvjax.read_bytes(cache)
        counted = read if cache.policy.recalls else device
        of_case.append(
            Result(
                setting,
                error=streams.relative_errors(attended, exact),
                clamped_error=streams.clamped_errors(attended, exact),
                compress_seconds=seconds / case.spec.batch,
                device_bytes=device // case.spec.batch,
                read_bytes=read // case.spec.batch,
                counted_bytes=counted // case.spec.batch,
                fraction=counted / (case.spec.batch * case.spec.exact_bytes(case.spec.max_prompt)),
            )
        )
    return of_case


@functools.cache
def build(setting: PolicyChoice, spec: kvjax.CacheSpec, fixed: int) -> Policy:
    """The setting's policy, with `fixed` sinks and recent tokens where it has such settings and they are not given.
    Remembered for the norms of a stream, which share a spec: finding it takes up to seconds."""
    accepted = POLICIES[setting.name].__dataclass_fields__  # type: ignore[attr-defined]
    given = {name: str(fixed) for name in ("sinks", "recent") if name in accepted} | dict(setting.settings)
    return dataclasses.replace(setting, settings=tuple(given.items())).fit(spec, spec.max_prompt)


@functools.cache
def programs(policy: Policy, spec: kvjax.CacheSpec, queries: int) -> tuple[Any, Any]:
    """Compiled: (row keys, keys, values, the prompt's last queries or None) to the compressed cache, and (cache,
    queries) to what they attend to."""
    row_keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), spec.batch))
    shown = asked_queries(policy, spec.max_prompt)
    tokens, asked, last = (
        jax.ShapeDtypeStruct((spec.batch, count, heads, spec.head_dim), spec.dtype)
        for count, heads in ((spec.max_prompt, spec.kv_heads), (queries, spec.query_heads), (shown, spec.query_heads))
    )

    @jax.jit
    def compress(row_keys, keys, values, queries):
        lengths = jnp.full(spec.batch, spec.max_prompt, jnp.int32)
        return kvjax.prefill(kvjax.init(policy, spec, row_keys), keys, values, lengths, queries)[0]

    @jax.jit
    def attend(cache, query):
        return kvjax.output(kvjax.attend(cache, query))

    given = (row_keys, tokens, tokens, last if shown else None)
    cache = jax.eval_shape(compress, *given)
    return compress.lower(*given).compile(), attend.lower(cache, asked).compile()


def result_rows(case: Case, result: Result, of_case: Sequence[Result], rank: float) -> list[results.Row]:
    """One setting's rows: both errors, the difference to the baseline at the same bytes, seconds to compress."""
    shared = {
        "experiment": NAME,
        "model": flags.FLAGS.model if case.stream == RECORDED else "synthetic",
        "stream": case.stream,
        "policy": result.setting.name,
        "variant": result.setting.variant,
        "budget_fraction": result.fraction,
        "context_tokens": case.spec.max_prompt,
        "batch": case.spec.batch,
        "n": case.spec.batch,
        "seed": flags.FLAGS.seed,
        "device_bytes": result.device_bytes,
        "host_bytes": 0,
        "read_bytes_per_token": result.read_bytes,
        "extra": {
            case.where: case.number,
            "budget": str(result.setting.budget) if result.setting.budget else None,
            "sinks_and_recent": case.fixed,
            "effective_rank": rank,
        },
    }
    estimates = {
        "relative_error": results.mean_interval(result.error),
        "relative_error_clamped": results.mean_interval(result.clamped_error),
        f"relative_error_minus_{STUDIES[_STUDY.value].baseline}": difference(result, of_case),
    }
    return [results.Row(**shared, metric="compress_seconds", value=result.compress_seconds)] + [
        results.Row(**shared, metric=metric, value=estimate.value, ci95_low=estimate.low, ci95_high=estimate.high)
        for metric, estimate in estimates.items()
        if estimate is not None
    ]


def baseline(result: Result, of_case: Sequence[Result]) -> Result | None:
    """The baseline's result at the same bytes, the nearest within 5%; None where there is none, or it is `result`. (Not
    at the same --budget: a policy that can only halve may take half of it.)"""
    plain = PolicyChoice.parse(STUDIES[_STUDY.value].baseline)
    others = [other for other in of_case if settings.plain(other.setting) == plain]
    apart = [abs(other.counted_bytes / result.counted_bytes - 1) for other in others]
    if settings.plain(result.setting) == plain or not others or min(apart) > 0.05:
        return None
    return others[int(np.argmin(apart))]


def difference(result: Result, of_case: Sequence[Result]) -> results.Estimate | None:
    """The error minus the baseline's, paired by seed."""
    other = baseline(result, of_case)
    return None if other is None else results.mean_interval(result.error - other.error)


def show(case: Case, of_case: Sequence[Result], rank: float) -> None:
    """The table of one case: bytes as a share of exact's, the paired difference as a share of the baseline's error,
    milliseconds to compress one stream."""
    lines = []
    for result in of_case:
        compared, other = difference(result, of_case), baseline(result, of_case)
        against = "-"
        if compared is not None and other is not None:
            against = "{:+.0%} [{:+.0%}, {:+.0%}]".format(*(np.asarray(compared) / other.error.mean()))
        lines.append(
            (
                str(settings.plain(result.setting)),
                str(result.setting.budget or "-"),
                f"{result.fraction:.1%}",
                str(results.mean_interval(result.error)),
                against,
                f"{result.clamped_error.mean():.3g}",
                f"{1e3 * result.compress_seconds:.1f}",
            )
        )
    title = f"{case.stream}, {case}: {case.spec.max_prompt} tokens, {case.spec.batch} seeds, effective rank {rank:.1f}"
    columns = (
        "policy",
        "budget",
        "bytes",
        "error [95%]",
        f"against {STUDIES[_STUDY.value].baseline} [95%]",
        "clamped",
        "ms",
    )
    results.print_table(title, columns, lines)


def plot(path: pathlib.Path, measured: dict[Case, list[Result]]) -> None:
    """Error against the share of exact's bytes: a row of panels per stream, a panel per norm or layer."""
    names = list(dict.fromkeys(case.stream for case in measured))
    width = max(sum(case.stream == name for case in measured) for name in names)
    figure, axes = plt.subplots(len(names), width, figsize=(4.5 * width, 3.5 * len(names)), squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    for name, panels in zip(names, axes, strict=True):
        here = [case for case in measured if case.stream == name]
        for case, axis in zip(here, panels, strict=False):
            axis.set_visible(True)
            draw_errors(axis, measured[case])
            axis.set_title(f"{name}, {case}", fontsize=10)
    for panels in axes:
        panels[0].set_ylabel("relative error")
    axes[0][0].legend(fontsize=6)
    plots.save(figure, path)


def draw_errors(axis: Any, of_case: Sequence[Result]) -> None:
    """A line per policy, without exact, whose error is rounding alone."""
    budgeted = [result for result in of_case if result.setting.budget]
    for choice in dict.fromkeys(settings.plain(result.setting) for result in budgeted):
        line = [result for result in budgeted if settings.plain(result.setting) == choice]
        line.sort(key=lambda result: result.fraction)
        value, low, high = np.array([results.mean_interval(result.error) for result in line]).T
        fractions = [100 * result.fraction for result in line]
        axis.errorbar(fractions, value, yerr=(value - low, high - value), marker=".", linewidth=1, label=str(choice))
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yscale("log")
    axis.set_xlabel("cache bytes, % of exact's")
    axis.grid(alpha=0.3)


def plot_option(path: pathlib.Path, measured: dict[Case, list[Result]], option: str) -> None:
    """Error and seconds against a setting of the policies (as in BalanceKV's Figure 3), a column of panels per case and
    a line per policy without that setting, and budget."""
    figure, axes = plt.subplots(2, len(measured), figsize=(4 * len(measured), 7), squeeze=False)
    for (case, of_case), (above, below) in zip(measured.items(), axes.T, strict=True):
        lines: dict[str, list[Result]] = {}
        for result in of_case:
            others = tuple(pair for pair in result.setting.settings if pair[0] != option)
            if others != result.setting.settings:
                label = settings.label(dataclasses.replace(result.setting, settings=others))
                lines.setdefault(label, []).append(result)
        for label, line in lines.items():
            values = [int(dict(result.setting.settings)[option]) for result in line]
            error, low, high = np.array([results.mean_interval(result.error) for result in line]).T
            above.errorbar(values, error, yerr=(error - low, high - error), marker=".", linewidth=1, label=label)
            below.plot(values, [result.compress_seconds for result in line], marker=".", linewidth=1)
        above.set(title=f"{case.stream}, {case}", ylabel="relative error", yscale="log")
        below.set(xlabel=option, ylabel="seconds to compress a stream", yscale="log")
        for axis in (above, below):
            axis.grid(alpha=0.3)
    if axes[0][0].lines:
        axes[0][0].legend(fontsize=6)
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
