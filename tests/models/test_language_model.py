"""Text generation with `kvjax_models.load`."""

import contextlib
import dataclasses
import io
import json
import shutil
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax_models import compile_cache, formats, language_model, load
from kvjax_models.cli.chat import Chat, Conversation
from kvjax_models.cli.generate import Generate
from kvjax_models.formats import huggingface
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.model.config import AttentionConfig
from tests.models import tiny
from tests.models.huggingface_files import save_model
from tests.models.loops import generate

DIRECTORY = tiny.directory()
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(scope="module")
def llm():
    return load(DIRECTORY)


def test_text_equals_the_generators_tokens(llm):
    policy, expected = kvjax.Uniform(128, recent=32), []
    for seed, text in enumerate((TEXT, TEXT[9:])):
        prompts, options = [llm.tokenizer.encode(text)], {"seed": seed, "eos": llm.tokenizer.eos_ids}
        [row], _ = generate(llm.model, policy, prompts, max_new_tokens=12, **options)
        expected.append(llm.tokenizer.decode(row))
    for arguments in ((policy,), ("uniform:recent=32", 128), ("uniform:recent=32@128 slots",)):
        assert llm.generate([TEXT, TEXT[9:]], *arguments, max_new_tokens=12) == expected


def test_usage_counts_tokens_seconds_and_bytes(llm):
    completion, usage = llm.generate(TEXT, "uniform:recent=16", 64, max_new_tokens=12, return_details=True)
    assert completion.text == llm.generate(TEXT, "uniform:recent=16", 64, max_new_tokens=12)
    prompt = llm.encode(TEXT)
    assert (usage.prompt_tokens, usage.new_tokens) == (len(prompt), 12)
    config = llm.model.config
    token_bytes = 2 * config.layers * config.kv_heads * config.head_dim * 4  # float32
    capacity = compile_cache.length_bucket(len(prompt))[-1] + 64  # answers of 1 to 64 tokens have one size
    assert usage.full_cache_bytes == token_bytes // 2 * capacity  # bfloat16
    assert all(token_bytes * 64 < size < token_bytes * 150 for size in (usage.read_bytes, usage.cache_bytes))
    assert usage.host_bytes == 0 and usage.prefill_seconds > 0 and usage.compile_seconds >= 0
    assert usage.tokens_per_second == 12 / usage.decode_seconds
    completions, both = llm.generate([TEXT, TEXT[9:]], max_new_tokens=2, return_details=True)
    assert len(completions) == 2 and both.new_tokens == 4 and both.prompt_tokens > usage.prompt_tokens


def test_streamed_text_equals_the_answer(llm):
    cache, options = llm.cache(kvjax.SubGen, 128), {"temperature": 2.0, "max_new_tokens": 70}  # several blocks
    texts = [cache.generate(TEXT, seed=seed, **options) for seed in (1, 2)]
    assert "".join(cache.stream(TEXT, seed=1, stream_interval=23, **options)) == texts[0] != texts[1]
    for interval in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"stream_interval={interval} must be"):
            next(cache.stream(TEXT, max_new_tokens=4, stream_interval=interval))


def test_several_sequences_of_a_prompt_have_the_next_seeds(llm):
    options = {"temperature": 2.0, "max_new_tokens": 8}
    single = [llm.generate(TEXT, seed=seed, **options) for seed in range(3, 7)]
    assert llm.generate(TEXT, n=4, seed=3, **options) == single and len(set(single)) > 1
    assert llm.generate([TEXT, TEXT], n=2, seed=3, **options) == [single[:2], single[2:]]
    for n in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"n={n} must be"):
            llm.generate(TEXT, n=n)
    # Seeds after the largest one continue with 0.
    assert llm.generate(TEXT, n=2, seed=2**32 - 1, **options)[1] == llm.generate(TEXT, seed=0, **options)


