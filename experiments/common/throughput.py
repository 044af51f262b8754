"""Requests per second of continuous batching at equal memory; `experiments.speed --measure throughput` runs it."""

import time
from collections.abc import Iterator

import jax
import numpy as np

from experiments.common.caches import Setting
from experiments.common.output import Measured
from experiments.common.speed_options import Options, random_tokens
from experiments.common.statistics import Estimate, mean_interval
from kvjax_models import LanguageModel
from kvjax_models.engine import Engine


def measure_throughput(options: Options, llm: LanguageModel, context: int) -> Iterator[Measured]:
    """Yields labels and values of every setting, at the memory of every number of rows of the full cache."""
    for full_rows in options.full_rows:
        yield from _measure(options, llm, context, full_rows)


def _measure(options: Options, llm: LanguageModel, context: int, full_rows: int) -> Iterator[Measured]:
    """Measures all settings, which alternate; ratios are to the full cache in the same repetition."""
    engines: dict[Setting, Engine] = {}
    rows: dict[Setting, int] = {}
    memory = 0  # of the full cache's rows
    for setting in options.settings:
        try:
            cache = setting.cache(llm)
            row_bytes = cache.rows(context, options.answer_tokens)[-1].row_bytes
            memory = memory or full_rows * row_bytes
            rows[setting] = memory // row_bytes
            engines[setting] = cache.engine(rows=rows[setting])
            serve(engines[setting], random_tokens(llm, options.seed, 1, context), 1)  # compiles
        except ValueError as error:
            engines.pop(setting, None)
            print(f"{setting} is left out: {error}")
    seconds: dict[Setting, list[tuple[float, float]]] = {setting: [] for setting in engines}
    for _ in range(options.repetitions):
        for setting, engine in engines.items():
            prompts = random_tokens(llm, options.seed, rows[setting], context)
            seconds[setting].append(serve(engine, prompts, options.answer_tokens))
    rates = {setting: rows[setting] / np.asarray(times) for setting, times in seconds.items()}
    full = next(iter(rates.values()))
    labels = {**options.labels(llm, context), "answer_tokens": options.answer_tokens, "full_rows": full_rows}
    for setting, rate in rates.items():
        samples = {
            "requests_per_second": rate[:, 0],
            "requests_per_second_ratio": rate[:, 0] / full[:, 0],
            "tokens_per_second": options.answer_tokens * rate[:, 0],
        }
        if jax.default_backend() == "cpu":  # other load of the machine does not affect processor time
            samples["requests_per_cpu_second_ratio"] = rate[:, 1] / full[:, 1]
        # Ratios multiply, so their logarithms are averaged.
        values = {name: Estimate(*np.exp(mean_interval(np.log(x))).tolist()) for name, x in samples.items()}
        yield {"setting": str(setting), **labels}, {"rows": rows[setting], **values}


def serve(engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Answers prompts with `tokens` tokens each; returns seconds, and seconds of processor time."""
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for number, prompt in enumerate(prompts):
        engine.add(prompt, max_new_tokens=tokens, seed=number)
    engine.complete()
    return time.perf_counter() - begin, time.process_time() - cpu_begin
