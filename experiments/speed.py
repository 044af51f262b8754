"""Measures prefill, compression, decode steps and memory with each cache, relative to the full cache in the same run.

    python -m experiments.speed --shape small --context_tokens 4096 --policy snapkv --policy clusterkv --budget 25%
    python -m experiments.speed --model smollm2-135m --context_tokens 2048
    python -m experiments.speed --measure prefill --model smollm2-135m --context_tokens 1980 --policy kvzip
    python -m experiments.speed --measure throughput --context_tokens 4096 --full_rows 4
    python -m experiments.speed --measure questions --model smollm2-135m --context_tokens 4096 --policy auto

`latency` decodes one sequence: time to first token, time per token, time of prefill and 1,000 tokens, resident and read
bytes. `prefill` times entire prefills, with all passes that a policy needs. `throughput` serves requests by continuous
batching with as many rows as fit in the memory of `--full_rows` rows of the full cache. `first_answer` times the first
answer of new processes, without and with stored programs, `questions` the answers to `--questions` questions about a
document that was read before; with `--transformers` also the answers of transformers with its DynamicCache. `bytes`
computes the bytes that a cache holds and that a step reads, without weights. `transformers` decodes with each of
transformers' caches; on a GPU, `JAX_PLATFORMS=cpu` leaves its memory to torch. Weights and prompts are random unless
`--model` names a model. Policies alternate, so ratios compare neighbors.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import kvjax
from experiments.common import caches, timing
from experiments.common.answers import measure_first_answer, measure_questions, measure_throughput
from experiments.common.caches import Setting
from experiments.common.compiled import launches
from experiments.common.flags import run_command
from experiments.common.output import Figure, Measured, append_row, figure, print_figures, write_figures
from experiments.common.shapes import UnscoredModel, find_shape, first_layers, random_model
from experiments.common.speed_options import (
    MIN_SAMPLES,
    Options,
    dtype_of,
    make_generators,
    measure_runs,
    random_tokens,
)
from experiments.common.statistics import median_interval
from experiments.common.transformers_decode import measure_transformers
from kvjax_models import LanguageModel, load
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.state import GenerationState
from pallas_kernels import benchmarking

ANSWER_TOKENS = 1_000  # of end-to-end times, which add prefill and decode steps


def make_model(options: Options) -> LanguageModel:
    """Returns the model that the options name, or one with random weights; no token ends a text."""
    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    if options.model is not None:
        llm = load(options.model, dtype)
        return UnscoredModel(llm.model, dataclasses.replace(llm.tokenizer, eos_ids=()))
    config = first_layers(find_shape(options.shape), options.layers)
    return random_model(config, dtype, options.seed, is_abstract=set(options.measure) <= {"bytes", "transformers"})


def latency_generators(
    options: Options, llm: LanguageModel, context: int
) -> tuple[dict[Setting, Generator], dict[Setting, int]]:
    """Returns the generators of one sequence, and how many copies of it decode together, for every setting."""
    new = options.tokens * (options.repetitions + 1)  # one run warms up
    sizes = {"max_prompt_tokens": context, "max_new_tokens": new}
    generators = make_generators(llm, options.settings, **sizes)
    full = generators[options.settings[0]].row_bytes
    rows = {
        setting: options.batch * full // generator.row_bytes if options.equal_memory else options.batch
        for setting, generator in generators.items()
    }
    return generators, rows


def measure_latency(options: Options, llm: LanguageModel, context: int) -> Iterator[Measured]:
    """Measures copies of one sequence with every setting.

    On a CPU, the settings decode alternately, so that other load affects all of them; elsewhere one after the other, so
    that the copies of one setting exist at a time.

    Args:
        options: the options.
        llm: the model.
        context: tokens of the prompt.

    Yields:
        Labels and values of each setting when they are complete; of a setting that failed, the problem.
    """
    generators, rows = latency_generators(options, llm, context)
    prefill = timing.TimedPrefill(llm.model, generators, context, options.prefill_chunk, options.seed)
    programs = prefill.compile(rows)
    passes = -(-MIN_SAMPLES // llm.model.config.layers)
    layers = [times for _ in range(passes) for times in prefill.run()]
    read = np.asarray([seconds for seconds, _ in layers])
    compress = {name: np.asarray([seconds[name] for _, seconds in layers]) for name in prefill.states}
    weights, bandwidth = timing.weight_bytes(llm.model), benchmarking.memory_bandwidth()
    common = options.labels(llm, context)
    names = list(prefill.states)
    decoded: dict[Setting, _Decoded] = {}
    for group in [names] if jax.default_backend() == "cpu" else [[name] for name in names]:
        with prefill.recorded_problem(*group):
            sequences = {name: (generators[name], prefill.states.pop(name), rows[name]) for name in group}
            decoded |= _decode(options, sequences)
        for name in group:
            if name not in decoded:
                continue
            step, size = decoded[name].step, decoded[name].size
            labels = {"setting": str(name), **common, "rows": rows[name], **dataclasses.asdict(size)}
            promised = (weights + rows[name] * size.read_bytes) / bandwidth
            values: dict[str, Any] = {
                "prefill_seconds": float(np.sum(read)) / passes,
                "compress_seconds": float(np.sum(compress[name])) / passes,
                "compress_share_of_prefill": median_interval(compress[name] / read),
                "ms_per_token": median_interval(1e3 * step),
                "promised_ms_per_token": 1e3 * promised,
                "share_of_bandwidth": median_interval(promised / step),
                "tokens_per_second": median_interval(rows[name] / step),
                "decode_bytes": timing.program_bytes(programs[name]),
                "launches_per_layer": round(launches(programs[name].as_text() or "") / llm.model.config.layers, 1),
                **decoded[name].extra,
            }
            if (full := options.settings[0]) in decoded:
                times, full_times = (read + compress[one] for one in (name, full))
                answers = [
                    np.sum(read + compress[one]) / passes + ANSWER_TOKENS * decoded[one].step for one in (name, full)
                ]
                values["time_to_first_token_ratio"] = median_interval(times / full_times)
                values["end_to_end_ratio"] = median_interval(answers[0] / answers[1])
                values["ms_per_token_ratio"] = median_interval(step / decoded[full].step)
                values["decode_memory_ratio"] = values["decode_bytes"] / timing.program_bytes(programs[full])
            yield labels, values
    for name, problem in prefill.problems.items():
        yield {"setting": str(name), **common, "problem": problem}, {}


class _Decoded(NamedTuple):
    """Seconds per step in every repetition, bytes of a cache, and figures that only some policies have."""

    step: Float[np.ndarray, "R"]
    size: caches.CacheSize
    extra: dict[str, float]


def _decode(
    options: Options, sequences: Mapping[Setting, tuple[Generator, GenerationState, int]]
) -> dict[Setting, _Decoded]:
    """Measures the decode steps of sequences: a generator, a state and its number of copies for each setting."""
    writers = []
    for generator, state, rows in sequences.values():
        state = timing.make_rows(generator, state, rows)
        writers.append(timing.Writer(generator.with_batch(rows), state, options.tokens))
    seconds = timing.interleaved_seconds(writers, options.repetitions)
    decoded = {}
    for setting, writer, times in zip(sequences, writers, seconds / options.tokens, strict=True):
        generator = writer.generator
        compactions = -(-options.tokens // generator.block_size)
        compaction, writer.state = timing.compaction_seconds(writer.state)
        extra = {"compaction_ms_per_token": 1e3 * compactions * compaction / options.tokens}
        if (rate := timing.hit_rate(writer.state)) is not None:
            extra["hit_rate"] = rate
        host_bytes = kvjax.cache_bytes(writer.state.layers).host // generator.batch
        tokens = generator.max_prompt_tokens + generator.max_new_tokens
        decoded[setting] = _Decoded(times, caches.sequence_size(generator, tokens, host_bytes), extra)
    return decoded


def measure_prefill(options: Options, llm: LanguageModel, context: int) -> Iterator[Measured]:
    """Yields labels and values of `Generator.prefill` of one random prompt with every setting."""
    generators = make_generators(llm, options.settings, max_prompt_tokens=context, max_new_tokens=options.tokens)
    prompts = random_tokens(llm, options.seed, 1, context)

    def prefill(generator: Generator) -> GenerationState:
        return generator.prefill(generator.init_state(options.seed), prompts)

    runs = {str(setting): functools.partial(prefill, generator) for setting, generator in generators.items()}
    for name, values in measure_runs(runs, options.repetitions, "prefill_seconds").items():
        yield {"setting": name, **options.labels(llm, context)}, {**values}


def measure_bytes(options: Options, llm: LanguageModel, context: int) -> Iterator[Measured]:
    """Yields the bytes that every setting's cache holds and that a step reads, relative to a full bfloat16 cache."""
    generators = make_generators(llm, options.settings, max_prompt_tokens=context, max_new_tokens=options.tokens)
    for setting, generator in generators.items():
        held, read = caches.fractions(generator, context + options.tokens)
        values = {"held_fraction": held, "read_fraction": read}
        yield {"setting": str(setting), **options.labels(llm, context)}, values


