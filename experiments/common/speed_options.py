"""Options of `experiments.speed`, and what its measures share."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from experiments.common import caches
from experiments.common.caches import Setting
from experiments.common.flags import Flags, one_of, repeatable
from experiments.common.statistics import Estimate, median_interval
from experiments.common.timing import interleaved_seconds
from kvjax_models import LanguageModel
from kvjax_models.runner.generator import Generator

T = TypeVar("T")
MIN_SAMPLES = 6  # samples whose median has a 95% interval
MEASURES = ("latency", "prefill", "throughput", "first_answer", "questions", "bytes", "transformers")
TRANSFORMERS = "transformers"  # the beginning of the names of its runs


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of a measurement."""

    measure: tuple[str, ...] = repeatable("latency", choices=MEASURES)  # Repeatable.
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
    transformers: bool = False  # `first_answer` and `questions` also measure transformers, which must be installed.
    questions: int = 12  # Questions of `questions`.
    question_tokens: int = 16  # Tokens of each of them.
    answer_tokens: int = 256  # Tokens of a request of `throughput`.
    full_rows: tuple[int, ...] = repeatable(1, 4)  # Rows of the full cache that set the memory of `throughput`.
    seed: int = 0
    output_dir: pathlib.Path = pathlib.Path("build/speed")  # Directory of the figures.
    results: pathlib.Path | None = None  # File of JSON lines, to which a row per setting is appended.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repetitions < MIN_SAMPLES:
            raise ValueError(f"repetitions={self.repetitions} must be at least {MIN_SAMPLES}")

    @property
    def settings(self) -> list[Setting]:
        """The settings, the full cache first."""
        chosen = caches.parse_settings(self.policy, self.budget, self.kv_dtype)
        return list(dict.fromkeys([Setting(caches.FULL), *chosen]))

    def labels(self, llm: LanguageModel, context: int) -> dict[str, Any]:
        """Returns the labels that all figures of a length share."""
        return {"context_tokens": context, "model": self.model or self.shape, "dtype": dtype_of(llm)}


def dtype_of(llm: LanguageModel) -> str:
    """Returns the name of the dtype of a model's weights."""
    return str(jnp.dtype(llm.model.embedding.param_dtype))


def make_possible(settings: Sequence[Setting], make: Callable[[Setting], T]) -> dict[Setting, T]:
    """Returns what `make` makes of every setting that is possible, and prints why the others are not."""
    made = {}
    for setting in settings:
        try:
            made[setting] = make(setting)
        except ValueError as error:
            print(f"{setting} is left out: {error}")
    return made


def make_generators(llm: LanguageModel, settings: Sequence[Setting], **sizes: Any) -> dict[Setting, Generator]:
    """Returns a generator of every setting that is possible, and prints why the others are not."""

    def make(setting: Setting) -> Generator:
        generator = setting.cache(llm).generator(**sizes)
        setting.check(generator)
        return generator

    return make_possible(settings, make)


def random_tokens(llm: LanguageModel, seed: int, count: int, length: int) -> list[list[int]]:
    """Returns `count` random prompts of one length."""
    return np.random.default_rng(seed).integers(0, llm.model.config.vocab_size, (count, length)).tolist()


def measure_runs(
    runs: Mapping[str, Callable[[], Any]], repetitions: int, metric: str = "seconds"
) -> dict[str, dict[str, Estimate]]:
    """Returns seconds of every run, and ratios to the first run and to the fastest of transformers' runs.

    Args:
        runs: the runs by name, which alternate.
        repetitions: timed runs.
        metric: name of the seconds.
    """
    times = dict(zip(runs, interleaved_seconds(list(runs.values()), repetitions), strict=True))
    full = next(iter(times.values()))
    peers = [of_run for name, of_run in times.items() if name.startswith(TRANSFORMERS)]
    values = {}
    for name, seconds in times.items():
        values[name] = {metric: median_interval(seconds), f"{metric}_ratio": median_interval(seconds / full)}
        if peers:
            values[name]["transformers_ratio"] = median_interval(seconds / np.min(peers, axis=0))
    return values