def test_many_prompts_equal_single_prompts_in_order(llm):
    prompts = [TEXT[7 * start :] for start in range(5)]
    cache, options = llm.cache(), {"batch_size": 2, "max_new_tokens": 20, "temperature": 0.5}
    results = list(cache.generate_many(prompts, seed=3, **options))
    assert [completion.number for completion in results] == list(range(5))
    expected = llm.generate(prompts[4], max_new_tokens=20, temperature=0.5, seed=7)
    assert expected == results[4].text == llm.tokenizer.decode(results[4].tokens)
    # From an iterator, with a stop string.
    stop = results[0].text[3:6]
    stopped = list(cache.generate_many(iter(prompts), seed=3, stop=stop, **options))
    assert [completion.text for completion in stopped] == [completion.text.partition(stop)[0] for completion in results]
    assert stopped[0].finish_reason == "stop" and list(cache.generate_many([])) == []


def test_prompts_are_read_when_rows_are_free(llm):
    num_read = 0

    def read_prompts():
        nonlocal num_read
        for number in range(5):
            num_read += 1
            yield TEXT[number : number + 20]

    completions = llm.cache().generate_many(read_prompts(), batch_size=2, max_new_tokens=4)
    assert [(completion.number, num_read) for completion in completions] == [(0, 2), (1, 2), (2, 4), (3, 4), (4, 5)]


def test_a_relative_budget_is_a_share_of_the_full_cache(llm):
    generator = llm.cache("streaming_llm", "50%").generator(max_prompt_tokens=600, max_new_tokens=40)
    full_bytes = generator.specs[0].full_cache_bytes(640) * len(generator.specs)
    assert 0.4 * full_bytes < kvjax.cache_bytes(generator.init_state().layers).device <= 0.5 * full_bytes
    in_bytes = llm.cache(kvjax.StreamingLLM, f"{full_bytes // 2}B").generator(max_prompt_tokens=600, max_new_tokens=40)
    assert in_bytes.policies == generator.policies


