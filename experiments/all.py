"""Every experiment, one after the other, and a page of what they found.

    python -m experiments.all --profile quick
    python -m experiments.all --profile h200 --model DIRECTORY

Each runs in a process of its own and writes to OUTPUT_DIR/PROFILE/JOB, what it prints into a log there. One that fails
is named at the end and stops no other; the exit status is then 1. A run that was stopped goes on where it was. Pages
(below OUTPUT_DIR/PROFILE) set what was measured against every table and figure of the papers; with --publish the rows
behind them go to experiments/results/PROFILE.json and the pages to docs/.
"""

import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from tqdm import tqdm

from experiments.common import page, processes, results, settings
from experiments.common.jobs import JOBS, NEEDS, PROFILES, as_flags
from experiments.common.options import Experiment, Run, command, each, one_of
from experiments.common.results import Row
from experiments.common.resuming import Finished

NAME = "all"


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command."""

    profile: str = one_of("quick", PROFILES)
    """Of quick, cpu (two cores, some hours) and h200 (one H200, some hours)."""
    job: tuple[str, ...] = each(*JOBS, choices=JOBS)  # which; repeatable
    model: str | None = None  # a Hugging Face directory or a shipped checkpoint, where not the experiments' own
    longbench: str | None = None  # the directory of LongBench's files; without it what needs them is left out
    longbench_v2: str | None = None  # its data.json; without it the same
    kvpress_python: str | None = None  # an interpreter that has kvpress; without it `peers` is left out
    output_dir: str = "build/all"  # where results go
    remark: str | None = None  # what the page says of the machine beside its devices: that it was busy, say
    publish: bool = False  # also write the pages in docs/ and the rows that they are made of


def main(options: Options) -> None:
    directory = pathlib.Path(options.output_dir) / options.profile
    needed = {name: str(getattr(options, name)) for name in NEEDS if getattr(options, name)}
    jobs = [name for name in options.job if JOBS[name].needs is None or JOBS[name].needs in needed]
    for name in options.job:
        if name not in jobs:
            print(f"Left out without --{JOBS[name].needs}={NEEDS[str(JOBS[name].needs)][1]}: {name}")
    found, failed = run_jobs(jobs, options.profile, options.model, needed, directory)
    machine = ", ".join(filter(None, (page.machine(), options.remark)))
    published = page.collect(found, machine)
    page.save(published, directory / "results.json")
    page.write({options.profile: published}, directory)
    print(f"Pages: {directory}")
    if options.publish:
        page.publish(published, options.profile)
        print(f"Published: {page.DOCS}")
    if failed:
        sys.exit("\n".join(f"FAILED {job}: {reason}" for job, reason in failed.items()))


def write_apart(experiment: Experiment, options: Run) -> list[Row]:
    """An experiment's rows, from a process of its own, whose memory comes back; what it prints goes to NAME.log.

    Raises:
        processes.ExperimentFailed: when it ends with an error.
    """
    return processes.logged(experiment.write, options, log=options.file(f"{experiment.name}.log"))


def run_jobs(
    names: Sequence[str],
    profile: str,
    model: str | None,
    needed: Mapping[str, str],
    directory: pathlib.Path,
    run: Callable[[Experiment, Run], list[Row]] = write_apart,
) -> tuple[dict[str, page.Done], dict[str, str]]:
    """Runs jobs that are not done.

    Args:
        model: for those that load one, where not their own.
        needed: what only a user can name, by the names of `NEEDS`.
        run: an experiment's rows.

    Returns:
        What was found by every job that came to its end, and the reasons of those that did not.
    """
    finished = Finished(directory / f"{NAME}.jsonl")
    found: dict[str, page.Done] = {}
    failed: dict[str, str] = {}
    lines = []
    for name in tqdm(names, desc=f"{NAME}, {profile}", unit="job"):
        job = JOBS[name]
        given = job.given(profile, needed)
        if model and job.loads_model:
            given["model"] = model
        typed = processes.command(job.experiment, as_flags(given))
        options = job.options({**given, "output_dir": str((directory / name).resolve())})
        begin = time.perf_counter()
        try:
            unit = {"job": name, "command": typed}
            if job.loads_model:
                unit["model"] = _identity(options.model)
            rows = finished.rows(unit, functools.partial(run, job.of, options))
        except processes.ExperimentFailed as error:
            failed[name] = str(error)
            tqdm.write(f"{name} failed: {error}")
            lines.append((name, "failed", "-"))
            continue
        found[name] = page.Done(typed, rows)
        lines.append((name, f"{len(rows)} rows", f"{(time.perf_counter() - begin) / 60:.1f}"))
    results.print_table(f"{NAME}, profile {profile}", ("job", "", "minutes"), lines)
    return found, failed


def _identity(model: str) -> str:
    """What a job's model is known by; its name where there is none, which the experiment is to say."""
    try:
        return settings.model_identity(model)
    except ValueError:
        return model


if __name__ == "__main__":
    command(main, Options)
