"""Times of prefill, compression, selection and decode steps, and the limits of the machine."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import kvjax
from kvjax.combinators.host_memory import HostMemoryState
from kvjax.policy import merge_requirements
from kvjax.quantization import readable
from kvjax.segment import BlockStoreRead
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.prefill import PrefilledLayer, compress_layer, embed, prefill_layers
from kvjax_models.generation.repetition import make_repetitions, repeat_layer
from kvjax_models.generation.state import GenerationState
from kvjax_models.model.llama import Llama, parameter_bytes

SELECTIONS = 64  # queries of one timed program, so that its launch is negligible


def timed(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Returns the seconds of one call, including all device work, and its result."""
    begin = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return time.perf_counter() - begin, result


def seconds(function: Callable[..., Any], *args: Any, repetitions: int = 5) -> Float[np.ndarray, "R"]:
    """Returns the seconds of every repetition, after one call that compiles."""
    return np.asarray([timed(function, *args)[0] for _ in range(repetitions + 1)][1:])


def interleaved_seconds(runs: Sequence[Callable[[], Any]], repetitions: int) -> Float[np.ndarray, "P R"]:
    """Returns the seconds of every run in every repetition, after one round that compiles.

    The runs alternate, so that other load of the machine affects all of them.
    """
    times = [[timed(run)[0] for run in runs] for _ in range(repetitions + 1)]
    return np.asarray(times[1:]).T


def program_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes of a program's arguments, temporaries, and outputs that do not alias arguments."""
    memory: Any = compiled.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + outputs


def memory_bandwidth() -> float:
    """Returns the bytes per second of a reduction over 512 MiB (4 GiB on accelerators)."""
    array = jnp.ones((8 if jax.default_backend() == "cpu" else 64, 2**24), jnp.float32)
    return array.nbytes / float(np.min(seconds(jax.jit(jnp.sum), array)))


def matmul_rate(dtype: jax.typing.DTypeLike) -> float:
    """Returns the floating-point operations per second of a large matrix product."""
    side = 2048 if jax.default_backend() == "cpu" else 8192
    matrix = jnp.ones((side, side), dtype)
    return 2 * side**3 / float(np.min(seconds(jax.jit(lambda a: a @ a), matrix)))


def weight_bytes(model: Llama) -> int:
    """Returns the bytes of weights that a decode step reads; of an untied embedding it reads one row."""
    return parameter_bytes(model) - (0 if model.config.tied_embeddings else model.embedding.embedding[...].nbytes)


@dataclasses.dataclass
class Writer:
    """Decodes `tokens` tokens per call and continues from the previous call."""

    generator: Generator
    state: GenerationState
    tokens: int

    def __call__(self) -> GenerationState:
        """Decodes the next tokens and returns the state."""
        for state, _ in self.generator.decode(self.state, self.tokens):
            self.state = state
        return self.state