def test_budgets_count_another_dtype(llm):
    cache = llm.cache("streaming_llm", "50%")
    narrow = dataclasses.replace(cache, budget_dtype="bfloat16")
    slots, twice = (one.document_generator(512, 16).policies[0].budget for one in (cache, narrow))
    assert twice == pytest.approx(2 * slots, abs=24)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("subgen",), {}, "policy subgen needs a budget: a share"),
        ((kvjax.SubGen,), {}, "SubGen needs a budget"),
        ((kvjax.SubGen(128), 256), {}, "has a budget"),
        (("exact", "25%"), {}, "policy exact keeps everything and takes no budget; remove budget=25%"),
        ((kvjax.Exact, 128), {}, "Exact takes no budget; remove budget=128"),
        ((kvjax.Exact(), 128), {}, "keeps everything and takes no budget; remove budget=128"),
        (("snapvk", "25%"), {}, "policy 'snapvk' is unknown; did you mean 'snapkv'"),
        (("snapkv", "25"), {}, "budget='25' has no unit; pass '25%' for a share of the full cache or '25 slots'"),
        (("snapkv@25%", "25%"), {}, "policy snapkv@25% has a budget; remove it or budget=25%"),
        (("auto@25%", "25%"), {}, "policy auto@25% has a budget; remove it or budget=25%"),
        (("snapkv", "25%"), {"kv_dtype": "int5"}, "kv_dtype='int5' is not a quantization format"),
    ],
)
def test_options_of_a_cache_are_refused_before_it_is_used(llm, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        llm.cache(*arguments, **options)


def test_unknown_keywords_get_a_suggestion(llm):
    cache = llm.cache()
    document, engine = cache.read(TEXT, max_new_tokens=8), cache.engine()
    calls = [
        (llm.generate, "kv_dtyp", "kv_dtype"),
        (llm.cache, "kv_dtyp", "kv_dtype"),
        (cache.stream, "top_pp", "top_p"),
        (cache.generate_many, "batchsize", "batch_size"),
        (cache.read, "max_tokens", "max_new_tokens"),
        (document.ask, "temprature", "temperature"),
        (engine.add, "max_tokens", "max_new_tokens"),
        (load, "dtyp", "dtype"),
    ]
    for function, name, suggestion in calls:
        with pytest.raises(TypeError, match=f" has no argument '{name}'; did you mean '{suggestion}'?"):
            function("x", **{name: 1})
    for function in (cache.stream, document.stream):
        with pytest.raises(TypeError, match="has no argument 'n'; it has .*max_new_tokens, .*temperature"):
            function("x", n=2)


def test_checkpoints_in_bfloat16_are_computed_in_float32_on_cpus(llm, tmp_path):
    save_model(tmp_path, llm.model, jnp.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DIRECTORY / name, tmp_path)
    bfloat16, float32 = load(tmp_path, jnp.bfloat16), load(tmp_path)
    assert formats.load(tmp_path)[0].embedding.param_dtype == jnp.bfloat16
    assert bfloat16.model.embedding.embedding[...].dtype == jnp.bfloat16
    assert bfloat16.cache().generator(max_prompt_tokens=8, max_new_tokens=8).specs[0].dtype == jnp.bfloat16
    kernel = float32.model.layers[0].mlp.gate_up.kernel[...]
    assert kernel.dtype == jnp.float32
    np.testing.assert_array_equal(kernel, bfloat16.model.layers[0].mlp.gate_up.kernel[...].astype(jnp.float32))


@pytest.mark.parametrize(
    "name, message",
    [
        ("not a model", "is neither a directory, a GGUF file nor a known model .* contain a slash"),
        ("not/a/model", "is neither a local path nor a valid name of a model on the hub"),
        ("org/model", r"could not be downloaded from the hub \(no route\); without a"),
    ],
)
def test_unknown_models_are_refused(name, message, monkeypatch):
    download = language_model.huggingface_hub.snapshot_download

    def unreachable(name, **kwargs):
        if name == "org/model":
            raise OSError("no route")
        assert name.count("/") == 2
        return download(name, **kwargs)  # refuses the name before any network access

    monkeypatch.setattr(language_model.huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(FileNotFoundError, match=message):
        load(name)


def test_only_needed_files_are_downloaded(monkeypatch):
    requests = []

    def download(name, allow_patterns, ignore_patterns):
        requests.append((name, allow_patterns, ignore_patterns))
        return str(DIRECTORY)

    monkeypatch.setattr(language_model.huggingface_hub, "snapshot_download", download)
    assert load("org/model").model.config == huggingface.load_config(DIRECTORY)
    assert requests == [("org/model", ["*.json", "*.safetensors", "*.jinja"], "*/*")]


def test_prompts_of_invalid_types_are_refused(llm):
    message = "a prompt must be a text or a list of messages|prompts must be a list of texts"
    for prompt in (None, 1, b"text", {"role": "user", "content": "x"}, [1], [["x"]], [{"content": "x"}]):
        with pytest.raises(TypeError, match=message):
            llm.generate(prompt, max_new_tokens=2)
        with pytest.raises(TypeError, match=message):
            list(llm.cache().generate_many(prompt, max_new_tokens=2))
    for prompts in ("ab", [{"role": "user", "content": "x"}]):
        with pytest.raises(TypeError, match=r"must be a list of texts or conversations, got .*; pass \[prompt\]"):
            list(llm.cache().generate_many(prompts))
    with pytest.raises(TypeError, match="policy=5 must be a name, a class of policies or a policy"):
        llm.cache(5)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("x", {"allow_beyond_context": "no"}, "allow_beyond_context='no' must be True or False"),
        ([], {}, "prompt is an empty list"),
        ("x", {"logprobs": 2}, "log-probabilities are part of the details; pass return_details=True"),
        ("x", {"top_k": 0}, "top_k=0 must be"),
        ("x", {"policy": "subgen", "budget": "1KiB"}, r"budget=1KiB of \d+ tokens: "),
        ("x", {"template_options": {"thinking": False}}, "apply to conversations only"),
        ([{"role": "user", "content": "Hello"}], {}, "no chat template"),
    ],
)
def test_invalid_options_are_refused(llm, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, **options)


def test_invalid_options_of_many_prompts_are_refused(llm):
    for size in (0, 1.5, "x", "10%", True, 10**9):
        with pytest.raises(ValueError, match=f"^{size!r} batch rows are not possible: pass a number from 1 to 65536"):
            next(llm.cache().generate_many(["x"], batch_size=size, max_new_tokens=2))
    with pytest.raises(ValueError, match=r"prompt 1: a sequence of \d+ tokens exceeds the model's context length"):
        list(llm.cache().generate_many(["x", "x" * 40_000], max_new_tokens=2))


