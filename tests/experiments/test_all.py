"""Running every experiment: what fails stops no other, and what is done is not done again."""

import json
import subprocess
import sys

import pytest

from experiments.common import processes
from experiments.common.results import Row
from tests.experiments.test_commands import run

JOBS = {"discrepancy": 0.5, "guarantees": None, "key_similarity": 0.7}

# `experiments.all` defines flags that other experiments define too, so it is imported in a process of its own.
PROGRAM = """
import json, pathlib, sys
from experiments import all
from experiments.common import processes
from experiments.common.results import Row
calls = []
def run(experiment, arguments, directory):
    calls.append([experiment, *arguments])
    value = json.loads(sys.argv[2])[experiment]
    if value is None:
        raise processes.ExperimentFailed("it broke")
    return [Row(experiment, "m", "p", "accuracy", value)]
for _ in range(2):
    found, failed = all.run_jobs(list(json.loads(sys.argv[2])), "quick", "MODEL", {}, pathlib.Path(sys.argv[1]), run)
print(json.dumps([calls, {name: done.rows[0].value for name, done in found.items()}, failed]))
"""


def test_a_failure_is_named_and_stops_no_other(tmp_path):
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(JOBS)]
    done = subprocess.run(arguments, cwd=processes.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    calls, found, failed = json.loads(done.stdout.splitlines()[-1])
    assert found == {"discrepancy": 0.5, "key_similarity": 0.7} and failed == {"guarantees": "it broke"}
    # The second time only what failed runs again.
    assert [call[0] for call in calls] == [*JOBS, "guarantees"]
    assert all("--quick" in call and "--model=MODEL" in call for call in calls)


def test_the_command_reports_an_experiment_that_fails(tmp_path):
    done = run("experiments.all", "--job=guarantees", "--model=nowhere", f"--output_dir={tmp_path}")
    assert done.returncode == 1
    assert "FAILED guarantees: guarantees ended with status 1" in done.stderr
    assert "--model=nowhere is neither a directory" in done.stderr
    assert (tmp_path / "quick" / "papers" / "subgen.md").read_text().startswith("# SubGen")


def test_a_process_without_rows_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes.sys, "executable", "/bin/true")
    with pytest.raises(processes.ExperimentFailed, match="discrepancy ended with status 0"):
        processes.run("discrepancy", [], tmp_path)


def test_rows_of_an_earlier_run_are_not_taken_for_new_ones(tmp_path, monkeypatch):
    (tmp_path / "discrepancy.json").write_text(json.dumps([Row("e", "m", "p", "accuracy", 1.0).flat()]))
    monkeypatch.setattr(processes.sys, "executable", "/bin/true")
    with pytest.raises(processes.ExperimentFailed):
        processes.run("discrepancy", [], tmp_path)
