"""Tokenizers of byte-level and byte-fallback models: special tokens, streamed text, chat templates."""

import dataclasses
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvjax_models.fingerprint import tokenizer_fingerprint
from kvjax_models.formats import chat_template
from kvjax_models.formats.huggingface_tokenizer import load_tokenizer
from kvjax_models.formats.tokenizer import Streamer, Tokenizer
from tests.models.support import time_limit

BOS, EOS = "<s>", "</s>"
TEXTS = ["the cat sat on the mat", "a café, naïve; 日本語 😀 and más", "def f(x):\n    return x"] * 3


def byte_level():
    """Like GPT-2, Llama 3 and Qwen: a token may end inside a character."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[BOS, EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def byte_fallback():
    """Like Llama 2 and Mistral: words start with a space mark, unknown characters become bytes."""
    vocabulary = {"<unk>": 0, BOS: 1, EOS: 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "th", "the", "▁the"]:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("▁", "t"), ("t", "h"), ("th", "e"), ("▁", "the")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([BOS, EOS])
    return backend


def metaspace(scheme):
    """Like newer conversions of SentencePiece: a pre-tokenizer writes the spaces."""
    backend = byte_fallback()
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return backend


KINDS = {"byte-level": byte_level(), "byte-fallback": byte_fallback()}


def with_bos(backend, template=f"{BOS} $A {EOS}"):
    """A post-processor that also appends EOS, which must not apply to generation."""
    backend = tokenizers.Tokenizer.from_str(backend.to_str())
    ids = [(token, backend.token_to_id(token)) for token in (BOS, EOS)]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return backend


def write(directory, backend, **files):
    backend.save(str(directory / "tokenizer.json"))
    for name, values in files.items():
        (directory / f"{name}.json").write_text(json.dumps(values))
    return directory


def bare(backend):
    return Tokenizer(backend, prefix_ids=(), eos_ids=(), special_tokens={})


@pytest.mark.parametrize("text", ["caf\udce9 </s>", "a\ud83d"])
def test_half_a_surrogate_pair_is_named(text):
    """Python reads invalid UTF-8 of standard input as such if no locale is set, as in containers."""
    tokenizer = bare(byte_level())
    for encode in (tokenizer.encode, tokenizer.encode_spans, lambda text: tokenizer.encode(tokenizer.escape(text))):
        with pytest.raises(ValueError, match=r"the text is not UTF-8: .* in position [13]: surrogates not allowed"):
            encode(text)


def stream(tokenizer, ids, **options):
    """The parts of a text that a streamer emits."""
    streamer = Streamer(tokenizer, **options)
    return [*map(streamer.push, ids), streamer.flush()]


@pytest.fixture(params=KINDS)
def backend(request):
    return KINDS[request.param]


@pytest.mark.parametrize(
    "add_bos_token, template, expected",
    [(None, True, True), (None, False, False), (True, False, True), (True, True, True), (False, True, False)],
)
def test_bos_follows_the_checkpoint(backend, tmp_path, add_bos_token, template, expected):
    config = {"bos_token": {"content": BOS}, "eos_token": EOS}
    config |= {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    write(tmp_path, with_bos(backend) if template else backend, tokenizer_config=config)
    tokenizer = load_tokenizer(tmp_path)
    plain = backend.encode("the cat", add_special_tokens=False).ids
    assert tokenizer.encode("the cat") == [backend.token_to_id(BOS)] * expected + plain
    assert tokenizer.encode_continuation("the cat", context=()) == plain
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    assert tokenizer.decode(tokenizer.encode("the cat"), skip_special_tokens=False).startswith(BOS) == expected


@pytest.mark.parametrize("config", [None, {"eos_token": EOS}, {"add_bos_token": True}])
def test_bos_follows_the_post_processor_if_no_file_names_it(backend, tmp_path, config):
    files = {} if config is None else {"tokenizer_config": config}
    with_template = with_bos(backend)
    ids = with_template.encode("the cat").ids
    tokenizer = load_tokenizer(write(tmp_path, with_template, **files))
    assert tokenizer.encode("the cat") == ids[:-1] and tokenizer.prefix_ids == (backend.token_to_id(BOS),)
    assert tokenizer.encode(f"{BOS}the cat").count(ids[0]) == 1  # not twice
    several = load_tokenizer(write(tmp_path, with_bos(backend, f"{EOS} {BOS} $A"), **files))  # as GLM-4 has it
    assert several.prefix_ids == (backend.token_to_id(EOS), backend.token_to_id(BOS))
    if not (config or {}).get("add_bos_token"):
        assert load_tokenizer(write(tmp_path, with_bos(backend, f"$A {EOS}"), **files)).prefix_ids == ()


@pytest.mark.parametrize("kind", [*KINDS, "first", "always", "never"])
def test_a_text_is_encoded_and_decoded_as_the_continuation_of_its_context(kind):
    backend = KINDS[kind] if kind in KINDS else metaspace(kind)
    tokenizer = Tokenizer(backend, (backend.token_to_id(BOS),), (), {})
    for context in ("the cat", "a", "sat \n", f"the cat{EOS}"):
        for text in (" the mat", "\nWhat", f"{EOS}the mat", "  e", "\n"):
            ids, whole = tokenizer.encode(context), tokenizer.encode(context + text)
            continuation = tokenizer.encode_continuation(text, ids)
            assert ids + continuation == whole
            before, after = (tokenizer.decode(tokens, skip_special_tokens=False) for tokens in (ids, whole))
            assert tokenizer.decode_continuation(continuation, ids, False) == after.removeprefix(before)
            if not context.endswith(EOS):
                assert tokenizer.encode(text, add_bos=False) == continuation
    # A token of the entire text spans both.
    ids = tokenizer.encode_continuation("e cat", tokenizer.encode("th"))
    assert [backend.id_to_token(ids[0]), tokenizer.decode_continuation(ids, [])] == ["e", "e cat"]


def test_truncation_and_padding_of_training_are_disabled(backend, tmp_path):
    limited = tokenizers.Tokenizer.from_str(backend.to_str())
    limited.enable_truncation(2)
    limited.enable_padding(length=50)
    tokenizer = load_tokenizer(write(tmp_path, limited))
    assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat"
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.special_ids == {backend.token_to_id(BOS), backend.token_to_id(EOS)}


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"generation_config": {"eos_token_id": [5, 7]}, "config": {"eos_token_id": 2}}, (5, 7)),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 2}}, (2,)),
        ({"config": {"eos_token_id": [3]}}, (3,)),
        ({"config": {"eos_token_id": None, "text_config": {"eos_token_id": [3, 4]}}}, (3, 4)),
        ({"config": {"eos_token_id": 2, "text_config": {"eos_token_id": [3, 4]}}}, (2,)),
        ({"generation_config": {"eos_token_id": 5}, "config": {"text_config": {"eos_token_id": 3}}}, (5,)),
        ({"config": {"text_config": None}, "tokenizer_config": {"eos_token": BOS}}, ("bos",)),
        ({"tokenizer_config": {"eos_token": BOS}}, "bos"),
        ({"special_tokens_map": {"eos_token": {"content": BOS}}}, "bos"),
        # The end of the assistant's turn is added to the end of the text.
        ({"generation_config": {"eos_token_id": 5}, "tokenizer_config": {"eos_token": BOS}}, (5, "bos")),
        ({"config": {"eos_token_id": 5}, "tokenizer_config": {"chat_template": f"{{{{ m }}}}{EOS}"}}, (5, "eos")),
        ({"config": {"eos_token_id": 5}, "tokenizer_config": {"eos_token": "<none>"}}, (5,)),
        ({}, ()),
    ],
)
def test_end_of_text_tokens(backend, tmp_path, files, expected):
    ids = {"bos": backend.token_to_id(BOS), "eos": backend.token_to_id(EOS)}
    expected = tuple(ids.get(token, token) for token in ([expected] if expected == "bos" else expected))
    assert load_tokenizer(write(tmp_path, backend, **files)).eos_ids == expected


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    text=st.text("ab 日é😀", min_size=2),
    times=st.sampled_from([1, 20]),
    cut=st.integers(0, 200),
)
def test_streaming_continues_a_context(kind, text, times, cut):
    """Context and parts join to the text, even if the context starts or ends inside a character."""
    tokenizer = bare(KINDS[kind])
    ids = tokenizer.encode(text * times)
    cut = cut % (len(ids) + 1)
    expected = tokenizer.decode(ids)
    # The complete characters of the context; byte fallback decodes none of a run of bytes that ends inside one.
    before = [tokenizer.decode(ids[: max(cut - unfinished, 0)]).rstrip("�") for unfinished in range(4)]
    before = max((text for text in before if expected.startswith(text)), key=len)
    assert before + "".join(stream(tokenizer, ids[cut:], context=ids[:cut])) == expected


@settings(max_examples=100, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), data=st.data())
def test_any_tokens_can_be_streamed(kind, data):
    """Invalid bytes cause no error, and the words after them are not lost."""
    tokenizer = bare(KINDS[kind])
    token = st.integers(0, tokenizer.vocab_size - 1).filter(lambda token: token not in tokenizer.special_ids)
    ids = [*data.draw(st.lists(token, max_size=60)), *tokenizer.encode("the cat " * 20)]
    assert "".join(stream(tokenizer, ids)).endswith("the cat the cat ")


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_no_part_ends_inside_a_character_or_changes_what_is_decoded(backend, skip_special_tokens):
    tokenizer, options = bare(backend), {"skip_special_tokens": skip_special_tokens}
    ids = tokenizer.encode("the cat 😀")[:-1]
    ids[1:1] = [backend.token_to_id(EOS)]
    assert "".join(stream(tokenizer, ids, **options)) == tokenizer.decode(ids, **options)
    parts = list(filter(None, stream(tokenizer, tokenizer.encode("日本 😀é the 👩‍👩‍👧 cat"))))
    assert len(parts) > 8 and not any("�" in part for part in parts)


def test_streaming_decodes_a_bounded_window(backend, monkeypatch):
    tokenizer, decoded, decode = bare(backend), [], Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, ids, *options: decoded.append(len(ids)) or decode(self, ids, *options)
    )
    broken = tokenizer.encode("😀")[-2] if backend is KINDS["byte-fallback"] else tokenizer.encode("😀")[-1]
    for ids in (tokenizer.encode("the cat 日本 " * 100), tokenizer.encode("日" * 600), [broken] * 500):
        expected = backend.decode(ids)
        decoded.clear()
        assert "".join(stream(tokenizer, ids)) == expected
        assert len(ids) >= 500 and max(decoded) <= 80


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role not in ['user', 'assistant'] %}{{ raise_exception('Unknown role ' ~ m.role) }}{% endif %}\n"
    "    {% if loop.index > 9 %}{% break %}{% endif %}\n"
    "[{{ m.role }}]{% generation %}{{ m.content | trim }}{% endgeneration %}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{{ {'a': '<é>'} | tojson }}{% endif %}"
)
NAMES = {"bos_token": BOS, "eos_token": EOS}
MESSAGES = [{"role": "user", "content": " the cat "}, {"role": "assistant", "content": "sat"}]
RENDERED = '<s>[user]the cat</s>\n[assistant]sat</s>\n[assistant]{"a": "<é>"}'


@pytest.mark.parametrize("place", ["config", "named", "file"])
def test_chat(backend, tmp_path, place):
    templates = {
        "config": TEMPLATE,
        "named": [{"name": "tools", "template": "?"}, {"name": "default", "template": TEMPLATE}],
        "file": "the file has precedence",
    }
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    config = NAMES | {"chat_template": templates[place]}
    tokenizer = load_tokenizer(write(tmp_path, with_bos(backend), tokenizer_config=config))
    assert tokenizer.render_chat(MESSAGES) == RENDERED
    assert tokenizer.render_chat(MESSAGES, add_generation_prompt=False) == RENDERED[: RENDERED.rindex("[")]
    ids = tokenizer.encode_chat(MESSAGES)
    assert ids == tokenizer.encode_continuation(RENDERED, context=())
    assert ids.count(backend.token_to_id(BOS)) == 1


def test_templates_see_all_special_tokens(backend, tmp_path):
    config = {"sep_token": "<sep>", "mask_token": {"content": "<mask>"}, "cls_token": None, "add_bos_token": False}
    config |= {"additional_special_tokens": ["<a>", {"content": "<b>"}], "extra_special_tokens": {"image_token": "<i>"}}
    template = "{{ messages[0].content }}{{ sep_token }}{{ mask_token }}{{ cls_token }}{{ image_token }}"
    template += "{{ additional_special_tokens | join }}{{ add_bos_token }}"
    tokenizer = load_tokenizer(write(tmp_path, backend, tokenizer_config=config | {"chat_template": template}))
    assert tokenizer.render_chat(MESSAGES[:1]).lstrip() == "the cat <sep><mask><i><a><b>"


OPTIONS_TEMPLATE = (
    "{% if messages[0].role != 'system' %}<s>[system]Be kind.{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[user]{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}[assistant]{{ m.content | trim }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if not enable_thinking | default(true) %}<think></think>{% endif %}"
    "{% endif %}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
)


OPTIONS_TOKENIZER = Tokenizer(KINDS["byte-level"], (), (), NAMES, OPTIONS_TEMPLATE)
OPENING = "<s>[system]Be kind.[user] the cat "


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ("{}", "[assistant]"),
        ('{"enable_thinking": false}', "[assistant]<think></think>"),
        ('{"tools": [{"name": "f"}], "add_generation_prompt": false}', '{"name": "f"}'),
        ('{"continue_final_message": true}', ""),
    ],
)
def test_options_reach_the_template(options, end):
    ids = OPTIONS_TOKENIZER.encode_chat(MESSAGES[:1], template_options=chat_template.parse_options(options))
    assert ids == OPTIONS_TOKENIZER.encode_continuation(OPENING + end, context=())


def test_a_continued_message_ends_as_the_template_trims_it():
    messages = [*MESSAGES[:1], {"role": "assistant", "content": "Sure: "}]
    text = OPTIONS_TOKENIZER.render_chat(messages, template_options={"continue_final_message": True})
    assert text == f"{OPENING}[assistant]Sure:"


def check_options(text):
    OPTIONS_TOKENIZER.render_chat(MESSAGES[:1], template_options=chat_template.parse_options(text))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_options('["think"]'), "must be a JSON object"),
        (lambda: check_options("{"), "is not JSON"),
        (lambda: check_options('{"enable_thinkin": true}'), "does not use 'enable_thinkin'"),
        (lambda: check_options('{"messages": []}'), "does not use 'messages'"),
        (lambda: check_options('{"continue_final_message": true, "add_generation_prompt": true}'),
         "exclude each other"),
        (lambda: OPTIONS_TOKENIZER.render_chat(MESSAGES, template_options="think"), "must be a dictionary"),
        (lambda: OPTIONS_TOKENIZER.render_chat([{"role": "user", "content": None}],
                                               template_options={"continue_final_message": True}),
         "requires a last message with a text"),
        (lambda: bare(KINDS["byte-level"]).render_chat(MESSAGES), "no chat template"),
        (lambda: dataclasses.replace(OPTIONS_TOKENIZER, chat_template=TEMPLATE).render_chat([{"role": "tool"}]),
         "Unknown role tool"),
    ],
)  # fmt: skip
def test_invalid_options_and_messages_are_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_a_text_before_a_tool_call_may_be_omitted():
    """Llama 3.1's and Mistral's templates render only the calls of such a message."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}"
        "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    call = {"role": "assistant", "content": "Let me look.", "tool_calls": [{"function": {"name": "weather"}}]}
    messages = [{"role": "user", "content": "Sun?"}, call, {"role": "tool", "content": "yes"}]
    assert chat_template.render(template, messages) == "<user>Sun?<assistant>weather<tool>yes"


