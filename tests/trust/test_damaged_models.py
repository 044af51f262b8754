"""Damaged models and templates: loaded correctly, or refused with the name of the file."""

import json
import random
import shutil

import pytest

from kvjax_models import language_model
from kvjax_models.formats import chat_template
from kvjax_models.formats.tokenizer import Tokenizer
from tests.models import tiny
from tests.models.support import damage_bytes, memory_limit, time_limit

SIZES = {"width": 8, "mlp_width": 8, "layers": 1, "query_heads": 2, "kv_heads": 1, "head_dim": 4, "max_length": 64}
CONFIG = tiny.make_config(**SIZES)
MESSAGES = [{"role": "user", "content": "Hello"}]
TEXT = "the cat sat"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small model with all files that are read."""
    directory = tiny.write(tmp_path_factory.mktemp("checkpoint"), template=tiny.TEMPLATE, **SIZES)
    (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": tiny.BOS}}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [97]}))
    return directory


def damage_file(directory, rng):
    """Damages or removes a file."""
    path = rng.choice(sorted(path for path in directory.iterdir() if path.name[0] != "."))
    data, kind = damage_bytes(path.read_bytes(), rng)
    path.unlink()
    if rng.random() < 0.9:
        path.write_bytes(data)
    return f"{kind} {path.name}"


def is_refused(directory, case):
    """Returns whether the directory is refused with an error that names it or a file of it; otherwise it must work."""
    try:
        with time_limit():
            llm = language_model.load(directory)
            ids = llm.encode(TEXT)
            assert len(llm.tokenizer.decode(ids)) <= 1000 * len(TEXT)
            if llm.tokenizer.chat_template:
                llm.tokenizer.render_chat(MESSAGES)
            if llm.model.config != CONFIG:  # accepted values must also work
                llm.generate(TEXT, max_new_tokens=2)
    except (ValueError, OSError, TypeError) as error:
        names = [*(path.name for path in directory.iterdir()), directory.name, "chat template", "tokenizer"]
        assert any(name in str(error) for name in names) and len(str(error)) < 30_000, (case, str(error))
        return True
    except AssertionError:
        raise AssertionError(f"{case}: too slow, or the text too long") from None
    assert all(0 <= token < CONFIG.vocab_size for token in ids), case
    return False


@pytest.mark.parametrize("cases", [50, pytest.param(500, marks=pytest.mark.heavy)])
def test_damaged_directories(cases, checkpoint, tmp_path):
    rng, num_refused = random.Random(cases), 0
    with memory_limit(1500):
        for _ in range(cases):
            directory = shutil.copytree(checkpoint, tmp_path / "model")
            num_refused += is_refused(directory, damage_file(directory, rng))
            shutil.rmtree(directory)
    assert num_refused > cases / 4  # most cases are damage


SPLIT = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
UNKNOWN_TOKEN = [{"SpecialToken": {"id": "no", "type_id": 0}}]
PROCESSOR = {"type": "TemplateProcessing", "single": UNKNOWN_TOKEN, "pair": UNKNOWN_TOKEN, "special_tokens": {}}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", {"num_hidden_layers": 3}, "missing: "),
        (
            "generation_config.json",
            {"eos_token_id": [98]},
            "end-of-text token 98 exceeds .* vocabulary of 98 tokens",
        ),
        ("generation_config.json", {"eos_token_id": -1}, "eos_token_id=-1"),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id='2'"),
        ("generation_config.json", {"eos_token_id": True}, "eos_token_id=True"),
        ("generation_config.json", {"eos_token_id": {}}, "eos_token_id"),
        ("tokenizer.json", {"pre_tokenizer": SPLIT}, "tokenizer"),
        ("tokenizer.json", {"post_processor": PROCESSOR}, "tokenizer"),
    ],
)
def test_invalid_files_are_refused(name, change, message, checkpoint, tmp_path):
    directory = shutil.copytree(checkpoint, tmp_path / "model")
    (directory / name).write_text(json.dumps(json.loads((directory / name).read_text()) | change))
    with pytest.raises(ValueError, match=message) as error:
        language_model.load(directory)
    assert str(directory) in str(error.value) or "the post_processor of tokenizer.json" in str(error.value)


def test_links_to_blobs_of_the_hub_cache(checkpoint, tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(path for path in checkpoint.iterdir() if path.name[0] != "."):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert language_model.load(snapshot).model.config == CONFIG
    (snapshot / "tokenizer_config.json").resolve().unlink()  # a link without its blob is not a missing file
    with pytest.raises(FileNotFoundError, match=r"tokenizer_config\.json"):
        language_model.load(snapshot)


def test_a_panic_of_a_tokenizer_is_an_error():
    class PanicException(BaseException):
        """Like Rust's, which is not an Exception."""

    class Backend:
        def encode_batch_fast(self, *_, **__):
            raise PanicException("called `Result::unwrap()` on an `Err` value")

        decode = encode_batch_fast

    tokenizer = Tokenizer(Backend(), (), (), {})
    with pytest.raises(ValueError, match="the tokenizer cannot encode this text: called"):
        tokenizer.encode("text")
    with pytest.raises(ValueError, match="the tokenizer cannot decode these tokens"):
        tokenizer.decode([1])


@pytest.mark.parametrize(
    "template",
    [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% for %}",
        "{{ nothing.there.at.all }}",
    ],
)
def test_templates_that_fail_or_leave_their_sandbox_are_refused(template):
    with pytest.raises(ValueError, match="the chat template refuses these messages: "):
        chat_template.render(template, MESSAGES, {"add_generation_prompt": True})
