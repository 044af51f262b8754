"""Budgets of short texts: a share holds as much as the smallest cache that works, and says so."""

import re
import warnings

import numpy as np
import pytest

import kvjax
from kvjax.budget import Budget, SmallBudgetWarning, fit_bytes, fit_share, limited_bytes
from kvjax.registry import POLICIES
from kvjax.spec import TILE
from kvjax_models.runner import auto_policy
from tests.kvjax.support import make_spec
from tests.models import tiny
from tests.models.support import make_profile

TEXT = "My cat is called Bo."
# One policy per kind of store that a short text may be held in.
NAMES = ("snapkv", "chelsea", "balancekv", "subgen_mean", "clusterkv", "h2o", "quest", "uniform", "streaming_llm")
RUN = ("auto", "snapkv", "balancekv", "quest")


@pytest.fixture(scope="module")
def llm():
    return tiny.make_lively_llm()


@pytest.fixture(autouse=True)
def profile(monkeypatch):
    """A profile without scorer, in place of one that is measured."""
    profile = make_profile(np.linspace(0.1, 0.9, 4).reshape(2, 2), scorer=None)
    monkeypatch.setattr("kvjax_models.profile.find_or_measure", lambda *_, **__: profile)


@pytest.mark.parametrize("share", ["3%", "25%", "100%"])
@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("name", NAMES)
def test_a_share_of_a_short_text_holds_the_smallest_cache(name, tokens, share):
    spec, make, full = make_spec(prompt=tokens, new=16), POLICIES[name], kvjax.Exact(16)
    limit = Budget.of(share).limit(spec, spec.capacity)
    policy = fit_share(make, spec, limit, full)
    held = limited_bytes(policy, spec)
    if held <= limit:
        assert policy == full or policy == fit_bytes(make, spec, limit)
        return
    assert held <= limited_bytes(full, spec)
    if policy != full:
        assert policy.budget % TILE == 0
        # No smaller one has a slot to choose tokens for.
        with pytest.raises(ValueError, match="budget|slots|limit|recent"):
            limited_bytes(make(policy.budget - TILE - 1), spec)


@pytest.mark.parametrize("name", ["auto", "snapkv", "chelsea", "uniform"])
def test_a_larger_share_holds_no_less(llm, name):
    """From a short text to one that is not, in both directions."""
    for tokens in (20, 60, 200):
        held = [llm.cache(name, f"{share}%").document_generator(tokens, 16).row_bytes for share in range(5, 101, 19)]
        assert held == sorted(held)


@pytest.mark.parametrize("name", NAMES[:4])
def test_a_share_of_a_long_text_is_as_before(name):
    spec = make_spec(prompt=4000, new=64)
    limit = spec.full_cache_bytes(4064) // 4
    policy = fit_share(POLICIES[name], spec, limit, kvjax.Exact(16))
    assert policy == fit_bytes(POLICIES[name], spec, limit) and limited_bytes(policy, spec) <= limit


@pytest.mark.parametrize("budget", ["3%", "25%", "100%"])
@pytest.mark.parametrize(("name", "heads"), [(name, "auto") for name in NAMES[:5]] + [("quest", None), ("auto", None)])
def test_sizes_say_what_is_held(llm, name, heads, budget):
    generator = llm.cache(name, budget, heads=heads).document_generator(21, 64)
    full = sum(spec.full_cache_bytes(21) for spec in generator.specs)
    described = generator.describe_share({"cache_bytes": generator.row_bytes, "full_cache_bytes": full}, 21)
    assert budget != "3%" or generator.is_short
    if generator.is_short:
        assert re.fullmatch(r"holds ([5-9]\d|100)%: the text is short", described)  # 16 slots on average, in tiles
    else:
        bytes_limited = sum(map(limited_bytes, generator.policies, generator.specs))
        assert bytes_limited <= float(budget[:-1]) / 100 * full and "full bfloat16 cache" in described


@pytest.mark.parametrize("policy", RUN)
def test_every_way_to_answer_takes_a_short_text(llm, policy):
    cache, options = llm.cache(policy, "25%"), {"max_new_tokens": 6}
    document = cache.read(TEXT, max_new_tokens=64)
    assert "%: the text is short" in repr(document)
    answer, usage = document.ask("Who?", return_details=True, **options)
    assert len(answer.tokens) == 6 and usage.is_short
    completion, usage = cache.generate(TEXT, return_details=True, **options)
    assert usage.is_short and completion.text == "".join(cache.stream(TEXT, **options))
    [many] = cache.generate_many([TEXT], batch_size=1, **options)
    assert many.text == completion.text


