"""Experiments as processes of their own: flags of two cannot be defined in one process, and memory goes back at the
end."""

import json
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence

from experiments.common.results import Row, from_flat

ROOT = pathlib.Path(__file__).parents[2]


class ExperimentFailed(Exception):
    """A process that ended with an error; the text names the experiment, its log and the log's end."""


def command(experiment: str, arguments: Sequence[str]) -> str:
    """What a user would type."""
    return shlex.join(["python", "-m", f"experiments.{experiment}", *arguments])


def run(experiment: str, arguments: Sequence[str], directory: pathlib.Path) -> list[Row]:
    """Runs an experiment to its end, from where it was if it can go on, and gives its rows.

    Args:
        directory: where it writes its rows and plots; what it prints goes to NAME.log there.

    Raises:
        ExperimentFailed: when its process ends with an error, or has written no rows.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log, rows = directory / f"{experiment}.log", directory / f"{experiment}.json"
    rows.unlink(missing_ok=True)
    words = [sys.executable, "-m", f"experiments.{experiment}", *arguments, f"--output_dir={directory.resolve()}"]
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode or not rows.exists():
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
        raise ExperimentFailed(f"{experiment} ended with status {done.returncode}; {log} ends:\n{end}")
    return [from_flat(row) for row in json.loads(rows.read_text(encoding="utf-8"))]
