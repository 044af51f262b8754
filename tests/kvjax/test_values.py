"""Policies are values: equal settings are equal policies, and everything goes by that."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kvjax.policies.clusterkv_certified import ClusterKVCertified

import kvjax
from kvjax.policies.balancekv_paper import BalanceKVPaper
from kvjax.policies.balancekv_reference import BalanceKVReference
from kvjax.policies.clusterkv_paper import ClusterKVPaper
from kvjax.policies.clusterkv_reference import ClusterKVReference
from kvjax.policy import Policy
from kvjax.registry import POLICIES as REGISTERED
from tests.kvjax.support import LENGTHS, POLICIES, WINDOW, begin, make_spec, make_stream, prompt_of, row_keys

# Every policy and combinator, made anew at every call, and another of the same kind with one setting changed.
MAKE = {
    "exact": (lambda: kvjax.Exact(8), {"compact_every": 4}),
    "streaming_llm": (lambda: kvjax.StreamingLLM(16, sinks=2, compact_every=8), {"reindex": True}),
    "uniform": (lambda: kvjax.Uniform(20, **WINDOW), {"budget": 21}),
    "clustergen": (lambda: kvjax.ClusterGen(20, **WINDOW), {"variant": "paper"}),
    "subgen": (lambda: kvjax.SubGen(20, **WINDOW), {"spread": False}),
    "balancekv": (lambda: kvjax.BalanceKV(20, **WINDOW), {"gamma": 2.0}),
    "balancekv_reference": (lambda: BalanceKVReference(20, **WINDOW), {"decode": "scaled"}),
    "balancekv_paper": (lambda: BalanceKVPaper(60, **WINDOW), {"value_exponents": (0, 1)}),
    "h2o": (lambda: kvjax.H2O(20, recent=8), {"average": True}),
    "cam": (lambda: kvjax.CaM(20), {"merged": 6}),
    "infinigen": (lambda: kvjax.InfiniGen(10), {"alpha": 4.0}),
    "snapkv": (lambda: kvjax.SnapKV(20, window_size=6), {"kernel": 3}),
    "pyramidkv": (lambda: kvjax.PyramidKV(20, window_size=6), {"beta": 3}),
    "chelsea": (lambda: kvjax.Chelsea(20, **WINDOW), {"joins": "drop"}),
    "clusterkv": (lambda: kvjax.ClusterKV(20, sinks=2), {"chunk_tokens": None}),
    "clusterkv_certified": (lambda: ClusterKVCertified(20, sinks=2), {"sinks": 3}),
    "clusterkv_paper": (lambda: ClusterKVPaper(20, sinks=2), {"places": 16}),
    "clusterkv_reference": (lambda: ClusterKVReference(20, sinks=2), {"sinks": 3}),
    "quest": (lambda: kvjax.Quest(20), {"budget": 36}),
    "leverage_scores": (lambda: kvjax.LeverageScores(20), {"sketch": 48}),
    "kvzip": (lambda: kvjax.KVzip(20), {"chunk": 512}),
    "compactor": (lambda: kvjax.Compactor(24), {"blending": 0.35}),
    "cur": (lambda: kvjax.CUR(20), {"leverage_type": "key"}),
    "expected_attention": (lambda: kvjax.ExpectedAttention(20), {"use_vnorm": False}),
    "keydiff": (lambda: kvjax.KeyDiff(20), {"sinks": 0}),
    "knorm": (lambda: kvjax.Knorm(20), {"sinks": 0}),
    "lagkv": (lambda: kvjax.LagKV(20), {"cross_scoring": True}),
    "tova": (lambda: kvjax.TOVA(20), {"recent": 0}),
    "ada_kv": (lambda: kvjax.AdaKV(kvjax.LeverageScores(20)), {"alpha_safeguard": 0.0}),
    "quantized": (lambda: kvjax.Quantized(kvjax.Uniform(20, **WINDOW)), {"storage": "fp8"}),
    "host_memory": (lambda: kvjax.HostMemory(kvjax.Quest(20)), {"steps": 2}),
    "by_layer": (lambda: kvjax.ByLayer((kvjax.Exact(), kvjax.Quest(20))), {"policies": (kvjax.Exact(),)}),
    "by_head": (lambda: kvjax.ByHead((kvjax.Exact(), kvjax.Quest(20))), {"policies": (kvjax.Exact(),)}),
    "first_layers": (lambda: kvjax.FirstLayers(2, kvjax.Quest(20)), {"layers": 1}),
}
every_kind = pytest.mark.parametrize("kind", MAKE)


def test_every_registered_policy_is_among_them():
    assert {type(make()) for make, _ in MAKE.values()} >= set(REGISTERED.values())


@every_kind
def test_policies_are_equal_by_their_settings(kind):
    make, change = MAKE[kind]
    policy, same, other = make(), make(), dataclasses.replace(make(), **change)
    assert policy is not same and policy == same and hash(policy) == hash(same) and repr(policy) == repr(same)
    assert policy != other and repr(policy) != repr(other)
    assert {policy: 1}[same] == 1 and other not in {policy}
    ((name, value),) = change.items()
    assert getattr(other, name) == value and f"{name}={value!r}" in repr(other)
    assert dataclasses.replace(other, **{name: getattr(policy, name)}) == policy
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy, name, value)


def test_policies_of_two_kinds_are_never_equal():
    # Nor are they where one inherits from the other and all settings agree.
    assert len({make() for make, _ in MAKE.values()}) == len(MAKE)
    assert kvjax.SnapKV(20, recent=6) != kvjax.PyramidKV(20, window_size=6)


@every_kind
def test_replaced_settings_are_checked_too(kind):
    policy = MAKE[kind][0]()
    names = {field.name for field in dataclasses.fields(policy)}
    impossible = next(
        wrong
        for wrong in (
            {"compact_every": 0},
            {"storage": "int5"},
            {"steps": -1},
            {"policies": ()},
            {"layers": -1},
            {"alpha_safeguard": 2},
        )
        if set(wrong) <= names
    )
    with pytest.raises(ValueError, match=next(iter(impossible))):
        dataclasses.replace(policy, **impossible)


@every_kind
def test_descriptions_are_json_and_equal_exactly_for_equal_policies(kind):
    make, change = MAKE[kind]
    described = kvjax.describe(make())
    assert json.loads(json.dumps(described)) == described
    assert described == kvjax.describe(make())
    assert described != kvjax.describe(dataclasses.replace(make(), **change))
    assert described["class"] == type(make()).__name__
    others = [kvjax.describe(other()) for name, (other, _) in MAKE.items() if name != kind]
    assert described not in others


def test_a_description_says_every_setting_also_of_what_is_inside():
    assert kvjax.describe(kvjax.FirstLayers(1, kvjax.Quantized(kvjax.StreamingLLM(16), "fp8"))) == {
        "class": "FirstLayers",
        "layers": 1,
        "policy": {
            "class": "Quantized",
            "policy": {"class": "StreamingLLM", "budget": 16, "sinks": 4, "reindex": False, "compact_every": 64},
            "storage": "fp8",
            "value_storage": None,
            "whole_window": False,
        },
        "first": {"class": "Exact", "compact_every": 64, "sinks": 4},
    }


def test_a_policy_reads_alike_in_another_process():
    # Tables of results and saved states go by the description from one process to the next.
    program = (
        "import json, kvjax; from tests.kvjax.test_values import MAKE;"
        "print(json.dumps([[kvjax.describe(make()), repr(make())] for make, _ in MAKE.values()]))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"}
    command, root = [sys.executable, "-c", program], pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=root)
    here = [[kvjax.describe(make()), repr(make())] for make, _ in MAKE.values()]
    assert json.loads(done.stdout) == here


def test_what_is_no_frozen_dataclass_is_no_policy():
    class Settings(kvjax.Uniform):  # it inherits from a frozen dataclass, but what it adds is no part of its value
        pass

    class Loose(Policy):
        compact_every = 8
        init = prefill = read = compact = lambda self, *_: None

    for wrong in (Settings(20, **WINDOW), Loose()):
        with pytest.raises(
            TypeError, match=rf"{type(wrong).__name__} must be a kvjax.policy.Policy .*frozen dataclass"
        ):
            kvjax.init(wrong, make_spec(), row_keys())
    with pytest.raises(TypeError, match="str must be a kvjax.policy.Policy"):
        kvjax.init("uniform", make_spec(), row_keys())


# --- what is compiled goes by value ---


def test_equal_policies_made_anew_share_one_program():
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(lambda cache, *new: kvjax.step(cache, *new), n=1))
    make = jax.jit(chex.assert_max_traces(kvjax.init, n=1), static_argnums=(0, 1))
    token, query = jnp.zeros((3, 1, 2, 64)), jnp.zeros((3, 1, 4, 64))
    for seed in range(3):
        cache = make(kvjax.Uniform(20, **WINDOW), make_spec(), row_keys(seed=seed))
        _, cache = step(cache, query, token, token)
    assert make._cache_size() == step._cache_size() == 1


def test_layers_of_one_policy_share_one_program_and_batches_that_differ_one_structure():
    spec = make_spec()
    structure = jax.tree.structure(kvjax.init(POLICIES["uniform"], spec, row_keys()))
    layers = [kvjax.init(POLICIES["uniform"], make_spec(layer=layer, layers=3), row_keys()) for layer in range(3)]
    assert {jax.tree.structure(cache) for cache in layers} == {structure}
    single = kvjax.init(POLICIES["uniform"], make_spec(batch=1), row_keys(1))
    assert jax.tree.structure(single) == structure


@pytest.mark.parametrize(
    "kind, change",
    [
        ("uniform", {"sinks": 3, "recent": 7}),
        ("clustergen", {"sinks": 3, "recent": 7}),
        ("subgen", {"growth": 1.5}),
        ("balancekv", {"gamma": 2.0}),
        ("h2o", {"recent": 7}),
        ("cam", {"merged": 6}),
        ("infinigen", {"alpha": 4.0}),
        ("snapkv", {"kernel": 3}),
        ("chelsea", {"decay": 0.5}),
        ("clusterkv", {"select": "query_head"}),
        ("quest", {"budget": 100}),
        ("streaming_llm", {"sinks": 3}),
        ("quantized", {"policy": kvjax.Uniform(20, sinks=3, recent=7, compact_every=8)}),
    ],
)
def test_caches_of_different_settings_have_different_structures_though_their_arrays_look_alike(kind, change):
    policy = MAKE[kind][0]()
    cache, other = (kvjax.init(one, make_spec(), row_keys()) for one in (policy, dataclasses.replace(policy, **change)))
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(cache)] == [(x.shape, x.dtype) for x in jax.tree.leaves(other)]
    assert jax.tree.structure(cache) != jax.tree.structure(other)


@pytest.mark.parametrize(
    "change",
    [{"scale": 0.5}, {"logit_cap": 30.0}, {"max_prompt_tokens": 39}],
    ids=["scale", "logit_cap", "max_prompt_tokens"],
)
def test_what_a_cache_was_made_for_is_part_of_its_structure(change):
    policy, spec = POLICIES["uniform"], make_spec()
    cache, other = (kvjax.init(policy, one, row_keys()) for one in (spec, dataclasses.replace(spec, **change)))
    assert jax.tree.structure(cache) != jax.tree.structure(other)
    with pytest.raises(ValueError, match=r"insert_rows: .* spec is CacheSpec\(.* in one and CacheSpec\("):
        kvjax.insert_rows(cache, other, jnp.arange(3))


@pytest.mark.parametrize("under_jit", [False, True])
@pytest.mark.parametrize("other", [kvjax.H2O(20, recent=8, compact_every=8), kvjax.Uniform(20, 3, 7, 8)], ids=repr)
def test_rows_of_another_policy_s_cache_are_not_inserted(other, under_jit):
    # With as many slots and the same names of fields they would go in unnoticed.
    stream, policy = make_stream(), POLICIES["uniform"]
    caches = [begin(one, make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS) for one in (policy, other)]
    insert = jax.jit(kvjax.insert_rows) if under_jit else kvjax.insert_rows
    for nested in (lambda cache: cache, lambda cache: {"layers": [cache]}):
        with pytest.raises(ValueError) as caught:
            insert(nested(caches[0]), nested(caches[1]), jnp.arange(3))
        assert "insert_rows: the states are not of one policy and spec" in str(caught.value)
        assert f"policy is {policy} in one and {other} in the other" in str(caught.value)
    with pytest.raises(ValueError, match="one is list of 2, the other list of 1"):
        insert([caches[0]] * 2, [caches[0]], jnp.arange(3))
    with pytest.raises(ValueError, match="one is Sample, the other HeavyHitters|recent is 8 in one and 7 in the other"):
        insert(caches[0].state, caches[1].state, jnp.arange(3))


# --- policies from text ---


@pytest.mark.parametrize(
    "text, policy",
    [
        ("exact", kvjax.Exact()),
        ("uniform@512", kvjax.Uniform(512)),
        ("subgen:variant=paper,recent=32@200", kvjax.SubGen(200, recent=32, variant="paper")),
        ("subgen:variant=paper,delta=None@200", kvjax.SubGen(200, variant="paper")),
        ("h2o:recent=4,average=true@12", kvjax.H2O(12, recent=4, average=True)),
        ("clusterkv:every=None,start=k-means++@64", kvjax.ClusterKV(64, chunk_tokens=None, kmeans_init="k-means++")),
        ("balancekv_paper:value_exponents=(0,3),bins=4@400", BalanceKVPaper(400, value_exponents=(0, 3), bins=4)),
        ("uniform:storage=fp8@512", kvjax.Quantized(kvjax.Uniform(512), "fp8")),
        ("quest:host_steps=2,storage=int8@64", kvjax.HostMemory(kvjax.Quantized(kvjax.Quest(64)), 2)),
        (
            "quest:full_layers=2,compact_every=32@64",
            kvjax.FirstLayers(2, kvjax.Quest(64, compact_every=32), kvjax.Exact(32)),
        ),
        (
            "quest:full_layers=2,storage=int8@64",
            kvjax.FirstLayers(2, kvjax.Quantized(kvjax.Quest(64)), kvjax.Quantized(kvjax.Exact())),
        ),
    ],
)
def test_policies_are_made_of_text(text, policy):
    choice = kvjax.PolicyChoice.parse(text)
    assert choice.make() == policy and str(choice) == text
    assert choice == kvjax.PolicyChoice.parse(text) and hash(choice) == hash(kvjax.PolicyChoice.parse(text))


def test_budgets_are_slots_shares_or_bytes():
    spec = make_spec(prompt=400, layers=2)
    choice = kvjax.PolicyChoice.parse("subgen:variant=paper,recent=32@25%")
    assert choice.variant == "variant=paper,recent=32" and choice.budget.fraction == 0.25
    policy = choice.fit(spec, tokens=400)
    assert isinstance(policy, kvjax.SubGen) and (policy.variant, policy.recent) == ("paper", 32)
    assert policy == kvjax.fit_bytes(choice.make, spec, spec.full_cache_bytes(400) // 4)
    assert kvjax.PolicyChoice.parse("uniform@100").fit(spec, tokens=400) == kvjax.Uniform(100)
    held = kvjax.PolicyChoice.parse("uniform@400KiB").fit(spec, tokens=400)
    assert held == kvjax.fit_bytes(kvjax.Uniform, spec, 200 * 1024)  # of a sequence over all layers
    with pytest.raises(ValueError, match="gives slots, not bytes"):
        kvjax.PolicyChoice.parse("uniform@100").budget.limit(spec, 400)


@pytest.mark.parametrize(
    "text, message",
    [
        ("lru@10", r"policy 'lru' is not known; known: .*subgen"),
        ("subgen:radius=2@100", r"there is no setting 'radius'; subgen has .*variant"),
        ("subgen:budget=10@100", r"there is no setting 'budget'"),
        ("subgen:recent@100", r"'recent' must read setting=value"),
        ("subgen:recent=many@100", r"recent=many: it must be int"),
        ("subgen:variant=best@100", r"variant=best: it must be 'mean_value' or 'self_normalised' or 'paper'"),
        ("subgen:spread=maybe@100", r"spread=maybe: it must be bool"),
        ("subgen:growth=fast@100", r"growth=fast: it must be float or None"),
        ("subgen:recent=-1@100", r"recent=-1; it must be at least 0"),
        ("balancekv_paper:value_exponents=(0)@100", r"value_exponents=\(0\): it must be"),
        ("uniform:storage=int5@100", r"storage=int5: it must be 'int8' or 'fp8' or 'int4' or 'int3' or 'int2'"),
        ("uniform:host_steps=1@100", r"HostMemory: Uniform\(.* recalls nothing"),
        ("uniform:compact_every=0@100", r"compact_every=0; it must be at least 1"),
        ("uniform@half", r"budget 'half': give slots \(1024\), a share of exact's bytes \(25%\) or bytes \(64MiB\)"),
        ("uniform@10GB", r"budget '10GB'"),
        ("exact@10", r"exact keeps everything and takes no budget"),
    ],
)
def test_text_that_says_no_policy_is_refused_by_the_field(text, message):
    with pytest.raises(ValueError, match=message):
        kvjax.PolicyChoice.parse(text)


def test_the_library_has_few_names():
    public = {name: x for name, x in vars(kvjax).items() if not name.startswith("_") and not _is_module(x)}
    policies = {name for name, x in public.items() if isinstance(x, type) and issubclass(x, Policy)}
    assert len(policies) < 30 and len(public.keys() - policies) <= 20, sorted(public)


def _is_module(x):
    return isinstance(x, type(sys))


def test_values_are_seen_in_reprs_of_caches():
    cache = kvjax.init(POLICIES["uniform"], make_spec(), row_keys())
    assert repr(POLICIES["uniform"]) in repr(cache)
    np.testing.assert_array_equal(kvjax.num_tokens(cache), [0, 0, 0])
