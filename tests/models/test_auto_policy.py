"""`policy="auto"` and `heads="auto"`: settings for a model and a budget."""

import flax.nnx as nnx
import numpy as np
import pytest

import kvjax
from kvjax.budget import Budget
from kvjax.combinators.head_budgets import retrieving_heads
from kvjax.registry import PolicyChoice
from kvjax_models.cli.generate import Generate
from kvjax_models.model.llama import Llama
from kvjax_models.runner.auto_policy import Auto, AutoHeads, NamedPolicy, cache_options, resolve_auto
from kvjax_models.runner.state import cache_specs
from kvjax_models.saves import Save
from tests.models import tiny
from tests.models.support import make_profile, small_config

LAYERS, KV_HEADS = 10, 2
SHARES = retrieving_heads(LAYERS, KV_HEADS, [(1, 0)])


@pytest.fixture(scope="module")
def model():
    return Llama(small_config(layers=LAYERS, query_heads=4, kv_heads=KV_HEADS, width=32), rngs=nnx.Rngs(0))


NEEDS = np.linspace(0.01, 0.9, LAYERS * KV_HEADS).reshape(LAYERS, KV_HEADS)


def resolve(model, policy, budget=None, kv_dtype=None, tokens=1000, new=4, profile=None, heads=None, **options):
    spec = cache_specs(model, batch=1, max_prompt_tokens=tokens - new, max_new_tokens=new, streaming=False)[0]
    value, size, heads = cache_options(policy, budget, heads)
    resolved, kv_dtype = resolve_auto(
        value, size, kv_dtype, spec, tokens, heads=heads, find_profile=lambda: profile, **options
    )
    return resolved, size, kv_dtype


@pytest.mark.parametrize(
    ("budget", "kv_dtype", "expected", "full", "compact_every", "recent"),
    [
        ("10%", None, "int4", 3, 8, 48),  # 18% of 20 heads
        ("3%", None, ("int4", "int2"), 2, 8, 16),  # 70% of the slots, which are for 15% of the tokens, are 2.1 heads
        ("20%", None, "int8", 3, 8, 48),
        (None, None, "int8", 3, 16, 64),  # an eighth of 485 tokens, in steps of 16
        ("25%", "int8", "int8", 3, 16, 64),
        (100, "int8", "int8", 1, 8, 16),  # slots are tokens
        ("95%", None, "int8", 3, 16, 128),
    ],
)
def test_auto_stores_few_bits_and_all_tokens_of_some_heads(
    model, budget, kv_dtype, expected, full, compact_every, recent
):
    choice, resolved_budget, resolved_dtype = resolve(model, "auto", budget, kv_dtype, profile=make_profile(NEEDS))
    assert resolved_dtype == expected and resolved_budget == Budget.of("25%" if budget is None else budget)
    heads = [(LAYERS - 1, 1), (LAYERS - 1, 0), (LAYERS - 2, 1)][:full]
    options = {"reserve_decode_slots": True, "compact_every": compact_every}
    policy = kvjax.KVzap(200, recent=recent, **options)
    assert choice.make(200) == kvjax.HeadBudgets(policy, retrieving_heads(LAYERS, KV_HEADS, heads))


def test_auto_without_a_scorer_selects_by_other_scores(model):
    profile, options = make_profile(NEEDS, scorer=None), {"compact_every": 16}
    policy = resolve(model, "auto", profile=profile)[0].make(64).policy
    assert policy == kvjax.SnapKV(64, window_size=16, reserve_decode_slots=True, **options)
    policy = resolve(model, "auto", profile=profile, streaming=True)[0].make(100).policy
    assert policy == kvjax.Chelsea(100, **options)
    # A scorer needs no entire prompt.
    policy = resolve(model, "auto", profile=make_profile(NEEDS), streaming=True)[0].make(100).policy
    assert isinstance(policy, kvjax.KVzap) and not policy.requires.entire_prompt


def test_heads_of_retrieval_policies_read_equally(model):
    profile = make_profile(NEEDS)
    for text in ("clusterkv:heads=auto@25%", "quest:heads=auto,host_steps=4@25%", "infinigen:heads=auto@25%"):
        choice, *_ = resolve(model, text, profile=profile)
        assert str(choice) == text.replace("heads=auto,", "").replace(":heads=auto", "").removesuffix("@25%")
    for heads in ("auto", profile):
        assert resolve(model, "clusterkv", "25%", heads=heads)[0].make(64) == kvjax.ClusterKV(64)
        assert resolve(model, kvjax.Quest, "25%", heads=heads)[0] is kvjax.Quest
        assert resolve(model, kvjax.Quest(64), heads=heads)[0] == kvjax.Quest(64)
    assert resolve(model, "clusterkv", "25%", heads=SHARES)[0].make(64).shares == SHARES


def test_layers_with_a_window_have_no_shares():
    needs = NEEDS.copy()
    needs[0] = 0.0
    shares = make_profile(needs).shares(1.0)
    assert shares[0] is None and shares[1:] == retrieving_heads(10, 2, [(9, 1), (9, 0), (8, 1)])[1:]


