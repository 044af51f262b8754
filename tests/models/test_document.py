"""Documents: a text is compressed once, does not change, and answers questions as a row alone would."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.combinators.head_budgets import retrieving_heads
from kvjax_models import LanguageModel, cache_plans, prompts
from kvjax_models.cache import read_together
from kvjax_models.model.config import AttentionConfig
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.sampling import Sampling
from tests.kvjax.support import each
from tests.models import tiny
from tests.models.support import count_compilations, key_data

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


@pytest.mark.parametrize("name", each(POLICIES, quick=("exact", "snapkv", "chelsea", "head_budgets")))
def test_answers_equal_those_of_a_question_alone(name):
    """Greedy and sampled."""
    document = read(name)
    together = document.ask(QUESTIONS, max_new_tokens=12)
    assert together == [document.ask(question, max_new_tokens=12) for question in QUESTIONS]
    assert len(set(together)) == len(QUESTIONS)
    options = {"max_new_tokens": 12, "temperature": 1.0, "repetition_penalty": 1.3}
    sampled = document.ask(QUESTIONS, seed=3, **options)
    assert sampled == [document.ask(question, seed=3 + number, **options) for number, question in enumerate(QUESTIONS)]
    assert sampled != together


def test_a_document_with_a_full_cache_answers_as_its_conversation():
    document = read()
    assert document.ask(QUESTIONS, max_new_tokens=12) == [ask_in_chat(question) for question in QUESTIONS]
    assert document.num_tokens == len(f"[user] {TEXT}") and document.tokens == tuple(
        llm().tokenizer.encode_continuation(f"[user] {TEXT}", context=())
    )
    # A penalty for repetition knows the tokens of the document.
    options = {"repetition_penalty": 1.5, "temperature": 0.5}
    assert document.ask(QUESTIONS[1], max_new_tokens=12, **options) == ask_in_chat(QUESTIONS[1], **options)


@pytest.mark.parametrize("windows", [(24, None), (200, 24)])
def test_windows_slide_over_document_and_answer(windows):
    """Also when the answer is longer than the window."""
    language_model = tiny.make_lively_llm(attention=AttentionConfig(windows=windows))
    document = language_model.cache(EXACT).read(TEXT, max_new_tokens=96)
    messages = [{"role": "user", "content": f"{TEXT}\n\nWho?"}]
    expected = language_model.generate(messages, EXACT, max_new_tokens=40)
    assert document.ask(["Who?", "Why?"], max_new_tokens=40)[0] == expected


@pytest.mark.parametrize("kv_dtype", ["int8", ("int4", "int2")])
def test_quantized_documents(kv_dtype):
    document = llm().cache("snapkv:window_size=8,compact_every=8", 80, kv_dtype=kv_dtype).read(TEXT, max_new_tokens=96)
    assert document.cache_bytes < 0.5 * read("snapkv").cache_bytes * 2
    answers = document.ask(QUESTIONS, max_new_tokens=12)
    assert answers == [document.ask(question, max_new_tokens=12) for question in QUESTIONS]


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
    assert answers == [document.ask(question, max_new_tokens=50) for question in QUESTIONS[:2]]
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


def test_log_probabilities_are_those_of_the_conversation():
    options = {"max_new_tokens": 6, "logprobs": 2, "return_details": True}
    completion, _ = read().ask(QUESTIONS[0], **options)
    messages = [{"role": "user", "content": f"{TEXT}\n\n{QUESTIONS[0]}"}]
    expected, _ = llm().generate(messages, EXACT, **options)
    assert completion.tokens == expected.tokens and completion.finish_reason == "length"
    for one, other in zip(completion.logprobs, expected.logprobs, strict=True):
        assert one.token == other.token and one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_stop_strings_finish_answers():
    answers = read().ask(QUESTIONS[:2], max_new_tokens=12)
    stop = answers[1][3:6]
    assert stop not in answers[0]
    assert read().ask(QUESTIONS[:2], max_new_tokens=12, stop=stop) == [answers[0], answers[1].partition(stop)[0]]


def test_documents_that_are_read_together_equal_documents_alone():
    caches = [llm().cache(POLICIES[name]) for name in ("exact", "snapkv", "kvzip")]
    documents = read_together(caches, TEXT, max_new_tokens=96)
    for document, name in zip(documents, ("exact", "snapkv", "kvzip"), strict=True):
        jax.tree.map(np.testing.assert_array_equal, document.prefix.entries, read(name).prefix.entries)
        np.testing.assert_array_equal(document.prefix.logits, read(name).prefix.logits)
    with pytest.raises(ValueError, match="one model"):
        read_together([caches[0], tiny.make_llm(tiny.TEMPLATE).cache()], TEXT)


# --- frozen entries ---


@pytest.mark.parametrize("name", each(POLICIES, quick=("chelsea", "quest")))
def test_questions_do_not_change_a_document(name):
    document = read(name)
    before = jax.tree.map(lambda x: np.array(key_data(x)), (document.prefix.entries, document.prefix.logits))
    document.ask(QUESTIONS, max_new_tokens=12, temperature=1.0)
    document.generate(["", "x"], max_new_tokens=3)
    after = jax.tree.map(lambda x: np.asarray(key_data(x)), (document.prefix.entries, document.prefix.logits))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_twelve_questions_hold_twelve_suffixes_and_one_text():
    document = read("snapkv")
    _, one = document.ask(QUESTIONS[0], max_new_tokens=8, return_details=True)
    _, twelve = document.ask(QUESTIONS[:1] * 12, max_new_tokens=8, return_details=True)
    leaves = jax.tree.leaves(document.prefix.entries)
    text_bytes = sum(x.nbytes for x in leaves if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))
    assert document.cache_bytes == one.document_bytes == twelve.document_bytes == pytest.approx(text_bytes, rel=0.05)
    assert twelve.cache_bytes == pytest.approx(12 * one.cache_bytes, rel=0.02)
    # Steps read the text once for all rows.
    text_read = document.prefix.read_bytes
    assert twelve.read_bytes - text_read == 12 * (one.read_bytes - text_read)
    assert twelve.full_cache_bytes - document.full_cache_bytes == 12 * (
        one.full_cache_bytes - document.full_cache_bytes
    )
    engine = document.engine(rows=12)
    before = sum(x.nbytes for x in jax.live_arrays())
    for _ in range(12):
        engine.add(document.encode(QUESTIONS[0]), document, max_new_tokens=8)
    engine.step()
    held = sum(x.nbytes for x in jax.live_arrays()) - before
    assert held < engine.cache_bytes + 12 * 98 * 12 + 200_000


def test_similar_questions_compile_nothing():
    """For any document of the same size, with any sampling."""
    document = read("snapkv")
    document.ask(["Which code is in line 3?", "Who?"], max_new_tokens=10)
    other = llm().cache(POLICIES["snapkv"]).read(TEXT[::-1], max_new_tokens=96)
    with count_compilations() as num_compiled:
        for number, question in enumerate(("Which code is in line 4?", "Which code is in line 12")):
            document.ask([question, "How?"], max_new_tokens=11, stop="x", temperature=0.3 * number, seed=number)
        other.ask(["Where are the letters?", "Why?"], max_new_tokens=12, top_k=3)
    assert num_compiled() == 0


# --- documents of one engine ---


def test_documents_enter_and_leave_while_others_answer():
    """Texts of other lengths and caches, beside plain prompts; every answer is the one of a document alone."""
    cached = llm().cache(POLICIES["snapkv"])
    texts = (TEXT, TEXT[::-1], TEXT[20:120], "A short text.")
    documents = [cached.read(text, max_new_tokens=96) for text in texts[:3]]
    documents.append(llm().cache(EXACT, kv_dtype="int8").read(texts[3], max_new_tokens=96))
    engine = cached.engine(rows=4, max_prefill_tokens=64, stream_interval=4)
    expected, answers, reasons = {}, {}, {}

    def add(number, question, new):
        document = documents[number]
        request = engine.add(
            document.encode(question), document, max_new_tokens=new, seed=number, sampling=Sampling(0.5)
        )
        answers[request] = ""
        expected[request] = document.ask(question, max_new_tokens=new, seed=number, temperature=0.5)
        return request

    for number, question, new in (
        (0, "Who?", 30),
        (1, "Why?", 9),
        (0, "Which code?", 9),
        (0, "And?", 12),
        (2, "Who?", 7),
    ):
        add(number, question, new)
    held = []
    prompt = [{"role": "user", "content": "Tell me."}]
    plain = engine.add(prompt, max_new_tokens=12)
    answers[plain], expected[plain] = "", cached.generate(prompt, max_new_tokens=12)
    for step in range(100):
        if step == 2:
            add(3, "What is it?", 20)
        if step == 3:
            add(1, "Where?", 20)
        if not engine.has_unfinished:
            break
        for output in engine.step():
            answers[output.number] += output.text
            reasons[output.number] = output.finish_reason
        held.append(len(engine._groups))
    assert answers == expected and set(reasons.values()) == {"length"} and max(held) > 2


def test_a_failing_question_does_not_stop_the_others():
    document = read("snapkv")
    engine = document.engine(rows=2)
    bad = engine.add([98], document, max_new_tokens=4)
    good = [engine.add(document.encode(question), document, max_new_tokens=8) for question in QUESTIONS]
    outputs = list(engine.run())
    [failed] = [output for output in outputs if output.error]
    assert failed.number == bad and "token ids must be between 0 and 97" in failed.error
    texts = {number: "".join(output.text for output in outputs if output.number == number) for number in good}
    assert list(texts.values()) == document.ask(QUESTIONS, max_new_tokens=8)


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

    def answers(*asked, rows=4, aborted=None):
        """Returns the tokens of every request, and the lengths of the prompts of every prefill."""
        lengths.clear()
        engine = document.engine(rows=rows, max_prefill_tokens=1)
        numbers = [engine.add(prompt, document, max_new_tokens=8) for prompt in asked]
        outputs = engine.step()
        if aborted is not None:
            engine.abort(numbers[aborted])
        outputs += engine.run()
        assert engine.num_free_rows == rows
        texts = ["".join(one.text for one in outputs if one.number == number) for number in numbers]
        return texts, [one.finish_reason for one in outputs if one.finish_reason not in (None, "length")], [*lengths]

    prompts[1], long = prompts[0][:-1], 5 * prompts[1]
    sizes = [len(prompt) for prompt in prompts[:3]]
    alone = [answers(prompt)[0][0] for prompt in prompts[:3]]
    assert answers(*prompts[:3]) == (alone, [], [[*sizes, 1]])
    assert answers(*prompts[:3], aborted=1) == ([alone[0], "", alone[2]], ["abort"], [[*sizes, 1]])
    assert answers(*prompts[:3], [98]) == (
        [*alone, ""],
        ["error"],
        [[*sizes, 1], *([size] for size in (*sizes, 1))],
    )
    assert answers(prompts[0], long, prompts[2])[2] == [[sizes[0], sizes[2]], [len(long)]]
    assert answers(prompts[0], prompts[0], prompts[2])[2] == [[sizes[0], sizes[2]]]  # equal prompts share a prefill


def test_documents_that_cannot_be_continued_are_refused():
    document, engine = read("snapkv"), llm().cache(EXACT).engine(rows=1)
    other = LanguageModel(tiny.make_llm(tiny.TEMPLATE).model, llm().tokenizer)
    with pytest.raises(ValueError, match="does not fit into the engine: it belongs to another model"):
        engine.add([1], other.cache(EXACT).read("A text."))
    with pytest.raises(ValueError, match="1 tokens of the prompt and max_new_tokens=96 exceed the capacity"):
        engine.add([1], document, max_new_tokens=96)
    with pytest.raises(ValueError, match="the rows of this engine continue documents; pass the document"):
        document.engine(rows=1).add([1])
    with pytest.raises(ValueError, match="8 tokens exceeds max_text_tokens=4"):
        llm().cache(SNAPKV).read("A text.", chat=False, max_text_tokens=4)
    assert not engine.has_unfinished


# --- chat templates ---

START = "{{ bos_token }}"
TRIMMING = START + tiny.TEMPLATE.replace("message.content", "message.content | trim")
WITH_SYSTEM = START + "{% if messages[0].role != 'system' %}[system] Be kind.\n{% endif %}" + tiny.TEMPLATE
SYSTEM_OF_QUESTION = (
    START + "{% if messages[-1].content | length > 40 %}[system] Be brief.\n{% endif %}" + tiny.TEMPLATE
)
REPEATING = START + "{{ messages[-1].content }}\n" + tiny.TEMPLATE
LOWER = START + tiny.TEMPLATE.replace("message.content", "message.content | lower")


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


@pytest.mark.parametrize("template", [TRIMMING, WITH_SYSTEM], ids=["trimming", "system"])
def test_questions_in_templates_are_answered_as_their_conversation(template):
    language_model = with_template(template)
    document = language_model.cache(EXACT).read(TEXT, max_new_tokens=96)
    for question in QUESTIONS[:2]:
        expected = ask_in_chat(question, language_model=language_model)
        assert document.ask(question, max_new_tokens=12) == expected


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


def test_a_conversation_is_a_question():
    document = read()
    first = document.ask("Who?", max_new_tokens=8)
    turns = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Why?"},
    ]
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
    if name == "exact":
        assert together == [llm().generate(TEXT + text, EXACT, max_new_tokens=12) for text in texts]
    assert document.tokens[0] == llm().tokenizer.prefix_ids[0] and document.messages is None


def test_a_document_may_be_token_ids():
    tokens = llm().encode(TEXT)
    document = llm().cache(EXACT).read(tokens, max_new_tokens=96)
    assert document.generate(" The", max_new_tokens=8) == read(chat=False).generate(" The", max_new_tokens=8)


def test_a_model_without_a_template_reads_plain_texts():
    language_model = LanguageModel(llm().model, tiny.make_llm().tokenizer)
    document = language_model.cache(EXACT).read(TEXT)
    with pytest.raises(ValueError, match="is a plain text, so that it cannot be asked in a chat template; continue it"):
        document.ask("Who?")
    with pytest.raises(ValueError, match="no chat template"):
        language_model.cache(EXACT).read(TEXT, chat=True)
    assert document.generate("Who?", max_new_tokens=2)


# --- errors ---


@pytest.mark.parametrize("wrong", [1, b"x", None, {"role": "user", "content": "x"}, [1], [["x"]]])
def test_questions_of_invalid_types_are_refused(wrong):
    with pytest.raises(TypeError, match="must be a (text or a list of messages|list of texts)"):
        read().ask(wrong)


@pytest.mark.parametrize("wrong", [1, b"x", None, {"role": "user", "content": "x"}, [{"role": "user", "content": "x"}]])
def test_continuations_of_invalid_types_are_refused(wrong):
    with pytest.raises(TypeError, match="text must be a string or a list of strings"):
        read().generate(wrong)


@pytest.mark.parametrize("wrong", [1, 1.5, b"x", None, {"role": "user", "content": "x"}, ["x"], [1.5]])
def test_texts_of_invalid_types_are_refused(wrong):
    with pytest.raises(TypeError, match="a text must be a string, messages or token ids"):
        llm().cache(EXACT).read(wrong)


def test_invalid_questions_are_refused():
    document = read()
    for question, error, message in (
        ([], ValueError, "the list of questions is empty"),
        ([{"role": "assistant", "content": "x"}], ValueError, "has role='assistant'; it must be the user's"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], TypeError, "begins must be a text, got list"),
        ("x" * 100, ValueError, r"a question of \d+ tokens leaves no capacity for an answer: .*max_new_tokens=96"),
    ):
        with pytest.raises(error, match=message):
            document.ask(question)
    for number in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"max_new_tokens={number} must be"):
            document.ask("Who?", max_new_tokens=number)
    with pytest.raises(ValueError, match="exceed the capacity max_new_tokens=96 that the document was read with"):
        document.ask("Who?", max_new_tokens=500)
    with pytest.raises(ValueError, match="temperature=-1"):
        document.ask("Who?", temperature=-1)
    with pytest.raises(TypeError, match="warmth"):
        document.ask("Who?", warmth=1.0)
    assert len(document.ask("Who?")) == 96 - len(document.encode("Who?"))


def test_invalid_options_of_reading_are_refused():
    cached = llm().cache(EXACT)
    with pytest.raises(ValueError, match="chat=False needs a text, got messages"):
        cached.read([{"role": "user", "content": "x"}], chat=False)
    with pytest.raises(ValueError, match="chat=True needs a text or messages, got token ids"):
        cached.read([1, 2], chat=True)
    for number in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"max_new_tokens={number} must be"):
            cached.read(TEXT, max_new_tokens=number)
    with pytest.raises(ValueError, match="needs a budget"):
        llm().cache("snapkv").read(TEXT)
    with pytest.raises(ValueError, match="context length"):
        cached.read(TEXT * 60)


def test_reprs_are_short():
    document = read("snapkv")
    for value, start in (
        (document, "Document(163 tokens, "),
        (llm().cache(POLICIES["snapkv"]), "cache(policy=SnapKV("),
    ):
        assert repr(value).startswith(start) and len(repr(value)) < 400, repr(value)
