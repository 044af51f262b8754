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
`questions` the answers to `--questions` questions about a document that was read before; with `--transformers` also
those of transformers' DynamicCache. `bytes` computes the bytes that a cache holds and that a step reads, without
weights. Weights and prompts are random unless `--model` names a model. Policies alternate, so ratios compare neighbors.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import kvjax
from experiments import answers, throughput
from experiments.common import caches, timing
from experiments.common.caches import Setting
from experiments.common.compiled import launches
from experiments.common.flags import Flags, one_of, repeatable, run_command
from experiments.common.output import Figure, Measured, append_row, figure, print_figures, write_figures
from experiments.common.shapes import UnscoredModel, find_shape, first_layers, random_model
from experiments.common.statistics import median_interval
from experiments.common.transformers_decode import TransformersWriter
from kvjax_models import LanguageModel, load
from kvjax_models.language_model import resolve_path
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.state import GenerationState
from pallas_kernels import benchmarking

MIN_SAMPLES = 6  # samples whose median has a 95% interval
ANSWER_TOKENS = 1_000  # of end-to-end times, which add prefill and decode steps


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of a measurement."""

    measure: tuple[str, ...] = repeatable(
        "latency", choices=("latency", "prefill", "throughput", "first_answer", "answer", "questions", "bytes")
    )  # Repeatable.
    shape: str = "small"  # Sizes of a random model: a name of `common.shapes`, or a directory with a config.json.
    model: str | None = None  # A model to load in place of a random one.
    layers: int | None = None  # Layers of the random model; by default all.
    dtype: str | None = one_of(None, ("float32", "bfloat16"))  # Default: float32 on CPUs, otherwise bfloat16.
    policy: tuple[str, ...] = repeatable("snapkv", "leverage_scores", "subgen", "balancekv", "chelsea", "clusterkv")
    budget: tuple[str, ...] = repeatable("25%")
    kv_dtype: tuple[str, ...] = repeatable("none")
    context_tokens: tuple[int, ...] = repeatable(4096)  # Tokens of the prompt; repeatable.
    tokens: int = 32  # Tokens of a timed run of decode steps.
    repetitions: int = 7  # Timed runs, at least 6.
    prefill_chunk: int = 256  # Tokens per chunk of exact prefill, for `latency`.
    batch: int = 1  # Copies of the sequence that decode together, for `latency`.
    equal_memory: bool = False  # Every setting decodes as many copies as fit in the memory of `batch` full caches.
    transformers: bool = False  # Also decode with transformers, which must be installed.
    questions: int = 12  # Questions of `questions`.
    question_tokens: int = 16  # Tokens of each of them.
    answer_tokens: int = 256  # Tokens of a request of `throughput`.
    full_rows: tuple[int, ...] = repeatable(1, 4)  # Rows of the full cache that set the memory of `throughput`.
    seed: int = 0
    output_dir: str = "build/speed"  # Directory of the figures.
    results: str | None = None  # File of JSON lines, to which a row per setting is appended.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repetitions < MIN_SAMPLES:
            raise ValueError(f"repetitions={self.repetitions} must be at least {MIN_SAMPLES}")

    @property
    def settings(self) -> list[Setting]:
        """The settings, the full cache first."""
        chosen = caches.parse_settings(self.policy, self.budget, self.kv_dtype)
        return list(dict.fromkeys([Setting(caches.FULL), *chosen]))


def make_model(options: Options) -> LanguageModel:
    """Returns the model that the options name, or one with random weights; no token ends a text."""
    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    if options.model is not None:
        llm = load(options.model, dtype)
        return UnscoredModel(llm.model, dataclasses.replace(llm.tokenizer, eos_ids=()))
    config = first_layers(find_shape(options.shape), options.layers)
    return random_model(config, dtype, options.seed, is_abstract=options.measure == ("bytes",))


def make_generators(llm: LanguageModel, settings: Sequence[Setting], **sizes: Any) -> dict[Setting, Generator]:
    """Returns a generator of every setting that is possible, and prints why the others are not."""
    generators = {}
    for setting in settings:
        try:
            generator = setting.cache(llm).generator(**sizes)
            setting.check(generator)
            generators[setting] = generator
        except ValueError as error:
            print(f"{setting} is left out: {error}")
    return generators


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
        Labels and values of each setting as soon as they are complete; of a setting that failed, the problem.

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
    common: dict[str, Any] = {"context_tokens": context, "model": options.model or options.shape}
    common["dtype"] = str(jnp.dtype(llm.model.embedding.param_dtype))
    peers: dict[Any, Any] = {}
    is_cpu = jax.default_backend() == "cpu"
    if options.transformers:
        if not is_cpu:
            raise ValueError("--transformers shares a CPU; on a device, run experiments.transformers_speed instead")
        peers["transformers"] = TransformersWriter(llm.model.config, common["dtype"], context, options.tokens)
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
    """Measures `Generator.prefill` of one random prompt with every setting.

    Args:
        options: the options.
        llm: the model.
        context: tokens of the prompt.

    Yields:
        Labels and values of each setting.
    """
    sizes = {"max_prompt_tokens": context, "max_new_tokens": options.tokens}
    generators = make_generators(llm, options.settings, **sizes)
    prompt = np.random.default_rng(options.seed).integers(0, llm.model.config.vocab_size, context).tolist()

    def prefill(generator: Generator) -> GenerationState:
        return generator.prefill(generator.init_state(options.seed), [prompt])

    runs = [functools.partial(prefill, generator) for generator in generators.values()]
    seconds = timing.interleaved_seconds(runs, options.repetitions)
    common = {"context_tokens": context, "model": options.model or options.shape}
    for setting, times in zip(generators, seconds, strict=True):
        values = {"prefill_seconds": times, "prefill_seconds_ratio": times / seconds[0]}
        yield {"setting": str(setting), **common}, {name: median_interval(x) for name, x in values.items()}


def measure_bytes(options: Options, llm: LanguageModel, context: int) -> Iterator[Measured]:
    """Yields the bytes that every setting's cache holds and that a step reads, relative to a full bfloat16 cache."""
    total = context + options.tokens
    sizes = {"max_prompt_tokens": context, "max_new_tokens": options.tokens}
    common = {"context_tokens": context, "model": options.model or options.shape}
    for setting, generator in make_generators(llm, options.settings, **sizes).items():
        held, read = caches.fractions(generator, total)
        yield {"setting": str(setting), **common}, {"held_fraction": held, "read_fraction": read}


