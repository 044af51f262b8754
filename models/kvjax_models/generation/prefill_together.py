"""Exact prefill of prompts into the caches of one or several generators.

The model runs once for all generators whose policies need the same repetition of the prompts, or none; the keys and
values of one layer exist at a time, and every generator compresses them before the next layer is computed.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.policy import Repetition, merge_requirements
from kvjax_models import compile_cache
from kvjax_models.generation.prefill import PrefilledLayer, compress_layer, last_logits, prefill_layers
from kvjax_models.generation.state import GenerationState, finish_prefill, shard_state
from kvjax_models.model.recurrent import RecurrentState
from kvjax_models.sharding import replicate

if TYPE_CHECKING:
    from kvjax_models.generation.generator import Generator


def prefill_together(
    generators: Sequence["Generator"],
    states: Sequence[GenerationState],
    prompts: Sequence[Sequence[int]],
    *,
    shared_lengths: bool = True,
) -> Iterator[list[GenerationState] | None]:
    """Processes the same prompts into the empty caches of several generators.

    Args:
        generators: generators of one model and batch size, whose prompts are not streamed.
        states: an empty state of each generator; their buffers are donated.
        prompts: token ids of each row.
        shared_lengths: whether prompts are padded to lengths of `compile_cache.length_bucket`, so that all lengths need
            few compiled programs.

    Yields:
        None after every layer; finally the states.

    Raises:
        ValueError: if the generators do not fit together, a state is not empty, or a prompt is too long.
    """
    first = generators[0]
    if any(generator.model is not first.model for generator in generators):
        raise ValueError("prefill_together needs generators of one model")
    if any(generator.streaming for generator in generators):
        raise ValueError("prefill_together needs exact prefill, got a streaming generator")
    if any(np.asarray(state.positions).any() for state in states):
        raise ValueError("prefill_together needs empty states")
    repetitions = [merge_requirements(generator.policies).repetition for generator in generators]
    passes: list[Repetition | None] = [*dict.fromkeys(one for one in repetitions if one is not None)]
    passes = passes or [None]
    results = list(states)
    for repeat in passes:
        indices = [i for i, one in enumerate(repetitions) if one == repeat or (one is None and repeat == passes[0])]
        members = [generators[i] for i in indices]
        for new_states in _prefill_in_one_pass(members, [states[i] for i in indices], prompts, shared_lengths):
            if new_states is None:
                yield None
            else:
                for index, state in zip(indices, new_states, strict=True):
                    results[index] = state
    yield results


def _prefill_in_one_pass(
    generators: Sequence["Generator"],
    states: Sequence[GenerationState],
    prompts: Sequence[Sequence[int]],
    shared_lengths: bool,
) -> Iterator[list[GenerationState] | None]:
    """Processes prompts as `prefill_together`, for generators that need at most one repetition of the prompts."""
    layers, tokens, lengths = prefill_for(generators, prompts, shared_lengths=shared_lengths)
    caches: list[list[kvjax.Cache]] = [[] for _ in generators]
    carries: list[Any] = [None for _ in generators]
    counters = [state.counters for state in states]
    recurrent: list[RecurrentState] = []
    for number, layer in enumerate(layers):
        for index, state in enumerate(states):
            cache, counters[index], carries[index] = compress_layer(
                state.layers[number], state.counters, layer, lengths, carries[index]
            )
            caches[index].append(cache)
        recurrent.extend(layer.recurrent)
        yield None
    logits = last_logits(generators[0].model, layer.x, lengths)
    yield [
        shard_state(finish_prefill(state, own, counter, logits, tokens, lengths, recurrent), generators[0].mesh)
        for state, own, counter in zip(states, caches, counters, strict=True)
    ]


def prefill_for(
    generators: Sequence["Generator"], prompts: Sequence[Sequence[int]], *, shared_lengths: bool
) -> tuple[Iterator[PrefilledLayer], Int[Array, "B N"], Int[Array, "B"]]:
    """Computes first prompts layer by layer with exact attention, and with the inputs that the policies require.

    Args:
        generators: generators of one model, whose policies need at most one repetition of the prompts.
        prompts: token ids of each row.
        shared_lengths: as for `prefill_together`.

    Returns:
        An iterator over the results of the layers, the padded tokens of the prompts, and their lengths.

    Raises:
        ValueError: if a prompt is too long.
    """
    first, longest = generators[0], max(map(len, prompts), default=0)
    for generator in generators:
        if longest > generator.max_prompt_tokens:
            raise ValueError(f"a prompt of {longest} tokens exceeds max_prompt_tokens={generator.max_prompt_tokens}")
        generator.check_context(longest)
    bucket_size = len(compile_cache.length_bucket(longest)) if shared_lengths else 1
    multiple = first.padding_multiple(longest)
    tokens, row_lengths = first.pad(prompts, -(-bucket_size // multiple) * multiple)
    lengths = replicate(row_lengths, first.mesh)
    num_queries = [
        max(generator.policies[number].requires.num_prompt_queries(tokens.shape[1]) for generator in generators)
        for number in range(len(first.specs))
    ]
    repeat = merge_requirements([policy for generator in generators for policy in generator.policies]).repetition
    layers = prefill_layers(
        first.model,
        tokens,
        lengths,
        first.prefill_chunk,
        num_queries,
        repeat,
        first.context_tokens,
        common_scorer(generators),
    )
    return layers, replicate(tokens, first.mesh), lengths


def common_scorer(generators: Sequence["Generator"]) -> Float[Array | np.ndarray, "L W+2 H_kv"] | None:
    """Returns the scorer of the generators whose policies require predicted scores; None if there are none.

    Raises:
        ValueError: if generators have different scorers.
    """
    scorers = [generator.scorer for generator in generators if generator.scorer is not None]
    if any(one is not scorers[0] and not np.array_equal(one, scorers[0]) for one in scorers[1:]):
        raise ValueError("generators that read one prompt need the same scorer")
    return scorers[0] if scorers else None
