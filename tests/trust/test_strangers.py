"""Directories and templates that a stranger made, or a bad disk: loaded as they should be, or refused by name."""

import contextlib
import json
import os
import random
import shutil
import signal
import struct
import time

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers

from kvjax_models import language_model
from kvjax_models.formats import chat_template, huggingface, untrusted_files
from kvjax_models.formats.huggingface_tokenizer import load_tokenizer
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.language_model import LanguageModel
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama

CONFIG = LlamaConfig(
    vocab_size=264, width=8, mlp_width=8, layers=1, query_heads=2, kv_heads=1, head_dim=4, max_length=64
)
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "Hello"}]
TEXT = "the cat sat"
MOST_SECONDS = 20


def make(directory, shards=False):
    """A small model with all files that are read."""
    huggingface.save_model(
        directory,
        Llama(CONFIG, rngs=nnx.Rngs(0)),
        bos_token_id=256,
        eos_token_id=257,
        max_shard_bytes=2000 if shards else 10**9,
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [257]}))
    return directory


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return make(tmp_path_factory.mktemp("sharded"), shards=True)


@contextlib.contextmanager
def at_most(seconds):
    """Fails where something takes longer."""

    def late(*_):
        raise AssertionError(f"it took more than {seconds} seconds")

    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


# --- directories ---

STRANGE = [None, -1, 0, 1e999, float("nan"), "8", "false", "", [], {}, [None], True, False, 10**12, 2**70, 1.5, "../x"]
JSON_FILES = ["config.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]


def spoil_file(directory, rng):
    """Something else in a file's place."""
    path = rng.choice(sorted(path for path in directory.iterdir() if path.name[0] != "."))
    data = path.read_bytes()
    how = rng.choice(["gone", "cut", "empty", "noise", "flip", "directory", "pipe", "out", "circle", "device", "bom"])
    path.unlink()
    if how == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "noise":
        path.write_bytes(rng.randbytes(100))
    elif how == "flip":
        place = rng.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :])
    elif how == "directory":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "out":
        (directory.parent / "elsewhere").write_bytes(data)
        path.symlink_to(directory.parent / "elsewhere")
    elif how == "circle":
        path.symlink_to(path)
    elif how == "device":
        path.symlink_to("/dev/zero")
    elif how == "bom":
        path.write_bytes(b"\xff\xfe" + data)
    return f"{how} {path.name}"


def spoil_json(directory, rng):
    """A value of another kind somewhere in a JSON file, or another top."""
    path = directory / rng.choice(JSON_FILES)
    values = json.loads(path.read_text())
    strange = rng.choice(STRANGE)
    if rng.random() < 0.1:
        values = strange
    else:
        names = [*values, "chat_template", "eos_token_id", "bos_token", "add_bos_token"]
        values[rng.choice(names)] = strange
    path.write_text(json.dumps(values))
    return f"{path.name} is {json.dumps(values)}"


def spoil_weights(directory, rng):
    """A safetensors file whose header says what is not so."""
    path = directory / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    name = rng.choice(sorted(set(header) - {"__metadata__"}))
    how = rng.choice(["size", "shape", "dtype", "offsets", "gone", "more", "kind", "nan", "long"])
    if how == "size":
        path.write_bytes(struct.pack("<Q", rng.choice([0, 1, size - 1, size + 1, 2**40, 2**63])) + data[8:])
        return "header's size"
    if how == "nan":
        path.write_bytes(data[: 8 + size] + b"\xff" * len(rest))
        return "values that are no numbers"
    if how == "shape":
        header[name]["shape"] = rng.choice([[], [-1], [2**40, 2**40], ["8"], None, 7, [1.5]])
    elif how == "dtype":
        header[name]["dtype"] = rng.choice(["I64", "BOOL", "F8_E4M3", "float", None, 3])
    elif how == "offsets":
        header[name]["data_offsets"] = rng.choice([[0, 10**12], [5, 1], [-1, 4], None, ["a", "b"], [0]])
    elif how == "gone":
        del header[name]
    elif how == "more":
        header["model.layers.99.mlp.up_proj.weight"] = header[name]
    elif how == "long":
        header |= {f"model.layers.{number}.mlp.up_proj.weight": header[name] for number in range(1000)}
    else:
        header[name] = rng.choice([None, [], "x", 1])
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    return f"{how} of {name}"


def outcome(directory, did):
    """What loading gives: the model, or an error that names the directory or a file of it."""
    try:
        with at_most(MOST_SECONDS):
            llm = language_model.load(directory)
            ids = llm.encode(TEXT)
            chat = llm.tokenizer.render_chat(MESSAGES) if llm.tokenizer.chat_template else None
    except (ValueError, OSError) as error:
        said = str(error)
        files_of = [*(path.name for path in directory.iterdir()), directory.name, "chat template", "tokenizer"]
        assert any(name in said for name in files_of), (did, said)
        return said
    except AssertionError:
        raise AssertionError(f"{did} hangs") from None
    assert llm.model.config == CONFIG or (directory / "config.json").stat().st_size, did
    # Whatever was spoilt, what came is whole: tokens that the model has, and a text that comes back.
    assert all(0 <= token < CONFIG.vocab_size for token in ids), did
    assert chat is None or isinstance(chat, str)
    return llm