def test_a_short_text_that_is_held_entirely_answers_as_the_full_cache(llm, tmp_path):
    document = llm.cache("chelsea", "25%").read(TEXT, max_new_tokens=64)
    assert "holds 100%: the text is short" in repr(document)
    full = llm.cache().read(TEXT, max_new_tokens=64)
    assert document.ask("Who?", max_new_tokens=8) == full.ask("Who?", max_new_tokens=8)
    document.save(tmp_path)
    assert repr(llm.open(tmp_path)) == repr(document)


@pytest.mark.parametrize(
    ("budget", "message"),
    [("500B", "limit=250 bytes .* too small"), ("8 slots", "budget=8 slots cannot hold"), (8, "=8 ")],
)
def test_budgets_in_bytes_and_slots_are_strict(llm, budget, message):
    for call in (llm.cache("snapkv", budget).read, lambda text: llm.generate(text, "snapkv", budget, max_new_tokens=4)):
        with pytest.raises(ValueError, match=message):
            call(TEXT)


def test_descriptions_of_longer_texts(llm):
    document = llm.cache("snapkv", "25%").read(TEXT * 30, max_new_tokens=64)
    assert not document.prefix.generator.is_short and document.cache_bytes <= document.full_cache_bytes / 4
    assert "% of a full bfloat16 cache" in repr(document)
    # A full cache of a short text, in float32 and in tiles of 16 slots, is larger than a full one in bfloat16.
    assert "24,592 bytes, a full bfloat16 cache takes 11.8 KiB" in repr(llm.cache().read(TEXT * 2, max_new_tokens=64))


def test_an_empty_text_is_refused(llm):
    for text in ("", " \n", [], ()):
        with pytest.raises(ValueError, match="the text is empty; pass a text, messages or token ids"):
            llm.cache("auto", "25%").read(text)


def test_the_name_of_a_file_gets_a_hint(llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("A book.")
    (tmp_path / "directory").mkdir()
    cache, message = llm.cache(), r"the text 'book.txt' is the name of a file, which is not read; .*read_text"
    for call in (
        cache.read,
        lambda text: cache.generate(text, max_new_tokens=2),
        lambda text: next(cache.stream(text)),
    ):
        with pytest.warns(UserWarning, match=message):
            call("book.txt")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for text in ("directory", "no_such.txt", "A book.", "x\0y"):
                call(text)


def test_one_warning_for_a_small_budget(llm):
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        cache = llm.cache("uniform:recent=2", 25)
        for _ in range(2):
            cache.read(TEXT * 30, max_new_tokens=32).ask("Who?", max_new_tokens=2)
        llm.cache("quest", 32).generate(TEXT * 30, max_new_tokens=2)  # which holds every token
        cache.read(TEXT)
        llm.cache("snapkv", "1%").read(TEXT)
    assert [str(one.message)[:15] for one in caught if one.category is SmallBudgetWarning] == ["budget=25 slots"]


def test_slots_for_new_tokens_take_at_most_half_of_a_budget(llm):
    """SnapKV reserves them. A long prompt had 48 other slots, and its summary said that it was short."""

    def kept(policy, num_new, budget="25%"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.resetwarnings()
            size = llm.cache(policy, budget).rows(2000, num_new)[-1]
        assert not caught or "slots reserved for new tokens" in str(caught[0].message)
        return size.plan.held_share(2000), bool(caught)

    expected = kept("snapkv:reserve_decode_slots=false", 1000)
    assert expected[0] > 0.15 and not expected[1]
    for policy in ("snapkv", "snapkv:alpha_safeguard=0.2", kvjax.SnapKV):
        assert kept(policy, 1000) == pytest.approx(expected, abs=0.02), policy
    share, warns = kept("snapkv:reserve_decode_slots=true", 1000)
    assert share < 0.05 and warns
    reserved = kept("snapkv:reserve_decode_slots=true", 16, "60%")
    assert kept("snapkv", 16, "60%") == reserved != kept("snapkv:reserve_decode_slots=false", 16, "60%")


def test_text_and_tail_have_the_format_of_one_resolution(llm, monkeypatch):
    """Between the lengths at which bytes are a fifth of the text, and of the bucket of its length."""
    monkeypatch.setattr(auto_policy, "_FORMATS_WITH_FEW_HEADS", auto_policy._AUTO_FORMATS)
    formats = set()
    full = llm.cache().document_generator(1, 64).specs[0].full_cache_bytes(1) * 2
    for tokens in (900, 960, 1000, 1023):
        cache = llm.cache("auto", f"{full * 960 // 5}B")
        reader = cache.document_generator(tokens, 64)
        assert cache.suffix_rows(reader, 8, 56)[-1].kv_dtype == reader.kv_dtype
        formats.add(reader.kv_dtype)
    assert formats == {"int8", "int4"}
