"""What the experiments on speed share: the model that they time, how they time, and this machine's limits."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import generate
from models.llama import LlamaConfig

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


def grouped(group: int) -> LlamaConfig:
    """`CONFIG` with so many query heads per kv head.

    Raises:
        ValueError: where its query heads are no multiple of that.
    """
    if group < 1 or CONFIG.query_heads % group:
        raise ValueError(f"--group={group} must divide the {CONFIG.query_heads} query heads")
    return dataclasses.replace(CONFIG, kv_heads=CONFIG.query_heads // group)


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds of one run, to the end of all device work, and its result."""
    begin = time.perf_counter()
    result = jax.block_until_ready(function(*arguments))
    return time.perf_counter() - begin, result


def seconds(function: Callable[..., Any], *arguments: Any, repetitions: int = 5) -> np.ndarray:
    """Seconds of every repetition, to the end of all device work; one run before them compiles and warms up."""
    times = [timed(function, *arguments)[0] for _ in range(repetitions + 1)]
    return np.asarray(times[1:])


def decoding_seconds(
    generator: generate.Generator, state: generate.GenerationState, tokens: int, repetitions: int
) -> np.ndarray:
    """Seconds per token of every repetition of writing so many tokens, each going on from the last; one before them
    compiles and warms up. The state is donated."""

    def write(state: generate.GenerationState) -> generate.GenerationState:
        for newest, _ in generator.write(state, tokens):
            state = newest
        return state

    times = []
    for _ in range(repetitions + 1):
        elapsed, state = timed(write, state)
        times.append(elapsed / tokens)
    return np.asarray(times[1:])


def reading_rate() -> float:
    """Bytes per second of a plain reduction over 512 MiB: the most that anything which reads a cache can reach."""
    array = jnp.ones((8, 2**24), jnp.float32)
    return array.nbytes / float(np.min(seconds(jax.jit(jnp.sum), array)))


def matmul_rate() -> float:
    """Floating-point operations per second of a float32 product of 2,048 x 2,048 matrices: the limit of prefill."""
    matrix = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    return 2 * 2048**3 / float(np.min(seconds(product, matrix, repetitions=10)))
