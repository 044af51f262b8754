"""Measures prefill, compression, decode steps and memory with each cache, relative to the full cache in the same run.

    python -m experiments.speed --shape small --context_tokens 4096 --policy snapkv --policy clusterkv --budget 25%
    python -m experiments.speed --model smollm2-135m --context_tokens 2048
    python -m experiments.speed --measure prefill --model smollm2-135m --context_tokens 1980 --policy kvzip
    python -m experiments.speed --measure throughput --context_tokens 4096 --full_rows 4

`latency` decodes one sequence: time to first token, time per token, time of prefill and 1,000 tokens, selection of
blocks, resident and read bytes; with `--transformers` also the time per token of transformers' DynamicCache. `prefill`
times entire prefills, with all passes that a policy needs. `throughput` serves requests by continuous batching with as
many rows as fit in the memory of `--full_rows` rows of the full cache. `bytes` computes the bytes that a cache holds
and that a step reads, without weights. Weights and prompts are random unless `--model` names a model. Policies
alternate, so ratios compare neighbors.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments import throughput
from experiments.common import caches, timing
from experiments.common.caches import Setting
from experiments.common.flags import Flags, one_of, repeatable, run_command
from experiments.common.output import Figure, figure, print_figures, write_figures
from experiments.common.shapes import find_shape, first_layers, random_model
from experiments.common.statistics import median_interval
from experiments.common.transformers_decode import TransformersWriter
from kvjax_models import LanguageModel, load
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.lowering import lower_decode
from kvjax_models.generation.state import GenerationState

MEASURES = ("latency", "prefill", "throughput", "bytes")
MIN_SAMPLES = 6  # samples whose median has a 95% interval
ANSWER_TOKENS = 1_000  # of end-to-end times, which add prefill and decode steps


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of a measurement."""

    measure: tuple[str, ...] = repeatable(
        "latency", choices=("latency", "prefill", "throughput", "bytes")
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
    transformers: bool = False  # Also decode with transformers, which must be installed, for `latency`.
    answer_tokens: int = 256  # Tokens of a request of `throughput`.
    full_rows: tuple[int, ...] = repeatable(1, 4)  # Rows of the full cache that set the memory of `throughput`.
    seed: int = 0
    output_dir: str = "build/speed"  # Directory of the figures.

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
        return dataclasses.replace(llm, tokenizer=dataclasses.replace(llm.tokenizer, eos_ids=()))
    config = first_layers(find_shape(options.shape), options.layers)
    return random_model(config, dtype, options.seed, is_abstract=options.measure == ("bytes",))


def make_generators(llm: LanguageModel, settings: Sequence[Setting], **sizes: Any) -> dict[Setting, Generator]:
    """Returns a generator of every setting that is possible, and prints why the others are not."""
    generators = {}
    for setting in settings:
        try:
            generators[setting] = caches.make_generator(llm, setting, **sizes)
        except ValueError as error:
            print(f"{setting} is left out: {error}")
    return generators


def measure_latency(options: Options, llm: LanguageModel, context: int) -> list[Figure]:
    """Measures one sequence with every setting.

    Args:
        options: the options.
        llm: the model.
        context: tokens of the prompt.

    Returns:
        The figures.
    """
    model, tokens = llm.model, options.tokens
    new = tokens * (options.repetitions + 1)  # one run compiles
    sizes = {"batch": 1, "max_prompt_tokens": context, "max_new_tokens": new, "budget_tokens": context + new}
    generators = make_generators(llm, options.settings, **sizes)
    prefill = timing.TimedPrefill(model, list(generators.values()), context, options.prefill_chunk, options.seed)
    list(prefill.run())  # compiles
    passes = -(-MIN_SAMPLES // model.config.layers)
    layers = [times for _ in range(passes) for times in prefill.run()]
    read = np.asarray([seconds for seconds, _ in layers])
    compress = np.asarray([seconds for _, seconds in layers]).T
    selection = [timing.selection_seconds(state.layers, MIN_SAMPLES) for state in prefill.states]
    pairs = list(zip(generators.values(), prefill.states, strict=True))
    programs = [timing.program_bytes(lower_decode(*pair).compile()) for pair in pairs]
    held = [caches.measure_size(*pair, context + new) for pair in pairs]
    writers = [timing.Writer(*pair, tokens) for pair in pairs]
    peers = [TransformersWriter(model, context, tokens)] if options.transformers else []
    step = timing.interleaved_seconds([*writers, *peers], options.repetitions) / tokens
    answer = np.sum(read + compress, axis=1, keepdims=True) / passes + ANSWER_TOKENS * step[: len(pairs)]
    common: dict[str, Any] = {"context_tokens": context, "model": options.model or options.shape}
    common["dtype"] = str(jnp.dtype(model.embedding.param_dtype))
    figures = []
    for index, setting in enumerate(generators):
        labels = {"setting": str(setting), **common, **dataclasses.asdict(held[index])}
        values: dict[str, Any] = {
            "prefill_seconds": float(np.sum(read)) / passes,
            "compress_seconds": float(np.sum(compress[index])) / passes,
            "compress_share_of_prefill": median_interval(compress[index] / read),
            "time_to_first_token_ratio": median_interval((read + compress[index]) / (read + compress[0])),
            "end_to_end_ratio": median_interval(answer[index] / answer[0]),
            "ms_per_token": median_interval(1e3 * step[index]),
            "ms_per_token_ratio": median_interval(step[index] / step[0]),
            "decode_memory_ratio": programs[index] / programs[0],
        }
        if (share := selection[index]) is not None:
            values["selection_share_of_step"] = share / float(np.median(step[index]))
        if (rate := timing.hit_rate(writers[index].state)) is not None:
            values["hit_rate"] = rate
        figures += [figure(metric, value, **labels) for metric, value in values.items()]
    if options.transformers:
        common["setting"] = "transformers"
        figures.append(figure("ms_per_token", median_interval(1e3 * step[-1]), **common))
        figures.append(figure("ms_per_token_ratio", median_interval(step[-1] / step[0]), **common))
    return figures


def measure_prefill(options: Options, llm: LanguageModel, context: int) -> list[Figure]:
    """Measures `Generator.prefill` of one random prompt with every setting.

    Args:
        options: the options.
        llm: the model.
        context: tokens of the prompt.

    Returns:
        The figures.
    """
    sizes = {"batch": 1, "max_prompt_tokens": context, "max_new_tokens": options.tokens}
    generators = make_generators(llm, options.settings, **sizes, budget_tokens=context + options.tokens)
    prompt = np.random.default_rng(options.seed).integers(0, llm.model.config.vocab_size, context).tolist()

    def prefill(generator: Generator) -> GenerationState:
        return generator.prefill(generator.init_state(options.seed), [prompt])

    runs = [functools.partial(prefill, generator) for generator in generators.values()]
    seconds = timing.interleaved_seconds(runs, options.repetitions)
    labels = {"context_tokens": context, "model": options.model or options.shape}
    figures = []
    for setting, times in zip(generators, seconds, strict=True):
        pairs = (("prefill_seconds", times), ("prefill_seconds_ratio", times / seconds[0]))
        figures += [figure(metric, median_interval(x), setting=str(setting), **labels) for metric, x in pairs]
    return figures


def measure_bytes(options: Options, llm: LanguageModel, context: int) -> list[Figure]:
    """Returns the bytes that every setting's cache holds and that a step reads, relative to a full bfloat16 cache.

    Args:
        options: the options.
        llm: the model.
        context: tokens of the prompt.

    Returns:
        The figures.
    """
    total = context + options.tokens
    sizes = {"batch": 1, "max_prompt_tokens": context, "max_new_tokens": options.tokens, "budget_tokens": total}
    labels = {"context_tokens": context, "model": options.model or options.shape}
    figures = []
    for setting, generator in make_generators(llm, options.settings, **sizes).items():
        fractions = zip(("held_fraction", "read_fraction"), caches.fractions(generator, total), strict=True)
        figures += [figure(metric, value, setting=str(setting), **labels) for metric, value in fractions]
    return figures


def measure_limits(options: Options, llm: LanguageModel) -> list[Figure]:
    """Returns memory bandwidth, rate of matrix products, and the time that reading the weights takes."""
    dtype = llm.model.embedding.param_dtype
    bandwidth = timing.memory_bandwidth()
    labels = {"setting": "machine", "model": options.model or options.shape, "dtype": str(jnp.dtype(dtype))}
    return [
        figure("memory_bandwidth_gb_s", bandwidth / 1e9, **labels),
        figure("matmul_gflops", timing.matmul_rate(dtype) / 1e9, **labels),
        figure("ms_per_token_of_weights", 1e3 * timing.weight_bytes(llm.model) / bandwidth, **labels),
    ]


def main(options: Options) -> None:
    """Prints the tables and writes the figures."""
    llm, directory = make_model(options), pathlib.Path(options.output_dir)
    print(f"kvjax {kvjax.__version__}, {jax.devices()[0].device_kind}")
    if "latency" in options.measure:
        figures = measure_limits(options, llm)
        print_figures("Limits of the machine", figures, "setting")
        for context in options.context_tokens:
            found = measure_latency(options, llm, context)
            print_figures(f"Prompt of {context} tokens, batch 1; ratios to the full cache", found, "setting")
            figures += found
            write_figures(directory / "latency.json", figures)
    others = {
        "prefill": (measure_prefill, "Prefill of {} tokens; ratios to the full cache"),
        "bytes": (measure_bytes, "Bytes after a prompt of {} tokens, relative to a full bfloat16 cache"),
    }
    for name, (measure, title) in others.items():
        if name not in options.measure:
            continue
        figures = []
        for context in options.context_tokens:
            found = measure(options, llm, context)
            print_figures(title.format(context), found, "setting")
            figures += found
            write_figures(directory / f"{name}.json", figures)
    if "throughput" in options.measure:
        figures = []
        for context in options.context_tokens:
            for rows in options.full_rows:
                sizes = throughput.Sizes(context, options.answer_tokens, rows, options.repetitions, options.seed)
                found = throughput.measure(llm, options.settings, sizes)
                print_figures(f"Prompts of {context} tokens, memory of {rows} rows of the full cache", found, "setting")
                figures += found
                write_figures(directory / "throughput.json", figures)


if __name__ == "__main__":
    run_command(main, Options)
