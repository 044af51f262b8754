"""How far attention over each compressed cache is from exact attention, at equal bytes.

    python -m experiments.attention_error
    python -m experiments.attention_error --study theory
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
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from tqdm import tqdm

import kvjax
from experiments.common import cases, plots, results, settings, speed, streams, suites, sweeping
from experiments.common.options import Experiment, Policies, each, one_of
from experiments.common.results import Row
from kvjax.policy import Policy
from kvjax.registry import POLICIES, PolicyChoice

NAME = "attention_error"
# The paper's study keeps the first and the newest 256 of about 16k tokens: as many tokens per kept one are kept here.
RECORDED_TOKENS_PER_FIXED = 64


@dataclasses.dataclass(frozen=True)
class Options(cases.Streams, Policies):
    """Options of this experiment."""

    study: str = one_of("policies", suites.STUDIES)  # default policies, budgets and norms
    # Variants are chosen on seeds 0 to 9 and reported on later ones.
    seed: int = 10
    seeds: int = 20  # seeds, from --seed on: rows of the batch
    norm: tuple[float, ...] = each()  # l2 norms of synthetic keys and queries; repeatable

    QUICK: ClassVar[dict[str, Any]] = {**cases.Streams.QUICK, "seeds": 4, "stream": cases.STREAMS[:1]}

    def chosen(self) -> list[PolicyChoice]:
        """The settings that are asked for."""
        study = suites.STUDIES[self.study]
        budgets = self.budget or study.budgets
        return settings.settings(self.policy or study.policies, budgets[:1] if self.quick else budgets)


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


def run(options: Options) -> list[Row]:
    """The rows of every case and setting."""
    study = suites.STUDIES[options.study]
    rows: list[Row] = []
    drawn = cases.cases(options, options.norm or study.norms, prompt_queries=True)
    spec = lambda case: cases.spec_of(case.drawn, case.layer or 0, case.layers)  # noqa: E731
    for of_spec, alike in itertools.groupby(drawn, spec):
        for case in alike:
            fixed = 0 if case.layer is None else options.recorded_tokens // RECORDED_TOKENS_PER_FIXED
            measured = measure(case, of_spec, options.chosen(), fixed, options.seed)
            rank = float(np.mean([streams.effective_rank(keys) for keys in case.drawn.keys[0].swapaxes(0, 1)]))
            of_case = {
                case.where: case.number,
                "sinks_and_recent": fixed,
                "effective_rank": rank,
                "stream": case.stream,
            }
            sizes: dict[str, Any] = {
                "context_tokens": of_spec.max_prompt_tokens,
                "batch": of_spec.batch,
                "n": of_spec.batch,
            }
            shared = {**of_case, **sizes, "seed": options.seed}
            model = options.model_of(case.stream)
            found = [row for result in measured for row in result_rows(model, result, measured, study.baseline, shared)]
            title = f"{case}: {of_spec.max_prompt_tokens} tokens, {of_spec.batch} seeds, effective rank {rank:.1f}"
            results.print_rows(title, found, lambda row: f"{results.setting_label(row)} ({row.budget_fraction:.1%})")
            rows += found
            results.write_rows(options.file(f"{NAME}.json"), rows)
        # Programs are for one spec, and every layer has its own.
        build.cache_clear()
        programs.cache_clear()
        sweeping.drop_programs()
    return rows


def measure(
    case: cases.Case, spec: kvjax.CacheSpec, chosen: Sequence[PolicyChoice], fixed: int, seed: int
) -> list[Result]:
    """Every setting's result. One that cannot be made so small, or counts faults, is left out and said to be.

    Args:
        fixed: sinks, and as many recent tokens, that every policy keeps which can.
    """
    drawn = case.drawn
    exact = streams.exact_attention(drawn)
    keys, values, queries = (jnp.asarray(part) for part in (drawn.keys, drawn.values, drawn.queries))
    row_keys = jax.vmap(jax.random.key)(seed + jnp.arange(spec.batch))
    of_case = []
    for setting in tqdm(chosen, desc=str(case), leave=False):
        try:
            policy = build(setting, spec, fixed)
            compress, attend = programs(policy, spec, queries.shape[1])
            asked = None
            if count := policy.requires.num_prompt_queries(spec.max_prompt_tokens):
                assert drawn.prompt_queries is not None
                asked = jnp.asarray(drawn.prompt_queries[:, -count:])
            seconds, cache = speed.timed(compress, row_keys, keys, values, asked)
            kvjax.raise_faults(cache)
        except ValueError as error:
            settings.tell_left_out(setting, error)
            continue
        attended = np.asarray(attend(cache, queries), np.float64)
        device, read = kvjax.cache_bytes(cache).device, kvjax.read_bytes(cache)
        counted = read if cache.policy.is_retrieval else device
        of_case.append(
            Result(
                setting,
                error=streams.relative_errors(attended, exact),
                clamped_error=streams.clamped_errors(attended, exact),
                compress_seconds=seconds / spec.batch,
                device_bytes=device // spec.batch,
                read_bytes=read // spec.batch,
                counted_bytes=counted // spec.batch,
                fraction=counted / (spec.batch * spec.full_cache_bytes(spec.max_prompt_tokens)),
            )
        )
    return of_case


@functools.cache
def build(setting: PolicyChoice, spec: kvjax.CacheSpec, fixed: int) -> Policy:
    """The setting's policy, with `fixed` sinks and recent tokens where it has such settings and they are not given.
    Remembered for the norms of a stream, which share a spec: finding it takes up to seconds."""
    accepted = POLICIES[setting.name].__dataclass_fields__  # type: ignore[attr-defined]
    given = {name: str(fixed) for name in ("sinks", "recent") if name in accepted} | dict(setting.settings)
    return dataclasses.replace(setting, settings=tuple(given.items())).fit(spec, spec.max_prompt_tokens)


@functools.cache
def programs(policy: Policy, spec: kvjax.CacheSpec, queries: int) -> tuple[Any, Any]:
    """Compiled: (row keys, keys, values, the prompt's last queries or None) to the compressed cache, and (cache,
    queries) to what they attend to."""
    row_keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), spec.batch))
    shown = policy.requires.num_prompt_queries(spec.max_prompt_tokens)
    tokens, asked, last = (
        jax.ShapeDtypeStruct((spec.batch, count, heads, spec.head_dim), spec.dtype)
        for count, heads in (
            (spec.max_prompt_tokens, spec.kv_heads),
            (queries, spec.query_heads),
            (shown, spec.query_heads),
        )
    )

    @jax.jit
    def compress(row_keys, keys, values, queries):
        lengths = jnp.full(spec.batch, spec.max_prompt_tokens, jnp.int32)
        return kvjax.prefill(kvjax.init(policy, spec, row_keys), keys, values, lengths, queries)[0]

    @jax.jit
    def attend(cache, query):
        return kvjax.normalize(kvjax.attend(cache, query))

    given = (row_keys, tokens, tokens, last if shown else None)
    cache = jax.eval_shape(compress, *given)
    return compress.lower(*given).compile(), attend.lower(cache, asked).compile()


def result_rows(model: str, result: Result, of_case: Sequence[Result], name: str, shared: dict[str, Any]) -> list[Row]:
    """One setting's rows: both errors, the difference to the baseline at the same bytes, seconds to compress."""
    found: dict[str, Any] = {
        "compress_seconds": result.compress_seconds,
        "relative_error": results.mean_interval(result.error),
        "relative_error_clamped": results.mean_interval(result.clamped_error),
    }
    if (other := baseline(result, of_case, name)) is not None:  # paired by seed
        found[f"relative_error_minus_{name}"] = results.mean_interval(result.error - other.error)
    sizes: dict[str, Any] = {
        "device_bytes": result.device_bytes,
        "host_bytes": 0,
        "read_bytes_per_token": result.read_bytes,
    }
    sizes["budget_fraction"] = result.fraction
    return [results.row(NAME, model, metric, one, result.setting, **sizes, **shared) for metric, one in found.items()]


def baseline(result: Result, of_case: Sequence[Result], name: str) -> Result | None:
    """The baseline's result at the same bytes, the nearest within 5%; None where there is none, or it is `result`. (Not
    at the same --budget: a policy that can only halve may take half of it.)"""
    plain = PolicyChoice.parse(name)
    others = [other for other in of_case if settings.plain(other.setting) == plain]
    apart = [abs(other.counted_bytes / result.counted_bytes - 1) for other in others]
    if settings.plain(result.setting) == plain or not others or min(apart) > 0.05:
        return None
    return others[int(np.argmin(apart))]


def case_of(row: Row) -> str:
    """What a row is of, as titles say it."""
    where = "layer" if "layer" in row.extra else "norm"
    return f"{row.stream}, {where} {row.extra[where]:g}"


def draw(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Error against the share of exact's bytes, without exact, whose error is rounding alone: a panel per case."""
    errors = [row for row in rows if row.metric == "relative_error" and row.extra["budget"]]
    plots.against_bytes(
        path,
        errors,
        panel=case_of,
        xscale="log",
        yscale="log",
        ylabel="relative error",
    )


EXPERIMENT = Experiment(NAME, Options, run, draw)
if __name__ == "__main__":
    EXPERIMENT.main()
