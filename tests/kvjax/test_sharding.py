"""Results of policies on eight devices equal results on one device.

The number of simulated devices is fixed when JAX starts, so these tests run in another process.
"""

import dataclasses
import functools
import itertools
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.distributed.sharding import RULES, rename_axes, shardings
from kvjax.state import count_row_faults, map_fields
from tests.kvjax import support
from tests.kvjax.support import ON_A_MESH as POLICIES
from tests.kvjax.support import each, last_queries, make_spec, row_keys

DEVICES = 8
on_devices = pytest.mark.skipif(jax.device_count() < DEVICES, reason="runs in a process with eight devices")
# The other policies are heavy.
FEW = ("uniform", "clusterkv")
SPEC = make_spec(batch=4, query_heads=8, kv_heads=4)
LENGTHS, NEW = jnp.array([37, 12, 1, 25]), jnp.array([8, 8, 5, 8])


@pytest.mark.skipif(jax.device_count() >= DEVICES, reason="the tests themselves run here")
@pytest.mark.parametrize("marker", ["not heavy", pytest.param("heavy", marks=pytest.mark.heavy)])
def test_in_a_process_with_eight_devices(marker):
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "JAX_PLATFORMS": "cpu"} | support.THREADS
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", marker, str(pathlib.Path(__file__))]
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ | flags, check=False)
    assert process.returncode == 0, process.stdout[-5000:]


