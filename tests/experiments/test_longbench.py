"""LongBench's prompts, and its scores against golden scores of the published scorer."""

import dataclasses
import json
import pathlib

import pytest

from experiments.common import metrics, settings
from experiments.common.tasks import longbench
from kvjax_models.formats.huggingface_tokenizer import load_tokenizer

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "longbench_metrics.json").read_text("utf-8"))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['metric']} {case['prediction'][:20]!r}")
def test_scores_equal_the_published_scorer(case):
    arguments = case["prediction"], case["answer"]
    if case["metric"] == "classification":
        found = metrics.classification(*arguments, GOLDEN["classes"])
    else:
        found = longbench.METRICS[case["metric"]](*arguments)
    assert found == pytest.approx(case["score"], abs=1e-12)


def test_every_metric_has_golden_cases():
    assert {case["metric"] for case in GOLDEN["cases"]} == {*longbench.METRICS, "classification"}
    assert {task.metric for task in longbench.tasks().values()} == {*longbench.METRICS, "classification"}


def write(path, **changes):
    line = {"input": "Who?", "context": "Ann. {x}", "answers": ["Ann", "Anna"], "length": 4000, "all_classes": None}
    path.write_text(json.dumps(line | changes, ensure_ascii=False) + "\n\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", longbench.tasks())
def test_prompts_of_every_task_are_filled_in(name, tmp_path):
    [example] = longbench.read(write(tmp_path / f"{name}.jsonl"))
    whole = longbench.tasks()[name].prompt.replace("{input}", "Who?").replace("{context}", "Ann. {x}")
    assert example.problem.prompt == whole
    assert example.problem.context.endswith("Ann. {x}")
    assert ("Who?" in example.problem.question) == ("{input}" in longbench.tasks()[name].prompt)


def test_there_are_21_tasks_of_which_13_go_by_length(tmp_path):
    assert len(longbench.tasks()) == 21
    assert sum(task.by_length for task in longbench.tasks().values()) == 13
    [example] = longbench.read(write(tmp_path / "qasper_e.jsonl", length=3999))
    assert example.length_class == "0-4k"
    classes = [longbench.read(write(tmp_path / "qasper.jsonl", length=n))[0].length_class for n in (4000, 7999, 8000)]
    assert classes == ["4-8k", "4-8k", "8k+"]


def test_the_best_answer_counts_and_some_tasks_take_the_first_line(tmp_path):
    [asked] = longbench.read(write(tmp_path / "qasper.jsonl"))
    assert asked.score("Anna") == 1 and asked.score("Ann\nand more words") == pytest.approx(0.4)
    [trivia] = longbench.read(write(tmp_path / "triviaqa.jsonl"))
    assert trivia.score("\nAnn\nand more words") == 1
    [kind] = longbench.read(write(tmp_path / "trec.jsonl", answers=["Date"], all_classes=["Date", "Number"]))
    assert kind.score("Date or Number\n") == 0.5 and kind.score("x\nDate") == 0


def test_broken_files_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="other.jsonl is not called after a task; known: narrativeqa"):
        longbench.read(write(tmp_path / "other.jsonl"))
    (tmp_path / "lcc.jsonl").write_text('{"input": ""}\n')
    with pytest.raises(ValueError, match=r"lcc.jsonl, line 1 lacks all_classes, answers, context, length"):
        longbench.read(tmp_path / "lcc.jsonl")
    with pytest.raises(ValueError, match="qasper.jsonl, line 1 has no answer"):
        longbench.read(write(tmp_path / "qasper.jsonl", answers=[]))


def test_prompts_are_cut_in_the_middle():
    context, question = list(range(100)), [-1, -2, -3]
    assert longbench.truncated(context, question, 103) == context
    for longest in (50, 51):
        cut = longbench.truncated(context, question, longest) + question
        whole = context + question
        assert cut == whole[: longest // 2] + whole[-(longest // 2) :]
    assert longbench.truncated(context, question, 6) == [0, 1, 2]
    with pytest.raises(ValueError, match="a question of 3 tokens does not fit in the last half of 5"):
        longbench.truncated(context, question, 5)


@pytest.fixture(scope="module")
def plain():
    return load_tokenizer(settings.CHECKPOINTS / "line-retrieval-2l-4k")


@pytest.mark.parametrize("words, longest", [(3, 4096), (3000, 1024)], ids=["whole", "cut"])
def test_prompts_of_chat_models_are_enclosed_in_a_turn(plain, words, longest, tmp_path):
    template = "{{ bos_token }}<user> {{ messages[0]['content'] | trim }} <reply>"
    chat = dataclasses.replace(plain, chat_template=template)
    [example] = longbench.read(write(tmp_path / "qasper.jsonl", context="line tree is 12 " * words))
    own, turn = (longbench.prompt_of(one, example, longest, chat=True) for one in (plain, chat))
    text = lambda prompt: chat.decode([*prompt.context, *prompt.question])  # noqa: E731
    # The template encloses the truncated prompt; the BOS token occurs once.
    assert text(turn) == f"<user> {text(own).strip()} <reply>"
    assert (
        turn.context[: len(plain.prefix_ids)] == list(plain.prefix_ids) and plain.prefix_ids[0] not in turn.context[1:]
    )
    # The question and the end of the template are not compressed.
    assert chat.decode(turn.question) == f"{example.problem.question.strip()} <reply>"
    assert longbench.prompt_of(chat, example, longest, chat=False) == own
    # Few-shot tasks do not use the template.
    [few_shot] = longbench.read(write(tmp_path / "trec.jsonl", all_classes=["Date"]))
    assert longbench.prompt_of(chat, few_shot, longest, chat=True) == longbench.prompt_of(
        plain, few_shot, longest, chat=True
    )
