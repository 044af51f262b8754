"""Measures kernels, decode steps and memory on a GPU machine, the most important figures first.

    PYTHONPATH=models python3 -m experiments.device --seconds 470 --output_dir OUT
    python3 -m experiments.device --quick true --output_dir OUT          # small sizes, on any machine
    python3 -m experiments.device --step decode_128k --step rows_32k --seconds 400 --output_dir OUT

It needs no network, no installation and no make; PYTHONPATH must contain `models`. Every step is a process with a time
limit. Each row is on disk at once, and a step that fails or exceeds its limit does not stop the others. OUT gets
`results.jsonl` (a row per kernel, setting and step), `log.txt` and `summary.md`. `experiments.compile_plan`
compiles the programs of all steps without a GPU.
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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.common import ROOT
from experiments.common.console import markdown_table
from experiments.common.flags import Flags, repeatable, run_command
from experiments.common.output import append_row

RESULTS, LOG, SUMMARY = "results.jsonl", "log.txt", "summary.md"
MIN_SECONDS = 10.0  # a step is not started if less time remains
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
SHAPE = ("--shape", "llama-3.1-8b", "--dtype", "bfloat16")
QUICK_SHAPE = ("--shape", "small", "--layers", "1", "--dtype", "float32")
SYSTEMS = ("auto@25%", "auto@12.5%", "chelsea@12.5%", "balancekv@12.5%", "clusterkv@12.5%")


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of the command."""

    seconds: float = 470.0  # Time of all steps.
    output_dir: pathlib.Path = pathlib.Path("build/device")  # Directory of the results.
    step: tuple[str, ...] = repeatable()  # Only these steps; repeatable.
    quick: bool = False  # Small sizes, which need no accelerator.


class Step(NamedTuple):
    """A step.

    Attributes:
        name: name of the step.
        module: the module that runs.
        flags: its flags; the file of rows is added.
        seconds: time limit.
        environment: environment variables.
    """

    name: str
    module: str
    flags: tuple[str, ...] = ()
    seconds: float = 60.0
    environment: Mapping[str, str] = {}


def speed_step(
    name: str,
    seconds: float,
    context: str,
    *policies: str,
    formats: Sequence[str] = ("none",),
    flags: Sequence[str] = (),
    **environment: str,
) -> Step:
    """Returns a step of `experiments.speed` with the sizes of a model of 8 billion parameters.

    Args:
        name: name of the step.
        seconds: time limit.
        context: tokens of the prompt.
        *policies: policies with budgets; the full cache is always measured.
        formats: formats of keys and values.
        flags: other flags.
        **environment: environment variables.
    """
    # A timed run is a block of decode steps and its compaction.
    sizes = (*SHAPE, "--tokens", "128", "--repetitions", "6", "--context_tokens", context)
    chosen = ("--policy", *policies, "--kv_dtype", *formats)
    return Step(name, "experiments.speed", (*sizes, *chosen, *flags), seconds, environment)