def measure_limits(options: Options, llm: LanguageModel) -> Iterator[Measured]:
    """Yields memory bandwidth, rate of matrix products, and the time that reading the weights takes."""
    dtype = llm.model.embedding.param_dtype
    bandwidth = benchmarking.memory_bandwidth()
    labels = {"setting": "machine", "model": options.model or options.shape, "dtype": str(jnp.dtype(dtype))}
    yield (
        labels,
        {
            "memory_bandwidth_gb_s": bandwidth / 1e9,
            "matmul_gflops": benchmarking.product_rate(jnp.dtype(dtype)) / 1e9,
            "ms_per_token_of_weights": 1e3 * timing.weight_bytes(llm.model) / bandwidth,
        },
    )


def measure_throughput(options: Options, llm: LanguageModel, context: int) -> Iterator[Measured]:
    """Yields labels and values of continuous batching with every setting and number of full rows."""
    for rows in options.full_rows:
        sizes = throughput.Sizes(context, options.answer_tokens, rows, options.repetitions, options.seed)
        yield from throughput.measure(llm, options.settings, sizes)


def _answer_sizes(options: Options, llm: LanguageModel, context: int) -> answers.Sizes:
    dtype = str(jnp.dtype(llm.model.embedding.param_dtype)) if options.transformers else None
    number, repetitions = options.questions, options.repetitions
    return answers.Sizes(context, options.question_tokens, number, options.tokens, repetitions, options.seed, dtype)


def measure_first_answer(options: Options, llm: LanguageModel, context: int) -> Iterator[Measured]:
    """Yields labels and values of the first answer of new processes with every setting.

    Raises:
        ValueError: if the options name no model, which new processes could load.
    """
    if options.model is None:
        raise ValueError("--measure first_answer loads a model in new processes; pass --model")
    path = resolve_path(options.model)
    yield from answers.measure_first_answer(llm, path, options.settings, _answer_sizes(options, llm, context))


def measure_answer(options: Options, llm: LanguageModel, context: int) -> Iterator[Measured]:
    """Yields labels and values of the answer to a prompt with every setting."""
    sizes = {"max_prompt_tokens": context, "max_new_tokens": options.tokens}
    generators = make_generators(llm, options.settings, **sizes)
    yield from answers.measure_answer(llm, generators, _answer_sizes(options, llm, context))


def measure_questions(options: Options, llm: LanguageModel, context: int) -> Iterator[Measured]:
    """Yields labels and values of the answers to questions about one document with every setting."""
    yield from answers.measure_questions(llm, options.settings, _answer_sizes(options, llm, context))


MEASURES = {
    "latency": measure_latency,
    "prefill": measure_prefill,
    "throughput": measure_throughput,
    "first_answer": measure_first_answer,
    "answer": measure_answer,
    "questions": measure_questions,
    "bytes": measure_bytes,
}


def main(options: Options) -> None:
    """Prints the tables and writes the figures."""
    llm, directory = make_model(options), pathlib.Path(options.output_dir)
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
                    append_row(pathlib.Path(options.results), row | labels | values)
                figures += [figure(metric, value, **labels) for metric, value in values.items()]
                write_figures(directory / f"{name}.json", figures)
            print_figures(title, figures[first:], "setting")


if __name__ == "__main__":
    run_command(main, Options)
