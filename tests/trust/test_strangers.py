"""Directories and templates from untrusted sources: loaded correctly, or refused with the name of the file."""

import base64
import json
import os
import random
import shutil

import pytest
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers

from kvjax_models import language_model
from kvjax_models.formats import chat_template, huggingface
from kvjax_models.formats.huggingface_tokenizer import load_tokenizer
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.model.llama import Llama
from tests.models.huggingface_files import save_model
from tests.models.support import damage_bytes, memory_limit, small_config, time_limit

CONFIG = small_config(vocab_size=264, width=8, mlp_width=8, head_dim=4, max_length=64)
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "Hello"}]
TEXT = "the cat sat"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small model with all files that are read."""
    directory = tmp_path_factory.mktemp("checkpoint")
    save_model(directory, Llama(CONFIG, rngs=nnx.Rngs(0)), bos_token_id=256, eos_token_id=257)
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


@pytest.fixture
def directory(checkpoint, tmp_path):
    """A copy of the checkpoint that the test changes."""
    return shutil.copytree(checkpoint, tmp_path / "model")


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- Directories ---

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
# Families with the tensors of the checkpoint.
FAMILY_KEYS = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "granite": {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
    "smollm3": {"no_rope_layers": [1], "no_rope_layer_interval": 4},
}


def damage_file(directory, rng):
    """Replaces a file by something else."""
    path = rng.choice(sorted(path for path in directory.iterdir() if path.name[0] != "."))
    data = path.read_bytes()
    kind = rng.choice(["remove", *["bytes"] * 8, "directory", "pipe", "link", "cycle", "device"])
    path.unlink()
    if kind == "bytes":
        data, kind = damage_bytes(data, rng)
        path.write_bytes(data)
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
    return f"{path.name} is {json.dumps(values)[:500]}"


def damage_config(directory, rng):
    """Replaces a value in the configuration of a random family and RoPE scaling."""
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


def is_refused(directory, case):
    """Returns whether the directory is refused with an error that names it or a file of it; otherwise it must work."""
    try:
        with time_limit():
            llm = language_model.load(directory)
            ids = llm.encode(TEXT)
            assert len(llm.tokenizer.decode(ids)) <= 1000 * len(TEXT), case
            chat = llm.tokenizer.render_chat(MESSAGES) if llm.tokenizer.chat_template else ""
            if llm.model.config != CONFIG:  # accepted values must also work
                llm.generate(TEXT, max_new_tokens=2)
    except (ValueError, OSError, TypeError) as error:
        message = str(error)
        names = [*(path.name for path in directory.iterdir()), directory.name, "chat template", "tokenizer"]
        assert any(name in message for name in names), (case, message)
        assert len(message) < 30_000, case
        return True
    except AssertionError:
        raise AssertionError(f"{case}: too slow, or the text too long") from None
    assert all(0 <= token < CONFIG.vocab_size for token in ids), case
    assert isinstance(chat, str), case
    return False


@pytest.mark.parametrize("cases", [25, pytest.param(200, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("damage", [damage_file, damage_json, damage_config])
def test_damaged_directories(damage, cases, checkpoint, tmp_path):
    rng, num_refused = random.Random(cases), 0
    cases *= 3 if damage is damage_file else 1  # of all bytes of all files
    with memory_limit(1500):
        for _ in range(cases):
            directory = shutil.copytree(checkpoint, tmp_path / "model")
            num_refused += is_refused(directory, damage(directory, rng))
            shutil.rmtree(directory)
    assert num_refused > cases / 4  # most cases are damage


QWEN_MOE = {
    "model_type": "qwen3_moe", "moe_intermediate_size": 8, "num_experts_per_tok": 1,
    "architectures": ["Qwen3MoeForCausalLM"],
}  # fmt: skip
DOUBLE_A = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SPACE_PREFIX = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
LONG_CHARSMAP = base64.b64encode(bytes(4) + b"a" * 2000).decode()
LONG_TOKEN = {"id": 0, "content": "a" * 10**6, "special": True}
LONG_TOKEN |= dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
UNKNOWN_TOKEN = [{"SpecialToken": {"id": "no", "type_id": 0}}]
# Changed values of a file, or None for deeply nested lists, and the error.
REFUSED = {
    "config.json": [
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000"),
        ({"rope_theta": 10**400}, "rope_theta=1000"),
        ({"head_dim": 2**31 - 2}, "head_dim=2147483646 must be an integer from 1 to 16384"),
        ({"hidden_size": 2**31 - 2, "head_dim": None}, "hidden_size=2147483646"),
        ({"num_hidden_layers": 10**5}, "num_hidden_layers=100000"),
        (QWEN_MOE | {"num_experts": 10**8}, "num_experts=100000000 must be an integer from 1 to 16384"),
        (QWEN_MOE | {"num_experts": 10**4}, "10000 experts in each of 1 layers exceed the 12 tensors"),
        (QWEN_MOE | {"num_experts": 4000}, "more$"),
        ({"architectures": ["x" * 10**6]}, r"characters\)$"),
        ({"eos_token_id": [-1] * 10**6}, r"characters\)$"),
        (None, r"config\.json"),
    ],
    "tokenizer_config.json": [
        *(({name: "\ud800"}, "surrogates not allowed") for name in ("bos_token", "eos_token", "chat_template")),
        (None, r"tokenizer_config\.json"),
    ],
    "generation_config.json": [
        ({"eos_token_id": [264]}, "end-of-text token 264 exceeds the model's vocabulary of 264 tokens"),
        ({"eos_token_id": 10**9}, "end-of-text token 1000000000 exceeds"),
        ({"eos_token_id": -1}, "eos_token_id=-1"),
        ({"eos_token_id": "2"}, "eos_token_id='2'"),
        ({"eos_token_id": True}, "eos_token_id=True"),
        ({"eos_token_id": [1.5]}, "eos_token_id"),
        ({"eos_token_id": {}}, "eos_token_id"),
    ],
    "tokenizer.json": [
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLE_A] * 40}},
         r"normalizer and pre_tokenizer may lengthen a text 2.2e\+12 times; the maximum is 1000"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": LONG_CHARSMAP}},
         r"normalizer and pre_tokenizer may lengthen a text 4e\+03 times"),
        ({"normalizer": {"type": "Replace", "pattern": 1, "content": 1}}, "may lengthen a text inf times"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "a*"}, "content": "a" * 10**5}}, "may lengthen"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}}, "may lengthen a text"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPACE_PREFIX] * 40}},
         "normalizer and pre_tokenizer may lengthen a text"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
         "tokenizer"),
        ({"decoder": {"type": "Sequence", "decoders": [DOUBLE_A] * 40}}, "decoder may lengthen a text"),
        ({"added_tokens": [LONG_TOKEN]}, "a token of 1000000 characters; the maximum is 10000"),
        ({"post_processor": {"type": "TemplateProcessing", "single": UNKNOWN_TOKEN, "pair": UNKNOWN_TOKEN,
                             "special_tokens": {}}}, "tokenizer"),
        (None, r"tokenizer\.json"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name, change, message", [(name, *case) for name in REFUSED for case in REFUSED[name]])
def test_invalid_files_are_refused_quickly_and_briefly(name, change, message, directory):
    if name == "tokenizer.json":
        change_json(directory / "tokenizer_config.json", add_bos_token=None)
    if change is None:
        (directory / name).write_text("[" * 200_000)
    else:
        change_json(directory / name, **change)
    with time_limit(), memory_limit(500), pytest.raises(ValueError, match=message) as error:
        language_model.load(directory)
    text = str(error.value)
    assert len(text) < 10_000 and (str(directory) in text or "the post_processor of tokenizer.json" in text)


@pytest.mark.parametrize(
    "values, changes",
    [
        ({"rope_theta": 1e12, "max_position_embeddings": 2**31 - 1},
         {"rope_scaling": {"rope_type": "dynamic", "factor": 1e6}}),  # acts beyond the training length
        ({}, {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 2**31 - 1}),
    ],
)  # fmt: skip
def test_the_largest_values_do_not_overflow(values, changes, directory):
    change_json(directory / "config.json", **values)
    expected = language_model.load(directory).generate(TEXT, max_new_tokens=4)
    change_json(directory / "config.json", **changes)
    assert language_model.load(directory).generate(TEXT, max_new_tokens=4) == expected


@pytest.mark.parametrize("name", JSON_FILES)
def test_large_files_are_not_read(name, directory):
    with (directory / name).open("ab") as file:
        file.truncate(100 * 2**20)
    message = f"{name} has 104857600 bytes; the maximum is"
    with time_limit(5), memory_limit(200), pytest.raises(ValueError, match=message):
        language_model.load(directory)


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "/etc/passwd", "", ".", "..", "a/b", 5, None, [], "x\0y", "model.safetensors"]
)
def test_an_index_may_only_name_files_of_its_directory(name, tmp_path):
    directory = tmp_path / "model"
    save_model(directory, Llama(CONFIG, rngs=nnx.Rngs(0)), shards=5)
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
    pre_tokenizer = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    change_json(directory / "tokenizer.json", pre_tokenizer=pre_tokenizer)
    tokenizer = load_tokenizer(directory)
    with time_limit(), pytest.raises(ValueError, match="cannot encode this text: .*retry-limit"):
        tokenizer.encode("a" * 100 + "!")


# --- Chat templates ---

HOSTILE_TEMPLATES = {
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "division": "{{ 1 / 0 }}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "calls": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "syntax": "{% for %}",
    "undefined": "{{ nothing.there.at.all }}",
}


@pytest.mark.parametrize("name", HOSTILE_TEMPLATES)
def test_hostile_templates(name):
    with pytest.raises(ValueError, match="the chat template refuses these messages: "):
        chat_template.render(HOSTILE_TEMPLATES[name], MESSAGES, {"add_generation_prompt": True})


def test_messages():
    assert chat_template.render("{{ messages[0].content }}", [{"content": "é\n日本 😀"}]) == "é\n日本 😀"
