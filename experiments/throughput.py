"""Requests per second of continuous batching at equal memory; `experiments.speed --measure throughput` runs it."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.common import caches
from experiments.common.caches import Setting
from experiments.common.output import Measured
from experiments.common.shapes import zero_scorer
from experiments.common.statistics import Estimate, mean_interval
from kvjax_models import LanguageModel
from kvjax_models.generation import batching
from kvjax_models.generation.generator import Generator


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
    generators, memory = {}, 0
    for setting in settings:
        try:
            single = caches.make_generator(
                llm,
                setting,
                batch=1,
                max_prompt_tokens=sizes.context_tokens,
                max_new_tokens=sizes.answer_tokens,
                budget_tokens=sizes.context_tokens + sizes.answer_tokens,
                scorer=zero_scorer(llm.model.config),
            )
            memory = memory or sizes.full_rows * single.row_bytes
            generators[setting] = single.with_batch(batching.max_batch_size(single, memory))
            serve(generators[setting], sizes, requests=1, tokens=1)  # compiles
        except ValueError as error:
            generators.pop(setting, None)
            print(f"{setting} is left out: {error}")
    seconds: dict[Setting, list[tuple[float, float]]] = {setting: [] for setting in generators}
    for _ in range(sizes.repetitions):
        for setting, generator in generators.items():
            seconds[setting].append(serve(generator, sizes))
    rates = {setting: generators[setting].batch / np.asarray(times) for setting, times in seconds.items()}
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
        yield {"setting": str(setting), **sizes._asdict()}, {"rows": generators[setting].batch, **values}


def serve(
    generator: Generator, sizes: Sizes, requests: int | None = None, tokens: int | None = None
) -> tuple[float, float]:
    """Serves random prompts of one length.

    Args:
        generator: the generator.
        sizes: the sizes.
        requests: number of requests; by default one per batch row.
        tokens: tokens of every answer; by default `sizes.answer_tokens`.

    Returns:
        Seconds, and seconds of processor time.

    Raises:
        RuntimeError: if a request did not finish.
    """
    count = generator.batch if requests is None else requests
    rng = np.random.default_rng(sizes.seed)
    prompts = rng.integers(0, generator.config.vocab_size, (count, sizes.context_tokens)).tolist()
    new_tokens = tokens or sizes.answer_tokens
    queue = [batching.Request(prompt, new_tokens, seed=number) for number, prompt in enumerate(prompts)]
    begin, cpu_begin = time.perf_counter(), time.process_time()
    finished = sum(one.finish_reason is not None for one in batching.run_requests(generator, queue))
    if finished != count:
        raise RuntimeError(f"{finished} of {count} requests finished")
    return time.perf_counter() - begin, time.process_time() - cpu_begin
