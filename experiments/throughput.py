"""Requests per second against batch size, at equal memory: what a compressed cache earns by admitting more rows.

    python -m experiments.throughput --context_tokens 4096 --answer_tokens 1024 --exact_rows 4

Many requests go through a fixed number of rows (`kvjax_models.batching`): each row that ends gives its place to the
next prompt. Memory is what the caches of --exact_rows rows of exact attention take; every policy has as many rows as
fit into that. Prompts are random tokens of one length, which suits exact best, whose rows are made for the longest.
Policies take turns, so ratios to exact are of neighbours in one run. On a CPU the processors' time is told, too: on a
machine that others use, it is what can be compared.

BalanceKV's and ClusterKV's papers measure the same; ClusterKV with everything in host memory (`host_steps=1`), without
which recall needs more memory than exact does.
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float
from tqdm import tqdm

from experiments.common import plots, results, settings, speed, suites
from experiments.common.options import Experiment, each
from experiments.common.results import Row
from kvjax.registry import PolicyChoice
from kvjax_models.generation import batching
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.lowering import lower_decode
from kvjax_models.generation.state import cache_specs
from kvjax_models.model.llama import Llama

NAME = "throughput"


@dataclasses.dataclass(frozen=True)
class Options(speed.OfShape):
    """Options of this experiment."""

    policy: tuple[str, ...] = each(*suites.SUITES[NAME].policies)
    budget: tuple[str, ...] = each(*suites.SUITES[NAME].budgets)
    layers: int | None = None  # of the model, where not the shape's: fewer take less time
    context_tokens: tuple[int, ...] = each(4096)  # tokens of every prompt; repeatable
    answer_tokens: int = 1024  # tokens written to every prompt
    exact_rows: tuple[int, ...] = each(1, 2, 4)  # rows of exact, which set the memory; repeatable
    turns: int = 3  # of every policy; each of its rows takes a request at a turn

    QUICK: ClassVar[dict[str, Any]] = {
        "context_tokens": (512,),
        "answer_tokens": 64,
        "exact_rows": (1,),
        "layers": 2,
        "turns": 2,
        "policy": suites.SUITES[NAME].policies[:3],
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.turns < 2:
            raise ValueError(f"--turns={self.turns}: fewer than 2 have no interval")


@dataclasses.dataclass
class Served:
    """A setting with as many rows as its memory has room for."""

    setting: PolicyChoice
    generator: Generator
    program_bytes: int  # that decoding holds at once: weights, caches and temporaries
    seconds: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # of every turn, as `serve` gives them

    @property
    def rates(self) -> Float[np.ndarray, "T 2"]:
        """Requests of every turn per second, and per second of the processors' time."""
        return self.generator.batch / np.asarray(self.seconds)


def run(options: Options) -> list[Row]:
    """The rows of every prompt's length and memory, written as they come."""
    config = speed.shape(options.shape)
    if options.layers is not None:
        config = dataclasses.replace(config, layers=options.layers)
    model = Llama(config, dtype=options.number, rngs=nnx.Rngs(options.seed))
    rows: list[Row] = []
    for context in options.context_tokens:
        for exact_rows in options.exact_rows:
            served = list(generators(options, model, context, exact_rows))
            for _ in tqdm(range(options.turns), desc=f"{context} tokens, {exact_rows} rows of exact", leave=False):
                for one in served:
                    one.seconds.append(serve(one.generator, options, context))
            found = served_rows(served, options, model, context, exact_rows)
            title = f"Prompts of {context} tokens, answers of {options.answer_tokens}, the memory of {exact_rows} rows"
            results.print_rows(title, found, results.setting_label)
            rows += found
            results.write_rows(options.file(f"{NAME}.json"), rows)
    return rows


