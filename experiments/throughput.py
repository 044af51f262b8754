"""Requests per second of continuous batching at equal memory; `experiments.speed --measure throughput` runs it."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.common.caches import Setting
from experiments.common.output import Measured
from experiments.common.statistics import Estimate, mean_interval
from kvjax_models import LanguageModel
from kvjax_models.engine import Engine


class Sizes(NamedTuple):
    """Sizes of a measurement.

    Attributes:
        context_tokens: tokens of every prompt.
        answer_tokens: tokens of every answer.
        full_rows: rows of the full cache whose memory every setting gets.
        repetitions: timed runs of every setting.
        seed: seed of the prompts.
    """

    context_tokens: int
    answer_tokens: int
    full_rows: int
    repetitions: int
    seed: int


def measure(llm: LanguageModel, settings: Sequence[Setting], sizes: Sizes) -> Iterator[Measured]:
    """Measures all settings, which alternate.

    Args:
        llm: the model.
        settings: the settings; the first one is the full cache.
        sizes: the sizes.

    Yields:
        Labels and values of each setting; ratios are to the full cache in the same repetition.
    """
    engines: dict[Setting, Engine] = {}
    rows: dict[Setting, int] = {}
    memory = 0  # of the full cache's rows
    for setting in settings:
        try:
            cache = setting.cache(llm)
            row_bytes = cache.rows(sizes.context_tokens, sizes.answer_tokens)[-1].row_bytes
            memory = memory or sizes.full_rows * row_bytes
            rows[setting] = memory // row_bytes
            engines[setting] = cache.engine(rows=rows[setting])
            serve(engines[setting], llm, sizes, requests=1, tokens=1)  # compiles
        except ValueError as error:
            engines.pop(setting, None)
            print(f"{setting} is left out: {error}")
    seconds: dict[Setting, list[tuple[float, float]]] = {setting: [] for setting in engines}
    for _ in range(sizes.repetitions):
        for setting, engine in engines.items():
            seconds[setting].append(serve(engine, llm, sizes, rows[setting]))
    rates = {setting: rows[setting] / np.asarray(times) for setting, times in seconds.items()}
    full = next(iter(rates.values()))
    for setting, rate in rates.items():
        samples = {
            "requests_per_second": rate[:, 0],
            "requests_per_second_ratio": rate[:, 0] / full[:, 0],
            "tokens_per_second": sizes.answer_tokens * rate[:, 0],
        }
        if jax.default_backend() == "cpu":  # other load of the machine does not affect processor time
            samples["requests_per_cpu_second_ratio"] = rate[:, 1] / full[:, 1]
        # Ratios multiply, so their logarithms are averaged.
        values = {name: Estimate(*np.exp(mean_interval(np.log(x))).tolist()) for name, x in samples.items()}
        yield {"setting": str(setting), **sizes._asdict()}, {"rows": rows[setting], **values}


def serve(
    engine: Engine, llm: LanguageModel, sizes: Sizes, requests: int, tokens: int | None = None
) -> tuple[float, float]:
    """Serves random prompts of one length.

    Args:
        engine: the engine.
        llm: its model.
        sizes: the sizes.
        requests: number of requests.
        tokens: tokens of every answer; by default `sizes.answer_tokens`.

    Returns:
        Seconds, and seconds of processor time.
    """
    shape = requests, sizes.context_tokens
    prompts = np.random.default_rng(sizes.seed).integers(0, llm.model.config.vocab_size, shape).tolist()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for number, prompt in enumerate(prompts):
        engine.add(prompt, max_new_tokens=tokens or sizes.answer_tokens, seed=number)
    engine.complete()
    return time.perf_counter() - begin, time.process_time() - cpu_begin
