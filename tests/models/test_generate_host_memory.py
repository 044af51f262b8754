"""Generation whose full cache lies in host memory: donated states, compiled loops, several turns."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax_models.generation.decode import append_block, decode_block
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.rows import extend_rows
from kvjax_models.generation.state import compact_layer
from tests.models.test_generate import CHUNK, PERIOD, PROMPTS, TURN, random_model

SIZES = {"sinks": 2, "cluster_tokens": 8, "chunk_tokens": 16, "chunk_clusters": 2, "compact_every": PERIOD}
PLAIN = kvjax.ClusterKV(24, **SIZES)


def turns(policy, streaming=False):
    """Tokens and state after a prompt, 20 tokens, a second turn and 20 more."""
    made = Generator(
        random_model((None,)),
        policy,
        batch=3,
        max_prompt_tokens=70,
        max_new_tokens=90,
        prefill_chunk=CHUNK,
        streaming=streaming,
    )
    state, rows = made.init_state(), [[], [], []]
    for prompts in (PROMPTS, TURN):
        state = dataclasses.replace(made.prefill(state, prompts), done=jnp.zeros(3, bool))
        for newest, tokens in made.decode(state, 20):
            state = newest
            extend_rows(rows, tokens)
    return rows, state


@contextlib.contextmanager
def every_program_is_compiled_once():
    functions = [append_block, decode_block, compact_layer]
    before = [function._cache_size() for function in functions]
    yield
    assert [function._cache_size() - size for function, size in zip(functions, before, strict=True)] == [1] * 3


def test_tokens_are_those_of_the_cache_on_the_device_and_the_store_stays_on_the_host():
    expected, own = turns(PLAIN)
    with every_program_is_compiled_once():
        rows, state = turns(kvjax.HostMemory(PLAIN))
    assert rows == expected
    kvjax.raise_faults(state)
    stores = [layer.state.inner.store for layer in state.layers]
    assert all(store.entries.sharding.memory_kind == "pinned_host" for store in stores)
    assert kvjax.cache_bytes(state).host == sum(store.entries.nbytes for store in stores)
    for store, layer in zip(stores, own.layers, strict=True):
        np.testing.assert_array_equal(store.position, layer.state.store.position)
    assert all(int(jnp.sum(layer.state.block_caches[0].hits)) > 0 for layer in state.layers)


@pytest.mark.heavy
def test_prompts_may_be_streamed_into_host_memory():
    with every_program_is_compiled_once():
        rows, state = turns(kvjax.HostMemory(PLAIN), streaming=True)
    assert rows == turns(PLAIN, streaming=True)[0]
    assert jax.tree.leaves(state.layers[0].state.inner.store)[0].sharding.memory_kind == "pinned_host"
