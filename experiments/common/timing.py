"""Times of prefill, compression, selection and decode steps."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvjax
from experiments.common.caches import Setting
from kvjax.combinators.host_memory import HostMemoryState
from kvjax.policy import merge_requirements
from kvjax_models.model.llama import Llama, parameter_bytes
from kvjax_models.runner import lowering
from kvjax_models.runner.decode import Group, decode_groups
from kvjax_models.runner.generator import Generator, common_scorer
from kvjax_models.runner.prefill import PrefilledLayer, compress_layer, embed, prefill_layers
from kvjax_models.runner.repetition import make_repetitions, repeat_layer
from kvjax_models.runner.state import (
    GenerationState,
    commit_to_device,
    compact_layer,
    compact_layers,
    first_equal_layers,
)
from pallas_kernels.benchmarking import describe

COMPILER_THREADS = min(os.cpu_count() or 1, 16)


def timed(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Returns the seconds of one call, including all device work, and its result."""
    begin = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return time.perf_counter() - begin, result


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
        generator = self.generator
        for start in range(0, self.tokens, generator.block_size):
            steps = min(generator.block_size, self.tokens - start)
            group = Group(generator.split_model, self.state)
            [state], _ = decode_groups([group], generator.eos, generator.block_size, steps)
            self.state = compact_layers(state)
        kvjax.raise_faults(self.state)
        return self.state


def make_rows(generator: Generator, state: GenerationState, rows: int) -> GenerationState:
    """Returns a state with copies of a state's only row.

    Args:
        generator: generator of the state.
        state: a state with one row, which is not donated.
        rows: number of rows.
    """
    return state if rows == 1 else commit_to_device(_repeat_rows(state, rows), generator.mesh)


@functools.partial(jax.jit, static_argnames=("rows",))
def _repeat_rows(state: GenerationState, rows: int) -> GenerationState:
    return kvjax.repeat_rows(state, rows)