class TimedPrefill:
    """Exact prefill of one random prompt, layer by layer, into the caches of several generators.

    Attributes:
        states: the states, which `run` replaces.
    """

    def __init__(self, model: Llama, generators: Sequence[Generator], context: int, chunk: int, seed: int):
        """Creates the prompt.

        Args:
            model: the decoder.
            generators: generators of the model with one batch row.
            context: tokens of the prompt.
            chunk: tokens per chunk of exact prefill.
            seed: seed of the prompt and the policies.
        """
        self.model, self.generators, self.context, self.chunk, self.seed = model, generators, context, chunk, seed
        self.states: list[GenerationState] = []
        self.prompt = np.zeros((1, -(-context // chunk) * chunk), np.int32)
        self.prompt[0, :context] = np.random.default_rng(seed).integers(0, model.config.vocab_size, context)
        self.lengths = jnp.full(1, context, jnp.int32)
        self.repeat = merge_requirements([policy for one in generators for policy in one.policies]).repetition

    def run(self) -> Iterator[tuple[float, list[float]]]:
        """Processes the prompt.

        Yields:
            For every layer, the seconds of its prefill, and of its compression by every generator. Policies that score
            with repetitions of the prompt include the seconds of the repetition.
        """
        self.states = [generator.init_state(self.seed) for generator in self.generators]
        layers = self._layers()
        sizes: Any = None
        x: Any = None
        if self.repeat is not None:
            texts, counts = make_repetitions(self.repeat, self.prompt, np.array([self.context], np.int32))
            sizes = jnp.asarray(counts)
            x = embed(self.model, jnp.asarray(texts.reshape(1, 1, -1)))
        for number in range(self.model.config.layers):
            prefill_seconds, layer = timed(next, layers)
            repeat_seconds = 0.0
            if self.repeat is not None:
                rotary = self.model.config.rotary(number, self.prompt.shape[1])
                args = (self.repeat, rotary, None, False, x, layer.keys, layer.values, self.lengths, sizes)
                repeat_seconds, (x, repeated) = timed(repeat_layer, self.model.layers[number], *args)
                layer = layer._replace(repeated=repeated)
            indices = range(len(self.states))
            yield prefill_seconds, [self._compress(index, number, layer, repeat_seconds) for index in indices]

    def _layers(self) -> Iterator[PrefilledLayer]:
        num_queries = [
            max(one.policies[number].requires.num_prompt_queries(self.prompt.shape[1]) for one in self.generators)
            for number in range(self.model.config.layers)
        ]
        return prefill_layers(self.model, self.prompt, self.lengths, self.chunk, num_queries)

    def _compress(self, index: int, number: int, layer: PrefilledLayer, repeat_seconds: float) -> float:
        """Compresses a layer into a generator's state and returns the seconds."""
        state = self.states[index]
        cache = state.layers[number]
        elapsed, (compressed, counters, _) = timed(compress_layer, cache, state.counters, layer, self.lengths)
        layers = (*state.layers[:number], compressed, *state.layers[number + 1 :])
        is_last = number == len(layers) - 1  # the counters are shared by all layers
        self.states[index] = dataclasses.replace(
            state, layers=layers, counters=counters if is_last else state.counters, positions=jnp.copy(self.lengths)
        )
        return elapsed + (0.0 if cache.policy.requires.repetition is None else repeat_seconds)


def hit_rate(state: GenerationState) -> float | None:
    """Returns the share of requested blocks that were in the device's block caches; None without host memory."""
    hosted = [cache.state for cache in state.layers if isinstance(cache.state, HostMemoryState)]
    block_caches = [one for layer in hosted for one in layer.block_caches]
    requested = sum(int(jnp.sum(one.requested)) for one in block_caches)
    return sum(int(jnp.sum(one.hits)) for one in block_caches) / requested if requested else None


def selection_seconds(layers: Sequence[kvjax.Cache], repetitions: int) -> float | None:
    """Measures the selection of blocks, without reading them.

    Args:
        layers: the layers' caches; the last one is measured.
        repetitions: timed runs.

    Returns:
        Seconds per token over all layers; None if the policy does not retrieve blocks.
    """
    spec = layers[-1].spec

    def reads_of(cache: kvjax.Cache) -> list[BlockStoreRead]:
        visible = jnp.zeros((cache.staging.keys.shape[0], 1), jnp.int32)
        segments = cache.policy.segments(readable(cache.state), visible)
        return [one for one in segments if isinstance(one, BlockStoreRead)]

    if not reads_of(layers[-1]):
        return None

    @jax.jit
    def select(cache, queries):
        def select_for(query):
            # The barrier keeps work that does not depend on the query inside the loop.
            cache_now, query = jax.lax.optimization_barrier((cache, query))
            total, group = jnp.int32(0), spec.query_heads // spec.kv_heads
            for read in reads_of(cache_now):
                heads = read.kv_heads or tuple(range(spec.kv_heads))
                selection = read.select(query[:, :, heads[0] * group : (heads[-1] + 1) * group])
                total += jnp.sum(selection.block_indices) + jnp.sum(selection.block_lengths)
            return total

        return jax.lax.map(select_for, queries)

    queries = jax.random.normal(jax.random.key(0), (SELECTIONS, 1, 1, spec.query_heads, spec.head_dim), spec.dtype)
    elapsed = seconds(select, layers[-1], queries, repetitions=repetitions)
    return float(np.median(elapsed)) / SELECTIONS * len(layers)
