"""Verdicts of the papers' claims."""

import json
import tomllib

import numpy as np
import pytest

from experiments import render
from experiments.common import claims, output, statistics
from experiments.common.statistics import Estimate
from tests.experiments.support import rows_of

COMPARE = {"tasks": ["a*"], "question": "unseen", "better": "chelsea @ 25%", "than": ["snapkv @ 25%", "h2o @ 25%"]}


def verdict_of(result, rows=(), directory=None):
    """Returns the verdict without the comparison that decides it."""
    return claims.verdict(result, list(rows), directory).partition(":")[0]


@pytest.mark.parametrize(
    "h2o, text",
    [
        (None, "holds: 0.75, 0 (a1)"),
        ([0.0] * 20, "holds: 0.75, 0 (a1)"),
        ([1.0] * 15 + [0.0] * 5, "not significant: 0.75, 0.75 (a1)"),
        ([1.0] * 20, "does not hold: 0.75, 1 (a1)"),
    ],
)
def test_verdicts_of_rows(h2o, text):
    scores = {"exact": [1.0] * 20, "chelsea": [1.0] * 15 + [0.0] * 5, "snapkv": [0.0] * 20, "h2o": h2o or []}
    rows = [row for policy, of_policy in scores.items() for row in rows_of(policy, "a1", of_policy)]
    assert claims.verdict({"compare": [COMPARE]}, rows, None) == text
    assert verdict_of({"compare": [COMPARE]}) == "not run"
    assert verdict_of({"compare": [COMPARE | {"question": "seen"}]}, rows) == "not run"


def test_verdicts_of_figures(tmp_path):
    def write(name, figures):
        (tmp_path / name).write_text(json.dumps(figures))

    def error(setting, value, case="layer 1"):
        return output.figure("error", Estimate(value, value - 0.1, value + 0.1), setting=setting, case=case)

    check = {"figures": [{"file": "f.json", "metric": "error", "better": "x", "than": "y"}]}
    assert verdict_of(check, [], tmp_path) == "not run"
    for value, verdict in ((0.5, "holds"), (1.05, "not significant"), (1.5, "does not hold")):
        write("f.json", [error("x", value), error("y", 1.0), error("x", 0.1, "layer 2")])
        assert verdict_of(check, [], tmp_path) == verdict
    write("e.json", [output.figure("exponent", Estimate(-0.5, -0.55, -0.45), line="s")])
    for low, verdict in ((-0.6, "holds"), (-0.4, "does not hold")):
        exponents = {"range": [{"file": "e.json", "metric": "exponent", "low": low, "high": low + 0.1}]}
        assert verdict_of(exponents, [], tmp_path) == verdict
    write("e.json", [output.figure("exponent", -0.5)])  # without an interval
    assert verdict_of(exponents, [], tmp_path) == "does not hold"
    ratios = [("1,1,1", 0.4, 0.6), ("1,9,1", 0.9, 1.1)]
    write("r.json", [output.figure("ratio", Estimate(0.5, *bounds), line=f"w{w}", walk=w) for w, *bounds in ratios])
    for walks, verdict in ((["1,1,1"], "holds"), (["1,1,1", "1,9,1"], "not significant")):
        assert verdict_of({"ratio": [{"file": "r.json", "walks": walks}]}, [], tmp_path) == verdict


def test_figures_of_equal_seeds_are_paired(tmp_path):
    samples = {"x": [1.0, 2.0, 3.0, 4.0], "y": [1.1, 2.2, 3.1, 4.2]}
    figures = [
        output.figure("error", statistics.mean_interval(np.asarray(s)), setting=setting, case=case, samples=s)
        for setting, s in samples.items()
        for case in ("layer 1", "layer 2")
    ]
    (tmp_path / "f.json").write_text(json.dumps(figures))
    check = {"file": "f.json", "metric": "error", "better": "x", "than": "y", "cases": ["layer 1"]}
    reverse = check | {"better": "y", "than": "x"}
    assert verdict_of({"figures": [check]}, [], tmp_path) == "holds"
    assert verdict_of({"figures": [reverse]}, [], tmp_path) == "does not hold"
    assert verdict_of({"figures": [check, reverse | {"factor": 1.05}]}, [], tmp_path) == "not significant"
    mean = check | {"cases": ["layer 1", "layer 2"], "mean": True}
    assert claims.verdict({"figures": [mean]}, [], tmp_path) == "holds: 2.5, 2.65 (error)"


def test_scores_at_the_floor_have_no_verdict_and_a_smaller_loss_is_better():
    digits = [
        *rows_of("exact", "a", [1.0] * 20), *rows_of("chelsea", "a", [0.0] * 20),
        *rows_of("snapkv", "a", [0.0, 0.0, 0.0, 0.0, 0.9] * 4),
    ]  # fmt: skip
    check = COMPARE | {"than": ["snapkv @ 25%"]}
    assert verdict_of({"compare": [check]}, digits) == "not significant"
    losses = [*rows_of("chelsea", "a", [2.0, 2.1], metric="nll"), *rows_of("snapkv", "a", [2.5, 2.7], metric="nll")]
    assert verdict_of({"compare": [check]}, digits + losses) == "holds"
    for within, expected in ((0.7, "holds"), (0.55, "not significant"), (0.3, "does not hold")):
        assert verdict_of({"compare": [check | {"within": within}]}, losses) == expected


def test_papers_are_complete():
    for path in render.PAPERS.glob("*.toml"):
        paper = tomllib.loads(path.read_text())
        assert path.stem in render.SYSTEMS and paper["link"].startswith("https://")
        assert len({result["name"] for result in paper["results"]}) == len(paper["results"])
        for result in paper["results"]:
            assert result["claim"] and result["title"] and {"command", "needs", "note"} & result.keys()
            assert result.keys() <= {"name", "title", "claim", "note", "command", "needs", "profile", *claims.CHECKS}
