"""Generation with the full cache in host memory: donated states, compiled loops, two turns."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax_models.runner.decode import append_program, decode_program
from kvjax_models.runner.state import compact_layer
from tests.models.loops import decode_all
from tests.models.support import compile_counts
from tests.models.test_generate import PERIOD, PROMPTS, TURN, make_generator, random_model

DEVICE = kvjax.ClusterKV(24, sinks=2, full_layers=0, chunk_tokens=16, chunk_clusters=2, compact_every=PERIOD)
PROGRAMS = [append_program, decode_program, compact_layer]


def two_turns(policy):
    """Generates 20 tokens after each of two prompts."""
    generator = make_generator(policy, random_model((None,)))
    state, turns = generator.init_state(), []
    for prompts in (PROMPTS, TURN):
        state = dataclasses.replace(generator.prefill(state, prompts), done=jnp.zeros(3, bool))
        rows, state = decode_all(generator, state, 20)
        turns.append(rows)
    return turns, state


def test_tokens_equal_those_of_a_device_cache():
    expected, device_state = two_turns(DEVICE)
    with compile_counts(PROGRAMS, [2, 1, 1]):  # blocks of two lengths
        turns, state = two_turns(kvjax.HostMemory(DEVICE))
    assert turns == expected
    kvjax.raise_faults(state)
    stores = [layer.state.inner.store for layer in state.layers]
    assert all(store.entries.sharding.memory_kind == "pinned_host" for store in stores)
    assert kvjax.cache_bytes(state).host == sum(store.entries.nbytes for store in stores)
    for store, layer in zip(stores, device_state.layers, strict=True):
        np.testing.assert_array_equal(store.position, layer.state.store.position)
    assert all(int(jnp.sum(layer.state.block_caches[0].hits)) > 0 for layer in state.layers)
