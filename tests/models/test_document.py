"""Documents: a text is compressed once, does not change, and answers questions as a row alone would."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.combinators.head_budgets import retrieving_heads, save_shares
from kvjax_models import LanguageModel, cache_plans, prompts
from kvjax_models.cache import read_together
from kvjax_models.model.config import AttentionConfig
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.sampling import Sampling
from tests.kvjax.support import each
from tests.models import tiny
from tests.models.loops import gather
from tests.models.support import key_data

PERIOD = 8
TEXT = "".join(f"Line {number}: the code is {7315 + 11 * number}.\n" for number in range(6))
QUESTIONS = ["Who?", "Which code is in line 3?", "Why", "What is the last line of the text, please?"]
EXACT = kvjax.Exact(compact_every=PERIOD)
SNAPKV = kvjax.SnapKV(40, window_size=8, compact_every=PERIOD)
POLICIES = {
    "exact": EXACT,
    "snapkv": SNAPKV,
    "streaming_llm": kvjax.StreamingLLM(40, compact_every=PERIOD),
    "subgen_mean": kvjax.SubGenMean(40, sinks=2, recent=8, compact_every=PERIOD),
    "chelsea": kvjax.Chelsea(40, sinks=2, recent=8, chunk=16, compact_every=PERIOD),
    "clusterkv": kvjax.ClusterKV(24, sinks=2, full_layers=0, chunk_tokens=16, chunk_clusters=2, compact_every=PERIOD),
    "quest": kvjax.Quest(24, compact_every=PERIOD),
    "head_budgets": kvjax.HeadBudgets(SNAPKV, retrieving_heads(2, 2, [(0, 1), (1, 0)])),
    "kvzip": kvjax.KVzip(40, recent=8, compact_every=PERIOD),
    "host_memory": kvjax.HostMemory(
        kvjax.ClusterKV(24, sinks=2, full_layers=0, chunk_tokens=16, chunk_clusters=2, compact_every=PERIOD)
    ),
}


@functools.cache
def llm():
    return tiny.make_lively_llm()


@functools.cache
def read(name="exact", text=TEXT, **options):
    return llm().cache(POLICIES[name]).read(text, max_new_tokens=96, **options)


def ask_in_chat(question, text=TEXT, language_model=None, **options):
    """Returns the answer of the model without a document."""
    messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
    return (language_model or llm()).generate(messages, EXACT, max_new_tokens=12, **options)


# --- answers ---


def values_of(document):
    """Returns a copy of the compressed text."""
    return jax.tree.map(lambda x: np.array(key_data(x)), (document.prefix.entries, document.prefix.logits))


@pytest.mark.parametrize("name", each(POLICIES, quick=("exact", "chelsea", "head_budgets")))
def test_answers_equal_those_of_a_question_alone(name):
    """Greedy and sampled. Questions do not change the document."""
    document = read(name)
    before = values_of(document)
    together = document.ask(QUESTIONS, max_new_tokens=12)
    assert together == [document.ask(question, max_new_tokens=12) for question in QUESTIONS]
    assert len(set(together)) == len(QUESTIONS)
    options = {"max_new_tokens": 12, "temperature": 1.0, "repetition_penalty": 1.3}
    sampled = document.ask(QUESTIONS, seed=3, **options)
    assert sampled == [document.ask(question, seed=3 + number, **options) for number, question in enumerate(QUESTIONS)]
    assert sampled != together
    jax.tree.map(np.testing.assert_array_equal, before, values_of(document))


def test_a_save_does_not_need_the_file_of_shares(tmp_path):
    file = tmp_path / "heads.json"
    save_shares(file, retrieving_heads(2, 2, [(0, 1), (1, 0)]), {})
    document = llm().cache(f"snapkv:heads={file},window_size=8,compact_every=8", 40).read(TEXT, max_new_tokens=96)
    document.save(tmp_path / "saved")
    file.unlink()
    restored = llm().open(tmp_path / "saved")
    assert restored.options == document.options
    assert restored.ask(QUESTIONS[1], max_new_tokens=12) == document.ask(QUESTIONS[1], max_new_tokens=12)


def test_a_document_with_a_full_cache_answers_as_its_conversation():
    document = read()
    answers = document.ask(QUESTIONS, max_new_tokens=12)
    assert answers == [ask_in_chat(question) for question in QUESTIONS]
    tokens = llm().tokenizer.encode_continuation(f"[user] {TEXT}", context=())
    assert document.num_tokens == len(tokens) and document.tokens == tuple(tokens)
    # A penalty for repetition knows the tokens of the document.
    options = {"repetition_penalty": 1.5, "temperature": 0.5, "stop": answers[0][3:6]}
    assert document.ask(QUESTIONS[1], max_new_tokens=12, **options) == ask_in_chat(QUESTIONS[1], **options)


@pytest.mark.parametrize("windows", [(24, None), (200, 24)])
def test_windows_slide_over_document_and_answer(windows):
    """Also when the answer is longer than the window."""
    language_model = tiny.make_lively_llm(attention=AttentionConfig(windows=windows))
    document = language_model.cache(EXACT).read(TEXT, max_new_tokens=96)
    messages = [{"role": "user", "content": f"{TEXT}\n\nWho?"}]
    expected = language_model.generate(messages, EXACT, max_new_tokens=40)
    assert document.ask(["Who?", "Why?"], max_new_tokens=40)[0] == expected


def test_a_streamed_document_answers_as_its_conversation():
    document = llm().cache(EXACT).read(TEXT, max_new_tokens=96, streaming=True)
    assert document.ask(QUESTIONS[1], max_new_tokens=12) == ask_in_chat(QUESTIONS[1])
    with pytest.raises(ValueError, match="compresses entire prompts"):
        llm().cache(SNAPKV).read(TEXT, streaming=True)


def test_suffixes_beyond_a_limit_are_compressed(monkeypatch):
    monkeypatch.setattr(cache_plans, "EXACT_SUFFIX_TOKENS", 48)
    document = llm().cache("subgen_mean:sinks=2,recent=8,compact_every=8", 80).read(TEXT, max_new_tokens=96)
    suffixes = document.suffix_sizes()
    assert isinstance(suffixes.policies[0], kvjax.SubGenMean) and suffixes.policies[0].budget == 48
    answers = document.ask(QUESTIONS[:2], max_new_tokens=50)
    assert answers[1] == document.ask(QUESTIONS[1], max_new_tokens=50)
    # SnapKV needs entire prompts, so its suffixes cannot be compressed.
    with pytest.raises(ValueError, match="compresses entire prompts"):
        llm().cache(SNAPKV).read(TEXT, max_new_tokens=96).ask("Who?")


def test_long_tails_have_the_policy_of_each_layer(monkeypatch):
    monkeypatch.setattr(cache_plans, "EXACT_SUFFIX_TOKENS", 48)
    cached = tiny.make_lively_llm(attention=AttentionConfig(windows=(24, None))).cache(
        "uniform:sinks=2,recent=8,compact_every=8@80 slots"
    )
    tails = cached.suffix_rows(cached.document_generator(100, 96), 0, 96)[-1]
    assert tails.policies[0] == kvjax.SlidingWindow(24, compact_every=8)
    assert tails.policies[1] == kvjax.Uniform(48, sinks=2, recent=8, compact_every=8)


def test_scores_of_continuations_equal_those_of_the_model():
    document = read(chat=False)
    texts = [
        llm().tokenizer.encode_continuation(text, document.tokens) for text in (" It sank.", "And the storm went on.")
    ]
    for tokens, scores in zip(texts, document.score(texts), strict=True):
        whole = [*document.tokens, *tokens]
        log_probs = np.asarray(jax.nn.log_softmax(llm().model(np.array([whole]))[0]))
        places = np.arange(len(document.tokens) - 1, len(whole) - 1)
        np.testing.assert_allclose(scores, log_probs[places, tokens], atol=1e-3)
    with pytest.raises(ValueError, match="a continuation of 97 tokens exceeds the capacity max_new_tokens=96"):
        document.score([[1], [1] * 97])


def test_documents_that_are_read_together_equal_documents_alone():
    caches = [llm().cache(POLICIES[name]) for name in ("exact", "snapkv", "kvzip")]
    documents = read_together(caches, TEXT, max_new_tokens=96)
    for document, name in zip(documents, ("exact", "snapkv", "kvzip"), strict=True):
        jax.tree.map(np.testing.assert_array_equal, document.prefix.entries, read(name).prefix.entries)
        np.testing.assert_array_equal(document.prefix.logits, read(name).prefix.logits)
    with pytest.raises(ValueError, match="one model"):
        read_together([caches[0], tiny.make_llm(tiny.TEMPLATE).cache()], TEXT)


def test_twelve_questions_hold_twelve_suffixes_and_one_text():
    document = read("snapkv")
    one, twelve = (document.ask(QUESTIONS[:1] * count, max_new_tokens=8, return_details=True)[1] for count in (1, 12))
    leaves = jax.tree.leaves(document.prefix.entries)
    text_bytes = sum(x.nbytes for x in leaves if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))
    assert document.cache_bytes == one.document_bytes == twelve.document_bytes == pytest.approx(text_bytes, rel=0.05)
    assert twelve.cache_bytes == pytest.approx(12 * one.cache_bytes, rel=0.02)
    # Steps read the text once for all rows.
    for name, text in (("read_bytes", document.prefix.read_bytes), ("full_cache_bytes", document.full_cache_bytes)):
        assert getattr(twelve, name) - text == 12 * (getattr(one, name) - text)
    engine = document.engine(rows=12)
    before = sum(x.nbytes for x in jax.live_arrays())
    for _ in range(12):
        engine.add(document.encode(QUESTIONS[0]), document, max_new_tokens=8)
    engine.step()
    held = sum(x.nbytes for x in jax.live_arrays()) - before
    assert held < engine.cache_bytes + 12 * 98 * 12 + 200_000


# --- documents of one engine ---


def test_documents_enter_and_leave_while_others_answer():
    """Texts of other lengths and caches, beside plain prompts; every answer is the one of a document alone."""
    cached = llm().cache(POLICIES["snapkv"])
    documents = [cached.read(text, max_new_tokens=96) for text in (TEXT, TEXT[::-1], TEXT[20:120])]
    documents.append(llm().cache(EXACT, kv_dtype="int8").read("A short text.", max_new_tokens=96))
    engine = cached.engine(rows=4, max_prefill_tokens=64, stream_interval=4)
    expected, outputs, num_groups = {}, [], []

    def add(number, question, new):
        document, options = documents[number], {"max_new_tokens": new, "seed": number}
        request = engine.add(document.encode(question), document, sampling=Sampling(0.5), **options)
        expected[request] = document.ask(question, temperature=0.5, **options)

    for request in ((0, "Who?", 30), (1, "Why?", 9), (0, "Which code?", 9), (0, "And?", 12), (2, "Who?", 7)):
        add(*request)
    prompt, later = [{"role": "user", "content": "Tell me."}], {2: (3, "What is it?", 20), 3: (1, "Where?", 20)}
    expected[engine.add(prompt, max_new_tokens=12)] = cached.generate(prompt, max_new_tokens=12)
    while engine.has_unfinished:
        if len(num_groups) in later:
            add(*later[len(num_groups)])
        outputs += engine.step()
        num_groups.append(len(engine._groups))
    _, answers, reasons = gather(outputs)
    assert answers == expected and set(reasons.values()) == {"length"} and max(num_groups) > 2


def test_questions_of_similar_lengths_are_prefilled_together(monkeypatch):
    """Each once, or alone after one of them failed; a long one does not make the others wait for it."""
    document = llm().cache(POLICIES["snapkv"]).read(TEXT, max_new_tokens=256)
    prompts = [document.encode(question) for question in QUESTIONS]
    lengths = []
    prefill_steps = Generator.prefill_steps

    def counted(generator, state, prompts, *arguments, **options):
        lengths.append([len(prompt) for prompt in prompts])
        return prefill_steps(generator, state, prompts, *arguments, **options)

    monkeypatch.setattr(Generator, "prefill_steps", counted)

    def answers(*asked, aborted=None):
        """Returns the texts of all requests, how other than by their length they ended, and all prefills' lengths."""
        lengths.clear()
        engine = document.engine(rows=4, max_prefill_tokens=1)
        numbers = [engine.add(prompt, document, max_new_tokens=8) for prompt in asked]
        outputs = engine.step()
        if aborted is not None:
            engine.abort(numbers[aborted])
        _, texts, reasons = gather([*outputs, *engine.run()])
        assert engine.num_free_rows == 4
        return [*map(texts.get, numbers)], [one for one in reasons.values() if one != "length"], [*lengths]

    prompts[1], long = prompts[0][:-1], 5 * prompts[1]
    sizes = [len(prompt) for prompt in prompts[:3]]
    alone = [answers(prompt)[0][0] for prompt in prompts[:3]]
    assert answers(*prompts[:3]) == (alone, [], [[*sizes, 1]])
    assert answers(*prompts[:3], aborted=1) == ([alone[0], "", alone[2]], ["abort"], [[*sizes, 1]])
    prefilled = [[*sizes, 1], *([size] for size in (*sizes, 1))]
    assert answers(*prompts[:3], [98]) == ([*alone, ""], ["error"], prefilled)
    assert answers(prompts[0], long, prompts[2])[2] == [[sizes[0], sizes[2]], [len(long)]]
    assert answers(prompts[0], prompts[0], prompts[2])[2] == [[sizes[0], sizes[2]]]  # equal prompts share a prefill


