"""Tables and pictures of README and of the results' pages."""

import dataclasses

import pytest

from experiments import render
from experiments.common import pictures
from experiments.common.statistics import Estimate
from tests.experiments.support import row, rows_of


@pytest.fixture(scope="module")
def results():
    return render.read_results()


@pytest.mark.parametrize("path", render.PAGES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_pages_are_current(path, results):
    page = path.read_text()
    assert page == render.render(page, results), "run python -m experiments.render"


def test_intervals_and_pictures_are_current(results):
    assert all(row.error is None for row in results.rows)
    assert (render.RESULTS / "intervals.csv").read_text() == render.intervals(results.rows)
    names = {f"matrix_{model}_{question}.png" for model, question in render.matrices(results.cells)}
    assert names == {path.name for path in render.IMAGES.glob("matrix_*.png")}


def sized(fraction, **options):
    return {"tail_fraction": 0.1, "cache_fraction": fraction, "device_bytes": int(2000 * fraction), **options}


@pytest.fixture
def cells():
    rows = [
        *rows_of("exact", "facts", [1.0] * 6, **sized(1.0)),
        *rows_of("auto", "facts", [0.5] * 6, **sized(0.25)),
        *rows_of("auto", "facts", [0.25] * 6, **sized(0.125, budget="12.5%")),
        *rows_of("chelsea", "facts", [0.0] * 6, **sized(0.25)),
        *rows_of("chelsea:heads=auto", "facts", [1.0] * 6, **sized(0.25, kv_dtype="int8")),
        *rows_of("chelsea", "facts", [1.0] * 6, **sized(0.5, budget="304")),  # in slots: not in tables
        *rows_of("snapkv", "facts", [1.0] * 6),  # of version 0.3: not in tables
        *rows_of("kvpress KVzip", "facts", [0.75] * 6),
        *rows_of("kvpress SnapKV", "facts", [0.75] * 4),  # too few documents
        row("exact", "unsolved", "0", 0.0, **sized(1.0)),
        row("auto", "unsolved", "0", 0.0, **sized(0.25)),
    ]
    return render.make_cells(rows)


def test_cells_have_comparable_budgets(cells):
    found = {(cell.policy, cell.has_profile, cell.budget): (cell.value, cell.line.held) for cell in cells}
    assert found == {
        ("full cache", False, 100): (1.0, 1.0), ("auto", False, 25): (0.5, 0.25), ("auto", False, 12.5): (0.25, 0.125),
        ("Chelsea", False, 25): (0.0, 0.25), ("Chelsea", True, 25): (1.0, 0.25),
        ("kvpress KVzip", False, 25): (0.75, 0.25),
    }  # fmt: skip
    assert next(cell for cell in cells if cell.policy == "auto").line.difference.value == -0.5
    table = render.kvpress_table("", render.Results([], cells))
    assert (
        "| auto | m, facts, 100 | 25.0% | 0.50 |" in table
        and "| kvpress KVzip | m, facts, 100 | 25.0% | 0.75 |" in table
    )


def test_pictures_have_a_cell_and_a_label_per_score(cells):
    figure = pictures.matrix(render.matrices(cells)["m", "unseen"], "m")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert len(figure.axes[0].patches) == 6  # the full cache above both budgets
    assert texts.count("0.50") == 1 and texts.count("6") == 6
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels == ["full cache", "auto", "Chelsea, with profile", "Chelsea"]
    texts = [text.get_text() for text in pictures.score_by_bytes(cells, ["Chelsea"]).axes[0].texts]
    assert {"full cache", "auto", "kvpress KVzip", "Chelsea 0.00", "Chelsea 1.00"} <= set(texts)
    assert any("profile" in text for text in texts) and any("published" in text for text in texts)
    full, half = (next(cell for cell in cells if cell.policy == name) for name in ("full cache", "auto"))
    assert pictures.retained(half, full) == 0.5
    loss = half.line._replace(mean=Estimate(1.15))
    assert pictures.retained(half._replace(metric="nll", line=loss), full) == pytest.approx(0.5)


def test_the_picture_by_length_has_a_panel_per_length():
    few_bits = [
        *rows_of("exact", "facts", [1.0] * 6, **sized(1.0)),
        *rows_of("exact", "facts", [1.0] * 6, **sized(0.27, kv_dtype="int4")),
        *rows_of("exact", "facts", [0.0] * 3 + [1.0] * 3, **sized(0.14, kv_dtype="int2")),
        *rows_of("auto", "facts", [1.0] * 6, **sized(0.25)),
        *rows_of("auto", "facts", [0.5] * 4, **sized(0.125, budget="12.5%")),
        *rows_of("auto", "facts", [0.0] * 6, **sized(0.25, question="seen", tail_fraction=None)),
        *rows_of("exact", "other", [1.0] * 6, **sized(1.0)),  # without few bits
    ]
    longer = [dataclasses.replace(one, tokens=200) for one in few_bits if one.policy != "auto"]
    cases = render.few_bits_cases([*few_bits, *longer])
    curves = {tokens: render.few_bits_curves(rows) for (_, _, tokens, _), rows in cases.items()}
    assert [*curves] == [100, 200]
    assert [list(one) for one in curves.values()] == [
        ["full cache", "auto", "all tokens in few bits"],
        ["full cache", "all tokens in few bits"],
    ]
    figure = pictures.score_by_length(curves, "title")
    assert [axes.get_title() for axes in figure.axes] == ["100 tokens, 4 to 6 texts", "200 tokens, 6 texts"]


def test_unknown_blocks_are_refused():
    with pytest.raises(KeyError):
        render.render("<!-- render: unknown -->\n<!-- end -->", render.Results([], []))
