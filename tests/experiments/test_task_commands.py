"""The commands of needles, code completion, perplexity and LongBench: what they write, in small."""

import json

import pytest

from tests.experiments.test_commands import run

POLICIES = "--policy=exact", "--policy=uniform:recent=16", "--budget=80%"


def rows_of(name, directory, done):
    assert done.returncode == 0, done.stderr
    assert (directory / f"{name}.png").stat().st_size > 10_000
    return json.loads((directory / f"{name}.json").read_text())


def unanswered(name, answer, directory, *arguments):
    """The rows of a command whose model gives this answer to everything."""
    out = f"--output_dir={directory}"
    done = run("tests.experiments.unanswered", name, answer, "--quick", *POLICIES, *arguments, out)
    return rows_of(name, directory, done)


def test_a_needle_has_rows_by_depth(tmp_path):
    arguments = "--context_tokens=500", "--context_tokens=600", "--needle=kamradt", "--needle=ruler"
    rows = unanswered("needle_in_haystack", "eat a sandwich", tmp_path, *arguments)
    cells = [row for row in rows if row["policy"] == "uniform" and row["metric"] == "accuracy"]
    assert {(row["task"], row["context_tokens"], row.get("depth")) for row in cells} == {
        (task, tokens, depth)
        for task in ("kamradt", "ruler")
        for tokens in (500, 600)
        for depth in (None, 0.0, 0.5, 1.0)
    }
    assert all(row["n"] == (2 if "depth" in row else 6) for row in cells)
    assert all(row["value"] == (0.25 if row["task"] == "kamradt" else 0) for row in cells)


def test_code_is_completed_in_both_roles(tmp_path):
    arguments = "--documents=2", "--task=file", "--task=repository", "--context_tokens=4000"
    rows = unanswered("code_completion", "return x", tmp_path, *arguments)
    metrics = {"edit_similarity", "exact_match"}
    assert {(row["task"], row["policy"], row["metric"]) for row in rows} == {
        (task, policy, f"{metric}{kind}")
        for task in ("file", "repository")
        for metric in metrics
        for policy, kind in (("exact", ""), ("uniform", ""), ("uniform", "_difference"))
    }
    assert all(row["n"] == 2 and -1 <= row["value"] <= 1 for row in rows)


def test_longbench_reads_files_of_the_published_form(tmp_path):
    example = {"input": "", "answers": ["return 1"], "all_classes": None}
    lines = [example | {"context": "x = 1\n" * n, "length": length} for n, length in ((20, 300), (40, 3999), (9, 5000))]
    for name in ("lcc_e", "repobench-p_e"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = f"--data={tmp_path}", "--e", "--max_prompt=200"
    rows = unanswered("longbench", "return 1", tmp_path, *arguments, "--task=lcc", "--task=repobench-p")
    found = {(row["task"], row["metric"], row.get("length_class")): row for row in rows if row["policy"] == "uniform"}
    assert found["lcc", "score", None]["n"] == 3 and found["lcc", "score", "0-4k"]["n"] == 2
    assert found["lcc", "score", "4-8k"]["scored_by"] == "code_sim"
    assert found["code completion", "mean_score", None]["n"] == 6
    assert found["all", "mean_score", None]["value"] == 1 and found["all", "mean_score_difference", None]["value"] == 0
    done = run("experiments.longbench", *arguments, "--task=qasper", f"--output_dir={tmp_path}")
    assert done.returncode and f"{tmp_path}/qasper_e.jsonl is not there: it is part of data.zip of https" in done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["needle_in_haystack", "code_completion", "perplexity"])
def test_commands_run_on_the_shipped_checkpoint(name, tmp_path):
    rows = rows_of(name, tmp_path, run(f"experiments.{name}", "--quick", f"--output_dir={tmp_path}"))
    assert {row["policy"] for row in rows} == {"exact", "uniform", "streaming_llm"}
    assert all(row["ci95_low"] <= row["value"] <= row["ci95_high"] for row in rows if row["metric"] != "ms_per_token")
    if name == "perplexity":
        ratios = [row for row in rows if row["metric"] == "perplexity_ratio" and row["first_token"] == 1]
        # Nothing is left out of an accumulating text's first tokens.
        assert ratios and all(row["value"] == pytest.approx(1, abs=1e-3) for row in ratios if row["end_token"] == 64)