def test_documents_that_cannot_be_continued_are_refused():
    document, engine = read("snapkv"), llm().cache(EXACT).engine(rows=1)
    other = LanguageModel(tiny.make_llm(tiny.TEMPLATE).model, llm().tokenizer).cache(EXACT).read("A text.")
    for some_engine, prefix, limit, message in (
        (engine, other, 8, "does not fit into the engine: it belongs to another model"),
        (engine, document, 96, "1 tokens of the prompt and max_new_tokens=96 exceed the capacity"),
        (document.engine(rows=1), None, 8, "the rows of this engine continue documents; pass the document"),
    ):
        with pytest.raises(ValueError, match=message):
            some_engine.add([1], prefix, max_new_tokens=limit)
    assert not engine.has_unfinished


def test_long_answers_of_a_policy_that_needs_entire_prompts_are_refused():
    document = llm().cache("snapkv", "50%").read("A book. " * 20, max_new_tokens=5000)
    assert len(document.ask("Who?", max_new_tokens=4, return_details=True)[0].tokens) == 4
    message = "more than 4096 tokens after a document .* compresses entire prompts; reduce max_new_tokens"
    with pytest.raises(ValueError, match=message):
        document.ask("Who?")


# --- chat templates ---

START = "{{ bos_token }}"
TRIMMING = START + tiny.TEMPLATE.replace("message.content", "message.content | trim")
WITH_SYSTEM = START + "{% if messages[0].role != 'system' %}[system] Be kind.\n{% endif %}" + tiny.TEMPLATE
SYSTEM_OF_QUESTION = (
    START + "{% if messages[-1].content | length > 40 %}[system] Be brief.\n{% endif %}" + tiny.TEMPLATE
)
REPEATING = START + "{{ messages[-1].content }}\n" + tiny.TEMPLATE
LOWER = START + tiny.TEMPLATE.replace("message.content", "message.content | lower")
WITH_OPTIONS = START + "{% if brief %}Be brief.\n{% endif %}" + tiny.TEMPLATE + "{% if think %}<think>{% endif %}"


