"""The tutorial notebook runs from top to bottom, in one process."""

import json
import pathlib

import pytest

from kvjax_models import known_models

NOTEBOOK = pathlib.Path(__file__).parents[2] / "docs" / "tutorial.ipynb"


CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def compiled(number):
    return compile("".join(CELLS[number]["source"]), f"cell {number}", "exec")


def test_the_notebook_is_stored_without_outputs():
    assert len(CELLS) > 5 and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS)
    for number in range(len(CELLS)):
        compiled(number)


@pytest.mark.heavy
def test_the_notebook_runs(capsys):
    try:
        known_models.find_model("smollm2-135m")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    pytest.importorskip("matplotlib")
    names: dict = {}
    for number in range(len(CELLS)):
        exec(compiled(number), names)
    output = capsys.readouterr().out
    assert "7315" in output and "482" in output
    assert 0.3 < names["kept"].mean() < 0.5
    assert all((names["kept_by_auto"][head] == 1).all() for head in names["retrieving"])