def measure_limits(options: Options, llm: LanguageModel) -> Iterator[Measured]:
    """Yields memory bandwidth, rate of matrix products, and the time that reading the weights takes."""
    bandwidth = benchmarking.memory_bandwidth()
    values = {
        "memory_bandwidth_gb_s": bandwidth / 1e9,
        "matmul_gflops": benchmarking.product_rate(jnp.dtype(dtype_of(llm))) / 1e9,
        "ms_per_token_of_weights": 1e3 * timing.weight_bytes(llm.model) / bandwidth,
    }
    yield {"setting": "machine", "model": options.model or options.shape, "dtype": dtype_of(llm)}, values


MEASURES = {
    "latency": measure_latency,
    "prefill": measure_prefill,
    "throughput": measure_throughput,
    "first_answer": measure_first_answer,
    "questions": measure_questions,
    "bytes": measure_bytes,
    "transformers": measure_transformers,
}


def main(options: Options) -> None:
    """Prints the tables and writes the figures."""
    llm, directory = make_model(options), options.output_dir
    print(f"kvjax {kvjax.__version__}, {jax.devices()[0].device_kind}")
    for name in options.measure:
        figures: list[Figure] = []

        parts = {
            f"{name}: prompts of {one} tokens": MEASURES[name](options, llm, one) for one in options.context_tokens
        }
        if name == "latency":
            parts = {"limits of the machine": measure_limits(options, llm), **parts}
        for title, measured in parts.items():
            first = len(figures)
            for labels, values in measured:
                if "problem" in labels:
                    print(f"{labels['setting']} failed: {labels['problem']}")
                if options.results is not None:
                    row = {"measure": title.partition(":")[0], "device": jax.devices()[0].device_kind}
                    append_row(options.results, row | labels | values)
                figures += [figure(metric, value, **labels) for metric, value in values.items()]
                write_figures(directory / f"{name}.json", figures)
            print_figures(title, figures[first:], "setting")


if __name__ == "__main__":
    run_command(main, Options)
