"""Directories and templates that a stranger made, or a bad disk: loaded as they should be, or refused by name."""

import base64
import contextlib
import json
import os
import pathlib
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


@contextlib.contextmanager
def below(megabytes):
    """Fails where the process grows by more, at any time in between."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    except OSError:
        yield
        return
    before = peak_memory()
    yield
    assert peak_memory() - before < megabytes * 2**10, "the process has grown"


def peak_memory():
    """The largest resident size of this process, in KiB."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def copy_of(good, tmp_path):
    return pathlib.Path(shutil.copytree(good, tmp_path / "model"))


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- bytes ---


def mutate(data, rng):
    """Bytes with one damage, and its name."""
    how = rng.choice(["cut", "empty", "noise", "flip", "repeat", "zeros", "long number", "bom"])
    place = rng.randrange(len(data))
    end = min(len(data), place + rng.choice([1, 4, 8, 64]))
    changed = {
        "cut": data[:place],
        "empty": b"",
        "noise": rng.randbytes(100),
        "flip": data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :],
        "repeat": data[:end] + data[place:end] * rng.choice([1, 100]) + data[end:],
        "zeros": data[:place] + bytes(end - place) + data[end:],
        "long number": data[:place] + b"\xff" * (end - place) + data[end:],
        "bom": b"\xff\xfe" + data,
    }[how]
    return changed, how


def fuzz_bytes(path, load, rng, cases):
    """Loads a file with many damages; returns how many were refused.

    Args:
        path: a file, which is restored.
        load: loads what the file is part of; an error must name the file, its directory or "tokenizer".
        rng: random numbers.
        cases: number of damages.
    """
    data, refused = path.read_bytes(), 0
    for _ in range(cases):
        changed, how = mutate(data, rng)
        path.write_bytes(changed)
        refused += isinstance(outcome(path.parent, f"{how} {path.name}", load), str)
    path.write_bytes(data)
    return refused


@pytest.mark.parametrize("cases", [10, pytest.param(200, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_file_of_damaged_bytes_is_loaded_or_refused_by_name(name, cases, good, tmp_path):
    with below(1500):
        assert fuzz_bytes(copy_of(good, tmp_path) / name, language_model.load, random.Random(cases), cases) > cases / 3


# --- directories ---

INVALID_VALUES = [
    None, -1, 0, 1e999, float("nan"), "8", "false", "", [], {}, [None], True, False, 10**12, 2**70, 1.5, "../x",
    10**400, 1e39, 1e300, 1e-300, 2**31 - 1, 2**31 - 2, "\ud800", [[]] * 10**5, "x" * 10**6, {"a": {"b": [1e300]}},
]  # fmt: skip
JSON_FILES = ["config.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
ROPES = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0], "factor": 2.0},
]
FAMILY_KEYS = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen3": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    "gemma2": {"query_pre_attn_scalar": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "granite": {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
    "smollm3": {"no_rope_layers": [1], "no_rope_layer_interval": 4},
}
PIPELINE = {
    "normalizer": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"},
        {"type": "Replace", "pattern": {"Regex": "a*"}, "content": "a" * 10**5},
        {"type": "Prepend", "prepend": "a" * 10**6},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "NFKD"},
    ],
    "pre_tokenizer": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False},
        {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True},
        {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    ],
    "decoder": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"},
        {"type": "ByteFallback"},
        {"type": "Strip", "content": "a", "start": 2**31, "stop": 0},
    ],
}
PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


def spoil_file(directory, rng):
    """Something else in a file's place."""
    path = rng.choice(sorted(path for path in directory.iterdir() if path.name[0] != "."))
    data = path.read_bytes()
    how = rng.choice(["gone", "bytes", "bytes", "directory", "pipe", "out", "circle", "device"])
    path.unlink()
    if how == "bytes":
        data, how = mutate(data, rng)
        path.write_bytes(data)
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
    return f"{how} {path.name}"


def spoil_json(directory, rng):
    """A value of another kind somewhere in a JSON file, or another top."""
    path = directory / rng.choice(JSON_FILES)
    values = json.loads(path.read_text())
    strange = rng.choice(INVALID_VALUES)
    if rng.random() < 0.1:
        values = strange
    else:
        names = [*values, "chat_template", "eos_token_id", "bos_token", "add_bos_token"]
        values[rng.choice(names)] = strange
    path.write_text(json.dumps(values))
    return f"{path.name} is {json.dumps(values)[:500]}"


def spoil_config(directory, rng):
    """A strange number among those of any family."""
    path = directory / "config.json"
    values = json.loads(path.read_text())
    rope = dict(rng.choice(ROPES))
    family = rng.choice([*FAMILY_KEYS])
    values |= FAMILY_KEYS[family] | {"model_type": family, "architectures": None, "rope_scaling": rope}
    changed = rng.choice([values, values, rope])
    changed[rng.choice([*changed, "rope_theta", "head_dim", "original_max_position_embeddings"])] = rng.choice(
        INVALID_VALUES
    )
    path.write_text(json.dumps(values))
    return f"config.json is {json.dumps(values)[:500]}"


