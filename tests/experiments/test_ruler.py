"""RULER's tasks: answers are in the text, with the documented counts, and scores equal the published ones."""

import collections
import re

import numpy as np
import pytest

from experiments.common.tasks import prose, ruler
from experiments.common.tasks.problem import Problem, longest_that_fits, problems


def token_length(text):
    return len(re.findall(r"\w+|[^\w\s]|\n", text))


def make(task, seed=0, tokens=1500, **others):
    return ruler.generate(task, np.random.default_rng(seed), token_length, tokens, **others)


@pytest.mark.parametrize("task", ruler.TASKS)
@pytest.mark.parametrize("tokens", [1200, 5000])
def test_a_problem_fits_and_a_larger_one_would_not(task, tokens):
    problem = make(task, tokens=tokens)
    taken = token_length(problem.prompt) + problem.answer_tokens
    # The largest unit is a sentence with a uuid, or eight coded words.
    assert tokens - 64 <= taken <= tokens
    assert problem == make(task, tokens=tokens) != make(task, seed=1, tokens=tokens)


@pytest.mark.parametrize("task", ruler.NEEDLE_TASKS)
def test_needles_are_in_the_text_and_the_question_is_about_them(task):
    settings, problem = ruler.NEEDLE_TASKS[task], make(task)
    said = dict.fromkeys(re.findall(r"One of the special magic (\w+) for (\S+) is: (\S+)\.", problem.context), None)
    assert {kind for kind, _, _ in said} == {settings.value}
    by_key = collections.defaultdict(list)
    for _, key, value in said:
        by_key[key].append(value)
    asked = re.search(r"for (.+?) mentioned", problem.question)[1].replace(", and ", ", ").split(", ")
    assert len(asked) == settings.queries
    assert sorted(problem.answers) == sorted(value for key in asked for value in by_key[key])
    assert len(problem.answers) == settings.queries * settings.values
    if settings.haystack != "needle":
        assert len(said) == max(settings.keys, settings.queries) * settings.values
    one = settings.queries * settings.values == 1
    kind = settings.value[:-1] if one else settings.value
    assert problem.context.startswith(
        f"{'A' if one else 'Some'} special magic {kind} {'is' if one else 'are'} hidden within the following text."
    )
    assert problem.question.endswith(f"mentioned in the provided text {'is' if one else 'are'}")


def test_needles_are_at_the_requested_depth():
    for haystack in ("niah_single_1", "niah_single_2"):
        for depth in (0.0, 0.3, 1.0):
            problem = make(haystack, depth=depth, tokens=4000)
            place = problem.context.index("One of the special magic") / len(problem.context)
            assert problem.depth == depth and abs(place - depth) < 0.1
    with pytest.raises(ValueError, match="depth=0.5 means nothing to vt"):
        make("vt", depth=0.5)


def test_the_chain_of_variables_can_be_followed():
    problem = make("vt")
    value = re.search(r"assigned the value (\d+) in", problem.question)[1]
    assigned = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", problem.context)
    found = [name for name, source in assigned if source == value]
    for name, source in assigned:  # links are in order
        if source in found:
            found.append(name)
    assert tuple(found) == problem.answers and len(found) == 5
    # The example's answer is part of the text, the question's is not.
    assert problem.context.count("Answer: According to the chain(s)") == 1


def test_answers_are_the_most_frequent_words():
    for tokens, often in ((1500, 6), (6000, 30)):
        problem = make("cwe", tokens=tokens)
        example, listed = problem.context.split("\nBelow is")
        counts = collections.Counter(re.findall(r"\d+\. (\S+)", listed))
        assert {word for word, count in counts.items() if count == often} == set(problem.answers)
        assert max(count for word, count in counts.items() if word not in problem.answers) <= often // 6
        assert len(re.findall(r"\d+\. ", example.split("in the list are:")[1])) == 10
    problem = make("fwe")
    counts = collections.Counter(problem.context.split("coded words. ")[1].split(" "))
    (dots, _), *ranked = counts.most_common(5)
    assert dots == "..." and {word for word, _ in ranked[:3]} == set(problem.answers)
    assert ranked[2][1] > ranked[3][1]


def test_score_is_the_share_of_answers_in_any_case():
    assert ruler.score("It is 12 and ABC.", ("12", "abc", "7")) == pytest.approx(2 / 3)
    assert ruler.score("", ("12",)) == 0


def test_problems_of_a_seed_do_not_depend_on_their_number():
    two, four = (list(problems(3, count, lambda rng: make_any(rng))) for count in (2, 4))
    assert two == four[:2] and len({problem.prompt for problem in four}) == 4


def make_any(rng):
    return ruler.generate("niah_single_1", rng, token_length, 300)


def test_too_few_tokens_and_unknown_tasks_are_refused():
    with pytest.raises(ValueError, match="tokens=100; the shortest problem takes"):
        make("niah_single_1", tokens=100)
    with pytest.raises(ValueError, match="task 'qa_1' is not known"):
        make("qa_1")


def test_the_longest_that_fits_uses_bisection():
    asked = []

    def of_size(size):
        asked.append(size)
        return Problem("x" * size, "?", ("x",), answer_tokens=2)

    assert len(longest_that_fits(of_size, len, 100, most=1000).context) == 97
    assert len(longest_that_fits(of_size, len, 100, most=50).context) == 50
    assert len(asked) < 25


def test_prose_is_cut_into_sentences():
    words = prose.words(np.random.default_rng(0))
    assert len(words) > 50_000 and sorted(words) == sorted(prose.words(np.random.default_rng(1)))
    assert prose.sentences("One. Two? Three!  Four") == ["One.", "Two?", "Three!", "Four"]