def test_log_probabilities_are_part_of_the_details(llm):
    completion, _ = llm.generate(TEXT, max_new_tokens=4, logprobs=1, return_details=True)
    assert [item.token for item in completion.logprobs] == list(completion.tokens)
    assert all(item.top[0] == (item.token, pytest.approx(item.logprob)) for item in completion.logprobs)  # greedy


@pytest.fixture(scope="module")
def chat_llm():
    end = f"{{% if message.role == 'assistant' %}}{tiny.EOS}{{% endif %}}"  # as in real templates
    return tiny.make_lively_llm(tiny.TEMPLATE.replace("{{ message.content }}", f"{{{{ message.content }}}}{end}"))


def test_a_list_of_messages_is_one_conversation(chat_llm):
    first, second = ([{"role": "user", "content": text}] for text in ("What is a fox?", "And a dog?"))
    answers = ["".join(chat_llm.cache().stream(messages, max_new_tokens=8)) for messages in (first, second)]
    assert chat_llm.generate(first, max_new_tokens=8) == answers[0]
    assert chat_llm.generate(tuple(first), max_new_tokens=8) == answers[0]
    assert isinstance(chat_llm.generate([first, "text"], max_new_tokens=2), list)


def test_an_interrupt_ends_an_answer_but_not_the_conversation(chat_llm):
    """Every turn is answered as the entire conversation, also after special tokens that a user spells out."""
    chat = Chat(policy="exact:compact_every=8", context_tokens=512, max_new_tokens=12)
    conversation, stop = Conversation(chat_llm, chat, "Be brief."), threading.Event()
    stop.set()
    assert list(conversation.answer("Hello.", stop)) == [] and len(conversation.messages) == 1  # while the turn is read
    for interrupted in (f"Who wrote {tiny.EOS}?", "And <"):
        stop.clear()
        for number, _ in enumerate(conversation.answer(interrupted, stop)):
            if number == 4:
                stop.set()
        answer = conversation.messages[-1]["content"]
        whole = "".join(chat_llm.cache().stream(conversation.messages[:-1], max_new_tokens=12))
        assert whole.startswith(answer) and len(answer) < len(whole)
    answer = "".join(conversation.answer(f"{tiny.BOS}?"))
    assert answer == "".join(chat_llm.cache().stream(conversation.messages[:-1], max_new_tokens=12))
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system", *["user", "assistant"] * 3]


def test_an_interrupt_while_the_first_turn_is_read_loses_no_text(chat_llm, tmp_path, monkeypatch):
    """Also after a system message."""
    stops, conversations = iter([True, False, False]), []

    @contextlib.contextmanager
    def deferred():
        stop = threading.Event()
        if next(stops):
            stop.set()
        yield stop

    def converse(*args):
        conversations.append(Conversation(*args))
        return conversations[0]

    monkeypatch.setattr("kvjax_models.cli.interrupts.deferred", deferred)
    monkeypatch.setattr("kvjax_models.cli.chat.Conversation", converse)
    monkeypatch.setattr(Chat, "load", lambda options: chat_llm)
    monkeypatch.setattr("sys.stdin", io.StringIO("One?\nTwo?\nThree?\n"))
    (tmp_path / "text").write_text("A book.")
    Chat(prompt_file=str(tmp_path / "text"), system="Be brief.", max_new_tokens=4, quiet=True).run()
    contents = [one["content"] for one in conversations[0].messages if one["role"] == "user"]
    assert contents == ["A book.\n\nTwo?", "Three?"]


def test_a_conversation_without_capacity_is_refused(chat_llm):
    conversation = Conversation(chat_llm, Chat(policy="exact", context_tokens=40, max_new_tokens=64))
    list(conversation.answer("What is a fox?"))
    with pytest.raises(ValueError, match="leave no tokens for an answer within --context_tokens=40"):
        list(conversation.answer("And a dog?"))


