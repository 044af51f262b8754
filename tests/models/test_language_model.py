"""Text in, text out: `kvjax_models.load` and what it gives."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments.common import settings
from experiments.common.options import LANGUAGE_CHECKPOINT
from kvjax_models import language_model, load
from kvjax_models.cli.chat import Chat, Conversation
from kvjax_models.formats import huggingface
from kvjax_models.generation import completions
from kvjax_models.generation.generator import generate
from kvjax_models.generation.sampling import Sampling

DIRECTORY = settings.model_directory(LANGUAGE_CHECKPOINT)
TEXT = "The quick brown fox jumps over the lazy dog. " * 12
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def llm():
    return load(DIRECTORY)


def test_generates_what_the_generator_does(llm):
    prompts = [llm.tokenizer.encode(text) for text in (TEXT, TEXT[9:])]
    policy = kvjax.Uniform(128, recent=32)
    rows, _ = generate(llm.model, policy, prompts, max_new_tokens=12, eos=llm.tokenizer.eos_ids)
    expected = [llm.tokenizer.decode(row) for row in rows]
    assert llm.generate([TEXT, TEXT[9:]], policy, max_new_tokens=12) == expected
    assert llm.generate([TEXT, TEXT[9:]], "uniform:recent=32", 128, max_new_tokens=12) == expected
    assert llm.generate([TEXT, TEXT[9:]], "uniform:recent=32@128", max_new_tokens=12) == expected


def test_streams_the_same_text_whatever_the_pieces(llm):
    whole = llm.generate(TEXT, kvjax.SubGen, 128, max_new_tokens=70)  # over more than one block
    for every in (1, 23, 64):
        assert "".join(llm.stream(TEXT, kvjax.SubGen, 128, max_new_tokens=70, stream_interval=every)) == whole
    hot = {"sampling": Sampling(temperature=2.0), "max_new_tokens": 8}
    assert llm.generate(TEXT, seed=1, **hot) == "".join(llm.stream(TEXT, seed=1, **hot))
    assert llm.generate(TEXT, seed=1, **hot) != llm.generate(TEXT, seed=2, **hot)


def test_many_prompts_come_in_order_with_the_text_of_each_alone(llm):
    prompts = [TEXT[7 * start :] for start in range(5)]
    pieces = {}
    given = {"batch_size": 2, "max_new_tokens": 20, "sampling": Sampling(0.5)}
    watch = lambda number, piece: pieces.setdefault(number, []).append(piece)  # noqa: E731
    found = list(llm.generate_many(prompts, seed=3, on_text=watch, **given))
    assert [one.number for one in found] == list(range(5))
    assert ["".join(pieces[number]) for number in range(5)] == [one.text for one in found]
    alone = llm.generate(prompts[4], max_new_tokens=20, sampling=Sampling(0.5), seed=7)
    assert alone == found[4].text == llm.tokenizer.decode(found[4].tokens)
    # One by one, as rows fall free, where it is said how long they may be; up to a string that ends them.
    end = found[0].text[3:6]
    stopped = list(llm.generate_many(iter(prompts), seed=3, max_prompt_tokens=256, stop=[end], **given))
    assert [one.text for one in stopped] == [one.text.partition(end)[0] for one in found]
    assert stopped[0].finish_reason == "stop" and list(llm.generate_many([])) == []


def test_what_may_begin_an_end_is_not_shown_before_it_is_known():
    assert [completions._settled_length(text, ["\n\n", "END"]) for text in ("", "a", "a long\n", "text\ufffd")] == [
        0,
        0,
        5,
        2,
    ]
    assert completions._settled_length("text\ufffd", []) == 4
    assert completions._find_stop("one\n\ntwo END", ["END", "\n\n"]) == 3


@pytest.mark.parametrize("policy", ["streaming_llm", kvjax.StreamingLLM])
def test_a_budget_that_is_a_share_is_kept(llm, policy):
    generator = llm.generator(policy, "50%", max_prompt_tokens=600, max_new_tokens=40)
    state = generator.init_state()
    exact = generator.specs[0].full_cache_bytes(640) * len(generator.specs)
    assert 0.4 * exact < kvjax.cache_bytes(state.layers).device <= 0.5 * exact
    in_bytes = llm.generator(policy, f"{exact // 2}B", max_prompt_tokens=600, max_new_tokens=40)
    assert in_bytes.policies == generator.policies


@pytest.mark.parametrize(
    ("policy", "budget", "message"),
    [
        ("subgen", None, "subgen needs a budget"),
        (kvjax.SubGen, None, "SubGen needs a budget"),
        ("subgen@128", 256, "has a budget"),
        (kvjax.SubGen(128), 256, "has a budget"),
        ("exact", "25%", "policy exact keeps everything and takes no budget; remove budget=25%"),
        (kvjax.Exact, 128, "Exact takes no budget; remove budget=128"),
        (kvjax.Exact(), 128, "keeps everything and takes no budget; remove budget=128"),
        ("subgen", 0.25, r"budget='0.25' is not a budget; pass slots \(1024\), 25% for this fraction"),
        ("subgen", "a lot", "budget='a lot' is not a budget"),
        ("no_such", 128, "policy 'no_such' is unknown"),
        ("subgen", "1%", "budget=1% of 7 tokens: "),
    ],
)
def test_what_is_no_policy_or_budget_is_refused(llm, policy, budget, message):
    with pytest.raises(ValueError, match=message):
        llm.generate("Once upon a time", policy, budget, max_new_tokens=6)


def test_files_keep_their_dtype(llm, tmp_path):
    huggingface.save_model(tmp_path, llm.model, jnp.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (DIRECTORY / name).exists():
            shutil.copy(DIRECTORY / name, tmp_path)
    own, wide = load(tmp_path), load(tmp_path, jnp.float32)
    assert own.model.embedding.embedding[...].dtype == jnp.bfloat16
    assert own.generator("exact", max_prompt_tokens=8, max_new_tokens=8).specs[0].dtype == jnp.bfloat16
    kernel = wide.model.layers[0].mlp.gate_up.kernel[...]
    assert kernel.dtype == jnp.float32
    np.testing.assert_array_equal(kernel, own.model.layers[0].mlp.gate_up.kernel[...].astype(jnp.float32))


def test_what_is_no_model_says_what_to_give(monkeypatch):
    with pytest.raises(FileNotFoundError, match="is neither a directory, a GGUF file nor a known model"):
        load("not a model")
    with pytest.raises(FileNotFoundError, match="is neither a directory nor a valid name of a model on the hub"):
        load("not/a/model")

    def unreachable(*args, **kwargs):
        raise OSError("no route")

    monkeypatch.setattr(language_model.huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        FileNotFoundError, match=r"could not be downloaded from the hub \(no route\); without a network, pass"
    ):
        load("org/model")


def test_the_hub_is_asked_for_what_is_read_alone(monkeypatch):
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(DIRECTORY)

    monkeypatch.setattr(language_model.huggingface_hub, "snapshot_download", download)
    assert load("org/model").model.config == huggingface.load_config(DIRECTORY)
    assert asked == [("org/model", ["*.json", "*.safetensors", "*.jinja"])]


@pytest.fixture
def chatting(llm, tmp_path):
    """The model with a chat template."""
    for path in DIRECTORY.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    values = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    return load(tmp_path)


def test_later_turns_are_read_behind_earlier_ones(chatting):
    given = Chat(policy="exact", context_tokens=512, max_new_tokens=16)
    talk = Conversation(chatting, given, system="Be brief.")
    for turn in ("What is a fox?", "And a dog?"):
        answer = "".join(talk.answer(turn))
        # All turns as one text, read at once.
        expected = "".join(chatting.stream(talk.messages[:-1], max_new_tokens=16))
        assert answer == expected
    roles = [message["role"] for message in talk.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


def test_a_conversation_that_is_full_says_so(chatting):
    talk = Conversation(chatting, Chat(policy="exact", context_tokens=40, max_new_tokens=64))
    list(talk.answer("What is a fox?"))
    with pytest.raises(ValueError, match="leave no tokens for an answer within --context_tokens=40"):
        list(talk.answer("And a dog?"))


def test_a_model_without_a_template_does_not_chat(llm):
    with pytest.raises(ValueError, match="no chat template"):
        llm.encode([{"role": "user", "content": "Hello"}])
