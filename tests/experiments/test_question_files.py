"""RULER's question answering, from small files of the published forms."""

import json
import re

import numpy as np
import pytest

from experiments import ruler
from experiments.common import evaluating
from experiments.common.tasks import ruler_questions
from tests.experiments.running import answering, run

SQUAD = {
    "data": [
        {
            "title": name,
            "paragraphs": [
                {
                    "context": f"{name} {number} was built in {1900 + number}.",
                    "qas": [
                        {
                            "question": f"When was {name} {number} built?",
                            "is_impossible": False,
                            "answers": [{"text": str(1900 + number)}, {"text": f"in {1900 + number}"}],
                        },
                        {"question": "Who built it?", "is_impossible": True, "answers": []},
                    ],
                }
                for number in range(3)
            ],
        }
        for name in ("Mill", "Bridge", "Tower", "Well")
    ]
}
HOTPOTQA = [
    {
        "question": f"Who wrote book {number}?",
        "answer": f"Author {number}",
        "context": [
            [f"Book {number}", [f"It is by Author {number}.", " It is long."]],
            ["Other", [f"Nothing of {number}."]],
        ],
    }
    for number in range(5)
]


def token_length(text):
    return len(re.findall(r"\w+|[^\w\s]|\n", text))


@pytest.fixture
def files(tmp_path):
    found = {"qa_1": tmp_path / "squad.json", "qa_2": tmp_path / "hotpotqa.json"}
    found["qa_1"].write_text(json.dumps(SQUAD))
    found["qa_2"].write_text(json.dumps(HOTPOTQA))
    return found


def make(questions, seed=0, tokens=220):
    return ruler_questions.generate(questions, np.random.default_rng(seed), token_length, tokens)


def documents(problem):
    numbered = re.findall(r"Document (\d+):\n(.+?)(?=\n\nDocument|$)", problem.context, flags=re.DOTALL)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    return [text for _, text in numbered]


def test_squad_prompts_contain_documents_of_their_page_first(files):
    questions = ruler_questions.read_squad(files["qa_1"])
    assert len(questions.questions) == 12 and len(questions.documents) == 12  # those with an answer
    problem = make(questions, tokens=120)
    name, number = re.search(r"When was (\w+) (\d) built", problem.question).groups()
    listed = documents(problem)
    assert f"{name} {number} was built in {1900 + int(number)}." in listed
    assert problem.answers == (str(1900 + int(number)), f"in {1900 + int(number)}")
    assert len(listed) <= 3 and all(text.startswith(name) for text in listed)
    more = documents(make(questions))
    assert set(listed) < set(more) and len({text.split()[0] for text in more}) > 1


def test_hotpotqa_prompts_contain_their_documents(files):
    questions = ruler_questions.read_hotpotqa(files["qa_2"])
    problem = make(questions)
    number = re.search(r"book (\d)", problem.question)[1]
    listed = documents(problem)
    assert (
        f"Book {number}\nIt is by Author {number}. It is long." in listed and f"Other\nNothing of {number}." in listed
    )


@pytest.mark.parametrize("task", ruler_questions.READERS)
@pytest.mark.parametrize("tokens", [150, 220, 900])
def test_documents_fill_the_prompt_and_repeat_if_few(task, tokens, files):
    problem = make(ruler_questions.read(task, files[task]), tokens=tokens)
    taken = token_length(problem.prompt) + problem.answer_tokens
    assert tokens - 30 <= taken <= tokens and problem.answer_tokens == 32
    assert problem.prompt.startswith("Answer the question based on the given documents. Only give me the answer")
    assert problem.prompt.endswith("? Answer:") and problem.question.startswith("\n\nAnswer the question")
    assert problem == make(ruler_questions.read(task, files[task]), tokens=tokens)


def test_any_answer_in_any_case_is_right():
    assert ruler_questions.score("It was IN 1901.", ("in 1901", "1902")) == 1
    assert ruler_questions.score("1903", ("1901", "1902")) == 0


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "is not there: it is to be a file of SQuAD 2.0"),
        ("{", "is not JSON"),
        ("[]", "is not SQuAD 2.0"),
        (json.dumps({"data": [{"paragraphs": [{"context": "x"}]}]}), "is not SQuAD 2.0: KeyError"),
        (json.dumps({"data": []}), "has no question that can be answered"),
    ],
)
def test_files_that_are_not_the_data_set_are_refused(text, message, tmp_path):
    path = tmp_path / "squad.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        ruler_questions.read_squad(path)


def test_questions_of_files_give_rows(files, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluating.Evaluator, "evaluate", answering("Author 1900"))
    given = {"policy": ("exact", "uniform:recent=16"), "budget": ("80%",)}
    asked = {"task": ("qa_1", "qa_2"), "documents": 3, "context_tokens": (900,)}
    rows = run(ruler, tmp_path, **asked, squad=str(files["qa_1"]), hotpotqa=str(files["qa_2"]), **given)
    assert {row["task"] for row in rows} == {"qa_1", "qa_2"}
    with pytest.raises(ValueError, match="task qa_1 asks the questions of a file: --squad=FILE is needed"):
        run(ruler, tmp_path, **asked, **given)
