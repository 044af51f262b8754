"""Rows of small runs of the needle task and LongBench."""

import json

import pytest

from experiments import longbench, needle_in_haystack
from experiments.common import evaluating
from tests.experiments.running import answering, run

POLICIES = {"policy": ("exact", "uniform:recent=16"), "budget": ("80%",)}


@pytest.fixture
def unanswered(tmp_path, monkeypatch):
    """The rows of an experiment whose model gives one answer to everything."""

    def parse_batch_size(module, answer, **given):
        monkeypatch.setattr(evaluating.Evaluator, "evaluate", answering(answer))
        rows = run(module, tmp_path, **POLICIES, **given)
        assert (tmp_path / f"{module.NAME}.png").stat().st_size > 3_000
        return rows

    return parse_batch_size


def test_a_needle_has_rows_by_depth(unanswered):
    rows = unanswered(needle_in_haystack, "eat a sandwich", context_tokens=(500, 600), needle=("kamradt", "ruler"))
    cells = [row for row in rows if row["policy"] == "uniform" and row["metric"] == "accuracy"]
    assert {(row["task"], row["context_tokens"], row.get("depth")) for row in cells} == {
        (task, tokens, depth)
        for task in ("kamradt", "ruler")
        for tokens in (500, 600)
        for depth in (None, 0.0, 0.5, 1.0)
    }
    assert all(row["n"] == (2 if "depth" in row else 6) for row in cells)
    assert all(row["value"] == (0.25 if row["task"] == "kamradt" else 0) for row in cells)


def test_longbench_reads_files_of_the_published_form(unanswered, tmp_path):
    example = {"input": "", "answers": ["return 1"], "all_classes": None}
    lines = [example | {"context": "x = 1\n" * n, "length": length} for n, length in ((20, 300), (40, 3999), (9, 5000))]
    for name in ("lcc_e", "repobench-p_e"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    given = {"data": str(tmp_path), "e": True, "max_prompt_tokens": 200}
    rows = unanswered(longbench, "return 1", **given, task=("lcc", "repobench-p"))
    found = {(row["task"], row["metric"], row.get("length_class")): row for row in rows if row["policy"] == "uniform"}
    assert found["lcc", "score", None]["n"] == 3 and found["lcc", "score", "0-4k"]["n"] == 2
    assert found["lcc", "score", "4-8k"]["scored_by"] == "code_sim"
    assert found["code completion", "mean_score", None]["n"] == 6
    assert found["all", "mean_score", None]["value"] == 1 and found["all", "mean_score_difference", None]["value"] == 0
    missing = f"{tmp_path}/qasper_e.jsonl is not there: it is part of data.zip of https"
    with pytest.raises(Exception, match=missing):
        run(longbench, tmp_path, **given, task=("qasper",))
    with pytest.raises(ValueError, match="--data=DIRECTORY is needed"):
        run(longbench, tmp_path)
