"""Running every experiment: what fails stops no other, and what is done is not done again."""

import os
import sys

import pytest

from experiments import all as everything
from experiments.common import processes
from experiments.common.results import Row
from tests.experiments.running import command

JOBS = {"discrepancy": 0.5, "guarantees": None, "key_similarity": 0.7}


def test_a_failure_is_named_and_stops_no_other(tmp_path):
    calls = []

    def run(experiment, options):
        calls.append((experiment.name, options.quick, options.model))
        if JOBS[experiment.name] is None:
            raise processes.ExperimentFailed("it broke")
        return [Row(experiment.name, "m", "p", "accuracy", JOBS[experiment.name])]

    for _ in range(2):
        found, failed = everything.run_jobs(list(JOBS), "quick", "MODEL", {}, tmp_path, run)
    assert {name: done.rows[0].value for name, done in found.items()} == {"discrepancy": 0.5, "key_similarity": 0.7}
    assert failed == {"guarantees": "it broke"}
    assert found["discrepancy"].command == "python -m experiments.discrepancy --quick --model=MODEL"
    # The second time only what failed runs again.
    assert calls == [(name, True, "MODEL") for name in (*JOBS, "guarantees")]


def test_the_command_reports_an_experiment_that_fails(tmp_path):
    done = command("experiments.all", "--job=guarantees", "--model=nowhere", f"--output_dir={tmp_path}")
    assert done.returncode == 1
    assert "FAILED guarantees: ValueError: --model=nowhere is neither a directory" in done.stderr
    assert (tmp_path / "quick" / "papers" / "subgen.md").read_text().startswith("# SubGen")


def test_a_process_that_dies_or_is_stopped_loses_itself_alone(tmp_path):
    log = tmp_path / "job" / "it.log"
    assert processes.logged(max, 1, 3, log=log) == 3
    with pytest.raises(processes.ExperimentFailed, match="BrokenProcessPool: .*terminated abruptly"):
        processes.logged(os._exit, 1, log=log)
    with pytest.raises(processes.ExperimentFailed, match="SystemExit: no"):
        processes.logged(sys.exit, "no", log=log)
