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
from kvjax.combinators.host_memory import Hosted
from kvjax.policy import Repeat, Repeated, merge_requirements
from kvjax.registry import PolicyChoice
from kvjax.segment import Recalled, parts_of
from kvjax_models.generation.generator import Generator, cache_specs
from kvjax_models.generation.prefill import (
    PrefilledLayer,
    compress_layer,
    embed,
    make_repetitions,
    num_prompt_queries,
    prefill_layers,
    repeat_layer,
)
from kvjax_models.generation.state import GenerationState
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
            generator = Generator(
                model, settings.fitted(setting, spec, context), **sizes, allow_beyond_context=True
            )
            for cache in {cache.policy: cache for cache in jax.eval_shape(generator.init_state).layers}.values():
                asked, repeated = num_prompt_queries(cache.policy, tokens), None
                if cache.policy.repeat is not None:
                    texts, sizes_of_texts = repeated_prompt(
                        cache.policy.repeat, np.zeros((1, tokens), np.int32), context
                    )
                    queries, again = of_heads(texts.size, spec.query_heads), of_heads(texts.size, spec.kv_heads)
                    repeated = Repeated(queries, again, jnp.asarray(sizes_of_texts))
                read = PrefilledLayer(keys, keys, keys, of_heads(asked, spec.query_heads) if asked else None, repeated)
                jax.eval_shape(compress_layer, cache, read, lengths)
        except ValueError as error:
            settings.tell_left_out(setting, error)
        else:
            able[setting] = generator
    return able


def padded(context: int, chunk: int) -> int:
    """A prompt's tokens in whole chunks."""
    return -(-context // chunk) * chunk


def repeated_prompt(repeat: Repeat, prompt: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
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
    lengths = jnp.full(1, context, jnp.int32)
    asked = [
        max(num_prompt_queries(generator.policies[layer], prompt.shape[1]) for generator in generators)
        for layer in range(model.config.layers)
    ]
    reading_of = functools.partial(prefill_layers, model, prompt, lengths, chunk, asked)
    jax.block_until_ready(next(reading_of()))  # compiles
    layers = reading_of()
    repeat = merge_requirements([policy for generator in generators for policy in generator.policies])
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

    generator: Generator
    state: GenerationState
    tokens: int

    def __call__(self) -> GenerationState:
        for newest, _ in self.generator.decode(self.state, self.tokens):
            self.state = newest
        return self.state


def hit_rate(state: GenerationState) -> float | None:
    """The share of the blocks asked for by all steps so far that the device still held; None without host memory."""
    hosted = [cache.state for cache in state.layers if isinstance(cache.state, Hosted)]
    recent = [of_part for layer in hosted for of_part in layer.recent]
    requested = sum(int(jnp.sum(of_part.requested)) for of_part in recent)
    return sum(int(jnp.sum(of_part.hits)) for of_part in recent) / requested if requested else None


def selection_seconds(layers: Sequence[kvjax.Cache], make_repetitions: int) -> float | None:
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
    seconds = speed.seconds(select, layers[-1], queries, repetitions=make_repetitions)
    return float(np.median(seconds)) / SELECTIONS * len(layers)
