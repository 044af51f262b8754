"""Policies on eight devices give what they give on one.

The devices are simulated, which a process must be told before it starts: the tests here run in one of their own.
"""

import dataclasses
import functools
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments.common.compiled import collectives
from kvjax.state import map_fields
from tests.kvjax.support import POLICIES, each, make_spec

DEVICES = 8
on_devices = pytest.mark.skipif(jax.device_count() < DEVICES, reason="runs in a process with eight devices")
# The others take minutes together.
FEW = ("uniform", "clusterkv", "infinigen")
SPEC = make_spec(batch=4, query_heads=8, kv_heads=4)
LENGTHS, NEW = jnp.array([37, 12, 1, 25]), jnp.array([8, 8, 5, 8])


def run_here(*arguments):
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-n", "0", *arguments, str(pathlib.Path(__file__))]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | flags, check=False)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.skipif(jax.device_count() >= DEVICES, reason="the tests themselves run here")
def test_in_a_process_with_eight_devices():
    run_here("-m", "not heavy")


@pytest.mark.heavy
@pytest.mark.skipif(jax.device_count() >= DEVICES, reason="the tests themselves run here")
def test_every_policy_in_a_process_with_eight_devices():
    run_here("-m", "heavy")


@functools.lru_cache
def streams():
    rng = np.random.default_rng(0)
    make = lambda tokens, heads: jnp.asarray(rng.normal(size=(4, tokens, heads, SPEC.head_dim)), jnp.float32)  # noqa: E731
    return [make(tokens, heads) for tokens, heads in ((40, 4), (40, 4), (40, 8), (16, 4), (16, 4), (16, 8))]


@functools.partial(jax.jit, static_argnames="policy")
def run(policy, lengths, new, prompt_keys, prompt_values, prompt_queries, keys, values, queries):
    """A prompt, two blocks of tokens and two compactions, attention before and after: states and outputs."""
    state = policy.init(SPEC, jax.random.split(jax.random.key(0), SPEC.batch))
    tail = policy.query_tail
    tail = prompt_queries if tail == kvjax.ALL_QUERIES else prompt_queries[:, prompt_queries.shape[1] - tail :]
    if policy.query_tail == 0:
        tail = None
    state, _ = policy.prefill(state, prompt_keys, prompt_values, lengths, tail, None)
    outputs = []
    for begin in (0, 8):
        here = slice(begin, begin + 8)
        state = policy.extend(state, keys[:, here], values[:, here], new)
        partials, state = policy.attend(state, queries[:, here], causal=True)
        outputs.append(kvjax.output(partials))
        state = policy.compact(state)
    return state, outputs