@pytest.mark.parametrize("cases", [40, pytest.param(400, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("spoil", [spoil_file, spoil_json, spoil_weights])
def test_a_directory_is_loaded_as_it_should_be_or_refused_by_name(spoil, cases, good, tmp_path):
    rng, refused = random.Random(cases), 0
    for _ in range(cases):
        directory = tmp_path / "model"
        shutil.copytree(good, directory)
        refused += isinstance(outcome(directory, spoil(directory, rng)), str)
        shutil.rmtree(directory)
    assert refused > cases / 4  # and not because nothing was spoilt


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "/etc/passwd", "", ".", "..", "a/b", 5, None, [], "x\0y", "model.safetensors"]
)
def test_an_index_names_files_of_its_directory_alone(name, sharded, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(sharded, directory)
    shutil.copy(next(directory.glob("*.safetensors")), tmp_path / "elsewhere.safetensors")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    path.write_text(json.dumps(index))
    with pytest.raises((ValueError, FileNotFoundError), match="is not a file name|are missing: "):
        huggingface.load_model(directory)


def test_files_of_the_hubs_cache_are_links_to_its_blobs(good, tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(path for path in good.iterdir() if path.name[0] != "."):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert language_model.load(snapshot).model.config == CONFIG


def test_more_layers_than_there_are_tensors_are_refused_at_once(good, tmp_path):
    shutil.copytree(good, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 10**5}))
    with at_most(5), pytest.raises(ValueError, match="num_hidden_layers=100000"):
        huggingface.load_model(tmp_path / "model")


def test_json_of_any_depth_is_an_error(good, tmp_path):
    shutil.copytree(good, tmp_path / "model")
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        kept = (tmp_path / "model" / name).read_text()
        (tmp_path / "model" / name).write_text("[" * 200_000)
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            language_model.load(tmp_path / "model")
        (tmp_path / "model" / name).write_text(kept)


@pytest.mark.parametrize(
    "eos, message",
    [
        ([264], "end-of-text token 264 exceeds the model's vocabulary of 264 tokens"),
        (10**9, "end-of-text token 1000000000 exceeds"),
        (-1, "eos_token_id=-1"),
        ("2", "eos_token_id='2'"),
        (True, "eos_token_id=True"),
        ([1.5], "eos_token_id"),
        ({}, "eos_token_id"),
    ],
)
def test_an_end_of_text_outside_the_vocabulary_is_refused(eos, message, good, tmp_path):
    shutil.copytree(good, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ValueError, match=message):
        language_model.load(tmp_path / "model")


def test_a_tokenizer_that_panics_is_an_error(monkeypatch):
    class PanicException(BaseException):
        """As Rust's, which is no Exception."""

    class Backend:
        def encode(self, *_, **__):
            raise PanicException("called `Result::unwrap()` on an `Err` value")

        decode = encode

    tokenizer = Tokenizer(Backend(), (), (), {})
    with pytest.raises(ValueError, match="the tokenizer cannot encode this text: called"):
        tokenizer.encode("text")
    with pytest.raises(ValueError, match="the tokenizer cannot decode these tokens"):
        tokenizer.decode([1])


@pytest.mark.parametrize("expression", ["(a+)+b", "(a|aa)+$b"])
def test_a_regular_expression_that_tries_for_ever_is_an_error(expression, good, tmp_path):
    shutil.copytree(good, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    settings = json.loads(path.read_text())
    settings["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    path.write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path / "model")
    with at_most(MOST_SECONDS), pytest.raises(ValueError, match="cannot encode this text: .*retry-limit"):
        tokenizer.encode("a" * 100 + "!")


def test_a_tokenizer_of_another_model_is_refused(good):
    wide = LlamaConfig(**{**vars(CONFIG), "vocab_size": 200})
    with pytest.raises(ValueError, match="end-of-text token 257 exceeds the model's vocabulary of 200 tokens"):
        LanguageModel(Llama(wide, rngs=nnx.Rngs(0)), load_tokenizer(good))


# --- templates ---

LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
HOSTILE = {
    "loops": LOOPS,
    "doubles": DOUBLES,
    "writes": "{% for a in range(90000) %}{{ 'x' * 90000 }}{% endfor %}",
    "repeats": "{{ 'x' * 10000000000 }}",
    "pads": "{{ 'x'.ljust(10000000000) }}",
    "formats": "{{ '%010000000000d' % 1 }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "recurses": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "divides": "{{ 1 / 0 }}",
    "reaches": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "calls": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "changes": "{{ messages.append(1) }}",
    "includes": "{% include '/etc/passwd' %}",
    "wrong": "{% for %}",
    "unknown": "{{ nothing.there.at.all }}",
    "surrogate": "{{ '\\ud800' }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_soon_with_an_error(name, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 2)
    begin = time.monotonic()
    with pytest.raises(ValueError, match="the chat template"):
        chat_template.render(HOSTILE[name], {"messages": MESSAGES, "add_generation_prompt": True})
    assert time.monotonic() - begin < MOST_SECONDS


def test_what_messages_may_hold():
    assert chat_template.render("{{ messages[0].content }}", {"messages": [{"content": "é\n日本 😀"}]}) == "é\n日本 😀"
    with pytest.raises(ValueError, match="messages must be serializable as JSON"):
        chat_template.render("", {"messages": [{"content": b"bytes"}]})


# --- reading ---


def test_a_file_that_is_too_long_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted_files, "MAX_TEXT_BYTES", 10)
    (tmp_path / "config.json").write_text("{}" + " " * 9)
    with pytest.raises(ValueError, match="has 11 bytes; the maximum is 10"):
        untrusted_files.read_json_object(tmp_path, "config.json")


def test_weights_of_another_type_are_those_that_were_saved(tmp_path):
    made = Llama(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    huggingface.save_model(tmp_path, made)
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("model.norm.weight"), made.norm.scale[...])
