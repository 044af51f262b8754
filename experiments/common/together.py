"""One exact reading of prompts for the caches of many settings."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import kvjax
from kvjax.policy import merge_requirements
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.prefill import compress_layer, last_logits, prefill_layers
from kvjax_models.generation.state import GenerationState, finish_prefill, shard_state
from kvjax_models.sharding import replicate


def prefill_together(
    generators: Sequence[Generator], states: Sequence[GenerationState], prompts: Sequence[Sequence[int]]
) -> list[GenerationState]:
    """Exact prefill of the same prompts into the fresh caches of several generators of one model, computed once.

    It goes layer by layer over all chunks, so that beyond what the policies keep the keys and values of one layer
    exist at a time.

    Raises:
        ValueError: as `Generator.read`; and when the generators do not share the model, or a state has read a prompt.
    """
    first = generators[0]
    if any(generator.model is not first.model for generator in generators):
        raise ValueError("prefill_together needs generators of one and the same model")
    if any(generator.streaming for generator in generators):
        raise ValueError("prefill_together reads exactly; a streaming generator reads by itself")
    if any(np.asarray(state.positions).any() for state in states):
        raise ValueError("prefill_together needs fresh states; one of these has already read a prompt")
    longest = max(map(len, prompts), default=0)
    for generator in generators:
        if longest > generator.max_prompt_tokens:
            raise ValueError(f"a prompt of {longest} tokens exceeds max_prompt_tokens={generator.max_prompt_tokens}")
    tokens, row_lengths = first.pad(prompts, first.padding_multiple(longest))
    lengths = replicate(row_lengths, first.mesh)
    caches: list[list[kvjax.Cache]] = [[] for _ in generators]
    told: list[Any] = [None for _ in generators]
    asked = [
        max(generator.policies[number].requires.num_prompt_queries(tokens.shape[1]) for generator in generators)
        for number in range(first.config.layers)
    ]
    repeat = merge_requirements([policy for generator in generators for policy in generator.policies]).repetition
    counters = [state.counters for state in states]
    for number, read in enumerate(prefill_layers(first.model, tokens, lengths, first.prefill_chunk, asked, repeat)):
        for place, state in enumerate(states):
            cache, counters[place], told[place] = compress_layer(
                state.layers[number], state.counters, read, lengths, told[place]
            )
            caches[place].append(cache)
    logits = last_logits(first.model, read.x, lengths)
    return [
        shard_state(finish_prefill(state, layers, counted, logits, lengths), first.mesh)
        for state, layers, counted in zip(states, caches, counters, strict=True)
    ]