def with_template(template):
    return LanguageModel(llm().model, tiny.make_llm(template).tokenizer)


@pytest.mark.parametrize("template", [TRIMMING, WITH_SYSTEM], ids=["trimming", "system"])
@pytest.mark.parametrize("text", ["A text.", "  A text with spaces.\n\n "])
def test_context_and_question_are_the_rendered_conversation(template, text):
    tokenizer = with_template(template).tokenizer
    messages = ({"role": "user", "content": text},)
    context = prompts.render_context(tokenizer, messages)
    for question in ("Why?", "  Which line?\n"):
        end = prompts.render_question(tokenizer, messages, context, question)
        whole = tokenizer.render_chat([{"role": "user", "content": f"{text}\n\n{question}"}])
        assert context + end == whole and end.endswith("[assistant] ")
    assert ("Be kind" in context) == (template is WITH_SYSTEM) and context.startswith(tiny.BOS)
    assert prompts.render_question(tokenizer, messages, context, "Why?", separator=" ").startswith(" Why?")


def test_questions_in_templates_are_answered_as_their_conversation():
    language_model = with_template(WITH_SYSTEM)
    document = language_model.cache(EXACT).read(TEXT, max_new_tokens=96)
    assert document.ask("Who?", max_new_tokens=12) == ask_in_chat("Who?", language_model=language_model)


