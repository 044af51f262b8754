"""Invalid settings of policies and combinators are refused with a message that names the setting.

`test_values` refuses invalid compaction periods and malformed texts of every policy.
"""

import pytest

import kvjax
from kvjax.combinators.head_budgets import retrieving_heads
from kvjax.methods.balancekv.balancekv_theory import BalanceKVTheory
from tests.kvjax.support import POLICIES, WINDOW, make_spec, row_keys

EXACT, CHELSEA, QUEST = POLICIES["exact"], POLICIES["chelsea"], POLICIES["quest"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("streaming_llm@4 slots", "budget=4 .*sinks=4 and recent=1"),
        ("streaming_llm:sinks=-1@10 slots", "sinks=-1"),
        ("uniform:sinks=4,recent=5@8 slots", "budget=8 .*at least 9"),
        ("uniform:sinks=4,recent=5@9 slots", "budget=9 leaves no slot"),
        ("uniform:sinks=1,recent=-5@9 slots", "recent=-5"),
        ("clustergen:sinks=0,recent=8@8 slots", "budget=8 leaves no slot"),
        ("h2o:recent=8@8 slots", "budget=8 leaves no slot for heavy hitters: sinks and recent take 8"),
        ("cam:merged=0@8 slots", "merged=0"),
        ("infinigen:alpha=0@9 slots", "alpha=0"),
        ("infinigen:partial=0@9 slots", "partial=0"),
        ("infinigen:partial=1.2@9 slots", "partial=1.2"),
        ("snapkv@31 slots", "budget=31 .*32 recent tokens"),
        ("snapkv:window_size=0@64 slots", "window_size=0"),
        ("snapkv:recent=3@64 slots", "recent=3 .*window_size"),
        ("snapkv:kernel_size=4@64 slots", "kernel_size=4 must be odd"),
        ("pyramidkv:beta=0@64 slots", "beta=0"),
        ("pyramidkv:variant=cap@64 slots", "variant='cap' must be 'paper' or 'kvpress'"),
        ("kvzip@19 slots", "budget=19 slots cannot hold sinks=4 and the compact_every=16"),
        ("kvzip:alpha_safeguard=1.5@64 slots", "alpha_safeguard=1.5"),
        ("attention_matching:references=answers@64 slots", "references='answers' must be"),
        ("attention_matching:selection=greedy@64 slots", "selection='greedy' must be"),
        ("attention_matching:max_references=0@64 slots", "max_references=0"),
        ("attention_matching:refine_steps=-1@64 slots", "refine_steps=-1"),
        ("attention_matching:ridge=0.0@64 slots", "ridge=0.0"),
        ("attention_matching:chunk_tokens=0@64 slots", "chunk_tokens=0"),
        ("attention_matching:n_future_positions=0@64 slots", "n_future_positions=0"),
        ("lagkv:lag_size=0@64 slots", "lag_size=0"),
        ("cur:local_window_size=0@64 slots", "local_window_size=0"),
        ("cur:leverage_type=both@64 slots", "leverage_type='both'"),
        ("expected_attention:n_future_positions=0@64 slots", "n_future_positions=0"),
        ("expected_attention:epsilon=-1.0@64 slots", "epsilon=-1.0"),
        ("compactor:chunk=0@64 slots", "chunk=0"),
        ("compactor:scale=0.0@64 slots", "scale=0.0"),
        ("compactor:sketch=0@64 slots", "sketch=0"),
        ("chelsea@80 slots", "budget=80 leaves no slot"),
        ("chelsea:chunk=15@100 slots", "chunk=15"),
        ("chelsea:first=0.7@100 slots", "first=0.7"),
        ("chelsea:floor=0.0@100 slots", "floor=0.0"),
        ("chelsea:decay=-1.0@100 slots", "decay=-1.0"),
        ("chelsea:schedule=llama@100 slots", "schedule='llama' must be 'llama-2' or "),
        ("subgen@68 slots", "budget=68 leaves 0 slots"),
        ("subgen:per_cluster=7@71 slots", "budget=71 leaves 3 slots"),
        ("subgen:samples=40@100 slots", "samples=40"),
        ("subgen:clusters=0@100 slots", "clusters=0"),
        ("subgen:light_values=-1@100 slots", "light_values=-1"),
        ("subgen:self_normalization=1.0@100 slots", "self_normalization=1.0"),
        ("subgen_mean@68 slots", "budget=68 leaves no slot for clusters"),
        ("subgen_mean:growth=1.0@100 slots", "growth=1.0"),
        ("subgen_mean:delta=0.0@100 slots", "delta=0.0"),
        ("balancekv:sinks=2,recent=8@10 slots", "budget=10"),
        ("balancekv:block_size=1@100 slots", "block_size=1"),
        ("balancekv:needles=-1@100 slots", "needles=-1"),
        ("balancekv_theory:epsilon=0.1@100 slots", "epsilon=0.1 needs a bound .*; pass key_norm"),
        ("balancekv_theory:bins=0@100 slots", "bins=0"),
        ("balancekv_theory:light_values=-1@100 slots", "light_values=-1"),
        ("balancekv_theory:self_normalization=-0.1@100 slots", "self_normalization=-0.1"),
        ("balancekv_theory:value_exponents=(1,0)@100 slots", r"value_exponents=\(1, 0\)"),
        ("clusterkv@10 slots", "budget=10 slots cannot hold sinks=16"),
        ("clusterkv:chunk_tokens=40@100 slots", "compact_every=64 must be at most chunk_tokens=40"),
        ("clusterkv:clusters=0@100 slots", "clusters=0"),
        ("clusterkv:kmeans_init=first@100 slots", "kmeans_init='first'"),
        ("clusterkv:full_layers=-1@100 slots", "full_layers=-1"),
        ("clusterkv:chunk_clusters=0@100 slots", "chunk_clusters=0"),
        ("clusterkv:block_size=0@100 slots", "block_size=0"),
        ("clusterkv_residual:cluster_tokens=0@100 slots", "cluster_tokens=0"),
        ("clusterkv_residual:score_stddevs=-1.0@100 slots", "score_stddevs=-1.0"),
        ("quest:host_steps=-1@40 slots", "steps=-1"),
        ("quest:full_layers=-1@40 slots", "layers=-1 must be at least 0"),
        ("leverage_scores:heads=pyproject.toml@64 slots", "pyproject.toml is not a file of head shares"),
        ("leverage_scores:heads=absent.json@64 slots", "absent.json does not exist"),
    ],
)
def test_settings(text, message):
    with pytest.raises(ValueError, match=message):
        kvjax.PolicyChoice.parse(text).make()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kvjax.ClusterGen(0), "budget=0"),
        (lambda: kvjax.InfiniGen(0), "budget=0"),
        (lambda: kvjax.BalanceKV(0.25), "budget=0.25 must be int"),
        (lambda: kvjax.SubGen(None), "budget=None .*; pass both sizes"),
        (lambda: kvjax.SubGen(None, samples=3), "budget=None with samples=3 and clusters=None; pass both sizes"),
        (lambda: kvjax.ByHead((kvjax.KVzip(64), kvjax.KVzip(64, chunk_tokens=5))).requires, "different repetitions"),
        (lambda: kvjax.ByLayer(()), "at least one policy"),
        (lambda: kvjax.ByHead(()), "at least one policy"),
        (lambda: kvjax.ByHead((EXACT, "exact")), r"policies=.* must be \(Policy, \.\.\.\)"),
        (lambda: kvjax.ByLayer([EXACT]), r"policies=.* must be \(Policy, \.\.\.\)"),
        (lambda: kvjax.HostMemory(kvjax.ByHead((EXACT,))), "HostMemory needs a retrieval policy .* got ByHead"),
        (lambda: kvjax.HostMemory(kvjax.HostMemory(QUEST)), "a retrieval policy whose blocks are on the device"),
        (lambda: kvjax.HeadBudgets(EXACT, ((1.0, 2.0),)), "has no budget to divide"),
        (lambda: kvjax.HeadBudgets(CHELSEA, ()), "at least one"),
        (lambda: kvjax.HeadBudgets(CHELSEA, (None, None)), "at least one"),
        (lambda: kvjax.HeadBudgets(CHELSEA, ((1.0,), (1.0, 2.0))), "as many numbers in every layer"),
        (lambda: kvjax.HeadBudgets(CHELSEA, ((1.0, -0.1),)), "no negative"),
        (lambda: kvjax.HeadBudgets(CHELSEA, ((0.0, 0.0), None)), "at least one positive"),
        (lambda: kvjax.HeadBudgets(CHELSEA, ((1.0, float("nan")),)), "shares="),
        (lambda: retrieving_heads(1, 2, [(1, 0)]), r"head \(1, 0\) does not exist in 1 layers x 2 heads"),
    ],
)
def test_settings_that_texts_cannot_have(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "policy, message",
    [
        (BalanceKVTheory(15, **WINDOW), "53 tokens"),
        (kvjax.StreamingLLM(10, reindex=True), "rope_frequencies"),
        (BalanceKVTheory(20, bins=4, **WINDOW), "in 4 bins"),
        (kvjax.ByLayer((EXACT,)), "ByLayer has 1 policies for a model of 2 layers"),
        (kvjax.ByHead((EXACT,)), "ByHead has 1 policies for kv_heads=2"),
        (kvjax.HeadBudgets(CHELSEA, ((1.0, 1.0),) * 3), "shares are of 3 layers, the model has 2"),
        (kvjax.HeadBudgets(CHELSEA, ((1.0,) * 3,) * 2), "shares are of 3 KV heads per layer, the model has 2"),
    ],
)
def test_policies_that_do_not_fit_the_model(policy, message):
    with pytest.raises(ValueError, match=message):
        kvjax.init(policy, make_spec(layers=2, rope_frequencies=None), row_keys())
