"""The best variants and the shipped checkpoint at full size; minutes each."""

import pytest

from experiments import line_retrieval
from experiments.common import evaluating, results, settings
from experiments.common.options import Run
from experiments.common.suites import SUITES
from tests.experiments.running import run


@pytest.mark.heavy
def test_line_retrieval_separates_policies(tmp_path):
    best = SUITES["lines, best"].policies
    rows = run(line_retrieval, tmp_path, quick=False, policy=best, documents=50, seed=10)
    accuracy = {(row["policy"], row["budget"]): row for row in rows if row["metric"] == "accuracy"}
    assert len(accuracy) == 15
    assert all(row["n"] == 50 for row in accuracy.values())
    assert accuracy["exact", None]["ci95_low"] > 0.9
    discarding = [row for (policy, budget), row in accuracy.items() if budget and policy != "clusterkv"]
    assert all(accuracy["exact", None]["value"] > row["value"] for row in discarding)
    # The budget of retrieval limits the tokens read; all tokens are kept.
    assert all(accuracy["clusterkv", budget]["value"] >= 0.9 for budget in ("50%", "25%"))
    for policy in ("uniform", "streaming_llm", "clustergen", "subgen", "balancekv", "chelsea", "clusterkv"):
        for budget, fraction in (("50%", 0.5), ("25%", 0.25)):
            # Retrieval reads blocks of 16 tokens, which stay slightly below the budget.
            assert 0.95 * fraction < accuracy[policy, budget]["budget_fraction"] <= fraction


@pytest.mark.heavy
def test_the_shipped_checkpoint_finds_lines_at_its_longest_context():
    model, tokenizer = settings.load_model(Run())
    documents = line_retrieval.make_documents(tokenizer, 4096, 500, seed=500)
    lines = evaluating.accuracy_task("line retrieval", tokenizer, documents, line_retrieval.is_right, answer_tokens=4)
    longest, most = evaluating.room([lines], question_seen=False)
    evaluator = evaluating.Evaluator(
        model,
        tokenizer,
        settings.settings(["exact"], []),
        sizes=[longest],
        max_new_tokens=most,
        streaming=False,
        question_seen=False,
        batch=10,
        seed=0,
    )
    [result] = evaluator.evaluate(lines)
    scores = result.scores["accuracy"]
    assert len(scores) == 500
    low, _ = results.score_interval(scores)
    assert low >= 0.95
