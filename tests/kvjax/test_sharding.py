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
from kvjax.distributed.sharding import RULES, rename_axes, shardings
from kvjax.state import count_row_faults, map_fields
from tests.kvjax import support
from tests.kvjax.support import ON_A_MESH as POLICIES
from tests.kvjax.support import each, last_queries, make_spec, row_keys

DEVICES = 8
on_devices = pytest.mark.skipif(jax.device_count() < DEVICES, reason="runs in a process with eight devices")
# The others take minutes together.
FEW = ("uniform", "clusterkv", "infinigen")
SPEC = make_spec(batch=4, query_heads=8, kv_heads=4)
LENGTHS, NEW = jnp.array([37, 12, 1, 25]), jnp.array([8, 8, 5, 8])


def run_here(*arguments):
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "JAX_PLATFORMS": "cpu"} | support.THREADS
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


@functools.partial(jax.jit, static_argnames=("policy", "mesh"))
def run(policy, mesh, lengths, new, prompt_keys, prompt_values, prompt_queries, keys, values, queries):
    """A prompt, two blocks of tokens and two compactions, and attention to each: cache and outputs."""
    cache = kvjax.init(policy, SPEC, row_keys(SPEC.batch), mesh)
    # The last queries are asked for at the end of what is given, whatever the rows' lengths.
    shown = last_queries(cache.policy, prompt_queries, jnp.full(SPEC.batch, prompt_queries.shape[1]))
    cache, _ = kvjax.prefill(cache, prompt_keys, prompt_values, lengths, shown)
    outputs = []
    for begin in (0, 8):
        here = slice(begin, begin + 8)
        attended, cache = kvjax.step(cache, queries[:, here], keys[:, here], values[:, here], new)
        cache = kvjax.compact(cache)
        outputs += [attended, kvjax.normalize(kvjax.attend(cache, queries[:, begin : begin + 1]))]
    return cache, outputs


