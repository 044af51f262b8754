"""What the experiments on speed share: the models that they time, how they time, and this machine's limits."""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments.common import settings
from experiments.common.options import Policies, one_of
from kvjax.registry import PolicyChoice
from kvjax_models.formats import huggingface
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama, parameter_bytes
from kvjax_models.model.rotary import RopeScaling

MODEL_NAME = "random 8 x 512"
CONFIG = LlamaConfig(
    vocab_size=8192,
    width=512,
    mlp_width=1408,
    layers=8,
    query_heads=8,
    kv_heads=2,
    head_dim=64,
    max_length=65536,
)


SHAPES = {
    "small": CONFIG,
    "small-ungrouped": dataclasses.replace(CONFIG, kv_heads=CONFIG.query_heads),
    # https://huggingface.co/togethercomputer/LLaMA-2-7B-32K
    "llama-2-7b-32k": LlamaConfig(
        vocab_size=32000,
        width=4096,
        mlp_width=11008,
        layers=32,
        query_heads=32,
        kv_heads=32,
        head_dim=128,
        max_length=32768,
        rope_scaling=RopeScaling("linear", 8.0),
    ),
    # https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct
    "llama-3.1-8b": LlamaConfig(
        vocab_size=128256,
        width=4096,
        mlp_width=14336,
        layers=32,
        query_heads=32,
        kv_heads=8,
        head_dim=128,
        max_length=131072,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 8.0),
    ),
}
# https://huggingface.co/meta-llama/Llama-3.1-70B-Instruct and Llama-3.1-405B-Instruct
SHAPES["llama-3.1-70b"] = dataclasses.replace(
    SHAPES["llama-3.1-8b"], width=8192, mlp_width=28672, layers=80, query_heads=64
)
SHAPES["llama-3.1-405b"] = dataclasses.replace(
    SHAPES["llama-3.1-8b"], width=16384, mlp_width=53248, layers=126, query_heads=128
)


def shape(name: str) -> LlamaConfig:
    """The sizes of a model: of a named shape, or those that a directory's `config.json` gives.

    Raises:
        ValueError: for a name that is neither, with those that are known; as `huggingface.load_config`.
    """
    if name in SHAPES:
        return SHAPES[name]
    directory = pathlib.Path(name)
    directory = directory.parent if directory.name == "config.json" else directory
    if not (directory / "config.json").is_file():
        raise ValueError(f"--shape={name} is neither a directory with a config.json nor one of {', '.join(SHAPES)}")
    return huggingface.load_config(directory)


@dataclasses.dataclass(frozen=True)
class OfShape(Policies):
    """Options of experiments that time policies beside exact attention, on random weights."""

    shape: str = "small"
    """Sizes of the model: those of a shape (small, small-ungrouped, llama-3.1-8b, ...), or of a directory."""
    dtype: str | None = one_of(None, ("float32", "bfloat16"))
    """Of weights and caches; by default bfloat16 on accelerators."""
    prefill_chunk: int = 256  # tokens per chunk of exact prefill

    @property
    def number(self) -> Any:
        """Of weights and caches."""
        return jnp.dtype(self.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))

    @property
    def chosen(self) -> list[PolicyChoice]:
        """The settings, exact first."""
        return settings.settings(("exact", *(name for name in self.policy if name != "exact")), self.budget)


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds of one run, to the end of all device work, and its result."""
    begin = time.perf_counter()
    result = jax.block_until_ready(function(*arguments))
    return time.perf_counter() - begin, result


def seconds(function: Callable[..., Any], *arguments: Any, repetitions: int = 5) -> np.ndarray:
    """Seconds of every repetition, to the end of all device work; one run before them compiles and warms up."""
    times = [timed(function, *arguments)[0] for _ in range(repetitions + 1)]
    return np.asarray(times[1:])


def interleaved_seconds(runs: Sequence[Callable[[], Any]], repetitions: int) -> Float[np.ndarray, "P R"]:
    """Seconds of every run in every repetition, to the end of all device work. The runs take turns, so that what slows
    the machine for a while slows all of them, and repetitions pair them; one round before compiles and warms up."""
    times = [[timed(run)[0] for run in runs] for _ in range(repetitions + 1)]
    return np.asarray(times[1:]).T


def held_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of arguments, temporaries and the outputs that take no argument's place, as the compiler counts them."""
    memory: Any = compiled.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + outputs


def reading_rate() -> float:
    """Bytes per second of a plain reduction over 512 MiB (4 GiB on accelerators, whose launches take as long as reading
    less): the most that anything which reads a cache can reach."""
    array = jnp.ones((8 if jax.default_backend() == "cpu" else 64, 2**24), jnp.float32)
    return array.nbytes / float(np.min(seconds(jax.jit(jnp.sum), array)))


def matmul_rate(dtype: jax.typing.DTypeLike = jnp.float32) -> float:
    """Floating-point operations per second of a product of 2,048 x 2,048 matrices (8,192 on accelerators): the limit of
    prefill."""
    side = 2048 if jax.default_backend() == "cpu" else 8192
    matrix = jnp.ones((side, side), dtype)
    product = jax.jit(lambda a: a @ a)
    return 2 * side**3 / float(np.min(seconds(product, matrix, repetitions=10)))


def prefill_operations(config: LlamaConfig, tokens: int) -> float:
    """Floating-point operations of a prompt's layers: products with the weights, and causal attention's two."""
    attended = config.query_heads * config.head_dim
    projections = config.width * (2 * attended + 2 * config.kv_heads * config.head_dim)
    per_token = 2 * (projections + 3 * config.width * config.mlp_width)
    return config.layers * (per_token * tokens + 4 * attended * tokens * (tokens + 1) / 2)


def weight_read_bytes(model: Llama) -> int:
    """Bytes of weights that one token reads: all of them, but of the embedding only a row where it is not tied."""
    return parameter_bytes(model) - (0 if model.config.tied_embeddings else model.embedding.embedding[...].nbytes)
