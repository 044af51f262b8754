"""Runs the measurements for half an hour on a GPU or TPU, the most important ones first.

    make device EXTRAS=experiments,test,cuda
    python -m experiments.device --minutes 30 --output_dir build/device

The steps are: tests and benchmarks of the kernels; latency of a model of 8 billion parameters with the full cache and
each system, at 32k and 128k tokens; and requests per second at equal memory. Each step runs in a separate process with
a time limit. It writes its output to OUTPUT_DIR/NAME.log and its rows to OUTPUT_DIR/NAME/. A step that fails or exceeds
its limit does not stop the others. `steps.jsonl` lists the finished steps; a second start runs only the others.
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
from experiments.common import ROOT, results, suites
from experiments.common.options import command
from experiments.common.resuming import Finished

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
    best = tuple(f"--policy={policy}" for policy in suites.SUITES["latency, best"].policies)
    for name, module, more in (
        ("latency_best", "latency", (*best, "--context_tokens=32768")),
        ("latency_best_long", "latency", (*best, "--context_tokens=131072")),
        ("throughput", "throughput", ("--context_tokens=32768", "--exact_rows=2")),
    ):
        flags = ("--quick", *(best if module == "latency" else ())) if quick else ("--shape=llama-3.1-8b", *more)
        yield Step(name, ("-m", f"experiments.{module}", *flags, f"--output_dir={directory / name}"))


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
