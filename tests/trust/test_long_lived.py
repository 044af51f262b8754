"""A process that serves for long: few programs, and none compiled twice."""

import collections
import contextlib
import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax_models import compile_cache
from kvjax_models.generation.decode import decode_block
from kvjax_models.generation.generator import Generator, generate
from kvjax_models.generation.rows import extend_rows
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama

CONFIG = LlamaConfig(
    vocab_size=32, width=16, mlp_width=16, layers=1, query_heads=2, kv_heads=1, head_dim=8, max_length=512
)
WINDOW = {"sinks": 2, "recent": 4, "compact_every": 8}
COMPILED = "/jax/core/compile/backend_compile_duration"


@functools.cache
def model():
    return Llama(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture
def compiled():
    """Programs that were compiled, counted while the test runs."""
    counts = collections.Counter()

    def count(event, *_, **__):
        counts[event] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    with contextlib.ExitStack() as stack:
        stack.callback(jax.monitoring.unregister_event_duration_listener, count)
        yield lambda: counts[COMPILED]


# --- outside jit ---


def inputs(rng, tokens):
    heads = {"query": 4, "keys": 2, "values": 2}
    return {
        name: jnp.asarray(rng.normal(size=(2, tokens, count, 16)).astype(np.float32)) for name, count in heads.items()
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda: kvjax.SubGen(16, **WINDOW),
        pytest.param(lambda: kvjax.Uniform(16, **WINDOW), marks=pytest.mark.heavy),
        pytest.param(lambda: kvjax.ClusterKV(16, sinks=2, compact_every=8), marks=pytest.mark.heavy),
        pytest.param(lambda: kvjax.Chelsea(16, **WINDOW, chunk=8), marks=pytest.mark.heavy),
    ],
)
def test_a_loop_without_jit_compiles_nothing_twice(make, compiled):
    """README's loop as it is first typed: compactions come and go, and so do equal policies."""
    rng = np.random.default_rng(0)
    spec = kvjax.CacheSpec(batch=2, query_heads=4, kv_heads=2, head_dim=16, max_prompt_tokens=32, max_new_tokens=96)
    after = []
    for _ in range(2):
        prompt = inputs(rng, 32)
        cache = kvjax.init(make(), spec, jax.random.split(jax.random.key(0), 2))
        cache, _ = kvjax.prefill(cache, prompt["keys"], prompt["values"], jnp.array([32, 20]))
        for _ in range(40):
            _, cache = kvjax.step(cache, **inputs(rng, 1))
            after.append(compiled())
        kvjax.raise_faults(cache)
    assert len(set(after[9:])) == 1, after


@pytest.mark.heavy
def test_outside_jit_gives_what_jit_gives():
    rng = np.random.default_rng(1)
    spec = kvjax.CacheSpec(batch=2, query_heads=4, kv_heads=2, head_dim=16, max_prompt_tokens=32, max_new_tokens=96)
    prompt, blocks = inputs(rng, 32), [inputs(rng, 3) for _ in range(6)]
    found = []
    for prefill, step in ((kvjax.prefill, kvjax.step), (jax.jit(kvjax.prefill), jax.jit(kvjax.step))):
        cache = kvjax.init(kvjax.Uniform(16, **WINDOW), spec, jax.random.split(jax.random.key(0), 2))
        cache, _ = prefill(cache, prompt["keys"], prompt["values"], jnp.array([32, 20]))
        for block in blocks:
            attended, cache = step(cache, **block)
        found.append(attended)
    np.testing.assert_allclose(*found, rtol=1e-6, atol=1e-6)


# --- generation ---


def test_lengths_share_buckets():
    previous = range(0, 1)
    for tokens in range(1, 5000):
        bucket = compile_cache.length_bucket(tokens)
        assert tokens in bucket
        assert bucket == previous or bucket[0] == previous[-1] + 1  # one behind the other
        assert len(bucket) <= max(16, tokens / 4)
        previous = bucket
    assert len({compile_cache.length_bucket(tokens) for tokens in range(1, 2049)}) == 24
    assert compile_cache.length_bucket(0) == compile_cache.length_bucket(1)


def test_equal_policies_and_near_lengths_compile_nothing_again(compiled):
    def write(length):
        policy = kvjax.Uniform(16, **WINDOW)  # a new one every time
        return generate(model(), policy, [[1 + i % 30 for i in range(length)]], max_new_tokens=10)

    write(130)
    before = compiled()
    for length in (129, 140, 160):
        write(length)
    assert compiled() == before
    write(161)
    assert compiled() > before


@pytest.mark.heavy
def test_a_bucket_changes_no_text():
    prompt = [1 + i * i % 30 for i in range(70)]
    policy = kvjax.Exact(compact_every=8)
    rows, _ = generate(model(), policy, [prompt], max_new_tokens=10)
    made = Generator(model(), policy, batch=1, max_prompt_tokens=70, max_new_tokens=10)
    state, found = made.prefill(made.init_state(), [prompt]), [[]]
    for _, tokens in made.decode(state, 10):
        extend_rows(found, tokens)
    assert rows == found


def test_programs_are_dropped_where_the_process_nears_its_maps(monkeypatch):
    if compile_cache.max_memory_maps() is None:
        pytest.skip("this system has no such limit")
    generate(model(), kvjax.Exact(compact_every=8), [[1, 2, 3]], max_new_tokens=2)
    assert decode_block._cache_size() > 0
    held = compile_cache.num_memory_maps()
    monkeypatch.setattr(compile_cache, "max_memory_maps", lambda: held)  # as near as can be
    Generator(model(), kvjax.Exact(compact_every=8), batch=1, max_prompt_tokens=8, max_new_tokens=8)
    gc.collect()
    assert decode_block._cache_size() == 0 and compile_cache.num_memory_maps() < held
    rows, _ = generate(model(), kvjax.Exact(compact_every=8), [[1, 2, 3]], max_new_tokens=2)
    assert len(rows[0]) == 2


@pytest.mark.heavy
def test_two_thousand_generations_over_two_hundred_lengths_level_off(compiled):
    """Four policies take turns; the second thousand holds no more maps and compiles no more than the first."""
    rng, small = np.random.default_rng(0), dataclasses.replace(CONFIG, max_length=1024)
    soaked = Llama(small, rngs=nnx.Rngs(0))
    policies = [
        lambda: kvjax.Exact(compact_every=8),
        lambda: kvjax.Uniform(16, **WINDOW),
        lambda: kvjax.StreamingLLM(16, sinks=2, compact_every=8),
        lambda: kvjax.SubGen(16, **WINDOW),
    ]
    lengths = rng.permutation(600)[:200] + 1
    held, counted = [], []
    for number in range(2000):
        length = int(lengths[number // 4 % 200])
        rows, _ = generate(soaked, policies[number % 4](), [rng.integers(0, 32, length).tolist()], max_new_tokens=4)
        assert len(rows[0]) == 4
        held.append(compile_cache.num_memory_maps())
        counted.append(compiled())
    print(f"maps: {max(held[:1000])}, {max(held[1000:])}; programs: {counted[999]}, {counted[-1] - counted[999]} more")
    assert max(held) < 0.75 * (compile_cache.max_memory_maps() or np.inf)
    assert max(held[1000:]) <= 1.05 * max(held[:1000])
    # A size of each policy at most once, and what is dropped for room once more.
    assert counted[-1] - counted[999] <= counted[999]
