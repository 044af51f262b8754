"""Every policy in every combinator, and combinators in each other, quantized and not."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.budget import abstract_cache
from tests.kvjax.support import (
    BATCH,
    LENGTHS,
    NEW,
    POLICIES,
    WINDOW,
    Stream,
    after,
    begin,
    decoded,
    each,
    go,
    make_spec,
    make_stream,
    prefilled,
    prompt_of,
    row_keys,
)

RETRIEVAL = [name for name, policy in POLICIES.items() if policy.is_retrieval]
EXACT = POLICIES["exact"]
HEAD = 1  # the head of `ByHead` that has the policy; head 0 is exact

every_policy = pytest.mark.parametrize("name", each(POLICIES, quick=("uniform",)))
every_retrieval = pytest.mark.parametrize("name", each(RETRIEVAL, quick=("quest",)))
plain_and_quantized = pytest.mark.parametrize("kv_dtype", each([None, "int8"], quick=("int8",)))


@functools.cache
def run(policy, layer=0, layers=1, kv_dtype=None):
    """Returns the cache and the outputs after the prompt and the decoding of the standard stream."""
    return check_run(*decoded(policy, spec=make_spec(layer=layer, layers=layers, kv_dtype=kv_dtype)))


@functools.cache
def run_head(policy, head=HEAD, kv_dtype=None):
    """As `run`, with this KV head alone and the randomness that `ByHead` gives to a group whose first head it is."""
    keys, values, queries = make_stream()
    stream = Stream(keys[:, :, head : head + 1], values[:, :, head : head + 1], of_head(queries, head))
    rngs = jax.vmap(lambda key: jax.random.fold_in(key, head))(row_keys())
    spec = make_spec(kv_heads=1, query_heads=2, kv_dtype=kv_dtype)
    state = begin(policy, spec, rngs, *prompt_of(stream, LENGTHS), LENGTHS)
    return check_run(*go(*state, after(stream, LENGTHS)))


def check_run(outputs, _, cache, counters):
    kvjax.raise_faults((cache, counters))
    assert np.isfinite(outputs).all()
    assert counters.num_tokens.tolist() == [length + NEW for length in LENGTHS]
    return cache, outputs


def of_head(outputs, head=HEAD):
    return outputs[:, :, 2 * head : 2 * head + 2]


def assert_equal(outputs, expected):
    np.testing.assert_allclose(outputs, expected, atol=1e-5)


# --- one combinator ---


@pytest.mark.parametrize("kv_dtype, max_error", [("int8", 0.05), ("fp8", 0.2)])
@every_policy
def test_eight_bits_are_near_the_unquantized_cache(name, kv_dtype, max_error):
    """Rounding may change a choice and with it some outputs, so the median counts."""
    # Odd query heads are zeros, whose outputs do not depend on the keys.
    outputs, expected = (run(POLICIES[name], kv_dtype=one)[1][:, :, ::2] for one in (kv_dtype, None))
    error = np.linalg.norm(outputs - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert np.median(error) < max_error


@plain_and_quantized
@every_policy
def test_a_head_equals_a_cache_of_that_head_alone(name, kv_dtype):
    cache, outputs = run(kvjax.ByHead((EXACT, POLICIES[name])), kv_dtype=kv_dtype)
    (exact, exact_expected), (alone, expected) = (
        run_head(policy, head, kv_dtype) for head, policy in enumerate((EXACT, POLICIES[name]))
    )
    assert_equal(of_head(outputs), expected)
    assert_equal(of_head(outputs, 0), exact_expected)
    if name != "exact":  # the end of the staged tokens is read once
        assert kvjax.read_bytes(cache) == kvjax.read_bytes(alone) + kvjax.read_bytes(exact) - 4 * BATCH
        # Fault counters of rows exist once; each group has the indices of its heads.
        faults = kvjax.cache_bytes((cache.reused, cache.not_finite, cache.policy_faults)).device
        sizes = [kvjax.cache_bytes(one).device for one in (alone, exact)]
        assert kvjax.cache_bytes(cache).device == sum(sizes) - faults + 4 * 2


def test_layer_combinators_leave_no_trace_in_the_cache():
    specs = [make_spec(layer=layer, layers=2) for layer in (0, 1)]
    exact, _ = abstract_cache(EXACT, specs[0])
    for policy in POLICIES.values():
        for combined in (kvjax.ByLayer((EXACT, policy)), kvjax.FirstLayers(1, policy, EXACT)):
            caches = [abstract_cache(combined, spec)[0] for spec in specs]
            assert caches == [exact, abstract_cache(policy, specs[1])[0]]


# --- combinators in combinators ---


@plain_and_quantized
@every_retrieval
def test_heads_in_host_memory_do_not_depend_on_the_order_of_combinators(name, kv_dtype):
    hosted, expected = run_head(kvjax.HostMemory(POLICIES[name]), kv_dtype=kv_dtype)
    assert_equal(run_head(POLICIES[name], kv_dtype=kv_dtype)[1], expected)
    outside = kvjax.HostMemory(kvjax.ByHead((EXACT, POLICIES[name])))
    inside = kvjax.ByHead((EXACT, kvjax.HostMemory(POLICIES[name])))
    for policy in (outside, inside):
        cache, outputs = run(policy, kv_dtype=kv_dtype)
        assert_equal(of_head(outputs), expected)
        assert_equal(of_head(outputs, 0), run_head(EXACT, 0, kv_dtype)[1])
        assert kvjax.cache_bytes(cache).host == kvjax.cache_bytes(hosted).host


# --- errors ---


def test_by_head_refuses_policies_that_pass_state_between_layers():
    policy = kvjax.ByHead((EXACT, kvjax.BalanceKV(20, **WINDOW, block_size=8, needles=6)))
    with pytest.raises(ValueError, match="ByHead: .*BalanceKV.* passes state to the next layer, use ByLayer"):
        prefilled(policy, spec=make_spec(layer=1, layers=2))
