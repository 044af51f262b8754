import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

import kvjax
from experiments.common import plots, results, speed, suites
from experiments.common.options import Experiment, each
from experiments.common.results import Row
from experiments.common.timing import Writer, generators_of, hit_rate, prefill, selection_seconds
from kvjax.registry import PolicyChoice
from kvjax_models.generation.lowering import lower_decode
from kvjax_models.model.llama import Llama

NAME = "latency"
FEWEST = 6  # samples whose median has a 95% interval


@dataclasses.dataclass(frozen=True)
class Options(speed.OfShape):
    """Options of this experiment."""

    policy: tuple[str, ...] = each(*suites.SUITES["latency"].policies)
    budget: tuple[str, ...] = each(*suites.SUITES["latency"].budgets)
    context_tokens: tuple[int, ...] = each(4096, 16384, 32768)  # tokens of the prompt; repeatable
    tokens: int = 64  # tokens decoded per turn
    turns: int = 7  # turns of decoding, 6 at least
    answer_tokens: tuple[int, ...] = each(256, 1000)  # tokens of an end-to-end answer; repeatable

    QUICK: ClassVar[dict[str, Any]] = {
        "context_tokens": (1024,),
        "tokens": 8,
        "policy": suites.SUITES["latency"].policies[:4],
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.turns < FEWEST:
            raise ValueError(f"--turns={self.turns}: fewer than {FEWEST} have no interval")


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


def run(options: Options) -> list[Row]:
    """The rows of every context length and setting, exact among them."""
    model = Llama(speed.shape(options.shape), dtype=options.number, rngs=nnx.Rngs(options.seed))
    limits = Limits(speed.reading_rate(), speed.matmul_rate(options.number))
    rows: list[Row] = []
    for context in options.context_tokens:
        found = timed_rows(measure(options, model, context), options, model, limits)
        show(found)
        rows += found
        results.write_rows(options.file(f"{NAME}.json"), rows)
    return rows


def measure(options: Options, model: Llama, context: int) -> Timed:
    """Everything at one context length."""
    tokens = options.tokens
    # One turn warms up.
    sizes: dict[str, Any] = {"batch": 1, "max_prompt_tokens": context, "max_new_tokens": tokens * (options.turns + 1)}
    able = generators_of(model, options.chosen, context, options.prefill_chunk, sizes)
    generators = list(able.values())
    prefills = -(-FEWEST // model.config.layers)
    reading, compress, states = [], [], []
    for _ in range(prefills):
        states = [generator.init_state(options.seed) for generator in generators]
        for read_seconds, compress_seconds in prefill(
            model, generators, states, context, options.prefill_chunk, options.seed
        ):
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
                selection=selection_seconds(state.layers, FEWEST),
                hit_rate=None,
                device_bytes=held.device,
                host_bytes=held.host,
                read_bytes=sum(map(kvjax.read_bytes, state.layers)),
                program_bytes=speed.held_bytes(lower_decode(generator, state).compile()),
            )
        )
    del states
    turns = speed.interleaved_seconds(writers, options.turns)
    for measurement, writer, seconds in zip(measured, writers, turns, strict=True):
        measurement.token = seconds / tokens
        measurement.hit_rate = hit_rate(writer.state)
    return Timed(context, np.array(reading), prefills, measured)


def timed_rows(timed: Timed, options: Options, model: Llama, limits: Limits) -> list[Row]:
    """One context's rows, a metric each. Names that end in `_over_exact` are ratios to exact in the same run."""
    exact = timed.settings[0]
    needed = speed.prefill_operations(model.config, timed.context)
    weights = speed.weight_read_bytes(model)
    total = float(np.sum(timed.reading)) / timed.prefills
    rows = []
    for measurement in timed.settings:
        token = float(np.median(measurement.token))
        row = functools.partial(
            results.row,
            NAME,
            f"random {options.shape}",
            setting=measurement.setting,
            context_tokens=timed.context,
            batch=1,
            seed=options.seed,
            device_bytes=measurement.device_bytes,
            host_bytes=measurement.host_bytes,
            read_bytes_per_token=measurement.read_bytes,
            parameter_bytes=weights,
            dtype=str(options.number),
            device=jax.devices()[0].device_kind,
        )
        samples = {
            "compress_share_of_prefill": measurement.compress / timed.reading,
            "time_to_first_token_over_exact": timed.first_token(measurement) / timed.first_token(exact),
            "ms_per_token": 1e3 * measurement.token,
            "ms_per_token_over_exact": measurement.token / exact.token,
        }
        figures = {
            "compress_seconds": float(np.sum(measurement.compress)) / timed.prefills,
            "time_to_first_token_seconds": float(np.sum(timed.first_token(measurement))) / timed.prefills,
            "share_of_reading_rate": (weights + measurement.read_bytes) / token / limits.bytes,
            "memory_bytes": measurement.program_bytes,
            "memory_over_exact": measurement.program_bytes / exact.program_bytes,
        }
        if measurement.selection is not None:
            figures["selection_share_of_decoding"] = measurement.selection / token
        if measurement.hit_rate is not None:
            figures["hit_rate"] = measurement.hit_rate
        if measurement is exact:
            rows.append(row("prefill_seconds", total, share_of_matmul_rate=needed / total / limits.operations))
        rows += [row(metric, results.median_interval(of), n=len(of)) for metric, of in samples.items()]
        rows += [row(metric, figure) for metric, figure in figures.items()]
        for tokens in options.answer_tokens:
            seconds = timed.end_to_end(measurement, tokens)
            ratio = seconds / timed.end_to_end(exact, tokens)
            rows.append(row("end_to_end_seconds", seconds, answer_tokens=tokens))
            rows.append(row("end_to_end_over_exact", ratio, answer_tokens=tokens))
    return rows


def show(rows: Sequence[Row]) -> None:
    """The tables of one context: ratios to exact and shares, then seconds and bytes."""
    title = f"A prompt of {rows[0].context_tokens} tokens, {rows[0].model}, batch 1, {rows[0].extra['dtype']}"
    ratio = lambda row: row.metric.endswith("over_exact") or "share" in row.metric or row.metric == "hit_rate"  # noqa: E731
    what = lambda row: " ".join(map(str, filter(None, (row.metric, row.extra.get("answer_tokens")))))  # noqa: E731
    for name, own in (("ratios", filter(ratio, rows)), ("figures", (row for row in rows if not ratio(row)))):
        results.print_rows(f"{title}: {name}", own, results.setting_label, what)


def draw(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Ratios to exact against the prompt's length: time to first token, time per token, end to end, memory."""
    panels = {
        "time_to_first_token_over_exact": "time to first token",
        "ms_per_token_over_exact": "time per output token",
        "end_to_end_over_exact": "end to end",
        "memory_over_exact": "memory while decoding",
    }

    def panel(row: Row) -> str:
        answer = row.extra.get("answer_tokens")
        return panels[row.metric] + (f", {answer} tokens" if answer else "")

    plots.by_rows(
        path,
        [row for metric in panels for row in rows if row.metric == metric],
        panel=panel,
        x=lambda row: row.context_tokens,
        label=results.setting_label,
        xscale="log",
        xlabel="tokens of the prompt",
        ylabel="of exact's",
    )


EXPERIMENT = Experiment(NAME, Options, run, draw)
if __name__ == "__main__":
    EXPERIMENT.main()
