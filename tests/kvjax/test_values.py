"""Policies are values: equality, descriptions, compiled programs, state structures and policies from text."""

import dataclasses
import json
import re
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.budget import Budget, SmallBudgetWarning
from kvjax.methods.balancekv.balancekv_theory import BalanceKVTheory
from kvjax.policy import Policy
from kvjax.registry import POLICIES as REGISTERED
from kvjax.registry import parse_value
from tests.kvjax.support import POLICIES, WINDOW, make_spec, make_stream, row_keys

COMBINATORS = {
    "head_budgets": kvjax.HeadBudgets(kvjax.Chelsea(90), ((1.0, 0.001),)),
    "host_memory": kvjax.HostMemory(kvjax.Quest(20)),
    "by_layer": kvjax.ByLayer((kvjax.Exact(), kvjax.Quest(20))),
    "by_head": kvjax.ByHead((kvjax.Exact(), kvjax.Quest(20))),
    "first_layers": kvjax.FirstLayers(2, kvjax.Quest(20), kvjax.Exact()),
}
KINDS = POLICIES | {"kvgrad": kvjax.KVgrad(20), "kvzap": kvjax.KVzap(20), "kvzip": kvjax.KVzip(20)} | COMBINATORS
# Another value of a setting, of `compact_every` for all other policies.
CHANGE = {"compact_every": 4}
CHANGES = {
    "ada_kv": {"alpha_safeguard": 0.0},
    "head_budgets": {"shares": ((0.001, 1.0),)},
    "host_memory": {"steps": 2},
    "by_layer": {"policies": (kvjax.Exact(),)},
    "by_head": {"policies": (kvjax.Exact(),)},
    "first_layers": {"layers": 1},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def test_every_registered_policy_is_tested():
    assert {type(policy) for policy in KINDS.values()} >= set(REGISTERED.values())


@every_kind
def test_policies_are_equal_by_their_settings(kind):
    policy, change = KINDS[kind], CHANGES.get(kind, CHANGE)
    same, other = dataclasses.replace(policy), dataclasses.replace(policy, **change)
    assert policy is not same and policy == same and hash(policy) == hash(same) and repr(policy) == repr(same)
    ((name, value),) = change.items()
    assert policy != other and f"{name}={value!r}" in repr(other)
    assert dataclasses.replace(other, **{name: getattr(policy, name)}) == policy
    # Policies of two classes are never equal; PyramidKV inherits from SnapKV.
    assert len(set(KINDS.values()) | {same, other}) == len(KINDS) + 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy, name, value)
    if kind not in CHANGES:
        with pytest.raises(ValueError, match="compact_every=0"):
            dataclasses.replace(policy, compact_every=0)


def test_descriptions_are_json_and_identify_a_policy():
    changed = [dataclasses.replace(policy, **CHANGES.get(kind, CHANGE)) for kind, policy in KINDS.items()]
    policies = [*KINDS.values(), *changed]
    descriptions = [json.dumps(kvjax.describe(policy)) for policy in policies]
    assert len(set(descriptions)) == len(policies)
    for policy, description in zip(policies, descriptions, strict=True):
        assert json.loads(description) == kvjax.describe(policy) == kvjax.describe(dataclasses.replace(policy))


def test_a_description_has_all_settings_also_of_inner_policies():
    policy = kvjax.FirstLayers(1, kvjax.HostMemory(kvjax.Quest(32)), kvjax.Exact())
    assert kvjax.describe(policy) == {
        "class": "FirstLayers",
        "layers": 1,
        "policy": {
            "class": "HostMemory",
            "policy": {"class": "Quest", "budget": 32, "select": "query_head", "compact_every": 64},
            "steps": 1,
        },
        "first": {"class": "Exact", "compact_every": 64},
    }


class Inherited(kvjax.Uniform):
    """Inherits from a frozen dataclass and is none."""


class NoDataclass(Policy):
    compact_every = 8
    init = prefill = segments = compact = lambda self, *_: None


def test_a_cache_needs_a_policy_and_a_typed_key_per_row():
    for policy in (Inherited(20, **WINDOW), NoDataclass.__new__(NoDataclass), "uniform"):
        with pytest.raises(TypeError, match=f"{type(policy).__name__} must be a kvjax.policy.Policy"):
            kvjax.init(policy, make_spec(), row_keys())
    one_key, other_rows, untyped = jax.random.key(0), row_keys(1), jax.random.split(jax.random.PRNGKey(0), 2)
    for keys in (one_key, other_rows, untyped):
        with pytest.raises(ValueError, match=r"row_keys has shape .* pass one typed key per row"):
            kvjax.init(POLICIES["uniform"], make_spec(batch=2), keys)


