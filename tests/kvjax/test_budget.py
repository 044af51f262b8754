"""Slots of budgets: the smallest budget of a policy, and the largest one within a number of bytes."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.budget import abstract_cache, fit_bytes, limited_bytes, min_budget, row_bytes
from kvjax.registry import POLICIES, PolicyChoice, resolve_policy
from kvjax.spec import TILE, round_to_tiles
from tests.kvjax.support import each, make_spec

NAMES = [name for name in POLICIES if name != "exact"]
VARIANTS = [
    *("balancekv_theory:bins=6", "cam:sinks=0", "clustergen:sinks=5", "clustergen:sinks=4,recent=20"),
    *("clusterkv:sinks=0", "clusterkv:host_steps=1,full_layers=1", "h2o:recent=16"),
    *("kvzap:reserve_decode_slots=true,recent=32", "pyramidkv:variant=kvpress", "quest:host_steps=4"),
    *("snapkv:alpha_safeguard=0.2", "streaming_llm:sinks=9", "uniform:recent=7", "subgen:clusters=9"),
    *("subgen:light_values=0", "subgen:per_cluster=4", "subgen:samples=20", "subgen:samples=30,clusters=20"),
]


@pytest.mark.parametrize("prompt", [7, 3000])
@pytest.mark.parametrize("text", [*NAMES, *VARIANTS])
def test_the_smallest_budget_is_the_smallest_that_is_accepted(text, prompt):
    spec, make = make_spec(1, prompt, layers=2), PolicyChoice.parse(text).make
    smallest = min_budget(make, spec)
    abstract_cache(make(smallest), spec)
    for refused in range(max(smallest - 3, 1), smallest):
        with pytest.raises(ValueError, match="budget|slots"):
            abstract_cache(make(refused), spec)


def test_the_smallest_budget_of_combined_policies():
    heads = ((1.0, 0.001), (0.5, 0.5))
    for policy, smallest in (
        (kvjax.ByLayer((kvjax.Exact(), kvjax.Uniform(80))), 69),
        (kvjax.ByHead((kvjax.H2O(80), kvjax.StreamingLLM(80))), 5),
        (kvjax.FirstLayers(1, kvjax.KeyDiff(80), kvjax.Uniform(500)), 20),
        (kvjax.HeadBudgets(kvjax.AdaKV(kvjax.KeyDiff(80)), heads), 20),
    ):
        assert policy.min_budget() == smallest
    # The recent tokens are a share of the budget.
    assert min_budget(lambda slots: kvjax.Uniform(slots, sinks=3, recent=slots // 4), make_spec()) == 5


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    name=st.sampled_from(NAMES),
    head_dim=st.sampled_from([16, 64, 128]),
    prompt=st.integers(1, 6000),
    new=st.integers(0, 300),
    layers=st.integers(1, 3),
    kv_dtype=st.sampled_from([None, "int8", "fp8", "int4", ("int4", "int2")]),
    share=st.floats(0.02, 1.2),
)
def test_the_largest_budget_within_a_limit_needs_few_sizes(name, head_dim, prompt, new, layers, kv_dtype, share):
    """Two sizes give a line on which the bytes of every budget are, apart from tiles and size classes."""
    frequencies = (1.0,) * (head_dim // 2)
    spec = make_spec(1, prompt, new, layers=layers, kv_dtype=kv_dtype, head_dim=head_dim, rope_frequencies=frequencies)
    measured = []

    def make(slots):
        measured.append(slots)
        return POLICIES[name](slots)

    limit = int(share * spec.full_cache_bytes(spec.capacity))
    smallest = min_budget(POLICIES[name], spec)
    if limited_bytes(POLICIES[name](smallest), spec) > limit:
        with pytest.raises(ValueError, match=rf"limit={limit} .*too small: budget={smallest} already takes"):
            fit_bytes(make, spec, limit)
        return
    slots = fit_bytes(make, spec, limit).budget
    assert limited_bytes(make(slots), spec) <= limit and len(set(measured)) <= 24
    larger = next(one for one in range(slots + 1, slots + 2 * TILE) if round_to_tiles(one) > slots)
    assert larger > -(-spec.capacity // TILE) * TILE or limited_bytes(make(larger), spec) > limit


# Slots of 25% of a full cache in bfloat16 and in int4, and of 50% in int4 and int2, of 2,064 tokens.
SLOTS = {
    "streaming_llm": (448, 1696, 2064),
    "uniform": (432, 1520, 2064),
    "attention_matching": (496, 1824, 2064),
    "balancekv": (544, 2000, 2064),
    "balancekv_theory": (459, 1584, 2064),
    "cam": (432, 1584, 2064),
    "chelsea": (320, 592, 1344),
    "clustergen": (448, 1696, 2064),
    "clusterkv": (131, 528, 1872),
    "clusterkv_residual": (272, 1168, 2064),
    "h2o": (432, 1584, 2064),
    "infinigen": (240, 1152, 2064),
    "kvzap": (480, 1808, 2064),
    "pyramidkv": (431, 1808, 2064),
    "quest": (127, 639, 2000),
    "snapkv": (432, 1808, 2064),
    "subgen": (416, 1408, 2064),
    "subgen_mean": (312, 606, 1344),
    **dict.fromkeys(("compactor", "cur", "expected_attention"), (496, 1872, 2064)),
    **dict.fromkeys(("keydiff", "knorm", "kvgrad", "kvzip", "lagkv", "leverage_scores", "tova"), (496, 1872, 2064)),
}


@pytest.mark.parametrize("name", each(NAMES, quick=("subgen", "chelsea", "snapkv", "clusterkv")))
def test_slots_of_a_share(name):
    spec = make_spec(1, 2003, 61, layers=2, dtype=jnp.bfloat16)
    shares = ((None, "25%"), ("int4", "25%"), (("int4", "int2"), "50%"))
    specs = [(dataclasses.replace(spec, kv_dtype=kv_dtype), share) for kv_dtype, share in shares]
    assert tuple(resolve_policy(name, share, one, 2064).budget for one, share in specs) == SLOTS[name]


def test_bytes_above_the_result_are_not_measured_where_a_policy_refuses_them():
    """SubGen's mean clusters are at most 2**14."""
    spec = make_spec(1, 100_000, kv_dtype="int4", dtype=jnp.bfloat16)
    limit = int(limited_bytes(kvjax.SubGenMean(16_000), spec))
    assert fit_bytes(kvjax.SubGenMean, spec, limit).budget == 16_000
    with pytest.raises(ValueError, match="clusters=.* must be at most 16384"):
        fit_bytes(kvjax.SubGenMean, spec, 2 * limit)


def test_large_caches_of_top_k_policies_are_compacted_less_often():
    for tokens, compact_every in ((2048, 16), (32768, 64), (131072, 128)):
        spec = make_spec(1, tokens, layers=2)
        policy = resolve_policy("snapkv", "25%", spec, tokens)
        assert policy.compact_every == compact_every
        assert resolve_policy(kvjax.SnapKV, "25%", spec, tokens) == policy
        assert row_bytes(policy, spec) <= 0.25 * spec.full_cache_bytes(tokens)
        assert resolve_policy("snapkv:compact_every=4", "25%", spec, tokens).compact_every == 4
        assert resolve_policy("snapkv", tokens // 4, spec, tokens).compact_every == 16
