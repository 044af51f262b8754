"""RULER's tasks: answers are in the text with the documented counts, and documents fill the tokens."""

import collections
import dataclasses
import re

import numpy as np
import pytest

from experiments import tasks
from experiments.tasks import haystacks, ruler
from experiments.tasks.task import Question, share_contained
from tests.experiments.support import request


class Words:
    """Counts words and punctuation marks as tokens."""

    def encode(self, text, add_bos=True):
        return re.findall(r"\w+|[^\w\s]|\n", text)


def make(task, seed=0, tokens=1500):
    requested = dataclasses.replace(request(tokens, 1, seed), tokenizer=Words())
    [document] = ruler.make_task(task, "docs", requested).documents
    return document


def length(document, task):
    [question] = document.questions
    return len(Words().encode(document.context + question.text + question.prefix)) + ruler.ANSWER_TOKENS[task]


@pytest.mark.parametrize("task", ruler.TASKS)
@pytest.mark.parametrize("tokens", [1200, 5000])
def test_a_document_fits_and_a_larger_one_would_not(task, tokens):
    document = make(task, tokens=tokens)
    # The largest unit is a sentence with a uuid, or eight coded words.
    assert tokens - 64 <= length(document, task) <= tokens
    assert document == make(task, tokens=tokens) and document.context != make(task, seed=1, tokens=tokens).context


@pytest.mark.parametrize("task", ruler.NEEDLE_TASKS)
def test_needles_are_in_the_text_and_the_question_is_about_them(task):
    settings, document = ruler.NEEDLE_TASKS[task], make(task)
    [question] = document.questions
    said = dict.fromkeys(re.findall(r"One of the special magic (\w+) for (\S+) is: (\S+)\.", document.context))
    assert {kind for kind, _, _ in said} == {settings.value}
    by_key = collections.defaultdict(list)
    for _, key, value in said:
        by_key[key].append(value)
    asked = re.search(r"for (.+?) mentioned", question.text)[1].replace(", and ", ", ").split(", ")
    assert sorted(question.answers) == sorted(value for key in asked for value in by_key[key])
    assert (len(asked), len(question.answers)) == (settings.queries, settings.queries * settings.values)
    if settings.haystack != "needle":
        assert len(said) == max(settings.keys, settings.queries) * settings.values
    single = settings.queries * settings.values == 1
    kind = settings.value[:-1] if single else settings.value
    start = f"{'A' if single else 'Some'} special magic {kind} {'is' if single else 'are'} hidden within"
    assert document.context.startswith(start)
    assert question.prefix.endswith(f"mentioned in the provided text {'is' if single else 'are'}")


def test_the_chain_of_variables_can_be_followed():
    document = make("vt")
    [question] = document.questions
    value = re.search(r"assigned the value (\d+) in", question.text)[1]
    found = []
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", document.context):  # links are in order
        if source == value or source in found:
            found.append(name)
    assert tuple(found) == question.answers and len(found) == 5
    # The text contains the example's answer, but not the question's.
    assert document.context.count("Answer: According to the chain(s)") == 1


def test_answers_are_the_most_frequent_words():
    for tokens, often in ((1500, 6), (6000, 30)):
        document = make("cwe", tokens=tokens)
        answers = document.questions[0].answers
        example, listed = document.context.split("\nBelow is")
        counts = collections.Counter(re.findall(r"\d+\. (\S+)", listed))
        assert {word for word, count in counts.items() if count == often} == set(answers)
        assert max(count for word, count in counts.items() if word not in answers) <= often // 6
        assert len(re.findall(r"\d+\. ", example.split("in the list are:")[1])) == 10
    document = make("fwe")
    counts = collections.Counter(document.context.split("coded words. ")[1].split(" "))
    (dots, _), *ranked = counts.most_common(5)
    assert dots == "..." and {word for word, _ in ranked[:3]} == set(document.questions[0].answers)
    assert ranked[2][1] > ranked[3][1]


def test_score_is_the_share_of_answers_in_any_case():
    assert share_contained("It is 12 and ABC.", Question("", ("12", "abc", "7"))) == pytest.approx(2 / 3)
    assert share_contained("", Question("", ("12",))) == 0


def test_documents_do_not_depend_on_their_number():
    two, four = (tasks.make_task("niah_single_1", request(900, count)).documents for count in (2, 4))
    assert two == four[:2] and len({document.context for document in four}) == 4


def test_haystacks_have_words_and_sentences():
    words = haystacks.words(np.random.default_rng(0), "docs", None)
    assert len(words) > 50_000 and sorted(words) == sorted(haystacks.words(np.random.default_rng(1), "docs", None))
    assert haystacks.sentences("One. Two? Three!  Four") == ["One.", "Two?", "Three!", "Four"]
    assert haystacks.take(("a", "b"), 5) == "a b a b a"
