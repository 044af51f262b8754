"""The order in which a sweep asks, and what it leaves out."""

import types

import pytest

from experiments.common import sweeping


def test_settings_that_are_held_at_once_answer_all_tasks_before_the_next_ones_come(monkeypatch):
    done = []

    def answers(group, task, *_):
        done.append((task, *group))
        return {setting: {} for setting in group}

    sweep = object.__new__(sweeping.Sweep)  # without a model
    sweep.chosen = ["a", "b", "c"]
    monkeypatch.setattr(sweep, "_answers", answers)
    monkeypatch.setattr(sweep, "_outcomes", lambda answers, *_: list(answers))
    monkeypatch.setattr(sweeping, "drop_programs", lambda: done.append("dropped"))
    monkeypatch.setattr(sweeping.flags, "FLAGS", types.SimpleNamespace(together=2))
    assert sweep.ask_all(["x", "y"], dict, "exact", "unseen") == {"x": ["a", "b", "c"], "y": ["a", "b", "c"]}
    assert done == [("x", "a", "b"), ("y", "a", "b"), "dropped", ("x", "c"), ("y", "c"), "dropped"]


def test_what_is_refused_is_left_out_with_its_reason(capsys):
    refused = {sweeping.REFUSED: "too small"}
    assert sweeping.not_refused({"a": {}, "b": refused}) == {"a": {}}
    assert "left out: b: too small" in "".join(capsys.readouterr())
    with pytest.raises(ValueError, match="a: too small; b: too small"):
        sweeping.not_refused({"a": refused, "b": refused})
