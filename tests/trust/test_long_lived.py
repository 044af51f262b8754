"""Processes that run for a long time compile few programs, and none of them twice."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax_models import compile_cache
from kvjax_models.model.llama import Llama
from kvjax_models.runner.decode import decode_program
from kvjax_models.runner.generator import Generator
from tests.models.loops import generate
from tests.models.support import count_compilations, small_config

WINDOW = {"sinks": 2, "recent": 4, "compact_every": 8}
EXACT = kvjax.Exact(compact_every=8)


@functools.cache
def make_model(max_length=512):
    return Llama(small_config(max_length=max_length), rngs=nnx.Rngs(0))


@pytest.fixture
def num_compiled():
    """A function that returns the number of programs compiled since the test started."""
    with count_compilations() as count:
        yield count


# --- Caches ---

SPEC = kvjax.CacheSpec(batch=2, query_heads=4, kv_heads=2, head_dim=16, max_prompt_tokens=32, max_new_tokens=96)


def make_block(rng, tokens):
    shapes = {"query": (2, tokens, 4, 16), "keys": (2, tokens, 2, 16), "values": (2, tokens, 2, 16)}
    return {name: jnp.asarray(rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}


def prefill_state(policy, rng):
    prompt = make_block(rng, 32)
    empty = kvjax.init(policy, SPEC, jax.random.split(jax.random.key(0), 2))
    return kvjax.prefill(*empty, prompt["keys"], prompt["values"], jnp.array([32, 20]))[:2]


def test_a_loop_without_jit_compiles_nothing_twice(num_compiled):
    """Also not for compactions, and for equal policies."""
    rng, counts = np.random.default_rng(0), []
    for _ in range(2):
        state = prefill_state(kvjax.SubGenMean(16, **WINDOW), rng)
        for _ in range(20):
            _, *state = kvjax.step(*state, **make_block(rng, 1))
            counts.append(num_compiled())
        kvjax.raise_faults(state)
    assert len(set(counts[9:])) == 1, counts


# --- Generation ---


def test_length_buckets():
    previous = range(0, 1)
    for tokens in range(1, 5000):
        bucket = compile_cache.length_bucket(tokens)
        assert tokens in bucket
        assert bucket == previous or bucket[0] == previous[-1] + 1
        assert len(bucket) <= max(16, tokens / 4)
        previous = bucket
    assert len({compile_cache.length_bucket(tokens) for tokens in range(1, 2049)}) == 24
    assert compile_cache.length_bucket(0) == compile_cache.length_bucket(1)


def test_equal_policies_and_similar_lengths_share_programs(num_compiled):
    def run(length):
        policy = kvjax.Uniform(16, **WINDOW)  # a new object
        generate(make_model(), policy, [[1 + i % 30 for i in range(length)]], max_new_tokens=10)

    run(130)
    count = num_compiled()
    for length in (129, 140, 160):
        run(length)
    assert num_compiled() == count
    run(161)
    assert num_compiled() > count


def test_programs_are_freed_near_the_limit_of_memory_maps(monkeypatch):
    if compile_cache.max_memory_maps() is None:
        pytest.skip("this system has no such limit")
    generate(make_model(), EXACT, [[1, 2, 3]], max_new_tokens=2)
    assert decode_program._cache_size() > 0
    num_maps = compile_cache.num_memory_maps()
    monkeypatch.setattr(compile_cache, "max_memory_maps", lambda: num_maps)
    generator = Generator(make_model(), EXACT, batch=1, max_prompt_tokens=8, max_new_tokens=8)
    next(generator.prefill_steps(generator.init_state(), [[1, 2, 3]]))
    gc.collect()
    assert decode_program._cache_size() == 0 and compile_cache.num_memory_maps() < num_maps
    assert len(generate(make_model(), EXACT, [[1, 2, 3]], max_new_tokens=2)[0][0]) == 2