def generators(options: Options, model: Llama, context: int, exact_rows: int) -> Iterator[Served]:
    """Every setting, exact first, with the rows that fit into exact's memory; compiled. Settings that cannot be are
    said with their reason."""
    sizes: dict[str, Any] = {"max_prompt_tokens": context, "max_new_tokens": options.answer_tokens}
    spec, memory = cache_specs(model, batch=1, **sizes)[0], 0
    for setting in options.chosen:
        try:
            policy = settings.fitted(setting, spec, context + options.answer_tokens)
            one = Generator(
                model, policy, batch=1, **sizes, prefill_chunk=options.prefill_chunk, allow_beyond_context=True
            )
            memory = memory or exact_rows * one.row_bytes
            generator = one.with_batch(batching.max_batch_size(one, memory))
            serve(generator, options, context, requests=1, tokens=1)
        except ValueError as error:
            settings.tell_left_out(setting, error)
            continue
        program = lower_decode(generator, jax.eval_shape(generator.init_state)).compile()
        yield Served(setting, generator, speed.held_bytes(program))


def serve(
    generator: Generator, options: Options, context: int, requests: int | None = None, tokens: int | None = None
) -> tuple[float, float]:
    """Seconds that a request for every row takes, reading and writing, and of the processors' time."""
    count = generator.batch if requests is None else requests
    prompts = np.random.default_rng(options.seed).integers(0, generator.config.vocab_size, (count, context)).tolist()
    new = tokens or options.answer_tokens
    asked = [batching.Request(prompt, new, seed=number) for number, prompt in enumerate(prompts)]
    begin, worked = time.perf_counter(), time.process_time()
    ended = sum(written.finish_reason is not None for written in batching.run_requests(generator, asked))
    assert ended == count
    return time.perf_counter() - begin, time.process_time() - worked


def served_rows(served: Sequence[Served], options: Options, model: Llama, context: int, exact_rows: int) -> list[Row]:
    """A row per setting and metric. Names that end in `_over_exact` are ratios to exact in the same turn."""
    exact, rows = served[0], []
    for one in served:
        row = functools.partial(
            results.row,
            NAME,
            f"random {options.shape}",
            setting=one.setting,
            context_tokens=context,
            batch=one.generator.batch,
            seed=options.seed,
            device_bytes=one.generator.batch * one.generator.row_bytes,
            answer_tokens=options.answer_tokens,
            exact_rows=exact_rows,
            layers=model.config.layers,
            dtype=str(options.number),
            device=jax.devices()[0].device_kind,
        )
        samples = {
            "requests_per_second": one.rates[:, 0],
            "requests_per_second_over_exact": one.rates[:, 0] / exact.rates[:, 0],
            "tokens_per_second": options.answer_tokens * one.rates[:, 0],
        }
        if jax.default_backend() == "cpu":
            samples["requests_per_processor_second_over_exact"] = one.rates[:, 1] / exact.rates[:, 1]
        # Of logarithms: rates are positive, and ratios of turns multiply.
        for metric, of in samples.items():
            rows.append(row(metric, results.mean_interval(np.log(of)).exponential(), n=len(of)))
        rows.append(row("rows", one.generator.batch))
        rows.append(row("memory_bytes", one.program_bytes))
        rows.append(row("memory_over_exact", one.program_bytes / exact.program_bytes))
    return rows


def draw(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Requests per second, and as a multiple of exact's, against the memory, in rows of exact."""
    panels = {
        "requests_per_second": "requests per second",
        "requests_per_second_over_exact": "requests per second, of exact's",
        "rows": "rows",
    }
    plots.by_rows(
        path,
        [row for metric in panels for row in rows if row.metric == metric],
        panel=lambda row: f"{panels[row.metric]}, {row.context_tokens} tokens",
        x=lambda row: row.extra["exact_rows"],
        label=results.setting_label,
        xscale="log",
        xlabel="memory, in rows of exact",
    )


EXPERIMENT = Experiment(NAME, Options, run, draw)
if __name__ == "__main__":
    EXPERIMENT.main()
