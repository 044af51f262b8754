"""What the language model is trained on: tokens that decode to texts, and questions whose answers are in them."""

import functools
import re

import numpy as np
import pytest

from experiments.common import sources
from experiments.common.tasks import line_tokenizer, ruler
from experiments.training import byte_pairs, mixture
from kvjax_models import tokenizer as tokenizers

TOKENS = 700


@functools.cache
def tokenizer(directory) -> tokenizers.Tokenizer:
    learnt = byte_pairs.train([sources.repository("absl"), *mixture.contexts(mixture.TASKS, seed=0, each=2)], 3000)
    line_tokenizer.save(learnt, directory, max_length=TOKENS)
    return tokenizers.load(directory)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_any_text_comes_back_and_numbers_are_groups_of_three_digits(learnt):
    assert learnt.vocab_size == 3000
    for text in ("def f(x):\n\treturn  x ** 2  # ≠ 𝛼 naïve\r\n", " 24169", sources.repository("jaxtyping")[:5000]):
        assert learnt.decode(learnt.encode(text)) == text
    assert [learnt.decode([token]) for token in learnt.encode("1234567, 05", add_bos=False)] == [
        "123", "456", "7", ",", " ", "05"
    ]  # fmt: skip
    assert learnt.encode("x")[0] == learnt.prefix[0] != learnt.eos_ids[0]


def test_a_tokenizer_of_a_size_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="size=1000; bytes, digit groups"):
        byte_pairs.train(["a text"], 1000)
    with pytest.raises(ValueError, match="size=2000; the texts have merges for"):
        byte_pairs.train(["a text"], 2000)


def turns(learnt, conversation):
    """The text before the first answer, and the (question, answer) texts."""
    pieces, edges = [], np.flatnonzero(np.diff(conversation.is_answer, prepend=False, append=False))
    for begin, end in zip([0, *edges], [*edges, len(conversation.tokens)], strict=True):
        pieces.append(learnt.decode(conversation.tokens[begin:end].tolist(), skip_special=False))
    assert pieces.pop() == ""
    return pieces[0], list(zip(pieces[0::2], pieces[1::2], strict=True))


@pytest.mark.parametrize("task", mixture.TASKS)
def test_answers_are_what_the_text_says_of_what_is_asked(learnt, task):
    for seed in range(3):
        made = mixture.conversation(task, learnt, np.random.default_rng(seed), TOKENS)
        assert TOKENS // 3 < len(made.tokens) <= TOKENS
        assert made.tokens[0] == learnt.prefix[0] and learnt.prefix[0] not in made.tokens[1:]
        text, asked = turns(learnt, made)
        assert asked and made.is_answer.sum() <= mixture.most_answer_tokens(TOKENS)
        for question, answer in asked:
            assert answer.endswith(line_tokenizer.EOS) and line_tokenizer.EOS not in question[:-1]
            answer = answer.removesuffix(line_tokenizer.EOS)
            if task == "line_retrieval":
                name = re.search(r"in line (\S+)\? I need the number\.$", question)[1]
                assert f"line {name}: REGISTER_CONTENT is <{answer}>\n" in text
                continue
            last = question.rsplit(" for ", 1)[1]
            names = re.split(r", and |, ", re.fullmatch(r"(.+) mentioned in the provided text (?:is|are)", last)[1])
            said = [re.findall(rf"for {name} is: (\S+)\.", text) for name in names]
            settings = ruler.NEEDLE_TASKS[task]
            assert len(names) == settings.queries and {len(values) for values in said} == {settings.values}
            stated = [value for values in said for value in values]
            if stated[1:]:
                called = names if names[1:] else mixture.ORDINALS
                stated = [f"{name}: {value}" for name, value in zip(called, stated, strict=True)]
            assert re.split(r", and |, ", answer.strip()) == stated


def test_exercises_differ_between_seeds_and_not_within_one(learnt):
    make = lambda seed: mixture.conversation("niah_multikey_1", learnt, np.random.default_rng(seed), TOKENS)  # noqa: E731
    np.testing.assert_array_equal(make(0).tokens, make(0).tokens)
    assert make(0).tokens.tolist() != make(1).tokens.tolist()


@pytest.mark.parametrize("task", ["line_retrieval", "niah_multivalue"])
def test_published_problems_fit_and_their_answers_are_right(learnt, task):
    problem = mixture.problem(task, learnt, np.random.default_rng(0), TOKENS)
    assert len(learnt.encode(problem.prompt)) + problem.answer_tokens <= TOKENS
    score = mixture.TASKS[task].score
    assert score(", ".join(problem.answers), problem.answers) == 1
    assert score("nothing", problem.answers) == 0


def test_an_exercise_that_cannot_fit_says_how_long_it_is(learnt):
    with pytest.raises(ValueError, match="tokens=64; the text and one turn take"):
        mixture.conversation("line_retrieval", learnt, np.random.default_rng(0), 64)
