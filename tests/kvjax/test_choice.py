"""Layers and heads with policies of their own."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.budget import row_bytes
from kvjax.policies.balancekv_reference import BalanceKVReference
from tests.kvjax.support import (
    LENGTHS,
    POLICIES,
    WINDOW,
    Stream,
    after,
    begin,
    go,
    make_spec,
    make_stream,
    prompt_of,
    row_keys,
    whole_run,
)

EXACT, SLIDING = POLICIES["exact"], POLICIES["streaming_llm"]


def run(policy, spec, stream=None):
    stream = make_stream() if stream is None else stream
    cache = begin(policy, spec, row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    return go(cache, after(stream, LENGTHS))


def test_by_layer_does_in_each_layer_what_its_policy_does():
    policy = kvjax.ByLayer((EXACT, SLIDING))
    for layer, name in enumerate(("exact", "streaming_llm")):
        spec = make_spec(layer=layer, layers=2)
        cache, outputs, weights = run(policy, spec)
        assert cache.policy == POLICIES[name]
        np.testing.assert_array_equal(outputs, whole_run(name)[1])
        np.testing.assert_array_equal(weights, whole_run(name)[2])
        assert row_bytes(policy, spec) == row_bytes(POLICIES[name], make_spec())
        assert kvjax.read_bytes(cache) == kvjax.read_bytes(whole_run(name)[0])


def test_the_first_layers_do_what_theirs_does_and_the_others_what_theirs_does():
    policy = kvjax.FirstLayers(2, SLIDING, EXACT)
    own = [kvjax.init(policy, make_spec(layer=layer, layers=4), row_keys()).policy for layer in range(4)]
    assert own == [EXACT, EXACT, SLIDING, SLIDING]
    # By default they keep everything; none may be full, or all.
    assert kvjax.init(kvjax.FirstLayers(1, SLIDING), make_spec(layers=2), row_keys()).policy == kvjax.Exact()
    assert kvjax.init(kvjax.FirstLayers(0, SLIDING), make_spec(layers=2), row_keys()).policy == SLIDING
    assert kvjax.init(kvjax.FirstLayers(3, SLIDING, EXACT), make_spec(layer=1, layers=2), row_keys()).policy == EXACT
    # What must be known of all layers together.
    both = kvjax.FirstLayers(1, POLICIES["quest"], POLICIES["snapkv"])
    assert both.is_retrieval and both.prompt_queries == 6 and not both.observes_attention and not both.streams
    assert not kvjax.FirstLayers(0, SLIDING, POLICIES["quest"]).is_retrieval


def test_by_head_does_in_each_head_what_its_policy_does():
    policy = kvjax.ByHead((SLIDING, EXACT))
    cache, outputs, weights = run(policy, make_spec())
    for head, name in enumerate(("streaming_llm", "exact")):
        own = slice(2 * head, 2 * head + 2)
        np.testing.assert_allclose(outputs[:, :, own], whole_run(name)[1][:, :, own], atol=1e-6)
        np.testing.assert_allclose(weights[:, :, head], whole_run(name)[2][:, :, head], atol=1e-6)
    # Real bytes: half of each, where a buffer belongs to heads; of the seven numbers of every cache one of each.
    both, half = row_bytes(policy, make_spec()), make_spec(kv_heads=1, query_heads=2)
    assert both == row_bytes(SLIDING, half) + row_bytes(EXACT, half) - 7 * 4
    assert both < row_bytes(EXACT, make_spec())
    # The bound of what is staged is read once.
    alone = [kvjax.init(of_head, make_spec(kv_heads=1, query_heads=2), row_keys()) for of_head in (SLIDING, EXACT)]
    assert kvjax.read_bytes(cache) == sum(kvjax.read_bytes(one) for one in alone) - 4 * len(LENGTHS)


def test_heads_in_any_order_come_back_in_theirs():
    stream = make_stream(kv_heads=4, query_heads=8)
    spec = make_spec(kv_heads=4, query_heads=8)
    policy = kvjax.ByHead((SLIDING, EXACT, EXACT, SLIDING))
    _, outputs, weights = run(policy, spec, stream)
    for name, heads in {"exact": (1, 2), "streaming_llm": (0, 3)}.items():
        _, own_outputs, own_weights = run(POLICIES[name], spec, stream)
        for head in heads:
            queries = slice(2 * head, 2 * head + 2)
            np.testing.assert_allclose(outputs[:, :, queries], own_outputs[:, :, queries], atol=1e-6)
            np.testing.assert_allclose(weights[:, :, head], own_weights[:, :, head], atol=1e-6)


def test_heads_of_two_groups_draw_apart():
    # The same tokens in both heads; were randomness shared, both groups would keep the same.
    # Moments of compaction do not change what is kept, but make two groups.
    policy = kvjax.ByHead((kvjax.Uniform(20, **WINDOW), kvjax.Uniform(20, **WINDOW | {"compact_every": 4})))
    assert len(policy.groups) == 2
    stream = make_stream()
    stream = Stream(np.repeat(stream.keys[:, :, :1], 2, axis=2), stream.values, stream.queries)
    _, _, weights = run(policy, make_spec(), stream)
    assert np.any((weights[0, -1, 0] > 0) != (weights[0, -1, 1] > 0))


def test_rows_can_be_taken_and_inserted():
    cache, _, _ = run(kvjax.ByHead((SLIDING, EXACT)), make_spec())
    taken = kvjax.take_rows(cache, jax.numpy.array([2, 0, 1]))
    back = kvjax.take_rows(taken, jax.numpy.array([1, 2, 0]))
    for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(one, other)
    kvjax.raise_faults(cache)


def test_fit_bytes_goes_by_the_average_over_layers():
    sliding = lambda budget: kvjax.StreamingLLM(budget, sinks=2, compact_every=4)  # noqa: E731
    make = lambda budget: kvjax.ByLayer((EXACT, sliding(budget)))  # noqa: E731
    spec = make_spec(layers=2)
    exact = row_bytes(EXACT, spec)
    limit = (exact + row_bytes(sliding(20), spec)) // 2
    fitted = kvjax.fit_bytes(make, spec, limit)
    sizes = [row_bytes(fitted, dataclasses.replace(spec, layer=layer)) for layer in range(2)]
    assert sizes[0] == exact
    assert sizes[1] == row_bytes(sliding(20), spec)


@pytest.mark.parametrize(
    "policy, spec, message",
    [
        (lambda: kvjax.ByLayer((EXACT,)), make_spec(layers=2), "ByLayer: 1 policies were given for layers=2"),
        (lambda: kvjax.ByHead((EXACT,)), make_spec(), "ByHead: 1 policies were given for kv_heads=2"),
        (lambda: kvjax.ByLayer(()), make_spec(), "at least one policy"),
        (lambda: kvjax.ByHead(()), make_spec(), "at least one policy"),
        (lambda: kvjax.ByHead((EXACT, "exact")), make_spec(), r"policies=.*it must be \(Policy, \.\.\.\)"),
        (lambda: kvjax.ByLayer([EXACT]), make_spec(), r"policies=.*it must be \(Policy, \.\.\.\)"),
        (lambda: kvjax.FirstLayers(-1, EXACT), make_spec(), "layers=-1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(policy, spec, message):
    with pytest.raises(ValueError, match=message):
        kvjax.init(policy(), spec, row_keys())


def test_by_head_refuses_policies_that_speak_across_layers():
    needle = BalanceKVReference(20, **WINDOW, block_size=8, needles=4)
    policy = kvjax.ByHead((needle, needle))
    stream = make_stream()
    with pytest.raises(ValueError, match="ByHead: BalanceKVReference.* tells the next layer something; use ByLayer"):
        begin(policy, make_spec(layer=1, layers=3), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
