"""Measures prefill, compression, decode steps and memory with each cache, relative to the full cache in the same run.

    python -m experiments.speed --shape small --context_tokens 4096 --policy snapkv --policy clusterkv --budget 25%
    python -m experiments.speed --model smollm2-135m --context_tokens 2048
    python -m experiments.speed --measure prefill --model smollm2-135m --context_tokens 1980 --policy kvzip
    python -m experiments.speed --measure throughput --context_tokens 4096 --full_rows 4
    python -m experiments.speed --measure answer --model smollm2-135m --context_tokens 1980 --policy auto --transformers
    python -m experiments.speed --measure questions --model smollm2-135m --context_tokens 4096 --policy auto

`latency` decodes one sequence: time to first token, time per token, time of prefill and 1,000 tokens, selection of
blocks, resident and read bytes; with `--transformers` also the time per token of transformers' DynamicCache. `prefill`
times entire prefills, with all passes that a policy needs. `throughput` serves requests by continuous batching with as
many rows as fit in the memory of `--full_rows` rows of the full cache. `first_answer` times the first answer of new
processes, without and with stored programs, `answer` prefill and the decode steps of an answer of `--tokens` tokens,
`questions` the answers to `--questions` questions about a document that was read before; with `--transformers` also the
answers of transformers with its DynamicCache. `bytes` computes the bytes that a cache holds and that a step reads,
without weights. `transformers` decodes with each of transformers' caches; on a GPU, `JAX_PLATFORMS=cpu` leaves its
memory to torch. Weights and prompts are random unless `--model` names a model. Policies alternate, so ratios compare
neighbors.
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
from experiments.common.answers import measure_answer, measure_first_answer, measure_questions
from experiments.common.caches import Setting
from experiments.common.compiled import launches
from experiments.common.flags import run_command
from experiments.common.output import Figure, Measured, append_row, figure, print_figures, write_figures
from experiments.common.shapes import UnscoredModel, find_shape, first_layers, random_model
from experiments.common.speed_options import (
    MIN_SAMPLES,
    TRANSFORMERS,
    Options,
    dtype_of,
    make_generators,
    measure_runs,
    random_tokens,
)
from experiments.common.statistics import median_interval
from experiments.common.throughput import measure_throughput
from experiments.common.transformers_decode import TransformersWriter, measure_transformers
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

    Raises:
        ValueError: if transformers would share a device with JAX.
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
    peers: dict[Any, Any] = {}
    is_cpu = jax.default_backend() == "cpu"
    if options.transformers:
        if not is_cpu:
            raise ValueError("--transformers shares a CPU; on a device, pass --measure transformers")
        peers[TRANSFORMERS] = TransformersWriter(llm.model.config, dtype_of(llm), context, options.tokens)
    names = list(prefill.states)
    decoded: dict[Any, _Decoded] = {}
    for group in [names] if is_cpu else [[name] for name in names]:
        with prefill.recorded_problem(*group):
            writers = {name: (generators[name], prefill.states.pop(name), rows[name]) for name in group}
            decoded |= _decode(options, writers, peers)
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
    for name in peers.keys() & decoded.keys():
        values = {"ms_per_token": median_interval(1e3 * decoded[name].step)}
        values["ms_per_token_ratio"] = median_interval(decoded[name].step / decoded[options.settings[0]].step)
        yield {"setting": name, **common}, values
    for name, problem in prefill.problems.items():
        yield {"setting": str(name), **common, "problem": problem}, {}


class _Decoded(NamedTuple):
    """Seconds per step in every repetition, bytes of a cache, and figures that only some policies have."""

    step: Float[np.ndarray, "R"]
    size: caches.CacheSize
    extra: dict[str, float]


def _decode(options: Options, sequences: Mapping[Any, Any], peers: Mapping[Any, Any]) -> dict[Any, _Decoded]:
    """Measures the decode steps of sequences: a generator, a state and its number of copies for each setting."""
    writers: dict[Any, timing.Writer] = {}
    for name, (generator, state, rows) in sequences.items():
        state = timing.make_rows(generator, state, rows)
        writers[name] = timing.Writer(generator.with_batch(rows), state, options.tokens)
    seconds = timing.interleaved_seconds([*writers.values(), *peers.values()], options.repetitions)
    decoded = {}
    for name, times in zip([*writers, *peers], seconds / options.tokens, strict=True):
        if name in peers:
            decoded[name] = _Decoded(times, caches.CacheSize(0, 0, 0, 0.0, 0.0), {})
            continue
        generator, state = writers[name].generator, writers[name].state
        tokens, extra = generator.max_prompt_tokens + generator.max_new_tokens, {}
        compactions = -(-options.tokens // generator.block_size)
        compaction, writers[name].state = timing.compaction_seconds(state)
        extra["compaction_ms_per_token"] = 1e3 * compactions * compaction / options.tokens
        state = writers[name].state
        if generator.batch == 1 and (share := timing.selection_seconds(state.layers, MIN_SAMPLES)) is not None:
            extra["selection_share_of_step"] = share / float(np.median(times))
        if (rate := timing.hit_rate(state)) is not None:
            extra["hit_rate"] = rate
        host_bytes = kvjax.cache_bytes(state.layers).host // generator.batch
        decoded[name] = _Decoded(times, caches.sequence_size(generator, tokens, host_bytes), extra)
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
    "answer": measure_answer,
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
