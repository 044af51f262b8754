"""`ByLayer`, `FirstLayers`, `ByHead` and `HeadBudgets`: different policies in the layers and heads of one model."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.budget import row_bytes
from kvjax.combinators.head_budgets import _divide, load_shares, retrieving_heads, save_shares
from tests.kvjax.support import POLICIES, WINDOW, decoded, make_spec, make_stream, row_keys

EXACT, SLIDING = POLICIES["exact"], POLICIES["streaming_llm"]


@pytest.mark.parametrize("first_layers, layers, exact_layers", [(2, 4, 2), (1, 2, 1), (0, 2, 0), (3, 2, 2)])
def test_first_layers_have_the_first_policy(first_layers, layers, exact_layers):
    policy = kvjax.FirstLayers(first_layers, SLIDING, EXACT)
    specs = [make_spec(layer=layer, layers=layers) for layer in range(layers)]
    policies = [kvjax.init(policy, spec, row_keys())[0].policy for spec in specs]
    assert policies == [EXACT] * exact_layers + [SLIDING] * (layers - exact_layers)


def test_first_layers_requires_what_either_policy_requires():
    both = kvjax.FirstLayers(1, POLICIES["quest"], POLICIES["snapkv"])
    assert both.is_retrieval and both.requires == kvjax.Requirements(prompt_queries=6, entire_prompt=True)
    assert not kvjax.FirstLayers(0, SLIDING, POLICIES["quest"]).is_retrieval


def test_heads_of_one_policy_need_not_be_adjacent():
    stream, spec = make_stream(kv_heads=4, query_heads=8), make_spec(kv_heads=4, query_heads=8)
    outputs, weights, *_ = decoded(kvjax.ByHead((SLIDING, EXACT, EXACT, SLIDING)), stream, spec)
    for name, heads in {"exact": (1, 2), "streaming_llm": (0, 3)}.items():
        all_outputs, all_weights, *_ = decoded(POLICIES[name], stream, spec)
        for head in heads:
            queries = slice(2 * head, 2 * head + 2)
            np.testing.assert_allclose(outputs[:, :, queries], all_outputs[:, :, queries], atol=1e-6)
            np.testing.assert_allclose(weights[:, :, head], all_weights[:, :, head], atol=1e-6)


def test_groups_of_heads_draw_different_random_numbers():
    # Both heads get the same tokens. `compact_every` makes two groups and does not change which tokens are kept.
    policy = kvjax.ByHead((kvjax.Uniform(20, **WINDOW), kvjax.Uniform(20, **WINDOW | {"compact_every": 4})))
    assert len(policy.groups()) == 2
    stream = make_stream()
    _, weights, *_ = decoded(policy, stream._replace(keys=np.repeat(stream.keys[:, :, :1], 2, axis=2)))
    assert np.any((weights[0, -1, 0] > 0) != (weights[0, -1, 1] > 0))


def test_fit_bytes_uses_the_average_over_layers():
    sliding, spec = functools.partial(kvjax.StreamingLLM, sinks=2, compact_every=4), make_spec(layers=2)
    expected = [row_bytes(policy, spec) for policy in (EXACT, sliding(20))]
    policy = kvjax.fit_bytes(lambda budget: kvjax.ByLayer((EXACT, sliding(budget))), spec, sum(expected) // 2)
    assert [row_bytes(policy, dataclasses.replace(spec, layer=layer)) for layer in range(2)] == expected


# --- head budgets ---

ANY_POLICY = [
    kvjax.Chelsea(24, sinks=2, recent=4, compact_every=4),
    kvjax.AdaKV(kvjax.LeverageScores(24, compact_every=4), 0.0),
    kvjax.HostMemory(kvjax.Quest(24), 1),
]


def init(policy, spec):
    return kvjax.init(policy, spec, row_keys())[0]


@pytest.mark.parametrize("policy", ANY_POLICY, ids=lambda policy: type(policy).__name__)
def test_layers_have_buffers_of_their_own_budget(policy):
    """The shares apply to any policy with a budget, and to the policy inside a combinator."""
    scaled = kvjax.HeadBudgets(policy, ((0.0, 0.0), (0.5, 0.5), (1.75, 1.75)))
    alone, budgets = getattr(policy, "policy", policy), []
    for layer in range(3):
        cache = init(scaled, make_spec(prompt=200, layer=layer, layers=3))
        inner = getattr(cache.policy, "policy", cache.policy)
        budgets.append(inner.budget)
        assert dataclasses.replace(inner, budget=alone.budget) == alone
    with pytest.raises(ValueError, match="budget="):  # the first layer has the smallest budget that is accepted
        dataclasses.replace(alone, budget=budgets[0] - 1)
    assert budgets[1:] == [max(16, budgets[0]), 56]


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_heads_have_the_outputs_of_their_policies(kv_dtype):
    """Full heads are exact, the others equal the policy alone with the remaining slots."""
    policy = kvjax.Chelsea(40, sinks=2, recent=8, compact_every=8, chunk=8)
    spec, stream = make_spec(layers=2, kv_dtype=kv_dtype), make_stream()
    budgets = kvjax.HeadBudgets(policy, retrieving_heads(2, 2, [(0, 1), (1, 0)]))
    remaining = dataclasses.replace(policy, budget=8 * ((4 * 40 - 2 * spec.capacity) // 2 // 8))
    exact, alone = (decoded(one, stream, spec)[0] for one in (kvjax.Exact(8), remaining))
    heads = slice(0, 2), slice(2, 4)
    for layer, (other, full) in enumerate((heads, heads[::-1])):
        outputs, *_ = decoded(budgets, stream, dataclasses.replace(spec, layer=layer))
        np.testing.assert_allclose(outputs[:, :, full], exact[:, :, full], atol=1e-5)
        np.testing.assert_allclose(outputs[:, :, other], alone[:, :, other], atol=1e-5)


def test_layers_with_other_heads_share_programs():
    """Eight layers with a full head each, every time another one, have one structure; two full heads have another."""
    full = [(layer, layer % 4) for layer in range(8)] + [(7, 1)]
    budgets = kvjax.HeadBudgets(kvjax.Uniform(40, **WINDOW), retrieving_heads(8, 4, full))
    spec = make_spec(kv_heads=4, query_heads=8, layers=8)
    caches = [init(budgets, dataclasses.replace(spec, layer=layer)) for layer in range(8)]
    structures = [jax.tree.structure(cache) for cache in caches]
    assert len(set(structures[:7])) == 1 and structures[7] != structures[0]
    chex.assert_trees_all_equal_shapes_and_dtypes(*caches[:7])


two_heads = st.lists(st.floats(0, 10), min_size=2, max_size=2)


@given(
    shares=st.lists(two_heads, min_size=1, max_size=4).filter(lambda rows: max(map(max, rows)) > 0),
    budget=st.integers(40, 300),
)
@settings(deadline=None, max_examples=30)
def test_slots_of_all_heads_are_the_budget(shares, budget):
    """Together at most the budget, in proportion to the shares, and never more than the capacity in a head."""
    capacity = 256
    slots = np.stack(_divide(tuple(map(tuple, shares)), budget, capacity))
    share = np.array(shares)
    assert slots.sum() <= budget * share.size and slots.min() >= 0 and slots.max() <= capacity
    bounded = slots < capacity
    unused = budget * share.size - slots.sum()
    assert unused <= share.size or not (share[bounded] > 0).any()
    assert np.all(np.diff(slots.ravel()[np.argsort(share, axis=None)]) >= 0)


def test_layers_without_shares_have_the_budget():
    budgets = kvjax.HeadBudgets(kvjax.Uniform(40, **WINDOW), (None, (0.0, 1.0)))
    spec = make_spec(prompt=200, layers=2)
    assert init(budgets, spec).policy == kvjax.Uniform(40, **WINDOW)
    policies = init(budgets, dataclasses.replace(spec, layer=1)).policy.policies
    assert policies[1].budget == 80 > policies[0].budget


def test_shares_and_files_of_shares_are_a_setting_of_a_choice(tmp_path):
    shares = ((1.0, 0.001), None)
    save_shares(tmp_path / "heads.json", shares, {"model": "none"})
    assert load_shares(tmp_path / "heads.json") == shares
    choice = kvjax.PolicyChoice.parse(f"uniform:heads={tmp_path / 'heads.json'}@140 slots")
    assert choice.make() == kvjax.HeadBudgets(kvjax.Uniform(140), shares)
    choice = kvjax.PolicyChoice.parse("chelsea:compact_every=8").with_settings(compact_every=4, heads=((1.0, 0.5),))
    assert choice.make(400) == kvjax.HeadBudgets(kvjax.Chelsea(400, compact_every=8), ((1.0, 0.5),))
