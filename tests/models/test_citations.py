"""Citations: attention of retrieving heads against a plain computation, characters of tokens, and the API."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.combinators.head_budgets import retrieving_heads
from kvjax_models import Citation, citations
from kvjax_models.citations import MAX_CHARACTERS, attention_to_text, find_citations, text_parts, token_spans
from kvjax_models.model.config import AttentionConfig
from kvjax_models.model.rotary import rotation
from kvjax_models.prompts import render_context
from tests.models import tiny
from tests.models.support import make_profile
from tests.models.test_hybrid import HYBRID
from tests.models.test_special_tokens import PARTS, load

TEXT = "".join(f"Line {number}: the code is {7315 + 11 * number}.\n\n" for number in range(6))
QUESTION, ANSWER = "Which code is in line 3?", " It is 7348."
FULL = [(0, 1), (1, 0)]
SNAPKV = kvjax.SnapKV(60, window_size=6, compact_every=8)
HEADS = kvjax.HeadBudgets(kvjax.SnapKV(120, window_size=6, compact_every=8), retrieving_heads(2, 2, FULL))


@functools.cache
def llm():
    return tiny.make_lively_llm()


@pytest.fixture(autouse=True)
def profile(monkeypatch):
    """A profile in which the first head of `FULL` retrieves most; the model is too small to be measured."""
    profile = make_profile([[0.1, 1], [0.1, 0.1]])
    monkeypatch.setattr("kvjax_models.profile.find_or_measure", lambda *_: profile)


def read(policy="exact", text=TEXT, budget=None, **options):
    return llm().cache(policy, budget).read(text, max_new_tokens=96, **options)


def full_attention(model, tokens):
    """Returns the attention probabilities [layers, H_q, T, T] of a text, in float32."""
    x, all_probabilities = model.embed(jnp.asarray([tokens])), []
    for number, layer in enumerate(model.layers):
        angles = rotation(model.config.rotary(number, 512), jnp.arange(len(tokens))[None])
        queries, keys, values = layer.project(x, angles)
        group = queries.shape[2] // keys.shape[2]
        keys, values = (jnp.repeat(one, group, axis=2) for one in (keys, values))
        logits = jnp.einsum("bthd,bshd->bhts", queries, keys) / np.sqrt(queries.shape[3])
        logits = jnp.where(jnp.tril(jnp.ones(logits.shape[2:], bool)), logits, -jnp.inf)
        probabilities = jax.nn.softmax(logits, axis=-1)
        all_probabilities.append(probabilities[0])
        x = layer.finish(x, jnp.einsum("bhts,bshd->bthd", probabilities, values))
    return np.stack(all_probabilities)


@pytest.mark.parametrize("name", ["exact", "heads", "int8"])
def test_attention_is_that_of_all_tokens(name):
    """Also over several blocks of the suffix. Compression and quantization change the queries of later layers."""
    model, kv_dtype = llm().model, "int8" if name == "int8" else None
    document = llm().cache(HEADS if name == "heads" else "exact", kv_dtype=kv_dtype).read(TEXT, chat=False)
    heads = {"exact": [(0, 0), (0, 1), (1, 0), (1, 1)], "heads": FULL[:1], "int8": [(0, 0), (0, 1)]}[name]
    new = llm().tokenizer.encode_continuation(f"\n{QUESTION}{ANSWER}")
    first = len(new) - len(ANSWER)
    actual = attention_to_text(document.prefix, document.suffix_sizes(len(new)), new, first, heads)
    expected = full_attention(model, [*document.tokens, *new])[:, :, document.num_tokens + first :]
    # The mean over a group's query heads, and the maximum over queries.
    expected = expected.reshape(2, 2, 2, len(ANSWER), -1)[..., : document.num_tokens].mean(axis=2).max(axis=2)
    assert len(new) > 32 and actual.dtype == np.float32
    for attention, head in zip(actual, heads, strict=True):
        np.testing.assert_allclose(attention, expected[head], atol=3e-2 if kv_dtype else 1e-5)


# --- spans ---

UNICODE = [*PARTS, "e\u0301", "日本", "😀", "👨\u200d👩\u200d👧", "ﬁ", "\t", "x. Y"]
texts = st.lists(st.sampled_from(UNICODE), min_size=1, max_size=8).map("".join)
KINDS = ("byte-level", "byte-fallback", "first", "always", "never", "gguf")


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(KINDS), text=texts)
def test_the_characters_of_tokens_are_their_text(name, text):
    tokenizer = load(name)
    ids, spans, plain = tokenizer.encode_spans(tokenizer.escape(text))
    assert plain == text and ids == tokenizer.encode_continuation(tokenizer.escape(text), context=())
    assert len(spans) == len(ids) and spans == sorted(spans)
    for number, (start, end) in enumerate(spans[:-1], 1):
        assert 0 <= start <= end <= len(text)
        if end <= spans[number][0]:  # otherwise both tokens have bytes of a character
            assert tokenizer.decode(ids[:number], False).lstrip(" ") == text[:end].lstrip(" ")


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(KINDS), contents=st.lists(texts.filter(str.strip), min_size=1, max_size=3))
def test_tokens_of_a_conversation_have_characters_in_its_contents(name, contents):
    tokenizer = load(name)
    rendered = render_context(tokenizer, [{"role": "user", "content": content} for content in contents])
    ids = tokenizer.encode_continuation(rendered, context=())
    spans, text = token_spans(tokenizer, ids, rendered, contents), "\n\n".join(contents)
    entire, plain = tokenizer.encode_spans(rendered)[1:]
    last = len(text) - len(contents[-1]) + contents[-1].index(contents[-1].strip())
    for (start, end), (first, stop) in zip(spans, entire, strict=True):
        if end > start:
            assert text[start:end] in plain[first:stop]
    covered = {index for start, end in spans for index in range(start, end)}
    assert covered >= set(range(last, last + len(contents[-1].strip())))
    assert token_spans(tokenizer, [*ids, ids[0]], rendered, contents) is None


def test_the_text_of_token_ids_is_decoded():
    tokens = llm().tokenizer.encode(TEXT)
    document = read(text=tokens)
    assert document.text == f"{tiny.BOS}{TEXT}"
    assert document._token_spans[:2].tolist() == [[0, len(tiny.BOS)], [len(tiny.BOS), len(tiny.BOS) + 1]]
    # The same tokens in a plain text, without BOS.
    plain = read(chat=False)
    assert plain.tokens == document.tokens and plain.text == TEXT
    np.testing.assert_array_equal(plain._token_spans[1:] + len(tiny.BOS), document._token_spans[1:])


def test_special_tokens_in_a_text_are_text():
    text = f"The{tiny.EOS} code is 7315."
    document = read(text=text)
    spans = document._token_spans
    assert (spans[: len("[user] ")] == 0).all() and spans[len("[user] ") :, 1].tolist() == [*range(1, len(text) + 1)]
    parsing = dataclasses.replace(llm().tokenizer, parse_special=True)
    np.testing.assert_array_equal(document.with_tokenizer(parsing)._token_spans, spans)


# --- parts ---


def test_parts_are_sentences_of_limited_length():
    long = "word " * 100
    text = f'  One is 1.5 m. "Two?" (Three!)  Four\n \nFive\nsix\n\n{long}{"x" * 450} 日本。東京'
    parts = [text[start:end] for start, end in text_parts(text)]
    assert parts[:5] == ["One is 1.5 m.", '"Two?"', "(Three!)", "Four", "Five\nsix"]
    assert parts[-2:] == ["x" * 50 + " 日本。", "東京"]
    assert max(map(len, parts)) <= MAX_CHARACTERS and "".join("".join(parts).split()) == "".join(text.split())


def test_citations_are_the_parts_with_most_attention():
    text = "First code. Second code is 7. Third."
    spans = np.array([[index, index + 1] for index in range(len(text))])
    attention = np.full((2, len(text)), 1e-3)
    attention[:, :8] = 1  # sinks
    attention[0, text.index("7")], attention[1, text.index("Third")] = 0.5, 0.25
    first, second, third = find_citations(text, spans, attention)
    assert (first.text, second.text, third.text) == ("Second code is 7.", "Third.", "First code.")
    assert text[first.start : first.end] == first.text and isinstance(first.start, int)
    assert sum(one.weight for one in (first, second, third)) == pytest.approx(1, abs=0.01)
    assert first.weight == pytest.approx(2 * second.weight, rel=0.1)
    assert find_citations(text, np.zeros_like(spans), attention) == ()


# --- the API ---


def assert_cited(document, completion):
    assert 1 <= len(completion.citations) <= 3
    for citation in completion.citations:
        assert isinstance(citation, Citation) and document.text[citation.start : citation.end] == citation.text
        assert 0 < citation.weight <= 1 and 0 < len(citation.text) <= MAX_CHARACTERS
    assert [*completion.citations] == sorted(completion.citations, key=lambda one: -one.weight)


CITE = {"max_new_tokens": 12, "cite": True, "return_details": True}


def test_answers_have_citations(tmp_path):
    document = read(HEADS)
    completions, usage = document.ask([QUESTION, "Who?"], n=2, temperature=1.0, **CITE)
    assert usage.new_tokens == 48
    for question, answers in zip([QUESTION, "Who?"], completions, strict=True):
        for completion in answers:
            assert_cited(document, completion)
            assert completion.citations == document.cite(document.encode(question), completion.tokens)
    document.save(tmp_path)
    restored = llm().open(tmp_path)
    assert restored.text == TEXT and restored.ask(QUESTION, **CITE)[0] == document.ask(QUESTION, **CITE)[0]
    assert document.ask(QUESTION, max_new_tokens=12, return_details=True)[0].citations is None


def test_continuations_of_a_plain_text_have_citations():
    document, streamed = read(chat=False), read(chat=False, streaming=True)
    for text in ("Which", ""):
        completion, _ = document.generate(text, **CITE)
        assert_cited(document, completion)
        expected = [one.text for one in streamed.generate(text, **CITE)[0].citations]
        assert [one.text for one in completion.citations] == expected
    # The first token was predicted from the text alone, the second one from the text and the first one.
    assert document.cite([], completion.tokens[:1]) == () != document.cite([], completion.tokens[:2])


def test_conversations_and_hybrid_models_cite():
    messages = [{"role": "system", "content": "  Answer. "}, {"role": "user", "content": TEXT}]
    document = read(text=messages)
    assert document.text == f"  Answer. \n\n{TEXT}"
    for one in (document, tiny.make_lively_llm(**HYBRID).cache("exact").read(TEXT, max_new_tokens=96)):
        assert_cited(one, one.ask(QUESTION, **CITE)[0])


def test_citations_that_are_not_possible_are_refused():
    on_mesh = types.SimpleNamespace(generator=types.SimpleNamespace(mesh="mesh"))
    for call, message in (
        (lambda: read().ask(QUESTION, cite=True), "citations are part of the details; pass return_details=True"),
        (
            lambda: read(SNAPKV).ask(QUESTION, **CITE),
            'needs retrieving heads that keep every token.*policy "exact", or,',
        ),
        (lambda: citations.cited_heads(on_mesh, None), "load the model without a mesh"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_heads_retrieve_by_the_profile_and_keep_every_token():
    assert citations.cited_heads(read().prefix, None) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert citations.cited_heads(read(HEADS).prefix, None) == FULL
    for document in (read(HEADS), read()):
        assert citations.cited_heads(document.prefix, document._profile) == FULL[:1]
    windowed = tiny.make_lively_llm(attention=AttentionConfig(windows=(24, None))).cache("exact").read(TEXT)
    assert citations.cited_heads(windowed.prefix, None) == [(1, 0), (1, 1)]
