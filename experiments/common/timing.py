"""What reading a prompt, compressing it, selecting and writing take, policies taking turns on the same work."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import kvjax
from experiments.common import settings, speed
from kvjax.combinators.host_memory import HostMemoryState
from kvjax.policy import RepeatedPrompt, Repetition, merge_requirements
from kvjax.quantization import readable
from kvjax.registry import PolicyChoice
from kvjax.segment import BlockStoreRead
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.prefill import PrefilledLayer, compress_layer, embed, prefill_layers
from kvjax_models.generation.repetition import make_repetitions, repeat_layer
from kvjax_models.generation.state import GenerationState, cache_specs
from kvjax_models.model.llama import Llama

SELECTIONS = 64  # queries that select one after the other, so that starting a program weighs nothing


def generators_of(
    model: Llama, chosen: Sequence[PolicyChoice], context: int, chunk: int, sizes: dict[str, Any]
) -> dict[PolicyChoice, Generator]:
    """A generator of every setting that can be made for such a prompt, and compress what is read of it; the others are
    said with their reason."""
    spec, tokens = cache_specs(model, **sizes)[0], padded(context, chunk)

    def of_heads(tokens: int, heads: int) -> Any:
        return jax.ShapeDtypeStruct((1, tokens, heads, spec.head_dim), spec.dtype)

    keys, lengths = of_heads(tokens, spec.kv_heads), jax.ShapeDtypeStruct((1,), jnp.int32)
    able = {}
    for setting in chosen:
        try:
            generator = Generator(model, settings.fitted(setting, spec, context), **sizes, allow_beyond_context=True)
            state = jax.eval_shape(generator.init_state)
            for cache in {cache.policy: cache for cache in state.layers}.values():
                asked, repeated = cache.policy.requires.num_prompt_queries(tokens), None
                if cache.policy.requires.repetition is not None:
                    texts, sizes_of_texts = repeated_prompt(
                        cache.policy.requires.repetition, np.zeros((1, tokens), np.int32), context
                    )
                    queries, again = of_heads(texts.size, spec.query_heads), of_heads(texts.size, spec.kv_heads)
                    repeated = RepeatedPrompt(queries, again, jnp.asarray(sizes_of_texts))
                read = PrefilledLayer(keys, keys, keys, of_heads(asked, spec.query_heads) if asked else None, repeated)
                jax.eval_shape(compress_layer, cache, state.counters, read, lengths)
        except ValueError as error:
            settings.tell_left_out(setting, error)
        else:
            able[setting] = generator
    return able


def padded(context: int, chunk: int) -> int:
    """A prompt's tokens in whole chunks."""
    return -(-context // chunk) * chunk


def repeated_prompt(repeat: Repetition, prompt: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """The texts that repeat a padded prompt, one behind the other, and their lengths."""
    texts, sizes = make_repetitions(repeat, prompt, np.array([context], np.int32))
    return texts.reshape(1, -1), sizes


def prefill(
    model: Llama,
    generators: Sequence[Generator],
    states: list[GenerationState],
    context: int,
    chunk: int,
    seed: int,
) -> Iterator[tuple[float, list[float]]]:
    """Reads one prompt of random tokens layer by layer into the states, which are replaced by what they become.

    Yields:
        Seconds of reading a layer, and of compressing it as every generator does, with reading the prompt once more for
        those that ask for it.
    """
    prompt = np.zeros((1, padded(context, chunk)), np.int32)
    prompt[0, :context] = np.random.default_rng(seed).integers(0, model.config.vocab_size, context)
    lengths, empty = jnp.full(1, context, jnp.int32), [state.counters for state in states]
    asked = [
        max(generator.policies[layer].requires.num_prompt_queries(prompt.shape[1]) for generator in generators)
        for layer in range(model.config.layers)
    ]
    reading_of = functools.partial(prefill_layers, model, prompt, lengths, chunk, asked)
    jax.block_until_ready(next(reading_of()))  # compiles
    layers = reading_of()
    repeat = merge_requirements([policy for generator in generators for policy in generator.policies]).repetition
    if repeat is not None:
        texts, sizes = (jnp.asarray(x) for x in repeated_prompt(repeat, prompt, context))
        again = embed(model, texts[:, None])
        jax.block_until_ready(next(prefill_layers(model, prompt, lengths, chunk, asked, repeat)))  # compiles
    for number in tqdm(range(model.config.layers), desc=f"prefill, {context} tokens", leave=False):
        reading, read = speed.timed(next, layers)
        seconds = []
        repeating = 0.0
        if repeat is not None:
            more = (
                model.layers[number],
                model.config.rotary(number, prompt.shape[1]),
                None,
                False,
                again,
                read.keys,
                read.values,
                lengths,
                sizes,
            )
            repeating, (again, queries, keys) = speed.timed(repeat_layer, *more)
            read = read._replace(repeated=RepeatedPrompt(queries, keys, sizes))
        for place in range(len(generators)):
            cache = states[place].layers[number]
            if _abstract(cache) not in _COMPILED:
                compress_layer(jax.tree.map(jnp.copy, cache), empty[place], read, lengths)
                _COMPILED.add(_abstract(cache))
            elapsed, (compressed, counters, _) = speed.timed(compress_layer, cache, empty[place], read, lengths)
            seconds.append(elapsed + (0.0 if cache.policy.requires.repetition is None else repeating))
            layers_now = (*states[place].layers[:number], compressed, *states[place].layers[number + 1 :])
            states[place] = dataclasses.replace(
                states[place], layers=layers_now, counters=counters, positions=jnp.copy(lengths)
            )
        yield reading, seconds


# Caches, policies and shapes, whose compression has run before.
_COMPILED: set[Any] = set()


def _abstract(cache: Any) -> Any:
    return jax.tree.structure(cache), tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(cache))


@dataclasses.dataclass
class Writer:
    """Writes tokens, a turn at a call, each going on from the last."""

    generator: Generator
    state: GenerationState
    tokens: int

    def __call__(self) -> GenerationState:
        for newest, _ in self.generator.decode(self.state, self.tokens):
            self.state = newest
        return self.state


def hit_rate(state: GenerationState) -> float | None:
    """The share of the blocks asked for by all steps so far that the device still held; None without host memory."""
    hosted = [cache.state for cache in state.layers if isinstance(cache.state, HostMemoryState)]
    recent = [of_part for layer in hosted for of_part in layer.block_caches]
    requested = sum(int(jnp.sum(of_part.requested)) for of_part in recent)
    return sum(int(jnp.sum(of_part.hits)) for of_part in recent) / requested if requested else None


def selection_seconds(layers: Sequence[kvjax.Cache], repetitions: int) -> float | None:
    """Measures the selection of blocks, without reading them.

    Args:
        layers: the layers' caches; the last one is measured and stands for all.
        repetitions: timed runs.

    Returns:
        Seconds per token over all layers; None for policies that are not retrieval policies.
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
    seconds = speed.seconds(select, layers[-1], queries, repetitions=repetitions)
    return float(np.median(seconds)) / SELECTIONS * len(layers)
