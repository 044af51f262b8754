"""What is asked of held-out packages: next lines of code, and long texts."""

import re

import numpy as np
import pytest

from experiments.common import sources
from experiments.common.tasks import code_completion, long_texts


def token_length(text):
    return len(re.findall(r"\w+|[^\w\s]|\n", text))


def make(task, template="plain", seed=0, tokens=1200):
    return code_completion.generate(task, template, np.random.default_rng(seed), token_length, tokens)


@pytest.mark.parametrize("seed", range(3))
def test_a_line_of_a_file_follows_its_prompt(seed):
    problem = make("file", seed=seed)
    header, text = problem.prompt.split("\n", 1)
    file = next(file for file in sources.documents(held_out=True) if header == f"# Path: {file.path}")
    assert text + problem.answers[0] + "\n" in file.text
    assert problem.question.count("\n") == 1
    assert 1000 < token_length(problem.prompt) + problem.answer_tokens <= 1200


@pytest.mark.parametrize("seed", range(3))
def test_a_line_in_a_repository_uses_a_definition_that_is_shown(seed):
    problem = make("repository", seed=seed)
    path = problem.question.split("\n")[0].removeprefix("# Path: ")
    file = next(file for file in sources.documents(held_out=True) if file.path == path)
    assert "\n".join(problem.question.split("\n")[-4:]) + problem.answers[0] in file.text
    defined = set(re.findall(r"^(?:async def|def|class) (\w+)", problem.context, re.MULTILINE))
    assert defined & set(re.findall(r"\w+", problem.answers[0]))
    # It stands in another file of the same package.
    shown = set(re.findall(r"^# Path: (.+)$", problem.context, re.MULTILINE))
    assert path not in shown and {name.split("/")[0] for name in shown} == {path.split("/")[0]}
    assert token_length(problem.prompt) + problem.answer_tokens <= 1200


@pytest.mark.parametrize("targets", [code_completion.repository_targets, lambda: code_completion.file_targets(5000)])
def test_longbench_puts_its_words_around_the_same_code(targets):
    target = targets()[7]
    plain, framed = (code_completion.problem(target, template, 0, 5) for template in code_completion.TEMPLATES)
    assert framed.prompt == f"Please complete the code given below. \n{plain.prompt}Next line of code:\n"
    assert framed.answers == plain.answers


def test_an_exact_match_is_of_the_first_line_of_code():
    assert code_completion.exact_match("\n# so\n  return x\nmore", "return x") == 1
    assert code_completion.exact_match("return y", "return x") == 0
    assert code_completion.exact_match("", "return x") == 0


def test_what_cannot_be_made_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="class, plain: tasks are file, repository, templates plain, longbench"):
        make("class")
    few = code_completion.repository_targets()[:5]
    monkeypatch.setattr(code_completion, "repository_targets", lambda: few)
    with pytest.raises(ValueError, match="tokens=70: none of 5 lines"):
        make("repository", tokens=70)


class Words:
    """Words as tokens, by their hash."""

    prefix = (0,)

    def encode(self, text, add_bos=True):
        return [*(self.prefix if add_bos else ()), *(1 + hash(word) % 10**6 for word in text.split())]


def test_long_texts_do_not_overlap_and_follow_the_seed():
    whole = [token for name in sources.HELD_OUT for token in Words().encode(sources.repository(name), add_bos=False)]
    texts = long_texts.held_out(Words(), 1001, 20, seed=0)
    begins = []
    for text in texts:
        assert len(text) == 1001 and text[0] == 0
        [begin] = [n for n in range(0, len(whole) - 999, 1000) if whole[n : n + 1000] == text[1:]]
        begins.append(begin)
    assert len(set(begins)) == 20
    assert long_texts.held_out(Words(), 1001, 5, seed=0) == texts[:5]
    assert long_texts.held_out(Words(), 1001, 5, seed=1) != texts[:5]
    with pytest.raises(ValueError, match=r"have \d stretches of 100000 tokens, not 50"):
        long_texts.held_out(Words(), 100_000, 50, seed=0)


def test_books_are_the_first_that_are_long_enough(tmp_path):
    for name, words in {"b": 5, "a": 9, "c": 8}.items():
        (tmp_path / f"{name}.txt").write_text(" ".join(f"{name}{n}" for n in range(words)))
    assert long_texts.books(tmp_path, Words(), 8, 2) == [
        Words().encode(" ".join(f"{name}{n}" for n in range(7))) for name in "ac"
    ]
    with pytest.raises(ValueError, match=r"has 2 files NAME.txt of 8 tokens or more, not 3"):
        long_texts.books(tmp_path, Words(), 8, 3)
