"""Tables of rows, verdicts of claims, and the papers' pages."""

import dataclasses
import json
import tomllib

import numpy as np
import pytest

from experiments import render, summarize
from experiments.common import output, statistics
from experiments.common.rows import Row, read_rows
from experiments.common.statistics import Estimate


def row(policy, task, document, score, item=0, **options):
    budget = None if policy == "exact" else "25%"
    labels = {"kv_dtype": None, "question": "unseen", "tokens": 100, "seed": 0, "cache_fraction": 0.25}
    return Row("m", task, policy, budget, document=document, item=item, score=score, **labels | options)


def rows_of(policy, task, scores, **options):
    return [row(policy, task, str(number), score, **options) for number, score in enumerate(scores)]


def test_means_are_over_documents_and_differences_are_paired():
    rows = [
        *rows_of("exact", "a", [1.0] * 20), *rows_of("snapkv", "a", [0.0, 1.0] * 10),
        row("exact", "b", "0", 1.0), row("exact", "b", "0", 0.5, item=1), row("exact", "b", "1", 1.0),
        row("snapkv", "b", "0", 1.0), row("snapkv", "b", "1", None),
    ]  # fmt: skip
    [table] = summarize.summarize(rows)
    full, snapkv = table.lines
    assert (full.setting, snapkv.setting) == ("exact", "snapkv @ 25%")
    assert full.scores["b"].value == pytest.approx(0.875) and full.mean.value == pytest.approx(0.9375)
    assert snapkv.mean.value == pytest.approx(0.75) and snapkv.errors == 1 and snapkv.documents == 21
    # Task a: -.5; task b: only the question that both answered.
    assert snapkv.difference.value == pytest.approx(-0.25) and snapkv.difference.high < 0
    columns, lines = summarize.cells(table, "exact")
    assert len(columns) == len(lines[0]) and lines[1][1] == "25.0%"


def test_tasks_that_the_model_cannot_do_are_left_out():
    rows = [
        *rows_of("exact", "good", [1, 1, 1, 0]), *rows_of("exact", "bad", [1, 0, 0, 0]),
        *rows_of("exact", "choice", [1, 0, 1, 0], chance=0.25), *rows_of("exact", "coin", [1, 0, 1, 0], chance=0.5),
    ]  # fmt: skip
    [table] = summarize.summarize(rows)
    assert table.left_out == {"bad": 0.25, "coin": 0.5}
    assert table.lines[0].mean.value == pytest.approx((0.75 + 0.5) / 2)


def test_the_bootstrap_has_the_coverage_of_its_intervals():
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        sample = (rng.random(60) < 0.4).astype(float)
        low, high = statistics.bootstrap([sample], seed)[1:]
        covered += low <= 0.4 <= high
    assert 0.89 <= covered / 200 <= 0.99
    two = statistics.bootstrap([np.ones(5), np.zeros(50)])
    assert two == Estimate(0.5, 0.5, 0.5)
    assert np.isnan(statistics.bootstrap([np.ones(1)]).low)


def test_intervals_against_published_quantiles():
    value, low, high = statistics.mean_interval(np.array([1.0, 2.0, 3.0, 4.0]))
    assert (
        value == 2.5
        and high - value == pytest.approx(3.182446 * 1.290994 / 2, rel=1e-4)
        and value - low == high - value
    )
    assert statistics.median_interval(np.arange(1.0, 8.0)) == Estimate(4.0, 1.0, 7.0)
    for function, count in ((statistics.mean_interval, 1), (statistics.median_interval, 5)):
        with pytest.raises(ValueError, match=f"{count} samples have no"):
            function(np.ones(count))
    slope = statistics.log_slope([1, 2, 4], np.array([[1, 4, 16], [3, 12, 48]]))
    assert slope.value == pytest.approx(2) and slope.high == pytest.approx(2)
    assert str(Estimate(1234.5)) == "1234" and Estimate(0.5, 0.25, 1).fixed("+") == "+0.50 [+0.25, +1.00]"