def spoil_tokenizer(directory, rng):
    """Steps of a tokenizer that may be many, or without sense."""
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    part = rng.choice([*PIPELINE, "post_processor", "added_tokens"])
    if part in PIPELINE:
        steps = [rng.choice(PIPELINE[part]) for _ in range(rng.choice([1, 2, 40]))]
        values[part] = {"type": "Sequence", PARTS[part]: steps}
    elif part == "post_processor":
        piece = {"SpecialToken": {"id": rng.choice(["<s>", "unknown"]), "type_id": 0}}
        tokens = {"<s>": {"id": "<s>", "ids": rng.choice([[256], [], [10**9]]), "tokens": ["<s>"]}}
        values[part] = {"type": "TemplateProcessing", "single": [piece], "pair": [piece], "special_tokens": tokens}
    else:
        values[part][0] |= {"content": rng.choice(["a" * 10**6, "", "a"]), "normalized": True}
    if rng.random() < 0.2:
        values[part] = rng.choice(INVALID_VALUES)
    path.write_text(json.dumps(values))
    return f"{part} is {json.dumps(values[part])[:500]}"


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


def outcome(directory, did, load=language_model.load):
    """What loading gives: the model, or an error that names the directory or a file of it."""
    try:
        with at_most(MOST_SECONDS):
            llm = load(directory)
            ids = llm.encode(TEXT)
            assert len(llm.tokenizer.decode(ids)) <= 1000 * len(TEXT), did
            chat = llm.tokenizer.render_chat(MESSAGES) if llm.tokenizer.chat_template else None
            if llm.model.config != CONFIG:  # what a changed number gives
                llm.generate(TEXT, max_new_tokens=2)
    except (ValueError, OSError, TypeError) as error:
        said = str(error)
        files_of = [*(path.name for path in directory.iterdir()), directory.name, "chat template", "tokenizer"]
        assert any(name in said for name in files_of), (did, said)
        assert len(said) < 30_000, did
        return said
    except AssertionError:
        raise AssertionError(f"{did} hangs") from None
    assert llm.model.config == CONFIG or (directory / "config.json").stat().st_size, did
    # Whatever was spoilt, what came is whole: tokens that the model has, and a text that comes back.
    assert all(0 <= token < CONFIG.vocab_size for token in ids), did
    assert chat is None or isinstance(chat, str)
    return llm


SPOILERS = [spoil_file, spoil_json, spoil_config, spoil_tokenizer, spoil_weights]


