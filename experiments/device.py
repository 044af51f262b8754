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
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pallas_kernels
from experiments.common import ROOT
from experiments.common.console import print_table
from experiments.common.flags import Flags, run_command
from kvjax_models import atomic_io

FINISHED = "steps.jsonl"
MIN_SECONDS = 20.0  # a step is not started if less time remains
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
POLICIES = ("leverage_scores", "subgen_mean", "balancekv", "chelsea", "clusterkv_residual")


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of the command."""

    minutes: float = 30.0  # Time of all steps; the remaining steps run at the next start.
    output_dir: str = "build/device"  # Directory of logs and results.
    quick: bool = False  # Small steps, which need no accelerator.


class Step(NamedTuple):
    """A step.

    Attributes:
        name: name of the step.
        words: arguments of the Python interpreter.
        minutes: time limit.
    """

    name: str
    words: tuple[str, ...]
    minutes: float = 8.0


def steps(directory: pathlib.Path, quick: bool) -> Iterator[Step]:
    """Yields all steps, the most important ones first."""
    tests = ("tests/pallas_kernels/test_benchmarks.py", "-m", "not heavy") if quick else ("tests/pallas_kernels",)
    yield Step("kernels", ("-m", "pytest", *tests))
    small = ("--quick",) if quick else ()
    for path in sorted(pathlib.Path(pallas_kernels.__path__[0]).glob("*/benchmark.py")):
        name = path.parent.name
        output = f"--output={directory / 'kernels' / name}.json"
        yield Step(f"benchmark_{name}", ("-m", f"pallas_kernels.{name}.benchmark", output, *small), 3.0)
    policies = [f"--policy={policy}" for policy in (POLICIES[:1] if quick else POLICIES)]
    for name, flags in (
        ("latency", ("--budget=20%", "--context_tokens=32768")),
        ("latency_long", ("--budget=20%", "--context_tokens=131072")),
        ("throughput", ("--measure=throughput", "--context_tokens=32768", "--full_rows=2")),
    ):
        sizes = ("--layers=2", "--tokens=4", "--answer_tokens=8") if quick else ("--shape=llama-3.1-8b",)
        words = [flag.replace("32768", "512").replace("131072", "1024") if quick else flag for flag in flags]
        output_dir = f"--output_dir={directory / name}"
        yield Step(name, ("-m", "experiments.speed", *words, *sizes, *policies, output_dir))


def run_steps(requested: Sequence[Step], directory: pathlib.Path, minutes: float) -> dict[str, str]:
    """Runs the steps that are not finished.

    Args:
        requested: the steps.
        directory: directory of logs and of the list of finished steps.
        minutes: time of all steps.

    Returns:
        "done" or a message for each step.
    """
    end = time.monotonic() + 60 * minutes
    finished = read_finished(directory)
    messages = {}
    for step in requested:
        if (step.name, step.words) in finished:
            messages[step.name] = "done"
            continue
        remaining = end - time.monotonic()
        if remaining < MIN_SECONDS:
            messages[step.name] = "no time left"
            continue
        begin = time.monotonic()
        code = run_step(step, directory / f"{step.name}.log", min(60 * step.minutes, remaining))
        seconds = round(time.monotonic() - begin, 1)
        if code == 0:
            line = json.dumps({"step": step.name, "words": step.words, "seconds": seconds})
            atomic_io.append_line(directory / FINISHED, line)
        failed = f"failed ({code}): see {directory / step.name}.log"
        messages[step.name] = {0: "done", None: f"exceeded its limit after {seconds:.0f} s"}.get(code, failed)
        print(f"{step.name}: {messages[step.name]}", flush=True)
    return messages


def read_finished(directory: pathlib.Path) -> set[tuple[str, tuple[str, ...]]]:
    """Returns the names and arguments of the finished steps."""
    path = directory / FINISHED
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return {(line["step"], tuple(line["words"])) for line in lines}


def run_step(step: Step, log: pathlib.Path, seconds: float) -> int | None:
    """Runs a step.

    Args:
        step: the step.
        log: file that the output is appended to.
        seconds: time limit.

    Returns:
        The exit code; None if the step exceeded its limit.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, *step.words], cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:  # also if this process is stopped
            _end(process)


def _end(process: subprocess.Popen) -> None:
    """Stops a process, if it runs, and its children."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _stop(number: int, frame: object) -> None:
    """Raises an exception, so that the running step is stopped, too."""
    raise SystemExit(128 + number)


def main(options: Options) -> None:
    """Runs the steps and prints a table."""
    signal.signal(signal.SIGTERM, _stop)
    directory = pathlib.Path(options.output_dir).resolve()
    messages = run_steps(list(steps(directory, options.quick)), directory, options.minutes)
    print_table("device", ("step", ""), list(messages.items()))
    if set(messages.values()) != {"done"}:
        sys.exit("some steps are not finished; start the command again")


if __name__ == "__main__":
    run_command(main, Options)