# --- compiled programs and structures ---


def test_equal_policies_share_compiled_programs():
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(lambda *arguments: kvjax.step(*arguments), n=1))
    make = jax.jit(chex.assert_max_traces(kvjax.init, n=1), static_argnums=(0, 1))
    token, query = jnp.zeros((3, 1, 2, 64)), jnp.zeros((3, 1, 4, 64))
    for seed in range(3):
        step(*make(kvjax.Uniform(20, **WINDOW), make_spec(), row_keys(seed=seed)), query, token, token)
    assert make._cache_size() == step._cache_size() == 1


def test_layers_and_batch_sizes_share_one_structure():
    specs = [make_spec(), make_spec(batch=1), *(make_spec(layer=layer, layers=3) for layer in range(3))]
    states = [kvjax.init(POLICIES["uniform"], spec, row_keys(spec.batch)) for spec in specs]
    assert len({jax.tree.structure(state) for state in states}) == 1


@pytest.mark.parametrize("change", [{"scale": 0.5}, {"logit_cap": 30.0}, {"max_prompt_tokens": 39}], ids=str)
def test_rows_of_another_spec_are_not_inserted(change):
    specs = make_spec(), dataclasses.replace(make_spec(), **change)
    caches = [kvjax.init(POLICIES["uniform"], spec, row_keys()) for spec in specs]
    with pytest.raises(ValueError, match=r"insert_rows: .* spec is CacheSpec\(.* in one and CacheSpec\("):
        kvjax.insert_rows(*caches, jnp.arange(3))


@pytest.mark.parametrize("other", [kvjax.H2O(20, recent=8, compact_every=8), kvjax.Uniform(20, 3, 7, 8)], ids=repr)
def test_rows_of_another_policy_are_not_inserted(other):
    # The states have equal slots and field names.
    policy = POLICIES["uniform"]
    one, two = (kvjax.init(policy, make_spec(), row_keys())[0] for policy in (policy, other))
    values = f"policy is {re.escape(repr(policy))} in one and {re.escape(repr(other))} in the other"
    for caches, message in (
        ((one, two), f"insert_rows: the states belong to different policies or specs.*{values}"),
        (({"layers": [one]}, {"layers": [two]}), values),
        (([one, one], [one]), "one is list of 2, the other list of 1"),
        ((one.state, two.state), "one is .*, the other H2OState|recent is 8 in one and 7 in the other"),
    ):
        for insert in (kvjax.insert_rows, jax.jit(kvjax.insert_rows)):
            with pytest.raises(ValueError, match=message):
                insert(*caches, jnp.arange(3))


# --- policies from text ---

EXACT, QUEST = kvjax.Exact(32), kvjax.Quest(64, compact_every=32)
HOSTED = kvjax.HostMemory(QUEST)


@pytest.mark.parametrize(
    "text, policy",
    [
        ("exact", kvjax.Exact()),
        ("uniform@512 slots", kvjax.Uniform(512)),
        ("subgen:per_cluster=2,recent=32@200 slots", kvjax.SubGen(200, recent=32, per_cluster=2)),
        ("subgen:per_cluster=2,delta=None@200 slots", kvjax.SubGen(200, per_cluster=2)),
        ("h2o:recent=4,average=true@12 slots", kvjax.H2O(12, recent=4, average=True)),
        ("clusterkv:clusters=400,kmeans_init=random@64 slots", kvjax.ClusterKV(64, clusters=400, kmeans_init="random")),
        ("clusterkv:chunk_tokens=None@64 slots", kvjax.ClusterKV(64, chunk_tokens=None)),
        ("clusterkv:full_layers=0@64 slots", kvjax.ClusterKV(64, full_layers=0)),
        ("balancekv_theory:value_exponents=(0,3),bins=4@99 slots", BalanceKVTheory(99, value_exponents=(0, 3), bins=4)),
        ("quest:host_steps=2@64 slots", kvjax.HostMemory(kvjax.Quest(64), 2)),
        ("quest:full_layers=2,compact_every=32@64 slots", kvjax.FirstLayers(2, QUEST, EXACT)),
        ("quest:full_layers=2,host_steps=1,compact_every=32@64 slots", kvjax.FirstLayers(2, HOSTED, EXACT)),
        ("knorm:alpha_safeguard=0.5@64 slots", kvjax.AdaKV(kvjax.Knorm(64), 0.5)),
    ],
)
def test_text_gives_a_policy(text, policy):
    choice = kvjax.PolicyChoice.parse(text)
    assert choice.make() == policy and str(choice) == text
    assert choice == kvjax.PolicyChoice.parse(text) and hash(choice) == hash(kvjax.PolicyChoice.parse(text))


