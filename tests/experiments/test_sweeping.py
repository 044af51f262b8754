"""The order in which a sweep goes, and what it leaves out."""

import types

import pytest

from experiments.common import settings, sweeping


def test_settings_that_are_held_at_once_answer_all_tasks_before_the_next_ones_come(monkeypatch):
    done = []

    def values(group, task, *_):
        done.append((task, *group))
        return {setting: {} for setting in group}

    sweep = object.__new__(sweeping.Sweep)  # without a model
    sweep.chosen = ["a", "b", "c"]
    monkeypatch.setattr(sweep, "_values", values)
    monkeypatch.setattr(sweep, "_results", lambda values, *_: list(values))
    monkeypatch.setattr(sweeping, "drop_programs", lambda: done.append("dropped"))
    monkeypatch.setattr(sweeping.flags, "FLAGS", types.SimpleNamespace(together=2))
    assert sweep.evaluate_all(["x", "y"], dict, "exact", "unseen") == {"x": ["a", "b", "c"], "y": ["a", "b", "c"]}
    assert done == [("x", "a", "b"), ("y", "a", "b"), "dropped", ("x", "c"), ("y", "c"), "dropped"]


def test_what_is_refused_is_left_out_with_its_reason(capsys):
    refused = {sweeping.REFUSED: "too small"}
    a, b = settings.settings(["uniform", "subgen"], ["5%"])
    assert sweeping.not_refused({a: {}, b: refused}) == {a: {}}
    assert "left out: subgen @ 5%: too small" in "".join(capsys.readouterr())
    with pytest.raises(ValueError, match="uniform @ 5%: too small; subgen @ 5%: too small"):
        sweeping.not_refused({a: refused, b: refused})
