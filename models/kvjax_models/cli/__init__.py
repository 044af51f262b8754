"""The console command `kvjax` with its subcommands."""

import dataclasses
import logging as stdlib_logging
import os
import signal
import sys
import threading
from typing import Any

import simple_parsing
from absl import app, logging

import kvjax
from kvjax_models.cli import interrupts, parsing
from kvjax_models.cli.bench import Bench
from kvjax_models.cli.calibrate import Calibrate
from kvjax_models.cli.chat import Chat
from kvjax_models.cli.generate import Generate
from kvjax_models.cli.models import Download, Models
from kvjax_models.cli.policies import Policies
from kvjax_models.cli.serve import Serve

_COMMANDS = {
    "generate": Generate,
    "chat": Chat,
    "serve": Serve,
    "bench": Bench,
    "policies": Policies,
    "models": Models,
    "download": Download,
    "calibrate": Calibrate,
}
_MAX_MESSAGE = 2000  # characters of an error
_TRACEBACK = "KVJAX_TRACEBACK"  # environment variable that makes errors show their traceback


@dataclasses.dataclass(frozen=True)
class Kvjax:
    """Language models with compressed key/value caches."""

    command: Generate | Chat | Serve | Bench | Policies | Models | Download | Calibrate = simple_parsing.subparsers(
        _COMMANDS
    )


def main(options: Kvjax) -> None:
    """Runs a command. A ValueError or OSError of it is printed as one line, and the process exits with status 1.

    Args:
        options: the parsed command line.

    Raises:
        ValueError: the error of the command, if the environment variable KVJAX_TRACEBACK is set.
        OSError: likewise.
    """
    logging.set_verbosity(logging.WARNING)  # orbax logs every step of every save
    try:
        options.command.run()
    except BrokenPipeError:  # the reader has ended, such as head
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())  # for the flush at exit
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, OSError) as error:
        if os.environ.get(_TRACEBACK):
            raise
        sys.exit(f"kvjax: {_cut(str(error))}")


def _cut(message: str) -> str:
    """Returns a message without the middle if it is very long."""
    half = _MAX_MESSAGE // 2
    return message if len(message) <= _MAX_MESSAGE else f"{message[:half]} ... {message[-half:]}"


def _without_traceback(record: stdlib_logging.LogRecord) -> bool:
    """Returns whether to log a record: not if it has the traceback of an error."""
    return not record.exc_info


def _ignore(error: threading.ExceptHookArgs) -> None:
    """Ignores the error of a thread."""


def _print_in_main_thread(error: Any) -> None:
    """Prints an error that cannot be raised, such as one in a destructor, if it is of the main thread."""
    if threading.current_thread() is threading.main_thread():
        sys.__unraisablehook__(error)


def parse(argv: list[str]) -> Kvjax:
    """Parses a command line.

    Args:
        argv: the arguments, starting with the program's name.

    Returns:
        The options of the command.
    """
    parser = parsing.make_parser(Kvjax.__doc__, prog="kvjax")
    parser.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    parser.add_arguments(Kvjax, dest="options")
    return parsing.parse(parser, argv[1:]).options


def run() -> None:
    """Runs the console script.

    Errors of a save are raised in the main thread. orbax and tensorstore print their tracebacks in others, too.
    """
    if not os.environ.get(_TRACEBACK):
        logging.get_absl_logger().addFilter(_without_traceback)
        threading.excepthook = _ignore
        sys.unraisablehook = _print_in_main_thread
    interrupts.install()
    app.run(main, flags_parser=parse)