def test_templates_that_cannot_be_split_are_refused():
    for template in (REPEATING, LOWER):
        with pytest.raises(ValueError, match="cannot be split after the text: it does not write the content of a mess"):
            with_template(template).cache(EXACT).read(TEXT)
    document = with_template(SYSTEM_OF_QUESTION).cache(EXACT).read("Text.")
    with pytest.raises(
        ValueError, match="cannot be split .* renders the conversation differently before different que"
    ):
        document.ask("A question that has more than forty characters")
    # Without the template, any text is read.
    assert with_template(REPEATING).cache(EXACT).read(TEXT, chat=False).generate("x", max_new_tokens=2)


def test_template_options_of_a_question_must_not_change_the_text():
    document = with_template(WITH_OPTIONS).cache(EXACT).read("Text.")
    tokens = document.encode("Who?", template_options={"think": True})
    assert document.tokenizer.decode(tokens[len(document.encode("Who?")) :]) == "<think>"
    with pytest.raises(ValueError, match="template_options=.'brief': True. change how the chat template renders"):
        document.encode("Who?", template_options={"brief": True})


def test_a_conversation_is_a_question():
    document = read()
    texts = {"user": "Who?", "assistant": document.ask("Who?", max_new_tokens=8)}
    turns = [{"role": role, "content": text} for role, text in texts.items()] + [{"role": "user", "content": "Why?"}]
    whole = [{"role": "user", "content": f"{TEXT}\n\nWho?"}, *turns[1:]]
    expected = llm().generate(whole, EXACT, max_new_tokens=8)
    assert document.ask(turns, max_new_tokens=8) == document.ask([turns, "Where?"], max_new_tokens=8)[0] == expected


