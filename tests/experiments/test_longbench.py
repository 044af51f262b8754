"""LongBench's prompts, and its scores against golden scores of the published scorer."""

import functools
import json
import pathlib

import pytest

from experiments import tasks
from experiments.tasks import longbench, metrics
from tests.experiments.support import request

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "longbench_metrics.json").read_text("utf-8"))


def test_scores_equal_the_published_scorer():
    score = longbench.METRICS | {"classification": functools.partial(metrics.classification, classes=GOLDEN["classes"])}
    for case in GOLDEN["cases"]:
        found = score[case["metric"]](case["prediction"], case["answer"])
        assert found == pytest.approx(case["score"], abs=1e-12), case
    assert {case["metric"] for case in GOLDEN["cases"]} == {*score}
    assert {task.metric for task in longbench.data_sets().values()} == {*score}


def test_sentences_that_are_too_long_for_the_published_scorer_count_as_zero():
    summary, other = (" ".join(f"{letter}{number}" for number in range(1200)) for letter in "ab")
    assert metrics.rouge_l(summary, other) == metrics.rouge_l_zh(summary, other) == 0


ENTRY = {"input": "Who?", "context": "Ann. {x}", "answers": ["Ann", "Anna"], "length": 4000, "all_classes": None}


def make(tmp_path, name, tokens=8000, **changes):
    """Returns the task of a file with one entry."""
    (tmp_path / "longbench").mkdir(exist_ok=True)
    (tmp_path / "longbench" / f"{name}.jsonl").write_text(json.dumps(ENTRY | changes) + "\n\n")
    return tasks.make_task(f"longbench:{name}", request(tokens, data_dir=tmp_path))


def test_prompts_of_every_data_set_are_complete():
    for settings in longbench.data_sets().values():
        document = longbench.read_entry(settings, ENTRY, "", "")
        expected = settings.prompt.replace("{input}", "Who?").replace("{context}", "Ann. {x}")
        assert document.context + document.questions[0].text == expected and document.context.endswith("Ann. {x}")


def test_the_best_answer_counts_and_some_data_sets_use_the_first_line(tmp_path):
    def score(name, answer, **changes):
        task = make(tmp_path, name, **changes)
        return task.score(answer, task.documents[0].questions[0])

    assert score("qasper", "Anna") == 1 and score("qasper", "Ann\nand more words") == pytest.approx(0.4)
    assert score("triviaqa", "\nAnn\nand more words") == 1
    classes = {"answers": ["Date"], "all_classes": ["Date", "Number"]}
    assert score("trec", "Date or Number\n", **classes) == 0.5 and score("trec", "x\nDate", **classes) == 0


def test_invalid_entries_are_refused(tmp_path):
    with pytest.raises(ValueError, match="qasper.jsonl, entry 1 has no answer"):
        make(tmp_path, "qasper", answers=[])
    with pytest.raises(ValueError, match="here lacks all_classes, answers, context, length"):
        longbench.read_entry(longbench.data_sets()["lcc"], {"input": ""}, "here", "")


def test_prompts_are_cut_in_the_middle(tmp_path):
    context, question = list(range(100)), [-1, -2, -3]
    assert longbench.truncate_tokens(context, question, 103) == context
    for longest in (50, 51):
        cut = longbench.truncate_tokens(context, question, longest) + question
        prompt = context + question
        assert cut == prompt[: longest // 2] + prompt[-(longest // 2) :]
    assert longbench.truncate_tokens(context, question, 6) == [0, 1, 2]
    with pytest.raises(ValueError, match="a question of 3 tokens does not fit in the last half of 5"):
        longbench.truncate_tokens(context, question, 5)
    text = "".join(map(chr, range(97, 123))) * 200
    [document] = make(tmp_path, "qasper", tokens=3000, context=text).documents
    [question] = document.questions
    length = len(document.context) + len(question.text) + longbench.data_sets()["qasper"].answer_tokens
    assert 2990 <= length <= 3000 and document.context.endswith("xyz")
