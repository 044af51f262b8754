"""Hybrid models: recurrent states beside the caches, in prefill, decoding, documents and saves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax_models.model.config import RecurrenceConfig
from kvjax_models.model.gated_delta import GatedDeltaSizes
from kvjax_models.model.short_convolution import ShortConvolutionSizes
from kvjax_models.runner import decode
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.prefill import prefill_layers
from kvjax_models.runner.repetition import make_repetitions
from tests.models import tiny
from tests.models.loops import decode_all
from tests.models.support import compile_counts

SIZES = GatedDeltaSizes(key_heads=2, value_heads=4, key_dim=8, value_dim=6, kernel_size=4)
HYBRID = {
    "layers": 5, "recurrence": RecurrenceConfig((0, 2, 4), SIZES), "norms.offset": 1.0, "rope.rotary_dim": 4,
    "attention.gate": True, "attention.query_key_norm": True,
}  # fmt: skip
CONVOLUTIONS = ShortConvolutionSizes(channels=tiny.make_config().width, kernel_size=3, use_bias=True)
KINDS = {
    "gated delta": HYBRID,
    "short convolution": {
        "layers": 5,
        "recurrence": RecurrenceConfig((0, 2, 4), CONVOLUTIONS),
        "attention.query_key_norm": True,
    },
}
PROMPTS = [[(7 * i + 3) % 90 + 2 for i in range(70)], [5, 9, 33], [(5 * i) % 80 + 4 for i in range(21)]]
NEW = 12


@functools.cache
def make_llm(kind):
    return tiny.make_lively_llm(**KINDS[kind])


@pytest.fixture
def llm():
    return make_llm("gated delta")


@functools.cache
def continue_without_cache(kind):
    """Returns the greedy continuation of every prompt."""
    llm, rows = make_llm(kind), [list(prompt) for prompt in PROMPTS]
    forward = jax.jit(lambda model, tokens: model(tokens))
    for _ in range(NEW):
        padded = np.zeros((len(rows), 96), np.int32)
        for row, tokens in enumerate(rows):
            padded[row, : len(tokens)] = tokens
        logits = np.asarray(forward(llm.model, jnp.asarray(padded)))
        rows = [[*row, int(logits[number, len(row) - 1].argmax())] for number, row in enumerate(rows)]
    return [row[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)]


def make_generator(llm, policy=None, **options):
    sizes = {"batch": len(PROMPTS), "max_prompt_tokens": 80, "max_new_tokens": 40} | options
    return Generator(llm.model, policy or kvjax.Exact(compact_every=8), **sizes)


def generate(generator, prompts=PROMPTS, count=NEW):
    return decode_all(generator, generator.prefill(generator.init_state(), prompts), count)


def assert_close(state, other, atol=1e-4):
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_generates_what_full_attention_generates(kind):
    """Of rows of several lengths; chunks and blocks of any size give one state."""
    llm, states = make_llm(kind), []
    for options in ({"prefill_chunk": 16}, {"prefill_chunk": 80}, {"streaming": True}):
        rows, state = generate(make_generator(llm, **options))
        assert rows == continue_without_cache(kind)
        assert len(state.layers) == 2 and len(state.recurrent) == 3
        states.append(state)
    for state in states[1:]:
        assert_close((state.recurrent, state.logits), (states[0].recurrent, states[0].logits))


def test_one_program_per_layer_computes_the_same(llm, monkeypatch):
    monkeypatch.setattr(decode, "MIN_LAYERS", 5)
    with compile_counts([decode.step_recurrent_layer, decode.step_layer], [1, 1]):  # layers of one kind share one
        rows, _ = generate(make_generator(llm, max_new_tokens=41))
    assert decode.runs_by_layer(llm.model, None) and rows == continue_without_cache("gated delta")


def test_finished_rows_keep_their_state(llm):
    generator = make_generator(llm, eos=(continue_without_cache("gated delta")[1][3],))
    _, state = generate(generator)
    assert bool(state.done[1])
    alone = make_generator(llm, batch=1)
    _, stopped = generate(alone, [PROMPTS[1]], 4)
    assert_close(kvjax.take_rows(state, jnp.array([1])).recurrent, stopped.recurrent)


def test_later_prompts_and_forks_continue_the_state(llm):
    generator = make_generator(llm)
    rows, _ = generate(generator, [[*prompt, 11, 12, 13] for prompt in PROMPTS])
    state = generator.prefill(generator.init_state(), PROMPTS)
    forks = kvjax.repeat_rows(state, 2)
    state = generator.prefill(state, [[11, 12, 13]] * 3)
    assert decode_all(generator, state, NEW)[0] == rows
    double = generator.with_batch(6)
    forked, _ = decode_all(double, double.prefill(forks, [[11, 12, 13], [8]] * 3), NEW)
    assert forked[::2] == rows


@pytest.mark.heavy
def test_repetitions_continue_the_states_of_their_prompts(llm):
    """The keys of a repetition equal those of a text that continues the prompt by it."""
    model, tokens = llm.model, np.asarray([PROMPTS[0][:64]], np.int32)
    repeat = kvjax.KVzip(budget=32, chunk_tokens=40).requires.repetition
    layers = list(prefill_layers(model, tokens, jnp.array([64]), 32, [0, 0], repeat))
    texts, sizes = make_repetitions(repeat, tokens, np.array([64]))
    assert sizes.size == 2
    repeated = layers[1].repeated.keys.reshape(2, -1, 2, 16)
    for text, size, keys in zip(texts[0], sizes[0], repeated, strict=True):
        entire = jnp.asarray(np.concatenate([tokens[0], text[:size]])[None])
        x, lengths = model.embed(entire), jnp.array([entire.shape[1]])
        for number, layer in enumerate(model.layers[:4]):
            if number in model.config.recurrent_layers:
                x, _ = layer(x, layer.init_state(1), lengths)
                continue
            query, key, value = layer.project(x, model.rotation(jnp.arange(entire.shape[1])[None], number))
            x = layer.finish(x, jax.nn.dot_product_attention(query, key, value, is_causal=True))
        np.testing.assert_allclose(keys[:size], key[0, 64:], atol=5e-4)


@pytest.mark.heavy
def test_auto_measures_a_profile(llm):
    text = "".join(chr(97 + (i * i) % 26) for i in range(2000))
    answer, usage = llm.cache("auto", "25%").generate(text, max_new_tokens=8, return_details=True)
    assert len(answer.tokens) == 8 and usage.cache_bytes < usage.full_cache_bytes


QUESTIONS = [f"question {number * number} of {letter}" for number, letter in enumerate("abcd")]


@pytest.mark.parametrize(
    ("kind", "policy", "budget"),
    [
        pytest.param("gated delta", "exact", None, marks=pytest.mark.heavy),
        ("gated delta", "snapkv", 64),
        ("short convolution", "kvzip", 64),
    ],
)
def test_a_document_answers_questions_as_one_run_each(kind, policy, budget, tmp_path):
    text, llm = "a text of some length, which is read once; " * 3, make_llm(kind)
    cache, options = llm.cache(policy, budget), {"max_new_tokens": 8}
    document = cache.read(text, max_new_tokens=64, chat=False)
    answers = document.generate(QUESTIONS, **options)
    assert len(set(answers)) == 4
    assert [cache.read(text, max_new_tokens=64, chat=False).generate(one, **options) for one in QUESTIONS] == answers
    if budget is None:
        assert cache.generate([text + one for one in QUESTIONS], **options) == answers
    document.save(tmp_path)
    opened = llm.open(tmp_path)
    assert_close(opened.prefix.recurrent, document.prefix.recurrent, atol=0)
    assert opened.generate(QUESTIONS[:2], **options) == answers[:2]
    assert document.cache_bytes == kvjax.cache_bytes((document.prefix.entries, document.prefix.recurrent)).device


def run_engine(engine, *requests):
    """Returns the tokens of each request, given as arguments of `Engine.add`, and the last output."""
    tokens = {engine.add(*arguments, **options): [] for arguments, options in requests}
    for output in engine.run():
        tokens[output.number] += output.tokens
    return list(tokens.values()), output


def test_one_engine_continues_two_documents_and_a_conversation(llm):
    cache, options = llm.cache("exact"), {"max_new_tokens": 8}
    texts = ["a text of some length " * 3, "another text, which is longer " * 3]
    documents = [cache.read(text, max_new_tokens=64, max_text_tokens=128, chat=False) for text in texts]
    engine, pairs = cache.engine(rows=4), list(zip(documents * 2, QUESTIONS, strict=True))
    prompts = [llm.tokenizer.encode_continuation(question, document.tokens) for document, question in pairs]
    requests = [((prompt, document), options) for prompt, (document, _) in zip(prompts, pairs, strict=True)]
    tokens, _ = run_engine(engine, *requests)
    assert list(map(llm.tokenizer.decode, tokens)) == [document.generate(text, **options) for document, text in pairs]
    _, first = run_engine(engine, ((PROMPTS[2],), options | {"keep": True}))
    turn = [21, 22, 23]
    [second], _ = run_engine(engine, ((turn, first.prefix), options))
    assert [second] == run_engine(engine, (([*first.prefix.tokens, *turn],), options))[0] and len(second) == 8


def test_policies_have_layers_with_attention_and_bytes_count_recurrent_states(llm):
    assert len(llm.cache("subgen", 96).generator(max_prompt_tokens=80, max_new_tokens=40).policies) == 2
    generator = make_generator(llm)
    state = jax.eval_shape(generator.init_state)
    row = 4 * 3 * (3 * 2 * SIZES.channels + 4 * 8 * 6)  # float32, three layers
    assert generator.recurrent_row_bytes == row
    sizes, caches = generator.cache_sizes(state), kvjax.cache_bytes(state.layers).device
    assert sizes["cache_bytes"] == caches + 3 * row
    assert sizes["full_cache_bytes"] == 3 * (row + 2 * 120 * 2 * 2 * 16 * 2)
    convolutions = make_llm("short convolution")
    assert make_generator(convolutions).recurrent_row_bytes == 4 * 3 * 2 * convolutions.model.config.width


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda llm: generate(make_generator(llm, kvjax.KVgrad(budget=32))),
         "scores with gradients, which pass layers with attention only"),
        (lambda llm: dataclasses.replace(llm.model.config, recurrence=RecurrenceConfig((), SIZES)),
         "recurrence.layers is empty"),
        (lambda llm: dataclasses.replace(llm.model.config, recurrence=RecurrenceConfig(range(5), SIZES)),
         "recurrence.layers names every layer"),
    ],
)  # fmt: skip
def test_unsupported_policies_and_configurations_are_refused(llm, call, message):
    with pytest.raises(ValueError, match=message):
        call(llm)
