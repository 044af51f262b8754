"""Layers and heads with policies of their own."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from tests.kvjax.support import (
    LENGTHS,
    POLICIES,
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

EXACT, WINDOW = POLICIES["exact"], POLICIES["streaming_llm"]


def run(policy, spec, stream=None):
    stream = make_stream() if stream is None else stream
    state = begin(policy, spec, row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    return go(policy, state, after(stream, LENGTHS))


def test_by_layer_does_in_each_layer_what_its_policy_does():
    policy = kvjax.by_layer([EXACT, WINDOW])
    for layer, name in enumerate(("exact", "streaming_llm")):
        spec = make_spec(layer=layer, layers=2)
        state, outputs, weights = run(policy, spec)
        np.testing.assert_array_equal(outputs, whole_run(name)[1])
        np.testing.assert_array_equal(weights, whole_run(name)[2])
        assert kvjax.row_bytes(policy, spec) == kvjax.row_bytes(POLICIES[name], make_spec())
        assert policy.read_bytes(state) == POLICIES[name].read_bytes(whole_run(name)[0])


def test_by_head_does_in_each_head_what_its_policy_does():
    policy = kvjax.by_head([[WINDOW, EXACT]])
    state, outputs, weights = run(policy, make_spec())
    for head, name in enumerate(("streaming_llm", "exact")):
        own = slice(2 * head, 2 * head + 2)
        np.testing.assert_allclose(outputs[:, :, own], whole_run(name)[1][:, :, own], atol=1e-6)
        np.testing.assert_allclose(weights[:, :, head], whole_run(name)[2][:, :, head], atol=1e-6)
    # Real bytes: half of each, where a buffer belongs to heads.
    both = kvjax.row_bytes(policy, make_spec())
    halves = sum(
        kvjax.row_bytes(POLICIES[name], make_spec(kv_heads=1, query_heads=2)) for name in ("exact", "streaming_llm")
    )
    assert both == halves
    assert both < kvjax.row_bytes(EXACT, make_spec())
    assert policy.read_bytes(state) == sum(group.policy.read_bytes(group.cache) for group in state.cache)


def test_heads_in_any_order_come_back_in_theirs():
    stream = make_stream(kv_heads=4, query_heads=8)
    spec = make_spec(kv_heads=4, query_heads=8)
    policy = kvjax.by_head([[WINDOW, EXACT, EXACT, WINDOW]])
    _, outputs, weights = run(policy, spec, stream)
    for name, heads in {"exact": (1, 2), "streaming_llm": (0, 3)}.items():
        _, own_outputs, own_weights = run(POLICIES[name], spec, stream)
        for head in heads:
            queries = slice(2 * head, 2 * head + 2)
            np.testing.assert_allclose(outputs[:, :, queries], own_outputs[:, :, queries], atol=1e-6)
            np.testing.assert_allclose(weights[:, :, head], own_weights[:, :, head], atol=1e-6)


def test_heads_of_two_groups_draw_apart():
    # The same tokens in both heads; were randomness shared, both groups would keep the same.
    one, other = (kvjax.uniform(20, sinks=2, recent=8, period=8) for _ in range(2))
    stream = make_stream()
    stream = Stream(np.repeat(stream.keys[:, :, :1], 2, axis=2), stream.values, stream.queries)
    _, _, weights = run(kvjax.by_head([[one, other]]), make_spec(), stream)
    assert np.any((weights[0, -1, 0] > 0) != (weights[0, -1, 1] > 0))


def test_rows_can_be_taken_and_inserted():
    policy = kvjax.by_head([[WINDOW, EXACT]])
    state, _, _ = run(policy, make_spec())
    taken = kvjax.take_rows(state, jax.numpy.array([2, 0, 1]))
    back = kvjax.take_rows(taken, jax.numpy.array([1, 2, 0]))
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(one, other)
    kvjax.check(state)


def test_fit_bytes_goes_by_the_average_over_layers():
    make = lambda budget: kvjax.by_layer([EXACT, kvjax.streaming_llm(budget, sinks=2, period=4)])  # noqa: E731
    spec = make_spec(layers=2)
    exact = kvjax.row_bytes(EXACT, spec)
    limit = (exact + kvjax.row_bytes(kvjax.streaming_llm(20, sinks=2, period=4), spec)) // 2
    fitted = kvjax.fit_bytes(make, spec, limit)
    sizes = [kvjax.row_bytes(fitted, dataclasses.replace(spec, layer=layer)) for layer in range(2)]
    assert sizes[0] == exact
    assert sizes[1] == kvjax.row_bytes(kvjax.streaming_llm(20, sinks=2, period=4), spec)


@pytest.mark.parametrize(
    "policy, spec, message",
    [
        (lambda: kvjax.by_layer([EXACT]), make_spec(layers=2), "by_layer: 1 policies were given for layers=2"),
        (lambda: kvjax.by_head([[EXACT] * 2]), make_spec(layers=2), "by_head: policies were given for 1 layers"),
        (lambda: kvjax.by_head([[EXACT]]), make_spec(), "by_head: 1 policies were given for kv_heads=2"),
        (lambda: kvjax.by_layer([]), make_spec(), "needs at least one policy"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(policy, spec, message):
    with pytest.raises(ValueError, match=message):
        policy().init(spec, row_keys())


def test_by_head_refuses_policies_that_speak_across_layers():
    needle = kvjax.balancekv(20, sinks=2, recent=8, period=8, variant="reference", block_size=8, needles=4)
    policy = kvjax.by_head([[needle] * 2] * 3)
    stream = make_stream()
    with pytest.raises(ValueError, match="by_head: balancekv.* carries something from layer to layer"):
        begin(policy, make_spec(layer=1, layers=3), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