def test_a_message_that_the_template_omits_is_refused():
    tokenizer = OPTIONS_TOKENIZER
    for messages in (
        [{"role": "critic", "content": "the cat"}],  # as other messages
        [{"role": "tool", "content": "a"}],  # as a part of others
        [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}],
    ):
        role = messages[0]["role"]
        with pytest.raises(ValueError, match=f"omits the content of message 1, whose role is '{role}'"):
            tokenizer.render_chat([*MESSAGES[:1], *messages])
    # Templates may change a content, put contents in another order, or refuse the texts that they are tested with.
    changed = "{% for m in messages %}{{ m.content.split('</think>')[-1] | upper | tojson }}{% endfor %}"
    messages = [{"role": "assistant", "content": "<think>Hm</think>no\n"}, {"role": "tool", "content": " "}]
    assert dataclasses.replace(tokenizer, chat_template=changed).render_chat(messages) == '"NO\\n"" "'
    strict = "{% for m in messages | reverse %}{% if m.content is not string or m.content[:2] == '70' %}"
    strict += "{{ raise_exception('no') }}{% endif %}{{ %s }}{% endfor %}"
    messages = [{"role": "user", "content": content} for content in "abca"]
    assert (
        dataclasses.replace(tokenizer, chat_template=strict.replace("%s", "m.content")).render_chat(messages) == "acba"
    )
    with pytest.raises(ValueError, match="omits the content of message 0"):
        dataclasses.replace(tokenizer, chat_template=strict.replace("%s", "1")).render_chat(messages[:1])


