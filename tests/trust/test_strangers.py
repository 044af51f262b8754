"""Directories and templates from untrusted sources: loaded correctly, or refused with the name of the file."""

import contextlib
import dataclasses
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
from kvjax_models.model.llama import Llama
from tests.models.support import small_config

CONFIG = small_config(vocab_size=264, width=8, mlp_width=8, head_dim=4, max_length=64)
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "Hello"}]
TEXT = "the cat sat"
MAX_SECONDS = 20


def write_checkpoint(directory, max_shard_bytes=10**9):
    """Writes a small model with all files that are read."""
    options = {"bos_token_id": 256, "eos_token_id": 257, "max_shard_bytes": max_shard_bytes}
    huggingface.save_model(directory, Llama(CONFIG, rngs=nnx.Rngs(0)), **options)
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
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def directory(checkpoint, tmp_path):
    """A copy of the checkpoint that the test changes."""
    return shutil.copytree(checkpoint, tmp_path / "model")


@contextlib.contextmanager
def time_limit(seconds=MAX_SECONDS):
    def fail(*_):
        raise AssertionError(f"took more than {seconds} seconds")

    handler = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


# --- Directories ---

INVALID_VALUES = [
    None, -1, 0, 1e999, float("nan"), "8", "false", "", [], {}, [None], True, False, 10**12, 2**70, 1.5, "../x",
]  # fmt: skip
JSON_FILES = ["config.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]


def damage_file(directory, rng):
    """Replaces a file by something else."""
    path = rng.choice(sorted(path for path in directory.iterdir() if path.name[0] != "."))
    data = path.read_bytes()
    kinds = ["remove", "truncate", "empty", "noise", "flip", "directory", "pipe", "link", "cycle", "device", "bom"]
    kind = rng.choice(kinds)
    path.unlink()
    if kind == "truncate":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "noise":
        path.write_bytes(rng.randbytes(100))
    elif kind == "flip":
        index = rng.randrange(len(data))
        path.write_bytes(data[:index] + bytes([data[index] ^ (1 << rng.randrange(8))]) + data[index + 1 :])
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (directory.parent / "elsewhere").write_bytes(data)
        path.symlink_to(directory.parent / "elsewhere")
    elif kind == "cycle":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "bom":
        path.write_bytes(b"\xff\xfe" + data)
    return f"{kind} {path.name}"


def damage_json(directory, rng):
    """Replaces a value in a JSON file, or all of it."""
    path = directory / rng.choice(JSON_FILES)
    values = json.loads(path.read_text())
    value = rng.choice(INVALID_VALUES)
    if rng.random() < 0.1:
        values = value
    else:
        names = [*values, "chat_template", "eos_token_id", "bos_token", "add_bos_token"]
        values[rng.choice(names)] = value
    path.write_text(json.dumps(values))
    return f"{path.name} is {json.dumps(values)}"


def damage_weights(directory, rng):
    """Writes a safetensors file with an invalid header or invalid values."""
    path = directory / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    name = rng.choice(sorted(set(header) - {"__metadata__"}))
    kind = rng.choice(["size", "shape", "dtype", "offsets", "remove", "add", "type", "nan", "long"])
    if kind == "size":
        path.write_bytes(struct.pack("<Q", rng.choice([0, 1, size - 1, size + 1, 2**40, 2**63])) + data[8:])
        return "size of the header"
    if kind == "nan":
        path.write_bytes(data[: 8 + size] + b"\xff" * len(rest))
        return "NaN"
    if kind == "shape":
        header[name]["shape"] = rng.choice([[], [-1], [2**40, 2**40], ["8"], None, 7, [1.5]])
    elif kind == "dtype":
        header[name]["dtype"] = rng.choice(["I64", "BOOL", "F8_E4M3", "float", None, 3])
    elif kind == "offsets":
        header[name]["data_offsets"] = rng.choice([[0, 10**12], [5, 1], [-1, 4], None, ["a", "b"], [0]])
    elif kind == "remove":
        del header[name]
    elif kind == "add":
        header["model.layers.99.mlp.up_proj.weight"] = header[name]
    elif kind == "long":
        header |= {f"model.layers.{number}.mlp.up_proj.weight": header[name] for number in range(1000)}
    else:
        header[name] = rng.choice([None, [], "x", 1])
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    return f"{kind} {name}"


def load_or_message(directory, case):
    """Returns None if the directory loads correctly, and otherwise the error, which must name it or a file of it."""
    try:
        with time_limit():
            llm = language_model.load(directory)
            ids = llm.encode(TEXT)
            chat = llm.tokenizer.render_chat(MESSAGES) if llm.tokenizer.chat_template else ""
    except (ValueError, OSError) as error:
        message = str(error)
        names = [*(path.name for path in directory.iterdir()), directory.name, "chat template", "tokenizer"]
        assert any(name in message for name in names), (case, message)
        return message
    assert llm.model.config == CONFIG or (directory / "config.json").stat().st_size, case
    assert all(0 <= token < CONFIG.vocab_size for token in ids), case
    assert isinstance(chat, str), case
    return None


@pytest.mark.parametrize("cases", [40, pytest.param(400, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("damage", [damage_file, damage_json, damage_weights])
def test_damaged_directories(damage, cases, checkpoint, tmp_path):
    rng, num_refused = random.Random(cases), 0
    for _ in range(cases):
        directory = shutil.copytree(checkpoint, tmp_path / "model")
        num_refused += load_or_message(directory, damage(directory, rng)) is not None
        shutil.rmtree(directory)
    assert num_refused > cases / 4  # most cases are damage


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "/etc/passwd", "", ".", "..", "a/b", 5, None, [], "x\0y", "model.safetensors"]
)
def test_an_index_may_only_name_files_of_its_directory(name, tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    write_checkpoint(directory, max_shard_bytes=2000)
    shutil.copy(next(directory.glob("*.safetensors")), tmp_path / "elsewhere.safetensors")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    path.write_text(json.dumps(index))
    with pytest.raises((ValueError, FileNotFoundError), match="is not a file name|are missing: "):
        huggingface.load_model(directory)


def test_links_to_blobs_of_the_hub_cache(checkpoint, tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(path for path in checkpoint.iterdir() if path.name[0] != "."):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert language_model.load(snapshot).model.config == CONFIG


def test_more_layers_than_tensors(directory):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 10**5}))
    with time_limit(5), pytest.raises(ValueError, match="num_hidden_layers=100000"):
        huggingface.load_model(directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_deeply_nested_json(name, directory):
    (directory / name).write_text("[" * 200_000)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        language_model.load(directory)


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
def test_invalid_end_of_text_tokens(eos, message, directory):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ValueError, match=message):
        language_model.load(directory)


def test_a_panic_of_a_tokenizer_is_an_error():
    class PanicException(BaseException):
        """Like Rust's, which is not an Exception."""

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
def test_exponential_regular_expressions(expression, directory):
    path = directory / "tokenizer.json"
    pre_tokenizer = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": pre_tokenizer}))
    tokenizer = load_tokenizer(directory)
    with time_limit(), pytest.raises(ValueError, match="cannot encode this text: .*retry-limit"):
        tokenizer.encode("a" * 100 + "!")


def test_a_tokenizer_of_another_model(checkpoint):
    model = Llama(dataclasses.replace(CONFIG, vocab_size=200), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="end-of-text token 257 exceeds the model's vocabulary of 200 tokens"):
        LanguageModel(model, load_tokenizer(checkpoint))


# --- Chat templates ---

HOSTILE_TEMPLATES = {
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "doubles": "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "long output": "{% for a in range(90000) %}{{ 'x' * 90000 }}{% endfor %}",
    "repeats": "{{ 'x' * 10000000000 }}",
    "pads": "{{ 'x'.ljust(10000000000) }}",
    "formats": "{{ '%010000000000d' % 1 }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "division": "{{ 1 / 0 }}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "calls": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "syntax": "{% for %}",
    "undefined": "{{ nothing.there.at.all }}",
    "surrogate": "{{ '\\ud800' }}",
}


@pytest.mark.parametrize("name", HOSTILE_TEMPLATES)
def test_hostile_templates(name, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 2)
    start = time.monotonic()
    with pytest.raises(ValueError, match="the chat template"):
        chat_template.render(HOSTILE_TEMPLATES[name], {"messages": MESSAGES, "add_generation_prompt": True})
    assert time.monotonic() - start < MAX_SECONDS


def test_messages():
    assert chat_template.render("{{ messages[0].content }}", {"messages": [{"content": "é\n日本 😀"}]}) == "é\n日本 😀"
    with pytest.raises(ValueError, match="messages must be serializable as JSON"):
        chat_template.render("", {"messages": [{"content": b"bytes"}]})


# --- Files ---


def test_too_large_files(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted_files, "MAX_TEXT_BYTES", 10)
    (tmp_path / "config.json").write_text("{}" + " " * 9)
    with pytest.raises(ValueError, match="has 11 bytes; the maximum is 10"):
        untrusted_files.read_json_object(tmp_path, "config.json")


def test_bfloat16_weights_are_saved_exactly(tmp_path):
    model = Llama(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    huggingface.save_model(tmp_path, model)
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("model.norm.weight"), model.norm.scale[...])