def steps(quick: bool = False) -> list[Step]:
    """Returns all steps, the most important ones first."""
    tests = ("-m", "gpu_kernel", "tests/pallas_kernels/test_weighted_decode.py")
    plan = [
        Step("tests", "pytest", (*tests, "-n", "12", "--timeout=60"), 90, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        Step("kernels", "pallas_kernels.benchmark_all", ("--op", "weighted_decode"), 120),
        speed_step("decode_128k", 260, "131072", *SYSTEMS),
        speed_step("rows_32k", 90, "32768", "auto@25%", flags=("--batch", "8")),
        speed_step("formats_128k", 100, "131072", "exact", formats=("int8", "int4")),
        speed_step("subgen_128k", 120, "131072", "subgen@12.5%"),
        speed_step("equal_memory", 90, "32768", "auto@25%", flags=("--batch", "4", "--equal_memory", "true")),
        speed_step("throughput", 60, "8192", "auto@25%",
                   flags=("--measure", "throughput", "--full_rows", "4", "--answer_tokens", "64")),
    ]  # fmt: skip
    return [_quick(step) for step in plan] if quick else plan


def _quick(step: Step) -> Step:
    """Returns a step with small sizes and one policy, for any machine."""
    if step.module == "pytest":
        keep = "test_the_gpu_kernel and (nothing or one or bfloat16)"
        return step._replace(flags=("-k", keep, *step.flags[2:3]))
    if step.module.startswith("pallas_kernels"):
        return step._replace(flags=("--quick", *step.flags))
    sizes = {"32768": "512", "131072": "768", "8192": "512", "64": "4", "128": "4"}
    omitted = {*SHAPE, *SYSTEMS[1:], "int4"}
    return step._replace(flags=(*QUICK_SHAPE, *(sizes.get(flag, flag) for flag in step.flags if flag not in omitted)))


def run_steps(plan: Sequence[Step], directory: pathlib.Path, seconds: float) -> None:
    """Runs steps one after the other; each one gets a row, and the summary is written after each.

    Args:
        plan: the steps.
        directory: directory of the results.
        seconds: time of all steps.
    """
    directory.mkdir(parents=True, exist_ok=True)
    results, end = directory / RESULTS, time.monotonic() + seconds
    for step in plan:
        remaining = end - time.monotonic()
        row: dict[str, Any] = {"measure": "step", "step": step.name, "seconds": 0.0, "problem": "no time left"}
        if remaining >= MIN_SECONDS:
            begin = time.monotonic()
            row["problem"] = run_step(step, directory, min(step.seconds, remaining))
            row["seconds"] = round(time.monotonic() - begin, 1)
        append_row(results, row)
        (directory / SUMMARY).write_text(summarize(read_rows(results)))
        print(f"{step.name}: {row['problem'] or 'done'} ({row['seconds']:.0f} s)", flush=True)


def run_step(step: Step, directory: pathlib.Path, seconds: float) -> str | None:
    """Runs a step.

    Args:
        step: the step.
        directory: directory of the results and the log.
        seconds: time limit.

    Returns:
        The problem, or None.
    """
    words = [sys.executable, "-m", step.module, *step.flags]
    if step.module == "experiments.speed":
        words += ["--results", str(directory / RESULTS), "--output_dir", str(ROOT / "build" / "device" / step.name)]
    elif step.module != "pytest":
        words += ["--output", str(directory / RESULTS)]
    paths = [str(ROOT), str(ROOT / "models"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / "build" / "device" / "jax"),  # the steps share programs
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        **step.environment,
    }
    with (directory / LOG).open("ab") as log:
        log.write(f"\n===== {step.name}: {' '.join(words[1:])}\n".encode())
        log.flush()
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:  # also if this process is stopped
            _end(process)
    return f"exit code {code}; see {LOG}" if code else None


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


def read_rows(results: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the rows of a file of JSON lines; without a file, none."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


# The columns of each table: the rows that it shows, and its columns.
TABLES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Limits": ("limits of the machine", ("memory_bandwidth_gb_s", "matmul_gflops", "ms_per_token_of_weights")),
    "Decode steps": ("latency", (
        "setting", "context_tokens", "rows", "ms_per_token", "promised_ms_per_token", "share_of_bandwidth",
        "ms_per_token_ratio", "compaction_ms_per_token", "cache_fraction", "launches_per_layer", "decode_bytes",
        "prefill_seconds", "compress_seconds", "problem",
    )),
    "transformers": ("transformers", ("setting", "context_tokens", "ms_per_token", "peak_bytes", "problem")),
    "Requests": ("throughput", ("setting", "context_tokens", "rows", "requests_per_second", "tokens_per_second")),
    "Kernels": ("kernel", ("op", "case", "form", "seconds", "share_of_limit", "error", "problem")),
    "Steps": ("step", ("step", "seconds", "problem")),
}  # fmt: skip


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the tables of all rows in Markdown."""
    tables = {title: table(title, rows) for title in TABLES}
    return "\n".join(f"# {title}\n\n{text}" for title, text in tables.items() if text)


def table(title: str, rows: Sequence[Mapping[str, Any]], shown: Sequence[str] | None = None) -> str:
    """Returns a table of `TABLES` in Markdown, or only its columns `shown`; nothing if no row belongs to it."""
    measure, columns = TABLES[title]
    columns = columns if shown is None else tuple(shown)
    chosen = [row for row in rows if row.get("measure", "kernel") == measure]
    if measure in ("kernel", "latency"):  # later rows replace earlier ones with the same labels
        labels = ("op", "case", "form", "setting", "context_tokens", "rows")
        chosen = list({tuple(row.get(name) for name in labels): row for row in chosen}.values())
    lines = [[_cell(row.get(name)) for name in columns] for row in chosen]
    return markdown_table(columns, lines) if lines else ""


def _cell(value: Any) -> str:
    """Returns a value, or an estimate and its interval, as a cell."""
    if isinstance(value, list) and len(value) == 3:
        return "{:.3g} [{:.3g}, {:.3g}]".format(*value)
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")


def _stop(number: int, frame: object) -> None:
    """Raises an exception, so that the running step is stopped, too."""
    raise SystemExit(128 + number)


def main(options: Options) -> None:
    """Runs the steps."""
    signal.signal(signal.SIGTERM, _stop)
    plan = steps(options.quick)
    if unknown := set(options.step) - {step.name for step in plan}:
        raise ValueError(f"--step={sorted(unknown)[0]} is not one of {', '.join(step.name for step in plan)}")
    chosen = [step for step in plan if not options.step or step.name in options.step]
    run_steps(chosen, options.output_dir.resolve(), options.seconds)


if __name__ == "__main__":
    run_command(main, Options)