def test_a_document_may_be_a_conversation():
    """A question is a new message after one of the assistant, and continues one of the user."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": "I read it."},
    ]
    document = llm().cache(EXACT).read(messages, max_new_tokens=96)
    expected = llm().generate([*messages, {"role": "user", "content": "Who?"}], EXACT, max_new_tokens=8)
    assert document.ask("Who?", max_new_tokens=8) == expected
    document = llm().cache(EXACT).read(messages[:2], max_new_tokens=96)
    last = {"role": "user", "content": f"{TEXT} Who?"}
    expected = llm().generate([messages[0], last], EXACT, max_new_tokens=8)
    assert document.ask("Who?", separator=" ", max_new_tokens=8) == expected


def test_the_start_of_an_answer_is_not_part_of_it():
    document = read()
    text = llm().tokenizer.render_chat([{"role": "user", "content": f"{TEXT}\n\nWho?"}]) + "It was"
    tokens = llm().tokenizer.encode_continuation(text, context=())
    assert [*document.tokens, *document.encode("Who?", answer_start="It was")] == tokens
    plain = llm().cache(EXACT).read(tokens, max_new_tokens=96)
    expected = plain.generate("", max_new_tokens=8)
    assert document.ask("Who?", answer_start="It was", max_new_tokens=8) == expected


# --- plain texts ---


@pytest.mark.parametrize("name", ["exact", "snapkv"])
def test_texts_continue_a_plain_document(name):
    document = read(name, chat=False)
    texts = ["", " The", "Line 7: the code is"]
    together = document.generate(texts, max_new_tokens=12)
    assert together == [document.generate(text, max_new_tokens=12) for text in texts]
    assert document.tokens[0] == llm().tokenizer.prefix_ids[0] and document.messages is None
    if name == "exact":
        assert together == [llm().generate(TEXT + text, EXACT, max_new_tokens=12) for text in texts]
        of_tokens = llm().cache(EXACT).read(llm().encode(TEXT), max_new_tokens=96)
        assert of_tokens.generate(" The", max_new_tokens=12) == together[1]


def test_a_model_without_a_template_reads_plain_texts():
    language_model = LanguageModel(llm().model, tiny.make_llm().tokenizer)
    document = language_model.cache(EXACT).read(TEXT)
    assert document.generate("Who?", max_new_tokens=2)
    with pytest.raises(ValueError, match="is a plain text, so that it cannot be asked in a chat template; continue it"):
        document.ask("Who?")
    with pytest.raises(ValueError, match="no chat template"):
        language_model.cache(EXACT).read(TEXT, chat=True)


# --- errors ---

MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("call", "values", "message"),
    [
        (lambda value: read().ask(value), [[1], [["x"]]], "must be a (text or a list of messages|list of texts)"),
        (lambda value: read().generate(value), [[MESSAGE]], "text must be a string or a list of strings"),
        (
            lambda value: llm().cache(EXACT).read(value),
            [["x"], [1.5]],
            "a text must be a string, messages or token ids",
        ),
    ],
    ids=["questions", "continuations", "texts"],
)
def test_invalid_types_are_refused(call, values, message):
    for value in [1, b"x", None, MESSAGE, *values]:
        with pytest.raises(TypeError, match=message):
            call(value)


@pytest.mark.parametrize(
    ("question", "options", "error", "message"),
    [
        ([], {}, ValueError, "the list of questions is empty"),
        ([{"role": "assistant", "content": "x"}], {}, ValueError, "has role='assistant'; it must be the user's"),
        ([MESSAGE | {"content": [{"type": "text", "text": "x"}]}], {}, TypeError, "begins must be a text, got list"),
        ("x" * 100, {}, ValueError, r"prompt and max_new_tokens=1 exceed the capacity max_new_tokens=96"),
        ("Who?", {"max_new_tokens": 1.5}, ValueError, "max_new_tokens=1.5 must be"),
    ],
)
def test_invalid_questions_are_refused(question, options, error, message):
    with pytest.raises(error, match=message):
        read().ask(question, **options)


def test_an_answer_may_have_the_capacity_of_its_document():
    assert len(read().ask("Who?")) == 96 - len(read().encode("Who?"))


@pytest.mark.parametrize(
    ("text", "policy", "options", "message"),
    [
        ([MESSAGE], EXACT, {"chat": False}, "chat=False needs a text, got messages"),
        ([1, 2], EXACT, {"chat": True}, "chat=True needs a text or messages, got token ids"),
        (TEXT, EXACT, {"max_new_tokens": 0}, "max_new_tokens=0 must be"),
        (TEXT, EXACT, {"max_new_tokens": True}, "max_new_tokens=True must be"),
        (TEXT, "snapkv", {}, "needs a budget"),
        (TEXT * 60, EXACT, {}, "context length"),
        ("A text.", SNAPKV, {"chat": False, "max_text_tokens": 4}, "8 tokens exceeds max_text_tokens=4"),
    ],
)
def test_invalid_options_of_reading_are_refused(text, policy, options, message):
    with pytest.raises(ValueError, match=message):
        llm().cache(policy).read(text, **options)


def test_reprs_are_short():
    for value, start in (
        (read("snapkv"), "Document(163 tokens, "),
        (llm().cache(POLICIES["snapkv"]), "cache(policy=SnapKV("),
        (llm(), "LanguageModel(layers="),
    ):
        assert repr(value).startswith(start) and len(repr(value)) < 400, repr(value)
