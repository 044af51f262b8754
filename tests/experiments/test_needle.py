"""Needles: hidden where they should be, asked for and scored as published."""

import re

import numpy as np
import pytest

from experiments.common.tasks import needle


def token_length(text):
    return len(re.findall(r"\w+|[^\w\s]|\n", text))


def make(kind, depth, seed=0, tokens=1200):
    return needle.generate(kind, np.random.default_rng(seed), token_length, tokens, depth)


def test_prompts_read_as_published():
    problem = make("kamradt", 0.5)
    assert problem.context.startswith("<|im_start|> This is a very long story book: <book> ")
    assert problem.question == (
        " </book>.\n Based on the content of the book, Question: What is the best thing to do in San Francisco?"
        "\nAnswer:"
    )
    assert "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park" in problem.context
    problem = make("minference", 0.5)
    city = re.search(r"\nThe special magic (.+) number is: (\d{7})\n", problem.context)
    assert problem.answers == (city[2],)
    assert problem.question == (
        f"\n\nQuestion: What is the special magic {city[1]} number? Don't give information outside the document or "
        "repeat your findings. Keep your response short and direct. Answer: "
    )
    assert len(needle.published()["minference"]["cities"]) == 100


@pytest.mark.parametrize("kind", needle.names())
def test_needles_are_at_their_depth_and_prompts_fit(kind):
    said = {"kamradt": "The best thing", "minference": "The special magic", "ruler": "One of the special magic"}[kind]
    for depth in (0.0, 0.4, 1.0):
        problem = make(kind, depth)
        assert problem.depth == depth
        assert abs(problem.context.rindex(said) / len(problem.context) - depth) < 0.1
        assert 1100 < token_length(problem.prompt) + problem.answer_tokens <= 1200
    assert make(kind, 0.4, seed=1).context != make(kind, 0.4).context


def test_needles_are_inserted_between_sentences():
    text = "One two. Three four. Five six."
    assert needle.inserted(text, "|", 0.5) == "One two.| Three four. Five six."
    assert needle.inserted(text, "|", 0) == "|" + text
    assert needle.inserted(text, "|", 1) == text + "|"


def test_answers_are_scored_as_published():
    problem = make("kamradt", 0.5)
    # "a" comes twice in the answer and counts once.
    assert needle.score("kamradt", problem, "Eat a sandwich and sit in Dolores Park on a sunny day.") == 11 / 12
    assert needle.score("kamradt", problem, "you eat a sandwich") == 3 / 12
    for kind in ("minference", "ruler"):
        problem = make(kind, 0.5)
        assert needle.score(kind, problem, f"It is {problem.answers[0]}.") == 1
        assert needle.score(kind, problem, "It is 12.") == 0


def test_unknown_needles_and_depths_are_refused():
    with pytest.raises(ValueError, match="needle 'pin' is not known; known: kamradt, minference, ruler"):
        make("pin", 0.5)
    with pytest.raises(ValueError, match=r"depth=1.5 must lie in \[0, 1\]"):
        make("kamradt", 1.5)