def test_the_command_writes_markdown(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    rows = [*rows_of("exact", "a", [1.0, 1.0]), *rows_of("exact", "p", [2.0, 3.0], metric="nll")]
    path.write_text("".join(json.dumps(vars(one)) + "\n" for one in rows) + '{"cut')
    summarize.main(summarize.Options(rows=(str(path),), markdown=str(tmp_path / "t.md")))
    text = (tmp_path / "t.md").read_text()
    assert "| exact |" in text and "nats per token" in text and "exact" in capsys.readouterr().out


COMPARE = {"tasks": ["a*"], "question": "unseen", "better": "chelsea @ 25%", "than": ["snapkv @ 25%", "h2o @ 25%"]}


@pytest.mark.parametrize(
    "h2o, verdict", [(0.0, "holds"), (1.0, "not significant"), (None, "holds"), ("best", "does not hold")]
)
def test_verdicts_of_rows(h2o, verdict, tmp_path):
    good = [1.0] * 15 + [0.0] * 5
    rows = [*rows_of("exact", "a1", [1.0] * 20), *rows_of("chelsea", "a1", good), *rows_of("snapkv", "a1", [0.0] * 20)]
    if h2o is not None:
        scores = {0.0: [0.0] * 20, 1.0: good, "best": [1.0] * 20}[h2o]
        rows += rows_of("h2o", "a1", scores)
    found, text = render.evaluate_claim({"compare": COMPARE}, rows, tmp_path)
    assert found == verdict and "chelsea @ 25%" in text
    assert render.evaluate_claim({"compare": COMPARE}, [], tmp_path) == ("not run", "")
    assert render.evaluate_claim({"compare": COMPARE | {"question": "seen"}}, rows, tmp_path)[0] == "not run"


def test_a_smaller_loss_is_better(tmp_path):
    rows = [*rows_of("chelsea", "a", [2.0, 2.1], metric="nll"), *rows_of("snapkv", "a", [3.0, 3.2], metric="nll")]
    assert render.evaluate_claim({"compare": COMPARE | {"than": ["snapkv @ 25%"]}}, rows, tmp_path)[0] == "holds"


def test_verdicts_of_figures(tmp_path):
    def write(name, figures):
        (tmp_path / name).write_text(json.dumps(figures))

    def error(setting, value, case="layer 1"):
        return output.figure("error", Estimate(value, value - 0.1, value + 0.1), setting=setting, case=case)

    check = {"figures": {"file": "f.json", "metric": "error", "better": "x", "than": "y"}}
    assert render.evaluate_claim(check, [], tmp_path) == ("not run", "")
    for value, verdict in ((0.5, "holds"), (1.05, "not significant"), (1.5, "does not hold")):
        write("f.json", [error("x", value), error("y", 1.0), error("x", 0.1, "layer 2")])
        assert render.evaluate_claim(check, [], tmp_path)[0] == verdict
    write("e.json", [output.figure("exponent", Estimate(-0.5, -0.55, -0.45), line="s")])
    for low, verdict in ((-0.6, "holds"), (-0.4, "does not hold")):
        exponents = {"range": {"file": "e.json", "metric": "exponent", "low": low, "high": low + 0.1}}
        assert render.evaluate_claim(exponents, [], tmp_path)[0] == verdict
    write("e.json", [output.figure("exponent", -0.5)])  # without an interval
    assert render.evaluate_claim(exponents, [], tmp_path)[0] == "does not hold"
    ratios = [("1,1,1", 0.4, 0.6), ("1,9,1", 0.9, 1.1)]
    write("r.json", [output.figure("ratio", Estimate(0.5, *bounds), line=f"w{w}", walk=w) for w, *bounds in ratios])
    for walks, verdict in ((["1,1,1"], "holds"), (["1,1,1", "1,9,1"], "not significant")):
        found, text = render.evaluate_claim({"ratio": {"file": "r.json", "walks": walks}}, [], tmp_path)
        assert found == verdict and "w1,9,1" in text


def test_figures_of_equal_seeds_are_paired(tmp_path):
    samples = {"x": [1.0, 2.0, 3.0, 4.0], "y": [1.1, 2.2, 3.1, 4.2]}
    figures = [
        output.figure("error", statistics.mean_interval(np.asarray(s)), setting=setting, case=case, samples=s)
        for setting, s in samples.items()
        for case in ("layer 1", "layer 2")
    ]
    (tmp_path / "f.json").write_text(json.dumps(figures))
    check = {"file": "f.json", "metric": "error", "better": "x", "than": "y", "cases": ["layer 1"]}
    verdict, text = render.evaluate_claim({"figures": check}, [], tmp_path)
    assert verdict == "holds" and "paired difference" in text and "layer 2" not in text
    assert render.evaluate_claim({"figures": check | {"better": "y", "than": "x"}}, [], tmp_path)[0] == "does not hold"
    both = [check, check | {"better": "y", "than": "x", "factor": 1.05}]
    assert render.evaluate_claim({"figures": both}, [], tmp_path)[0] == "not significant"
    verdict, text = render.evaluate_claim(
        {"figures": check | {"cases": ["layer 1", "layer 2"], "mean": True}}, [], tmp_path
    )
    assert verdict == "holds" and "| mean | 2.5 [" in text and "| layer 2 |" in text
    show = {"file": "f.json", "settings": ["y"], "metrics": ["error"]}
    assert render.evaluate_claim({"show": show}, [], tmp_path)[0] == "not run"


def test_scores_at_the_floor_have_no_verdict(tmp_path):
    digits = [
        *rows_of("exact", "a", [1.0] * 20), *rows_of("chelsea", "a", [0.0] * 20),
        *rows_of("snapkv", "a", [0.0, 0.0, 0.0, 0.0, 0.9] * 4),
    ]  # fmt: skip
    check = {"compare": COMPARE | {"than": ["snapkv @ 25%"]}}
    verdict, text = render.evaluate_claim(check, digits, tmp_path)
    assert verdict == "not significant" and render.AT_FLOOR in text
    losses = [*rows_of("chelsea", "a", [2.0, 2.1], metric="nll"), *rows_of("snapkv", "a", [2.5, 2.7], metric="nll")]
    assert render.evaluate_claim(check, digits + losses, tmp_path)[0] == "holds"
    for within, expected in ((0.7, "holds"), (0.55, "not significant"), (0.3, "does not hold")):
        equal = {"compare": check["compare"] | {"within": within}}
        assert render.evaluate_claim(equal, losses, tmp_path)[0] == expected


@pytest.mark.parametrize(("path", "shown"), render.PAGES.items(), ids=lambda value: getattr(value, "stem", ""))
def test_pages_have_the_tables_of_their_rows(path, shown):
    rows = read_rows(sorted((render.ROOT / "experiments" / "results").glob("*.jsonl.gz")))
    page = path.read_text()
    assert page == render.with_results(page, rows, shown), "run python -m experiments.render"
    assert page == render.with_figures(page, render.ROOT / "experiments" / "results"), (
        "run python -m experiments.render"
    )
    assert len(render._MARKED.findall(page)) == 1
    assert all(f"| {row.setting} |" in page for row in rows if shown.matches(row))


def test_pages_list_tasks_that_the_full_cache_does_not_solve():
    rows = [*rows_of("exact", "good", [1.0] * 4), *rows_of("exact", "bad", [0.0, 1.0, 0.0, 0.0])]
    page = "<!-- Written by experiments.render: -->\n<!-- End of the results. -->"
    found = render.with_results(page, rows, render.Shown())
    assert found.count("| exact |") == 1 and "| good |" in found
    assert "| bad, m, 100 tokens, question unseen, float32 | 0.25 |" in found


def test_pages_have_tables_of_figures(tmp_path):
    figures = [output.figure("b", 2.0, setting="x"), output.figure("a", Estimate(1.0, 0.5, 1.5), setting="x")]
    (tmp_path / "f.json").write_text(json.dumps([*figures, output.figure("c", 3.0, setting="x")]))
    page = render.with_figures("<!-- a,b of f.json: -->\nold\n<!-- End of the figures. -->", tmp_path)
    assert "|  | a | b |\n" in page and "| x | 1 [0.5, 1.5] | 2 |\n" in page and "old" not in page


def test_the_picture_has_a_line_per_policy(tmp_path):
    rows = [
        dataclasses.replace(row(policy, "facts", "0", score, cache_fraction=held), budget=budget)
        for policy, budget, score, held in [
            ("exact", None, 1.0, 1.0),
            ("auto", "25%", 0.9, 0.25),
            ("auto", "12.5%", 0.8, 0.12),
            ("kvpress KVzip", "25%", 0.7, 0.25),
        ]
    ]
    (table,) = summarize.summarize(rows)
    figure = render.score_figure(table)
    texts = figure.axes[0].get_legend().get_texts()
    assert {text.get_text() for text in texts} == {"exact", "auto"}
    assert [text.get_text() for text in figure.axes[0].texts] == ["kvpress KVzip"]
    assert sorted(len(line.get_xdata()) for line in figure.axes[0].lines) == [1, 1, 2]


@pytest.mark.parametrize("path", sorted(render.PAPERS.glob("*.toml")), ids=lambda path: path.stem)
def test_papers_are_complete_and_their_pages_are_current(path, tmp_path):
    paper = tomllib.loads(path.read_text())
    assert len({result["name"] for result in paper["results"]}) == len(paper["results"])
    for result in paper["results"]:
        assert result["claim"] and result["title"] and {"command", "needs", "note"} & result.keys()
        assert all(len(cells) == len(result["columns"]) for cells in result.get("rows", ()))
    render.main(render.Options(output_dir=str(tmp_path)))
    page = (tmp_path / f"{path.stem}.md").read_text()
    assert page == (render.ROOT / "docs" / "papers" / f"{path.stem}.md").read_text(), "run python -m experiments.render"
