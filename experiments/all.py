"""Every experiment, one after the other, and a page of what they found.

    python -m experiments.all --profile quick
    python -m experiments.all --profile h200 --model DIRECTORY

Each runs in a process of its own and writes to OUTPUT_DIR/PROFILE/JOB, what it prints into a log there. One that fails
is named at the end and stops no other; the exit status is then 1. A run that was stopped goes on where it was. Pages
(below OUTPUT_DIR/PROFILE) set what was measured against every table and figure of the papers; with --publish the rows
behind them go to experiments/results/PROFILE.json and the pages to docs/.
"""

import functools
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from absl import app, flags
from tqdm import tqdm

from experiments.common import page, processes, results
from experiments.common.jobs import JOBS, NEEDS, PROFILES
from experiments.common.results import Row
from experiments.common.resuming import Finished

NAME = "all"

flags.DEFINE_enum("profile", "quick", list(PROFILES), "; ".join(f"{name}: {what}" for name, what in PROFILES.items()))
flags.DEFINE_multi_enum("job", list(JOBS), list(JOBS), "Which; repeatable.")
flags.DEFINE_string("model", None, "A Hugging Face directory or a shipped checkpoint, where not the experiments' own.")
flags.DEFINE_string("longbench", None, "The directory of LongBench's files; without it what needs them is left out.")
flags.DEFINE_string("kvpress_python", None, "An interpreter that has kvpress; without it `peers` is left out.")
flags.DEFINE_string("output_dir", "build/all", "Where results go.")
flags.DEFINE_string("remark", None, "What the page says of the machine beside its devices: that it was busy, say.")
flags.DEFINE_bool("publish", False, "Also write the pages in docs/ and the rows that they are made of.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    given = flags.FLAGS
    directory = pathlib.Path(given.output_dir) / given.profile
    needed = {name: str(given[name].value) for name in NEEDS if given[name].value}
    jobs = [name for name in given.job if JOBS[name].needs is None or JOBS[name].needs in needed]
    for name in given.job:
        if name not in jobs:
            print(f"Left out without --{JOBS[name].needs}={NEEDS[str(JOBS[name].needs)][1]}: {name}")
    found, failed = run_jobs(jobs, given.profile, given.model, needed, directory)
    machine = ", ".join(filter(None, (page.machine(), given.remark)))
    published = page.collect(found, machine)
    page.save(published, directory / "results.json")
    own = {given.profile: published}
    page.write(own, directory)
    print(f"Pages: {directory}")
    if given.publish:
        page.publish(published, given.profile)
        print(f"Published: {page.DOCS}")
    if failed:
        print("\n".join(f"FAILED {job}: {reason}" for job, reason in failed.items()), file=sys.stderr)
        sys.exit(1)


def run_jobs(
    names: Sequence[str],
    profile: str,
    model: str | None,
    needed: Mapping[str, str],
    directory: pathlib.Path,
    run: Callable[[str, Sequence[str], pathlib.Path], list[Row]] = processes.run,
) -> tuple[dict[str, page.Done], dict[str, str]]:
    """Runs jobs that are not done.

    Args:
        model: for those that load one, where not their own.
        needed: what only a user can name, by the names of `NEEDS`.
        run: runs an experiment in a directory, and gives its rows.

    Returns:
        What was found by every job that came to its end, and the reasons of those that did not.
    """
    finished = Finished(directory / f"{NAME}.jsonl")
    found: dict[str, page.Done] = {}
    failed: dict[str, str] = {}
    lines = []
    for name in tqdm(names, desc=f"{NAME}, {profile}", unit="job"):
        job = JOBS[name]
        arguments = [*job.arguments(profile, needed)]
        if model and job.loads_model:
            arguments.append(f"--model={model}")
        command = processes.command(job.experiment, arguments)
        begin = time.perf_counter()
        try:
            rows = finished.rows(
                {"job": name, "command": command}, functools.partial(run, job.experiment, arguments, directory / name)
            )
        except processes.ExperimentFailed as error:
            failed[name] = str(error)
            tqdm.write(f"{name} failed: {error}")
            lines.append((name, "failed", "-"))
            continue
        found[name] = page.Done(command, rows)
        lines.append((name, f"{len(rows)} rows", f"{(time.perf_counter() - begin) / 60:.1f}"))
    results.print_table(f"{NAME}, profile {profile}", ("job", "", "minutes"), lines)
    return found, failed


if __name__ == "__main__":
    app.run(main)
