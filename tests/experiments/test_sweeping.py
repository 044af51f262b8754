"""The order of units in a sweep, and the settings that it leaves out."""

import pytest

from experiments.common import answers, settings, sweeping
from experiments.common.options import Experiment, Run
from experiments.common.resuming import Finished


def test_a_group_of_settings_answers_all_tasks_before_the_next_group(monkeypatch):
    done = []

    def values(options, finished, group, unit, run):
        done.append((unit["task"], *group))
        return {setting: {} for setting in group}

    sweep = object.__new__(sweeping.Sweep)  # without a model
    sweep.chosen, sweep.documents, sweep.batch, sweep.seed, sweep.finished = ["a", "b", "c"], 1, 1, 0, None
    monkeypatch.setattr(sweeping, "every_setting", values)
    monkeypatch.setattr(answers.Result, "from_json", lambda value, setting, *_: setting)
    monkeypatch.setattr(sweeping, "drop_programs", lambda: done.append("dropped"))
    sweep.options = sweeping.Questions(together=2)
    assert sweep.evaluate(["x", "y"], dict, "exact", "unseen") == {"x": ["a", "b", "c"], "y": ["a", "b", "c"]}
    assert done == [("x", "a", "b"), ("y", "a", "b"), "dropped", ("x", "c"), ("y", "c"), "dropped"]


def test_refused_settings_are_left_out_with_a_reason(capsys):
    refused = {sweeping.REFUSED: "too small"}
    a, b = settings.settings(["uniform", "subgen"], ["5%"])
    assert sweeping.not_refused({a: {}, b: refused}) == {a: {}}
    assert "subgen @ 5% is left out: too small" in "".join(capsys.readouterr())
    assert sweeping.not_refused({a: refused, b: refused}) == {}
    with pytest.raises(ValueError, match="every setting was left out"):
        Experiment("none", Run, lambda _: []).write(Run())


@pytest.mark.parametrize("together", [1, 2, 8])
def test_a_sweep_continues_after_a_setting_that_fails(tmp_path, capsys, together):
    options = sweeping.Settings(together=together)
    # The budget of the second is invalid.
    chosen = settings.settings(["uniform", "chelsea@10", "subgen", "h2o"], ["5%"])
    ran = []

    def run(group):
        if chosen[2] in group:
            raise ValueError("no such clusters")
        ran.extend(group)
        return {setting: {} for setting in group}

    finished = Finished(tmp_path / "units.jsonl")
    values = sweeping.every_setting(options, finished, chosen, {"task": "a"}, run)
    assert list(sweeping.not_refused(values)) == [chosen[0], chosen[1], chosen[3]]
    assert "subgen @ 5% is left out: no such clusters" in "".join(capsys.readouterr())
    assert sorted(map(str, ran)) == sorted(str(setting) for setting in chosen if setting is not chosen[2])
    again = sweeping.every_setting(options, Finished(finished.path), chosen, {"task": "a"}, pytest.fail)
    assert again == values