@functools.lru_cache
def streams():
    rng = np.random.default_rng(0)
    shapes = [(4, tokens, heads, SPEC.head_dim) for tokens in (40, 16) for heads in (4, 4, 8)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@functools.partial(jax.jit, static_argnames=("policy", "mesh"))
def run(policy, mesh, lengths, new, prompt_keys, prompt_values, prompt_queries, keys, values, queries):
    """Returns the cache and the outputs after a prompt, two blocks of tokens and two compactions."""
    cache, counters = kvjax.init(policy, SPEC, row_keys(SPEC.batch), mesh)
    # The last positions of the array, for all lengths.
    prompt_end = last_queries(cache.policy, prompt_queries, jnp.full(SPEC.batch, prompt_queries.shape[1]))
    cache, counters, _ = kvjax.prefill(cache, counters, prompt_keys, prompt_values, lengths, prompt_end)
    outputs = []
    for begin in (0, 8):
        here = slice(begin, begin + 8)
        attended, cache, counters = kvjax.step(cache, counters, queries[:, here], keys[:, here], values[:, here], new)
        cache, counters = kvjax.compact(cache, counters)
        outputs += [attended, kvjax.normalize(kvjax.attend(cache, counters, queries[:, begin : begin + 1]))]
    return (cache, counters), outputs


def compare(policy, mesh, single_policy=None):
    single = run(single_policy or policy, None, LENGTHS, NEW, *streams())
    sharded = run(policy, mesh, LENGTHS, NEW, *streams())
    for one, other in zip(single[1], sharded[1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    np.testing.assert_array_equal(single[0][1].num_tokens, sharded[0][1].num_tokens)
    return single[0], sharded[0]


def compare_caches(single, sharded):
    leaves = (jax.tree.leaves(support.with_integer_keys(cache)) for cache in (single, sharded))
    for one, other in zip(*leaves, strict=True):
        # Devices that share slots have equal numbers of them; the last ones may be empty.
        other = other[tuple(slice(size) for size in one.shape)]
        # The remainders of compensated sums depend on the order of additions.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-3)


def check_shards(cache, mesh):
    def check(field, leaf):
        parts = math.prod(mesh.shape[RULES[axis]] for axis in field.axes if axis in RULES)
        assert leaf.addressable_shards[0].data.size * parts == leaf.size, field.name
        return leaf

    map_fields(check, cache)


@on_devices
def test_functions_preserve_the_sharding_of_a_cache_outside_jit():
    mesh = kvjax.make_mesh(SPEC.kv_heads, data=2, tensor=4)
    empty = kvjax.init(POLICIES["uniform"], SPEC, row_keys(SPEC.batch), mesh)
    prompt_keys, prompt_values, _, keys, values, queries = streams()
    *prompted, _ = kvjax.prefill(*empty, prompt_keys, prompt_values, LENGTHS)
    appended = kvjax.append(*prompted, keys[:, :2], values[:, :2])
    _, *stepped = kvjax.step(*appended, queries[:, :1], keys[:, :1], values[:, :1])
    for one in (empty, prompted, appended, stepped, kvjax.compact(*stepped)):
        for leaf, expected in zip(jax.tree.leaves(one), jax.tree.leaves(shardings(one, mesh)), strict=True):
            assert leaf.sharding.is_equivalent_to(expected, leaf.ndim)


@on_devices
@pytest.mark.heavy
def test_a_fault_of_one_head_affects_its_row_on_all_devices():
    # Keys of one head are not finite, and one row appends more tokens than the block has.
    mesh = kvjax.make_mesh(SPEC.kv_heads, data=2, tensor=4)
    prompt_keys, prompt_values, _, keys, values, queries = streams()
    broken = prompt_keys.at[1, 3, 2].set(jnp.inf)  # between sinks and recent tokens
    results = []
    for target in (None, mesh):
        empty = kvjax.init(POLICIES["subgen_mean"], SPEC, row_keys(SPEC.batch), target)
        prompted = jax.jit(lambda *state: kvjax.prefill(*state, broken, prompt_values, LENGTHS)[:2])(*empty)
        cache, counters = jax.jit(kvjax.append)(*prompted, keys[:, :2], values[:, :2], jnp.array([2, 2, 2, 3]))
        output = kvjax.normalize(jax.jit(kvjax.attend)(cache, counters, queries[:, :1]))
        np.testing.assert_array_equal(np.isnan(output).any((1, 2, 3)), [False, True, False, True])
        np.testing.assert_array_equal(np.isnan(output).all((1, 2, 3)), [False, True, False, True])
        with pytest.raises(ValueError, match=r"keys that are not finite.*overflow=\[0, 0, 0, 1\]"):
            kvjax.raise_faults((cache, counters))
        results.append((cache.policy_faults, counters.overflow))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@on_devices
@pytest.mark.parametrize(
    "name, sequence", each(itertools.product(POLICIES, (1, 4)), quick=[("uniform", 1), ("clusterkv", 4)])
)
def test_every_policy_equals_one_device_and_is_sharded(name, sequence):
    data, tensor = 2 // min(sequence, 2), 4 * min(sequence, 2)
    mesh = kvjax.make_mesh(SPEC.kv_heads, data=data, tensor=tensor, sequence=sequence)
    single, sharded = compare(POLICIES[name], mesh)
    compare_caches(single, sharded)
    check_shards(sharded, mesh)


COLLECTIVE = re.compile(r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
ARRAY = re.compile(r"[a-z](\d+)\[([\d,]*)\]")  # such as f32[4,8]


def collectives_of(name, mesh, longest, function):
    """Returns kinds and bytes of a function's collectives for a cache of prompts of up to `longest` tokens."""
    spec = dataclasses.replace(SPEC, max_prompt_tokens=longest)
    state = jax.eval_shape(lambda keys: kvjax.init(POLICIES[name], spec, keys, mesh), row_keys(SPEC.batch))
    state = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, shardings(state, mesh)
    )
    place = jax.NamedSharding(mesh, jax.P("data", None, "tensor"))
    shapes = [(4, 1, heads, SPEC.head_dim) for heads in (8, 4, 4)]
    tokens = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place) for shape in shapes]
    text = jax.jit(function, donate_argnums=(0, 1)).lower(*state, *tokens).compile().as_text()
    exchanged = []
    for result, kind in COLLECTIVE.findall(text):
        arrays = [(int(bits) // 8, *map(int, filter(None, sides.split(",")))) for bits, sides in ARRAY.findall(result)]
        exchanged.append((kind, sum(map(math.prod, arrays))))
    return sorted(exchanged)


def one_step(cache, counters, query, keys, values):
    return kvjax.step(cache, counters, query, keys, values, compact_when_full=False)


def one_compaction(cache, counters, query, keys, values):
    return kvjax.compact(cache, counters)


@on_devices
@pytest.mark.parametrize("name", each(POLICIES, quick=FEW))
def test_a_decode_step_exchanges_no_keys_or_values(name):
    """Devices exchange partials of constant size, and in a compaction the number of faults of a row."""
    sharded_heads = kvjax.make_mesh(SPEC.kv_heads, data=2, tensor=4)
    kinds = [kind for kind, _ in collectives_of(name, sharded_heads, 160, one_step)]
    assert kinds == ["all-reduce"] * (name == "infinigen")
    cache, _ = kvjax.init(POLICIES[name], SPEC, row_keys(SPEC.batch))
    counted = count_row_faults(cache.state) is not None
    # Faults of the policy, and tokens that are not finite.
    numbers_per_row = [("all-reduce", SPEC.batch // 2 * 4 * (1 + counted))]
    assert collectives_of(name, sharded_heads, 160, one_compaction) == numbers_per_row
    sharded_store = kvjax.make_mesh(SPEC.kv_heads, tensor=8, sequence=8)
    collectives_used = collectives_of(name, sharded_store, 160, one_step)
    assert {kind for kind, _ in collectives_used} <= {"all-reduce"}
    assert collectives_used == collectives_of(name, sharded_store, 640, one_step)
    grows = name == "exact" or POLICIES[name].is_retrieval
    # Per query head: the maximum, the numerator and the denominator.
    assert sum(size for _, size in collectives_used) == grows * 4 * 8 * (1 + SPEC.head_dim + 1) * 4
    assert collectives_of(name, sharded_store, 160, one_compaction) == [("all-reduce", SPEC.batch * 4)] * counted


@on_devices
@pytest.mark.heavy
def test_each_group_of_heads_is_sharded_separately():
    uniform, exact = POLICIES["uniform"], POLICIES["exact"]
    by_head = kvjax.ByHead((uniform, exact, exact, uniform))  # devices may have their groups in another order
    for sequence in (1, 2, 4):
        mesh = kvjax.make_mesh(SPEC.kv_heads, data=8 // max(2, sequence), tensor=max(2, sequence), sequence=sequence)
        compare(by_head, mesh)


@on_devices
def test_the_only_head_of_a_device_has_an_unshared_budget():
    policy = POLICIES["leverage_scores"]
    compare(kvjax.AdaKV(policy, 0.0), kvjax.make_mesh(SPEC.kv_heads, data=2, tensor=4), policy)


def init_on(policy, heads=4, batch=4, sequence=1):
    """Creates a cache on a mesh for four KV heads."""
    spec = make_spec(batch=batch, query_heads=8, kv_heads=heads)
    return kvjax.init(policy, spec, row_keys(batch), kvjax.make_mesh(4, data=2, tensor=4, sequence=sequence))


HOSTED, ONE_HEAD_EACH = (
    kvjax.HostMemory(POLICIES["quest"]),
    kvjax.ByHead((POLICIES["uniform"], *[POLICIES["exact"]] * 3)),
)
REFUSED = {
    "data=2 x tensor=2 needs 4 devices, got 8": lambda: kvjax.make_mesh(4, data=2, tensor=2),
    "tensor=8 must divide kv_heads=6": lambda: kvjax.make_mesh(6, tensor=8),
    "sequence=4 must divide tensor=8, and tensor / s": lambda: kvjax.make_mesh(3, tensor=8, sequence=4),
    "3 along 'B' cannot be divided among 2 devices along 'data'": lambda: init_on(POLICIES["exact"], batch=3),
    "2 along 'H_kv' cannot be divided among 4 devices along 'tensor'": lambda: init_on(POLICIES["exact"], heads=2),
    "HostMemory: 2 devices share a KV head": lambda: init_on(HOSTED, sequence=2),
    "each of 4 devices has 1 KV heads": lambda: init_on(ONE_HEAD_EACH),
    "no axis 'model'; it has 'tp'": lambda: rename_axes(jax.make_mesh((8,), ("tp",)), 4, tensor="model"),
    "8 devices along 'tp' must divide kv_heads=6 or": lambda: rename_axes(jax.make_mesh((8,), ("tp",)), 6, tensor="tp"),
}


@on_devices
@pytest.mark.parametrize("message", REFUSED)
def test_meshes_of_invalid_shape_are_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


@on_devices
def test_axes_of_a_user_s_mesh_can_be_renamed():
    # Devices along "tp" share heads; more devices than heads also share stores.
    users = jax.make_mesh((2, 4), ("fsdp", "tp"))
    compare(POLICIES["exact"], rename_axes(users, SPEC.kv_heads, data="fsdp", tensor="tp"))
    flat = jax.make_mesh((8,), ("tp",))
    renamed = rename_axes(flat, SPEC.kv_heads, tensor="tp")
    assert dict(renamed.shape) == {"tensor": 4, "sequence": 2, "data": 1}
    assert renamed.devices.ravel().tolist() == flat.devices.ravel().tolist()
    compare(POLICIES["exact"], renamed)
    # Caches are replicated along all other axes, also along an axis that is called "data".
    repeated = rename_axes(jax.make_mesh((2, 4), ("data", "tp")), SPEC.kv_heads, tensor="tp")
    assert dict(repeated.shape) == {"other_data": 2, "tensor": 4, "sequence": 1, "data": 1}
    compare(POLICIES["exact"], repeated)


@on_devices
@pytest.mark.parametrize(
    "name", each(("exact", "uniform", "snapkv", "subgen", "clusterkv"), quick=("uniform", "exact"))
)
def test_rows_of_frozen_texts(name):
    prompt_keys, prompt_values, prompt_queries, keys, values, queries = streams()
    policy, spec = POLICIES[name], dataclasses.replace(SPEC, batch=2, max_new_tokens=0)

    @functools.partial(jax.jit, static_argnames="mesh")
    def fill(mesh):
        cache, counters = kvjax.init(policy, spec, row_keys(2), mesh)
        prompt_end = last_queries(cache.policy, prompt_queries[:2], jnp.full(2, prompt_queries.shape[1]))
        return kvjax.prefill(cache, counters, prompt_keys[:2], prompt_values[:2], LENGTHS[:2], prompt_end)[:2]

    @functools.partial(jax.jit, static_argnames="mesh")
    def run(mesh, text):
        tail = kvjax.init(kvjax.Exact(), dataclasses.replace(SPEC, max_prompt_tokens=1), row_keys(SPEC.batch), mesh)
        return kvjax.step(*tail, queries[:, :8], keys[:, :8], values[:, :8], NEW, prefix=text)[0]

    meshes = None, kvjax.make_mesh(SPEC.kv_heads, data=2, tensor=4)
    outputs = [np.asarray(run(mesh, kvjax.freeze(*fill(mesh)))) for mesh in meshes]
    present = np.arange(8) < np.asarray(NEW)[:, None]
    np.testing.assert_allclose(outputs[0][present], outputs[1][present], atol=1e-5)