def test_budgets_follow_the_needs_of_few_heads(model):
    profile = make_profile(np.array([[0.0], [0.5], [0.25]]))
    assert profile.has_few_heads and profile.shares(0.5) == (None, (0.5,), (0.25,))
    choice, _, kv_dtype = resolve(model, "auto", "25%", profile=profile)
    assert isinstance(choice.make(200).policy, kvjax.KVzap)
    formats = [kv_dtype, *(resolve(model, "auto", budget, profile=profile)[2] for budget in ("50%", "5%", "4%"))]
    assert formats == ["int4", "int8", "int4", ("int4", "int2")]
    assert resolve(model, "auto", 250, profile=profile)[2] == "int8"  # slots of 4 bits hold no more tokens


def test_any_policy_takes_the_heads_of_a_profile(model):
    profile = make_profile(NEEDS)
    shares = profile.shares(0.485)  # of the tokens
    for policy, heads in (("chelsea:heads=auto", None), ("chelsea", "auto"), ("chelsea", profile)):
        choice, budget, kv_dtype = resolve(model, policy, "25%", profile=profile, heads=heads)
        assert (budget, kv_dtype) == (Budget.of("25%"), "int8")
        assert choice.make(100) == kvjax.HeadBudgets(kvjax.Chelsea(100, compact_every=16), shares)
    given, *_ = resolve(model, "chelsea:compact_every=8", "25%", heads=SHARES)
    assert given.make(100) == kvjax.HeadBudgets(kvjax.Chelsea(100, compact_every=8), SHARES)
    of_class, *_ = resolve(model, kvjax.SnapKV, "25%", heads=SHARES)
    value, *_ = resolve(model, kvjax.SnapKV(100), heads=SHARES)
    assert of_class(100) == value == kvjax.HeadBudgets(kvjax.SnapKV(100), SHARES)


@pytest.mark.parametrize("policy", ["chelsea", "snapkv", "clusterkv"])
@pytest.mark.parametrize(
    ("budget", "expected"),
    [("20%", "int8"), ("12.5%", "int4"), ("3%", ("int4", "int2")), ("64KiB", "int4"), (250, None)],
)
def test_heads_of_a_profile_have_the_format_of_auto(model, policy, budget, expected):
    """64 KiB in 10 layers are 7% of 1,000 tokens; slots of fewer bits would hold no more tokens."""
    size, profile = str(Budget.of(budget)), make_profile(NEEDS)
    for arguments, heads in ((f"{policy}:heads=auto@{size}", None), (policy, "auto"), (policy, profile)):
        given = None if "@" in arguments else budget
        assert resolve(model, arguments, given, profile=profile, heads=heads)[2] == expected
        for named in ("bfloat16", "int2"):
            assert resolve(model, arguments, given, named, profile=profile, heads=heads)[2] == named
    if expected is not None:
        assert resolve(model, "auto", budget, profile=profile)[2] == expected
    # Shares without a profile, and no heads at all, change no format.
    assert resolve(model, policy, budget, profile=profile, heads=SHARES)[2] is None
    assert resolve(model, policy, budget, profile=profile)[2] is None


@pytest.mark.parametrize(("budget", "named"), [("25%", "int8"), ("3.2%", ("int4", "int2"))])
def test_caches_without_a_format_equal_those_with_the_format_named(monkeypatch, budget, named):
    """In Python, and on command lines, whose options a server has, too."""
    monkeypatch.setattr("kvjax_models.profile.find_or_measure", lambda *_, **__: make_profile(NEEDS))
    llm, text = tiny.make_llm(layers=LAYERS), "chelsea:heads=auto"
    expected = llm.cache(text, budget, kv_dtype=named).document_generator(4096, 64)
    of_command = Generate(model="tiny", policy=text, budget=budget)
    for cache in (llm.cache("chelsea", budget, heads="auto"), llm.cache(f"{text}@{budget}"), of_command.cache(llm)):
        one = cache.document_generator(4096, 64)
        assert (one.kv_dtype, one.policies, one.row_bytes) == (named, expected.policies, expected.row_bytes)
        one = cache.generator(max_prompt_tokens=4096, max_new_tokens=64)
        assert one.row_bytes <= float(budget[:-1]) / 100 * sum(s.full_cache_bytes(s.capacity) for s in one.specs)
    in_16_bits = llm.cache(text, budget, kv_dtype="bfloat16").document_generator(4096, 64)
    assert in_16_bits.kv_dtype == "bfloat16" and in_16_bits.policies != expected.policies


@pytest.mark.parametrize("tokens", [997, 1001, 1003])
def test_a_share_decides_the_format_at_every_length(model, tokens):
    """A fifth of the bytes of 1,003 tokens is not an integer."""
    assert resolve(model, "auto", "20%", tokens=tokens, profile=make_profile(NEEDS))[2] == "int8"
    assert resolve(model, "auto", "5%", tokens=tokens, profile=make_profile(NEEDS))[2] == "int4"