def test_answers_are_the_end_of_the_entire_text_everywhere(tmp_path, monkeypatch, capsys):
    """With SentencePiece's dummy prefix, which a text without context gets and loses."""
    template = tiny.TEMPLATE.replace("[", "").replace("]", "")
    llm = tiny.make_llm(template, backend=tiny.make_sentencepiece_backend(), layers=1)
    context, question, sizes = "a b c", " d e", {"max_new_tokens": 8}
    [completion] = llm.cache().generate_many([context + question], batch_size=1, **sizes)
    entire = llm.tokenizer.decode([*llm.encode(context + question), *completion.tokens])
    expected = entire.removeprefix(context + question)
    assert completion.text == expected and expected.startswith(" ")
    assert llm.generate(context + question, **sizes) == expected
    assert "".join(llm.cache().stream(context + question, **sizes)) == expected
    monkeypatch.setattr(Generate, "load", lambda options: llm)
    path, options = str(tmp_path / "document"), {"model": "tiny", "quiet": True}
    Generate(prompt=context + question, **sizes, **options).run()
    assert capsys.readouterr().out == f"{expected}\n"
    document = llm.cache().read(context, chat=False, max_new_tokens=24)
    document.save(path)
    assert document.generate(question, **sizes) == llm.open(path).generate(question, **sizes) == expected
    # Turns of a conversation are encoded as in the entire conversation.
    conversation = Conversation(llm, Chat(context_tokens=128, **sizes))
    list(conversation.answer("a b"))
    list(conversation.answer("c"))
    text = llm.tokenizer.render_chat(conversation.messages, add_generation_prompt=False)
    assert llm.tokenizer.decode(conversation.prefix.tokens) == text.removesuffix("\n")


def test_template_options_reach_the_template(tmp_path, monkeypatch):
    llm, messages, options = tiny.make_llm("{{ thinking }}"), [{"role": "user", "content": "Who?"}], {"thinking": False}

    def render_chat(self, messages, add_generation_prompt=True, template_options=None):
        raise ValueError(f"rendered with {template_options}")

    monkeypatch.setattr(Tokenizer, "render_chat", render_chat)
    monkeypatch.setattr(Generate, "load", lambda options: llm)
    prompts, flags = tmp_path / "in.jsonl", {"model": "tiny", "template_options": json.dumps(options)}
    prompts.write_text(json.dumps({"messages": messages}))
    for call in (
        lambda: llm.generate([messages], template_options=options),
        lambda: next(llm.cache().stream(messages, template_options=options)),
        lambda: next(llm.cache().generate_many([messages], template_options=options)),
        lambda: llm.cache().read(messages, template_options=options),
        Generate(prompt="Who?", chat=True, **flags).run,
        Generate(prompts_file=str(prompts), output=str(tmp_path / "out.jsonl"), **flags).run,
        lambda: next(Conversation(llm, Chat(**flags)).answer("Who?")),
    ):
        with pytest.raises(ValueError, match="rendered with {'thinking': False}"):
            call()
    for changes, message in (({}, "requires --chat true"), ({"template_options": "no", "chat": True}, "is not JSON")):
        with pytest.raises(ValueError, match=message):
            Generate(prompt="Who?", **flags | changes).run()


@pytest.mark.parametrize(("policy", "kibibytes"), [("snapkv", 64), ("chelsea:chunk=16,recent=16", 256), ("auto", 64)])
def test_budgets_in_bytes_include_sliding_windows(policy, kibibytes):
    llm, budget = tiny.make_llm(attention=AttentionConfig(windows=(64, None, 64, 64)), layers=4), kibibytes * 2**10
    sizes = {"batch": 1, "max_prompt_tokens": 4000, "max_new_tokens": 40}
    generator = llm.cache(policy, f"{budget}B", kv_dtype="int8").generator(**sizes)
    assert 0.5 * budget < generator.row_bytes <= budget  # windows are counted with the largest staging buffer
    named = llm.cache(f"{policy}@{budget}B", kv_dtype="int8").generator(**sizes)
    assert named.row_bytes == generator.row_bytes
    # A share applies to the other layers.
    assert llm.cache(policy, "25%").generator(**sizes).row_bytes > 0.25 * 4040 * 2 * 2 * 16 * 2
    with pytest.raises(ValueError, match=r"budget=20KiB is less than the 78.2 KiB that 3 layers with a sliding window"):
        llm.cache("snapkv", "20KiB").generator(max_prompt_tokens=400, max_new_tokens=40)
