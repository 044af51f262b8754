"""The comparison with kvpress: requests to its presses, tables of their answers, and live runs with kvpress."""

import stat
import sys

import numpy as np
import pytest

from experiments import peers
from experiments.common import answers, evaluating, presses, ranking, settings
from experiments.common.named_tasks import make_task
from experiments.common.options import LANGUAGE_CHECKPOINT, Run
from experiments.common.results import from_flat
from kvjax.budget import Budget
from kvjax.registry import PolicyChoice
from tests.experiments.running import answering, run

# Replaces the interpreter with kvpress: SnapKV is always wrong, KVzip is right every second time, others fail.
STUB = f"""#!{sys.executable}
import json, re, sys
for line in sys.stdin:
    asked = json.loads(line)
    count = len(asked["prompts"])
    use = {{"kept": [asked["kept"]] * count, "held": [len(text) for text, _ in asked["prompts"]], "losses": []}}
    answers = {{"SnapKV": [" none"] * count, "KVzip": [[" none", " ANSWER"][n % 2] for n in range(count)]}}
    reply = use | {{"answers": answers.get(asked["press"])}}
    print(json.dumps(reply if reply["answers"] else {{"error": "ValueError: no"}}), flush=True)
"""


@pytest.fixture
def stub(tmp_path):
    path = tmp_path / "python"
    path.write_text(STUB)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def test_presses_and_policies_are_in_one_table(stub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluating.Evaluator, "evaluate", answering("ANSWER"))
    given = {
        "kvpress_python": str(stub),
        "task": ("cwe",),
        "documents": 2,
        "seeds": 2,
        "press": ("KVzip", "SnapKV", "Knorm"),
        "budget": ("25%", "25% of the text"),
        "policy": ("exact", "uniform", "h2o@25% of the text"),
        "context_tokens": 1200,
    }
    rows = run(peers, tmp_path, quick=False, **given)
    assert "left out: Knorm on cwe: ValueError: no" in "".join(capsys.readouterr())
    of = lambda policy, metric, budget: next(  # noqa: E731
        row for row in rows if (row["policy"], row["metric"], row["budget"]) == (policy, metric, budget)
    )
    for budget in ("25% of all", "25% of the text"):
        row = of("kvpress KVzip", "accuracy", budget)
        assert row["n"] == 4 and row["budget_fraction"] > 0.9  # masked tokens are held
        # Ties are resolved by name.
        assert of("kvpress KVzip", "accuracy_to_best_press", budget)["best_press"] == "kvpress SnapKV"
    assert not any(row["policy"] == "kvpress Knorm" for row in rows)
    assert {row["budget"] for row in rows if row["policy"] == "h2o"} == {"25% of the text"}
    with_best, own = ranking.tables([from_flat(row) for row in rows])
    assert [line.name for line in own.lines] == ["exact", "uniform", "h2o", "kvpress KVzip", "kvpress SnapKV"]
    assert with_best.title == "25% of all, question unseen, 4 documents per task"
    assert with_best.best == "kvpress SnapKV" and with_best.lines[-1].to_best is None
    # A second run starts no process.
    stub.write_text("#!/bin/false\n")
    assert run(peers, tmp_path, quick=False, **given) == rows


def test_the_best_press_is_the_best_on_the_mean_of_all_tasks():
    def result(press, scores, budget="25%"):
        setting = ranking.pressed(press, Budget.parse(budget))
        return answers.Result(setting, False, False, 1, [], scores={"accuracy": scores})

    everywhere = {
        "one": [result("A", [1, 1]), result("B", [0, 1]), result("C", [1, 1]), result("A", [1, 1], "50%")],
        "other": [result("A", [0, 0]), result("B", [1, 1])],  # C failed
    }
    assert ranking.best_press(everywhere, "25%").name == "kvpress B"
    assert ranking.best_press(everywhere, "12.5%") is None
    policy = answers.Result(PolicyChoice.parse("exact"), False, False, 1, [], scores={"accuracy": [1, 1]})
    assert ranking.best_press({"one": [policy]}, "25%") is None


def test_budgets_in_slots_are_refused(stub, tmp_path):
    with pytest.raises(ValueError, match="--budget=512: give a share such as 25%"):
        run(peers, tmp_path, budget=("512",), kvpress_python=str(stub))


def test_a_process_that_ended_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="/bin/false .* ended; it must be able to import kvpress"):
        presses.Presses("/bin/false", tmp_path).answer("KVzip", 10, [([1, 2], [3])], 4)


def test_every_press_is_compared_or_left_out_with_a_reason():
    kvpress = pytest.importorskip("kvpress")
    compared = {type(press.make(kvpress, 0.5)).__name__ for press in presses.PRESSES.values()}
    there = {name for name in vars(kvpress) if name.endswith("Press")}
    assert compared.isdisjoint(presses.LEFT_OUT)
    assert there <= compared | set(presses.LEFT_OUT)


def test_answers_equal_the_pipeline_of_kvpress():
    kvpress = pytest.importorskip("kvpress")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    directory = settings.model_directory(LANGUAGE_CHECKPOINT)
    _, tokenizer = settings.load_model(Run(model=LANGUAGE_CHECKPOINT))
    task = make_task("niah_multikey_1", tokenizer, 600, [40], 3)
    texts = [tokenizer.decode(prompt.context[len(tokenizer.prefix_ids) :]) for prompt in task.prompts]
    questions = [tokenizer.decode(prompt.question) for prompt in task.prompts]
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    pipeline = transformers.pipeline(
        "kv-press-text-generation", model=model, tokenizer=transformers.AutoTokenizer.from_pretrained(directory)
    )
    # The pipeline appends a newline to questions of models without a chat template.
    prompts = [
        (tokenizer.encode(text), tokenizer.encode(question + "\n", add_bos=False))
        for text, question in zip(texts, questions, strict=True)
    ]
    mine = presses.Presses(sys.executable, directory)
    for name in ("SnapKV", "KVzip"):
        expected = []
        for (text, _), context, question in zip(prompts, texts, questions, strict=True):
            press = presses.PRESSES[name].make(kvpress, 1 - (200 + 0.5) / len(text))
            expected.append(pipeline(context, question=question, press=press, max_new_tokens=24)["answer"])
        reply = mine.answer(name, 200, prompts, 24)
        assert reply["answers"] == expected
        np.testing.assert_allclose(reply["kept"], 200, atol=1)  # KVzip masks a share of all layers together
        assert reply["held"] == [200.0] * 3 if name == "SnapKV" else reply["held"] == [len(text) for text, _ in prompts]
    mine.close()


def test_the_quick_form_runs(tmp_path):
    pytest.importorskip("kvpress")
    rows = run(peers, tmp_path)
    assert {row["policy"] for row in rows if row["metric"] == "perplexity_ratio"} >= {"kvpress KVzip", "kvzip", "exact"}
    assert all(row["ci95_low"] <= row["value"] <= row["ci95_high"] for row in rows if "accuracy" in row["metric"])