@pytest.mark.parametrize("cases", [25, pytest.param(200, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_directory_is_loaded_as_it_should_be_or_refused_by_name(spoil, cases, good, tmp_path):
    rng, refused = random.Random(cases), 0
    with below(1500):
        for _ in range(cases):
            directory = copy_of(good, tmp_path)
            refused += isinstance(outcome(directory, spoil(directory, rng)), str)
            shutil.rmtree(directory)
    assert refused > cases / 4  # and not because nothing was spoilt


YARN = {"rope_type": "yarn", "factor": 2.0}
QWEN_MOE = {
    "model_type": "qwen3_moe", "moe_intermediate_size": 8, "num_experts_per_tok": 1,
    "architectures": ["Qwen3MoeForCausalLM"],
}  # fmt: skip
GEMMA = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 4}
IMPOSSIBLE = {
    "epsilon": ({"rms_norm_eps": 1e39}, r"rms_norm_eps=1e\+39 must be a number from 1e-12 to 1"),
    "epsilon of zero": ({"rms_norm_eps": 1e-300}, "rms_norm_eps=1e-300"),
    "long integer": ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000"),
    "theta": ({"rope_theta": 1e300}, r"rope_theta=1e\+300"),
    "theta of integers": ({"rope_theta": 10**400}, "rope_theta=1000"),
    "linear": ({"rope_scaling": {"rope_type": "linear", "factor": 1e300}}, r"factor=1e\+300"),
    "dynamic": (
        {
            "rope_scaling": {"rope_type": "dynamic", "factor": 1e6},
            "rope_theta": 1e12,
            "max_position_embeddings": 2**31 - 1,
        },
        None,  # its lengths are those of the training
    ),
    "longrope": (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1e-300, 1], "long_factor": [1, 1]}},
        "short_factor=1e-300",
    ),
    "yarn of theta 1": ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta=1.0 must be a number from 2"),
    "yarn of betas": ({"rope_scaling": YARN | {"beta_fast": 1e308, "beta_slow": 1e307}}, r"beta_fast=1e\+308"),
    "yarn of small betas": ({"rope_scaling": YARN | {"beta_slow": 1e-320}}, "beta_slow=1e-320"),
    "attention factor": ({"rope_scaling": YARN | {"attention_factor": 1e39}}, r"attention_factor=1e\+39"),
    "scale": (GEMMA | {"query_pre_attn_scalar": 1e300}, r"query_pre_attn_scalar=1e\+300"),
    "cap": (GEMMA | {"final_logit_softcapping": 1e-300}, "final_logit_softcapping=1e-300"),
    "head": ({"head_dim": 2**31 - 2}, "head_dim=2147483646 must be an integer from 1 to 16384"),
    "width": ({"hidden_size": 2**31 - 2, "head_dim": None}, "hidden_size=2147483646"),
    "experts": (QWEN_MOE | {"num_experts": 10**8}, "num_experts=100000000 must be an integer from 1 to 16384"),
    "many experts": (QWEN_MOE | {"num_experts": 10**4}, "10000 experts in each of 1 layers exceed the 12 tensors"),
    "some experts": (QWEN_MOE | {"num_experts": 4000}, "more$"),
    "quoted": ({"architectures": ["x" * 10**6]}, r"characters\)$"),
    "listed": ({"eos_token_id": [-1] * 10**6}, r"characters\)$"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_numbers_are_refused_soon_and_in_short(name, good, tmp_path):
    changes, message = IMPOSSIBLE[name]
    directory = copy_of(good, tmp_path)
    change_json(directory / "config.json", **changes)
    with at_most(MOST_SECONDS), below(500):
        if message is None:
            assert len(language_model.load(directory).generate(TEXT, max_new_tokens=2)) >= 0
            return
        with pytest.raises(ValueError, match=message) as error:
            language_model.load(directory)
    assert str(directory) in str(error.value) and len(str(error.value)) < 10_000


def test_a_window_of_any_size_is_generated_with(good, tmp_path):
    directory = copy_of(good, tmp_path)
    change_json(
        directory / "config.json", model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=2**31 - 1
    )
    full = language_model.load(good).generate(TEXT, max_new_tokens=4)
    assert language_model.load(directory).generate(TEXT, max_new_tokens=4) == full


DOUBLES_A = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
LONG_CHARSMAP = base64.b64encode(bytes(4) + b"a" * 2000).decode()
HOSTILE_TOKENIZERS = {
    "normalizer": (
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLES_A] * 40}},
        "normalizer and pre_tokenizer may lengthen a text 2.2e\\+12 times; the maximum is 1000",
    ),
    "decoder": ({"decoder": {"type": "Sequence", "decoders": [DOUBLES_A] * 40}}, "decoder may lengthen a text"),
    "pre_tokenizer": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [PIPELINE["pre_tokenizer"][0]] * 40}},
        "normalizer and pre_tokenizer may lengthen a text",
    ),
    "characters": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": LONG_CHARSMAP}},
        "normalizer and pre_tokenizer may lengthen a text 4e\\+03 times",
    ),
    "invalid": ({"normalizer": {"type": "Replace", "pattern": 1, "content": 1}}, "may lengthen a text inf times"),
    "token": ({"added_tokens": [
        {"id": 0, "content": "a" * 10**6, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
         "single_word": False},
    ]}, "a token of 1000000 characters; the maximum is 10000"),
    "template": ({"post_processor": {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "no", "type_id": 0}}],
        "pair": [{"SpecialToken": {"id": "no", "type_id": 0}}], "special_tokens": {},
    }}, "tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_TOKENIZERS)
def test_a_hostile_tokenizer_is_refused(name, good, tmp_path):
    changes, message = HOSTILE_TOKENIZERS[name]
    directory = copy_of(good, tmp_path)
    change_json(directory / "tokenizer.json", **changes)
    change_json(directory / "tokenizer_config.json", add_bos_token=None)
    with at_most(MOST_SECONDS), below(500), pytest.raises(ValueError, match=message):
        load_tokenizer(directory)


@pytest.mark.parametrize("role", ["bos_token", "eos_token", "chat_template"])
def test_half_a_character_is_refused_by_its_file(role, good, tmp_path):
    directory = copy_of(good, tmp_path)
    change_json(directory / "tokenizer_config.json", **{role: "\ud800"})
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not JSON: .* surrogates not allowed"):
        load_tokenizer(directory)


@pytest.mark.parametrize("name", JSON_FILES)
def test_large_files_are_not_read(name, good, tmp_path):
    directory = copy_of(good, tmp_path)
    with (directory / name).open("ab") as file:
        file.truncate(100 * 2**20)
    with at_most(5), below(200), pytest.raises(ValueError, match=f"{name} has 104857600 bytes; the maximum is"):
        language_model.load(directory)


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