def compare(policy, mesh):
    alone = run(policy, None, LENGTHS, NEW, *streams())
    together = run(policy, mesh, LENGTHS, NEW, *streams())
    for one, other in zip(alone[1], together[1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    np.testing.assert_array_equal(kvjax.num_tokens(alone[0]), kvjax.num_tokens(together[0]))
    return alone[0], together[0]


def compare_caches(alone, together):
    def numbers(leaf):
        return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        one, other = numbers(one), numbers(other)
        # Where devices share slots, there are as many for each, and the last ones may stay empty.
        other = other[tuple(slice(size) for size in one.shape)]
        # Compensated sums keep what rounding left of them, which may be anything of that size.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-3)


@on_devices
@pytest.mark.parametrize(
    "name, data, tensor, sequence", [("uniform", 2, 4, None), ("clusterkv", 2, 4, 2), ("exact", 1, 8, None)]
)
def test_results_are_those_of_one_device_and_parts_lie_apart(name, data, tensor, sequence):
    mesh = kvjax.make_mesh(SPEC.kv_heads, data=data, tensor=tensor, sequence=sequence)
    alone, cache = compare(POLICIES[name], mesh)
    compare_caches(alone, cache)

    def is_cut(field, leaf):
        parts = math.prod(mesh.shape[RULES[axis]] for axis in field.axes if axis in RULES)
        assert leaf.addressable_shards[0].data.size * parts == leaf.size, field.name
        return leaf

    map_fields(is_cut, cache)


@on_devices
def test_a_cache_is_placed_where_it_is_made_and_stays_there():
    # Outside jit too; and every function gives it back as it came.
    mesh = kvjax.make_mesh(SPEC.kv_heads, data=2, tensor=4)
    cache = kvjax.init(POLICIES["uniform"], SPEC, row_keys(SPEC.batch), mesh)
    prompt_keys, prompt_values, _, keys, values, queries = streams()
    prompted, _ = kvjax.prefill(cache, prompt_keys, prompt_values, LENGTHS)
    appended = kvjax.append(prompted, keys[:, :2], values[:, :2])
    _, stepped = kvjax.step(appended, queries[:, :1], keys[:, :1], values[:, :1])
    for made in (cache, prompted, appended, stepped, kvjax.compact(stepped)):
        for leaf, place in zip(jax.tree.leaves(made), jax.tree.leaves(shardings(made, mesh)), strict=True):
            assert leaf.sharding.is_equivalent_to(place, leaf.ndim)


@on_devices
@pytest.mark.heavy
def test_faults_are_those_of_a_row_wherever_its_heads_lie():
    # Tokens of every device's heads, and keys of one head alone that are not finite.
    mesh = kvjax.make_mesh(SPEC.kv_heads, data=2, tensor=4)
    prompt_keys, prompt_values, _, keys, values, queries = streams()
    broken = prompt_keys.at[1, 3, 2].set(jnp.inf)  # between sinks and recent tokens
    results = []
    for placed in (None, mesh):
        cache = kvjax.init(POLICIES["subgen_mean_value"], SPEC, row_keys(SPEC.batch), placed)
        cache = jax.jit(lambda cache: kvjax.prefill(cache, broken, prompt_values, LENGTHS)[0])(cache)
        cache = jax.jit(kvjax.append)(cache, keys[:, :2], values[:, :2], jnp.array([2, 2, 2, 3]))
        seen = kvjax.normalize(jax.jit(kvjax.attend)(cache, queries[:, :1]))
        np.testing.assert_array_equal(np.isnan(seen).any((1, 2, 3)), [False, True, False, True])
        np.testing.assert_array_equal(np.isnan(seen).all((1, 2, 3)), [False, True, False, True])
        with pytest.raises(ValueError, match=r"keys that are not finite.*overflow=\[0, 0, 0, 1\]"):
            kvjax.raise_faults(cache)
        results.append((cache.policy_faults, cache.counters.overflow))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@on_devices
@pytest.mark.heavy
@pytest.mark.parametrize("sequence", [1, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_what_it_gives_on_one_device(name, sequence):
    data, tensor = 2 // min(sequence, 2), 4 * min(sequence, 2)
    mesh = kvjax.make_mesh(SPEC.kv_heads, data=data, tensor=tensor, sequence=sequence)
    compare_caches(*compare(POLICIES[name], mesh))


def exchanged(name, mesh, longest, function):
    """What crosses between devices in one call of a function of caches for prompts of so many tokens."""
    spec = dataclasses.replace(SPEC, max_prompt_tokens=longest)
    cache = jax.eval_shape(lambda keys: kvjax.init(POLICIES[name], spec, keys, mesh), row_keys(SPEC.batch))
    cache = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), cache, shardings(cache, mesh)
    )
    place = jax.NamedSharding(mesh, jax.P("data", None, "tensor"))
    token = lambda heads: jax.ShapeDtypeStruct((4, 1, heads, SPEC.head_dim), jnp.float32, sharding=place)  # noqa: E731
    text = jax.jit(function, donate_argnums=0).lower(cache, token(8), token(4), token(4)).compile().as_text()
    return sorted((one.kind, one.bytes) for one in collectives(text))


def one_step(cache, query, keys, values):
    return kvjax.step(cache, query, keys, values, compact_when_full=False)


def one_compaction(cache, query, keys, values):
    return kvjax.compact(cache)


@on_devices
@pytest.mark.parametrize("name", each(POLICIES, quick=FEW))
def test_a_decode_step_asks_no_other_device_for_keys_or_values(name):
    """Partials over all heads of a row, and partials of attention to a shared store: a few numbers, however long it is.
    A compaction counts faults over the heads of a row."""
    apart = kvjax.make_mesh(SPEC.kv_heads, data=2, tensor=4)
    assert [kind for kind, _ in exchanged(name, apart, 160, one_step)] == ["all-reduce"] * (name == "infinigen")
    cache = kvjax.init(POLICIES[name], SPEC, row_keys(SPEC.batch))
    counted = count_row_faults(cache.state) is not None
    # And tokens that are not finite.
    numbers_per_row = [("all-reduce", SPEC.batch // 2 * 4 * (1 + counted))]
    assert exchanged(name, apart, 160, one_compaction) == numbers_per_row
    shared = kvjax.make_mesh(SPEC.kv_heads, tensor=8, sequence=8)
    found = exchanged(name, shared, 160, one_step)
    assert {kind for kind, _ in found} <= {"all-reduce"}
    assert found == exchanged(name, shared, 640, one_step)
    grows = name == "exact" or POLICIES[name].is_retrieval
    # Of 8 query heads: the largest logit, 64 sums and one.
    assert sum(size for _, size in found) == grows * 4 * 8 * (1 + SPEC.head_dim + 1) * 4
    assert exchanged(name, shared, 160, one_compaction) == [("all-reduce", SPEC.batch * 4)] * counted


@on_devices
@pytest.mark.heavy
def test_groups_of_heads_are_each_divided_by_themselves():
    by_head = kvjax.ByHead((POLICIES["uniform"], POLICIES["exact"]) * 2)
    for sequence in (1, 2, 4):
        mesh = kvjax.make_mesh(SPEC.kv_heads, data=8 // max(2, sequence), tensor=max(2, sequence), sequence=sequence)
        compare(by_head, mesh)
    finer = kvjax.make_mesh(SPEC.kv_heads, data=2, tensor=4)
    with pytest.raises(ValueError, match="2 .* cannot be divided among 4 devices"):
        kvjax.init(by_head, SPEC, row_keys(4), finer)


@on_devices
def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="data=2 x tensor=2 needs 4 devices, got 8"):
        kvjax.make_mesh(4, data=2, tensor=2)
    with pytest.raises(ValueError, match="tensor=8 must divide kv_heads=6"):
        kvjax.make_mesh(6, tensor=8)
    mesh, exact = kvjax.make_mesh(4, data=2, tensor=4), POLICIES["exact"]
    with pytest.raises(ValueError, match="3 along 'B' cannot be divided among 2 devices along 'data'"):
        kvjax.init(exact, make_spec(batch=3, query_heads=8, kv_heads=4), row_keys(3), mesh)
    with pytest.raises(ValueError, match="2 along 'H_kv' cannot be divided among 4 devices along 'tensor'"):
        kvjax.init(exact, make_spec(batch=4), row_keys(4), mesh)
    with pytest.raises(
        ValueError, match="sequence=4 must divide tensor=8, and tensor / sequence must divide kv_heads=3"
    ):
        kvjax.make_mesh(3, tensor=8, sequence=4)
    shared = kvjax.make_mesh(4, data=2, tensor=4, sequence=2)
    with pytest.raises(ValueError, match="HostMemory: 2 devices share a KV head"):
        kvjax.init(kvjax.HostMemory(POLICIES["quest"]), SPEC, row_keys(4), shared)


@on_devices
def test_caches_lie_on_a_mesh_of_one_s_own():
    # Its axes keep their devices; those along "tp" share heads, and where there are more of them than heads, their
    # stores.
    theirs = jax.make_mesh((2, 4), ("fsdp", "tp"))
    compare(POLICIES["exact"], rename_axes(theirs, SPEC.kv_heads, data="fsdp", tensor="tp"))
    flat = jax.make_mesh((8,), ("tp",))
    renamed = rename_axes(flat, SPEC.kv_heads, tensor="tp")
    assert dict(renamed.shape) == {"tensor": 4, "sequence": 2, "data": 1}
    assert renamed.devices.ravel().tolist() == flat.devices.ravel().tolist()
    compare(POLICIES["exact"], renamed)
    # Along axes that are not named caches are repeated, also where these have the library's names.
    repeated = rename_axes(jax.make_mesh((2, 4), ("data", "tp")), SPEC.kv_heads, tensor="tp")
    assert dict(repeated.shape) == {"other_data": 2, "tensor": 4, "sequence": 1, "data": 1}
    compare(POLICIES["exact"], repeated)
    with pytest.raises(ValueError, match="the mesh has no axis 'model'; it has 'fsdp', 'tp'"):
        rename_axes(theirs, 4, tensor="model")
    with pytest.raises(ValueError, match="8 devices along 'tp' must divide kv_heads=6 or be a multiple of it"):
        rename_axes(flat, 6, tensor="tp")


@on_devices
@pytest.mark.heavy
@pytest.mark.parametrize("policy", [POLICIES["exact"], kvjax.ByHead((POLICIES["uniform"], POLICIES["h2o"]) * 2)])
def test_sinks_and_tokens_find_their_heads_on_a_mesh(policy):
    # Learned sinks lie by head, values are of another width than keys.
    mesh, spec = kvjax.make_mesh(SPEC.kv_heads, data=4, tensor=2), dataclasses.replace(SPEC, value_dim=24, scale=0.3)
    sinks = jnp.linspace(-1.0, 3.0, SPEC.query_heads)
    prompt_keys, prompt_values, prompt_queries, keys, values, queries = streams()

    @functools.partial(jax.jit, static_argnames="placed")
    def attended(placed):
        cache = kvjax.init(policy, spec, row_keys(SPEC.batch), placed)
        shown = last_queries(cache.policy, prompt_queries, jnp.full(SPEC.batch, prompt_queries.shape[1]))
        cache, _ = kvjax.prefill(cache, prompt_keys, prompt_values[..., :24], LENGTHS, shown, sink_logits=sinks)
        return kvjax.step(cache, queries[:, :4], keys[:, :4], values[:, :4, :, :24], sink_logits=sinks)[0]

    np.testing.assert_allclose(attended(None), attended(mesh), atol=1e-5)


@on_devices
def test_heads_of_a_device_share_a_budget():
    # A head alone on its device has its own budget.
    policy = POLICIES["leverage_scores"]
    mesh = kvjax.make_mesh(SPEC.kv_heads, data=2, tensor=4)
    _, alone = run(policy, None, LENGTHS, NEW, *streams())
    _, together = run(kvjax.AdaKV(policy, 0.0), mesh, LENGTHS, NEW, *streams())
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