def test_values_in_text_are_python_literals_or_the_text():
    values = {"8": 8, "0.5": 0.5, "(1,2)": (1, 2), "(1,)": (1,), "'8'": "8", "best": "best", "k-means++": "k-means++"}
    values |= {text: value for value in (True, False, None) for text in (str(value), str(value).lower())}
    for text, value in values.items():
        assert parse_value(text) == value and type(parse_value(text)) is type(value)


def test_text_of_a_policy_gives_the_policy():
    shares = (((1.0, 0.5), (0.001, 1.0)), ((1.0, 0.5),), (None, (1.0,)))
    for heads in shares:
        choice = kvjax.PolicyChoice.create("chelsea", {"heads": heads, "recent": 32}, None)
        assert kvjax.PolicyChoice.parse(str(choice)) == choice


def test_budgets_are_slots_fractions_or_bytes():
    spec = make_spec(prompt=400, layers=2)
    choice = kvjax.PolicyChoice.parse("subgen:per_cluster=2,recent=32@50%")
    assert choice.variant == "per_cluster=2,recent=32" and choice.budget.fraction == 0.5
    policy = choice.fit(spec, tokens=400)
    assert isinstance(policy, kvjax.SubGen) and (policy.per_cluster, policy.recent) == (2, 32)
    assert policy == kvjax.fit_bytes(choice.make, spec, spec.full_cache_bytes(400) // 2)
    assert kvjax.PolicyChoice.parse("uniform@100 slots").fit(spec, tokens=400) == kvjax.Uniform(100)
    # Bytes are for a sequence, over all layers.
    of_bytes = kvjax.PolicyChoice.parse("uniform@400KiB").fit(spec, tokens=400)
    assert of_bytes == kvjax.fit_bytes(kvjax.Uniform, spec, 200 * 1024)
    with pytest.raises(ValueError, match="budget='100 slots' is in slots, not in bytes"):
        kvjax.PolicyChoice.parse("uniform@100 slots").budget.limit(spec, 400)


@pytest.mark.parametrize(
    "budget, text, size",
    [
        *(("25%", "25%", {"fraction": 0.25}), (" 12.5 %", "12.5%", {"fraction": 0.125})),
        *(("64MiB", "64MiB", {"bytes": 2**26}), ("100 MB", "100MB", {"bytes": 10**8})),
        *(("1GB", "1GB", {"bytes": 10**9}), ("1.5kB", "1.5kB", {"bytes": 1500})),
        *((budget, "256 slots", {"slots": 256}) for budget in ("256 slots", "256slots", 256)),
        (np.int64(1), "1 slots", {"slots": 1}),
    ],
)
def test_budgets_have_a_unit_or_are_integers(budget, text, size):
    parsed = Budget.of(budget)
    assert parsed == Budget(text, **size) == Budget.of(str(parsed)) == Budget.of(parsed)


@pytest.mark.parametrize("budget", [True, None, 0.25, 25.0, ["25%"], "", "%", "-1%", "٣%", "1e3 slots"])
def test_other_values_are_no_budgets(budget):
    with pytest.raises(ValueError, match=r"^budget="):
        Budget.of(budget)


SMALL, LARGE = [(25, 1000), (63, 1000), (64, 3000), ("2.9%", 1000), ("1000B", 1000)], [
    (64, 1000), (25, 20), (25, 25), ("3%", 1000), ("64KiB", 1000),
]  # fmt: skip


@pytest.mark.parametrize("budget, tokens", SMALL + LARGE)
def test_a_small_budget_warns_once(budget, tokens):
    size = Budget.of(budget)
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for _ in range(3):
            size.warn_if_small(make_spec(prompt=tokens), tokens)
    assert [one.category for one in caught] == [SmallBudgetWarning] * ((budget, tokens) in SMALL)
    for one in caught:
        message = str(one.message)
        assert f"budget={size} is less than 64 slots or 3% of the text: half of its facts or more are lost" in message
        assert ("a share is written 25%" in message) == (budget == 25)


@pytest.mark.parametrize(
    "text, message",
    [
        ("lru@10 slots", r"policy 'lru' is unknown; choose one of .*subgen"),
        ("clusterkv_paper@10 slots", r"policy 'clusterkv_paper' is unknown; .*clusterkv, clusterkv_residual"),
        ("subgen:radius=2@100 slots", r"unknown setting 'radius'; subgen has .*recent"),
        ("subgen:budget=10@100 slots", r"unknown setting 'budget'"),
        ("subgen:storage=int8@100 slots", r"unknown setting 'storage'"),
        ("subgen:recent@100 slots", r"'recent' must have the form setting=value"),
        ("subgen:recent=many@100 slots", r"recent='many' must be int"),
        ("subgen:recent=0.5@100 slots", r"recent=0.5 must be int"),
        ("subgen:recent=True@100 slots", r"recent=True must be int"),
        ("balancekv:decode=best@100 slots", r"decode='best' must be 'weights' or 'scaled'"),
        ("h2o:average=maybe@100 slots", r"average='maybe' must be bool"),
        ("subgen:growth=fast@100 slots", r"growth='fast' must be float"),
        ("subgen:recent=-1@100 slots", r"recent=-1 must be at least 0"),
        ("balancekv_theory:value_exponents=(0)@100 slots", r"value_exponents=0 must be"),
        ("uniform:host_steps=1@100 slots", r"HostMemory needs a retrieval policy .*Uniform"),
        ("uniform:alpha_safeguard=1@100 slots", r"policy=Uniform.* must be TopKPolicy"),
        ("uniform@half", r"budget='half' is not a budget; pass a share \(25%\), bytes \(64MiB\) or slots .*\(256 slo"),
        ("uniform@10Mb", r"budget='10Mb' is not a budget"),
        ("uniform@2.5 slots", r"budget='2.5 slots' is not a budget"),
        ("uniform@25", r"budget='25' has no unit; pass '25%' for a share of the full cache or '25 slots' for slots p"),
        ("uniform@410", r"budget='410' has no unit; pass '410 slots' for slots per KV head"),
        ("uniform@12.5", r"budget='12.5' has no unit; pass '12.5%' for a share of the full cache$"),
        ("uniform@250%", r"budget=250% exceeds the full cache; pass at most 100%"),
        ("uniform@0%", r"budget=0% is an empty cache; pass more than 0"),
        ("uniform@0 slots", r"budget=0 slots is an empty cache"),
        ("uniform@0.0MiB", r"budget=0.0MiB is an empty cache"),
        ("uniform@0.5", r"budget='0.5' is a fraction; pass '50%'"),
        ("exact@10 slots", r"exact keeps everything and takes no budget"),
    ],
)
def test_invalid_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        kvjax.PolicyChoice.parse(text)


def test_a_registered_policy_has_a_name_in_text(monkeypatch):
    monkeypatch.setattr("kvjax.registry.POLICIES", dict(REGISTERED))

    @dataclasses.dataclass(frozen=True)
    class Mine(kvjax.Uniform):
        pass

    assert kvjax.register("mine", Mine) is kvjax.register("mine", Mine) is Mine
    assert kvjax.PolicyChoice.parse("mine:sinks=2@128 slots").make() == Mine(128, sinks=2)
    with pytest.raises(ValueError, match="name='mine' is already registered for Mine"):
        kvjax.register("mine", kvjax.Uniform)
    with pytest.raises(ValueError, match="name='My policy' must consist of lower-case letters"):
        kvjax.register("My policy", Mine)
    for other in (Mine(128), int, type("Plain", (Policy,), {})):
        with pytest.raises(TypeError, match="must be a kvjax.policy.Policy and a frozen dataclass"):
            kvjax.register("other", other)


def test_prompt_queries_are_as_many_as_the_policy_requires():
    queries = make_stream().queries[:, :40]
    for name, count in (("tova", 1), ("snapkv", 6), ("h2o", 40)):
        np.testing.assert_array_equal(kvjax.prompt_queries(POLICIES[name], queries), queries[:, 40 - count :])
    assert kvjax.prompt_queries(POLICIES["uniform"], queries) is None
