"""One exact prefill for the caches of several settings."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from kvjax.cache import LayerCache
from kvjax.policy import Repetition, merge_requirements
from kvjax_models import compile_cache
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.prefill import compress_layer, last_logits, prefill_layers
from kvjax_models.generation.state import GenerationState, finish_prefill, shard_state
from kvjax_models.sharding import replicate


def prefill_together(
    generators: Sequence[Generator], states: Sequence[GenerationState], prompts: Sequence[Sequence[int]]
) -> list[GenerationState]:
    """Processes the same prompts into the empty caches of several generators.

    The model runs once for all generators whose policies need the same repetition of the prompts, or none. The keys
    and values of one layer exist at a time. Prompts are padded to `compile_cache.length_bucket`, so that prompts of
    similar length share compiled programs.

    Args:
        generators: generators of one model.
        states: an empty state of each generator; their buffers are donated.
        prompts: token ids of each row.

    Returns:
        The states after the prompts.

    Raises:
        ValueError: if the generators differ in their model or are streaming, a state is not empty, or a prompt is too
            long.
    """
    first = generators[0]
    if any(generator.model is not first.model for generator in generators):
        raise ValueError("prefill_together needs generators of one model")
    if any(generator.streaming for generator in generators):
        raise ValueError("prefill_together needs exact prefill, got a streaming generator")
    if any(np.asarray(state.positions).any() for state in states):
        raise ValueError("prefill_together needs empty states")
    longest = max(map(len, prompts), default=0)
    for generator in generators:
        if longest > generator.max_prompt_tokens:
            raise ValueError(f"a prompt of {longest} tokens exceeds max_prompt_tokens={generator.max_prompt_tokens}")
    repetitions = [merge_requirements(generator.policies).repetition for generator in generators]
    passes: list[Repetition | None] = [*dict.fromkeys(one for one in repetitions if one is not None)]
    passes = passes or [None]
    results = list(states)
    for number, repeat in enumerate(passes):
        indices = [i for i, one in enumerate(repetitions) if one == repeat or (one is None and number == 0)]
        members = [generators[i] for i in indices]
        new_states = _prefill_in_one_pass(members, [states[i] for i in indices], prompts, repeat)
        for index, state in zip(indices, new_states, strict=True):
            results[index] = state
    return results


def common_scorer(generators: Iterable[Generator]) -> Float[Array, "L W+2 H_kv"] | None:
    """Returns the scorer of the generators whose policies require predicted scores; None if there are none.

    Args:
        generators: generators of one model.

    Returns:
        The scorer.

    Raises:
        ValueError: if generators have different scorers.
    """
    scorers = [generator.scorer for generator in generators if generator.scorer is not None]
    if not scorers:
        return None
    if any(not np.array_equal(scorer, scorers[0]) for scorer in scorers[1:]):
        raise ValueError("generators that read one prompt need the same scorer")
    return scorers[0]


def _prefill_in_one_pass(
    generators: Sequence[Generator],
    states: Sequence[GenerationState],
    prompts: Sequence[Sequence[int]],
    repeat: Repetition | None,
) -> list[GenerationState]:
    """Returns the states of generators whose policies need at most the repetition `repeat`."""
    scorer = common_scorer(generators)
    first, longest = generators[0], max(map(len, prompts), default=0)
    multiple = first.padding_multiple(longest)
    tokens, row_lengths = first.pad(prompts, -(-len(compile_cache.length_bucket(longest)) // multiple) * multiple)
    lengths = replicate(row_lengths, first.mesh)
    caches: list[list[LayerCache]] = [[] for _ in generators]
    carries: list[Any] = [None for _ in generators]
    num_queries = [
        max(generator.policies[number].requires.num_prompt_queries(tokens.shape[1]) for generator in generators)
        for number in range(first.config.layers)
    ]
    counters = [state.counters for state in states]
    capacity = first.specs[0].capacity
    layers = prefill_layers(first.model, tokens, lengths, first.prefill_chunk, num_queries, repeat, capacity, scorer)
    for number, layer in enumerate(layers):
        for index, state in enumerate(states):
            cache, counters[index], carries[index] = compress_layer(
                state.layers[number], state.counters, layer, lengths, carries[index]
            )
            caches[index].append(cache)
    logits = last_logits(first.model, layer.x, lengths)
    return [
        shard_state(finish_prefill(state, layer_caches, counter, logits, lengths), first.mesh)
        for state, layer_caches, counter in zip(states, caches, counters, strict=True)
    ]
