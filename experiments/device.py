"""What is to be measured where there is a GPU or TPU for half an hour, in order of worth.

    make device EXTRAS=experiments,test,cuda
    python -m experiments.device --minutes 30 --output_dir build/device

Kernels, right and then fast; a model of 8 billion parameters, exact and each system, at 32k and 128k; requests per
second at equal memory; and in what time is left, training of the larger language model. Every step is a process of its
own with a limit of its own, its log in OUTPUT_DIR/NAME.log, and rows as they come. A step that fails or is cut off
stops no other. `steps.jsonl` says which are done: started again, the command goes on with the others, and training
where its last checkpoint stands. What was measured goes to the pages with the device's name:

    python -m experiments.pages --take build/device/latency_best/h200/results.json --profile h200
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pallas_kernels
from experiments.common import results
from experiments.common.options import command
from experiments.common.processes import ROOT
from experiments.common.resuming import Finished

JOBS = ("latency_best", "latency_best_long", "throughput")  # of `experiments.all`
LEAST = 20.0  # seconds, in which no step would get anywhere
GRACE = 10.0  # seconds to end in, when asked to


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command."""

    minutes: float = 30.0  # of all steps together; what is not done by then is left for another start
    output_dir: str = "build/device"  # where logs and results go
    quick: bool = False  # small steps, to see that all of them run; no device needed


class Step(NamedTuple):
    """A command, and how long it may take."""

    name: str
    words: tuple[str, ...]  # what stands behind `python`
    minutes: float = 8.0  # at most


def steps(directory: pathlib.Path, quick: bool) -> Iterator[Step]:
    """All steps, the most wanted first."""
    tests = ("tests/pallas_kernels/test_benchmarks.py", "-m", "not heavy") if quick else ("tests/pallas_kernels",)
    yield Step("kernels", ("-m", "pytest", *tests))
    small = ("--quick",) if quick else ()
    for path in sorted(pathlib.Path(pallas_kernels.__path__[0]).glob("*/benchmark.py")):
        name = path.parent.name
        yield Step(
            f"benchmark_{name}",
            ("-m", f"pallas_kernels.{name}.benchmark", f"--output={directory / 'kernels' / name}.json", *small),
            3.0,
        )
    profile = "quick" if quick else "h200"
    for job in JOBS:
        more = (f"--profile={profile}", f"--job={job}", f"--output_dir={directory / job}")
        yield Step(job, ("-m", "experiments.all", *more))
    preset = "tiny" if quick else "h200"
    more = (f"--preset={preset}", f"--output_dir={directory / 'training'}", "--resume")
    yield Step("training", ("-m", "experiments.training.language_model", *more), float("inf"))


def run_steps(asked: Sequence[Step], directory: pathlib.Path, minutes: float) -> dict[str, str]:
    """Runs the steps that are not done, and tells of each "done" or what became of it."""
    finished = Finished(directory / "steps.jsonl")
    end = time.monotonic() + 60 * minutes
    found = {}
    for step in asked:
        unit = {"step": step.name, "words": list(step.words)}
        if unit in finished:
            found[step.name] = "done"
            continue
        left = end - time.monotonic()
        if left < LEAST:
            found[step.name] = "no time left"
            continue
        begin = time.monotonic()
        code = run_step(step, directory / f"{step.name}.log", min(60 * step.minutes, left))
        seconds = time.monotonic() - begin
        if code == 0:
            finished.add(unit, {"seconds": round(seconds, 1)})
        failed = f"failed ({code}): see {directory / step.name}.log"
        found[step.name] = {0: "done", None: f"cut off after {seconds:.0f} s"}.get(code, failed)
        print(f"{step.name}: {found[step.name]}", flush=True)
    return found


def run_step(step: Step, log: pathlib.Path, seconds: float) -> int | None:
    """What a step's process ends with; None where it took longer and was ended."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, *step.words], cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:  # also where this process is stopped
            _end(process)


def _end(process: subprocess.Popen) -> None:
    """Ends a process, if it runs, and what it started."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _stop(number: int, frame: object) -> None:
    """Being asked to end, raises, so that the step that runs is ended, too."""
    raise SystemExit(128 + number)


def main(options: Options) -> None:
    signal.signal(signal.SIGTERM, _stop)
    directory = pathlib.Path(options.output_dir).resolve()
    found = run_steps(list(steps(directory, options.quick)), directory, options.minutes)
    results.print_table("device", ("step", ""), list(found.items()))
    if set(found.values()) != {"done"}:
        sys.exit("not all is done: start it again")


if __name__ == "__main__":
    command(main, Options)
