"""`ByLayer`, `FirstLayers` and `ByHead`: different policies in the layers and heads of one model."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.budget import row_bytes
from tests.kvjax.support import POLICIES, WINDOW, Stream, decoded, make_spec, make_stream, row_keys

EXACT, SLIDING = POLICIES["exact"], POLICIES["streaming_llm"]


@pytest.mark.parametrize("first_layers, layers, exact_layers", [(2, 4, 2), (1, 2, 1), (0, 2, 0), (3, 2, 2)])
def test_first_layers_have_the_first_policy(first_layers, layers, exact_layers):
    policy = kvjax.FirstLayers(first_layers, SLIDING, EXACT)
    policies = [kvjax.init(policy, make_spec(layer=layer, layers=layers), row_keys()).policy for layer in range(layers)]
    assert policies == [EXACT] * exact_layers + [SLIDING] * (layers - exact_layers)


def test_first_layers_requires_what_either_policy_requires():
    both = kvjax.FirstLayers(1, POLICIES["quest"], POLICIES["snapkv"])
    assert both.is_retrieval and both.requires == kvjax.Requirements(prompt_queries=6, entire_prompt=True)
    assert not kvjax.FirstLayers(0, SLIDING, POLICIES["quest"]).is_retrieval


def test_heads_of_one_policy_need_not_be_adjacent():
    stream, spec = make_stream(kv_heads=4, query_heads=8), make_spec(kv_heads=4, query_heads=8)
    _, outputs, weights = decoded(kvjax.ByHead((SLIDING, EXACT, EXACT, SLIDING)), stream, spec)
    for name, heads in {"exact": (1, 2), "streaming_llm": (0, 3)}.items():
        _, all_outputs, all_weights = decoded(POLICIES[name], stream, spec)
        for head in heads:
            queries = slice(2 * head, 2 * head + 2)
            np.testing.assert_allclose(outputs[:, :, queries], all_outputs[:, :, queries], atol=1e-6)
            np.testing.assert_allclose(weights[:, :, head], all_weights[:, :, head], atol=1e-6)


def test_groups_of_heads_draw_different_random_numbers():
    # Both heads get the same tokens. `compact_every` makes two groups and does not change which tokens are kept.
    policy = kvjax.ByHead((kvjax.Uniform(20, **WINDOW), kvjax.Uniform(20, **WINDOW | {"compact_every": 4})))
    assert len(policy.groups()) == 2
    stream = make_stream()
    stream = Stream(np.repeat(stream.keys[:, :, :1], 2, axis=2), stream.values, stream.queries)
    _, _, weights = decoded(policy, stream)
    assert np.any((weights[0, -1, 0] > 0) != (weights[0, -1, 1] > 0))


def test_fit_bytes_uses_the_average_over_layers():
    def sliding(budget):
        return kvjax.StreamingLLM(budget, sinks=2, compact_every=4)

    spec = make_spec(layers=2)
    exact = row_bytes(EXACT, spec)
    limit = (exact + row_bytes(sliding(20), spec)) // 2
    policy = kvjax.fit_bytes(lambda budget: kvjax.ByLayer((EXACT, sliding(budget))), spec, limit)
    sizes = [row_bytes(policy, dataclasses.replace(spec, layer=layer)) for layer in range(2)]
    assert sizes == [exact, row_bytes(sliding(20), spec)]


@pytest.mark.parametrize(
    "policy",
    [
        kvjax.Chelsea(24, sinks=2, recent=4, compact_every=4),
        kvjax.AdaKV(kvjax.LeverageScores(24, compact_every=4), 0.0),
        kvjax.HostMemory(kvjax.Quest(24), 1),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_layers_have_buffers_of_their_own_budget(policy):
    """The factors apply to any policy with a budget, and to the policy inside a combinator."""
    scaled = kvjax.LayerBudgets(policy, (0.0, 0.5, 1.75))
    alone = getattr(policy, "policy", policy)
    budgets = []
    for layer in range(3):
        cache = kvjax.init(scaled, make_spec(layer=layer, layers=3), row_keys())
        inner = getattr(cache.policy, "policy", cache.policy)
        budgets.append(inner.budget)
        assert dataclasses.replace(inner, budget=alone.budget) == alone
    with pytest.raises(ValueError, match="budget="):  # the first layer has the smallest budget that is accepted
        dataclasses.replace(alone, budget=budgets[0] - 1)
    assert budgets[1:] == [max(16, budgets[0]), 40]
