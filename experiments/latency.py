"""What a compressed cache costs and gains in time and memory, as ratios to exact attention in the same run.

    python -m experiments.latency
    python -m experiments.latency --shape llama-3.1-8b --context_tokens 16384 --context_tokens 131072

On a model of random weights and a shape of one's choice: time to first token, time per output token, their sum over a
long answer, memory, the overhead of compressing, the share of selection in decoding, hits of a device cache before host
memory (Chelsea, Tables 3, 9 and 10 and Figure 5; BalanceKV, Table 2; ClusterKV, Figures 12 and 13 and section 5.3).

How times are paired: every layer of the prompt is read exactly, once, and then compressed by every policy in turn, so
that each layer is a repetition of the same work; in decoding the policies take turns, a block of tokens each. Ratios
are taken within a layer or a turn, medians over them, with intervals. Compilation is left out. Time to first token is
reading plus compressing, one after the other, without the single product that gives its logits: an engine that overlaps
the two may take less. Bytes are set against the rate at which this machine reads memory, operations against that of a
plain product, both measured in the run. Budgets of policies that recall are of what a token reads.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags
from flax import nnx
from jaxtyping import Float
from kvjax_models import generate
from kvjax_models.llama import Llama
from kvjax_models.lowering import lower_decode
from kvjax_models.prefill import ReadLayer, asked_queries, compress_layer, embed, read_layers, repeat_layer, repetitions
from tqdm import tqdm

import kvjax
from experiments.common import plots, results, settings, speed
from kvjax.combinators.host_memory import Hosted
from kvjax.policy import Repeat, Repeated, repeat_of
from kvjax.registry import PolicyChoice
from kvjax.segment import Recalled, parts_of

NAME = "latency"
EXACT = "exact"
POLICIES = (
    EXACT,
    "streaming_llm",
    "uniform",
    "snapkv",
    "pyramidkv",
    "cam",
    "subgen",
    "balancekv",
    "balancekv_reference",
    "chelsea",
    "chelsea:slope=None",
    "clusterkv",
    "clusterkv:residual=False",
    "quest",
    "infinigen",
)
# The fewest samples whose median has a 95% interval.
FEWEST = 6
SELECTIONS = 64  # queries that select one after the other, so that starting a program weighs nothing

settings.define_common(policies=POLICIES, budgets=("20%",))
_SHAPE = flags.DEFINE_string(
    "shape", "small", f"Sizes of the model: {', '.join(speed.SHAPES)}, or a directory with a config.json."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16"], "Of weights and caches; by default bfloat16 on accelerators."
)
_CONTEXT = flags.DEFINE_multi_integer("context_tokens", [4096, 16384, 32768], "Tokens of the prompt; repeatable.")
_CHUNK = flags.DEFINE_integer("prefill_chunk", 256, "Tokens per chunk of exact prefill.")
_TOKENS = flags.DEFINE_integer("tokens", 64, "Tokens decoded per turn.")
_TURNS = flags.DEFINE_integer("turns", 7, "Turns of decoding, 6 at least.", lower_bound=FEWEST)
_ANSWER = flags.DEFINE_multi_integer("answer_tokens", [256, 1000], "Tokens of an end-to-end answer; repeatable.")


@dataclasses.dataclass
class Measured:
    """What one setting took, exact itself included."""

    setting: PolicyChoice
    compress: Float[np.ndarray, "L"]  # seconds per layer and prefill
    token: Float[np.ndarray, "R"]  # seconds per token of every turn
    selection: float | None  # seconds per token, over all layers; None where nothing is selected apart
    hit_rate: float | None  # of the blocks that a step recalls, those that the device still held
    device_bytes: int  # over all layers
    host_bytes: int
    read_bytes: int  # per token, over all layers
    program_bytes: int  # that decoding holds at once: weights, caches and temporaries


class Timed(NamedTuple):
    """One context length."""

    context: int
    reading: Float[np.ndarray, "L"]  # seconds of exact prefill, per layer and prefill
    prefills: int  # passes over all layers
    settings: list[Measured]  # exact first

    def first_token(self, measurement: Measured) -> Float[np.ndarray, "L"]:
        return self.reading + measurement.compress

    def end_to_end(self, measurement: Measured, tokens: int) -> float:
        """Seconds of reading the prompt, compressing it and writing so many tokens."""
        return float(np.sum(self.first_token(measurement))) / self.prefills + tokens * float(
            np.median(measurement.token)
        )


class Limits(NamedTuple):
    """What this machine can do at most."""

    bytes: float  # read per second
    operations: float  # floating-point ones per second


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    config = speed.shape(_SHAPE.value)
    dtype = jnp.dtype(_DTYPE.value or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    model = Llama(config, dtype=dtype, rngs=nnx.Rngs(flags.FLAGS.seed))
    quick = flags.FLAGS.quick
    chosen = settings.settings((EXACT, *(name for name in flags.FLAGS.policy if name != EXACT)), flags.FLAGS.budget)
    limits = Limits(speed.reading_rate(), speed.matmul_rate(dtype))
    directory = pathlib.Path(flags.FLAGS.output_dir)
    rows: list[results.Row] = []
    for context in [1024] if quick else _CONTEXT.value:
        timed = measure(
            model, chosen[:4] if quick else chosen, context, flags.FLAGS.seed, 8 if quick else _TOKENS.value
        )
        show(timed, model, dtype, limits)
        rows += timed_rows(timed, model, dtype, limits)
        results.write_rows(directory / f"{NAME}.json", rows)
    plot(directory / f"{NAME}.png", rows)
    print(f"Rows: {directory / f'{NAME}.json'}   plot: {directory / f'{NAME}.png'}")


def measure(model: Llama, chosen: Sequence[PolicyChoice], context: int, seed: int, tokens: int) -> Timed:
    """Everything at one context length; `chosen` begins with exact."""
    # One turn warms up.
    sizes: dict[str, Any] = {"batch": 1, "max_prompt": context, "max_new": tokens * (_TURNS.value + 1)}
    able = generators_of(model, chosen, context, sizes)
    generators = list(able.values())
    prefills = -(-FEWEST // model.config.layers)
    reading, compress, states = [], [], []
    for _ in range(prefills):
        states = [generator.start(seed) for generator in generators]
        for read_seconds, compress_seconds in prefill(model, generators, states, context, seed):
            reading.append(read_seconds)
            compress.append(compress_seconds)
    measured = []
    writers = []
    for setting, generator, state, seconds in zip(able, generators, states, np.array(compress).T, strict=True):
        held = kvjax.cache_bytes(state.layers)
        writers.append(Writer(generator, state, tokens))
        measured.append(
            Measured(
                setting,
                compress=seconds,
                token=np.empty(0),
                selection=selection_seconds(state.layers),
                hit_rate=None,
                device_bytes=held.device,
                host_bytes=held.host,
                read_bytes=sum(map(kvjax.read_bytes, state.layers)),
                program_bytes=speed.held_bytes(lower_decode(generator, state).compile()),
            )
        )
    del states
    turns = speed.interleaved_seconds(writers, _TURNS.value)
    for measurement, writer, seconds in zip(measured, writers, turns, strict=True):
        measurement.token = seconds / tokens
        measurement.hit_rate = hit_rate(writer.state)
    return Timed(context, np.array(reading), prefills, measured)


def generators_of(
    model: Llama, chosen: Sequence[PolicyChoice], context: int, sizes: dict[str, Any]
) -> dict[PolicyChoice, generate.Generator]:
    """A generator of every setting that can be made for such a prompt, and compress what is read of it; the others are
    said with their reason."""
    spec, tokens = generate.cache_specs(model, **sizes)[0], padded(context)

    def of_heads(tokens: int, heads: int) -> Any:
        return jax.ShapeDtypeStruct((1, tokens, heads, spec.head_dim), spec.dtype)

    keys, lengths = of_heads(tokens, spec.kv_heads), jax.ShapeDtypeStruct((1,), jnp.int32)
    able = {}
    for setting in chosen:
        try:
            generator = generate.Generator(model, settings.fitted(setting, spec, context), **sizes)
            for cache in {cache.policy: cache for cache in jax.eval_shape(generator.start).layers}.values():
                asked, repeated = asked_queries(cache.policy, tokens), None
                if cache.policy.repeat is not None:
                    texts, sizes_of_texts = repeated_prompt(
                        cache.policy.repeat, np.zeros((1, tokens), np.int32), context
                    )
                    queries, again = of_heads(texts.size, spec.query_heads), of_heads(texts.size, spec.kv_heads)
                    repeated = Repeated(queries, again, jnp.asarray(sizes_of_texts))
                read = ReadLayer(keys, keys, keys, of_heads(asked, spec.query_heads) if asked else None, repeated)
                jax.eval_shape(compress_layer, cache, read, lengths)
        except ValueError as error:
            settings.tell_left_out(setting, error)
        else:
            able[setting] = generator
    return able


def padded(context: int) -> int:
    """A prompt's tokens in whole chunks."""
    return -(-context // _CHUNK.value) * _CHUNK.value


def repeated_prompt(repeat: Repeat, prompt: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """The texts that repeat a padded prompt, one behind the other, and their lengths."""
    texts, sizes = repetitions(repeat, prompt, np.array([context], np.int32))
    return texts.reshape(1, -1), sizes


def prefill(
    model: Llama,
    generators: Sequence[generate.Generator],
    states: list[generate.GenerationState],
    context: int,
    seed: int,
) -> Iterator[tuple[float, list[float]]]:
    """Reads one prompt of random tokens layer by layer into the states, which are replaced by what they become.

    Yields:
        Seconds of reading a layer, and of compressing it as every generator does, with reading the prompt once more for
        those that ask for it.
    """
    chunk = _CHUNK.value
    prompt = np.zeros((1, padded(context)), np.int32)
    prompt[0, :context] = np.random.default_rng(seed).integers(0, model.config.vocab_size, context)
    lengths = jnp.full(1, context, jnp.int32)
    asked = [
        max(asked_queries(generator.policies[layer], prompt.shape[1]) for generator in generators)
        for layer in range(model.config.layers)
    ]
    reading_of = functools.partial(read_layers, model, prompt, lengths, chunk, asked)
    jax.block_until_ready(next(reading_of()))  # compiles
    layers = reading_of()
    repeat = repeat_of([policy for generator in generators for policy in generator.policies])
    if repeat is not None:
        texts, sizes = (jnp.asarray(x) for x in repeated_prompt(repeat, prompt, context))
        again = embed(model, texts)
        jax.block_until_ready(next(read_layers(model, prompt, lengths, chunk, asked, repeat)))  # compiles
    for number in tqdm(range(model.config.layers), desc=f"prefill, {context} tokens", leave=False):
        reading, read = speed.timed(next, layers)
        seconds = []
        repeating = 0.0
        if repeat is not None:
            more = (model.layers[number], model.config, None, again, read.keys, read.values, lengths, sizes)
            repeating, (again, queries, keys) = speed.timed(repeat_layer, *more)
            read = read._replace(repeated=Repeated(queries, keys, sizes))
        for place in range(len(generators)):
            cache = states[place].layers[number]
            if _abstract(cache) not in _COMPILED:
                compress_layer(jax.tree.map(jnp.copy, cache), read, lengths)
                _COMPILED.add(_abstract(cache))
            elapsed, (compressed, _) = speed.timed(compress_layer, cache, read, lengths)
            seconds.append(elapsed + (0.0 if cache.policy.repeat is None else repeating))
            layers_now = (*states[place].layers[:number], compressed, *states[place].layers[number + 1 :])
            states[place] = dataclasses.replace(states[place], layers=layers_now, positions=jnp.copy(lengths))
        yield reading, seconds


# Caches, policies and shapes, whose compression has run before.
_COMPILED: set[Any] = set()


def _abstract(cache: Any) -> Any:
    return jax.tree.structure(cache), tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(cache))


@dataclasses.dataclass
class Writer:
    """Writes tokens, a turn at a call, each going on from the last."""

    generator: generate.Generator
    state: generate.GenerationState
    tokens: int

    def __call__(self) -> generate.GenerationState:
        for newest, _ in self.generator.write(self.state, self.tokens):
            self.state = newest
        return self.state


def selection_seconds(layers: Sequence[kvjax.Cache]) -> float | None:
    """Seconds per token that finding what a query reads takes over all layers, apart from reading it, by the last of
    them; None for policies that do not recall."""
    spec = layers[-1].spec

    def recalled(cache: kvjax.Cache) -> list[Recalled]:
        parts = parts_of(cache.policy.read(cache.state, cache.staging.count[:, None]))
        return [part for part in parts if isinstance(part, Recalled)]

    if not recalled(layers[-1]):
        return None

    @jax.jit
    def select(cache, queries):
        def select_for(query):
            # Otherwise what does not depend on the query would be computed once for all.
            barred, query = jax.lax.optimization_barrier((cache, query))
            total = jnp.int32(0)
            for part in recalled(barred):
                group = spec.query_heads // spec.kv_heads
                first, last = part.heads or (0, spec.kv_heads)
                first_round = None if part.target is None else jnp.zeros(query.shape[0], jnp.int32)
                choice = part.choose(query[:, :, first * group : last * group], first_round)
                total += jnp.sum(choice.block) + jnp.sum(choice.tokens)
            return total

        return jax.lax.map(select_for, queries)

    queries = jax.random.normal(jax.random.key(0), (SELECTIONS, 1, 1, spec.query_heads, spec.head_dim), spec.dtype)
    seconds = speed.seconds(select, layers[-1], queries, repetitions=FEWEST)
    return float(np.median(seconds)) / SELECTIONS * len(layers)


def hit_rate(state: generate.GenerationState) -> float | None:
    """The share of the blocks asked for by all steps so far that the device still held; None without host memory."""
    hosted = [cache.state for cache in state.layers if isinstance(cache.state, Hosted)]
    recent = [of_part for layer in hosted for of_part in layer.recent]
    requested = sum(int(jnp.sum(of_part.requested)) for of_part in recent)
    return sum(int(jnp.sum(of_part.hits)) for of_part in recent) / requested if requested else None


def timed_rows(timed: Timed, model: Llama, dtype: Any, limits: Limits) -> list[results.Row]:
    """One context's rows, a metric each. Names that end in `_over_exact` are ratios to exact in the same run."""
    exact = timed.settings[0]
    needed = speed.prefill_operations(model.config, timed.context)
    weights = speed.weight_read_bytes(model)
    total = float(np.sum(timed.reading)) / timed.prefills
    rows = []
    for measurement in timed.settings:
        shared: dict[str, Any] = {
            "experiment": NAME,
            "model": f"random {_SHAPE.value}",
            "policy": measurement.setting.name,
            "variant": measurement.setting.variant,
            "context_tokens": timed.context,
            "batch": 1,
            "seed": flags.FLAGS.seed,
            "device_bytes": measurement.device_bytes,
            "host_bytes": measurement.host_bytes,
            "read_bytes_per_token": measurement.read_bytes,
            "weight_bytes": weights,
        }
        extra: dict[str, Any] = {
            "budget": str(measurement.setting.budget) if measurement.setting.budget else None,
            "dtype": str(dtype),
            "device": jax.devices()[0].device_kind,
        }

        def row(metric: str, value: float, shared=shared, extra=extra, **more: Any) -> results.Row:
            return results.Row(**shared, metric=metric, value=value, extra=extra | more)

        def estimate(metric: str, samples: np.ndarray, shared=shared, extra=extra) -> results.Row:
            value, low, high = results.median_interval(samples)
            return results.Row(
                **shared, metric=metric, value=value, ci95_low=low, ci95_high=high, n=len(samples), extra=extra
            )

        if measurement is exact:
            rows.append(row("prefill_seconds", total, share_of_matmul_rate=needed / total / limits.operations))
        moved = (weights + measurement.read_bytes) / float(np.median(measurement.token))
        rows += [
            row("compress_seconds", float(np.sum(measurement.compress)) / timed.prefills),
            estimate("compress_share_of_prefill", measurement.compress / timed.reading),
            row("time_to_first_token_seconds", float(np.sum(timed.first_token(measurement))) / timed.prefills),
            estimate("time_to_first_token_over_exact", timed.first_token(measurement) / timed.first_token(exact)),
            estimate("ms_per_token", 1e3 * measurement.token),
            estimate("ms_per_token_over_exact", measurement.token / exact.token),
            row("share_of_reading_rate", moved / limits.bytes),
            row("memory_bytes", measurement.program_bytes),
            row("memory_over_exact", measurement.program_bytes / exact.program_bytes),
        ]
        for tokens in _ANSWER.value:
            seconds = timed.end_to_end(measurement, tokens)
            rows.append(row("end_to_end_seconds", seconds, answer_tokens=tokens))
            ratio = seconds / timed.end_to_end(exact, tokens)
            rows.append(row("end_to_end_over_exact", ratio, answer_tokens=tokens))
        if measurement.selection is not None:
            rows.append(row("selection_share_of_decoding", measurement.selection / float(np.median(measurement.token))))
        if measurement.hit_rate is not None:
            rows.append(row("hit_rate", measurement.hit_rate))
    return rows


def show(timed: Timed, model: Llama, dtype: Any, limits: Limits) -> None:
    """The table of one context: what a policy takes as ratios to exact, shares of it, and bytes."""
    exact = timed.settings[0]
    total = float(np.sum(timed.reading)) / timed.prefills
    rate = speed.prefill_operations(model.config, timed.context) / total
    print(
        f"{timed.context} tokens: exact prefill {total:.2f} s, {rate / limits.operations:.0%} of the "
        f"{limits.operations / 1e9:.0f} Gflop/s of a plain product; memory is read at {limits.bytes / 1e9:.1f} GB/s"
    )
    weights = speed.weight_read_bytes(model)
    longest = _ANSWER.value[-1]
    times, memory = [], []
    for measurement in timed.settings:
        token = float(np.median(measurement.token))
        slower = results.median_interval(measurement.token / exact.token)
        times.append(
            (
                settings.label(measurement.setting),
                f"{np.sum(measurement.compress) / timed.prefills:.3f}",
                f"{np.median(measurement.compress / timed.reading):.1%}",
                f"{np.median(timed.first_token(measurement) / timed.first_token(exact)):.3f}",
                f"{1e3 * token:.1f}",
                f"{slower.value:.2f} [{slower.low:.2f}, {slower.high:.2f}]",
                "-" if measurement.selection is None else f"{measurement.selection / token:.1%}",
                f"{timed.end_to_end(measurement, longest) / timed.end_to_end(exact, longest):.2f}",
            )
        )
        memory.append(
            (
                settings.label(measurement.setting),
                f"{measurement.read_bytes / 1e6:.1f}",
                f"{(weights + measurement.read_bytes) / token / limits.bytes:.0%}",
                f"{measurement.device_bytes / 1e6:.1f}"
                + (f" + {measurement.host_bytes / 1e6:.1f}" if measurement.host_bytes else ""),
                "-" if measurement.hit_rate is None else f"{measurement.hit_rate:.0%}",
                f"{measurement.program_bytes / exact.program_bytes:.2f}",
            )
        )
    title = f"A prompt of {timed.context} tokens, random {_SHAPE.value}, batch 1, {dtype}"
    results.print_table(
        f"{title}: seconds, and ratios to exact",
        ("policy", "compress s", "of prefill", "first token", "ms/token", "x exact [95%]", "selection", f"+ {longest}"),
        times,
    )
    results.print_table(
        f"{title}: bytes",
        ("policy", "MB read per token", "of the rate", "MB held (+ host)", "hits", "memory, x exact"),
        memory,
    )


def plot(path: pathlib.Path, rows: Sequence[results.Row]) -> None:
    """Ratios to exact against the prompt's length: time to first token, time per token, end to end, memory."""
    panels = {
        "time_to_first_token_over_exact": "time to first token",
        "ms_per_token_over_exact": "time per output token",
        "end_to_end_over_exact": f"end to end, {_ANSWER.value[-1]} tokens",
        "memory_over_exact": "memory while decoding",
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 4))
    for axis, (metric, title) in zip(axes, panels.items(), strict=True):
        drawn = [
            row for row in rows if row.metric == metric and row.extra.get("answer_tokens") in (None, _ANSWER.value[-1])
        ]
        for setting, line in results.by_setting(drawn).items():
            axis.plot([row.context_tokens for row in line], [row.value for row in line], marker=".", label=setting)
        axis.set(title=f"{title}, of exact's", xlabel="tokens of the prompt")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[-1].legend(fontsize=6)
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
