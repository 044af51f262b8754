"""Constrained answers: masks and biases of sampling, rows of an engine with and without a schema, refusals."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax_models.runner.constraints import constraint_of
from kvjax_models.runner.sampling import Sampling, num_words, row_sampling, sample
from tests.models import tiny
from tests.models.support import count_compilations

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["a", "bc"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
VOCAB_SIZE = 98  # of the tiny model


@pytest.fixture(scope="module")
def llm():
    return tiny.make_llm(tiny.TEMPLATE)


def bits(tokens, vocab_size):
    """Returns tokens as `RowSampling.allowed` has them."""
    words = np.zeros(num_words(vocab_size), np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.sampled_from((2, 32, 33, 100)))
@settings(max_examples=15, deadline=None)
def test_masks_and_biases_apply_to_their_rows_only(temperature, seed, vocab_size):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(3, vocab_size)).astype(np.float32)
    allowed = rng.choice(vocab_size, rng.integers(1, vocab_size + 1), replace=False)
    favored, banned = rng.choice(vocab_size, 2, replace=False).tolist()
    options = [
        Sampling(temperature),
        Sampling(temperature),
        Sampling(temperature, logit_bias={favored: 100, banned: -100}),
    ]
    rows = jax.tree.map(jnp.asarray, row_sampling(options, vocab_size))
    masked = np.array(rows.allowed)
    masked[1] = bits(allowed, vocab_size)
    rows = dataclasses.replace(rows, allowed=jnp.asarray(masked))
    keys = jax.random.split(jax.random.key(seed), 3)
    tokens = sample(jnp.asarray(logits), keys, rows).token
    free = sample(jnp.asarray(logits), keys, jax.tree.map(jnp.asarray, row_sampling(options[:1] * 3, vocab_size))).token
    assert tokens[0] == free[0] and tokens[1] in allowed and tokens[2] == favored
    if temperature == 0:
        assert tokens[1] == allowed[np.argmax(logits[1, allowed])]


def test_answers_follow_a_schema_whatever_other_rows_do(llm):
    """With rows that have no schema in the same group, and several tokens per step."""
    sampling = [Sampling(1.0, json_schema=SCHEMA), Sampling(1.0), Sampling(1.0, json_schema=json.dumps(SCHEMA))]
    engine = llm.cache().engine(rows=3, stream_interval=4)
    numbers = [engine.add("A text", sampling=one, max_new_tokens=60, seed=seed) for seed, one in enumerate(sampling)]
    answers = {one.number: one for one in engine.completions()}
    for seed, (number, one) in enumerate(zip(numbers, sampling, strict=True)):
        alone = llm.cache().engine(rows=1)
        alone.add("A text", sampling=one, max_new_tokens=60, seed=seed)
        assert alone.complete()[0][0].text == answers[number].text
    for number in (numbers[0], numbers[2]):
        assert answers[number].finish_reason == "stop"
        value = json.loads(answers[number].text)
        assert [*value] == ["name", "kind", "sizes"] and len(value["name"]) <= 5 and value["kind"] in ("a", "bc")
        assert len(value["sizes"]) <= 2 and all(0 <= one <= 99 for one in value["sizes"])


def test_a_request_that_waits_does_not_shorten_the_steps_of_others(llm):
    engine = llm.cache().engine(rows=1, stream_interval=4)
    engine.add("A text", max_new_tokens=8)
    engine.add("A text", sampling=Sampling(json_schema=SCHEMA), max_new_tokens=8)
    sizes = [len(output.tokens) for output in engine.run()]
    assert sizes == [4, 4, *[1] * 8]


def test_a_schema_compiles_no_program(llm):
    cache = llm.cache()
    cache.generate("A text", max_new_tokens=40)
    with count_compilations() as count:
        cache.generate("A text", max_new_tokens=40, json_schema=SCHEMA, logit_bias={3: 5.0})
    assert count() == 0


def test_documents_follow_a_schema_and_an_answer_that_is_cut_is_the_start_of_one(llm):
    document = llm.cache().read("A text about ships.", max_new_tokens=80)
    assert json.loads(document.ask("Which?", json_schema=SCHEMA, temperature=1.0))["kind"] in ("a", "bc")
    [answer], _ = document.ask(["Which?"], max_new_tokens=8, json_schema=SCHEMA, return_details=True)
    assert answer.finish_reason == "length" and answer.text == '{"name":'


def test_grammars_and_biases(llm):
    cache = llm.cache()
    assert cache.generate("A text", grammar='start: "yes" | "no"') in ("yes", "no")
    favored = cache.generate("A text", max_new_tokens=4, logit_bias={llm.encode("x")[-1]: 100})
    assert favored == "xxxx"


def test_masks_are_those_of_the_reference(llm):
    """Every token of the vocabulary is tried after every prefix of an answer."""
    tokenizer = llm.tokenizer
    sampling = Sampling(json_schema={"enum": ["ab", "ac", 7]})
    answers = ['"ab"', '"ac"', "7"]
    for text in ("", '"', '"a'):
        constraint = constraint_of(sampling, tokenizer, VOCAB_SIZE)
        constraint.push(tokenizer.encode_continuation(text))
        allowed = np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little")[:VOCAB_SIZE]
        expected = {answer[len(text)] for answer in answers if answer.startswith(text)}
        assert {tokenizer.decode([token]) for token in np.flatnonzero(allowed)} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": "nonsense"}, "json_schema='nonsense' must be a JSON object"),
        ({"json_schema": [1]}, "must be a JSON object"),
        ({"json_schema": {"type": "objekt"}}, "is not possible: Invalid type: objekt"),
        ({"json_schema": {}, "grammar": "start: /a/"}, "either a json_schema or a grammar"),
        ({"grammar": "start: nothing"}, "grammar='start: nothing' is not possible"),
        ({"logit_bias": {5: 101}}, "from -100 to 100"),
        ({"logit_bias": {-1: 1}}, "must map token ids to numbers"),
        ({"logit_bias": {98: 1}}, "logit_bias has token 98; the model has tokens 0 to 97"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "it may have up to 300"),
    ],
)
def test_invalid_constraints_are_refused(llm, options, message):
    with pytest.raises(ValueError, match=message):
        llm.cache().generate("A text", **options)