def compare(name, mesh):
    alone = run(POLICIES[name], LENGTHS, NEW, *streams())
    together = run(kvjax.sharded(POLICIES[name], mesh), LENGTHS, NEW, *streams())
    for one, other in zip(alone[1], together[1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    numbers = lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.number) else jax.random.key_data(leaf)  # noqa: E731
    for one, other in zip(jax.tree.leaves(alone[0]), jax.tree.leaves(together[0]), strict=True):
        one, other = numbers(one), numbers(other)
        # Where devices share slots, there are as many for each, and the last ones may stay empty.
        other = other[tuple(slice(size) for size in one.shape)]
        # Compensated sums keep what rounding left of them, which may be anything of that size.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-3)
    return together[0]


@on_devices
@pytest.mark.parametrize(
    "name, data, tensor, sequence", [("uniform", 2, 4, None), ("clusterkv", 2, 4, 2), ("exact", 1, 8, None)]
)
def test_results_are_those_of_one_device_and_parts_lie_apart(name, data, tensor, sequence):
    mesh = kvjax.make_mesh(SPEC.kv_heads, data=data, tensor=tensor, sequence=sequence)
    state = compare(name, mesh)

    def is_cut(field, leaf):
        axes = {"batch": "data", "kv_heads": "tensor", "sequence": "sequence"}
        parts = math.prod(mesh.shape[axes[axis]] for axis in field.axes if axis in axes)
        assert leaf.addressable_shards[0].data.size * parts == leaf.size, field.name
        return leaf

    map_fields(is_cut, state)


@on_devices
@pytest.mark.heavy
@pytest.mark.parametrize("sequence", [1, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_what_it_gives_on_one_device(name, sequence):
    compare(
        name, kvjax.make_mesh(SPEC.kv_heads, data=2 // min(sequence, 2), tensor=4 * min(sequence, 2), sequence=sequence)
    )


def exchanged(name, mesh, longest):
    """What crosses between devices in a decoding step and a compaction of caches for prompts of so many tokens."""
    policy, spec = kvjax.sharded(POLICIES[name], mesh), dataclasses.replace(SPEC, max_prompt=longest)

    def step(state, keys, values, query):
        partials, state = policy.attend(policy.extend(state, keys, values), query, causal=True)
        return kvjax.output(partials), policy.compact(state)

    init = functools.partial(policy.init, spec)
    state = jax.eval_shape(init, jax.random.split(jax.random.key(0), SPEC.batch))
    state = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, kvjax.shardings(state, mesh)
    )
    place = jax.NamedSharding(mesh, jax.P("data", None, "tensor"))
    token = lambda heads: jax.ShapeDtypeStruct((4, 1, heads, SPEC.head_dim), jnp.float32, sharding=place)  # noqa: E731
    text = jax.jit(step, donate_argnums=0).lower(state, token(4), token(4), token(8)).compile().as_text()
    return sorted((one.kind, one.bytes) for one in collectives(text))


@on_devices
@pytest.mark.parametrize("name", each(POLICIES, quick=FEW))
def test_a_decode_step_asks_no_other_device_for_keys_or_values(name):
    """Sums over all heads of a row, and partials of attention to a shared store: a few numbers, however long it is."""
    apart = kvjax.make_mesh(SPEC.kv_heads, data=2, tensor=4)
    assert [kind for kind, _ in exchanged(name, apart, 160)] == ["all-reduce"] * (name == "infinigen")
    shared = kvjax.make_mesh(SPEC.kv_heads, tensor=8, sequence=8)
    found = exchanged(name, shared, 160)
    assert {kind for kind, _ in found} <= {"all-reduce"}
    assert found == exchanged(name, shared, 640)
    grows = name in ("exact", "snapkv", "pyramidkv") or getattr(POLICIES[name], "recalls", False)
    # Of 8 query heads: the largest logit, 64 sums and one.
    assert sum(size for _, size in found) == grows * 4 * 8 * (1 + SPEC.head_dim + 1) * 4


@on_devices
@pytest.mark.heavy
def test_groups_of_heads_are_each_divided_by_themselves():
    by_head = kvjax.by_head([[POLICIES["uniform"], POLICIES["exact"]] * 2])
    alone = run(by_head, LENGTHS, NEW, *streams())
    for sequence in (1, 2, 4):
        mesh = kvjax.make_mesh(SPEC.kv_heads, data=8 // max(2, sequence), tensor=max(2, sequence), sequence=sequence)
        together = run(kvjax.sharded(by_head, mesh), LENGTHS, NEW, *streams())
        for one, other in zip(alone[1], together[1], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
    finer = kvjax.make_mesh(SPEC.kv_heads, data=2, tensor=4)
    with pytest.raises(ValueError, match="keys: 2 along 'kv_heads' cannot be divided among 4 devices"):
        kvjax.sharded(by_head, finer).init(SPEC, jax.random.split(jax.random.key(0), 4))


@on_devices
def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="data=2 x tensor=2 devices are called for; there are 8"):
        kvjax.make_mesh(4, data=2, tensor=2)
    with pytest.raises(ValueError, match="tensor=8: it must divide kv_heads=6"):
        kvjax.make_mesh(6, tensor=8)
    mesh = kvjax.make_mesh(4, data=2, tensor=4)
    keys = jax.random.split(jax.random.key(0), 3)
    with pytest.raises(ValueError, match="3 along 'batch' cannot be divided among 2 devices along 'data'"):
        kvjax.sharded(POLICIES["exact"], mesh).init(make_spec(batch=3, query_heads=8, kv_heads=4), keys)
    with pytest.raises(ValueError, match="2 along 'kv_heads' cannot be divided among 4 devices along 'tensor'"):
        kvjax.sharded(POLICIES["exact"], mesh).init(make_spec(batch=4), jax.random.split(keys[0], 4))
    with pytest.raises(ValueError, match="sequence=4: it must divide tensor=8 into a divisor of kv_heads=3"):
        kvjax.make_mesh(3, tensor=8, sequence=4)
    hosted = kvjax.host_memory(POLICIES["quest"])
    with pytest.raises(ValueError, match="host_memory: 2 devices share each kv head"):
        shared = kvjax.make_mesh(4, data=2, tensor=4, sequence=2)
        kvjax.sharded(hosted, shared).init(SPEC, jax.random.split(keys[0], 4))