def test_the_time_to_render_is_linear_in_the_messages():
    """Also if the template refuses the texts with which the contents are tested."""
    template = "{% for m in messages %}{% if m.content[:1] != 'a' %}{{ raise_exception('no') }}{% endif %}"
    template += "{% if m.role == 'user' %}{{ m.content }}\n{% endif %}{% endfor %}"
    tokenizer = dataclasses.replace(OPTIONS_TOKENIZER, chat_template=template)
    messages = [{"role": "user", "content": f"a{number}"} for number in range(100_000)]
    with time_limit(60):
        assert tokenizer.render_chat(messages).count("\n") == len(messages)
        with pytest.raises(ValueError, match="omits the content of message 100000"):
            tokenizer.render_chat([*messages, {"role": "critic", "content": "absent"}])


def test_broken_directories(backend, tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)
    write(tmp_path, backend, tokenizer_config={"add_bos_token": True, "bos_token": "<none>"})
    with pytest.raises(ValueError, match="bos_token='<none>' is not in tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer_config.json is not JSON"):
        load_tokenizer(tmp_path)


def test_fingerprints_write_nothing_to_standard_output(capfd):
    # Before 0.23, the library prints a warning when it serializes a vocabulary with holes.
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 2, "c": 5}, unk_token="a"))
    assert len(tokenizer_fingerprint(bare(backend))) == 64
    print("text")
    assert capfd.readouterr().out == "text\n"
