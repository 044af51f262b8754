"""Special tokens that users spell out stay text, and chat templates write tokens: tokenizers of all kinds."""

import dataclasses
import functools
import pathlib
import tempfile

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvjax_models import formats
from kvjax_models.fingerprint import tokenizer_fingerprint
from kvjax_models.formats.special_tokens import MARK, SpecialTokens
from kvjax_models.formats.tokenizer import Tokenizer
from tests.models import tiny
from tests.models.gguf_files import add_value
from tests.models.support import time_limit
from tests.models.test_tokenizer import BOS, EOS, KINDS, metaspace

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ROLES = {"bos_token": BOS, "eos_token": EOS}


def strips_spaces():
    """Like Phi-3: special tokens include the white space after them, and the end of a text is not special."""
    backend = tokenizers.Tokenizer.from_str(KINDS["byte-fallback"].to_str())
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False, rstrip=True)])
    backend.add_tokens([AddedToken("</eot>", normalized=False), AddedToken("<think>", normalized=False)])
    return backend


def with_holes():
    """A vocabulary whose ids exceed the number of its tokens."""
    words = {character: 2 * number for number, character in enumerate(" </s>|endthca!")}
    backend = tokenizers.Tokenizer(models.WordLevel({**words, BOS: 51, EOS: 53, "?": 101}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([BOS, EOS])
    return backend


def from_gguf(directory):
    """SentencePiece in a GGUF file, with a special token that merges of its pieces would lead to."""
    letters = sorted(set("abcdefghijklmnopqrstuvwxyz<>/|[]\u2581"))
    pieces = ["<unk>", BOS, EOS, *letters, "</", "s>", "\u2581t", "th", "\u2581th", "<s"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [2, 3, 3, *[1] * (len(letters) + 6), *[6] * 256]
    path = directory / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", pieces)
    writer.add_array("tokenizer.ggml.token_type", kinds)
    writer.add_array("tokenizer.ggml.scores", [0.0, 0.0, 0.0, *(-float(i) for i in range(len(pieces) - 3))])
    for key, value in {"ggml.model": "llama", "ggml.unknown_token_id": 0, "chat_template": TEMPLATE}.items():
        add_value(writer, f"tokenizer.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return formats.load_tokenizer(path)


@functools.cache
def load(name):
    if name == "gguf":
        with tempfile.TemporaryDirectory() as directory:
            return from_gguf(pathlib.Path(directory))
    others = {"strips": strips_spaces, "holes": with_holes}
    backend = KINDS[name] if name in KINDS else others[name]() if name in others else metaspace(name)
    eos = [token for one in (EOS, "</eot>") if (token := backend.token_to_id(one)) is not None]
    return Tokenizer(backend, (backend.token_to_id(BOS),), tuple(eos), ROLES, TEMPLATE)


NAMES = [*KINDS, "first", "always", "never", "strips", "holes", "gguf"]
PARTS = [BOS, EOS, "<|end|>", "</eot>", "<think>", "<unk>", "<", "</", "s>", ">", "the cat", " ", "\n", "é"]
PARTS += [MARK, f"<{MARK}"]
texts = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


def as_text(tokenizer, text):
    """The library's tokens of a text in which no special token is parsed."""
    tokenizer.backend.encode_special_tokens = True
    try:
        return tokenizer.backend.encode(text, add_special_tokens=False).ids
    finally:
        tokenizer.backend.encode_special_tokens = False


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(NAMES), text=texts)
def test_special_tokens_of_a_text_are_text(name, text):
    tokenizer = load(name)
    ids = tokenizer.encode_continuation(tokenizer.escape(text), context=())
    assert not set(ids) & {*tokenizer.eos_ids, *tokenizer.prefix_ids}
    if "</eot>" not in text:  # not special for the library
        assert ids == as_text(tokenizer, text)
    parsed = dataclasses.replace(tokenizer, parse_special=True)
    ids = parsed.encode_continuation(parsed.escape(text), context=())
    assert ids == tokenizer.backend.encode(text, add_special_tokens=False).ids


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(NAMES), contents=st.lists(texts.filter(str.strip), min_size=1, max_size=3))
def test_only_the_special_tokens_of_a_template_are_tokens(name, contents):
    tokenizer = load(name)
    bos, eos = tokenizer.prefix_ids[0], tokenizer.eos_ids[0]
    ids = tokenizer.encode_chat([{"role": "user", "content": content} for content in contents])
    assert [token for token in ids if token in tokenizer.special_ids.union(tokenizer.eos_ids)] == (
        [bos, *[eos] * len(contents)]
    )
    # The library encodes the texts between special tokens one by one, as texts at the start of a sequence or not.
    if name in (*KINDS, "always", "never", "holes", "gguf"):
        expected = [bos]
        for content in contents:
            expected += [*as_text(tokenizer, f"[user]{content.strip()}"), eos]
        assert ids == expected + as_text(tokenizer, "[assistant]")


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_messages_do_not_join_to_a_special_token(name):
    tokenizer = load(name)
    for parts in (("<", "s>"), ("</", "s>"), ("a<", "/s", ">"), ("<", "/", "s", ">")):
        messages = [{"role": "user", "content": [{"type": "text", "text": part} for part in parts]}]
        ids = tokenizer.encode_chat(messages)
        found = [token for token in ids if token in tokenizer.special_ids]
        assert found == [tokenizer.prefix_ids[0], tokenizer.eos_ids[0]]
        assert ids == tokenizer.encode_chat([{"role": "user", "content": "".join(parts)}])


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(["byte-level", "byte-fallback", "always", "gguf"]), first=texts, second=texts)
def test_a_text_continues_special_tokens_that_are_text(name, first, second):
    tokenizer = load(name)
    ids = tokenizer.encode(tokenizer.escape(first))
    continuation = tokenizer.encode_continuation(tokenizer.escape(second), ids)
    entire = tokenizer.encode(tokenizer.escape(first + second))
    # Otherwise a token would span both texts.
    if entire[: len(ids)] == ids:
        assert ids + continuation == entire


def test_a_text_without_special_tokens_has_no_marks():
    for tokenizer in map(load, NAMES):
        for text in ("the cat > sat", f"a{MARK}b", "s> x"):
            assert tokenizer.escape(text) == text.replace(MARK, 2 * MARK)
            assert tokenizer._encode(text) == tokenizer.backend.encode(text, add_special_tokens=False).ids


def test_overlapping_special_tokens_and_many_of_them():
    backend = tokenizers.Tokenizer.from_str(KINDS["byte-level"].to_str())
    names = ["<a>", ">x", "<a><b>", *(f"<|reserved_{number}|>" for number in range(300))]
    backend.add_special_tokens(names)
    special = SpecialTokens(backend, [backend.token_to_id(name) for name in names])
    for text in ("<a>x", "<a><b>x", "<|reserved_1|>", "<|reserved_12|>", "<a>" * 3):
        assert special.count(text) and not special.count(special.escape(text))
        assert backend.decode(special.encode(special.escape(text))) == text
    with time_limit():  # the time is linear in the length of a text
        for text in ("<" * 10**6, "<|reserved_" * 10**5, "<|reserved_7|>" * 10**5):
            special.escape(text)
    assert not SpecialTokens(backend, []).count("<a>") and SpecialTokens(backend, []).escape("<a>") == "<a>"


def test_documents_questions_and_prompts_of_a_model():
    llm = tiny.make_llm(tiny.TEMPLATE)
    eos, bos = llm.tokenizer.eos_ids[0], llm.tokenizer.prefix_ids[0]
    text = f"The token {tiny.EOS} ends a text."
    cache = llm.cache()
    document = cache.read(text, max_new_tokens=128)
    assert eos not in document.tokens and text in llm.tokenizer.decode(document.tokens, skip_special_tokens=False)
    assert eos not in document.encode(f"Who wrote {tiny.EOS}?")
    plain = cache.read(text, chat=False)
    assert plain.tokens == tuple(llm.encode(text)) and eos not in plain.tokens and plain.tokens.count(bos) == 1
    parsing = dataclasses.replace(llm, tokenizer=dataclasses.replace(llm.tokenizer, parse_special=True))
    assert parsing.encode(text).count(eos) == 1
    assert tokenizer_fingerprint(parsing.tokenizer) == tokenizer_fingerprint(llm.tokenizer)  # of saves
    assert parsing.cache().read(text, max_new_tokens=128).tokens.count(eos) == 1