def lower_sequence(
    generator: Generator,
    state: GenerationState,
    layer: PrefilledLayer,
    lengths: Int[Array, "B"],
    rows: int,
    sharding: jax.sharding.Sharding,
) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Returns functions that lower the programs of a sequence after the prefill of its layers.

    Args:
        generator: generator with one batch row.
        state: an empty state, or its shapes.
        layer: results of the prefill of one layer, or their shapes.
        lengths: length of the prompt.
        rows: copies of the sequence that decode together.
        sharding: sharding of one device.

    Returns:
        By name: the compression and compaction of every kind of layer, and a block of decode steps.
    """
    decoded = state
    if rows > 1:
        shapes = jax.eval_shape(functools.partial(_repeat_rows, rows=rows), state)
        decoded = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    is_abstract = not isinstance(state.positions, jax.Array)
    programs: dict[str, Callable[[], jax.stages.Lowered]] = {
        "decode": functools.partial(
            lowering.lower_decode, generator.with_batch(rows), decoded, sharding=sharding if is_abstract else None
        )
    }
    for number in sorted(set(first_equal_layers(generator.policies, generator.specs, generator.mesh))):
        programs[f"compression of layer {number}"] = functools.partial(
            lowering.lower_compression, state.layers[number], state.counters, layer, lengths
        )
        programs[f"compaction of layer {number}"] = functools.partial(
            compact_layer.lower, decoded.layers[number], decoded.counters
        )
    return programs


class TimedPrefill:
    """Exact prefill of one random prompt, layer by layer, into the caches of several generators.

    Attributes:
        states: the states by setting, empty before `run`.
        problems: messages of the settings that failed; they are left out.
    """

    def __init__(self, model: Llama, generators: Mapping[Setting, Generator], context: int, chunk: int, seed: int):
        """Creates the prompt and empty states.

        Args:
            model: the decoder.
            generators: generators of the model with one batch row, by setting.
            context: tokens of the prompt.
            chunk: tokens per chunk of exact prefill.
            seed: seed of the prompt and the policies.
        """
        self.model, self.generators, self.context, self.chunk, self.seed = model, generators, context, chunk, seed
        self.problems: dict[Setting, str] = {}
        self.states: dict[Setting, GenerationState] = {}
        self.prompt = np.zeros((1, -(-context // chunk) * chunk), np.int32)
        self.prompt[0, :context] = np.random.default_rng(seed).integers(0, model.config.vocab_size, context)
        self.lengths = jnp.full(1, context, jnp.int32)
        policies = [policy for one in generators.values() for policy in one.policies]
        self.repeat = merge_requirements(policies).repetition
        self._create_states()

    def compile(self, rows: Mapping[Setting, int]) -> dict[Setting, jax.stages.Compiled]:
        """Computes one layer, and compiles the programs of all settings at the same time.

        Args:
            rows: copies of the prompt's sequence that decode together.

        Returns:
            The program of a block of decode steps of every setting; settings whose programs cannot be compiled are
            left out.
        """
        _, layer, _ = next(self._layers())
        compiled = {}
        with ThreadPoolExecutor(COMPILER_THREADS) as pool:
            jobs = {}
            for setting, state in self.states.items():
                sizes = layer, self.lengths, rows[setting], state.positions.sharding
                programs = lower_sequence(self.generators[setting], state, *sizes).values()
                jobs[setting] = [pool.submit(lambda lower: lower().compile(), lower) for lower in programs]
            for setting, job in jobs.items():
                with self.recorded_problem(setting):
                    compiled[setting], *_ = [program.result() for program in job]
        return {setting: program for setting, program in compiled.items() if setting in self.states}

    def run(self) -> Iterator[tuple[float, dict[Setting, float]]]:
        """Processes the prompt.

        Yields:
            For every layer, the seconds of its prefill, and of its compression by every generator. Policies that score
            with repetitions of the prompt include the seconds of the repetition.
        """
        if any(np.asarray(state.positions).any() for state in self.states.values()):
            self._create_states()
        for number, (prefill_seconds, layer, repeat_seconds) in enumerate(self._layers()):
            compression = {}
            for setting in list(self.states):
                with self.recorded_problem(setting):
                    compression[setting] = self._compress(setting, number, layer, repeat_seconds)
            yield prefill_seconds, compression

    @contextlib.contextmanager
    def recorded_problem(self, *settings: Setting) -> Iterator[None]:
        """Leaves settings out if the body raises, so that they do not end the measurement of the others."""
        try:
            yield
        except Exception as error:
            for setting in settings:
                self.problems[setting] = describe(error)
                self.states.pop(setting, None)

    def _create_states(self) -> None:
        self.states = {}  # frees the memory of earlier states first
        for setting, generator in self.generators.items():
            if setting not in self.problems:
                with self.recorded_problem(setting):
                    self.states[setting] = commit_to_device(generator.init_state(self.seed), generator.mesh)

    def _layers(self) -> Iterator[tuple[float, PrefilledLayer, float]]:
        """Yields for every layer the seconds of its prefill, its results, and the seconds of its repetition."""
        of_layers = zip(*(one.policies for one in self.generators.values()), strict=True)
        tokens = self.prompt.shape[1]
        num_queries = [max(one.requires.num_prompt_queries(tokens) for one in of_layer) for of_layer in of_layers]
        scorer = common_scorer(list(self.generators.values()))
        layers = prefill_layers(self.model, self.prompt, self.lengths, self.chunk, num_queries, scorer=scorer)
        if self.repeat is not None:
            texts, counts = make_repetitions(self.repeat, self.prompt, np.array([self.context], np.int32))
            x = embed(self.model, jnp.asarray(texts.reshape(1, 1, -1)))
        for number in range(self.model.config.layers):
            prefill_seconds, layer = timed(next, layers)
            repeat_seconds = 0.0
            if self.repeat is not None:
                rotary = self.model.config.rotary(number, tokens)
                args = (
                    self.repeat,
                    rotary,
                    None,
                    False,
                    x,
                    layer.keys,
                    layer.values,
                    self.lengths,
                    jnp.asarray(counts),
                )
                repeat_seconds, (x, repeated) = timed(repeat_layer, self.model.layers[number], *args)
                layer = layer._replace(repeated=repeated)
            yield prefill_seconds, layer, repeat_seconds

    def _compress(self, setting: Setting, number: int, layer: PrefilledLayer, repeat_seconds: float) -> float:
        """Compresses a layer into a setting's state and returns the seconds."""
        state = self.states[setting]
        cache = state.layers[number]
        elapsed, (compressed, counters, _) = timed(compress_layer, cache, state.counters, layer, self.lengths)
        layers = (*state.layers[:number], compressed, *state.layers[number + 1 :])
        is_last = number == len(layers) - 1  # the counters are shared by all layers
        self.states[setting] = dataclasses.replace(
            state, layers=layers, counters=counters if is_last else state.counters, positions=jnp.copy(self.lengths)
        )
        return elapsed + (0.0 if cache.policy.requires.repetition is None else repeat_seconds)


def compaction_seconds(state: GenerationState, repetitions: int = 3) -> tuple[float, GenerationState]:
    """Returns the seconds of a compaction of all layers, which is part of every block of decode steps, and the state.

    Args:
        state: a state whose programs are compiled; donated.
        repetitions: timed runs.
    """
    times = np.zeros(repetitions)
    for number in range(repetitions):
        times[number], state = timed(compact_layers, state)
    return float(np.median(times)), state


def hit_rate(state: GenerationState) -> float | None:
    """Returns the share of requested blocks that were in the device's block caches; None without host memory."""
    hosted = [cache.state for cache in state.layers if isinstance(cache.state, HostMemoryState)]
    block_caches = [one for layer in hosted for one in layer.block_caches]
    requested = sum(int(jnp.sum(one.requested)) for one in block_caches)
    return sum(int(jnp.sum(one.hits)) for one in block_caches) / requested if requested else None
