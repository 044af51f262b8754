import itertools

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.common.tasks import line_retrieval, line_tokenizer

# Hypothesis and fixtures do not mix well: the tokenizer is built once for both.
_TOKENIZER = line_tokenizer.build()


@pytest.fixture
def tokenizer() -> tokenizers.Tokenizer:
    return _TOKENIZER


@pytest.fixture
def encoder(tokenizer) -> line_tokenizer.LineEncoder:
    return line_tokenizer.LineEncoder(tokenizer)


def test_document_reads_as_published():
    document = line_retrieval.Document(("torpid-kid", "moaning-conversation"), (24169, 7), asked=1)
    assert document.context.startswith("Below is a record of lines I want you to remember. Each line begins with")
    assert document.context.endswith(
        "Now the record start:\n\nline torpid-kid: REGISTER_CONTENT is <24169>\n"
        "line moaning-conversation: REGISTER_CONTENT is <7>\n"
    )
    assert document.question == (
        "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line moaning-conversation? "
        "I need the number."
    )
    assert (document.answer, document.depth) == (7, 1.0)
    assert document.ask(0).answer == 24169


@pytest.mark.parametrize("lines", [1, 2, 700])
def test_names_are_unique_and_numbers_in_range(lines):
    document = line_retrieval.generate(np.random.default_rng(0), lines)
    assert len(set(document.names)) == len(document.names) == lines
    assert all(1 <= number <= 50_000 for number in document.numbers)
    assert 0 <= document.asked < lines


def test_seeds_give_different_documents_and_the_same_ones_again():
    def names(seed: int, count: int) -> list[tuple[str, ...]]:
        made = line_retrieval.documents(seed, count, lambda rng: line_retrieval.generate(rng, 5))
        return [document.names for document in made]

    assert not set(names(1, 50)) & set(names(2, 50))
    assert names(1, 3) == names(1, 50)[:3]


@pytest.mark.parametrize("tokens", [40, 512, 2048])
def test_generated_length_is_reached_by_the_last_line(tokenizer, tokens):
    def length(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    for seed in range(5):
        document = line_retrieval.generate_for_tokens(np.random.default_rng(seed), length, tokens)
        assert tokens <= length(document.context + document.question) <= tokens + line_tokenizer.TOKENS_PER_LINE


@pytest.mark.parametrize(
    ("text", "answer"),
    [("12345", 12345), (" <12345>", 12345), ("The number is 7, not 8.", 7), ("no idea", None), ("", None)],
)
def test_parse_answer_takes_the_first_run_of_digits(text, answer):
    assert line_retrieval.parse_answer(text) == answer


@settings(deadline=None)
@given(st.text())
def test_tokenizer_round_trips_any_text(text):
    tokenizer = _TOKENIZER
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("number", "groups"),
    [
        ("7", ["7"]),
        ("042", ["042"]),
        ("12345", ["12", "345"]),
        ("1000", ["1", "000"]),
        ("1234567", ["1", "234", "567"]),
    ],
)
def test_numbers_split_into_groups_of_three_from_the_right(tokenizer, number, groups):
    assert tokenizer.encode(f"<{number}>\n", add_special_tokens=False).tokens[1:-1] == groups


def test_a_word_of_the_task_is_one_token(tokenizer):
    encoding = tokenizer.encode("line torpid-kid: REGISTER_CONTENT is <24169>\n", add_special_tokens=False)
    assert len(encoding.ids) == line_tokenizer.TOKENS_PER_LINE


@pytest.mark.parametrize("numbers", [(1, 999, 1000, 50_000), (10_000, 12, 1001, 7007)])
def test_arrays_equal_the_encoded_text(tokenizer, encoder, numbers):
    drawn = line_retrieval.draw_lines(np.random.default_rng(3), 4)
    lines = line_retrieval.Lines(drawn.adjectives, drawn.nouns, np.array(numbers))
    asked = np.array([2, 0, 3, 1, 2])
    document = line_retrieval.document(lines, asked=0)
    turns = (document.ask(int(line)) for line in asked)
    text = document.context + "".join(f"{turn.question}{turn.answer}{line_tokenizer.EOS}" for turn in turns)
    conversation = encoder.conversation(lines, asked)
    np.testing.assert_array_equal(conversation.tokens, tokenizer.encode(text).ids)
    answers = itertools.chain.from_iterable(
        tokenizer.encode(f"{numbers[line]}{line_tokenizer.EOS}", add_special_tokens=False).ids for line in asked
    )
    assert conversation.tokens[conversation.is_answer].tolist() == list(answers)


def test_encoder_refuses_another_tokenizer():
    other = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(ValueError, match="splits a word of the task"):
        line_tokenizer.LineEncoder(other)
