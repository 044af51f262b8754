"""Functions that run in processes of their own: memory goes back at the end, and a crash loses nothing else."""

import concurrent.futures
import multiprocessing
import os
import pathlib
import shlex
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = pathlib.Path(__file__).parents[2]


class ExperimentFailed(Exception):
    """A function that ended with an error, or its process; the text names its log and the log's end."""


def command(experiment: str, arguments: Sequence[str]) -> str:
    """What a user would type."""
    return shlex.join(["python", "-m", f"experiments.{experiment}", *arguments])


def apart(function: Callable[..., T], *arguments: Any, log: pathlib.Path | None = None) -> T:
    """What a function of a module gives in a fresh process; its own exceptions are raised here.

    Args:
        log: where what it prints goes.

    Raises:
        BrokenProcessPool: where the process ended before the function did.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, initializer=_print_to, initargs=(log,)) as pool:
        return pool.submit(function, *arguments).result()


def _print_to(log: pathlib.Path | None) -> None:
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(file, stream)


def logged(function: Callable[..., T], *arguments: Any, log: pathlib.Path) -> T:
    """The same, whatever goes wrong being one kind of error.

    Raises:
        ExperimentFailed: when the function or its process ends with an error.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        return apart(_told, function, *arguments, log=log)
    except (Exception, SystemExit) as error:
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
        raise ExperimentFailed(f"{type(error).__name__}: {error}; {log} ends:\n{end}") from error


def _told(function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except Exception:
        traceback.print_exc()
        raise