def test_a_format_that_the_heads_cannot_have_is_refused():
    narrow = Llama(small_config(head_dim=12), rngs=nnx.Rngs(0))
    for policy in ("auto", "snapkv:heads=auto"):
        with pytest.raises(
            ValueError, match="'int4' needs heads with a multiple of 8 dimensions, got 12; pass kv_dtype='i"
        ):
            resolve(narrow, policy, "10%", profile=make_profile(NEEDS))


def test_models_without_a_profile_have_equal_budgets(model):
    assert resolve(model, "auto")[0].make(64) == kvjax.SnapKV(
        64, window_size=16, reserve_decode_slots=True, compact_every=16
    )
    assert resolve(model, "snapkv@25%") == (PolicyChoice("snapkv"), Budget.of("25%"), None)
    assert resolve(model, kvjax.SnapKV, 40) == (kvjax.SnapKV, Budget.of(40), None)


def test_auto_stages_more_tokens_in_a_large_cache(model):
    # 16 tokens are 7% of 229; 32 and 128 tokens are 1% of 3,200 and 12,800.
    for tokens, compact_every in ((900, 8), (930, 16), (12_700, 16), (12_800, 32), (131_072, 128)):
        choice, *_ = resolve(model, "auto", "25%", tokens=tokens)
        assert choice.make(64).compact_every == compact_every


def test_later_tokens_of_a_long_generation_replace_tokens_of_the_prompt(model):
    for new, reserved in ((100, True), (400, False)):  # int8 keeps 470 of 1000 tokens
        choice, *_ = resolve(model, "auto", "25%", new=new)
        assert choice.make(64).reserve_decode_slots == reserved


@pytest.mark.parametrize(
    ("policy", "heads", "message"),
    [
        ("chelsea:heads=auto", "auto", "has heads; remove them or heads='auto'"),
        ("exact:heads=auto", None, "policy exact keeps everything; remove heads='auto'"),
        ("auto", SHARES, "policy auto has heads; remove them or heads="),
        ("chelsea", "all", "heads='all' must be 'auto', a profile, shares of the heads, or None"),
        ("chelsea", 2, "heads=2 must be 'auto', a profile, shares of the heads, or None"),
        ("auto:recent=4", None, "auto takes no settings; pass kvzap:heads=auto with them"),
    ],
)
def test_invalid_heads_are_refused(model, policy, heads, message):
    with pytest.raises(ValueError, match=message):
        cache_options(policy, None if "exact:" in policy else "25%", heads)


def test_kvjax_alone_has_no_profile():
    with pytest.raises(ValueError, match="policy 'auto' is unknown"):
        PolicyChoice.parse("auto@25%")
    with pytest.raises(ValueError, match="heads=auto@25%: auto does not exist"):
        PolicyChoice.parse("chelsea:heads=auto@25%")


@pytest.mark.parametrize(
    ("text", "policy", "budget", "heads"),
    [
        ("auto", Auto(), None, None),
        ("auto@10%", Auto(), "10%", None),
        ("exact", PolicyChoice("exact"), None, None),
        ("snapkv:sinks=2@64 slots", PolicyChoice("snapkv", (("sinks", 2),)), 64, None),
        ("chelsea:heads=auto", PolicyChoice("chelsea"), None, AutoHeads()),
        ("chelsea:chunk=8,heads=auto@1MiB", PolicyChoice("chelsea", (("chunk", 8),)), "1MiB", AutoHeads()),
    ],
)
def test_text_becomes_values(text, policy, budget, heads):
    named, size = NamedPolicy.parse(text), None if budget is None else Budget.of(budget)
    assert named == NamedPolicy(policy, size, heads) and str(named) == text
    if size is None and text != "exact":
        size = Budget.of("25%")
        assert cache_options(text, None if text == "auto" else "25%", None) == (policy, size, heads)
    assert cache_options(named, None if named.budget or text == "exact" else size, None) == (policy, size, heads)


def test_a_saved_document_has_its_options(monkeypatch, tmp_path):
    """Also one of version 0.4, whose options were text."""
    monkeypatch.setattr("kvjax_models.profile.find_or_measure", lambda *_, **__: make_profile(NEEDS, scorer=None))
    llm, read_notes = tiny.make_llm(layers=LAYERS), Save.notes.fget
    texts = ["auto", "auto@50%", "snapkv:window_size=8@64 slots", "chelsea:recent=8,heads=auto@50%", "exact"]
    for number, text in enumerate(texts):
        document = llm.cache(text).read("A text of some words.", max_new_tokens=8, chat=False)
        document.save(tmp_path / str(number))
        for changes in ({}, {"policy": text, "budget": None, "heads": None}):

            def notes(save, changes=changes):
                saved = read_notes(save)
                return saved | {"cache": saved["cache"] | changes}

            monkeypatch.setattr(Save, "notes", property(notes))
            assert llm.open(tmp_path / str(number)).options == document.options
