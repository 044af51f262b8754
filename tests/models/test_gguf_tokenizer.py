"""Tokenizers in GGUF files: byte-level BPE and SentencePiece BPE, against the `tokenizers` library and by hand."""

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from kvjax_models import formats
from tests.models.gguf_files import add_value

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def write(path, tokens, kinds=None, architecture="llama", name=None, **metadata):
    writer = gguf.GGUFWriter(path, architecture)
    if name is not None:
        writer.add_name(name)
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [NORMAL] * len(tokens) if kinds is None else kinds)
    for key, value in metadata.items():
        key = f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}"
        add_value(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def byte_level(path, pre, **metadata):
    tokens = [*BYTES, "12", "123", "\u0120a", "<|end|>", "<tool>"]
    kinds = [NORMAL] * (len(tokens) - 2) + [CONTROL, USER_DEFINED]
    merges = ["1 2", "12 3", "\u0120 a"]
    write(path, tokens, kinds, model="gpt2", pre=pre, merges=merges, eos_token_id=len(tokens) - 2, **metadata)
    return formats.load_tokenizer(path)


@pytest.mark.parametrize(
    ("pre", "digits"), [("smollm", ["1", "2", "3", "4"]), ("llama-bpe", ["123", "4"]), ("qwen2", ["1", "2", "3", "4"])]
)
def test_numbers_are_split_as_the_pretokenizer_says(pre, digits, tmp_path):
    tokenizer = byte_level(tmp_path / "t.gguf", pre)
    assert tokenizer.backend.encode("1234").tokens == digits
    assert tokenizer.backend.encode(" a<|end|>b<tool>").tokens == ["\u0120a", "<|end|>", "b", "<tool>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    ids = {f"{role}_token_id": number for number, role in enumerate(("seperator", "mask", "cls", "padding"))}
    path = tmp_path_factory.mktemp("tokenizer") / "t.gguf"
    return byte_level(path, "smollm", chat_template="{{ bos_token }}", **ids)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_survives_bytes(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_and_template_come_from_the_file(tokenizer):
    end = tokenizer.backend.token_to_id("<|end|>")
    assert (tokenizer.prefix_ids, tokenizer.eos_ids) == ((), (end,)) and tokenizer.special_ids == {end}
    names = {"sep_token": BYTES[0], "mask_token": BYTES[1], "cls_token": BYTES[2], "pad_token": BYTES[3]}
    assert tokenizer.special_tokens == names | {"eos_token": "<|end|>"}
    assert tokenizer.chat_template == "{{ bos_token }}"


@pytest.mark.parametrize(
    ("pre", "metadata", "expected"),
    [
        ("llama-bpe", {}, True),
        ("tekken", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("gpt-4o", {}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_some_pretokenizers_imply_a_bos_token(pre, metadata, expected, tmp_path):
    tokenizer = byte_level(tmp_path / "t.gguf", pre, bos_token_id=len(BYTES), **metadata)
    assert tokenizer.prefix_ids == (len(BYTES),) * expected


@pytest.mark.parametrize(
    ("tokens", "metadata", "expected"),
    [
        (["<end_of_turn>", "<eos>"], {"eos_token_id": 1}, ["<eos>", "<end_of_turn>"]),
        (["<|eot_id|>", "<|eom_id|>", "<eot>"], {}, ["<|eot_id|>", "<|eom_id|>"]),
        (["[end]", "[call]"], {"eos_token_id": 0, "eom_token_id": 1}, ["[end]", "[call]"]),
        (["<|return|>", "<|call|>", "<|end|>"], {"eos_token_id": 0}, ["<|return|>", "<|call|>"]),
        (["<|end|>", "</s>"], {}, ["<|end|>"]),  # an HTML tag
        (["<|endoftext|>", "<|file_sep|>", "<|fim_pad|>"], {}, ["<|endoftext|>", "<|fim_pad|>", "<|file_sep|>"]),
    ],
)
def test_end_tokens_are_found_by_their_spelling(tokens, metadata, expected, tmp_path):
    metadata = {key: len(BYTES) + 1 + number for key, number in metadata.items()}
    write(tmp_path / "t.gguf", ["12", *BYTES, *tokens], model="gpt2", merges=["1 2"], **metadata)
    tokenizer = formats.load_tokenizer(tmp_path / "t.gguf")
    assert [tokenizer.backend.id_to_token(token) for token in tokenizer.eos_ids] == expected
    # They are special whatever their type.
    found = [token for token in expected if token.startswith("<")]
    assert tokenizer.backend.encode("".join(found)).tokens == found
    assert tokenizer.decode(tokenizer.encode("a" + "".join(found))) == "a"


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "c", "ab", "bc"]


def sentencepiece(path, scores, roles=None, **metadata):
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(PIECES) - 259)]
    scores = [0.0] * (len(PIECES) - len(scores)) + scores
    roles = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} if roles is None else roles
    write(path, PIECES, kinds, model="llama", scores=scores, **roles, **metadata)
    return formats.load_tokenizer(path)


@pytest.mark.parametrize(("scores", "expected"), [([-1.0, -2.0], ["ab", "c"]), ([-2.0, -1.0], ["a", "bc"])])
def test_pieces_with_larger_scores_merge_first(scores, expected, tmp_path):
    tokenizer = sentencepiece(tmp_path / "t.gguf", scores, add_space_prefix=False)
    assert tokenizer.backend.encode("abc").tokens == expected


def test_unknown_characters_become_bytes_and_spaces_survive(tmp_path):
    tokenizer = sentencepiece(tmp_path / "t.gguf", [-1.0, -2.0])
    assert tokenizer.prefix_ids == (1,) and tokenizer.eos_ids == (2,)
    without_ids = sentencepiece(tmp_path / "t.gguf", [-1.0, -2.0], roles={})
    assert (without_ids.prefix_ids, without_ids.eos_ids) == ((1,), (2,))  # SentencePiece's
    assert tokenizer.backend.encode("a \u00e9").tokens == ["\u2581", "a", "\u2581", "<0xC3>", "<0xA9>"]
    for text in ("a b", "  a  b ", "\u00e9\n\U0001f600", ""):
        assert tokenizer.decode(tokenizer.encode_continuation(text, context=())) == text


@pytest.mark.parametrize(
    ("architecture", "name", "strips"),
    [("llama", "Phi3", True), ("llama", "Phi 3.5 Mini", True), ("phi3", "Tuned", True), ("llama", "Tuned", False)],
)
def test_special_tokens_of_phi3_include_the_white_space_after_them(architecture, name, strips, tmp_path):
    tokens = [*PIECES, "<|user|>", "</s>", "<|endoftext|>"]
    tokens[2] = "\n"
    kinds = [UNKNOWN, CONTROL, NORMAL, *[BYTE] * 256, *[NORMAL] * (len(PIECES) - 259), CONTROL, USER_DEFINED, CONTROL]
    write(
        tmp_path / "t.gguf", tokens, kinds, architecture, name=name, model="llama", scores=[0.0] * len(tokens),
        add_bos_token=False, add_space_prefix=False,
    )  # fmt: skip
    encode = formats.load_tokenizer(tmp_path / "t.gguf").encode
    spaces = [] if strips else ["\n"]
    assert [tokens[i] for i in encode("<|user|>\na</s>\n")] == ["<|user|>", *spaces, "a", "</s>", *spaces]
    assert [tokens[i] for i in encode("<|endoftext|>\na")] == ["<|endoftext|>", "\n", "a"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model='t5' is not supported; supported: gpt2, llama"),
        ({"model": "gpt2"}, "tokenizer.ggml.merges must be a list"),
        ({"model": "gpt2", "merges": ["a"]}, "'a' is not a pair"),
        ({"model": "gpt2", "merges": ["a z"]}, "the vocabulary is invalid"),
        ({"model": "gpt2", "merges": ["a b"], "pre": "odd"}, "tokenizer.ggml.pre='odd' is not supported; supported: "),
        ({"model": "llama"}, "tokenizer.ggml.scores must be an array of 3 numbers"),
        ({"model": "gpt2", "merges": ["a b"], "eos_token_id": 3}, "eos_token_id=3 must be an integer from 0 to 2"),
        ({"model": "gpt2", "merges": ["a b"], "add_bos_token": True}, "bos_token_id is missing"),
    ],
)
def test_invalid_tokenizers_are_refused(metadata, message, tmp_path):
    write(tmp_path / "t.gguf", ["a", "b", "ab"], **metadata)
    with pytest.raises(ValueError, match=message) as error:
        formats.load_tokenizer(tmp_path / "t.gguf")
    assert "t.gguf" in str(error.value)


def test_a_word_in_the_vocabulary_needs_no_merges(tmp_path):
    tokens = [*BYTES, "ab", "\u0120abc"]
    for pre, expected in (("llama-bpe", ["\u0120abc"]), ("qwen2", ["\u0120", "ab", "c"])):
        write(tmp_path / "t.gguf", tokens, model="gpt2", pre=pre, merges=["a b"])
        assert formats.load_tokenizer(tmp_path / "t.gguf").backend.encode(" abc").tokens == expected
