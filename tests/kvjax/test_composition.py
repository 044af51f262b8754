"""Every policy inside of every combinator, and combinators inside of each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kvjax.policies.clusterkv_certified import ClusterKVCertified

import kvjax
from kvjax.budget import abstract_cache
from kvjax.policies.balancekv_reference import BalanceKVReference
from tests.kvjax.support import (
    BATCH,
    CLUSTERS,
    LENGTHS,
    NEW,
    WINDOW,
    Stream,
    after,
    begin,
    each,
    go,
    make_spec,
    make_stream,
    prompt_of,
    row_keys,
)
from tests.kvjax.support import POLICIES as STANDARD

POLICIES = STANDARD | {"clusterkv_certified": ClusterKVCertified(20, **CLUSTERS, target=0.05)}
RECALLING = [name for name, policy in POLICIES.items() if policy.is_retrieval]
EXACT = POLICIES["exact"]
HEAD = 1  # where `ByHead` has the policy: head 0 keeps everything

every_policy = pytest.mark.parametrize("name", each(POLICIES, quick=("uniform",)))
every_recalling = pytest.mark.parametrize("name", each(RECALLING, quick=("quest",)))


@functools.cache
def run(policy, layer=0, layers=1):
    """Prompt and decoding of the standard stream, ragged: the cache and attention's output."""
    stream = make_stream()
    spec = make_spec(layer=layer, layers=layers)
    cache = begin(policy, spec, row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    return sound(*go(cache, after(stream, LENGTHS))[:2])


@functools.cache
def run_of_head(policy, head=HEAD):
    """The same of a cache that has only this kv head, with the randomness that `ByHead` gives to a group that begins
    with it."""
    stream = make_stream()
    heads = slice(head, head + 1)
    queries = stream.queries[:, :, 2 * head : 2 * head + 2]
    stream = Stream(stream.keys[:, :, heads], stream.values[:, :, heads], queries)
    keys = jax.vmap(lambda key: jax.random.fold_in(key, head))(row_keys())
    cache = begin(policy, make_spec(kv_heads=1, query_heads=2), keys, *prompt_of(stream, LENGTHS), LENGTHS)
    return sound(*go(cache, after(stream, LENGTHS))[:2])


def sound(cache, outputs):
    kvjax.raise_faults(cache)
    assert np.isfinite(outputs).all()
    assert kvjax.num_tokens(cache).tolist() == [length + NEW for length in LENGTHS]
    return cache, outputs


def of_head(outputs, head=HEAD):
    return outputs[:, :, 2 * head : 2 * head + 2]


def same(outputs, expected):
    np.testing.assert_allclose(outputs, expected, atol=1e-5)


def host_bytes(cache):
    return kvjax.cache_bytes(cache).host


# --- one combinator ---


@pytest.mark.parametrize("storage, allowed", [("int8", 0.05), ("fp8", 0.2)])
@every_policy
def test_eight_bits_are_near_the_policy_itself(name, storage, allowed):
    """Where a choice flips, a query's output is another; most stay as they are. That attention is to the numbers that
    are stored is tested in `test_quantized`."""
    (_, outputs), (_, expected) = run(kvjax.Quantized(POLICIES[name], storage)), run(POLICIES[name])
    # Query heads that ask for nothing would be right whatever the keys.
    outputs, expected = outputs[:, :, ::2], expected[:, :, ::2]
    error = np.linalg.norm(outputs - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert np.median(error) < allowed


@every_recalling
def test_host_memory_changes_no_result(name):
    cache, outputs = run(kvjax.HostMemory(POLICIES[name]))
    plain, expected = run(POLICIES[name])
    same(outputs, expected)
    assert host_bytes(cache) > 0 == host_bytes(plain)
    assert kvjax.read_bytes(cache) == kvjax.read_bytes(plain)


@every_policy
def test_a_head_does_what_a_cache_of_that_head_alone_does(name):
    cache, outputs = run(kvjax.ByHead((EXACT, POLICIES[name])))
    alone, expected = run_of_head(POLICIES[name])
    exact, of_exact = run_of_head(EXACT, 0)
    same(of_head(outputs), expected)
    same(of_head(outputs, 0), of_exact)
    if name == "exact":
        return
    # Both caches of one head count where the staged tokens end.
    assert kvjax.read_bytes(cache) == kvjax.read_bytes(alone) + kvjax.read_bytes(exact) - 4 * BATCH


# Two that differ from layer to layer among them.
@pytest.mark.parametrize(
    "name", each(("subgen_mean_value", "balancekv_reference", "pyramidkv", "quest"), quick=("subgen_mean_value",))
)
def test_a_layer_does_what_its_policy_does(name):
    _, expected = run(POLICIES[name], 1, 2)
    same(run(kvjax.ByLayer((EXACT, POLICIES[name])), 1, 2)[1], expected)
    same(run(kvjax.FirstLayers(1, POLICIES[name], EXACT), 1, 2)[1], expected)


@pytest.mark.parametrize("name", POLICIES)
def test_layers_are_resolved_before_there_is_a_cache(name):
    shapes = {}
    for policy in (POLICIES[name], kvjax.ByLayer((EXACT, POLICIES[name])), kvjax.FirstLayers(1, POLICIES[name], EXACT)):
        for layer in (0, 1):
            shapes[policy, layer] = abstract_cache(policy, make_spec(layer=layer, layers=2))
    plain, by_layer, first_layers = [
        [shapes[policy, layer] for layer in (0, 1)] for policy in dict.fromkeys(policy for policy, _ in shapes)
    ]
    exact = abstract_cache(EXACT, make_spec(layer=0, layers=2))
    # Equal policies and shapes are one compiled program.
    assert by_layer == first_layers == [exact, plain[1]]


# --- combinators inside of combinators ---


@every_policy
def test_eight_bits_around_heads_are_eight_bits_in_each(name):
    _, around = run(kvjax.Quantized(kvjax.ByHead((EXACT, POLICIES[name]))))
    _, expected = run_of_head(kvjax.Quantized(POLICIES[name]))
    same(of_head(around), expected)
    same(of_head(around, 0), run_of_head(kvjax.Quantized(EXACT), 0)[1])


@every_policy
def test_one_head_may_be_in_eight_bits(name):
    _, outputs = run(kvjax.ByHead((EXACT, kvjax.Quantized(POLICIES[name]))))
    same(of_head(outputs), run_of_head(kvjax.Quantized(POLICIES[name]))[1])
    same(of_head(outputs, 0), run_of_head(EXACT, 0)[1])


@every_recalling
def test_eight_bits_lie_in_host_memory_whatever_is_outside(name):
    quantized = kvjax.Quantized(POLICIES[name])
    _, expected = run(quantized)
    for policy in (kvjax.HostMemory(quantized), kvjax.Quantized(kvjax.HostMemory(POLICIES[name]))):
        cache, outputs = run(policy)
        same(outputs, expected)
        # A quarter of the bytes, of numbers of four bytes each.
        assert 4 * host_bytes(cache) == host_bytes(run(kvjax.HostMemory(POLICIES[name]))[0])


@every_recalling
def test_heads_lie_in_host_memory_whatever_is_outside(name):
    _, expected = run_of_head(POLICIES[name])
    around = kvjax.HostMemory(kvjax.ByHead((EXACT, POLICIES[name])))
    inside = kvjax.ByHead((EXACT, kvjax.HostMemory(POLICIES[name])))
    for policy in (around, inside):
        cache, outputs = run(policy)
        same(of_head(outputs), expected)
        same(of_head(outputs, 0), run_of_head(EXACT, 0)[1])
        assert host_bytes(cache) == host_bytes(run_of_head(kvjax.HostMemory(POLICIES[name]))[0])


@pytest.mark.heavy
def test_all_of_them_at_once():
    is_retrieval = kvjax.ByHead((POLICIES["quest"], POLICIES["clusterkv_certified"]))
    policy = kvjax.FirstLayers(1, kvjax.HostMemory(kvjax.Quantized(is_retrieval, "fp8")))
    cache, outputs = run(policy, 1, 2)
    for head, name in enumerate(("quest", "clusterkv_certified")):
        same(of_head(outputs, head), run_of_head(kvjax.Quantized(POLICIES[name], "fp8"), head)[1])
    assert len(cache.state.recent) == 2 and all(int(recent.hits.sum()) > 0 for recent in cache.state.recent)


# --- what cannot be ---


def quantized_twice():
    inner = kvjax.Quantized(POLICIES["uniform"])
    return [
        kvjax.Quantized(inner),
        kvjax.Quantized(kvjax.ByHead((EXACT, inner))),
        kvjax.Quantized(kvjax.HostMemory(kvjax.Quantized(POLICIES["quest"]))),
    ]


@pytest.mark.parametrize("policy", quantized_twice(), ids=["alone", "by_head", "host_memory"])
def test_eight_bits_inside_of_eight_bits_are_refused(policy):
    with pytest.raises(ValueError, match="Quantized.*: what holds it is stored in int8 already"):
        kvjax.init(policy, make_spec(), row_keys())


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in RECALLING])
def test_what_recalls_nothing_has_nothing_in_host_memory(name):
    for policy in (POLICIES[name], kvjax.Quantized(POLICIES[name]), kvjax.ByHead((POLICIES[name],))):
        with pytest.raises(ValueError, match=f"HostMemory: .*{type(POLICIES[name]).__name__}.* recalls nothing"):
            kvjax.HostMemory(policy)


@pytest.mark.parametrize("around", [lambda policy: policy, kvjax.Quantized], ids=["plain", "quantized"])
def test_heads_that_tell_the_next_layer_something_are_refused(around):
    telling = BalanceKVReference(20, **WINDOW, block_size=8, needles=6)
    cache = kvjax.init(kvjax.ByHead((EXACT, around(telling))), make_spec(layer=1, layers=2), row_keys())
    keys, values, _ = prompt_of(make_stream(), LENGTHS)
    with pytest.raises(ValueError, match="ByHead: .*BalanceKVReference.* tells the next layer something; use ByLayer"):
        kvjax.prefill(cache, keys, values, jnp.array(LENGTHS))
