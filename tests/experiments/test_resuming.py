"""A second run does not repeat finished units."""

import pytest

from experiments.common.results import Row
from experiments.common.resuming import Finished


def row(value):
    return Row("e", "m", "exact", "accuracy", value, task="t", extra={"budget": None})


def test_units_are_run_once_and_a_broken_line_is_run_again(tmp_path):
    path, runs = tmp_path / "deep" / "done.jsonl", []

    def run(value):
        runs.append(value)
        return [row(value)]

    for _ in range(2):
        finished = Finished(path)
        assert finished.rows({"task": "a", "seed": 0}, lambda: run(0.5)) == [row(0.5)]
        assert finished.rows({"seed": 0, "task": "a"}, lambda: run(0.7)) == [row(0.5)]
        assert finished.rows({"task": "a", "seed": 1}, lambda: run(0.9)) == [row(0.9)]
    assert runs == [0.5, 0.9]
    path.write_text(path.read_text()[:-20])  # stopped while writing
    finished = Finished(path)
    assert {"task": "a", "seed": 0} in finished and {"task": "a", "seed": 1} not in finished
    finished.rows({"task": "a", "seed": 1}, lambda: run(1.0))
    assert Finished(path).rows({"task": "a", "seed": 1}, lambda: run(2.0)) == [row(1.0)]
    assert runs == [0.5, 0.9, 1.0]
    assert {"task": "a", "seed": 0} not in Finished(path, fresh=True)
    assert not path.exists()


def test_a_failed_run_writes_nothing(tmp_path):
    finished = Finished(tmp_path / "done.jsonl")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            finished.rows({"task": "a"}, lambda: 1 / 0)
    assert not (tmp_path / "done.jsonl").exists()


def test_units_run_in_groups(tmp_path):
    groups = []

    def run(keys):
        groups.append(keys)
        return {key: [key, key] for key in keys}

    def unit(key):
        return {"of": key}

    finished = Finished(tmp_path / "done.jsonl")
    finished.add(unit("b"), "there")
    assert finished.of_each("abcde", unit, run, together=3) == {
        "a": ["a", "a"],
        "b": "there",
        **{key: [key, key] for key in "cde"},
    }
    assert groups == [["a", "c", "d"], ["e"]]
    assert Finished(tmp_path / "done.jsonl").of_each("ea", unit, run, together=3) == {"e": ["e", "e"], "a": ["a", "a"]}
    assert len(groups) == 2
