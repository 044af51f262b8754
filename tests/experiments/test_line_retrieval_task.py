"""Documents of line retrieval, and the parser of answers."""

import numpy as np
import pytest

from experiments.common import settings
from experiments.common.options import LINES_CHECKPOINT
from experiments.common.tasks import line_retrieval
from kvjax_models.formats.huggingface_tokenizer import load_tokenizer

TOKENS_PER_LINE = 7  # of the checkpoint's tokenizer, at most


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


def test_documents_depend_only_on_seeds():
    def names(seed: int, count: int) -> list[tuple[str, ...]]:
        made = line_retrieval.documents(seed, count, lambda rng: line_retrieval.generate(rng, 5))
        return [document.names for document in made]

    assert not set(names(1, 50)) & set(names(2, 50))
    assert names(1, 3) == names(1, 50)[:3]


@pytest.mark.parametrize("tokens", [40, 512, 2048])
def test_generated_length_is_reached_by_the_last_line(tokens):
    loaded = load_tokenizer(settings.model_directory(LINES_CHECKPOINT))

    def length(text: str) -> int:
        return len(loaded.encode(text))

    for seed in range(5):
        document = line_retrieval.generate_for_tokens(np.random.default_rng(seed), length, tokens)
        assert tokens <= length(document.context + document.question) <= tokens + TOKENS_PER_LINE


@pytest.mark.parametrize(
    ("text", "answer"),
    [("12345", 12345), (" <12345>", 12345), ("The number is 7, not 8.", 7), ("no idea", None), ("", None)],
)
def test_parse_answer_takes_the_first_run_of_digits(text, answer):
    assert line_retrieval.parse_answer(text) == answer
